"""GELU in the tanh form, with the bias of the linear before it (Hendrycks, Gimpel, 2016).

    u = 2 sqrt(2 / pi) (x + 0.044715 x^3),   s = 1 / (1 + exp(-u)),   gelu(x) = x s
    d gelu / d x = s + x s (1 - s) u',       u' = 2 sqrt(2 / pi) (1 + 3 * 0.044715 x^2)

(x/2 (1 + tanh(u/2)) is the same function.) On a GPU without a bias, and on a CPU, torch's own
kernel is the best there is: one pass each way, and it keeps x alone. With a bias the Triton kernel
adds it in the same pass and keeps x, not x + bias. Imports torch and kernels.gpu.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from kernels.gpu import cdiv, jit, launch, tl, use_triton

LINEAR = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
CUBIC = tl.constexpr(0.07135481282663977)  # LINEAR * 0.044715

# ---- kernels ------------------------------------------------------------------------------------


@jit
def _forward(
    # pointers: x, y [rows * width], bias [width]
    x, bias, y,
    # sizes
    count, width,
    # constants
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    b = tl.load(bias + at % width, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + b
    s = 1.0 / (1.0 + tl.exp(-a * (LINEAR + CUBIC * a * a)))
    tl.store(y + at, (a * s).to(y.dtype.element_ty), mask=inside)


@jit
def _backward(
    # pointers: dy, x, dx [rows * width], bias [width]
    dy, x, bias, dx,
    # sizes
    count, width,
    # constants
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    b = tl.load(bias + at % width, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + b
    s = 1.0 / (1.0 + tl.exp(-a * (LINEAR + CUBIC * a * a)))
    slope = s + a * s * (1.0 - s) * (LINEAR + 3.0 * CUBIC * a * a)
    d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + at, (d * slope).to(dx.dtype.element_ty), mask=inside)


# ---- launchers ----------------------------------------------------------------------------------

BLOCK = 1024


def forward(x: Tensor, bias: Tensor) -> Tensor:
    y = torch.empty_like(x)
    launch(_forward, (cdiv(x.numel(), BLOCK),), x, bias, y, x.numel(), len(bias), BLOCK=BLOCK)
    return y


def backward(dy: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    dx = torch.empty_like(x)
    launch(_backward, (cdiv(x.numel(), BLOCK),), dy, x, bias, dx, x.numel(), len(bias), BLOCK=BLOCK)
    return dx


# ---- autograd -----------------------------------------------------------------------------------


class _BiasGelu(Function):
    """forward   y = gelu(x + bias)
    backward  dx = dy gelu'(x + bias), dbias = its sum over rows"""

    @staticmethod
    def forward(ctx, x, bias):
        x = x.contiguous()
        ctx.save_for_backward(x, bias)
        return forward(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, bias = ctx.saved_tensors
        dx = backward(dy.contiguous(), x, bias)
        dbias = dx.view(-1, len(bias)).sum(0, dtype=torch.float32)
        return dx, dbias.to(bias.dtype)


# ---- what callers use, and the reference --------------------------------------------------------


def bias_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """gelu(x + bias), x [..., f], bias [f] or None -> [..., f]"""
    if bias is None:
        return F.gelu(x, approximate="tanh")
    if use_triton(x) and x.dtype != torch.float64:
        return _BiasGelu.apply(x, bias)
    return F.gelu(x + bias, approximate="tanh")
