"""Triton kernels of the output loss: a matrix product with the loss in its epilogue.

    exponentials  logits of a token chunk in float32; stored is exp(z - tile's largest), rounded,
                  and each tile's maximum and sum in float32
    finish        in place, exp(...) -> gradient, the target's entry from its float32 logit
    statistics    as the first, online over many tiles, nothing of size [n, v] is stored
    dlogits       logits once more -> gradient

No atomics, so results are bitwise repeatable. Why exponentials: rounding a logit of 20 to bf16
changes p by 6 %, rounding exp by 0.4 %. On Hopper and later operands come by descriptor (TMA),
before by pointers; results go by pointers, which spills less. A row's offset is computed in 64
bits; inside a tile 32 are enough.

Launchers are in `linear_cross_entropy_triton`, formulas and reference in `linear_cross_entropy`.
Imports kernels.gpu.
"""

from __future__ import annotations

from kernels.gpu import jit, tl

LOG2E = tl.constexpr(1.4426950408889634)
GROUP = tl.constexpr(8)  # tiles of tokens worked on side by side, to use a weight tile again

@jit
def logits_tile(
    hidden, weight, bias, m0, n0, n, v, h, hidden_row, weight_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """float32 [BM, BN] logits of tokens m0 … and entries n0 …; outside the matrix 0 (plus bias)."""
    acc = tl.zeros((BM, BN), tl.float32)
    if TMA:
        for k in range(tl.cdiv(h, BK)):
            a, b = hidden.load([m0, k * BK]), weight.load([n0, k * BK])
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a, b.T, acc)
    else:
        rm, rn, rk = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
        m_ok, n_ok = m0 + rm < n, n0 + rn < v
        hp = hidden + m0.to(tl.int64) * hidden_row + rm[:, None] * hidden_row + rk[None, :]
        wp = weight + n0.to(tl.int64) * weight_row + rn[None, :] * weight_row + rk[:, None]
        for k in range(tl.cdiv(h, BK)):
            if EVEN:  # the hidden size is a multiple of BK
                a = tl.load(hp, mask=m_ok[:, None], other=0.0)
                b = tl.load(wp, mask=n_ok[None, :], other=0.0)
            else:
                k_ok = rk < h - k * BK
                a = tl.load(hp, mask=m_ok[:, None] & k_ok[None, :], other=0.0)
                b = tl.load(wp, mask=n_ok[None, :] & k_ok[:, None], other=0.0)
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a, b, acc)
            hp += BK
            wp += BK
    if BIAS:
        columns = n0 + tl.arange(0, BN)
        acc += tl.load(bias + columns, mask=columns < v, other=0.0).to(tl.float32)[None, :]
    return acc


@jit
def tile_of(program, n, v, BM: tl.constexpr, BN: tl.constexpr):
    """(first token, first entry) of a program's tile; GROUP tiles of tokens go side by side."""
    across, down = tl.cdiv(v, BN), tl.cdiv(n, BM)
    group = program // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    inside = program % (GROUP * across)
    return (group * GROUP + inside % height) * BM, (inside // height) * BN


@jit
def exponentials_kernel(
    # pointers: [n, h], [v, h], [v], [n] int64, [n, v], float32 [4, tiles of v, n]
    hidden, weight, bias, target, e, stats,
    # sizes
    n, v, h,
    # strides
    hidden_row, weight_row, e_row,
    # constants
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, LINEAR: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """e = exp(z - the tile row's largest); stats: that largest, sum e, z of the target, sum z."""
    m0, n0 = tile_of(tl.program_id(0), n, v, BM, BN)
    z = logits_tile(
        hidden, weight, bias, m0, n0, n, v, h, hidden_row, weight_row,
        BM, BN, BK, TMA, EVEN, BIAS, UPCAST,
    )  # fmt: skip
    rows, columns = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
    m_ok, n_ok = rows < n, columns < v
    plane = tl.cdiv(v, BN) * n
    at = stats + (n0 // BN) * n + rows
    wanted = tl.load(target + rows, mask=m_ok, other=-1).to(tl.int32)
    found = tl.sum(tl.where(wanted[:, None] == columns[None, :], z, 0.0), 1)
    tl.store(at + 2 * plane, found, mask=m_ok)
    if LINEAR:
        tl.store(at + 3 * plane, tl.sum(tl.where(n_ok[None, :], z, 0.0), 1), mask=m_ok)
    z = tl.where(n_ok[None, :], z, float("-inf"))
    top = tl.max(z, 1)
    tl.store(at, top, mask=m_ok)
    top = tl.where(top == float("-inf"), 0.0, top)  # every entry banned by its bias
    z = tl.exp2((z - top[:, None]) * LOG2E)
    tl.store(at + plane, tl.sum(z, 1), mask=m_ok)
    ep = e + m0.to(tl.int64) * e_row + n0 + tl.arange(0, BM)[:, None] * e_row
    ep += tl.arange(0, BN)[None, :]
    tl.store(ep, z.to(e.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])


@jit
def finish_kernel(
    # pointers: [n, v], [n] int64, float32 [tiles of v, n], [n], and [4, n]: lse, a, b, c
    e, target, top, found, tokens,
    # sizes and stride
    n, v, e_row,
    # constants; TILE is BN of the kernel above, a multiple of BN here
    SMOOTH: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """e -> a p - b [j = target] - c, in place."""
    m0, n0 = tl.program_id(0) * BM, tl.program_id(1) * BN
    rows, columns = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
    m_ok = rows < n
    lse = tl.load(tokens + rows, mask=m_ok, other=0.0)
    a = tl.load(tokens + n + rows, mask=m_ok, other=0.0)
    b = tl.load(tokens + 2 * n + rows, mask=m_ok, other=0.0)
    largest = tl.load(top + (n0 // TILE) * n + rows, mask=m_ok, other=0.0)
    scale = tl.exp2((largest - lse) * LOG2E) * a
    at = e + m0.to(tl.int64) * e_row + n0
    at += tl.arange(0, BM)[:, None] * e_row + tl.arange(0, BN)[None, :]
    inside = m_ok[:, None] & (columns < v)[None, :]
    d = tl.load(at, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
    # p - 1 of the target from its float32 logit: exact also where p is nearly 1
    z = tl.load(found + rows, mask=m_ok, other=0.0)
    own = tl.exp2((z - lse) * LOG2E) * a - b
    wanted = tl.load(target + rows, mask=m_ok, other=-1).to(tl.int32)
    d = tl.where(wanted[:, None] == columns[None, :], own[:, None], d)
    if SMOOTH:
        d -= tl.load(tokens + 3 * n + rows, mask=m_ok, other=0.0)[:, None]
    tl.store(at, d.to(e.dtype.element_ty), mask=inside)


@jit
def statistics_kernel(
    # pointers: [n, h], [v, h], [v], [n] int64, float32 [4, splits, n]
    hidden, weight, bias, target, stats,
    # sizes
    n, v, h, tiles_per_split,
    # strides
    hidden_row, weight_row,
    # constants
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, LINEAR: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Largest z, sum exp(z - largest), z of the target and sum z over one split of the entries."""
    m0, split = tl.program_id(0) * BM, tl.program_id(1)
    rows = m0 + tl.arange(0, BM)
    m_ok = rows < n
    wanted = tl.load(target + rows, mask=m_ok, other=-1).to(tl.int32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    found = tl.zeros((BM,), tl.float32)
    linear = tl.zeros((BM,), tl.float32)
    for j in range(tiles_per_split):
        n0 = (split * tiles_per_split + j) * BN
        columns = n0 + tl.arange(0, BN)
        z = logits_tile(
            hidden, weight, bias, m0, n0, n, v, h, hidden_row, weight_row,
            BM, BN, BK, TMA, EVEN, BIAS, UPCAST,
        )  # fmt: skip
        found += tl.sum(tl.where(wanted[:, None] == columns[None, :], z, 0.0), 1)
        if LINEAR:
            linear += tl.sum(tl.where((columns < v)[None, :], z, 0.0), 1)
        z = tl.where((columns < v)[None, :], z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        # a tile past the end is all -inf, and -inf - -inf is NaN
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total *= tl.exp2((top - safe) * LOG2E)
        total += tl.sum(tl.exp2((z - safe[:, None]) * LOG2E), 1)
        top = higher
    plane = tl.num_programs(1) * n
    at = stats + split * n + rows
    tl.store(at, top, mask=m_ok)
    tl.store(at + plane, total, mask=m_ok)
    tl.store(at + 2 * plane, found, mask=m_ok)
    if LINEAR:
        tl.store(at + 3 * plane, linear, mask=m_ok)


@jit
def dlogits_kernel(
    # pointers: [n, h], [v, h], [v], [n] int64, float32 [4, n]: lse, a, b, c; and [n, v]
    hidden, weight, bias, target, tokens, out,
    # sizes; the weight's first row is entry `first` of what target counts
    n, v, h, first,
    # strides
    hidden_row, weight_row, out_row,
    # constants
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, SMOOTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out = a p - b [j = target] - c"""
    m0, n0 = tile_of(tl.program_id(0), n, v, BM, BN)
    z = logits_tile(
        hidden, weight, bias, m0, n0, n, v, h, hidden_row, weight_row,
        BM, BN, BK, TMA, EVEN, BIAS, UPCAST,
    )  # fmt: skip
    rows, columns = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
    m_ok = rows < n
    lse = tl.load(tokens + rows, mask=m_ok, other=0.0)
    a = tl.load(tokens + n + rows, mask=m_ok, other=0.0)
    b = tl.load(tokens + 2 * n + rows, mask=m_ok, other=0.0)
    wanted = tl.load(target + rows, mask=m_ok, other=-1).to(tl.int32) - first
    d = tl.exp2((z - lse[:, None]) * LOG2E) * a[:, None]
    d -= tl.where(wanted[:, None] == columns[None, :], b[:, None], 0.0)
    if SMOOTH:
        d -= tl.load(tokens + 3 * n + rows, mask=m_ok, other=0.0)[:, None]
    op = out + m0.to(tl.int64) * out_row + n0 + tl.arange(0, BM)[:, None] * out_row
    op += tl.arange(0, BN)[None, :]
    tl.store(op, d.to(out.dtype.element_ty), mask=m_ok[:, None] & (columns < v)[None, :])
