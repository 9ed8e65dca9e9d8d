"""SwiGLU (Shazeer, 2020): silu(gate) * value, the halves of the last dimension.

    s = 1 / (1 + exp(-g)),   y = g s v
    dg = dy v s (1 + g (1 - s)),   dv = dy g s

Both forms keep x = [gate, value] alone (plain torch keeps the halves, silu(gate) and a copy) and
write dx in one piece. Imports torch and kernels.gpu.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from kernels.gpu import cdiv, jit, launch, tl, use_triton

# ---- kernels ------------------------------------------------------------------------------------


@jit
def _forward(
    # pointers: x [rows, 2 width], y [rows, width]
    x, y,
    # sizes
    width,
    # constants
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * 2 * width + column
    g = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x + at + width, mask=inside, other=0.0).to(tl.float32)
    out = g / (1.0 + tl.exp(-g)) * v
    tl.store(y + row * width + column, out.to(y.dtype.element_ty), mask=inside)


@jit
def _backward(
    # pointers: dy [rows, width], x, dx [rows, 2 width]
    dy, x, dx,
    # sizes
    width,
    # constants
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * 2 * width + column
    g = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x + at + width, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * width + column, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-g))
    dg = d * v * s * (1.0 + g * (1.0 - s))
    tl.store(dx + at, dg.to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + at + width, (d * g * s).to(dx.dtype.element_ty), mask=inside)


# ---- launchers ----------------------------------------------------------------------------------

BLOCK = 1024


def forward(x: Tensor) -> Tensor:
    """[rows, 2 f] -> [rows, f]"""
    rows, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty(rows, width)
    launch(_forward, (rows, cdiv(width, BLOCK)), x, y, width, BLOCK=BLOCK)
    return y


def backward(dy: Tensor, x: Tensor) -> Tensor:
    rows, width = dy.shape
    dx = torch.empty_like(x)
    launch(_backward, (rows, cdiv(width, BLOCK)), dy, x, dx, width, BLOCK=BLOCK)
    return dx


# ---- reference ----------------------------------------------------------------------------------


def reference_forward(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(value)


def reference_backward(dy: Tensor, x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    dx = torch.empty_like(x)
    dgate, dvalue = dx.chunk(2, dim=-1)
    torch.mul(F.silu(gate), dy, out=dvalue)
    torch.mul(dy, value, out=dgate)
    torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
    return dx


# ---- autograd, and what callers use -------------------------------------------------------------


class _SwiGLU(Function):
    """forward   y = silu(gate) value
    backward  dx from x alone"""

    @staticmethod
    def forward(ctx, x):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        ctx.save_for_backward(rows)
        ctx.kernels = use_triton(x) and x.dtype != torch.float64
        y = forward(rows) if ctx.kernels else reference_forward(rows)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        shape = (*dy.shape[:-1], rows.shape[-1])
        dy = dy.reshape(len(rows), -1).contiguous()
        dx = backward(dy, rows) if ctx.kernels else reference_backward(dy, rows)
        return dx.view(shape)


def swiglu(x: Tensor) -> Tensor:
    """[..., 2 f] -> [..., f]"""
    if x.shape[-1] % 2:
        raise ValueError(f"swiglu needs an even last dimension, gate and value; x is {x.shape}")
    return _SwiGLU.apply(x)
