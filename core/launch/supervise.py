"""The --nproc parent: starts N ranks of this program on this machine and outlives them. No torch.

Rank 0 keeps the terminal; what the others print comes out on stderr behind `[rank 3]`. The first
rank that fails ends the run within seconds, and its failure is the last thing on stderr.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from core.launch.failure import Failure, describe_exit, read_failures
from core.launch.hang import done_in_looks
from core.launch.place import PARENT, LaunchError, Place

LISTENER = "PHALANX_LISTENER"  # rank 0: the file descriptor of a socket that listens on MASTER_PORT
RECORDS = "PHALANX_RECORDS"  # every rank: the folder for failure records
# Exit codes that are no failure: done, and stopped by a signal or a time limit with all saved.
STOPPED = 85
GOOD_EXITS = (0, STOPPED)
# Seconds: for exits that belong together to be seen; from TERM to KILL; for the last output.
SETTLE, TERM_WAIT, DRAIN = 0.3, 5.0, 2.0
LOOK = 0.02  # seconds between two looks
LAST_WORDS = 60  # lines kept of each rank
FORWARDED = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")


@dataclass
class Child:
    """One rank's process; `code` and `ended` (time.time()) are set when it is over."""

    rank: int
    process: subprocess.Popen
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_WORDS))
    code: int | None = None
    ended: float = 0.0

    @property
    def bad(self) -> bool:
        return self.code is not None and self.code not in GOOD_EXITS


def supervise(place: Place, argv: Sequence[str], program: Sequence[str] | None = None) -> int:
    """Runs `program` with `argv` on `place.children` ranks and returns the run's exit code.

    `program` defaults to how this very process was started (interpreter, its options, script).
    The code is that of the rank that failed first (128 + n for signal n), else 85 if a rank was
    stopped, else 0.
    """
    nproc = place.children if place.children > 0 else _count_gpus()
    command = [*(program or _this_program()), *argv]
    children: list[Child] = []
    early: list[int] = []
    with tempfile.TemporaryDirectory(prefix="phalanx-") as records:
        with _forward_signals(children, early) as received:
            children += _start(nproc, command, records)
            for number in early:
                _signal_all(children, number)
            exits: queue.Queue[Child] = queue.Queue()
            pumps = [threading.Thread(target=_pump, args=(one,), daemon=True) for one in children]
            waits = [
                threading.Thread(target=_wait, args=(one, exits), daemon=True) for one in children
            ]
            for thread in (*pumps, *waits):
                thread.start()
            ended_by_us = _outlive(children, exits, records)
        # the last output; not for ever, since a rank's own child may keep a pipe open
        done_in_looks(lambda: not any(pump.is_alive() for pump in pumps), DRAIN, LOOK)
        return _conclude(children, ended_by_us, read_failures(records), received)


# ---- starting -------------------------------------------------------------------------------


def _this_program() -> list[str]:
    """[python, -options…, script], or -m module: what was typed but for the program's arguments."""
    typed = sys.orig_argv
    return [sys.executable, *typed[1 : len(typed) - len(sys.argv) + 1]]


def _count_gpus() -> int:
    import torch

    if not torch.cuda.is_available():
        raise LaunchError("--nproc gpu: no GPU is visible here; give the number of processes")
    return torch.cuda.device_count()


def _start(nproc: int, command: list[str], records: str) -> list[Child]:
    """Starts every rank. Rank 0 inherits a socket that listens already, so no port can be lost."""
    with socket.create_server(("127.0.0.1", 0), backlog=max(128, 4 * nproc)) as listener:
        shared = {
            **_defaults(nproc, os.environ),
            PARENT: str(os.getpid()),
            RECORDS: records,
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
        }
        shared.pop(LISTENER, None)
        children = []
        for rank in range(nproc):
            environ = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            inherited = ()
            if rank > 0:
                environ.setdefault("PYTHONUNBUFFERED", "1")  # it writes to a pipe of ours
            else:
                environ[LISTENER] = str(listener.fileno())
                inherited = (listener.fileno(),)
            children.append(Child(rank, _spawn(command, environ, rank, inherited)))
        return children


def _defaults(nproc: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with threads divided among the ranks, unless the user has divided them."""
    mine = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = len(mine(0)) if mine else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // nproc)), **environ}


def _spawn(
    command: list[str], environ: Mapping[str, str], rank: int, inherited: tuple[int, ...]
) -> subprocess.Popen:
    """Rank 0 owns stdin and stdout, and the terminal if stderr is one; the rest goes to _pump."""
    ours = rank == 0
    return subprocess.Popen(
        command,
        env=dict(environ),
        pass_fds=inherited,
        stdin=None if ours else subprocess.DEVNULL,
        stdout=None if ours else subprocess.PIPE,
        stderr=(None if sys.stderr.isatty() else subprocess.PIPE) if ours else subprocess.STDOUT,
    )


# ---- watching -------------------------------------------------------------------------------


def _pump(child: Child) -> None:
    """Copies a rank's output, line by line, to our stderr."""
    stream = child.process.stderr if child.rank == 0 else child.process.stdout
    if stream is None:
        return
    prefix = b"" if child.rank == 0 else b"[rank %d] " % child.rank
    with stream:
        for line in stream:
            child.tail.append(line.decode(errors="replace"))
            with suppress(OSError):  # nobody reads us, but the rank must not block on a full pipe
                os.write(2, prefix + line)


def _wait(child: Child, exits: queue.Queue[Child]) -> None:
    """A thread for each rank, so that the order and time of exits are known to a millisecond."""
    child.code = child.process.wait()
    child.ended = time.time()
    exits.put(child)


def _signal_all(children: list[Child], number: int) -> None:
    for child in children:
        if child.code is None:
            child.process.send_signal(number)


@contextmanager
def _forward_signals(children: list[Child], early: list[int]) -> Iterator[list[int]]:
    """Passes signals on to the ranks, which save and leave; the third Ctrl-C kills them.

    A scheduler may well send its own three times while they save. What the parent was started to
    ignore (nohup) stays ignored. What comes before there is any rank is noted in `early`.
    """
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        if not children:
            early.append(number)
        enough = received.count(signal.SIGINT) >= 3
        _signal_all(children, signal.SIGKILL if enough else number)

    heard = [name for name in FORWARDED if name != "SIGHUP" or not _ignores(signal.SIGHUP)]
    before = {name: signal.signal(getattr(signal, name), forward) for name in heard}
    try:
        yield received
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def _ignores(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def _outlive(children: list[Child], exits: queue.Queue[Child], records: str) -> set[int]:
    """Returns when every rank is gone: the ranks that we ended ourselves after one had failed."""
    for _ in children:
        child = exits.get()
        if child.bad:
            break
    else:
        return set()
    time.sleep(SETTLE)
    # Ranks that lost this one wait to hear that it is to blame; it cannot tell them any more.
    if not any(failure.rank == child.rank for failure in read_failures(records)):
        with suppress(OSError):  # what it printed may not all have come through yet: a guess
            replace(_failure_of(child), guess=True).write(records)
    alive = [other for other in children if other.code is None]
    for sign, patience in ((signal.SIGTERM, TERM_WAIT), (signal.SIGKILL, 60.0)):
        _signal_all(alive, sign)
        done_in_looks(lambda: all(other.code is not None for other in alive), patience, LOOK)
    return {other.rank for other in alive}


# ---- concluding -----------------------------------------------------------------------------


def _failure_of(child: Child) -> Failure:
    """What can be said of a rank that left no record: its exit code, and a traceback it printed."""
    lines = list(child.tail)
    begins = "Traceback " if child.code > 0 else "Fatal Python error"  # the latter: a segfault
    starts = [i for i, line in enumerate(lines) if line.startswith(begins)]
    return Failure(
        child.rank,
        describe_exit(child.code),
        pid=child.process.pid,
        time=child.ended,
        traceback="".join(lines[starts[-1] :]) if starts else "",
    )


def _conclude(
    children: list[Child], ended_by_us: set[int], records: list[Failure], received: list[int]
) -> int:
    """Prints the earliest failure as the last thing on stderr and returns the exit code."""
    bad = [child for child in children if child.bad]
    if not bad:
        return max(child.code for child in children)
    known = {failure.rank: failure for failure in records}
    causes = []
    for child in bad:
        found = known.get(child.rank)
        if child.rank not in ended_by_us and (found is None or found.guess):
            found = _failure_of(child)
        if found is not None:
            causes.append(found)
    first = min(causes, key=lambda failure: (failure.victim, failure.time))
    child = children[first.rank]
    if received and child.code in (-received[0], 128 + received[0]):
        return 128 + received[0]  # asked to stop before it could do so in good order
    if child.code == 2 and not first.traceback:
        return 2  # bad input: the rank has said what is wrong, and nothing broke
    print(first, file=sys.stderr, flush=True)
    return child.code if child.code > 0 else 128 - child.code
