"""Entering and leaving tensor-parallel regions: communication that autograd understands.

First the raw functions (Megatron's private names, which forks import), then one autograd class for
each, whose backward is visibly its dual, then the public functions. The duals:

    copy                    y = x                         <->  reduce          y = sum over tp of x
    scatter   (last dim)    y = my columns of x           <->  gather          y = all columns
    scatter   (sequence)    y = my rows of x              <->  gather          y = all rows
    gather    (sequence)    y = all rows, used in part    <->  reduce-scatter  y = my rows, summed
    all-gather (last dim)                                 <->  reduce-scatter (last dim)
    all-to-all                                            <->  all-to-all, splits exchanged

A backward applies the dual class, so it can itself be differentiated. No function changes its
input or an incoming gradient, and the raw ones refuse a tensor whose gradient they would cut off.
`group` is a Group, a torch ProcessGroup, or (in the public functions) None for the default tp
group. What backward needs is kept on `ctx`, never looked up: backward runs on other threads.

Imports core.comm and core.parallel_state; used by the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from core.comm import Group, all_gather, all_reduce_, reduce_scatter
from core.comm import all_to_all as exchange_blocks
from core.parallel_state import resolve
from core.tensor_parallel.utils import divide, split_tensor_along_last_dim


class Place(NamedTuple):
    """Who talks, and under which name it is entered in the ledger. Stands for a group below."""

    group: Group
    tag: str


def _place(group: object, tag: str) -> Place:
    return group if isinstance(group, Place) else Place(resolve(group), tag)


def _dual(ctx: object, tag: str) -> Place:
    """Where the backward of what happened at `ctx.group` happens."""
    group, tag = _place(getattr(ctx, "group", None), tag)
    return Place(group, f"{tag}.grad")


# ---- raw functions ------------------------------------------------------------------------------


def _reduce(input_: Tensor, group: object) -> Tensor:
    """Sum over the group; a new tensor unless the group is of size 1."""
    group, tag = _place(group, "reduce")
    if group.size == 1:
        return input_
    return all_reduce_(input_.clone(memory_format=torch.contiguous_format), group, tag=tag)


def _split_along_last_dim(input_: Tensor, group: object) -> Tensor:
    group, _ = _place(group, "split")
    if group.size == 1:
        return input_
    return split_tensor_along_last_dim(input_, group.size)[group.rank].contiguous()


def _split_along_first_dim(input_: Tensor, group: object) -> Tensor:
    group, tag = _place(group, "split")
    if group.size == 1:
        return input_
    if input_.shape[0] % group.size:
        raise ValueError(
            f"{tag}: a first dimension of {input_.shape[0]} does not divide by the {group.size} "
            f"ranks of group {group.name!r}"
        )
    rows = input_.shape[0] // group.size
    return input_[group.rank * rows : (group.rank + 1) * rows].contiguous()


def _gather_along_last_dim(input_: Tensor, group: object) -> Tensor:
    group, tag = _place(group, "gather_last_dim")
    return all_gather(input_, group, dim=-1, tag=tag) if group.size > 1 else input_


def _reduce_scatter_along_last_dim(input_: Tensor, group: object) -> Tensor:
    group, tag = _place(group, "reduce_scatter_last_dim")
    return reduce_scatter(input_, group, dim=-1, tag=tag) if group.size > 1 else input_


def _gather_along_first_dim(
    input_: Tensor,
    group: object,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """All ranks' rows. With split sizes rank r has output_split_sizes[r] of them.

    Uneven parts go through an all-to-all in which everybody sends the same to everyone: the bytes
    of an all-gather. `use_global_buffer` has no effect: the allocator reuses memory by itself.
    """
    group, tag = _place(group, "gather_first_dim")
    if group.size == 1:
        return input_
    if output_split_sizes is None:
        return all_gather(input_, group, tag=tag)
    return exchange_blocks(
        input_.repeat(group.size, *[1] * (input_.dim() - 1)),
        group,
        output_splits=output_split_sizes,
        input_splits=[input_.shape[0]] * group.size,
        tag=tag,
    )


def _reduce_scatter_along_first_dim(
    input_: Tensor,
    group: object,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """My rows of the sum over the group. With split sizes rank r has input_split_sizes[r] rows.

    Uneven parts are exchanged by an all-to-all and added here: the bytes of a reduce-scatter.
    """
    group, tag = _place(group, "reduce_scatter_first_dim")
    if group.size == 1:
        return input_
    if input_split_sizes is None:
        return reduce_scatter(input_, group, tag=tag)
    mine = input_split_sizes[group.rank]
    blocks = exchange_blocks(
        input_,
        group,
        output_splits=[mine] * group.size,
        input_splits=input_split_sizes,
        tag=tag,
    )
    return blocks.view(group.size, mine, *input_.shape[1:]).sum(dim=0)


# ---- autograd classes ---------------------------------------------------------------------------


class _CopyToModelParallelRegion(Function):
    """forward   y  = x                    the same on every rank
    backward  dx = sum over tp of dy    one all-reduce"""

    @staticmethod
    def symbolic(graph, input_, group=None):
        return input_

    @staticmethod
    def forward(ctx, input_, group=None):
        ctx.group = group
        return input_

    @staticmethod
    def backward(ctx, grad_output):
        return _ReduceFromModelParallelRegion.apply(grad_output, _dual(ctx, "copy")), None


class _ReduceFromModelParallelRegion(Function):
    """forward   y  = sum over tp of x    one all-reduce
    backward  dx = dy                  the same on every rank"""

    @staticmethod
    def symbolic(graph, input_, group=None):
        return _reduce(input_, group)

    @staticmethod
    def forward(ctx, input_, group=None):
        ctx.group = group
        return _reduce(input_, group)

    @staticmethod
    def backward(ctx, grad_output):
        return _CopyToModelParallelRegion.apply(grad_output, _dual(ctx, "reduce")), None


class _ScatterToModelParallelRegion(Function):
    """forward   y  = my columns of x
    backward  dx = all ranks' columns    one all-gather"""

    @staticmethod
    def symbolic(graph, input_, group=None):
        return _split_along_last_dim(input_, group)

    @staticmethod
    def forward(ctx, input_, group=None):
        ctx.group = group
        return _split_along_last_dim(input_, group)

    @staticmethod
    def backward(ctx, grad_output):
        return _GatherFromModelParallelRegion.apply(grad_output, _dual(ctx, "scatter")), None


class _GatherFromModelParallelRegion(Function):
    """forward   y  = all ranks' columns    one all-gather
    backward  dx = my columns of dy"""

    @staticmethod
    def symbolic(graph, input_, group=None):
        return _gather_along_last_dim(input_, group)

    @staticmethod
    def forward(ctx, input_, group=None):
        ctx.group = group
        return _gather_along_last_dim(input_, group)

    @staticmethod
    def backward(ctx, grad_output):
        return _ScatterToModelParallelRegion.apply(grad_output, _dual(ctx, "gather")), None


class _ScatterToSequenceParallelRegion(Function):
    """forward   y  = my rows of x
    backward  dx = all ranks' rows    one all-gather"""

    @staticmethod
    def symbolic(graph, input_, group=None):
        return _split_along_first_dim(input_, group)

    @staticmethod
    def forward(ctx, input_, group=None):
        ctx.group = group
        return _split_along_first_dim(input_, group)

    @staticmethod
    def backward(ctx, grad_output):
        place = _dual(ctx, "scatter_sequence")
        return _GatherFromSequenceParallelRegion.apply(grad_output, place, False), None


class _GatherFromSequenceParallelRegion(Function):
    """forward   y  = all ranks' rows                         one all-gather
    backward  dx = my rows of the sum over tp of dy        one reduce-scatter,
              where what follows uses y in part (tensor_parallel_output_grad);
              dx = my rows of dy                           where every rank does the same with y"""

    @staticmethod
    def symbolic(
        graph,
        input_,
        group=None,
        tensor_parallel_output_grad=True,
        output_split_sizes=None,
        use_global_buffer=False,
    ):
        return _gather_along_first_dim(input_, group, output_split_sizes)

    @staticmethod
    def forward(
        ctx,
        input_,
        group=None,
        tensor_parallel_output_grad=True,
        output_split_sizes=None,
        use_global_buffer=False,
    ):
        ctx.group = group
        ctx.tensor_parallel_output_grad = tensor_parallel_output_grad
        ctx.output_split_sizes = output_split_sizes
        return _gather_along_first_dim(input_, group, output_split_sizes)

    @staticmethod
    def backward(ctx, grad_output):
        place, splits = _dual(ctx, "gather_sequence"), ctx.output_split_sizes
        if ctx.tensor_parallel_output_grad:
            dx = _ReduceScatterToSequenceParallelRegion.apply(grad_output, place, splits)
        elif splits is None:
            dx = _ScatterToSequenceParallelRegion.apply(grad_output, place)
        else:
            raise NotImplementedError(
                "gather_from_sequence_parallel_region: output_split_sizes with "
                "tensor_parallel_output_grad=False has no backward; leave one at its default"
            )
        return dx, None, None, None, None


class _ReduceScatterToSequenceParallelRegion(Function):
    """forward   y  = my rows of the sum over tp of x    one reduce-scatter
    backward  dx = all ranks' rows                    one all-gather"""

    @staticmethod
    def symbolic(graph, input_, group=None, input_split_sizes=None, use_global_buffer=False):
        return _reduce_scatter_along_first_dim(input_, group, input_split_sizes)

    @staticmethod
    def forward(ctx, input_, group=None, input_split_sizes=None, use_global_buffer=False):
        ctx.group = group
        ctx.input_split_sizes = input_split_sizes
        return _reduce_scatter_along_first_dim(input_, group, input_split_sizes)

    @staticmethod
    def backward(ctx, grad_output):
        place = _dual(ctx, "reduce_scatter_sequence")
        dx = _GatherFromSequenceParallelRegion.apply(
            grad_output, place, True, ctx.input_split_sizes
        )
        return dx, None, None, None


class _AllGatherFromTensorParallelRegion(Function):
    """forward   y  = all ranks' columns                       one all-gather
    backward  dx = my columns of the sum over tp of dy      one reduce-scatter"""

    @staticmethod
    def symbolic(graph, input_, group=None):
        return _gather_along_last_dim(input_, group)

    @staticmethod
    def forward(ctx, input_, group=None):
        ctx.group = group
        return _gather_along_last_dim(input_, group)

    @staticmethod
    def backward(ctx, grad_output):
        place = _dual(ctx, "all_gather_last_dim")
        return _ReduceScatterToTensorParallelRegion.apply(grad_output, place), None


class _ReduceScatterToTensorParallelRegion(Function):
    """forward   y  = my columns of the sum over tp of x    one reduce-scatter
    backward  dx = all ranks' columns                    one all-gather"""

    @staticmethod
    def symbolic(graph, input_, group=None):
        return _reduce_scatter_along_last_dim(input_, group)

    @staticmethod
    def forward(ctx, input_, group=None):
        ctx.group = group
        return _reduce_scatter_along_last_dim(input_, group)

    @staticmethod
    def backward(ctx, grad_output):
        place = _dual(ctx, "reduce_scatter_last_dim")
        return _AllGatherFromTensorParallelRegion.apply(grad_output, place), None


class _AllToAll(Function):
    """forward   y  = the blocks of rows that every rank has for me
    backward  dx = the same, with the two lists of block lengths exchanged"""

    @staticmethod
    def forward(ctx, group, input, output_split_sizes, input_split_sizes):
        ctx.group = group
        ctx.output_split_sizes = output_split_sizes
        ctx.input_split_sizes = input_split_sizes
        group, tag = _place(group, "all_to_all")
        return exchange_blocks(
            input,
            group,
            output_splits=output_split_sizes,
            input_splits=input_split_sizes,
            tag=tag,
        )

    @staticmethod
    def backward(ctx, *grad_output):
        place = _dual(ctx, "all_to_all")
        dx = _AllToAll.apply(place, *grad_output, ctx.input_split_sizes, ctx.output_split_sizes)
        return None, dx, None, None


# ---- public functions ---------------------------------------------------------------------------
#
# `tag` names the call in the ledger, its backward being `tag`.grad.


def copy_to_tensor_model_parallel_region(
    input_: Tensor, group: object | None = None, *, tag: str = "copy"
) -> Tensor:
    """x -> x; the gradients of all ranks are added."""
    return _CopyToModelParallelRegion.apply(input_, Place(resolve(group), tag))


def reduce_from_tensor_model_parallel_region(
    input_: Tensor, group: object | None = None, *, tag: str = "reduce"
) -> Tensor:
    """x -> its sum over tp; the gradient is passed on."""
    return _ReduceFromModelParallelRegion.apply(input_, Place(resolve(group), tag))


def scatter_to_tensor_model_parallel_region(
    input_: Tensor, group: object | None = None, *, tag: str = "scatter"
) -> Tensor:
    """[..., n] -> [..., n/t], my columns; gradients are gathered."""
    return _ScatterToModelParallelRegion.apply(input_, Place(resolve(group), tag))


def gather_from_tensor_model_parallel_region(
    input_: Tensor, group: object | None = None, *, tag: str = "gather"
) -> Tensor:
    """[..., n/t] -> [..., n]; the gradient is cut."""
    return _GatherFromModelParallelRegion.apply(input_, Place(resolve(group), tag))


def scatter_to_sequence_parallel_region(
    input_: Tensor, group: object | None = None, *, tag: str = "scatter_sequence"
) -> Tensor:
    """[s, ...] -> [s/t, ...], my rows; gradients are gathered."""
    return _ScatterToSequenceParallelRegion.apply(input_, Place(resolve(group), tag))


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: object | None = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
    *,
    tag: str = "gather_sequence",
) -> Tensor:
    """[s/t, ...] -> [s, ...]; gradients are reduce-scattered, or cut where all are equal."""
    return _GatherFromSequenceParallelRegion.apply(
        input_,
        Place(resolve(group), tag),
        tensor_parallel_output_grad,
        output_split_sizes,
        use_global_buffer,
    )


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: object | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
    *,
    tag: str = "reduce_scatter_sequence",
) -> Tensor:
    """[s, ...] -> [s/t, ...], my rows of the sum over tp; gradients are gathered."""
    return _ReduceScatterToSequenceParallelRegion.apply(
        input_, Place(resolve(group), tag), input_split_sizes, use_global_buffer
    )


def all_gather_last_dim_from_tensor_parallel_region(
    input_: Tensor, group: object | None = None, *, tag: str = "all_gather_last_dim"
) -> Tensor:
    """[..., n/t] -> [..., n]; gradients are reduce-scattered."""
    return _AllGatherFromTensorParallelRegion.apply(input_, Place(resolve(group), tag))


def reduce_scatter_last_dim_to_tensor_parallel_region(
    input_: Tensor, group: object | None = None, *, tag: str = "reduce_scatter_last_dim"
) -> Tensor:
    """[..., n] -> [..., n/t], my columns of the sum over tp; gradients are gathered."""
    return _ReduceScatterToTensorParallelRegion.apply(input_, Place(resolve(group), tag))


def all_to_all(
    group: object,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    tag: str = "all_to_all",
) -> Tensor:
    """Rows by block: block j of mine goes to rank j. Without split sizes the blocks are equal."""
    return _AllToAll.apply(
        Place(resolve(group), tag), input_, output_split_sizes_, input_split_sizes
    )


def all_to_all_sp2hp(
    input_: Tensor, group: object | None = None, *, tag: str = "all_to_all_sp2hp"
) -> Tensor:
    """[n/t, h] (cut along tokens) -> [n, h/t] (cut along hidden)."""
    group = resolve(group)
    columns = split_tensor_along_last_dim(input_.reshape(-1, input_.shape[-1]), group.size)
    return all_to_all(group, torch.cat(columns, dim=0), tag=tag)


def all_to_all_hp2sp(
    input_: Tensor, group: object | None = None, *, tag: str = "all_to_all_hp2sp"
) -> Tensor:
    """[n, h/t] (cut along hidden) -> [n/t, h] (cut along tokens)."""
    group = resolve(group)
    blocks = all_to_all(group, input_.reshape(-1, input_.shape[-1]), tag=tag)
    return torch.cat(blocks.split(divide(blocks.shape[0], group.size)), dim=-1)
