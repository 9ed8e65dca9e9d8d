"""What a checkpoint holds of a run, as pieces of logical tensors under the parameters' own names.

    model/<parameter>                  the parameter, or its master where it is of a short type
    optimizer/<kind>/<parameter>       exp_avg, exp_avg_sq, …

Nothing in it depends on the layout: a piece is a box of the logical tensor that this rank holds.
Neighbours: core.checkpoint (writes and reads pieces), core.run (decides when).
"""

from __future__ import annotations

from collections.abc import Iterator

from core.checkpoint.pieces import Piece, range_pieces
from core.comm import Group
from core.data_parallel.ddp import DataParallel
from core.optimizer.adam import Optimizer
from core.optimizer.clip import counts


def pieces(
    replicas: DataParallel, optimizer: Optimizer, tp: Group, *, owned: bool, moments: bool = True
) -> Iterator[Piece]:
    """The pieces of this rank: with `owned` only those it is the one to write, else all it needs.

    Every dp rank writes the part that it keeps; of ranks with equal data the first of dp writes,
    and tp rank 0 what all of tp hold; of two copies of a tied word table the first stage's is
    written. After reading into them, call optimizer.publish().

    moments: the optimizer's arrays too
    """
    if owned and replicas.dp.rank and replicas.strategy == "no_shard":
        return
    embed_rank = replicas.axes["embed"].rank
    for memory, part in zip(replicas.memories, optimizer.parts, strict=True):
        kinds = {"model": part.master}
        if moments:
            kinds |= {f"optimizer/{kind}": flat for kind, flat in part.arrays.items()}
        for kind, flat in kinds.items():
            for slot, values in memory.my_slots(flat):
                if owned and not counts(slot, tp.rank, embed_rank):
                    continue
                start = max(memory.mine[0] - slot.start, 0)
                name = f"{kind}/{slot.name}"
                yield from range_pieces(name, values, start, slot.shard, tp.rank, tp.size)
