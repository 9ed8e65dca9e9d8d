"""Who talks: a `Group` is a named, ordered set of ranks, this rank's place in it, and a ledger.

Groups are constructor arguments everywhere inside; only public constructors and functions of
`core.tensor_parallel` resolve a missing one (see `core.parallel_state.resolve`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from core.comm.ledger import Ledger


@dataclass(frozen=True)
class Group:
    """Ranks that talk. Our own code makes no call on a group of size 1, so `handle` may be None.

    name    the ledger's key: "tp", "dp", "dp_cp", …
    ranks   global ranks, in order
    rank    my index in `ranks`
    ledger  where every call is recorded
    handle  the torch ProcessGroup, None only when the size is 1
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    ledger: Ledger = field(repr=False, compare=False)
    handle: object | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.ranks):
            raise ValueError(
                f"group {self.name!r}: index {self.rank} is outside a group of {len(self.ranks)}"
            )
        if self.handle is None and len(self.ranks) > 1:
            raise ValueError(
                f"group {self.name!r} of {len(self.ranks)} ranks needs a torch ProcessGroup"
            )

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __deepcopy__(self, memo: dict) -> Group:
        """A copied layer talks to the same ranks: a process group cannot be copied."""
        return self

    @classmethod
    def single(cls, name: str = "single", ledger: Ledger | None = None, rank: int = 0) -> Group:
        """A group of this one process: nothing is ever sent."""
        return cls(name, (rank,), 0, Ledger() if ledger is None else ledger)

    @classmethod
    def of(
        cls, process_group: object, name: str = "external", ledger: Ledger | None = None
    ) -> Group:
        """Wrap a torch ProcessGroup that a fork brings along.

        A wrapper is made once for each process group, so that its ledger is one and the same.
        """
        key = id(process_group)
        known = _WRAPPED.get(key)
        if known is not None and known.handle is process_group:
            return known
        ranks = tuple(dist.get_process_group_ranks(process_group))
        ledger = Ledger() if ledger is None else ledger
        group = cls(name, ranks, ranks.index(dist.get_rank()), ledger, process_group)
        _WRAPPED[key] = group
        return group


_WRAPPED: dict[int, Group] = {}  # by id(ProcessGroup); an entry holds it, so the id stays valid


def create_groups(
    name: str,
    table: tuple[tuple[int, ...], ...],
    rank: int,
    ledger: Ledger,
    cache: dict[tuple[int, ...], object],
) -> Group:
    """Create a communicator for every row of `table` longer than one, and return mine.

    Collective over the world: every rank calls it with the same table, in the same order. Rows that
    `cache` (ranks -> ProcessGroup) already holds are shared, not created again. A rank in no row
    gets a group of its own.
    """
    for ranks in table:
        if len(ranks) > 1 and ranks not in cache:
            cache[ranks] = dist.new_group(list(ranks))
    mine = next((ranks for ranks in table if rank in ranks), (rank,))
    handle = cache[mine] if len(mine) > 1 else None
    return Group(name, mine, mine.index(rank), ledger, handle)
