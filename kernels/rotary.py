"""Rotary position embedding (Su et al., 2021): pairs of channels turn by an angle per position.

    y1 = x1 cos - x2 sin        dx1 =  dy1 cos + dy2 sin
    y2 = x2 cos + x1 sin        dx2 = -dy1 sin + dy2 cos

The pairs are (i, i + w/2), or neighbours (2i, 2i + 1) when interleaved; channels from w on are left
alone. The backward is the forward with -sin, so nothing but the tables is kept. Both forms write
the result once: no turned copy, no concatenation. Imports torch and kernels.gpu.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from kernels.gpu import jit, launch, next_power_of_two, tl, use_triton

# ---- kernel -------------------------------------------------------------------------------------


@jit
def _turn(
    # pointers: x, y [tokens, heads, width], cos, sin [tokens, half]
    x, y, cos, sin,
    # sizes; sign is -1 for the backward
    heads, width, half, sign,
    # strides: of x between tokens and heads; between pairs, and between the two of a pair
    x_token, x_head, PAIR: tl.constexpr, partner,
    # constants: powers of two that hold half and width
    HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = x + token * x_token + head * x_head
    out = y + (token * heads + head) * width
    i = tl.arange(0, HALF)
    inside = i < half
    c = tl.load(cos + token * half + i, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + token * half + i, mask=inside, other=0.0).to(tl.float32) * sign
    x1 = tl.load(source + i * PAIR, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + i * PAIR + partner, mask=inside, other=0.0).to(tl.float32)
    kind = y.dtype.element_ty
    tl.store(out + i * PAIR, (x1 * c - x2 * s).to(kind), mask=inside)
    tl.store(out + i * PAIR + partner, (x2 * c + x1 * s).to(kind), mask=inside)
    j = tl.arange(0, WIDTH)
    rest = (j >= 2 * half) & (j < width)
    tl.store(out + j, tl.load(source + j, mask=rest, other=0.0), mask=rest)


# ---- launcher -----------------------------------------------------------------------------------


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: float) -> Tensor:
    """x [tokens, heads, width] with unit stride inside; cos, sin [tokens, half] contiguous."""
    tokens, heads, width = x.shape
    half = cos.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        _turn, (tokens, heads),
        x, y, cos, sin, heads, width, half, sign, x.stride(0), x.stride(1),
        PAIR=2 if interleaved else 1, partner=1 if interleaved else half,
        HALF=next_power_of_two(half), WIDTH=next_power_of_two(width), num_warps=1,
    )  # fmt: skip
    return y


# ---- reference ----------------------------------------------------------------------------------


def reference_turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: float) -> Tensor:
    """The same; cos and sin [tokens, half]."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [tokens, 1, half]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    x1, x2 = x[..., first], x[..., second]
    torch.mul(x1, cos, out=y[..., first]).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=y[..., second]).addcmul_(x1, sin, value=sign)
    y[..., 2 * half :] = x[..., 2 * half :]
    return y


# ---- autograd, and what callers use -------------------------------------------------------------


class _Rotary(Function):
    """forward   y = x turned by the angle
    backward  dx = dy turned back"""

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _Rotary.apply_turn(x, cos, sin, interleaved, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return _Rotary.apply_turn(dy, cos, sin, ctx.interleaved, -1.0), None, None, None

    @staticmethod
    def apply_turn(x, cos, sin, interleaved, sign):
        heads, width = x.shape[-2:]
        tokens = x.reshape(-1, heads, width)
        if use_triton(x) and x.dtype != torch.float64:
            if tokens.stride(-1) != 1:
                tokens = tokens.contiguous()
            return turn(tokens, cos, sin, interleaved, sign).view(x.shape)
        return reference_turn(tokens, cos, sin, interleaved, sign).view(x.shape)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [s, b, a, d] turned by the tables cos, sin [s, b, w/2] (or [s, b, 1, w/2]), w <= d."""
    half = cos.shape[-1]
    tokens, expected = x.shape[:-2].numel(), cos.numel() // max(half, 1)
    if tokens != expected or cos.shape != sin.shape or 2 * half > x.shape[-1]:
        raise ValueError(
            f"rotary tables {tuple(cos.shape)} and {tuple(sin.shape)} do not fit x "
            f"{tuple(x.shape)}: one row per token, of at most half of {x.shape[-1]} channels"
        )
    cos, sin = (table.reshape(-1, half).contiguous() for table in (cos, sin))
    return _Rotary.apply(x, cos, sin, interleaved)
