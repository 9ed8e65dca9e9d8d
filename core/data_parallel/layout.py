"""Where each parameter lies in the flat memory of a stage: integers only.

Pure: standard library only. `core.data_parallel.buckets` allocates by it, the optimizer walks its
runs, the checkpoint names its pieces.

One flat array holds all parameters of a stage, in three regions, since gradients that other axes
share are summed as one piece:

    plain | summed over tp (norms and biases under sequence parallelism) | summed over embed

Inside a region the order is the reverse of use, so that the first gradients to be ready come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from core.shard import Shard

REGIONS = ("", "tp", "embed")


@dataclass(frozen=True)
class Slot:
    """One parameter: elements start to stop of the flat array hold its local part, row-major."""

    name: str
    shape: tuple[int, ...]  # as stored on this rank
    shard: Shard
    start: int

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """All slots of a stage, and where the regions begin.

    regions: axis ("" for none, "tp", "embed") -> (start, stop)
    """

    slots: tuple[Slot, ...]
    regions: dict[str, tuple[int, int]]
    total: int

    def runs(self, key) -> list[tuple[object, int, int]]:
        """Longest neighbouring stretches with one key(slot): (key, start, stop)."""
        runs: list[tuple[object, int, int]] = []
        for slot in self.slots:
            k = key(slot)
            if runs and runs[-1][0] == k and runs[-1][2] == slot.start:
                runs[-1] = (k, runs[-1][1], slot.stop)
            else:
                runs.append((k, slot.start, slot.stop))
        return runs


def region_of(shard: Shard) -> str:
    """The axis besides dp over which this gradient is summed; at most one is supported."""
    if len(shard.sum_over) > 1:
        raise ValueError(f"a gradient summed over {shard.sum_over}: one axis besides dp at most")
    axis = shard.sum_over[0] if shard.sum_over else ""
    if axis not in REGIONS:
        raise ValueError(f"no gradient is summed over {axis!r}; the axes are {REGIONS[1:]}")
    return axis


def lay_out(params: Sequence[tuple[str, tuple[int, ...], Shard]]) -> Layout:
    """Slots for (name, local shape, shard) in order of use.

    >>> w, n = Shard((4, 2), dim=0), Shard((2,), sum_over=("tp",), decay=False)
    >>> layout = lay_out([("norm", (2,), n), ("up", (2, 2), w), ("down", (2, 2), w)])
    >>> [(s.name, s.start, s.stop) for s in layout.slots], layout.regions["tp"]
    ([('down', 0, 4), ('up', 4, 8), ('norm', 8, 10)], (8, 10))
    """
    slots, regions, at = [], {}, 0
    for region in REGIONS:
        start = at
        for name, shape, shard in reversed(params):
            if region_of(shard) == region:
                slots.append(Slot(name, shape, shard, at))
                at = slots[-1].stop
        regions[region] = (start, at)
    return Layout(tuple(slots), regions, at)
