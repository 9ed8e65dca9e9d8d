"""Logical tensors whose values are known, as the pieces of any layout; what other processes run.

Not a test: test_store.py and test_crash.py cut, save and load these. Imports no pytest, which would
be most of what starting a process costs.
"""

import os
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from core.checkpoint.errors import SaveError
from core.checkpoint.pieces import Piece, range_pieces, shard_pieces
from core.checkpoint.reader import load, open_checkpoint
from core.checkpoint.slices import whole
from core.checkpoint.store import Saver, save
from core.comm import Group, Ledger
from core.shard import Shard

# A cut by columns, by rows, with padding (11 rows padded to 12), replicated, a scalar, a 3-d one.
SHARDS = {
    "embedding": Shard((11, 6), dim=0, padded=12),
    "column": Shard((16, 6), dim=0),
    "row": Shard((6, 16), dim=1),
    "mlp": Shard((2, 8, 6), dim=1),
    "norm": Shard((6,)),
    "step": Shard(()),
}
DTYPES = {"embedding": torch.bfloat16, "row": torch.float64}


def logical(name: str) -> torch.Tensor:
    shape = SHARDS[name].shape
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator).to(DTYPES.get(name, torch.float32))


def local(name: str, rank: int, size: int, fill: bool = True) -> torch.Tensor:
    """A tp rank's parameter, padding rows zero."""
    shard = SHARDS[name]
    tensor = torch.zeros(shard.local_shape(size), dtype=logical(name).dtype)
    if fill:
        mine, theirs = shard.local_slices(rank, size)
        tensor[mine] = logical(name)[theirs]
    return tensor


def as_stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A gated MLP's two matrices are stored one after the other."""
    return tensor.flatten(0, 1) if name == "mlp" else tensor


def pieces(tp_rank: int, tp: int, dp_rank: int = 0, dp: int = 1, fill: bool = True):
    """(parameters, moments) of one rank of tp x dp: moments are flat and cut over dp."""
    parameters, moments, flats = {}, [], {}
    for name, shard in SHARDS.items():
        parameters[name] = local(name, tp_rank, tp, fill)
        flat = local(name, tp_rank, tp, fill).flatten()
        cut = -(-flat.numel() // dp)
        start = min(dp_rank * cut, flat.numel())
        flats[name] = flat[start : start + cut].clone()
        moments += range_pieces(f"moment/{name}", flats[name], start, shard, tp_rank, tp)
    model = [
        piece
        for name, tensor in parameters.items()
        for piece in shard_pieces(
            f"model/{name}", as_stored(name, tensor), SHARDS[name], tp_rank, tp
        )
    ]
    return model, moments


def owned(tp_rank: int, tp: int, dp_rank: int = 0, dp: int = 1) -> list[Piece]:
    """What this rank saves: dp rank 0 the parameters, tp rank 0 what is replicated over tp."""
    model, moments = pieces(tp_rank, tp, dp_rank, dp)
    mine = (model if dp_rank == 0 else []) + moments
    cut = [p for p in mine if SHARDS[p.name.split("/")[1]].dim is not None]
    return mine if tp_rank == 0 else cut


def matches(piece: Piece) -> bool:
    name = piece.name.split("/")[1]
    wanted = logical(name)[tuple(slice(a, b) for a, b in piece.box)]
    return torch.equal(piece.tensor, wanted)


def save_layout(world: Group, directory: Path, iteration: int, tp: int, **how) -> None:
    dp_rank, tp_rank = divmod(world.rank, tp)
    mine = owned(tp_rank, tp, dp_rank, world.size // tp)
    save(directory, iteration, mine, {"layout": f"tp {tp}"}, world, **how)


def load_layout(world: Group, directory: Path, tp: int) -> tuple[int, list[str]]:
    """(iteration, names that do not have the right values) as this rank sees it."""
    dp_rank, tp_rank = divmod(world.rank, tp)
    model, moments = pieces(tp_rank, tp, dp_rank, world.size // tp, fill=False)

    def read(checkpoint):
        checkpoint.fill(model + moments)
        return checkpoint.iteration

    iteration = load(directory, read, world)
    return iteration, [piece.name for piece in model + moments if not matches(piece)]


def flat_pieces(iteration: int, rank: int, size: int, numel: int = 500_000) -> list[Piece]:
    """This rank's half of two tensors all of whose elements are the iteration."""
    found = []
    for name in ("a", "b"):
        start, stop = numel * rank // size, numel * (rank + 1) // size
        tensor = torch.full((stop - start,), float(iteration))
        found.append(Piece(name, (numel,), ((start, stop),), tensor))
    return found


def whole_iteration(directory: Path) -> int:
    """The iteration that loads, after looking at every byte and element of it."""
    checkpoint = open_checkpoint(directory, say=lambda line: None)
    assert list(checkpoint.verify()) == []
    for name in checkpoint.names():
        assert (checkpoint.read(name) == checkpoint.iteration).all()
    assert checkpoint.meta == {"n": checkpoint.iteration}
    return checkpoint.iteration


def save_forever(world: Group, directory: Path, asynchronous: bool, first: int) -> None:
    """Saves iteration after iteration, keeping two, until the process is killed."""
    with Saver(directory, world, keep_last=2, asynchronous=asynchronous) as saver:
        for iteration in range(first, first + 100_000):
            mine = flat_pieces(iteration, world.rank, world.size)
            saver.save(iteration, mine, {"n": iteration})
            saver.copied()
            for piece in mine:
                piece.tensor.fill_(-1)


def single(name: str, tensor: torch.Tensor) -> Piece:
    """A piece that is a whole tensor."""
    return Piece(name, tuple(tensor.shape), whole(tensor.shape), tensor)


def rank_that_saves(rank, size, rendezvous, directory, asynchronous, first):
    world = Group.single("world")
    if size > 1:
        dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=size)
        world = Group("world", tuple(range(size)), rank, Ledger(), dist.group.WORLD)
    save_forever(world, directory, asynchronous, first)


def save_until(directory, iteration, crash_at):
    """Saves, and ends the process at the `crash_at`-th thing it does to the file system."""
    done = 0

    def count(event, args):
        nonlocal done
        touched = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
        if touched or (event == "open" and str(directory) in str(args[0])):
            done += 1
            if done == crash_at:
                os._exit(77)

    sys.addaudithook(count)
    mine = [single("x", torch.full((9,), float(iteration)))]
    save(directory, iteration, mine, {"n": iteration}, Group.single("world"), keep_last=1)
    os._exit(0)


def save_with_little_space(directory):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save(directory, 2, flat_pieces(2, 0, 1), {"n": 2}, Group.single("world"))
    except SaveError as error:
        os._exit(77 if "File too large" in str(error) else 1)
