"""`StepClock`: where the time of a step goes, each moment counted once.

Pure: standard library only. Parts that are timed may lie inside each other (a wait for a collective
inside a backward); the inner one then takes its time away from the outer one, so that all parts and
the rest add up to the whole. One clock hangs on a rank's ledger while --timing-log-level asks for
it: core.comm times waits by axis, the executor forward, backward and data, core.train the rest.

    spent on          seconds of
    forward, backward computing them (recomputation is part of backward)
    tp, dp, pp        waiting for ranks of that axis: communication that nothing hides, and the wait
                      for a rank that comes later
    data              getting microbatches
    optimizer         norm, clip and update
    checkpoint        saving, as far as training waits for it; between steps
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COMPUTE = ("forward", "backward")
PARTS = (*COMPUTE, "tp", "dp", "pp", "optimizer", "data")
AXES = {"dp_cp": "dp", "embed": "pp"}  # groups that lie on another axis' wires


class StepClock:
    """synchronize: waits until the device has done what it was given, before the clock is read.

    With it no part overlaps another, so a timed step on a GPU is longer than an untimed one.
    """

    def __init__(
        self,
        synchronize: Callable[[], object] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._synchronize, self._now = synchronize, now
        self._spent: dict[str, float] = {}
        self._inside: list[str] = []
        self._since = 0.0

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        self._charge()
        self._inside.append(part)
        try:
            yield
        finally:
            self._charge()
            self._inside.pop()

    def _charge(self) -> None:
        """What has passed belongs to the innermost part."""
        if self._synchronize is not None:
            self._synchronize()
        now = self._now()
        if self._inside:
            part = self._inside[-1]
            self._spent[part] = self._spent.get(part, 0.0) + now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """Seconds by part since the last time."""
        spent, self._spent = self._spent, {}
        return spent


def breakdown(spent: dict[str, float], step: float, *, fine: bool) -> dict[str, float]:
    """Fields of a metrics row, in seconds, that add up to `step`: time_<part>_s for compute (or,
    `fine`, forward and backward), each axis, optimizer, data, and what is left, time_other_s.

    >>> breakdown({"forward": 1.0, "backward": 2.0, "tp": 0.5}, 4.0, fine=False)["time_other_s"]
    0.5
    """
    times = {part: spent.get(part, 0.0) for part in PARTS}
    rest = step - sum(times.values())
    if not fine:
        times = {"compute": sum(times.pop(part) for part in COMPUTE), **times}
    return {f"time_{part}_s": value for part, value in {**times, "other": rest}.items()}


def breakdown_line(sums: dict[str, float], iterations: int) -> str:
    """The fields of several rows, added up, as a line: means in milliseconds."""
    parts = {
        name.removeprefix("time_").removesuffix("_s"): 1000 * total / iterations
        for name, total in sums.items()
    }
    saving = parts.pop("checkpoint")
    line = " time per iteration (ms), rank 0 | "
    line += " | ".join(f"{name}: {value:.1f}" for name, value in parts.items())
    line += f" | sum: {sum(parts.values()):.1f}"
    return line + (f" | beside it, checkpoints: {saving:.1f} |" if saving else " |")
