"""The global gradient norm: every logical element counts once, whatever the layout.

A parameter that all tp ranks hold is counted by tp rank 0, the second copy of a tied word table not
at all. Squares are added in float64 over blocks, so that the order of a layout does not show.

Neighbours: core.data_parallel.buckets (the flat gradients), core.optimizer.adam (the caller).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.comm import Group, all_reduce_
from core.data_parallel.buckets import GradBuffer
from core.data_parallel.layout import Slot

BLOCK = 4096  # elements added in the gradients' own type before float64 takes over


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum of the squares of a flat tensor as a float64 scalar; NaN and infinity come through.

    The root of each block's sum is taken and squared again in float64: 1e-8 in float32.
    """
    whole = x.numel() // BLOCK * BLOCK
    total = torch.linalg.vector_norm(x[whole:], dtype=torch.float64).square()
    if whole:
        norms = torch.linalg.vector_norm(x[:whole].view(-1, BLOCK), dim=1)
        total = total + norms.to(torch.float64).square().sum()
    return total


def counts(slot: Slot, tp_rank: int, embed_rank: int) -> bool:
    """Whether this rank counts the parameter in sums over the model."""
    if slot.shard.dim is None and tp_rank:
        return False
    return not ("embed" in slot.shard.sum_over and embed_rank)


def gradient_square_sum(
    buffers: Sequence[GradBuffer], tp: Group, pp: Group, embed: Group
) -> Tensor:
    """Sum of squares of the whole model's gradients, the same on every rank of tp and pp."""
    total = torch.zeros(1, dtype=torch.float64, device=buffers[0].grads.device)
    for buffer in buffers:
        runs = buffer.layout.runs(lambda slot: counts(slot, tp.rank, embed.rank))
        for counted, start, stop in runs:
            if counted:
                total += sum_of_squares(buffer.grads[start:stop])
    all_reduce_(total, tp, tag="optimizer.norm")
    all_reduce_(total, pp, tag="optimizer.norm")
    return total[0]


def clip_factor(norm: float, limit: float) -> float:
    """What the gradients are multiplied by so that their norm is at most `limit` (0: no limit)."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
