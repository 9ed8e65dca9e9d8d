"""Matrix products of short operands that are added up in a wider type, never rounded in between.

Weight gradients are such sums: over microbatches, and over the chunks of the output loss. Imports
torch only. Used by kernels.linear_cross_entropy and by core's linears.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def add_product(out: Tensor, a: Tensor, b: Tensor, fresh: bool = False) -> None:
    """out += a @ b, or out = a @ b where it is fresh; never rounded to the operands' type.

    out [m, n] of the operands' type or a wider one; a [m, k], b [k, n]
    """
    if fresh and (a.dtype == out.dtype or not a.is_cuda):
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
        return
    if fresh:
        out.zero_()
    if a.dtype == out.dtype or not a.is_cuda:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
    elif _adds_to_wider_sum(a.device):
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        for part, rows in zip(out.split(4096), a.split(4096), strict=True):
            part.add_(torch.mm(rows, b, out_dtype=out.dtype))


@functools.cache
def _adds_to_wider_sum(device: torch.device) -> bool:
    """Whether this torch adds a bf16 product to a float32 matrix in one call; older ones refuse."""
    out, a = torch.zeros(16, 16, device=device), torch.zeros(16, 16, device=device).bfloat16()
    try:
        torch.addmm(out, a, a, out_dtype=out.dtype, out=out)
    except (RuntimeError, TypeError):
        return False
    return True
