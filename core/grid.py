"""Ranks, coordinates and groups as arithmetic: who sits where, with no process and no torch.

Pure: standard library and the pure placement of layers. `core.process_grid` turns these integers
into live groups.

    >>> grid = RankGrid(tp=2, dp=2, pp=2)
    >>> grid.groups("tp")
    ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> grid.groups("pp")[0], grid.coord(5)
    ((0, 4), Coord(tp=1, cp=0, dp=0, pp=1))

In Megatron's default order tp varies fastest, then cp, dp, and pp slowest. A rank's own group is
computed directly: at 16,384 ranks nobody builds a table of all groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from core.pipeline_parallel.placement import Placement, place_layers

AXES = ("tp", "cp", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
TP_PP_DP_ORDER = "tp-cp-ep-pp-dp"


@dataclass(kw_only=True)
class ParallelConfig:
    """How many ranks share what; the data-parallel size is what the world leaves over."""

    tensor_model_parallel_size: int = 1
    """Ranks that share every layer (tp)."""
    pipeline_model_parallel_size: int = 1
    """Ranks that hold successive parts of the model (pp)."""
    sequence_parallel: bool = False
    """Cut norms, dropout and residuals along the sequence over the tp ranks."""
    use_tp_pp_dp_mapping: bool = False
    """Number the ranks tp fastest, then pp, then dp, instead of tp, dp, pp."""
    pipeline_schedule: str | None = None
    """gpipe, 1f1b, interleaved, zb_h1 or a schedule file; by default 1f1b, or interleaved."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Parts of the model on each pipeline rank, which a microbatch visits in turn."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """The same, by the layers of one part."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers on the first pipeline rank; the others share the rest."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers on the last pipeline rank."""
    account_for_embedding_in_pipeline_split: bool = False
    """Let the embedding take the place of a layer."""
    account_for_loss_in_pipeline_split: bool = False
    """Let the loss take the place of a layer."""
    pipeline_model_parallel_layout: str | None = None
    """What each stage holds: Et*2|tt|ttL, or layers per stage as in 2,2,2."""

    @property
    def order(self) -> str:
        return TP_PP_DP_ORDER if self.use_tp_pp_dp_mapping else DEFAULT_ORDER

    def placement(self, num_layers: int) -> Placement:
        """Which layers go to which stage; raises ValueError where they cannot."""
        return place_layers(
            num_layers,
            self.pipeline_model_parallel_size,
            chunks=self.num_virtual_stages_per_pipeline_rank,
            layers_per_chunk=self.num_layers_per_virtual_pipeline_stage,
            first=self.decoder_first_pipeline_num_layers,
            last=self.decoder_last_pipeline_num_layers,
            count_embedding=self.account_for_embedding_in_pipeline_split,
            count_loss=self.account_for_loss_in_pipeline_split,
            layout=self.pipeline_model_parallel_layout,
        )

    def problems(self) -> Iterator[str]:
        for flag in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            if getattr(self, flag) < 1:
                yield f"--{flag.replace('_', '-')} {getattr(self, flag)} must be 1 or more"


@dataclass(frozen=True)
class Coord:
    """A rank's place on the four axes."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0


@dataclass(frozen=True)
class RankGrid:
    """A box of tp x cp x dp x pp ranks; `order` names the axes from fastest to slowest.

    `ep` may stand in the order, as in Megatron's strings; it is always 1 here.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"the {axis} size is {getattr(self, axis)}; it must be 1 or more")
        named = self.order.split("-")
        missing = [a for a in AXES if a not in named and getattr(self, a) > 1]
        unknown = [a for a in named if a not in (*AXES, "ep")]
        if unknown or missing or len(set(named)) != len(named):
            raise ValueError(
                f"order {self.order!r} must name each of tp, cp, ep, dp, pp once"
                + (f"; it lacks {', '.join(missing)}" if missing else "")
                + (f"; it has {', '.join(unknown)}" if unknown else "")
            )

    @classmethod
    def fit(
        cls, world_size: int, tp: int = 1, cp: int = 1, pp: int = 1, order: str = DEFAULT_ORDER
    ) -> RankGrid:
        """The grid that uses all of `world_size` ranks: dp takes what tp, cp and pp leave."""
        model = tp * cp * pp
        if world_size < model or world_size % model:
            raise ValueError(
                f"a world of {world_size} does not divide by tensor x context x pipeline = "
                f"{tp} x {cp} x {pp} = {model}; start {model} ranks or a multiple of it"
            )
        return cls(tp=tp, cp=cp, dp=world_size // model, pp=pp, order=order)

    @property
    def size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def _strides(self) -> dict[str, int]:
        strides, stride = {}, 1
        named = [a for a in self.order.split("-") if a in AXES]
        for axis in (*named, *(a for a in AXES if a not in named)):
            strides[axis] = stride
            stride *= getattr(self, axis)
        return strides

    def coord(self, rank: int) -> Coord:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside a grid of {self.size} ranks")
        return Coord(**{a: rank // s % getattr(self, a) for a, s in self._strides().items()})

    def rank(self, coord: Coord) -> int:
        for axis in AXES:
            if not 0 <= getattr(coord, axis) < getattr(self, axis):
                raise ValueError(f"{coord} is outside {self}")
        return sum(getattr(coord, a) * s for a, s in self._strides().items())

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, itself included, ascending."""
        self._check_axes(axes)
        strides, mine = self._strides(), self.coord(rank)
        base = rank - sum(getattr(mine, a) * strides[a] for a in axes)
        steps = [[i * strides[a] for i in range(getattr(self, a))] for a in axes]
        return tuple(sorted(base + sum(offsets) for offsets in product(*steps)))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups along `axes`, by first rank: one table, in one order on every rank."""
        self._check_axes(axes)
        strides = self._strides()
        others = [a for a in AXES if a not in axes]
        steps = [[i * strides[a] for i in range(getattr(self, a))] for a in others]
        firsts = sorted(sum(offsets) for offsets in product(*steps))
        return tuple(self.group_of(first, *axes) for first in firsts)

    def group_count(self, *axes: str) -> int:
        return self.size // prod(getattr(self, a) for a in axes)

    @staticmethod
    def _check_axes(axes: tuple[str, ...]) -> None:
        unknown = [a for a in axes if a not in AXES]
        if not axes or unknown or len(set(axes)) != len(axes):
            raise ValueError(f"axes {axes} must be distinct names out of {', '.join(AXES)}")
