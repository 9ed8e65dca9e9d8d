"""`Feed`: microbatches from the one rank that reads to all tp ranks that need them.

core knows no dataset: it is given a source that yields a step's microbatches as numpy arrays. Only
tp rank 0 has one; the others receive through `broadcast_data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from core.comm import Group
from core.tensor_parallel import broadcast_data

Source = Callable[[int, int], Iterator[Mapping[str, np.ndarray]]]


class Feed:
    """Calls its source for a step and spreads each microbatch over tp.

    source    (consumed samples, global batch) -> this data-parallel rank's microbatches in order;
              None on ranks that do not read
    integers  names of int64 arrays      floats  names of float32 arrays
    """

    def __init__(
        self,
        source: Source | None,
        tp: Group,
        device: torch.device,
        *,
        integers: Sequence[str],
        floats: Sequence[str],
    ) -> None:
        if (source is None) != (tp.rank > 0):
            raise ValueError(f"tp rank {tp.rank}: rank 0, and no other, has a source")
        self.source, self.tp, self.device = source, tp, device
        self.kinds = ((tuple(integers), torch.int64), (tuple(floats), torch.float32))

    def step(
        self, consumed: int, global_batch: int, microbatches: int
    ) -> Iterator[dict[str, Tensor]]:
        """The microbatches of the step that starts after `consumed` samples."""
        rows = self.source(consumed, global_batch) if self.source else None
        for _ in range(microbatches):
            row = None
            if rows is not None:
                row = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in next(rows).items()}
            yield self._spread(row)

    def _spread(self, row: dict[str, Tensor] | None) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = {}
        for keys, dtype in self.kinds:
            data = {k: self._moved(row[k], dtype) for k in keys} if row is not None else None
            if self.tp.size > 1:
                data = broadcast_data(keys, data, dtype, tp_group=self.tp)
            batch.update(data)
        return batch

    def _moved(self, array: Tensor, dtype: torch.dtype) -> Tensor:
        """On the device; to a GPU from pinned memory, behind what it computes."""
        array = array.to(dtype)
        if self.device.type != "cpu":
            array = array.pin_memory()
        return array.to(self.device, non_blocking=True)
