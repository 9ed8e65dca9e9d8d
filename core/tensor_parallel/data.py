"""Handing a microbatch from the first rank of a tensor-parallel group to the others.

Imports core.comm and core.parallel_state; called by training loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from core import parallel_state
from core.comm import Group, broadcast_
from core.comm.torch_groups import communication_device

MAX_DIMS = 8
FAILED = -1


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    datatype: torch.dtype,
    tp_group: object | None = None,
) -> dict[str, Tensor]:
    """data[key] for every key, on every rank; only the group's first rank needs `data`.

    Two broadcasts, of the shapes and of everything in one flat tensor. The results are on the
    device that the group communicates on. When the first rank's data lacks a key or has another
    type than `datatype`, every rank raises.
    """
    if not keys:
        return {}
    group = parallel_state.resolve(tp_group)
    device = _device(group)
    first = group.rank == 0
    problem = _problem(keys, data, datatype) if first else None
    header = _header(keys, data, problem) if first else torch.empty(_header_shape(keys)).long()
    header = broadcast_(header.to(device), group, tag="broadcast_data.shapes").tolist()
    if problem is not None:
        raise problem
    if any(dims == FAILED for dims, *_ in header):
        raise RuntimeError(f"the first of {group} could not broadcast {list(keys)}; see its error")
    shapes = [sizes[:dims] for dims, *sizes in header]
    lengths = [torch.Size(shape).numel() for shape in shapes]
    if first:
        flat = torch.cat([data[key].detach().reshape(-1).to(device) for key in keys])
    else:
        flat = torch.empty(sum(lengths), dtype=datatype, device=device)
    broadcast_(flat, group, tag="broadcast_data")
    parts = flat.split(lengths)
    return {key: part.view(shape) for key, part, shape in zip(keys, parts, shapes, strict=True)}


def _device(group: Group) -> torch.device:
    if parallel_state.model_parallel_is_initialized():
        return parallel_state.get_default_grid().device
    return communication_device(group)


def _problem(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype
) -> Exception | None:
    for key in keys:
        if data is None or key not in data:
            return KeyError(f"the data to broadcast has no {key!r}")
        if data[key].dtype != datatype:
            return TypeError(f"{key!r} is of type {data[key].dtype}, not {datatype}")
        if data[key].dim() > MAX_DIMS:
            return ValueError(f"{key!r} has {data[key].dim()} dimensions; at most {MAX_DIMS} work")
    return None


def _header_shape(keys: Sequence[str]) -> tuple[int, int]:
    return len(keys), 1 + MAX_DIMS


def _header(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, problem: Exception | None
) -> Tensor:
    """One row for each key: number of dimensions, or FAILED, then the sizes."""
    if problem is not None:
        return torch.full(_header_shape(keys), FAILED)
    rows = [[data[key].dim(), *data[key].shape] for key in keys]
    return torch.tensor([row + [0] * (1 + MAX_DIMS - len(row)) for row in rows])
