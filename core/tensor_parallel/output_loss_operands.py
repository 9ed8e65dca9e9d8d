"""The operands and options of the output loss, checked, and what follows from them.

Imports core.comm, core.parallel_state and kernels.linear_cross_entropy; used by
`core.tensor_parallel.output_loss`, whose head explains the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.comm import Group
from core.parallel_state import resolve
from core.tensor_parallel.output_loss_passes import LossJob
from kernels.linear_cross_entropy import LossTerms, accumulation_dtype, local_target


@dataclass(frozen=True)
class OutputLayer:
    """The operands, checked, and what follows from them.

    hidden      [n / strips, h]
    rows        my rows of the real vocabulary, which begin with entry `start`
    vocab_size  None if only the ranks together would know
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    group: Group
    strips: int
    token_shape: tuple[int, ...]
    rows: int
    start: int
    vocab_size: int | None

    @classmethod
    def of(
        cls, hidden, weight, bias, tp_group, sequence_parallel, vocab_range, vocab_size
    ) -> OutputLayer:
        group = resolve(tp_group)
        _check_operands(hidden, weight, bias)
        rows, start, vocab_size = _vocabulary(len(weight), group, vocab_range, vocab_size)
        strips = group.size if sequence_parallel else 1
        if strips > 1 and hidden.dim() < 2:
            raise ValueError("sequence_parallel needs hidden of at least two dimensions")
        shape = tuple(hidden.shape[:-1])
        if strips > 1:
            shape = (shape[0] * strips, *shape[1:])
        flat = hidden.reshape(-1, hidden.shape[-1])
        return cls(flat, weight, bias, group, strips, shape, rows, start, vocab_size)

    @property
    def requires_grad(self) -> bool:
        operands = (self.hidden, self.weight, self.bias)
        return any(x is not None and x.requires_grad for x in operands)

    def terms(
        self, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None
    ) -> LossTerms:
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {label_smoothing}; it must be in [0, 1)")
        if label_smoothing and self.vocab_size is None:
            raise ValueError("label_smoothing together with vocab_range needs vocab_size as well")
        if z_loss < 0:
            raise ValueError(f"z_loss is {z_loss}; it must be 0 or more")
        if softcap is not None and softcap <= 0:
            raise ValueError(f"softcap is {softcap}; it must be above 0, or None for no cap")
        return LossTerms(self.vocab_size or 0, label_smoothing, z_loss, softcap)

    def checked_target(
        self, target: Tensor, ignore_index: int | None, check_target: bool
    ) -> Tensor:
        """target as int64, after its shape, type and (see check_target) values were looked at."""
        if target.is_floating_point() or target.dtype == torch.bool:
            raise TypeError(f"target holds {target.dtype}; it must hold vocabulary numbers")
        if tuple(target.shape) != self.token_shape:
            raise ValueError(
                f"target is {tuple(target.shape)}, but hidden "
                f"(over {self.strips} ranks' positions) has tokens {self.token_shape}"
            )
        target = target.long()
        if target.is_cuda and not check_target:
            return target
        outside = target < 0
        if self.vocab_size is not None:
            outside |= target >= self.vocab_size
        if ignore_index is not None:
            outside &= target != ignore_index
        if outside.any():
            position = tuple(outside.nonzero()[0].tolist())
            raise ValueError(
                f"target[{', '.join(map(str, position))}] is {int(target[position])}; the "
                f"vocabulary has entries 0 to {(self.vocab_size or 0) - 1} and ignore_index is "
                f"{ignore_index}"
            )
        return target

    def job(
        self,
        target: Tensor,
        ignore_index: int | None,
        terms: LossTerms,
        mode: str,
        chunk: int | None,
        weights: Tensor | None = None,
        reduction: str = "none",
        entropy: bool = False,
    ) -> LossJob:
        flat = target.reshape(-1)
        return LossJob(
            terms=terms,
            group=self.group,
            target=local_target(flat, self.start, self.rows, ignore_index),
            weights=_token_weights(weights, target, ignore_index, reduction, self.weight.dtype),
            rows=self.rows,
            chunk=self.strip_chunk(chunk, mode),
            strips=self.strips,
            reduced=reduction != "none",
            entropy=entropy,
        )

    def strip_chunk(self, chunk: int | None, mode: str) -> int:
        """Tokens of a strip in one chunk: the same on every rank, whatever the shards' sizes."""
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk is {chunk}; it counts tokens and must be 1 or more")
        mine = max(len(self.hidden), 1)
        if chunk is not None:
            return -(-chunk // self.strips)
        columns = None if self.vocab_size is None else -(-self.vocab_size // self.group.size)
        most = -(-default_chunk(mode, columns, self.weight, self.group.size) // self.strips)
        return even_chunk(mine, most)


def even_chunk(tokens: int, most: int) -> int:
    """Tokens in a chunk, so that chunks are of nearly one size."""
    return -(-tokens // -(-tokens // most))


def default_chunk(mode: str, columns: int | None, weight: Tensor, ranks: int) -> int:
    """Tokens in a chunk whose logits, [chunk, columns] of this rank, fit the memory set aside.

    The pipelined modes hold a chunk's logits (two chunks', where statistics travel meanwhile): 28
    MiB on a CPU, 250 MiB on a GPU. More tokens mean fewer passes over dweight, at least 128 (512)
    are needed for that to cost little, and taken where the shards' size is not known on every rank.
    One-shot holds tiles, whose size the kernels choose.
    """
    gpu = weight.is_cuda
    if mode == "one-shot":
        return 8192 if gpu else 1024
    itemsize = weight.dtype.itemsize if gpu else accumulation_dtype(weight.dtype).itemsize
    least, most, memory = (512, 4096, 250 << 20) if gpu else (128, 1024, 28 << 20)
    if columns is None:
        return least
    bytes_per_token = max(columns, 1) * itemsize * (2 if ranks > 1 else 1)
    return min(max(memory // bytes_per_token, least), most)


def _check_operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if not hidden.is_floating_point():
        raise TypeError(f"hidden holds {hidden.dtype}; it must hold floating-point numbers")
    if hidden.dtype != weight.dtype:
        raise TypeError(f"hidden is {hidden.dtype} but weight is {weight.dtype}; cast one of them")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} ends with hidden size {tuple(hidden.shape[-1:])}, "
            f"weight {tuple(weight.shape)} is [vocabulary rows, hidden size {weight.shape[-1]}]"
        )
    if bias is not None and tuple(bias.shape) != (len(weight),):
        raise ValueError(f"bias is {tuple(bias.shape)}, weight has {len(weight)} rows")


def _vocabulary(
    v: int, group: Group, vocab_range: tuple[int, int] | None, vocab_size: int | None
) -> tuple[int, int, int | None]:
    """(my real rows, my first entry, the real vocabulary's size if known) of v rows of weight."""
    if vocab_range is None:
        start, end = group.rank * v, (group.rank + 1) * v
        vocab_size = v * group.size if vocab_size is None else vocab_size
        if vocab_size > v * group.size:
            raise ValueError(
                f"vocab_size is {vocab_size}, but {group.size} ranks with {v} rows of weight hold "
                f"{v * group.size}; give vocab_range= if the shards are not equal"
            )
    else:
        start, end = vocab_range
        if start < 0 or end - start != v:
            raise ValueError(f"vocab_range {start} to {end} is {end - start} rows, weight has {v}")
        vocab_size = end if vocab_size is None and group.size == 1 else vocab_size
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size is {vocab_size}; it must be 1 or more")
    real_end = end if vocab_size is None else min(end, vocab_size)
    return max(real_end - start, 0), start, vocab_size


def _token_weights(
    weights: Tensor | None,
    target: Tensor,
    ignore_index: int | None,
    reduction: str,
    dtype: torch.dtype,
) -> Tensor:
    """[n] weights with 0 for ignored tokens, divided by their sum for a mean."""
    dtype = accumulation_dtype(dtype)
    if weights is not None and weights.shape != target.shape:
        raise ValueError(f"weights are {tuple(weights.shape)}, target is {tuple(target.shape)}")
    if weights is None:
        kept = torch.ones(target.shape, dtype=dtype, device=target.device)
    else:
        kept = weights.detach().to(dtype)
    if ignore_index is not None:
        kept = kept.masked_fill(target == ignore_index, 0)
    if reduction == "mean":
        count = kept.sum(dtype=torch.float64)
        kept = kept / torch.where(count == 0, 1, count).to(dtype)
    return kept.reshape(-1)
