"""Why a loss or a gradient norm is not finite: ranks, samples and tensors, in one text for all.

Called by core.train on every rank at once, when the reduced value has turned out so everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from core.comm import Group, gather_objects
from core.data_parallel.ddp import DataParallel

NAMED = 8  # ranks that are described one by one


def describe(
    what: str,
    world: Group,
    replicas: DataParallel,
    samples: Mapping[int, Sequence[int]],
    *,
    gradients: bool,
) -> str:
    """`what` and a line for each finding of each rank. Collective; the same text on every rank.

    samples    of this rank, {microbatch: sample numbers} where the loss is not finite
    gradients  look at them too: where the loss is at fault they only follow from it
    """
    named = list(replicas.named_parts())
    mine = _tensors("parameter", ((name, values) for name, values, _ in named))
    if gradients:
        mine += _tensors("gradient", ((name, sums) for name, _, sums in named))
    mine += [f"microbatch {m}, samples {', '.join(map(str, s))}" for m, s in samples.items()]
    found = gather_objects(mine, world, tag="stop.not_finite")
    hit = [(rank, lines) for rank, lines in enumerate(found) if lines]
    text = [what, *(f"rank {rank}: {line}" for rank, lines in hit[:NAMED] for line in lines)]
    if len(hit) > NAMED:
        text.append(f"and {len(hit) - NAMED} ranks more")
    return "\n  ".join(text)


def _tensors(kind: str, named: Iterable[tuple[str, Tensor]]) -> list[str]:
    names = [name for name, tensor in named if not bool(torch.isfinite(tensor).all())]
    if not names:
        return []
    if len(names) == 1:
        return [f"1 {kind} is not finite: {names[0]}"]
    return [f"{len(names)} {kind}s are not finite, first {names[0]}"]
