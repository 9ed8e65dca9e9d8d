"""Cutting tensors and vocabularies; under this name because forks of Megatron import it from here.

Imports core.parallel_state and core.comm; used by every file of this package.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.comm import all_gather
from core.parallel_state import resolve


def divide(numerator: int, denominator: int) -> int:
    """The quotient, which must be exact."""
    if numerator % denominator:
        raise ValueError(f"{numerator} does not divide by {denominator}")
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Equal parts along the last dimension: views, or contiguous copies if asked."""
    chunks = torch.split(tensor, divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(c.contiguous() for c in chunks) if contiguous_split_chunks else chunks


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, tp_group: object | None = None
) -> Tensor:
    """This rank's part of the flattened tensor: a view of it, or a new tensor with `new_buffer`."""
    group = resolve(tp_group)
    length = divide(tensor.numel(), group.size)
    part = tensor.reshape(-1)[group.rank * length : (group.rank + 1) * length]
    return part.clone() if new_buffer else part


def gather_split_1d_tensor(tensor: Tensor, tp_group: object | None = None) -> Tensor:
    """All ranks' parts, joined: what `split_tensor_into_1d_equal_chunks` took apart."""
    gathered = all_gather(tensor.detach(), resolve(tp_group), tag="gather_split_1d_tensor")
    return gathered.clone() if gathered.data_ptr() == tensor.data_ptr() else gathered


class VocabUtility:
    """First and last + 1 vocabulary index of a rank, of `world_size` equal parts."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        return VocabUtility.vocab_range_from_per_partition_vocab_size(
            divide(global_vocab_size, world_size), rank, world_size
        )
