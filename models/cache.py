"""`KeyValueCache`: what attention has to keep of tokens already read, so that text is generated
token by token at the cost of one token each.

May import torch. Used by models.transformer (Attention extends it) and scripts/generate.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values by layer; a token at position p of its row lies at place p.

    capacity   positions there is room for
    positions  [b, s] of the tokens that are being read, set before each pass
    lengths    how many tokens of each row have been read; kept by the caller

    What padding behind a short row writes is overwritten when the row's next tokens are read, and
    is out of sight until then.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = [0] * rows
        self.positions = torch.zeros(rows, 0, dtype=torch.int64)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps keys and values [b, g, s, d] of a pass; all of the layer up to the last position,
        [b, g, n, d]."""
        b, groups, _, d = keys.shape
        if layer not in self._layers:
            shape = (b, groups, self.capacity, d)
            self._layers[layer] = (keys.new_zeros(shape), values.new_zeros(shape))
        places = self.positions[:, None, :, None].expand_as(keys)
        kept = self._layers[layer]
        for memory, new in zip(kept, (keys, values), strict=True):
            memory.scatter_(2, places, new)
        return kept[0][:, :, : self._longest], kept[1][:, :, : self._longest]

    def mask(self) -> Tensor:
        """[b, 1, s, n] bool: a token sees its row up to itself."""
        places = torch.arange(self._longest, device=self.positions.device)
        return (places <= self.positions.unsqueeze(2)).unsqueeze(1)

    def keep(self, rows: list[int]) -> None:
        """Drops the other rows."""
        self.lengths = [self.lengths[row] for row in rows]
        for layer, kept in self._layers.items():
            self._layers[layer] = tuple(memory[rows] for memory in kept)

    @property
    def _longest(self) -> int:
        return int(self.positions.max()) + 1
