"""Dropout masks as a pure function of integers: the element hash, in torch and in Triton.

A mask is defined row by row. A row (one position of one sample, in one place of one layer) has a
64-bit key, made by `core.random`; element j of that row is kept when

    mix(mix(j * ODD + low(key)) ^ high(key))  as an unsigned 32-bit number  >=  p * 2^32

with mix the 32-bit finaliser below. Nothing else enters: the mask cannot differ between layouts,
between forward and recomputation, or after a restart; whoever knows the key can make any part.

mix is the two-round xor-shift-multiply permutation "lowbias32" (C. Wellons, 2018, "Prospecting for
hash functions"): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu import jit, tl

ODD = 0x9E3779B9  # 2^32 / golden ratio: neighbouring elements start far apart
MULTIPLY_1 = 0x7FEB352D
MULTIPLY_2 = 0x846CA68B


def _signed(x: int) -> int:
    """The int32 with the same bits, since torch computes on signed numbers."""
    return x - (1 << 32) if x >= 1 << 31 else x


def _shift_xor_(x: Tensor, bits: int) -> Tensor:
    """x ^= x >> bits with a logical shift (torch's is arithmetic on int32)."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _mix_(x: Tensor) -> Tensor:
    _shift_xor_(x, 16).mul_(_signed(MULTIPLY_1))
    _shift_xor_(x, 15).mul_(_signed(MULTIPLY_2))
    return _shift_xor_(x, 16)


def threshold(p: float) -> int:
    """Elements whose hash, as an unsigned number, is below this are dropped."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"a dropout probability of {p} is not in [0, 1)")
    return round(p * (1 << 32))


def keep_mask(keys: Tensor, length: int, p: float, offset: int = 0) -> Tensor:
    """Which elements survive.

    keys     [...] int64, one per row
    length   elements of a row that are wanted, the first of them being number `offset`
    returns  [..., length] bool, True with probability 1 - p
    """
    low = keys.to(torch.int32)  # wraps: the low 32 bits
    high = (keys >> 32).to(torch.int32)
    j = torch.arange(offset, offset + length, dtype=torch.int64, device=keys.device)
    x = (j * _signed(ODD)).to(torch.int32) + low.unsqueeze(-1)
    x = _mix_(x).bitwise_xor_(high.unsqueeze(-1))
    x = _mix_(x)
    # unsigned comparison on signed numbers: flip the top bit of both sides
    return x.bitwise_xor_(-(1 << 31)) >= threshold(p) - (1 << 31)


# ---- the same in Triton --------------------------------------------------------------------------

_ODD = tl.constexpr(ODD)
_MULTIPLY_1 = tl.constexpr(MULTIPLY_1)
_MULTIPLY_2 = tl.constexpr(MULTIPLY_2)
_TOP_BIT = tl.constexpr(1 << 31)


def lowest_kept(p: float) -> int:
    """`keep_element`'s threshold: an int32, since both sides have their top bit flipped."""
    return threshold(p) - (1 << 31)


@jit
def _mix(x):
    x = (x ^ (x >> 16)) * _MULTIPLY_1
    x = (x ^ (x >> 15)) * _MULTIPLY_2
    return x ^ (x >> 16)


@jit
def keep_element(key, column, lowest):
    """Whether elements `column` of the row with this int64 key survive; see `lowest_kept`."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    x = _mix(column.to(tl.uint32) * _ODD + low)
    x = _mix(x ^ high) ^ _TOP_BIT
    return x.to(tl.int32, bitcast=True) >= lowest
