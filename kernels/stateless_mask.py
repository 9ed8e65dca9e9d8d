"""Dropout masks as a pure function of integers: the element hash, in numpy, torch and Triton.

A mask is defined row by row. A row (one position of one sample, in one place of one layer) has a
64-bit key, made by `core.random`; element j of that row is kept when

    mix(mix(j * ODD + low(key)) ^ high(key))  as an unsigned 32-bit number  >=  p * 2^32

with mix the 32-bit finaliser below. Nothing else enters: the mask cannot differ between layouts,
between forward and recomputation, or after a restart; whoever knows the key can make any part.

mix is the two-round xor-shift-multiply permutation "lowbias32" (C. Wellons, 2018, "Prospecting for
hash functions"): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.gpu import jit, tl
from kernels.integer_mix import mix_unsigned_

ODD = 0x9E3779B9  # 2^32 / golden ratio: neighbouring elements start far apart
MULTIPLY_1 = 0x7FEB352D
MULTIPLY_2 = 0x846CA68B
ROUNDS = ((16, MULTIPLY_1), (15, MULTIPLY_2), (16, None))
BLOCK = 1 << 15  # elements worked on at once on a CPU: they stay in its cache


def _signed(x: int) -> int:
    """The int32 with the same bits, since torch computes on signed numbers."""
    return x - (1 << 32) if x >= 1 << 31 else x


def _shift_xor_(x: Tensor, bits: int) -> Tensor:
    """x ^= x >> bits with a logical shift (torch's is arithmetic on int32)."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _mix_(x: Tensor) -> Tensor:
    for bits, factor in ROUNDS:
        _shift_xor_(x, bits)
        if factor is not None:
            x.mul_(_signed(factor))
    return x


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
    least = threshold(p)
    if keys.device.type == "cpu":
        return _keep_on_host(keys, length, least, offset)
    return _keep_on_device(keys, length, least, offset)


def _keep_on_device(keys: Tensor, length: int, least: int, offset: int) -> Tensor:
    low = keys.to(torch.int32)  # wraps: the low 32 bits
    high = (keys >> 32).to(torch.int32)
    j = torch.arange(offset, offset + length, dtype=torch.int64, device=keys.device)
    x = (j * _signed(ODD)).to(torch.int32) + low.unsqueeze(-1)
    x = _mix_(x).bitwise_xor_(high.unsqueeze(-1))
    x = _mix_(x)
    # unsigned comparison on signed numbers: flip the top bit of both sides
    return x.bitwise_xor_(-(1 << 31)) >= least - (1 << 31)


def _keep_on_host(keys: Tensor, length: int, least: int, offset: int) -> Tensor:
    """By numpy, which has unsigned numbers: fewer steps, and two to seven times as fast."""
    rows = keys.numpy().reshape(-1, 1)
    low, high = rows.astype(np.uint32), (rows >> 32).astype(np.uint32)
    j = (np.arange(offset, offset + length, dtype=np.uint64) * ODD).astype(np.uint32)
    keep = np.empty((len(rows), length), bool)
    step = max(1, BLOCK // max(1, length))
    for i in range(0, len(rows), step):
        x = low[i : i + step] + j
        spare = np.empty_like(x)
        mix_unsigned_(x, spare, ROUNDS)
        np.bitwise_xor(x, high[i : i + step], out=x)
        mix_unsigned_(x, spare, ROUNDS)
        np.greater_equal(x, least, out=keep[i : i + step])
    return torch.from_numpy(keep).view(*keys.shape, length)


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
