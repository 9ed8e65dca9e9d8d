"""`Piece`: some elements of a logical tensor in this rank's memory, to be saved or loaded into.

May import core.shard and torch. The same pieces serve both ways: `store.save` writes the pieces a
rank owns, `Checkpoint.fill` reads into the pieces a rank needs. `shard_pieces` makes them from a
parameter, `range_pieces` from a rank's part of flat memory (a ZeRO shard of masters or moments).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from core.checkpoint.files import Deferred
from core.checkpoint.slices import (
    Box,
    flat_boxes,
    intersect,
    lengths,
    moved,
    relative,
    slices,
    volume,
)
from core.shard import Shard


@dataclass(frozen=True)
class Piece:
    """Elements `box` of the logical tensor `name` of shape `shape`; `tensor` is a view of them.

    name    e.g. "model/layers.0.attention.qkv.weight", "optimizer/exp_avg/layers.0…"
    shape   of the whole logical tensor, without padding
    box     (start, stop) per dimension; `tensor.shape` is its lengths
    tensor  to be written, it may also be made when its turn comes (files.Deferred)
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor | Deferred

    def __post_init__(self) -> None:
        inside = len(self.box) == len(self.shape) and all(
            0 <= start <= stop <= n for (start, stop), n in zip(self.box, self.shape)
        )
        if not inside:
            raise ValueError(f"{self.name}: box {self.box} is not inside the shape {self.shape}")
        if tuple(self.tensor.shape) != lengths(self.box):
            raise ValueError(
                f"{self.name}: a tensor of shape {tuple(self.tensor.shape)} cannot hold the box "
                f"{self.box}, whose lengths are {lengths(self.box)}"
            )


def shard_pieces(name: str, tensor: Tensor, shard: Shard, rank: int, size: int) -> Iterator[Piece]:
    """The real elements of tp rank `rank`'s part of a parameter (or of anything of its shape).

    tensor  the elements of shard.local_shape(size), padding included, in any shape that views as it
            (a gated MLP's two matrices are one after the other). All padding: no piece.
    """
    local, box = shard.local_slices(rank, size)[0], shard.box(rank, size)
    if volume(box) or not volume(tuple((0, n) for n in shard.shape)):
        stored = tensor.detach().view(shard.local_shape(size))
        yield Piece(name, shard.shape, box, stored[local])


def range_pieces(
    name: str, flat: Tensor, start: int, shard: Shard, rank: int, size: int
) -> Iterator[Piece]:
    """The real elements of flat memory that holds a stretch of a parameter.

    flat   [n], elements start … start + n − 1 of the row-major local parameter, padding included.
    Views of `flat`: at most 2·dims − 1 pieces, none for padding.
    """
    local_shape, box = shard.local_shape(size), shard.box(rank, size)
    origin = [first for first, _ in box]
    real = tuple((0, n) for n in lengths(box))
    done = 0
    for part in flat_boxes(local_shape, start, start + flat.numel()):
        memory = flat[done : done + volume(part)].view(lengths(part))
        done += volume(part)
        if (kept := intersect(part, real)) is not None:
            inner = relative(kept, part)
            yield Piece(name, shard.shape, moved(kept, origin), memory[slices(inner)])
