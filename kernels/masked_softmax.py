"""softmax(scale * scores) over the keys a query may look at, for attention without a fused kernel.

    p_j  = exp(scale x_j - m) / sum over visible k of exp(scale x_k - m),   0 where not visible
    dx_j = scale p_j (dp_j - sum_k p_k dp_k)

A query that may look at nothing gets zeros. Only p is kept for the backward, and neither the scaled
nor the masked scores exist beside it. (Without attention dropout, torch's
scaled_dot_product_attention is better: it keeps no [s, s] matrix at all.) Imports torch and
kernels.gpu.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from kernels.gpu import jit, launch, next_power_of_two, tl, use_triton
from kernels.layer_norm import warps

# ---- kernels ------------------------------------------------------------------------------------


@jit
def _forward(
    # pointers: scores, p [b * a * q, k], mask [b * q, k] bytes
    scores, mask, p,
    # sizes
    heads, queries, keys, scale,
    # constants
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    query, batch = row % queries, row // (heads * queries)
    j = tl.arange(0, BLOCK)
    visible = j < keys
    x = tl.load(scores + row * keys + j, mask=visible, other=0.0).to(tl.float32) * scale
    if CAUSAL:  # the last query sees every key
        visible = visible & (j <= query + keys - queries)
    if MASKED:
        seen = tl.load(mask + (batch * queries + query) * keys + j, mask=j < keys, other=0)
        visible = visible & (seen != 0)
    x = tl.where(visible, x, float("-inf"))
    top = tl.max(x, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    e = tl.where(visible, tl.exp(x - top), 0.0)
    total = tl.sum(e, 0)
    e = e / tl.where(total > 0.0, total, 1.0)
    tl.store(p + row * keys + j, e.to(p.dtype.element_ty), mask=j < keys)


@jit
def _backward(
    # pointers, [rows, keys]
    dp, p, dx,
    # sizes
    keys, scale,
    # constants
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    at, inside = row * keys + j, j < keys
    a = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dp + at, mask=inside, other=0.0).to(tl.float32)
    out = scale * a * (d - tl.sum(a * d, 0))
    tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside)


# ---- launchers ----------------------------------------------------------------------------------


def forward(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """scores [b, a, q, k], mask [b, q, k] bool or None; contiguous."""
    b, heads, queries, keys = scores.shape
    p = torch.empty_like(scores)
    seen = p if mask is None else mask.view(torch.uint8)
    block = next_power_of_two(keys)
    launch(
        _forward, (b * heads * queries,),
        scores, seen, p, heads, queries, keys, scale,
        MASKED=mask is not None, CAUSAL=causal, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return p


def backward(dp: Tensor, p: Tensor, scale: float) -> Tensor:
    keys = p.shape[-1]
    dx = torch.empty_like(p)
    block = next_power_of_two(keys)
    launch(
        _backward, (p.numel() // keys,),
        dp, p, dx, keys, scale, BLOCK=block, num_warps=warps(block)
    )
    return dx


# ---- reference ----------------------------------------------------------------------------------


def reference_forward(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    x = scores * scale
    hidden = None if mask is None else ~mask.unsqueeze(1)
    if causal:
        queries, keys = x.shape[-2:]
        future = torch.ones(queries, keys, dtype=torch.bool, device=x.device)
        future = future.triu_(1 + keys - queries)
        hidden = future if hidden is None else hidden | future
    if hidden is None:
        return torch.softmax(x, -1)
    # The least finite number rather than -inf: a row without any visible key must not be NaN.
    p = torch.softmax(x.masked_fill_(hidden, torch.finfo(x.dtype).min), -1)
    return p.masked_fill_(hidden, 0)


def reference_backward(dp: Tensor, p: Tensor, scale: float) -> Tensor:
    return torch._softmax_backward_data(dp, p, -1, p.dtype).mul_(scale)


# ---- autograd, and what callers use -------------------------------------------------------------


class _MaskedSoftmax(Function):
    """forward   p = softmax over the visible keys
    backward  dscores from p alone"""

    @staticmethod
    def forward(ctx, scores, mask, scale, causal):
        ctx.kernels = use_triton(scores) and scores.dtype != torch.float64
        if ctx.kernels:
            p = forward(scores.contiguous(), mask, scale, causal)
        else:
            p = reference_forward(scores, mask, scale, causal)
        ctx.save_for_backward(p)
        ctx.scale = scale
        return p

    @staticmethod
    @once_differentiable
    def backward(ctx, dp):
        (p,) = ctx.saved_tensors
        take = backward if ctx.kernels else reference_backward
        return take(dp.contiguous(), p, ctx.scale), None, None, None


def scaled_masked_softmax(
    scores: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False
) -> Tensor:
    """softmax of scale * scores over visible keys.

    scores  [b, a, q, k]
    mask    [b, 1, q, k] bool, True where a query may look at a key (as torch's attention has it)
    causal  a query sees itself and earlier keys; with more keys than queries the last ones align
    """
    if mask is not None:
        b, _, queries, keys = scores.shape
        if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1:
            raise ValueError(
                f"the attention mask is {mask.dtype} {tuple(mask.shape)}; it must be bool "
                f"[b, 1, q, k] for scores {tuple(scores.shape)}"
            )
        mask = mask.expand(b, 1, queries, keys).squeeze(1).contiguous()
    return _MaskedSoftmax.apply(scores, mask, scale, causal)
