"""The microbatches of a run, step after step, the next ones made while the present step computes.

One background thread (data/prefetch.py); content and order are data/batches.py's. A step that is
not the one expected, such as the first one or one of another size, is read afresh. Imports numpy
and its neighbours in data/ only.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator

import numpy as np

from data.batches import microbatches
from data.prefetch import prefetch

Microbatch = dict[str, np.ndarray]


class ReadAhead:
    """Called with (samples consumed, global batch) it yields that step's microbatches.

    dataset            dataset[n] is a dict of arrays
    micro_batch        samples of a microbatch
    dp_rank, dp_size   which of them are this data-parallel rank's
    depth              microbatches that are made ahead; 0: none, and no thread
    names              arrays that are looked at; None: all
    """

    def __init__(
        self,
        dataset,
        micro_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        depth: int = 0,
        names: Collection[str] | None = None,
    ) -> None:
        self._dataset, self._place = dataset, (micro_batch, dp_rank, dp_size)
        self._depth, self._names = depth, names
        self._expected: tuple[int, int] | None = None
        self._items: Generator[Microbatch] | None = None

    def __call__(self, consumed: int, global_batch: int) -> Iterator[Microbatch]:
        if not self._depth:
            yield from self._step(consumed, global_batch)
            return
        if (consumed, global_batch) != self._expected:
            self.close()
            self._items = prefetch(self._steps(consumed, global_batch), self._depth)
        self._expected = None
        micro_batch, _, dp_size = self._place
        for left in reversed(range(global_batch // (micro_batch * dp_size))):
            item = next(self._items)
            if not left:  # before the last one is handed out: nobody may ask for another
                self._expected = (consumed + global_batch, global_batch)
            yield item

    def close(self) -> None:
        """Stops the thread."""
        if self._items is not None:
            self._items.close()

    def _step(self, consumed: int, global_batch: int) -> Iterator[Microbatch]:
        place = (*self._place, self._names)
        return microbatches(self._dataset, consumed, global_batch, *place)

    def _steps(self, consumed: int, global_batch: int) -> Iterator[Microbatch]:
        while True:
            yield from self._step(consumed, global_batch)
            consumed += global_batch
