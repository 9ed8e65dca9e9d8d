"""The two parallel linears as autograd functions, and Megatron's functional forms of the first.

Communication runs behind the GEMMs: the gradient of a column-parallel input is reduced while the
weight gradient is computed, and under sequence parallelism the input, of which only this rank's
rows were saved, is gathered again while the input gradient is computed.

Weight gradients can be handed to a callable: add into `main_grad` now, or queue for later. Then
autograd gets none for that parameter. Read `Linear` (what one call is told), `add_weight_grad`,
then the two functions. Imports core.comm; used by core.tensor_parallel.layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from core.comm import (
    Group,
    Pending,
    all_gather,
    all_reduce_,
    reduce_scatter,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)
from core.parallel_state import resolve
from kernels.wide_product import add_product

# (parameter, gradient of the output [n, out], input [n, in]); what it returns is not looked at
WeightGrad = Callable[[Tensor, Tensor, Tensor], object]
# (parameter, gradient of the output [n, out])
BiasGrad = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class Activation:
    """A pointwise function between two linears, whose value need not be kept for backward.

    value  (x [..., f], bias [f] or None) -> h, of x + bias
    both   (dh, x, bias) -> (dx, h): backward, and the value once more; None: by autograd
    """

    value: Callable[[Tensor, Tensor | None], Tensor]
    both: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]] | None = None

    def again(self, dh: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """(dx, h)"""
        if self.both is not None:
            return self.both(dh, x, bias)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            h = self.value(x, bias)
        return torch.autograd.grad(h, x, dh)[0], h.detach()


@dataclass(frozen=True)
class Linear:
    """What one call of a linear is told besides its tensors; kept on `ctx` for backward.

    group, tag         who talks, and the name of it in the ledger
    reduce_dgrad       column: the input gradient is added over the group
    sequence_parallel  column: the input is [s/t, b, h] and gathered; row: the output is scattered
    weight, bias       the parameters, as `weight_grad` and `bias_grad` get them
    fused              without `weight_grad`: add to weight.main_grad, as Megatron's fusion does
    activation         row: the input goes through it first
    """

    group: Group
    tag: str
    reduce_dgrad: bool = False
    sequence_parallel: bool = False
    weight: Tensor | None = None
    bias: Tensor | None = None
    weight_grad: WeightGrad | None = None
    bias_grad: BiasGrad | None = None
    fused: bool = False
    activation: Activation | None = None

    def gradient_of_weight(self, dy: Tensor, x: Tensor) -> Tensor | None:
        """dw = dy' x  [out, in], for autograd; None when it was handed on."""
        if self.weight_grad is not None:
            self.weight_grad(self.weight, dy, x)
            return None
        if self.fused and getattr(self.weight, "main_grad", None) is not None:
            return _fuse(self.weight, dy, x)
        return dy.t() @ x

    def gradient_of_bias(self, dy: Tensor) -> Tensor | None:
        """db = column sums of dy  [out], for autograd; None when it was handed on."""
        if self.bias_grad is not None:
            self.bias_grad(self.bias, dy)
            return None
        return dy.sum(dim=0)


def add_weight_grad(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """main_grad += dy' x, whose product is not rounded to a shorter type first."""
    add_product(main_grad, dy.t(), x)


def _fuse(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """Megatron's gradient accumulation fusion.

    A parameter with an attribute `grad_added_to_main_grad` (Megatron's DDP sets it) gets it set to
    True and a placeholder gradient, so that its hooks run.
    """
    add_weight_grad(weight.main_grad, dy, x)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    placeholder = torch.empty(weight.shape, dtype=x.dtype, device=x.device)
    return placeholder.zero_() if getattr(weight, "zero_out_wgrad", False) else placeholder


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x w' + bias as one GEMM: [..., in] -> [..., out]."""
    flat = _rows(x)
    y = flat @ weight.t() if bias is None else torch.addmm(bias, flat, weight.t())
    return y.view(*x.shape[:-1], weight.shape[0])


class ColumnLinear(Function):
    """Output columns are cut: every rank makes its own from the whole input.

    x       [s, b, h]      the same on every rank, or my rows [s/t, b, h], gathered first
    w_cut   [n/t, h]       my rows of the weight
    y_cut   [s, b, n/t]    forward  x w_cut' + b_cut
    dx      like x         dgrad    all_reduce(dy_cut w_cut), or reduce_scatter along s
    dw_cut  [n/t, h]       wgrad    dy_cut' x
    db_cut  [n/t]                   column sums of dy_cut
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, call: Linear) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        if call.sequence_parallel:
            x = all_gather(x, call.group, tag=call.tag)
        return _multiply(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        call, (needs_x, needs_weight, needs_bias, _) = ctx.call, ctx.needs_input_grad
        flat = _rows(dy)
        # 1. gather the input again, behind the dgrad GEMM
        whole = Pending((), x)
        if needs_weight and call.sequence_parallel:
            whole = start_all_gather(x, call.group, tag=f"{call.tag}.regather")
        # 2. dgrad; its sum over tp runs behind the wgrad GEMM
        dx = None
        if needs_x:
            dx = (flat @ weight).view(*dy.shape[:-1], weight.shape[1])
            dx = ColumnLinear._start_sum(dx, call)
        # 3. wgrad
        dw = call.gradient_of_weight(flat, _rows(whole.wait())) if needs_weight else None
        db = call.gradient_of_bias(flat) if needs_bias else None
        return dx.wait() if needs_x else None, dw, db, None

    @staticmethod
    def _start_sum(dx: Tensor, call: Linear) -> Pending:
        if call.sequence_parallel:
            return start_reduce_scatter(dx, call.group, tag=f"{call.tag}.grad")
        if call.reduce_dgrad:
            return start_all_reduce_(dx, call.group, tag=f"{call.tag}.grad")
        return Pending((), dx)


class RowLinear(Function):
    """Input columns are cut: ranks add up their parts of the output.

    x_cut   [s, b, n/t]    my columns of the input
    w_cut   [h, n/t]       my columns of the weight
    y       [s, b, h]      forward  all_reduce(x_cut w_cut') + bias, or my rows of it [s/t, b, h]
    dx_cut  [s, b, n/t]    dgrad    dy w_cut, with dy gathered along s if it was scattered
    dw_cut  [h, n/t]       wgrad    dy' x_cut
    db      [h]                     column sums of my dy: of my tokens only under sequence
                                    parallelism, to be added over tp (Shard.sum_over)

    With an activation, act(x_cut + b_act) stands for x_cut; only x_cut is kept for backward.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, b_act: Tensor | None, call: Linear
    ) -> Tensor:
        ctx.call = call
        needed = ctx.needs_input_grad[1] or call.activation is not None
        ctx.save_for_backward(x if needed else None, weight, b_act)
        if call.activation is not None:
            x = call.activation.value(x, b_act)
        if call.group.size == 1:
            return _multiply(x, weight, bias)
        y = _multiply(x, weight, None)
        if call.sequence_parallel:
            y = reduce_scatter(y, call.group, tag=call.tag)
        else:
            all_reduce_(y, call.group, tag=call.tag)
        return y if bias is None else y.add_(bias)  # once, after the sum

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight, b_act = ctx.saved_tensors
        call, (needs_x, needs_weight, needs_bias, needs_b_act, _) = ctx.call, ctx.needs_input_grad
        whole = Pending((), dy)
        if call.sequence_parallel:
            whole = start_all_gather(dy, call.group, tag=f"{call.tag}.grad")
        db = call.gradient_of_bias(_rows(dy)) if needs_bias else None
        dy = whole.wait()
        flat = _rows(dy)
        dx = db_act = None
        if needs_x or call.activation is not None:
            dx = (flat @ weight).view(*dy.shape[:-1], weight.shape[1])
        if call.activation is not None:
            dx, x = call.activation.again(dx, x, b_act)
        if needs_b_act:
            db_act = _rows(dx).sum(0, dtype=torch.promote_types(dx.dtype, torch.float32))
            db_act = db_act.to(b_act.dtype)
        dw = call.gradient_of_weight(flat, _rows(x)) if needs_weight else None
        return dx, dw, db, db_act, None


def apply_linear(
    function: type[Function], x: Tensor, weight: Tensor, *biases: Tensor | None, call: Linear
) -> Tensor:
    """Runs one of the two, in autocast's type where autocast is on."""
    operands = [x, weight, *biases]
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        operands = [
            t.to(dtype) if t is not None and t.dtype != torch.float64 else t for t in operands
        ]
    return function.apply(*operands, call)


# ---- Megatron's functions -----------------------------------------------------------------------


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    async_grad_allreduce: bool | None = None,
    tp_group: object | None = None,
    *,
    weight_grad: WeightGrad | None = None,
    bias_grad: BiasGrad | None = None,
    tag: str = "linear",
) -> Tensor:
    """A column-parallel linear: input [..., h], weight [n/t, h] -> [..., n/t].

    gradient_accumulation_fusion  the weight gradient is added to weight.main_grad
    allreduce_dgrad               the input gradient is added over tp; not with sequence_parallel
    sequence_parallel             input is [s/t, b, h]: gathered, its gradient reduce-scattered
    weight_grad, bias_grad        get the gradients instead of autograd
    async_grad_allreduce          has no effect, as in Megatron

    Raises NotImplementedError for grad_output_buffer: use weight_grad to defer.
    """
    if grad_output_buffer is not None:
        raise NotImplementedError(
            "grad_output_buffer is not supported; weight_grad= takes a callable that may defer"
        )
    if sequence_parallel and allreduce_dgrad:
        raise ValueError(
            "allreduce_dgrad and sequence_parallel exclude each other: under sequence parallelism "
            "the input gradient is reduce-scattered"
        )
    call = Linear(
        resolve(tp_group),
        tag,
        reduce_dgrad=allreduce_dgrad,
        sequence_parallel=sequence_parallel,
        weight=weight,
        bias=bias,
        weight_grad=weight_grad,
        bias_grad=bias_grad,
        fused=gradient_accumulation_fusion,
    )
    return apply_linear(ColumnLinear, input, weight, bias, call=call)


def linear_with_frozen_weight(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: object | None = None,
    grad_output_buffer: None = None,
    wgrad_deferral_limit: None = None,
    async_grad_allreduce: bool | None = None,
    *,
    tag: str = "linear",
) -> Tensor:
    """The same without a gradient for the weight; the input is then not saved.

    gradient_accumulation_fusion has no effect, nor have the last three positional arguments.
    """
    return linear_with_grad_accumulation_and_async_allreduce(
        input,
        weight.detach(),
        bias,
        False,
        allreduce_dgrad,
        sequence_parallel,
        grad_output_buffer,
        wgrad_deferral_limit,
        tp_group=tp_group,
        tag=tag,
    )
