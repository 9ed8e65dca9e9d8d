"""Where each parameter lies in the flat memory of a stage, and how that is cut: integers only.

Pure: standard library only. core.data_parallel.buckets allocates by it, the optimizer walks its
runs, the checkpoint names its pieces, core.traffic counts its bytes.

A stage's parameters lie in buckets. A bucket is summed over dp in one message, and every dp rank
owns one part of it, all of one length, where something is sharded:

    bucket   [ slot | slot | … | padding ]            slots start on multiples of BLOCK,
    parts    [  rank 0  |  rank 1  |  …  ]            and so do parts

Buckets come in the reverse order of use, so that the first gradients to be ready fill the first
bucket. Inside a bucket, slots that are treated alike are neighbours: there the order is free. A
word table that two stages hold has a bucket of its own, which is then cut alike on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from core.shard import Shard

# Elements. Squares are added block by block and the optimizer's vector instructions meet whole
# blocks, so that bits do not depend on buckets and parts.
BLOCK = 256
AXES = ("", "tp", "embed")  # over which a gradient is summed besides dp


@dataclass(frozen=True)
class Slot:
    """One parameter: elements start to stop of its bucket hold its local part, row-major.

    shape  as stored on this rank
    unit   the part of the stage that it belongs to, such as "layers.3"
    """

    name: str
    shape: tuple[int, ...]
    shard: Shard
    unit: str
    start: int

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)

    @property
    def axis(self) -> str:
        return axis_of(self.shard)


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together. length: elements, padding included."""

    slots: tuple[Slot, ...]
    length: int

    def part(self, rank: int, ways: int) -> tuple[int, int]:
        """First and last + 1 element that `rank` of `ways` owns."""
        size = self.length // ways
        return rank * size, (rank + 1) * size

    def runs(
        self, key: Callable[[Slot], object], within: tuple[int, int] | None = None
    ) -> list[tuple[object, int, int]]:
        """Longest neighbouring stretches with one key(slot), cut to `within`: (key, start, stop).

        The elements between two slots belong to the stretch on their left.
        """
        low, high = within or (0, self.length)
        runs: list[list] = []
        for slot in self.slots:
            start, stop = max(slot.start, low), min(_up(slot.stop, BLOCK), high)
            if start >= stop:
                continue
            if runs and runs[-1][0] == key(slot) and runs[-1][2] == start:
                runs[-1][2] = stop
            else:
                runs.append([key(slot), start, stop])
        return [tuple(run) for run in runs]

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Stretches that belong to no parameter."""
        at = 0
        for slot in self.slots:
            if at < slot.start:
                yield at, slot.start
            at = slot.stop
        if at < self.length:
            yield at, self.length

    def shared(self, axis: str, within: tuple[int, int] | None = None) -> list[tuple[int, int]]:
        """The stretches whose gradients are summed over `axis` besides dp."""
        return [(a, b) for key, a, b in self.runs(lambda slot: slot.axis, within) if key == axis]


def axis_of(shard: Shard) -> str:
    """The axis besides dp over which this gradient is summed; at most one is supported."""
    if len(shard.sum_over) > 1:
        raise ValueError(f"a gradient summed over {shard.sum_over}: one axis besides dp at most")
    axis = shard.sum_over[0] if shard.sum_over else ""
    if axis not in AXES:
        raise ValueError(f"no gradient is summed over {axis!r}; the axes are {AXES[1:]}")
    return axis


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


Named = tuple[str, tuple[int, ...], Shard]  # name, shape on this rank, cut


def lay_out(
    params: Sequence[Named],
    *,
    ways: int = 1,
    largest: int | None = None,
    unit_of: Callable[[str], str] = lambda name: "",
    by_unit: bool = False,
) -> list[Bucket]:
    """Buckets for parameters given in order of use.

    ways      dp ranks that share a bucket: its length is a multiple of ways x BLOCK
    largest   elements from which on a bucket is full; None: all in one
    unit_of   name -> unit         by_unit   a bucket holds parameters of one unit

    >>> w, n = Shard((4, 8), dim=0), Shard((8,), decay=False)
    >>> first, = lay_out([("norm", (8,), n), ("up", (2, 8), w), ("down", (2, 8), w)], ways=2)
    >>> [(s.name, s.start, s.stop) for s in first.slots], first.length, first.part(1, 2)
    ([('norm', 0, 8), ('down', 256, 272), ('up', 512, 528)], 1024, (512, 1024))
    """
    groups: list[list[Named]] = []
    size, last = 0, None
    for param in reversed(params):
        name, shape, shard = param
        key = (axis_of(shard) == "embed", unit_of(name) if by_unit else "")
        if not groups or key != last or (largest is not None and size >= largest):
            groups.append([])
            size, last = 0, key
        groups[-1].append(param)
        size += prod(shape)
    return [_bucket(group, ways, unit_of) for group in groups]


def _bucket(group: Sequence[Named], ways: int, unit_of: Callable[[str], str]) -> Bucket:
    slots, at = [], 0
    for name, shape, shard in sorted(group, key=lambda param: _treatment(param[2])):
        slots.append(Slot(name, shape, shard, unit_of(name), at))
        at = _up(slots[-1].stop, BLOCK)
    return Bucket(tuple(slots), _up(at, ways * BLOCK))


def _treatment(shard: Shard) -> tuple:
    return AXES.index(axis_of(shard)), shard.decay, shard.vocabulary
