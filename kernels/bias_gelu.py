"""GELU in the tanh form, with the bias of the linear before it (Hendrycks, Gimpel, 2016).

    u = 2 sqrt(2 / pi) (x + 0.044715 x^3),   s = 1 / (1 + exp(-u)),   gelu(x) = x s
    d gelu / d x = s + x s (1 - s) u',       u' = 2 sqrt(2 / pi) (1 + 3 * 0.044715 x^2)

(x/2 (1 + tanh(u/2)) is the same function.) Backward gives the value once more, which then need not
be kept. On a GPU a Triton kernel adds the bias in the same pass; without one torch's own kernels
are the best there is. On a CPU, in float32 and float64, blocks that a core's cache holds go through
torch's simple functions, which beat its GELU. Imports torch and kernels.gpu.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from kernels.gpu import cdiv, jit, launch, tl, use_triton

LINEAR = 1.5957691216057308  # 2 sqrt(2 / pi)
CUBIC = LINEAR * 0.044715
C1, C3 = tl.constexpr(LINEAR), tl.constexpr(CUBIC)

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
    s = 1.0 / (1.0 + tl.exp(-a * (C1 + C3 * a * a)))
    tl.store(y + at, (a * s).to(y.dtype.element_ty), mask=inside)


@jit
def _backward(
    # pointers: dy, x, dx, y [rows * width], bias [width]
    dy, x, bias, dx, y,
    # sizes
    count, width,
    # constants
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    b = tl.load(bias + at % width, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + b
    s = 1.0 / (1.0 + tl.exp(-a * (C1 + C3 * a * a)))
    slope = s + a * s * (1.0 - s) * (C1 + 3.0 * C3 * a * a)
    d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + at, (d * slope).to(dx.dtype.element_ty), mask=inside)
    tl.store(y + at, (a * s).to(y.dtype.element_ty), mask=inside)


# ---- launchers ----------------------------------------------------------------------------------

BLOCK = 1024


def forward(x: Tensor, bias: Tensor) -> Tensor:
    y = torch.empty_like(x)
    launch(_forward, (cdiv(x.numel(), BLOCK),), x, bias, y, x.numel(), len(bias), BLOCK=BLOCK)
    return y


def backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    dx, y = torch.empty_like(x), torch.empty_like(x)
    grid = (cdiv(x.numel(), BLOCK),)
    launch(_backward, grid, dy, x, bias, dx, y, x.numel(), len(bias), BLOCK=BLOCK)
    return dx, y


# ---- on a CPU -----------------------------------------------------------------------------------

CPU_BLOCK = 128 << 10  # elements


def cpu_forward(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    linear = x.new_tensor(LINEAR)
    for a, s in zip(x.view(-1).split(CPU_BLOCK), y.view(-1).split(CPU_BLOCK), strict=True):
        torch.addcmul(linear, a, a, value=CUBIC, out=s)
        s.mul_(a).sigmoid_().mul_(a)
    return y


def cpu_backward(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The results' own memory holds what is on the way to them.

    x u' = 3 u - 2 LINEAR x, so the slope is  s + 3 (u - 2/3 LINEAR x) s (1 - s)
    """
    dx, y = torch.empty_like(x), torch.empty_like(x)
    linear = x.new_tensor(LINEAR)
    blocks = (t.view(-1).split(CPU_BLOCK) for t in (dy, x, dx, y))
    for d, a, u, s in zip(*blocks, strict=True):
        torch.addcmul(linear, a, a, value=CUBIC, out=u)
        torch.sigmoid(u.mul_(a), out=s)
        u.sub_(a, alpha=2 / 3 * LINEAR)
        torch.ops.aten.sigmoid_backward.grad_input(u, s, grad_input=u)  # u s (1 - s)
        torch.add(s, u, alpha=3, out=u)
        u.mul_(d)
        s.mul_(a)
    return dx, y


# ---- what callers use ---------------------------------------------------------------------------


def value(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """gelu(x + bias), x [..., f], bias [f] or None -> [..., f]; not differentiable."""
    if bias is not None and use_triton(x) and x.dtype != torch.float64:
        return forward(x.contiguous(), bias)
    if bias is not None:
        x = x + bias
    if x.is_cuda or x.element_size() < 4:
        return F.gelu(x, approximate="tanh")
    return cpu_forward(x.contiguous())


def again(dy: Tensor, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(dx, gelu(x + bias)) of the gradient dy of the latter."""
    if bias is not None and use_triton(x) and x.dtype != torch.float64:
        return backward(dy.contiguous(), x.contiguous(), bias)
    if bias is not None:
        x = x + bias
    if x.is_cuda or x.element_size() < 4:
        dx = torch.ops.aten.gelu_backward(dy, x, approximate="tanh")
        return dx, F.gelu(x, approximate="tanh")
    return cpu_backward(dy.contiguous(), x.contiguous())


class _BiasGelu(Function):
    """forward   y = gelu(x + bias)
    backward  dx = dy gelu'(x + bias), dbias = its sum over rows"""

    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        return value(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, bias = ctx.saved_tensors
        dx, _ = again(dy, x, bias)
        if bias is None:
            return dx, None
        wide = torch.promote_types(dx.dtype, torch.float32)
        return dx, dx.reshape(-1, len(bias)).sum(0, dtype=wide).to(bias.dtype)


def bias_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same as `value`, differentiable."""
    return _BiasGelu.apply(x, bias)
