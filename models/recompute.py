"""RecomputeConfig: which activations backward computes again instead of keeping them.

Pure: standard library only. models/stack.py and models/transformer.py do what it says; what
contradicts other flags is in core/contradictions.py.

Per layer, a forward keeps about 17 tensors [s, b, h] (and attention weights, where they have
dropout). Full recomputation keeps the input of each unit of layers and runs the unit again before
its backward: a third more arithmetic, and the unit's forward collectives once more. Selective
recomputation does so with parts of a layer: core_attn (scores, softmax, dropout: no communication),
mlp (its collectives once more), layernorm (its output is freed and made again: no communication).
Numbers do not change: dropout has no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Unit(NamedTuple):
    """Layers that run one after the other; again: only their input is kept."""

    layers: tuple[int, ...]
    again: bool


@dataclass(kw_only=True)
class RecomputeConfig:
    """Recomputation of activations"""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Compute whole layers again in backward, or the parts that --recompute-modules names."""
    recompute_activations: bool = False
    """Short for --recompute-granularity selective."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Of full: all layers, unit by unit (uniform, the default), or only a stage's first ones."""
    recompute_num_layers: int | None = None
    """Layers of a unit (uniform; by default 1), or how many of each stage (block)."""
    recompute_modules: tuple[Literal["core_attn", "mlp", "layernorm"], ...] | None = None
    """Of selective; by default core_attn."""
    distribute_saved_activations: bool = False
    """Of full: each tensor parallel rank keeps its part of a unit's input."""

    @property
    def granularity(self) -> Literal["full", "selective"] | None:
        return self.recompute_granularity or ("selective" if self.recompute_activations else None)

    @property
    def modules(self) -> frozenset[str]:
        """Parts of a layer that run again."""
        if self.granularity != "selective":
            return frozenset()
        return frozenset(self.recompute_modules or ("core_attn",))

    def units(self, layers: Sequence[int]) -> list[Unit]:
        """The layers of a stage, in order.

        >>> RecomputeConfig(recompute_granularity="full", recompute_num_layers=2).units([4, 5, 6])
        [Unit(layers=(4, 5), again=True), Unit(layers=(6,), again=True)]
        """
        layers, size = tuple(layers), self.recompute_num_layers or 1
        if self.granularity != "full":
            return [Unit((layer,), again=False) for layer in layers]
        if self.recompute_method == "block":
            return [Unit((layer,), again=place < size) for place, layer in enumerate(layers)]
        return [Unit(layers[i : i + size], again=True) for i in range(0, len(layers), size)]

    def problems(self) -> Iterator[str]:
        count = self.recompute_num_layers
        if count is not None and count < 1:
            yield f"--recompute-num-layers {count} must be 1 or more"

    def norm_problems(self, placement: Literal["pre", "post"]) -> Iterator[str]:
        """Where a block's norms are behind its parts, their outputs are its residual stream."""
        if "layernorm" in self.modules and placement == "post":
            yield (
                "--recompute-modules layernorm needs --norm-placement pre: behind a part, a norm's "
                "output is the next part's input and stays"
            )
