"""Which layers go to which stage, for any number of layers over any number of ranks.

Pure: standard library only. `place_layers` turns the pipeline flags into a `Placement`; the model
builder reads its ranges, and the sum over the stages is the number of layers asked for, always.

A model is the embedding, `num_layers` layers and the output layer with the loss. With p ranks and v
chunks per rank there are p v stages; stage s is on rank s mod p. The embedding is on the first
stage, the loss on the last.

    >>> print(place_layers(6, pp=4))
    stage 0 (rank 0): embedding, layer 0
    stage 1 (rank 1): layers 1-2
    stage 2 (rank 2): layers 3-4
    stage 3 (rank 3): layer 5, loss
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.pipeline_parallel.layout import parse_layout

PP = "--pipeline-model-parallel-size"
PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
WITH_EMBEDDING = "--account-for-embedding-in-pipeline-split"
WITH_LOSS = "--account-for-loss-in-pipeline-split"
LAYOUT = "--pipeline-model-parallel-layout"


class PlacementError(ValueError):
    """Layers that cannot be placed as asked; the text says which placements can."""


@dataclass(frozen=True)
class Placement:
    """How many layers each stage holds. Stage s is on rank s mod pp."""

    layers: tuple[int, ...]
    pp: int

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return self.stages // self.pp

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    def layers_of(self, stage: int) -> range:
        """The numbers of the layers on `stage`, counted from 0 through the whole model.

        >>> Placement((1, 2, 2, 1), pp=4).layers_of(2)
        range(3, 5)
        """
        first = sum(self.layers[:stage])
        return range(first, first + self.layers[stage])

    def stages_of(self, rank: int) -> range:
        """The stages on `rank`, its chunk 0 first."""
        return range(rank, self.stages, self.pp)

    def __str__(self) -> str:
        return "\n".join(self._line(stage) for stage in range(self.stages))

    def _line(self, stage: int) -> str:
        numbers = self.layers_of(stage)
        parts = ["embedding"] if stage == 0 else []
        if len(numbers) == 1:
            parts.append(f"layer {numbers[0]}")
        elif numbers:
            parts.append(f"layers {numbers[0]}-{numbers[-1]}")
        if stage == self.stages - 1:
            parts.append("loss")
        return f"stage {stage} (rank {stage % self.pp}): {', '.join(parts) or 'nothing'}"


def place_layers(
    num_layers: int,
    pp: int,
    *,
    chunks: int | None = None,
    layers_per_chunk: int | None = None,
    first: int | None = None,
    last: int | None = None,
    count_embedding: bool = False,
    count_loss: bool = False,
    layout: str | None = None,
) -> Placement:
    """The placement that the flags ask for; PlacementError if there is none.

    `chunks` is the number of virtual stages per rank, or `layers_per_chunk` their size. `first` and
    `last` are the layers of the first and last rank. `count_embedding` and `count_loss` let the
    embedding and the loss take the place of a layer. `layout` says everything explicitly.

    Without `first`, `last` and `layout` the split is balanced: stages, and ranks, differ by one
    layer at most; the last stage and then the first, which have the loss and the embedding besides,
    are the ones with fewer.
    """
    for flag, value in (("--num-layers", num_layers), (PP, pp), (CHUNKS, chunks)):
        if value is not None and value < 1:
            raise PlacementError(f"{flag} {value} must be 1 or more")
    _refuse_mixed_flags(
        {
            LAYOUT: layout is not None,
            PER_CHUNK: layers_per_chunk is not None,
            CHUNKS: chunks is not None,
            FIRST: first is not None,
            LAST: last is not None,
            WITH_EMBEDDING: count_embedding,
            WITH_LOSS: count_loss,
        }
    )
    if layout is not None:
        return _explicit(num_layers, pp, chunks, layout)
    if layers_per_chunk is not None:
        chunks = _count_chunks(num_layers, pp, layers_per_chunk)
    chunks = chunks or 1
    _refuse_chunks_on_one_rank(pp, chunks)
    if first is None and last is None:
        layers = _balanced(num_layers, pp, chunks, count_embedding, count_loss)
    else:
        layers = _with_ends(num_layers, pp, chunks, first, last)
    assert sum(layers) == num_layers, f"{layers} do not add up to {num_layers}"
    return Placement(tuple(layers), pp)


def _refuse_mixed_flags(given: dict[str, bool]) -> None:
    ends = (FIRST, LAST)
    counted = (WITH_EMBEDDING, WITH_LOSS)
    excluded = {
        LAYOUT: (PER_CHUNK, *ends, *counted),
        PER_CHUNK: (CHUNKS, *ends),
        FIRST: counted,
        LAST: counted,
    }
    for flag, others in excluded.items():
        for other in others:
            if given[flag] and given[other]:
                raise PlacementError(f"{flag} and {other} both place layers; give one of them")


def _refuse_chunks_on_one_rank(pp: int, chunks: int) -> None:
    if pp == 1 and chunks > 1:
        raise PlacementError(
            f"{chunks} virtual stages per rank need {PP} 2 or more, which is 1; "
            f"leave them out, or use more pipeline ranks"
        )


def _count_chunks(num_layers: int, pp: int, layers_per_chunk: int) -> int:
    """How many chunks of this size each rank gets, which has to be a whole number."""
    if layers_per_chunk >= 1 and num_layers % (pp * layers_per_chunk) == 0:
        return num_layers // (pp * layers_per_chunk)
    fitting = [n for n in range(1, num_layers // pp + 1) if num_layers % (pp * n) == 0]
    way_out = f"use {CHUNKS}, which takes any number of layers"
    if fitting:
        way_out = f"use {_or(fitting)}"
    raise PlacementError(
        f"{PER_CHUNK} {layers_per_chunk} x {PP} {pp} does not divide --num-layers {num_layers}; "
        f"{way_out}"
    )


def _balanced(
    num_layers: int, pp: int, chunks: int, count_embedding: bool, count_loss: bool
) -> list[int]:
    stages = pp * chunks
    work = num_layers + count_embedding + count_loss
    if work < stages:
        counted = f" ({work} with what is counted as a layer)" if work > num_layers else ""
        ways = [f"a {LAYOUT} with empty stages"]
        if chunks > 1 and work >= pp:
            ways.insert(0, f"{CHUNKS} {work // pp} or less")
        if work // chunks > (chunks > 1):
            ways.insert(0, f"{PP} {work // chunks} or less")
        raise PlacementError(
            f"--num-layers {num_layers}{counted} cannot fill {PP} {pp} x {chunks} virtual stages = "
            f"{stages} stages; use {', or '.join(ways)}"
        )
    layers = _spread(work, range(stages), stages)
    layers[0] -= count_embedding
    layers[-1] -= count_loss
    return layers


def _with_ends(
    num_layers: int, pp: int, chunks: int, first: int | None, last: int | None
) -> list[int]:
    """The first and last rank get what is asked for, the others share the rest evenly."""
    given = {0: first} if first is not None else {}
    if last is not None:
        given[pp - 1] = last
    asked = " and ".join(
        f"{flag} {count}" for flag, count in ((FIRST, first), (LAST, last)) if count is not None
    )
    if pp == 1:
        raise PlacementError(f"{asked} needs {PP} 2 or more, which is 1")
    for flag, count in ((FIRST, first), (LAST, last)):
        if count is not None and count < chunks - 1:
            raise PlacementError(
                f"{flag} {count} cannot fill {chunks} virtual stages; use {chunks - 1} or more"
            )
    rest, others = num_layers - sum(given.values()), pp - len(given)
    least = others * chunks
    if rest < least or (rest and not others):
        fitting = f"they have to be {num_layers} together"
        if others:
            fitting = f"use {num_layers - least} or less together, so that each stage gets a layer"
        raise PlacementError(
            f"{asked} leave {rest} of --num-layers {num_layers} for {others} other ranks "
            f"with {least} stages; {fitting}"
        )
    stages = pp * chunks
    layers = [0] * stages
    groups = [(count, range(rank, stages, pp)) for rank, count in given.items()]
    groups.append((rest, [s for s in range(stages) if s % pp not in given]))
    for total, members in groups:
        for stage, count in zip(members, _spread(total, members, stages)):
            layers[stage] = count
    return layers


def _spread(total: int, members: Sequence[int], stages: int) -> list[int]:
    """`total` over the stages `members`, as even as can be.

    What is left over goes to late stages first, which hold the fewest activations, and to the very
    first and the very last stage after all others.
    """
    if not members:
        return []
    share, left = divmod(total, len(members))
    by_claim = sorted(members, key=lambda stage: (stage == stages - 1, stage == 0, -stage))
    favoured = set(by_claim[:left])
    return [share + (stage in favoured) for stage in members]


def _explicit(num_layers: int, pp: int, chunks: int | None, layout: str) -> Placement:
    held = parse_layout(layout)
    whole = "".join(held)
    shown = f"{LAYOUT} {layout}"
    for symbol, name, place, right in (
        ("E", "embedding", "first in the first", held[0].startswith("E")),
        ("L", "loss", "last in the last", held[-1].endswith("L")),
    ):
        if whole.count(symbol) != 1 or not right:
            raise PlacementError(
                f"{shown} has {whole.count(symbol)} {symbol} ({name}); it needs one, {place} stage"
            )
    if len(held) % pp or (chunks is not None and len(held) != pp * chunks):
        wanted = f"a multiple of {PP} {pp}"
        if chunks is not None:
            wanted = f"{PP} {pp} x {CHUNKS} {chunks} = {pp * chunks}"
        raise PlacementError(f"{shown} has {len(held)} stages; it needs {wanted}")
    if whole.count("t") != num_layers:
        raise PlacementError(
            f"{shown} has {whole.count('t')} layers (t) and --num-layers is {num_layers}; "
            f"they must be equal"
        )
    _refuse_chunks_on_one_rank(pp, len(held) // pp)
    return Placement(tuple(stage.count("t") for stage in held), pp)


def _or(values: Sequence[int]) -> str:
    """2, 3 or 4"""
    *most, final = map(str, values)
    return f"{', '.join(most)} or {final}" if most else final
