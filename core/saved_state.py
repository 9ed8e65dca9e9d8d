"""What a checkpoint holds of a run, as pieces of logical tensors under the parameters' own names.

    model/<parameter>                  the parameter
    optimizer/<kind>/<parameter>       exp_avg, exp_avg_sq, …

Nothing in it depends on the layout: a piece is the box of the logical tensor that this rank holds.
Neighbours: core.checkpoint (writes and reads pieces), core.train (decides when).
"""

from __future__ import annotations

from collections.abc import Iterator

from core.checkpoint.pieces import Piece, shard_pieces
from core.comm import Group
from core.data_parallel.buckets import DataParallel
from core.optimizer.adam import Optimizer
from core.optimizer.clip import counts


def pieces(
    replicas: DataParallel, optimizer: Optimizer | None, tp: Group, *, owned: bool
) -> Iterator[Piece]:
    """The pieces of this rank: with `owned` only those it is the one to write, else all it needs.

    Of ranks with equal data the first of dp writes, and tp rank 0 what all of tp hold; of two
    copies of a tied word table the first stage's is written.
    """
    if owned and replicas.dp.rank:
        return
    embed_rank = replicas.axes["embed"].rank
    for n, buffer in enumerate(replicas.buffers):
        for slot in buffer.layout.slots:
            if owned and not counts(slot, tp.rank, embed_rank):
                continue
            named = {f"model/{slot.name}": buffer.params}
            if optimizer is not None:
                for kind, flat in optimizer.state_arrays(n).items():
                    named[f"optimizer/{kind}/{slot.name}"] = flat
            for name, flat in named.items():
                local = flat[slot.start : slot.stop].view(slot.shard.local_shape(tp.size))
                yield from shard_pieces(name, local, slot.shard, tp.rank, tp.size)


def bytes_needed(replicas: DataParallel, optimizer: Optimizer | None) -> int:
    """Upper bound of what one checkpoint takes on disk for this rank's part of the model."""
    total = 0
    for n, buffer in enumerate(replicas.buffers):
        total += buffer.params.nbytes
        if optimizer is not None:
            total += sum(flat.nbytes for flat in optimizer.state_arrays(n).values())
    return total
