"""residual + dropout(x + bias), the end of every transformer sublayer, with the stateless mask.

    y = residual + (x + bias) keep / (1 - p)
    dx = dy keep / (1 - p),   dresidual = dy,   dbias = sum over rows of dx

Which elements are kept is a function of one key per row (`kernels.stateless_mask`), so the Triton
kernels compute the mask twice and keep nothing but the keys; on a CPU the hash costs more than the
rest, so the mask is kept, a byte per element. Imports torch, kernels.gpu, kernels.stateless_mask.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from kernels.gpu import cdiv, jit, launch, tl, use_triton
from kernels.stateless_mask import keep_element, keep_mask, lowest_kept, threshold

# ---- kernels ------------------------------------------------------------------------------------


@jit
def _forward(
    # pointers: x, residual, y [rows, width], bias [width], keys [rows] int64
    x, bias, residual, keys, y,
    # sizes; lowest is the least hash that is kept
    width, lowest, scale,
    # constants
    BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        a += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    a = tl.where(keep_element(tl.load(keys + row), column, lowest), a * scale, 0.0)
    a += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, a.to(y.dtype.element_ty), mask=inside)


@jit
def _backward(
    # pointers: dy, dx [rows, width], keys [rows] int64
    dy, keys, dx,
    # sizes
    width, lowest, scale,
    # constants
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    d = tl.load(dy + row * width + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.where(keep_element(tl.load(keys + row), column, lowest), d * scale, 0.0)
    tl.store(dx + row * width + column, d.to(dx.dtype.element_ty), mask=inside)


# ---- launchers ----------------------------------------------------------------------------------

BLOCK = 1024


def forward(x: Tensor, bias: Tensor | None, residual: Tensor, keys: Tensor, p: float) -> Tensor:
    """[rows, width] operands, keys [rows]; y has the residual's type."""
    rows, width = x.shape
    y = torch.empty_like(residual)
    launch(
        _forward, (rows, cdiv(width, BLOCK)),
        x, x if bias is None else bias, residual, keys, y, width, lowest_kept(p), 1 / (1 - p),
        BIAS=bias is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return y


def backward(dy: Tensor, keys: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """dx in `dtype`."""
    rows, width = dy.shape
    dx = torch.empty_like(dy, dtype=dtype)
    launch(
        _backward, (rows, cdiv(width, BLOCK)),
        dy, keys, dx, width, lowest_kept(p), 1 / (1 - p), BLOCK=BLOCK
    )
    return dx


# ---- autograd and reference ---------------------------------------------------------------------


def _own(x: Tensor, overwrite: bool, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, to be written to. If x itself is kept for a backward, autograd will say so."""
    return x.detach() if overwrite and x.dtype == dtype else x.to(dtype, copy=True)


class _BiasDropoutAdd(Function):
    """forward   y = residual + dropout(x + bias)
    backward  dx = dropout(dy), by the same mask"""

    @staticmethod
    def forward(ctx, x, bias, residual, keys, p, overwrite):
        rows = x.reshape(-1, x.shape[-1])
        residual = residual.reshape(rows.shape)
        keys = keys.reshape(-1)
        ctx.p, ctx.has_bias, ctx.dtype = p, bias is not None, x.dtype
        ctx.kernels = use_triton(x) and x.dtype != torch.float64
        if ctx.kernels:
            ctx.save_for_backward(keys)
            y = forward(rows.contiguous(), bias, residual.contiguous(), keys, p)
            return y.view(x.shape)
        keep = keep_mask(keys, rows.shape[1], p)
        ctx.save_for_backward(keep)
        y = _own(rows, overwrite, residual.dtype)
        y = (y if bias is None else y.add_(bias)).mul_(keep)
        return torch.add(residual, y, alpha=1 / (1 - p), out=y).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (saved,) = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        if ctx.kernels:
            dx = backward(rows.contiguous(), saved, ctx.p, ctx.dtype)
        else:
            dx = (rows * saved).mul_(1 / (1 - ctx.p)).to(ctx.dtype)
        dbias = dx.sum(0) if ctx.has_bias and ctx.needs_input_grad[1] else None
        return dx.view(dy.shape), dbias, dy, None, None, None


class _BiasAdd(Function):
    """forward   y = residual + x + bias
    backward  dx = dresidual = dy"""

    @staticmethod
    def forward(ctx, x, bias, residual, overwrite):
        ctx.dtype = x.dtype
        y = _own(x, overwrite, residual.dtype).add_(residual)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return dy.to(ctx.dtype), dbias, dy, None


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    keys: Tensor | None = None,
    p: float = 0.0,
    *,
    overwrite: bool = False,
) -> Tensor:
    """residual + dropout(x + bias).

    x, residual  [s, b, h]; the result has the residual's type
    bias         [h] or None
    keys         [s, b] int64, one per row; None drops nothing (evaluation)
    p            probability of being dropped, in [0, 1)
    overwrite    x is needed by nobody afterwards: its memory may become the result's. If something
                 kept it for backward, that backward raises RuntimeError
    """
    if keys is None or threshold(p) == 0:
        return _BiasAdd.apply(x, bias, residual, overwrite)
    if keys.shape != x.shape[:-1]:
        raise ValueError(f"keys are {tuple(keys.shape)}; x {tuple(x.shape)} needs one per row")
    return _BiasDropoutAdd.apply(x, bias, residual, keys, p, overwrite)
