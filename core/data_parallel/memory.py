"""Bytes that parameters, gradients and optimizer state take on a rank: arithmetic on buckets.

Pure: standard library only. Per parameter, with n dp ranks (a short type is bfloat16 or float16):

    strategy             float32           short type
    no_shard             4 + 4 + 8         2 + 4 + 4 + 8      parameter, gradient, (master,) moments
    optim                4 + 4 + 8/n       2 + 4 + (4 + 8)/n
    optim_grads          4 + (4 + 8)/n     2 + (4 + 4 + 8)/n
    optim_grads_params   (4 + 4 + 8)/n     (2 + 4 + 4 + 8)/n

and for a while what is not kept, `StateBytes.passing`: gradients of the parts whose backward runs,
until they have been summed; parameters of the block at work and the next one, and of what is used
out of turn (embedding, output layer). Neighbours: layout.py; core/memory_report.py prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.data_parallel.config import Strategy
from core.data_parallel.layout import Bucket

UNDER_WAY = 2  # reductions of passing gradients; the next one waits for the oldest


@dataclass(frozen=True)
class StateBytes:
    """passing: at most, beside the others, while a step runs"""

    parameters: int
    gradients: int
    masters: int
    moments: int
    passing: int

    @property
    def kept(self) -> int:
        return self.parameters + self.gradients + self.masters + self.moments


def state_bytes(
    buckets: Sequence[Bucket],
    strategy: Strategy,
    ways: int,
    *,
    parameter: int = 4,
    total: int = 4,
    moments: int = 2,
    overlaps: bool = True,
) -> StateBytes:
    """For the buckets of a rank.

    ways       dp ranks
    parameter  bytes of one       total  of a gradient sum, a master and a moment
    moments    arrays of the optimizer
    overlaps   gradients travel while others are computed, parameters before they are used
    """
    elements = sum(bucket.length for bucket in buckets)
    part = elements // ways
    shards_grads = strategy in ("optim_grads", "optim_grads_params")
    state = elements if strategy == "no_shard" else part
    blocks = [bucket.length for bucket in buckets if is_of_blocks(bucket)]
    others = sum(bucket.length for bucket in buckets if not is_of_blocks(bucket))
    passing = 0
    if shards_grads:
        # at most: everything that is not of a block, the largest blocks
        at_once = 1 + (UNDER_WAY if overlaps else 0)
        passing += total * (others + sum(sorted(blocks)[-at_once:]))
    if strategy == "optim_grads_params":
        at_once = 2 if overlaps else 1
        passing += parameter * (others + sum(sorted(blocks)[-at_once:]))
    return StateBytes(
        parameters=parameter * (part if strategy == "optim_grads_params" else elements),
        gradients=total * (part if shards_grads else elements),
        masters=0 if parameter == total else total * state,
        moments=moments * total * state,
        passing=passing,
    )


def is_of_blocks(bucket: Bucket) -> bool:
    """Whether it holds parameters of blocks only, which are used one after the other."""
    return all("." in slot.unit for slot in bucket.slots)
