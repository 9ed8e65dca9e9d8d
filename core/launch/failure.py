"""What is written down when a rank fails, so that the cause is found and said last. No torch.

A rank that fails writes a `Failure` to `failure.rank3.json` and, through core/launch/watch.py, into
the store; the others print one line and leave. Nobody enters a collective or destroys a group on
the way out: `os._exit`. The --nproc parent (core/launch/supervise.py) and scripts/report.py read
the files.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from core.launch.place import LaunchError
from core.launch.status import Status

# Seconds a rank that lost a connection waits to hear who is to blame: rank 0 needs a beat to notice
# the question and some more to be sure that a rank does not answer it.
BLAME_WAIT = 5.0
# Seconds a victim waits before it leaves, so that launchers see the cause's exit first.
YIELD = 0.5
# What torch says, under gloo, NCCL and its store, when it is another process that went away.
LOST_PEER = re.compile(
    r"[Cc]onnection (was likely )?(closed|reset|refused)|Broken pipe|remote process exited|"
    r"NCCL communicator was aborted|Socket Timeout|recvValue failed|sendBytes failed|"
    r"Timed out waiting \d+ms for \w+ operation|Application timeout caused pair closure"
)


@dataclass(frozen=True)
class Failure:
    """Why one rank ended.

    victim   it lost a peer, or failed after another rank had: that one is the cause
    refusal  nothing broke: the input was bad, and the rank has said so
    stacks   of a hang: the folder into which every rank still writes its stacks, "" for stderr
    guess    others' words for a death that they only saw: whoever started that rank knows its exit
    """

    rank: int
    cause: str
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    time: float = field(default_factory=time.time)
    step: int | None = None
    traceback: str = ""
    victim: bool = False
    refusal: bool = False
    stacks: str | None = None
    guess: bool = False

    @property
    def headline(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"rank {self.rank} ({self.host}, pid {self.pid}{step}) failed: {self.cause}"

    def __str__(self) -> str:
        """The traceback under its rank, then the one line that says it all."""
        head = self.headline.removesuffix(self.cause).rstrip()
        return f"{head}\n{self.traceback}{self.headline}" if self.traceback else self.headline

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        return cls(**json.loads(text))

    def write(self, folder: str | Path, *, again: bool = False) -> None:
        """Into `folder`/failure.rankN.json, whole or not at all; a rank's first record stays,
        unless it is told `again`. The folder is made: a long run's may have been cleaned away."""
        path = Path(folder) / f"failure.rank{self.rank}.json"
        if path.exists() and not again:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(self.to_json())
        os.replace(temporary, path)


def read_failures(folder: str | Path) -> list[Failure]:
    """Every record in a folder, causes before victims, then by time."""
    paths = Path(folder).glob("failure.rank*.json")
    found = [Failure.from_json(path.read_text()) for path in paths]
    return sorted(found, key=lambda failure: (failure.victim, failure.time))


def describe_exit(code: int) -> str:
    """A return code in words; negative means a signal, as in subprocess.

    >>> describe_exit(-9)
    'killed by signal 9 (SIGKILL)'
    """
    if code >= 0:
        return f"left with exit code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"


class Others(Protocol):
    """The way to the other ranks: core/launch/watch.py's Watch."""

    def announce(self, failure: Failure) -> bool:
        """Writes the failure where all ranks see it; False if another one came first."""

    def ask_around(self) -> None:
        """Makes every rank say where it is, so that a dead one is found."""

    def linger(self) -> None:
        """Waits a moment for the others to have read, if this process serves the store."""


class Reporter:
    """This rank's last words: a sys.excepthook.

    folders       where records go; the first one is where others' are looked for, often where a
                  parent on this machine writes, seldom where it may be a cluster's file system
    parent_tells  the --nproc parent will print the traceback from the record
    alone         a single process: it just prints its traceback, as Python does
    others        the way to the other ranks, once there is one
    step          set by the training loop, for the record
    status_dir    gets a status.json that says so when this rank fails
    """

    def __init__(
        self,
        rank: int,
        folders: Sequence[str | Path] = (),
        *,
        parent_tells: bool = False,
        alone: bool = False,
    ) -> None:
        self.rank = rank
        self.folders = list(folders)
        self.parent_tells = parent_tells
        self.alone = alone
        self.others: Others | None = None
        self.step: int | None = None
        self.status_dir: str | Path | None = None
        self._leaving = threading.Lock()  # the first thread that ends this process keeps it

    def install(self) -> None:
        sys.excepthook = self.on_exception

    def on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Records, prints and ends the process; returns only in a single process."""
        if isinstance(error, LaunchError):
            self.refuse(error)
        if isinstance(error, KeyboardInterrupt):
            leave(128 + signal.SIGINT)
        text = "".join(traceback.format_exception(kind, error, trace))
        cause = traceback.format_exception_only(kind, error)[-1].strip().splitlines()[0]
        failure = Failure(self.rank, cause, step=self.step, traceback=text)
        if self.alone:
            self.record(failure)
            sys.__excepthook__(kind, error, trace)
            return
        if lost := LOST_PEER.search(str(error)):
            if self.others:
                self.others.ask_around()
            self.let_the_cause_speak()
            cause = f"lost contact with another rank ({lost.group()})"
            failure = replace(failure, victim=True, cause=cause)
        _tell_torchrun(error)
        self.fail(failure)

    def fail(self, failure: Failure, code: int = 1) -> None:
        """Makes `failure` known everywhere and ends this process."""
        self._leaving.acquire()
        self.record(failure)
        first = self.others is None or self.others.announce(failure)
        if not first:  # whatever the clocks of two nodes say
            self.record(replace(failure, victim=True), again=True)
        text = failure.headline if self.parent_tells or not first else failure
        print(text, file=sys.stderr, flush=True)
        if self.others:
            self.others.linger()
        leave(code)

    def refuse(self, error: LaunchError) -> None:
        """Ends this process with exit code 2; of several ranks with bad input one prints it."""
        self._leaving.acquire()
        refusal = Failure(self.rank, str(error), refusal=True)
        if self.others and error.mine:
            error.mine = self.others.announce(refusal)
            self.others.linger()
        refuse(error)

    @property
    def lasting_folders(self) -> list[str | Path]:
        """Those that are still there after the run; the --nproc parent takes its own away."""
        return self.folders[1:] if self.parent_tells else self.folders

    @property
    def is_leaving(self) -> bool:
        return self._leaving.locked()

    def yield_to(self, first: Failure) -> None:
        """Ends this process with one line, since another one is the cause."""
        self._leaving.acquire()
        if first.refusal:
            leave(2)
        self.record(Failure(self.rank, f"stopped: {first.headline}", step=self.step, victim=True))
        print(f"rank {self.rank} stopped: {first.headline}", file=sys.stderr, flush=True)
        time.sleep(YIELD)
        leave(1)

    def record(self, failure: Failure, *, again: bool = False) -> None:
        for folder in self.folders:
            try:
                failure.write(folder, again=again)
            except OSError as error:
                print(f"the failure could not be recorded: {error}", file=sys.stderr)
        if self.status_dir is not None and not failure.victim:
            with suppress(OSError):
                facts = {"reason": failure.headline, "step": failure.step}
                Status.here("failed", os.environ, **facts).write(self.status_dir)

    def let_the_cause_speak(self) -> None:
        """Gives the rank that is to blame, or the parent that saw it die, time to say so.

        Returns after BLAME_WAIT without news, by looks and not by the clock: the time in which a
        whole machine stood still gave nobody a chance to speak. News in the folder ends the process
        here, news through the store from the watching thread.
        """
        pause = 0.1 if self.parent_tells else 1.0
        for _ in range(round(BLAME_WAIT / pause)):
            for folder in self.folders[:1]:
                first = next(iter(read_failures(folder)), None)
                if first is not None and not first.victim and first.rank != self.rank:
                    self.yield_to(first)
            time.sleep(pause)


def refuse(error: LaunchError) -> None:
    """Prints why the run cannot start and ends the process with exit code 2; never returns."""
    if error.mine:
        print(f"error: {error}", file=sys.stderr, flush=True)
    leave(2)


def leave(code: int) -> None:
    """Ends the process at once: destructors of process groups can wait for peers that are gone."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # closed, or nobody reads it
    os._exit(code)


def _tell_torchrun(error: BaseException) -> None:
    """torchrun prints the traceback it finds in the file it names, else a pointer to its manual."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error  # torchrun's handler reads the exception that is being handled
    except BaseException:
        get_error_handler().record_exception(error)
