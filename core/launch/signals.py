"""Asked to stop: signals and the job's time limit set a flag, the loops poll it. No torch needed.

SLURM sends TERM at a time limit, on scancel and on requeue, and USR1 (--signal=USR1@300) before
that; Ctrl-C is INT. Any one rank's flag is enough: core.train puts it into a collective that
happens anyway, so that all ranks stop after the same step. A second Ctrl-C is immediate.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import FrameType

from core.launch.slurm import parse_time_left

# A terminal sends INT to the --nproc parent and to its ranks, and the parent passes it on: what
# comes within this many seconds is one and the same key press. On a machine that is busy, or has
# stood still, the parent may be later: a rank's second INT is its echo, the third a second press.
SAME_PRESS = 1.0
# Seconds from TERM to KILL by SLURM (KillWait) and torchrun, unless told otherwise, and how long
# before that a rank that is not done says where it is and leaves.
KILL_WAIT, SPARE = 30.0, 5.0
SITE_WAIT = "PHALANX_KILL_WAIT"  # the site's KillWait, if the batch script has asked
# Stop when the job's end is nearer than this and twice the longest step, saves included, and the
# longest write in the background: the present one may have to end before the last one begins.
END_MARGIN = 15.0
# What a batch script tells the ranks of it: when its signal comes (seconds before the limit; SLURM
# may send it a minute earlier), and what follows a run that was stopped.
EARLY_SIGNAL, AFTERWARDS = "PHALANX_EARLY_SIGNAL", "PHALANX_AFTERWARDS"
FOLLOWS = {"requeue": "the job is requeued", "chain": "the next job of the chain goes on"}
# SIGUSR1 that came before there was a StopSignal: SLURM may send it while torch is imported.
EARLY: list[int] = []


def listen_early() -> None:
    """From now on SIGUSR1 is remembered, and does not end this process; in the main thread only."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda number, frame: EARLY.append(number))


class StopSignal:
    """`requested` is the first reason to stop once there is one, else None.

    names   signals that ask for a stop
    end     time.time() at which the job ends whatever happens, or None
    grace   seconds after TERM at which this process gives up, or None for never
    echoed  a parent passes on what this process may have got from the terminal already
    """

    def __init__(
        self,
        names: Iterable[str] = ("SIGTERM", "SIGUSR1", "SIGINT"),
        *,
        end: float | None = None,
        grace: float | None = None,
        give_up: Callable[[int], None] = os._exit,
        echoed: bool = False,
    ) -> None:
        self.requested: str | None = None
        self.since: float | None = None  # time.monotonic() of the request
        self.end, self.grace, self._give_up = end, grace, give_up
        self._echoed, self._interrupts = echoed, 0
        self._numbers = [signal.Signals[name] for name in dict.fromkeys(names)]
        self._before: dict[int, object] = {}
        self._timer: threading.Timer | None = None

    def install(self) -> StopSignal:
        """Starts to listen; in the main thread only."""
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._on_signal)
        for number in EARLY:
            self.request(signal.Signals(number).name)
        EARLY.clear()
        return self

    def remove(self) -> None:
        """Puts the handlers back that were there before, and stays alive."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._timer:
            self._timer.cancel()

    def poll(self, longest: float = 0.0) -> str | None:
        """The reason to stop, if there is one. `longest`: seconds of a step and what is saved in it
        or beside it."""
        latest = self.latest(longest)
        if latest is not None and time.time() > latest:
            self.request("the job's time limit is near")
        return self.requested

    def latest(self, longest: float = 0.0) -> float | None:
        """time.time() after which `poll` finds the limit near, whatever signals come; or None."""
        return None if self.end is None else self.end - END_MARGIN - 2 * longest

    def request(self, reason: str) -> None:
        if self.requested is None:
            self.requested, self.since = reason, time.monotonic()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self.since is not None and time.monotonic() - self.since > SAME_PRESS
        self._interrupts += number == signal.SIGINT
        echo = self._echoed and self._interrupts == 2 and self.requested == "SIGINT"
        if number == signal.SIGINT and again and not echo:
            raise KeyboardInterrupt
        if number == signal.SIGTERM and self.grace is not None and self._timer is None:
            self._timer = threading.Timer(self.grace, self._leave_by_force)
            self._timer.daemon = True
            self._timer.start()
        self.request(signal.Signals(number).name)

    def _leave_by_force(self) -> None:
        print(
            f"not done {self.grace:g} s after SIGTERM, and KILL is near; every thread is here:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(file=sys.__stderr__)
        self._give_up(1)


def grace_after_term(environ: Mapping[str, str]) -> float | None:
    """How long this process may take after TERM before its launcher kills it; None: for ever."""
    if "TORCHELASTIC_RUN_ID" in environ:
        wait = float(environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", KILL_WAIT))
        return max(wait - SPARE, wait / 2)  # a short job's may be shorter than SPARE
    if "SLURM_JOB_ID" not in environ:
        return None
    told = environ.get(SITE_WAIT, "")
    return max(SPARE, (float(told) if told.isdecimal() else KILL_WAIT) - SPARE)


def early_signal(environ: Mapping[str, str]) -> float:
    """Seconds before its limit at which the job is sent a signal, as far as its script has said."""
    told = environ.get(EARLY_SIGNAL, "")
    return float(told) if told.isdecimal() else 0.0


def job_end(environ: Mapping[str, str], rank: int) -> float | None:
    """time.time() at which SLURM ends this job, or None.

    Newer SLURM says so in the environment; for older ones squeue is asked, which may be absent.
    Rank 0 alone knows: any one rank stops a run, and of many clocks one is always fast.
    """
    if rank != 0 or "SLURM_JOB_ID" not in environ:
        return None
    if (end := environ.get("SLURM_JOB_END_TIME", "")).isdecimal():
        return float(end)
    command = ["squeue", "--noheader", "--jobs", environ["SLURM_JOB_ID"], "--format", "%L"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    left = parse_time_left(answer.stdout.strip())
    return None if left is None else time.time() + left
