"""`ProcessGrid`: the rank grid with live groups, seen from this rank.

Built once from `core.grid.RankGrid` and the world; handed to builders (`models`, `core.train`),
which give each layer the one group it uses. All ranks create all groups, in one fixed order out of
one table, since groups created in differing orders can end up sharing a communicator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.comm.collectives import all_reduce_
from core.comm.group import Group, create_groups
from core.comm.ledger import Ledger
from core.grid import RankGrid

# name -> axes. The order of this table is the order of creation on every rank.
GROUP_AXES = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("dp", "cp"),
    "tp_pp": ("tp", "pp"),
    "tp_dp": ("tp", "dp"),
}


@dataclass(frozen=True)
class ProcessGrid:
    """One rank's view: its place and the groups it belongs to.

    tp, cp, dp, pp  ranks that differ along one axis
    dp_cp           ranks that hold the same parameters: gradients are summed here
    tp_pp           one replica of the model
    embed           first and last pipeline stage of my column (both hold the tied embedding);
                    a group of one where there is nothing to share
    world           everybody
    """

    shape: RankGrid
    rank: int
    device: torch.device
    ledger: Ledger
    world: Group
    tp: Group
    cp: Group
    dp: Group
    pp: Group
    dp_cp: Group
    tp_pp: Group
    tp_dp: Group
    embed: Group

    @classmethod
    def build(
        cls, shape: RankGrid, world: Group, device: str | torch.device = "cpu", check: bool = True
    ) -> ProcessGrid:
        """Create every group of the table. Collective: all ranks of `world` call it."""
        if shape.size != world.size:
            raise ValueError(f"{shape} has {shape.size} ranks, the world has {world.size}")
        rank, ledger, device = world.ranks[world.rank], world.ledger, torch.device(device)
        cache: dict[tuple[int, ...], object] = {tuple(world.ranks): world.handle}
        made = {
            name: create_groups(name, shape.groups(*axes), rank, ledger, cache)
            for name, axes in GROUP_AXES.items()
        }
        embed = create_groups("embed", embedding_ranks(shape), rank, ledger, cache)
        grid = cls(shape, rank, device, ledger, world, embed=embed, **made)
        if check and world.size > 1:
            grid._check_groups()
        return grid

    @classmethod
    def single(
        cls, device: str | torch.device = "cpu", ledger: Ledger | None = None
    ) -> ProcessGrid:
        """One process on its own; torch.distributed stays untouched."""
        ledger = Ledger() if ledger is None else ledger
        groups = {name: Group.single(name, ledger) for name in (*GROUP_AXES, "world", "embed")}
        return cls(RankGrid(), 0, torch.device(device), ledger, **groups)

    @property
    def coord(self):
        return self.shape.coord(self.rank)

    def groups(self) -> list[Group]:
        """All that this rank belongs to, the world apart."""
        return [getattr(self, name) for name in (*GROUP_AXES, "embed")]

    def _check_groups(self) -> None:
        """Sum 2^rank over each group and compare with the table: a wrong member shows at once.

        Exact in float64 for 52 ranks; larger worlds are checked modulo 52.
        """
        for group in self.groups():
            mine = torch.tensor([2.0 ** (self.rank % 52)], dtype=torch.float64, device=self.device)
            found = all_reduce_(mine, group, tag=f"startup.check.{group.name}").item()
            if found != (wanted := float(sum(2.0 ** (r % 52) for r in group.ranks))):
                raise RuntimeError(
                    f"group {group.name} of ranks {group.ranks} sums 2^rank to {found:.0f}, not "
                    f"{wanted:.0f}: the ranks created their groups in different orders"
                )


def embedding_ranks(shape: RankGrid) -> tuple[tuple[int, ...], ...]:
    """(first stage, last stage) of every pipeline column; one rank where pp is 1."""
    return tuple(
        (ranks[0], ranks[-1]) if len(ranks) > 1 else ranks for ranks in shape.groups("pp")
    )
