"""How many samples each step takes, and how many steps a run has: functions of consumed samples.

Pure: standard library only. `consumed_samples` alone says how far a run is, so a resumed run goes
on exactly. With `--rampup-batch-size START INCREMENT SAMPLES` the batch grows by INCREMENT in equal
parts of the first SAMPLES samples:

    k     = (global - START) / INCREMENT                            number of increments
    batch = START + INCREMENT * min(floor(consumed * k / SAMPLES), k)

All arithmetic is in integers, and a long run costs no more than its k + 1 plateaus.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSchedule:
    """The batch size as a function of consumed samples.

    micro    samples of one forward on one data parallel rank
    dp       data parallel ranks
    full     global batch size after the ramp
    ramp     (start, increment, samples), or None
    """

    micro: int
    dp: int
    full: int
    ramp: tuple[int, int, int] | None = None

    def size(self, consumed: int) -> int:
        """Samples of the step that starts after `consumed` samples.

        >>> schedule = BatchSchedule(micro=1, dp=2, full=8, ramp=(2, 2, 24))
        >>> [schedule.size(n) for n in (0, 6, 8, 16, 23, 24, 10**12)]
        [2, 2, 4, 6, 6, 8, 8]
        """
        if self.ramp is None:
            return self.full
        start, increment, samples = self.ramp
        if consumed >= samples:
            return self.full
        return start + increment * (consumed * self._increments // samples)

    def microbatches(self, consumed: int) -> int:
        """Microbatches per rank of that step."""
        return self.size(consumed) // (self.micro * self.dp)

    def sizes(self) -> Iterator[int]:
        """Every batch size of the run, ascending."""
        if self.ramp is not None:
            yield from (self.ramp[0] + self.ramp[1] * i for i in range(self._increments))
        yield self.full

    def consumed_after(self, iterations: int) -> int:
        """Samples that the first `iterations` steps take."""
        consumed = 0
        for batch, end in self._plateaus():
            steps = iterations
            if end is not None:
                steps = min(steps, max(0, -(-(end - consumed) // batch)))
            consumed += steps * batch
            iterations -= steps
        return consumed

    def iterations_within(self, samples: int, consumed: int = 0) -> int:
        """Whole steps that fit between `consumed` and `samples`: the last is never cut short."""
        iterations = 0
        for batch, end in self._plateaus():
            steps = max(0, samples - consumed) // batch
            if end is not None:
                steps = min(steps, max(0, -(-(end - consumed) // batch)))
            consumed += steps * batch
            iterations += steps
        return iterations

    @property
    def _increments(self) -> int:
        start, increment, _ = self.ramp
        return (self.full - start) // increment

    def _plateaus(self) -> Iterator[tuple[int, int | None]]:
        """(batch size, first consumed count that has a larger one), in order; the last has none."""
        if self.ramp is not None:
            start, increment, samples = self.ramp
            for i in range(self._increments):
                yield start + increment * i, -(-(i + 1) * samples // self._increments)
        yield self.full, None
