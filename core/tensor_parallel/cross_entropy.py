"""Cross entropy of logits that are cut along the vocabulary.

    logits  [s, b, v/t]  my columns; the first `real` of them belong to the vocabulary of k
    target  [s, b]       global ids, the same on every rank
    loss    [s, b]       in fp32 (float64 for float64 logits), the same on every rank

With z the logits, m their maximum over the vocabulary, y the target:

    lse  = m + log sum exp(z - m)
    loss = (1 - a) (lse - z_y) + a (lse - mean z)         a = smoothing * k / (k - 1)
    d loss / d z = softmax(z) - (1 - a) [target] - a / k

so that smoothing puts (1 - smoothing) on the target and spreads the rest evenly over the k - 1
others, as Megatron's formula means to. Two collectives: the maximum [s b], then the sums [2 or 3,
s b] of exp(z - m), z_y - m and z - m. The logits are neither changed nor copied: backward makes the
softmax from them and lse. Work goes in blocks of rows, so that temporaries stay small.

Imports core.comm; the loss that is fused with the output layer is in output_loss.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from core.comm import Group, all_reduce_
from core.parallel_state import resolve

BLOCK = {"cpu": 1 << 20}  # elements worked on at once: temporaries stay in the cache
BLOCK_ON_DEVICE = 1 << 26


@dataclass(frozen=True)
class Columns:
    """This rank's part of the vocabulary: `real` columns from `start`, of `vocab` in all."""

    group: Group
    tag: str
    start: int
    real: int
    vocab: int
    smoothing: float  # a in the formula above


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: object | None = None,
    *,
    vocab_size: int | None = None,
    tag: str = "cross_entropy",
) -> Tensor:
    """Loss of every token: logits [..., v/t], target [...] -> [...].

    vocab_size  of the real vocabulary: columns past it are padding and take no part
    """
    group = resolve(tp_group)
    per_rank = vocab_parallel_logits.shape[-1]
    vocab = vocab_size or per_rank * group.size
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise ValueError(
            f"{tag}: logits of shape {tuple(vocab_parallel_logits.shape)} need a target of shape "
            f"{tuple(vocab_parallel_logits.shape[:-1])}, not {tuple(target.shape)}"
        )
    if not 0.0 <= label_smoothing < 1.0 or (label_smoothing and vocab < 2):
        raise ValueError(
            f"{tag}: label_smoothing {label_smoothing} must be in [0, 1), and needs a vocabulary "
            f"of 2 or more, not {vocab}"
        )
    start = group.rank * per_rank
    smoothing = label_smoothing * vocab / (vocab - 1) if label_smoothing else 0.0
    real = min(max(vocab - start, 0), per_rank)
    columns = Columns(group, tag, start, real, vocab, smoothing)
    return _VocabParallelCrossEntropy.apply(vocab_parallel_logits, target, columns)


def block_elements(device: torch.device) -> int:
    """Of logits that are worked on at once."""
    return BLOCK.get(device.type, BLOCK_ON_DEVICE)


def _blocks(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    step = max(1, block_elements(device) // max(columns, 1))
    return (slice(first, first + step) for first in range(0, rows, step))


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, columns: Columns) -> Tensor:
        c = columns
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        z = logits.reshape(-1, logits.shape[-1])[:, : c.real]  # [n, real]
        n = z.shape[0]
        # my column of the target, or -1 where it is another rank's
        local = target.reshape(-1) - c.start
        local = torch.where((local >= 0) & (local < c.real), local, -1)
        # 1. the maximum over the vocabulary
        top = z.new_full((n,), -torch.inf, dtype=wide)
        if c.real:
            top = z.amax(dim=-1).to(wide)
        all_reduce_(top, c.group, op="max", tag=f"{c.tag}.max")
        # 2. the sums
        sums = top.new_zeros((3 if c.smoothing else 2, n))
        if c.real:
            _local_sums(z, local, top, sums)
        all_reduce_(sums, c.group, tag=f"{c.tag}.sums")
        # 3. the loss
        log_sum = sums[0].log()
        loss = log_sum - sums[1]
        if c.smoothing:
            loss = (1 - c.smoothing) * loss + c.smoothing * (log_sum - sums[2] / c.vocab)
        ctx.columns = c
        ctx.save_for_backward(logits, local, top + log_sum)
        return loss.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss: Tensor):
        c = ctx.columns
        logits, local, lse = ctx.saved_tensors
        dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        z, dz = (x.reshape(-1, logits.shape[-1]) for x in (logits, dlogits))
        dz[:, c.real :].zero_()
        for rows in _blocks(z.shape[0], c.real, z.device):
            out = dz[rows, : c.real]
            p = out if out.dtype == lse.dtype else torch.empty_like(out, dtype=lse.dtype)
            torch.sub(z[rows, : c.real].to(lse.dtype), lse[rows, None], out=p).exp_()
            here, column = _targets(local[rows])
            p[here, column] -= 1 - c.smoothing
            if c.smoothing:
                p.sub_(c.smoothing / c.vocab)
            p.mul_(dloss.reshape(-1)[rows, None])
            if p is not out:
                out.copy_(p)
        return dlogits, None, None


def _targets(local: Tensor) -> tuple[Tensor, Tensor]:
    """(row, column) of the targets among my columns."""
    here = (local >= 0).nonzero().squeeze(1)
    return here, local[here]


def _local_sums(z: Tensor, local: Tensor, top: Tensor, sums: Tensor) -> None:
    """My columns' part of the sums: exp(z - m), z_y - m and, where there is room, z - m."""
    for rows in _blocks(*z.shape, z.device):
        shifted = z[rows].to(top.dtype) - top[rows, None]
        target = shifted.gather(1, local[rows, None].clamp(min=0)).squeeze(1)
        sums[1, rows] = torch.where(local[rows] >= 0, target, 0.0)
        if len(sums) == 3:
            sums[2, rows] = shifted.sum(dim=-1)
        sums[0, rows] = shifted.exp_().sum(dim=-1)
