"""The only module that calls torch.distributed's communication: eight verbs, checked and recorded.

Blocking verbs come first, then the `start_*` forms that return a `Pending`, then start-up objects.
Every verb takes the group it works on and a `tag`, a dotted name that says where it was issued.
On a group of size 1 nothing is called and nothing recorded. Shapes, types and contiguity are
checked before the call, since a wrong size on one rank is a hang and not an error.

None of this is visible to autograd: inputs must not require gradients in the current mode (the
differentiable forms are `core.tensor_parallel.mappings`, autograd functions around these calls).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from core.comm.group import Group

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch renamed both; the old names warn where the new ones exist.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ReduceOp = Literal["sum", "max", "min"]


class Pending:
    """A communication under way. `wait()` returns its result and may be called more than once."""

    def __init__(
        self,
        works: Sequence[object],
        result,
        finish=None,
        keep: tuple = (),
        group: Group | None = None,
    ) -> None:
        self._works, self._group = list(works), group
        self._result = result
        self._finish = finish
        self._keep = keep  # inputs must outlive the call

    def wait(self):
        if self._works:
            with self._group.ledger.waiting(self._group.name):
                for work in self._works:
                    work.wait()
            self._works.clear()
        if self._finish is not None:
            self._result, self._finish = self._finish(self._result), None
        self._keep = ()
        return self._result


def _record(op: str, x: Tensor, numel: int, group: Group, tag: str) -> None:
    group.ledger.record(
        op=op,
        group=group.name,
        size=group.size,
        dtype=str(x.dtype).removeprefix("torch."),
        numel=numel,
        payload=numel * x.element_size(),
        tag=tag,
    )


def _check(x: Tensor, tag: str, *, contiguous: bool = False) -> None:
    if not tag:
        raise ValueError("a collective needs a tag that says where it was issued")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{tag}: a raw collective on a tensor that requires a gradient would be differentiated "
            "wrongly; use core.tensor_parallel.mappings, or detach() it"
        )
    if contiguous and not x.is_contiguous():
        raise ValueError(
            f"{tag}: an in-place collective needs a contiguous tensor, not one of shape "
            f"{tuple(x.shape)} with strides {tuple(x.stride())}"
        )


def _divide(x: Tensor, dim: int, group: Group, tag: str) -> int:
    if x.shape[dim] % group.size:
        raise ValueError(
            f"{tag}: dimension {dim} of shape {tuple(x.shape)} does not divide by the "
            f"{group.size} ranks of group {group.name!r}"
        )
    return x.shape[dim] // group.size


# ---- blocking verbs ---------------------------------------------------------------------------


def all_reduce_(x: Tensor, group: Group, *, op: ReduceOp = "sum", tag: str) -> Tensor:
    """x becomes the sum (max, min) of all ranks' x, in place."""
    return start_all_reduce_(x, group, op=op, tag=tag).wait()


def all_gather(x: Tensor, group: Group, *, dim: int = 0, tag: str) -> Tensor:
    """All ranks' x, of one shape, joined along `dim` in rank order."""
    return start_all_gather(x, group, dim=dim, tag=tag).wait()


def reduce_scatter(x: Tensor, group: Group, *, dim: int = 0, tag: str) -> Tensor:
    """My part along `dim` of the sum of all ranks' x."""
    return start_reduce_scatter(x, group, dim=dim, tag=tag).wait()


def all_to_all(
    x: Tensor,
    group: Group,
    *,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    tag: str,
) -> Tensor:
    """Row block j of x goes to rank j; the result holds what each rank sent me, in rank order.

    The splits count rows of dimension 0 by peer; without them the blocks are equal.
    """
    _check(x, tag)
    if group.size == 1:
        return x
    if (output_splits is None) != (input_splits is None):
        raise ValueError(f"{tag}: give both output_splits and input_splits, or neither")
    if input_splits is None:
        _divide(x, 0, group, tag)
        rows = x.shape[0]
    else:
        if sum(input_splits) != x.shape[0]:
            raise ValueError(
                f"{tag}: input_splits add up to {sum(input_splits)}, x has {x.shape[0]} rows"
            )
        rows = sum(output_splits)
    x = x.contiguous()
    out = x.new_empty((rows, *x.shape[1:]))
    _record("all_to_all", x, x.numel(), group, tag)
    dist.all_to_all_single(
        out,
        x,
        None if output_splits is None else list(output_splits),
        None if input_splits is None else list(input_splits),
        group=group.handle,
    )
    return out


def broadcast_(x: Tensor, group: Group, *, root: int = 0, tag: str) -> Tensor:
    """x becomes the root's x, in place. `root` is an index in the group, never a global rank."""
    _check(x, tag, contiguous=True)
    if group.size == 1:
        return x
    if not 0 <= root < group.size:
        raise ValueError(f"{tag}: root {root} is outside group {group.name!r} of {group.size}")
    _record("broadcast", x, x.numel(), group, tag)
    with group.ledger.waiting(group.name):
        dist.broadcast(x, src=group.ranks[root], group=group.handle)
    return x


def barrier(group: Group, *, tag: str) -> None:
    """Nobody goes on before everybody is here."""
    if group.size == 1:
        return
    _record("barrier", torch.empty(0), 0, group, tag)
    dist.barrier(group=group.handle)


# ---- started, to be waited for ----------------------------------------------------------------


def start_all_reduce_(x: Tensor, group: Group, *, op: ReduceOp = "sum", tag: str) -> Pending:
    """As `all_reduce_`; x must not be touched before `wait()`."""
    _check(x, tag, contiguous=True)
    if group.size == 1:
        return Pending((), x)
    _record("all_reduce", x, x.numel(), group, tag)
    work = dist.all_reduce(x, op=_OPS[op], group=group.handle, async_op=True)
    return Pending((work,), x, group=group)


def start_all_gather(
    x: Tensor, group: Group, *, dim: int = 0, out: Tensor | None = None, tag: str
) -> Pending:
    """As `all_gather`; with `out` (dim 0 only, contiguous) the result lands there."""
    _check(x, tag)
    if group.size == 1:
        return Pending((), x if out is None or out is x else out.copy_(x))
    dim = dim % max(x.dim(), 1)
    x = x.contiguous()
    shape = (group.size * x.shape[0], *x.shape[1:]) if x.dim() else (group.size,)
    if out is None:
        out = x.new_empty(shape)
    elif out.numel() != x.numel() * group.size or dim or not out.is_contiguous():
        raise ValueError(
            f"{tag}: gathering {tuple(x.shape)} from {group.size} ranks does not fit the output "
            f"{tuple(out.shape)}"
        )
    _record("all_gather", x, x.numel() * group.size, group, tag)
    work = _all_gather_flat(out.view(-1), x.view(-1), group=group.handle, async_op=True)
    finish = None
    if dim:
        parts = (group.size, *x.shape)
        finish = lambda flat: torch.cat(list(flat.view(parts)), dim=dim)  # noqa: E731
    return Pending((work,), out, finish, keep=(x,), group=group)


def start_reduce_scatter(
    x: Tensor, group: Group, *, dim: int = 0, out: Tensor | None = None, tag: str
) -> Pending:
    """As `reduce_scatter`; with `out` (dim 0 only, contiguous) the result lands there."""
    _check(x, tag)
    if group.size == 1:
        return Pending((), x if out is None or out is x else out.copy_(x))
    dim = dim % x.dim()
    rows = _divide(x, dim, group, tag)
    if dim:
        x = torch.cat(x.chunk(group.size, dim=dim), dim=0)
    x = x.contiguous()
    shape = (x.shape[0] // group.size, *x.shape[1:])
    if out is None:
        out = x.new_empty(shape)
    elif out.numel() * group.size != x.numel() or dim or not out.is_contiguous():
        raise ValueError(
            f"{tag}: scattering {tuple(x.shape)} over {group.size} ranks ({rows} rows each) does "
            f"not fit the output {tuple(out.shape)}"
        )
    _record("reduce_scatter", x, x.numel(), group, tag)
    work = _reduce_scatter_flat(out.view(-1), x.view(-1), group=group.handle, async_op=True)
    return Pending((work,), out, keep=(x,), group=group)


@dataclass(frozen=True)
class P2P:
    """One end of a transfer. `peer` is an index in the group."""

    op: Literal["send", "recv"]
    tensor: Tensor
    peer: int


def exchange(ops: Sequence[P2P], group: Group, *, tag: str) -> Pending:
    """Start a batch of sends and receives; `wait()` returns the received tensors in order.

    Messages between two ranks are matched by order, so both sides must derive theirs from one plan.
    """
    calls = []
    for p in ops:
        _check(p.tensor, tag, contiguous=True)
        if not 0 <= p.peer < group.size or p.peer == group.rank:
            raise ValueError(f"{tag}: rank {group.rank} of {group.size} has no peer {p.peer}")
        _record(p.op, p.tensor, p.tensor.numel(), group, tag)
        call = dist.isend if p.op == "send" else dist.irecv
        calls.append(dist.P2POp(call, p.tensor, group=group.handle, group_peer=p.peer))
    works = dist.batch_isend_irecv(calls) if calls else []
    received = [p.tensor for p in ops if p.op == "recv"]
    return Pending(works, received, keep=tuple(p.tensor for p in ops), group=group)


# ---- start-up objects (JSON; never in a step) ---------------------------------------------------


def gather_objects(obj, group: Group, *, tag: str) -> list:
    """Every rank's JSON-able object, in rank order, on every rank."""
    if group.size == 1:
        return [obj]
    data = json.dumps(obj).encode()
    device = _object_device(group)
    lengths = all_gather(torch.tensor([len(data)], device=device), group, tag=f"{tag}.length")
    longest = int(lengths.max())
    mine = torch.zeros(longest, dtype=torch.uint8, device=device)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    every = all_gather(mine, group, tag=tag).view(group.size, longest).cpu()
    return [
        json.loads(bytes(row[:n].tolist()))
        for row, n in zip(every, lengths.tolist(), strict=True)
    ]


def broadcast_object(obj, group: Group, *, root: int = 0, tag: str):
    """The root's JSON-able object on every rank; the others' argument is ignored."""
    if group.size == 1:
        return obj
    device = _object_device(group)
    data = json.dumps(obj).encode() if group.rank == root else b""
    length = torch.tensor([len(data)], device=device)
    broadcast_(length, group, root=root, tag=f"{tag}.length")
    payload = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if group.rank == root:
        payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    broadcast_(payload, group, root=root, tag=tag)
    return json.loads(bytes(payload.cpu().tolist()))


def _object_device(group: Group) -> torch.device:
    """gloo talks from host memory, everything else from the current accelerator."""
    if dist.get_backend(group.handle) == "gloo":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
