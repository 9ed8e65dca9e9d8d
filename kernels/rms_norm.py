"""RMSNorm over the last dimension (Zhang, Sennrich, 2019), alone or after a residual addition.

    y  = x r weight                          r = 1 / sqrt(mean(x^2) + eps) of every row
    dx = r (dy weight) - x r^3 mean(dy weight x)             dweight = sum over rows of dy x r

On a CPU torch has no fused kernel for it (its backward there is some ten passes over x), so the
reference below has a backward of its own, of five, and saves x and one number per row. On a GPU the
Triton kernel does norm and addition in one pass. Sums are in float32 (float64 for float64). Imports
torch, kernels.gpu and, for its launch rule, kernels.layer_norm.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from kernels.gpu import jit, launch, multiprocessors, next_power_of_two, tl, use_triton
from kernels.layer_norm import warps

# ---- kernels ------------------------------------------------------------------------------------


@jit
def _forward(
    # pointers, [rows, width] but for weight [width] and rstd [rows]
    x, residual, total, weight, y, rstd,
    # sizes
    width, eps,
    # constants; without ADD residual and total are not touched
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        a += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        a = a.to(total.dtype.element_ty)  # the norm sees the sum as it is stored
        tl.store(total + at, a, mask=inside)
        a = a.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(a * a, 0) / width + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (a * scale * w).to(y.dtype.element_ty), mask=inside)
    tl.store(rstd + row, scale)


@jit
def _backward(
    # pointers, [rows, width] but for weight [width], rstd [rows], dweight [programs, width]
    dy, dtotal, total, weight, rstd, dx, dweight,
    # sizes
    rows, width,
    # constants
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of P programs each takes every P-th row: dweight is P partial sums, no atomics."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    sum_w = tl.zeros((BLOCK,), tl.float32)
    for turn in range(tl.cdiv(rows - program, programs)):
        row = (program + turn * programs).to(tl.int64)
        at = row * width + column
        d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        normal = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) * scale
        sum_w += d * normal
        g = d * w
        out = scale * (g - normal * (tl.sum(g * normal, 0) / width))
        if ADD:
            out += tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside)
    tl.store(dweight + program.to(tl.int64) * width + column, sum_w, mask=inside)


# ---- launchers ----------------------------------------------------------------------------------


def forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float):
    """(y, x + residual or x, rstd) of [rows, width] operands."""
    rows, width = x.shape
    y, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = next_power_of_two(width)
    launch(
        _forward, (rows,),
        x, residual, total, weight, y, rstd, width, eps,
        ADD=residual is not None, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return y, total, rstd


def backward(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx, dweight); dx is the gradient of x and of the residual alike."""
    rows, width = total.shape
    dx = torch.empty_like(total)
    programs = min(rows, 4 * multiprocessors(total))
    sums = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    block = next_power_of_two(width)
    launch(
        _backward, (programs,),
        dy, dtotal, total, weight, rstd, dx, sums, rows, width,
        ADD=dtotal is not None, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return dx, sums.sum(0)


# ---- autograd -----------------------------------------------------------------------------------


class _RMSNorm(Function):
    """forward   y = norm(x + residual), and the sum if there was a residual
    backward  dx = dresidual = the norm's gradient + dtotal"""

    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if residual is not None:
            residual = residual.reshape(rows.shape).contiguous()
        y, total, rstd = forward(rows, residual, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        return y.view(x.shape), None if residual is None else total.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal):
        total, weight, rstd = ctx.saved_tensors
        shape = dy.shape
        dy = dy.reshape(total.shape).contiguous()
        if dtotal is not None:
            dtotal = dtotal.reshape(total.shape).contiguous()
        dx, dweight = backward(dy, dtotal, total, weight, rstd)
        dx = dx.view(shape)
        return dx, None if dtotal is None else dx, dweight.to(weight.dtype), None


# ---- reference, and what callers use ------------------------------------------------------------


class _ReferenceRMSNorm(Function):
    """The same in torch. Low-precision operands are cast to float32 first."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = _wide(x.reshape(-1, x.shape[-1]))
        square = torch.linalg.vector_norm(wide, dim=1, keepdim=True).square_()
        rstd = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).mul_(weight).to(x.dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        wide, d = _wide(x.reshape(-1, x.shape[-1])), _wide(dy.reshape(-1, x.shape[-1]))
        w = _wide(weight)
        product = d * wide
        dweight = torch.mv(product.t(), rstd.squeeze(1))
        inner = torch.mv(product, w).unsqueeze(1).mul_(rstd**3).div_(x.shape[-1])
        dx = torch.mul(d, w, out=product).mul_(rstd).addcmul_(wide, inner, value=-1)
        return dx.to(x.dtype).view(x.shape), dweight.to(weight.dtype), None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x [..., h], weight [h] -> [..., h]"""
    if use_triton(x) and x.dtype != torch.float64:
        return _RMSNorm.apply(x, None, weight, eps)[0]
    return _ReferenceRMSNorm.apply(x, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), all [..., h]."""
    if use_triton(x) and x.dtype != torch.float64:
        return _RMSNorm.apply(x, residual, weight, eps)
    total = x + residual
    return _ReferenceRMSNorm.apply(total, weight, eps), total
