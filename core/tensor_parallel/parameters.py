"""Parameters of tensor-parallel layers: how they are cut, marked and initialised.

`cut_shard` says which part of a logical matrix a rank holds, `new_parameter` makes it with its
Shard, `initialize_` fills it from the whole matrix: an initialisation that depends on the shape
sees the full shape, and gathering the shards of any layout gives one and the same matrix.

Imports core.random and core.shard; used by core.tensor_parallel.layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from core.comm import Group
from core.parallel_state import resolve
from core.random import init_normal_, stream_key
from core.shard import Shard
from core.tensor_parallel.utils import divide

_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


# ---- Megatron's attributes ----------------------------------------------------------------------


def set_tensor_model_parallel_attributes(
    tensor: Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Marks a tensor that has none of the three attributes yet."""
    if known := [name for name in _DEFAULTS if hasattr(tensor, name)]:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has {', '.join(known)} already")
    tensor.tensor_model_parallel = is_parallel
    tensor.partition_dim = dim
    tensor.partition_stride = stride


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Marks a tensor as replicated, as far as it is not marked."""
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(
    destination_tensor: Tensor, source_tensor: Tensor
) -> None:
    for name in _DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(param: Tensor, tp_group: object | None = None) -> bool:
    """Whether this rank's copy counts: it is a cut, or a replica on the first tp rank."""
    return getattr(param, "tensor_model_parallel", False) or resolve(tp_group).rank == 0


# ---- cutting ----------------------------------------------------------------------------------


def cut_shard(
    shape: tuple[int, ...], dim: int, *, stride: int = 1, logical: int = 0, decay: bool = True
) -> Shard:
    """The Shard of a tensor of `shape` cut along `dim`.

    logical  real length of `dim`, the rest being padding (0: all of it)
    stride   `dim` holds that many matrices one after the other and each is cut (a gated MLP's two):
             the logical tensor then has a dimension of its own for them

    >>> shard = cut_shard((8, 3), 0, stride=2)
    >>> shard.shape, shard.dim
    ((2, 4, 3), 1)
    """
    if stride > 1:
        if logical not in (0, shape[dim]):
            raise ValueError(f"stride {stride} and padding cannot be combined")
        parts = (stride, divide(shape[dim], stride))
        return Shard((*shape[:dim], *parts, *shape[dim + 1 :]), dim=dim + 1, decay=decay)
    padded = shape[dim] if logical and logical != shape[dim] else 0
    real = (*shape[:dim], logical or shape[dim], *shape[dim + 1 :])
    return Shard(real, dim=dim, padded=padded, decay=decay)


def new_parameter(
    shape: tuple[int, ...],
    shard: Shard,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Parameter:
    """A parameter of this local shape: uninitialised, or zero if it has padding rows."""
    make = torch.zeros if shard.padded else torch.empty
    param = Parameter(make(shape, dtype=dtype, device=device))
    param.shard = shard
    param.allreduce = True  # Megatron's mark of what is reduced over all of dp: not an expert's
    return param


# ---- initial values ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Initial:
    """Where a weight's first values come from.

    method  a function that fills a tensor in place, given the whole matrix; None: normal(0, std)
    seed    with `name`, all that the values depend on; None: torch's CPU generator in its present
            state, as in Megatron, which all ranks must then have seeded alike
    name    full name of the parameter
    """

    method: Callable[[Tensor], object] | None
    std: float
    seed: int | None
    name: str

    def whole(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The logical matrix, in host memory."""
        if self.method is None and self.seed is not None:
            whole = torch.empty(shape, dtype=dtype, device="cpu")
            return init_normal_(
                whole, seed=self.seed, name=self.name, shard=Shard(shape), std=self.std
            )
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        whole = torch.empty(shape, dtype=wide, device="cpu")
        with torch.no_grad(), self._generator():
            if self.method is None:
                whole.normal_(0.0, self.std)
            else:
                self.method(whole)
        return whole.to(dtype)

    @contextmanager
    def _generator(self) -> Iterator[None]:
        """Inside, torch's CPU generator is a function of (seed, name); outside it is untouched."""
        if self.seed is None:
            yield
            return
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(stream_key(self.seed, "init", self.name) & (2**63 - 1))
        try:
            yield
        finally:
            generator.set_state(before)


@torch.no_grad()
def initialize_(
    param: Parameter, initial: Initial, shape: tuple[int, ...], group: Group, *, keep: bool = False
) -> Tensor | None:
    """Fills this rank's part of the logical matrix of `shape`; padding rows become zero.

    Returns the whole matrix if `keep`. The default, normal values from (seed, name, index), is
    computed for the local part alone.
    """
    shard = param.shard
    mine = param.data.view(shard.local_shape(group.size))
    if initial.method is None and initial.seed is not None and not keep:
        init_normal_(
            mine,
            seed=initial.seed,
            name=initial.name,
            shard=shard,
            tp_rank=group.rank,
            tp_size=group.size,
            std=initial.std,
        )
        return None
    whole = initial.whole(shape, param.dtype)
    local, logical = shard.local_slices(group.rank, group.size)
    mine.zero_()
    mine[local].copy_(whole.view(shard.shape)[logical])
    return whole if keep else None
