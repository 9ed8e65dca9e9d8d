"""Rotary position embedding: frequencies, tables of angles, and the turning of queries and keys.

Neighbours: kernels.rotary (the arithmetic), models.transformer (attention), models.stack (which
makes the tables of a microbatch).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.rotary import rotary

if TYPE_CHECKING:
    from models.config import TransformerConfig


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling: long waves are slowed by `factor`, short ones left alone."""

    factor: float = 8.0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_length: int = 8192


def inverse_frequencies(width: int, base: float, scaling: RopeScaling | None) -> Tensor:
    """[width / 2] float64: base^(-2i / width), scaled if asked."""
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if scaling is None:
        return frequency
    # wave = 2 pi / frequency. Between the two limits the scaled and the plain one are blended:
    # share = (original / wave - low) / (high - low), clamped to [0, 1].
    wave = 2 * math.pi / frequency
    share = (scaling.original_length / wave - scaling.low_frequency) / (
        scaling.high_frequency - scaling.low_frequency
    )
    share = share.clamp(0, 1)
    return (1 - share) * frequency / scaling.factor + share * frequency


class Rotary:
    """Rotary position embedding (Su et al., 2021): pairs of channels turn by p * frequency.

    x [s, b, a, d] -> the same; only the first `percent` of d turns. Pairs are (i, i + w/2), or
    neighbours (2i, 2i + 1) when interleaved. The tables are made once a microbatch.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        percent: float = 1.0,
        interleaved: bool = False,
        interpolation: float = 1.0,
        scaling: RopeScaling | None = None,
    ) -> None:
        self.width = int(head_dim * percent)
        if self.width % 2:
            raise ValueError(
                f"rotary embedding turns {self.width} of {head_dim} channels, which must be even"
            )
        self.interleaved = interleaved
        self.frequency = inverse_frequencies(self.width, base, scaling) / interpolation

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [s, b] -> cos, sin [s, b, w/2], computed in float64 and rounded once."""
        angle = positions.to(torch.float64).unsqueeze(-1) * self.frequency.to(positions.device)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def __call__(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        return rotary(x, *tables, interleaved=self.interleaved)


def rotary_of(config: TransformerConfig) -> Rotary | None:
    """What the position flags ask for."""
    if config.position_embedding_type != "rope":
        return None
    return Rotary(
        config.head_dim,
        base=config.rotary_base,
        percent=config.rotary_percent,
        interleaved=config.rotary_interleaved,
        interpolation=config.rotary_seq_len_interpolation_factor or 1.0,
        scaling=RopeScaling(config.rope_scaling_factor) if config.use_rope_scaling else None,
    )
