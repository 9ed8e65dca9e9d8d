"""Looking up rows of a table that is cut along the vocabulary, as an autograd function.

    ids      [b, s]        the same on every rank
    w_cut    [v/t, h]      my rows, start … stop - 1 of them real
    y        [b, s, h]     forward  all_reduce(w_cut[ids] where they are mine, else 0)
             [s/t, b, h]            reduce_scatter of the same, transposed, with `scatter`
    dw_cut   [v/t, h]      backward  row i: sum of dy over the places where ids is i

Imports core.comm and core.shard; used by core.tensor_parallel.layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from core.comm import Group, all_gather, all_reduce_, reduce_scatter
from core.shard import Shard

NOT_MINE = -1  # a local id that stands for another rank's row

# (parameter, gradient rows [n, h], local row numbers [n]) -> None
TableGrad = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Lookup:
    """What one lookup is told besides its tensors; kept on `ctx` for backward.

    partial  some ids may be NOT_MINE
    """

    group: Group
    tag: str
    scatter: bool
    partial: bool
    weight: Tensor
    weight_grad: TableGrad | None


def lookup(
    ids: Tensor,
    weight: Tensor,
    shard: Shard,
    group: Group,
    tag: str,
    *,
    scatter: bool = False,
    weight_grad: TableGrad | None = None,
) -> Tensor:
    """The table's rows for `ids`, communicated; `shard` says how the table is cut.

    Raises IndexError, in host memory, for an id outside the vocabulary. On a device, where looking
    would wait for it, such an id gets a row of zeros.
    """
    if scatter:
        ids = ids.t()  # [s, b]: transposing numbers is cheaper than transposing rows
    checked = ids.device.type == "cpu"
    if checked:
        _check(ids, shard.shape[0])
    start, stop = shard.bounds(group.rank, group.size)
    partial = not checked or stop - start < shard.shape[0]
    local = torch.where((ids >= start) & (ids < stop), ids - start, NOT_MINE) if partial else ids
    call = Lookup(group, tag, scatter, partial, weight, weight_grad)
    return _Lookup.apply(local, weight, call)


def _check(ids: Tensor, vocab: int) -> None:
    if ids.numel() == 0:
        return
    low, high = (int(end) for end in ids.aminmax())
    if low < 0 or high >= vocab:
        wrong = low if low < 0 else high
        raise IndexError(f"token id {wrong} is outside the vocabulary of {vocab}")


class _Lookup(Function):
    @staticmethod
    def forward(ctx, local: Tensor, weight: Tensor, call: Lookup) -> Tensor:
        ctx.call = call
        ctx.rows = weight.shape[0]
        flat = local.reshape(-1)
        ctx.save_for_backward(flat)
        y = weight.index_select(0, flat.clamp(min=0) if call.partial else flat)
        y = y.view(*local.shape, weight.shape[1])
        if call.partial:
            y.masked_fill_((local == NOT_MINE).unsqueeze(-1), 0)
        if call.scatter:
            return reduce_scatter(y, call.group, tag=call.tag)
        return all_reduce_(y, call.group, tag=call.tag)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        call = ctx.call
        (local,) = ctx.saved_tensors
        if call.scatter:
            dy = all_gather(dy, call.group, tag=f"{call.tag}.grad")
        dy = dy.reshape(-1, dy.shape[-1])
        if call.weight_grad is None:
            # rows numbered padding_idx are left out
            dw = torch.ops.aten.embedding_dense_backward(dy, local, ctx.rows, NOT_MINE, False)
            return None, dw, None
        if call.partial:
            mine = (local != NOT_MINE).nonzero().squeeze(1)
            dy, local = dy.index_select(0, mine), local.index_select(0, mine)
        call.weight_grad(call.weight, dy, local)
        return None, None, None
