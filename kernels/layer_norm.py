"""LayerNorm over the last dimension, alone or fused with the residual addition before it.

    y = (x - mean) rstd weight + bias        mean, rstd = 1 / sqrt(var + eps) of every row
    g = dy weight, n = (x - mean) rstd
    dx = rstd (g - mean(g) - n mean(g n))    dweight = sum dy n    dbias = sum dy

`layer_norm` calls torch's own kernel everywhere: on CPUs and GPUs it is one pass each way and keeps
two numbers per row. `add_layer_norm` adds first; on a GPU the Triton kernel below does both in one
pass over memory, on a CPU it is an addition and torch's norm. Statistics are in float32 (float64
for float64 operands). Imports torch and kernels.gpu.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from kernels.gpu import cdiv, jit, launch, multiprocessors, next_power_of_two, tl, use_triton

# ---- kernels ------------------------------------------------------------------------------------


@jit
def _forward(
    # pointers, all [rows, width] but for weight, bias [width] and mean, rstd [rows]
    x, residual, total, weight, bias, y, mean, rstd,
    # sizes
    width, eps,
    # constants
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    a += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    a = a.to(total.dtype.element_ty)  # the norm sees the sum as it is stored
    tl.store(total + at, a, mask=inside)
    a = a.to(tl.float32)
    middle = tl.sum(a, 0) / width
    centred = tl.where(inside, a - middle, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (centred * scale * w + b).to(y.dtype.element_ty), mask=inside)
    tl.store(mean + row, middle)
    tl.store(rstd + row, scale)


@jit
def _backward(
    # pointers, [rows, width] but for weight [width], mean, rstd [rows], sums [programs, width]
    dy, dtotal, total, weight, mean, rstd, dx, dweight, dbias,
    # sizes
    rows, width,
    # constants
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of P programs each takes every P-th row: dweight, dbias are P partial sums, no atomics."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    sum_w = tl.zeros((BLOCK,), tl.float32)
    sum_b = tl.zeros((BLOCK,), tl.float32)
    for turn in range(tl.cdiv(rows - program, programs)):
        row = (program + turn * programs).to(tl.int64)
        at = row * width + column
        d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        a = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        normal = tl.where(inside, (a - tl.load(mean + row)) * scale, 0.0)
        sum_w += d * normal
        sum_b += d
        g = d * w
        out = scale * (g - tl.sum(g, 0) / width - normal * (tl.sum(g * normal, 0) / width))
        out += tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside)
    at = program.to(tl.int64) * width + column
    tl.store(dweight + at, sum_w, mask=inside)
    tl.store(dbias + at, sum_b, mask=inside)


# ---- launchers ----------------------------------------------------------------------------------


def forward(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float):
    """(y, x + residual, mean, rstd) of [rows, width] operands."""
    rows, width = x.shape
    y, total = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    block = next_power_of_two(width)
    launch(
        _forward, (rows,),
        x, residual, total, weight, bias, y, mean, rstd, width, eps,
        BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return y, total, mean, rstd


def backward(dy: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor):
    """(dx, dweight, dbias); dx is the gradient of x and of the residual alike."""
    rows, width = total.shape
    dx = torch.empty_like(total)
    programs = min(rows, 4 * multiprocessors(total))
    sums = torch.empty(2, programs, width, dtype=torch.float32, device=total.device)
    block = next_power_of_two(width)
    launch(
        _backward, (programs,),
        dy, dtotal, total, weight, mean, rstd, dx, sums[0], sums[1], rows, width,
        BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    dweight, dbias = sums.sum(1)
    return dx, dweight, dbias


def warps(block: int) -> int:
    """32 threads each hold at most 16 to 32 elements of a row."""
    return min(max(cdiv(block, 512), 1), 16)


# ---- autograd -----------------------------------------------------------------------------------


class _AddLayerNorm(Function):
    """forward   total = x + residual, y = norm(total)
    backward  dx = dresidual = dtotal + the norm's gradient"""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):
        rows = x.reshape(-1, x.shape[-1])
        residual = residual.reshape(rows.shape).contiguous()
        y, total, mean, rstd = forward(rows.contiguous(), residual, weight, bias, eps)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.bias_dtype = bias.dtype
        return y.view(x.shape), total.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal):
        total, weight, mean, rstd = ctx.saved_tensors
        shape = dy.shape
        dy, dtotal = (d.reshape(total.shape).contiguous() for d in (dy, dtotal))
        dx, dweight, dbias = backward(dy, dtotal, total, weight, mean, rstd)
        dx = dx.view(shape)
        return dx, dx, dweight.to(weight.dtype), dbias.to(ctx.bias_dtype), None


# ---- what callers use, and the reference --------------------------------------------------------


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """x [..., h], weight and bias [h] -> [..., h]; torch's own kernel.

    On a CPU that kernel adds up the gradients of weight and bias in their own type, too coarse for
    bf16, so low-precision operands are cast to float32 there. y has x's type; weight and bias may
    be of a shorter one.
    """
    shape = (x.shape[-1],)
    if x.dtype != weight.dtype and x.element_size() > 2:
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if x.is_cuda or x.dtype in (torch.float32, torch.float64):
        return F.layer_norm(x, shape, weight, bias, eps)
    bias = None if bias is None else bias.float()
    return F.layer_norm(x.float(), shape, weight.float(), bias, eps).to(x.dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), all [..., h]."""
    if use_triton(x) and x.dtype != torch.float64:
        return _AddLayerNorm.apply(x, residual, weight, bias, eps)
    total = x + residual
    return layer_norm(total, weight, bias, eps), total
