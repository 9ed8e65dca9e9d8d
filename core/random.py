"""Randomness without state: every random value is a pure function of integers and names.

* The initial value of an element depends on (seed, full parameter name, global index), so gathering
  the shards of any layout gives the same matrix, bit for bit, on any device.
* A dropout mask depends on (seed, running number of the training sample, layer, place, position or
  head, element): it cannot differ between layouts, forward and recomputation, or after a restart.

Forks that want Megatron's stateful tracker find it in `core.tensor_parallel.random`.

Read in this order: `stream_key` and `mix64` (the counter-based generator), `init_normal_`,
`DropoutKeys`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from core.shard import Shard
from kernels.integer_mix import mix_unsigned_

GOLDEN = 0x9E3779B97F4A7C15
BLOCK = 1 << 17  # elements worked on at once: few calls, temporaries of 1 MiB
SMALL = 1 << 14  # up to here the calls themselves are what mixing costs on a CPU
FINALISER = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None))


def _signed(x: int) -> int:
    """The int64 with the same bits as the low 64 of x."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >= 1 << 63 else x


def stream_key(seed: int, *names: object) -> int:
    """A signed 64-bit key that belongs to (seed, names) alone."""
    text = "\x1f".join([str(seed), *map(str, names)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def mix64_(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, in place (Steele, Lea, Flood, 2014): a permutation."""
    if x.device.type == "cpu" and x.numel() <= SMALL:  # numpy costs less a call
        numbers = x.numpy().view(np.uint64)
        mix_unsigned_(numbers, np.empty_like(numbers), FINALISER)
        return x
    for shift, factor in FINALISER:
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            x.mul_(_signed(factor))
    return x


def bits(key: int, index: Tensor) -> Tensor:
    """64 random bits for every int64 index: mix(key + (index + 1) * GOLDEN)."""
    return mix64_((index + 1) * _signed(GOLDEN) + key)


# ---- initial values ---------------------------------------------------------------------------
#
# Inverse of the normal distribution function: Wichura, 1988, algorithm AS 241 (PPND16), relative
# error about 1e-16. Every step below is a single IEEE operation (+ - * / sqrt), the logarithm
# included, so that vector and scalar code, CPU and GPU give the same bits.

_CENTRE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    (5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
     5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0),
)  # fmt: skip
_TAIL = (
    (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177,
     1.27045825245236838258, 3.64784832476320460504, 5.7694972214606914055,
     4.6303378461565452959, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966,
     0.14810397642748007459, 0.68976733498510000455, 1.6763848301838038494,
     2.05319162663775882187, 1.0),
)  # fmt: skip
_FAR_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386,
     0.026532189526576123093, 0.29656057182850489123, 1.7848265399172913358,
     5.4637849111641143699, 6.6579046435011037772),
    (2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5,
     7.868691311456132591e-4, 0.0148753612908506148525, 0.13692988092273580531,
     0.59983220655588793769, 1.0),
)  # fmt: skip


def _ratio(x: Tensor, coefficients: tuple[tuple[float, ...], tuple[float, ...]]) -> Tensor:
    """Quotient of two polynomials by Horner's rule, highest power first."""
    parts = []
    for row in coefficients:
        y = torch.full_like(x, row[0])
        for c in row[1:]:
            y.mul_(x).add_(c)
        parts.append(y)
    return parts[0].div_(parts[1])


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of positive numbers from exact operations.

    x = m 2^e with m in [1/2, 1); moved to [1/sqrt 2, sqrt 2); with z = (m-1)/(m+1),
    log m = 2 (z + z^3/3 + z^5/5 + …), |z| < 0.172: 11 terms reach 1e-17.
    """
    m, e = torch.frexp(x)
    small = m < 0.7071067811865476
    m = torch.where(small, m * 2, m)
    e = e.to(x.dtype) - small.to(x.dtype)
    z = (m - 1) / (m + 1)
    z2 = z * z
    series = torch.full_like(z, 1 / 23)
    for k in range(21, 0, -2):
        series.mul_(z2).add_(1 / k)
    return e * 0.6931471805599453 + series * z * 2


def normal(random: Tensor) -> Tensor:
    """int64 random bits -> standard normal numbers in float64, by inversion."""
    # the top 53 bits, centred: u in (-1/2, 1/2), never an end
    u = ((random >> 11).to(torch.float64) + 0.5) * 2.0**-53
    out = u * _ratio(0.180625 - u * u, _CENTRE)
    tail = u.abs() > 0.425
    ut = u[tail]
    r = (-_log(0.5 - ut.abs())).sqrt()
    z = torch.where(r <= 5.0, _ratio(r - 1.6, _TAIL), _ratio(r - 5.0, _FAR_TAIL))
    out[tail] = torch.where(ut < 0, -z, z)
    return out


def init_normal_(
    tensor: Tensor,
    *,
    seed: int,
    name: str,
    shard: Shard,
    tp_rank: int = 0,
    tp_size: int = 1,
    std: float = 1.0,
    mean: float = 0.0,
) -> Tensor:
    """Fill this rank's part of the parameter `name` with normal values; padding rows become zero.

    tensor has shard.local_shape(tp_size). Element i (row-major in the logical shape) is
    mean + std * normal(bits(key(seed, name), i)), computed in float64 and rounded once.
    """
    if tuple(tensor.shape) != shard.local_shape(tp_size):
        raise ValueError(
            f"{name}: a tensor of shape {tuple(tensor.shape)} is not rank {tp_rank}'s part of "
            f"{shard.shape} over {tp_size}: that is {shard.local_shape(tp_size)}"
        )
    key = stream_key(seed, "init", name)
    local, _ = shard.local_slices(tp_rank, tp_size)
    box = shard.box(tp_rank, tp_size)
    with torch.no_grad():
        tensor.zero_()
        mine = tensor[local]
        if mine.numel() == 0:
            return tensor
        # one row of the last dimension at a time in blocks: global index = row offset + column
        columns = torch.arange(*box[-1], device=tensor.device)
        offsets = _row_offsets(shard.shape, box, tensor.device)
        rows = mine.reshape(-1, columns.numel()) if mine.is_contiguous() else None
        step = max(1, BLOCK // columns.numel())
        values = []
        for start in range(0, offsets.numel(), step):
            index = offsets[start : start + step].unsqueeze(1) + columns
            block = normal(bits(key, index)).mul_(std).add_(mean)
            if rows is not None:
                rows[start : start + step] = block.to(tensor.dtype)
            else:
                values.append(block.to(tensor.dtype))
        if rows is None:
            mine.copy_(torch.cat(values).view(mine.shape))
    return tensor


def _row_offsets(
    shape: tuple[int, ...], box: tuple[tuple[int, int], ...], device: torch.device
) -> Tensor:
    """Row-major global index of the first element of every row (all dimensions but the last)."""
    offsets = torch.zeros(1, dtype=torch.int64, device=device)
    stride = shape[-1]
    strides = []
    for n in reversed(shape[:-1]):
        strides.insert(0, stride)
        stride *= n
    for (start, stop), stride in zip(box[:-1], strides, strict=True):
        here = torch.arange(start, stop, device=device) * stride
        offsets = (offsets.unsqueeze(1) + here).view(-1)
    return offsets


# ---- dropout ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DropoutKeys:
    """What the dropout of one microbatch depends on.

    seed     the run's seed
    samples  [b] int64 running numbers of the training samples (consumed samples + place in batch)
    """

    seed: int
    samples: Tensor

    def rows(self, layer: int, place: str, positions: Tensor) -> Tensor:
        """[len(positions), b] int64: one key for each (position or head, sample) row.

        key = mix(mix(stream + sample G) + position G): two rounds keep the two counters apart.
        """
        stream = stream_key(self.seed, "dropout", layer, place)
        by_sample = bits(stream, self.samples)
        return mix64_(by_sample.unsqueeze(0) + (positions.unsqueeze(1) + 1) * _signed(GOLDEN))

    def keep(self, layer: int, place: str, positions: Tensor, length: int, p: float) -> Tensor:
        """[len(positions), b, length] bool mask of what survives dropout with probability p."""
        from kernels.stateless_mask import keep_mask  # brings Triton, which takes long to import

        return keep_mask(self.rows(layer, place, positions), length, p)
