"""Asked to stop: signals set a flag, the training loop polls it. No torch needed.

SLURM sends TERM at a time limit, on scancel and on requeue, and USR1 (--signal=USR1@300) before
that; Ctrl-C is INT. Any one rank's flag is enough: core.train puts it into a collective that
happens anyway, so that all ranks stop after the same step. A second Ctrl-C is immediate.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from types import FrameType

# A terminal sends INT to the --nproc parent and to its ranks, and the parent passes it on: what
# comes within this many seconds is one and the same key press.
SAME_PRESS = 1.0


class StopSignal:
    """`requested` is the first signal's name once one has come, else None."""

    def __init__(self, names: Iterable[str] = ("SIGTERM", "SIGUSR1", "SIGINT")) -> None:
        self.requested: str | None = None
        self.since: float | None = None  # time.monotonic() of the request
        self._numbers = [signal.Signals[name] for name in dict.fromkeys(names)]
        self._before: dict[int, object] = {}

    def install(self) -> StopSignal:
        """Starts to listen; in the main thread only."""
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def remove(self) -> None:
        """Puts the handlers back that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def request(self, reason: str) -> None:
        """Asks for a stop from inside, e.g. because the time limit is near."""
        if self.requested is None:
            self.requested, self.since = reason, time.monotonic()

    def __bool__(self) -> bool:
        return self.requested is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self.since is not None and time.monotonic() - self.since > SAME_PRESS
        if number == signal.SIGINT and again:
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)
