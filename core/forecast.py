"""Will the rest of a run fit into its time? Said once its pace is known.

Standard library only. core/run.py has a `Forecast` told of every step; when a job ends is known to
core/launch. A step's time is the mean over this run but for its first step, with the evaluations
and saves between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from core.progress import clock_text

STEPS = 10  # make a pace,
FEW_STEPS, SECONDS = 2, 60.0  # or so many in so long
CHANGE = 0.1  # of what was left is worth another line


class Forecast:
    """Told the number of every step before it begins; says a line when there is something new.

    at_step  told as well
    last     the iteration at which the run stops by itself
    ends     time.time() at which it has to stop, and why; None where nothing makes it
    then     by such a why, what happens then
    """

    def __init__(
        self,
        say: Callable[[str], None],
        at_step: Callable[[int], None] = lambda step: None,
        *,
        last: int,
        ends: Callable[[], tuple[float, str] | None],
        then: Callable[[str], str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._say, self._at_step, self._clock = say, at_step, clock
        self._last, self._ends, self._then = last, ends, then
        self._calls = 0
        self._began, self._from = 0.0, 0
        self._due = STEPS
        self._told: tuple[bool, float, float] | None = None  # fits, iteration reached, steps left

    def at_step(self, step: int) -> None:
        self._at_step(step)
        self._calls += 1
        now = self._clock()
        if self._calls <= 2:  # the first step makes buffers and starts readers
            self._began, self._from = now, step
            return
        made, seconds = step - self._from, now - self._began
        first = self._told is None and made >= FEW_STEPS and seconds >= SECONDS
        if (made >= self._due or first) and (end := self._ends()) is not None:
            self._due = 2 * max(made, STEPS)
            self._tell(step, seconds / made, now, *end)

    def _tell(self, step: int, pace: float, now: float, end: float, why: str) -> None:
        left, done = max(0.0, end - now), step - 1
        within = left / max(pace, 1e-9)
        fits = done + within >= self._last
        if self._told is not None:
            before, reached, rest = self._told
            if before == fits and (fits or abs(done + within - reached) <= CHANGE * rest):
                return
        self._told = fits, done + within, within
        head = f"at {pace:.3g} s a step "
        if fits:
            rest = self._last - done
            took = clock_text(rest * pace)
            self._say(f"{head}the remaining {rest:,} iterations take {took}; {why} leaves "
                      f"{clock_text(left)}")  # fmt: skip
        else:
            self._say(f"{head}{why} ends this run at about iteration {done + int(within):,} of "
                      f"{self._last:,}: {self._then(why)}")  # fmt: skip
