"""Sums over the model: the gradient norm, zeros, norms by layer. Every logical element counts once.

A parameter that all tp ranks hold is counted by tp rank 0, the second copy of a tied word table not
at all; where dp ranks keep parts, each counts its own. Squares are added in float64 over blocks of
a bucket, so that neither the layout nor the sharding shows.

Neighbours: core.data_parallel (the flat gradients), core.optimizer.adam (the caller).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from core.comm import Group, all_reduce_, gather_objects
from core.data_parallel.buckets import BucketMemory
from core.data_parallel.ddp import DataParallel
from core.data_parallel.layout import BLOCK, Slot

Measure = Callable[[Tensor, int], Tensor]  # (stretch of a bucket, where it begins) -> scalar


def sum_of_squares(x: Tensor, offset: int = 0) -> Tensor:
    """Sum of the squares of a flat tensor as a float64 scalar; NaN and infinity come through.

    x is a stretch of a bucket that begins at element `offset`: blocks are the bucket's, so that
    cutting a stretch between two of them changes nothing. The root of each block's sum is taken and
    squared again in float64: 1e-8 in float32.
    """
    head = min(-offset % BLOCK, len(x))
    whole = (len(x) - head) // BLOCK * BLOCK
    total = x.new_zeros((), dtype=torch.float64)
    for rest in (x[:head], x[head + whole :]):
        if len(rest):
            total += torch.linalg.vector_norm(rest, dtype=torch.float64).square()
    if whole:
        norms = torch.linalg.vector_norm(x[head : head + whole].view(-1, BLOCK), dim=1)
        total += norms.to(torch.float64).square().sum()
    return total


def nonzeros(x: Tensor, offset: int = 0) -> Tensor:
    """Elements that are not zero, as a float64 scalar."""
    return torch.count_nonzero(x).to(torch.float64)


def counts(slot: Slot, tp_rank: int, embed_rank: int) -> bool:
    """Whether this rank counts the parameter in sums over the model."""
    if slot.shard.dim is None and tp_rank:
        return False
    return not ("embed" in slot.shard.sum_over and embed_rank)


class ModelSums:
    """Sums over all parameters of the model, the same on every rank.

    pp  the group over which stages are spread
    """

    def __init__(self, replicas: DataParallel, pp: Group) -> None:
        self.memories, self.stages = replicas.memories, replicas.stages
        self.tp, self.pp, self.embed = replicas.axes["tp"], pp, replicas.axes["embed"]
        self.device = replicas.device
        self.groups = [self.tp, pp]
        if replicas.strategy != "no_shard":
            self.groups.append(replicas.dp)

    def over(
        self, flats: Sequence[Tensor], measure: Measure, units: Sequence[str] = ()
    ) -> Tensor:
        """[1] float64: sum of `measure` over one flat tensor (my part) for every bucket.

        units: sum the parameters of each unit apart, [len(units)]
        """
        totals = torch.zeros(len(units) or 1, dtype=torch.float64, device=self.device)
        place = {unit: i for i, unit in enumerate(units)}
        for memory, flat in zip(self.memories, flats, strict=True):
            first = memory.mine[0]
            for unit, start, stop in self._counted(memory, bool(units)):
                totals[place.get(unit, 0)] += measure(flat[start - first : stop - first], start)
        for group in self.groups:
            all_reduce_(totals, group, tag="optimizer.norm")
        return totals

    def _counted(self, memory: BucketMemory, by_unit: bool) -> list[tuple[str, int, int]]:
        """Stretches of my part that I count: (unit, start, stop)."""

        def key(slot: Slot) -> tuple[bool, str]:
            counted = counts(slot, self.tp.rank, self.embed.rank)
            return counted, slot.unit if by_unit else ""

        runs = memory.bucket.runs(key, memory.mine)
        return [(unit, start, stop) for (counted, unit), start, stop in runs if counted]

    def elements(self) -> int:
        """Parameters of the model that are trained, without padding. Collective: a start-up
        question."""
        mine = sum(
            prod(stop - start for start, stop in slot.shard.box(self.tp.rank, self.tp.size))
            for memory in self.memories
            for slot, param in zip(memory.bucket.slots, memory.parameters, strict=True)
            if param.requires_grad and counts(slot, self.tp.rank, self.embed.rank)
        )
        total = torch.tensor([mine], device=self.device)
        for group in (self.tp, self.pp):
            all_reduce_(total, group, tag="optimizer.elements")
        return int(total)

    def units(self) -> list[str]:
        """Units of the whole model, in order of use, in every layout. Collective: a start-up
        question."""
        slots = [slot for memory in self.memories for slot in memory.bucket.slots]
        unit = {slot.name: slot.unit for slot in slots}
        mine = [
            (stage.index, unit[name])
            for stage in self.stages
            for name, _ in stage.named_parameters()
        ]
        every = gather_objects(list(dict.fromkeys(mine)), self.pp, tag="optimizer.units")
        by_stage = sorted((pair for pairs in every for pair in pairs), key=lambda pair: pair[0])
        return list(dict.fromkeys(name for _, name in by_stage))


def clip_factor(norm: float, limit: float) -> float:
    """What the gradients are multiplied by so that their norm is at most `limit` (0: no limit)."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
