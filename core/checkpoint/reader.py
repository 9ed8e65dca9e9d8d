"""Reading: a `Checkpoint`; `open_checkpoint` for one process, `load` for ranks that must agree.

May import torch and core.comm. Any box of any tensor is assembled from the boxes that were written,
whatever layout wrote them, and every block that is read is verified. Neighbours: directory.py says
which checkpoints there are, index.py what one holds, files.py reads blocks, store.py writes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from core.checkpoint.directory import INDEX, candidates, latest
from core.checkpoint.errors import (
    BrokenCheckpoint,
    CheckpointError,
    MisreadCheckpoint,
    MissingCheckpoint,
)
from core.checkpoint.files import TensorFile, dtype_named, host_bytes, in_threads
from core.checkpoint.index import Index, StoredBox, StoredTensor
from core.checkpoint.pieces import Piece
from core.checkpoint.slices import (
    Box,
    flat_boxes,
    flat_span,
    intersect,
    lengths,
    relative,
    slices,
    tiling_problem,
    volume,
    whole,
)
from core.comm import Group, broadcast_object, gather_objects

T = TypeVar("T")
Say = Callable[[str], None]


def to_stderr(line: str) -> None:
    """Where warnings go unless the caller has a better place."""
    print(line, file=sys.stderr, flush=True)


class Checkpoint:
    """One complete checkpoint: its index in memory, its tensors on disk. Nothing stays open.

    iteration   the step it was saved at
    meta        what the trainer saved beside the tensors (plain JSON)
    index       everything else that is known about it
    """

    def __init__(self, path: Path) -> None:
        """Raises BrokenCheckpoint or CheckpointError; see `Index.read`."""
        self.path = path
        self.index = Index.read(path)
        self.iteration = self.index.iteration
        self.meta = self.index.meta
        self._file = cache(self._open_file)

    def names(self) -> list[str]:
        return list(self.index.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return dtype_named(self._stored(name).dtype)

    def boxes(self, name: str) -> list[Box]:
        """How the writers had cut it."""
        return [stored.box for stored in self._stored(name).boxes]

    def check(self, wanted: Mapping[str, Sequence[int]]) -> None:
        """CheckpointError listing every wanted {name: shape} that is absent or of another shape."""
        stored = self.index.tensors
        absent = [name for name in wanted if name not in stored]
        other = [
            f"{name} is {stored[name].shape} in the checkpoint, {tuple(shape)} here"
            for name, shape in wanted.items()
            if name in stored and stored[name].shape != tuple(shape)
        ]
        lines = [f"not in the checkpoint: {', '.join(absent)}"] if absent else []
        if lines + other:
            raise CheckpointError(f"{self.path} does not fit: " + "; ".join(lines + other))

    def read(
        self,
        name: str,
        box: Box | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """A new tensor of the elements `box` (None: all), in the stored dtype or `dtype`."""
        box = whole(self.shape(name)) if box is None else box
        out = torch.empty(lengths(box), dtype=dtype or self.dtype(name), device=device)
        self.read_into(name, box, out)
        return out

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Reads every piece into its tensor, in the tensor's dtype.

        Names and shapes are checked before anything is read, all of them at once.
        """
        pieces = list(pieces)
        self.check({piece.name: piece.shape for piece in pieces})
        for piece in pieces:
            self.read_into(piece.name, piece.box, piece.tensor)

    def read_into(self, name: str, box: Box | None, out: Tensor) -> None:
        """Reads elements `box` (None: all) into `out`, any strided view on any device.

        Converted to `out.dtype` within floats or within integers. Reads the blocks that hold wanted
        elements, once each. Raises BrokenCheckpoint when a block is not what was written.
        """
        entry = self._stored(name)
        box = whole(entry.shape) if box is None else box
        stored_dtype = dtype_named(entry.dtype)
        if any(not 0 <= a <= b <= n for (a, b), n in zip(box, entry.shape, strict=True)):
            raise ValueError(f"{name}: box {box} is outside the shape {entry.shape}")
        if tuple(out.shape) != lengths(box):
            raise ValueError(f"{name}: box {box} read into a tensor of {tuple(out.shape)}")
        if out.dtype.is_floating_point != stored_dtype.is_floating_point:
            raise CheckpointError(f"{name} is {entry.dtype} in the checkpoint, {out.dtype} here")
        out = out.detach()
        found = 0
        for stored in entry.boxes:
            shared = intersect(stored.box, box)
            if shared is not None:
                found += volume(shared)
                target = out[slices(relative(shared, box))]
                self._read_part(stored, stored_dtype, relative(shared, stored.box), target)
        if found != volume(box):
            raise BrokenCheckpoint(f"{self.path}: {name} has holes in {box}")

    def _read_part(
        self, stored: StoredBox, dtype: torch.dtype, wanted: Box, target: Tensor
    ) -> None:
        """Elements `wanted`, counted from the stored box's first, into `target` of their shape."""
        file, shape = self._file(stored.file), lengths(stored.box)
        file.check(stored.key, dtype, shape)
        per_block = file.block // dtype.itemsize
        first, last = flat_span(shape, wanted)
        total = volume(stored.box)
        direct = None  # where the blocks go when they can go straight there
        if wanted == whole(shape) and target.dtype == dtype and _is_host_memory(target):
            direct = host_bytes(target)
        source = file.open()

        def read_block(i: int) -> None:
            start, stop = i * per_block, min((i + 1) * per_block, total)
            if direct is not None:
                into = direct[start * dtype.itemsize : stop * dtype.itemsize]
                file.read_block(source, stored.key, i, stored.sums[i], into)
                return
            parts = flat_boxes(shape, start, stop)
            hits = [(part, kept) for part in parts if (kept := intersect(part, wanted)) is not None]
            if not hits:
                return
            data = file.read_block(source, stored.key, i, stored.sums[i])
            values = torch.frombuffer(data, dtype=dtype)
            for part, kept in hits:
                at = flat_span(shape, part)[0] - start
                view = values[at : at + volume(part)].view(lengths(part))
                target[slices(relative(kept, wanted))].copy_(view[slices(relative(kept, part))])

        try:
            in_threads(read_block, range(first // per_block, -(-last // per_block)))
        finally:
            os.close(source)

    def verify(self) -> Iterator[str]:
        """Reads every byte; one sentence per problem, nothing when the checkpoint is whole."""
        for file in sorted(self.path.iterdir()):
            if file.name not in self.index.files and file.name != INDEX:
                yield f"{file} does not belong to the checkpoint; it is never read"
        for name, entry in self.index.tensors.items():
            if entry.numel and (why := tiling_problem(entry.shape, self.boxes(name))):
                yield f"{name}: {why}"
            for stored in entry.boxes:
                try:
                    self._verify_box(stored, dtype_named(entry.dtype))
                except BrokenCheckpoint as error:
                    yield str(error)

    def _verify_box(self, stored: StoredBox, dtype: torch.dtype) -> None:
        file = self._file(stored.file)
        file.check(stored.key, dtype, lengths(stored.box))
        source = file.open()
        try:
            in_threads(
                lambda i: file.read_block(source, stored.key, i, stored.sums[i]),
                range(len(stored.sums)),
            )
        finally:
            os.close(source)

    def _stored(self, name: str) -> StoredTensor:
        if name not in self.index.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self.index.tensors[name]

    def _open_file(self, name: str) -> TensorFile:
        return TensorFile(self.path / name, self.index.files[name], self.index.block)


def _is_host_memory(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def open_checkpoint(
    directory: Path | str, step: int | None = None, *, say: Say = to_stderr
) -> Checkpoint:
    """The checkpoint `latest` names, or the newest whole one before it; or that of `step`.

    For one process: what the index says is verified now, the tensors as they are read. Raises
    MissingCheckpoint, BrokenCheckpoint when none is whole, CheckpointError for what is not ours.
    """
    return load(directory, lambda checkpoint: checkpoint, Group.single("world"), step=step, say=say)


def load(
    directory: Path | str,
    read: Callable[[Checkpoint], T],
    world: Group,
    *,
    step: int | None = None,
    say: Say = to_stderr,
) -> T:
    """Calls `read(checkpoint)` on every rank, all with the same checkpoint, and returns its result.

    When any rank finds the checkpoint damaged, all turn to the previous one, with a line from rank
    0, and `read` is called again: it must overwrite what it did before, and must not communicate.
    Where only reading it failed, or gave other bytes than were written, all try it once more first:
    a disk or network that stumbles costs no checkpoint.
    With `step` there is no other to turn to. Collective. Raises on every rank MissingCheckpoint,
    BrokenCheckpoint when no checkpoint is whole, CheckpointError when one does not fit.
    """
    directory = Path(directory)
    paths = _agree_on_candidates(directory, step, world, say)
    damage: list[str] = []
    for path in paths:
        result, broken, again = _attempt_together(read, path, world)
        if again:
            misread = broken
            result, broken, _ = _attempt_together(read, path, world)
            if world.rank == 0 and not broken:
                say(f"WARNING: {path} could be read at the second try only: {misread}")
        if not broken:
            if damage and world.rank == 0:
                say(f"WARNING: loading {path} instead of the newest checkpoint")
            return result
        damage.append(broken)
        if world.rank == 0:
            say(f"WARNING: {path} is damaged and will not be loaded: {broken}")
    raise BrokenCheckpoint(f"no checkpoint in {directory} is whole: " + "; ".join(damage))


def _agree_on_candidates(directory: Path, step: int | None, world: Group, say: Say) -> list[Path]:
    """Rank 0's list for everyone: the folder may look different through another node's cache."""
    told: tuple[str, list[str]] = ("", [])
    if world.rank == 0:
        try:
            told = ("", [str(path) for path in candidates(directory, step)])
        except MissingCheckpoint as error:
            told = ("missing", [str(error)])
        except CheckpointError as error:
            told = ("refused", [str(error)])
        pointer = latest(directory)
        if step is None and not told[0] and pointer and Path(told[1][0]).name != pointer:
            if Path(told[1][0]) != directory:
                say(f"WARNING: {directory / 'latest'} names {pointer!r}, which is not there")
    kind, lines = broadcast_object(told, world, tag="checkpoint.candidates")
    if kind:
        raise {"missing": MissingCheckpoint, "refused": CheckpointError}[kind](lines[0])
    return [Path(line) for line in lines]


def _attempt_together(
    read: Callable[[Checkpoint], T], path: Path, world: Group
) -> tuple[T | None, str, bool]:
    """What was read, what any rank found broken, and whether a second try may do better."""
    result, mine = _attempt(read, path)
    outcomes = gather_objects(_told(mine), world, tag="checkpoint.load")
    if refused := _by_rank(outcomes, "refused"):
        raise mine if _kind(mine) == "refused" else CheckpointError(refused)
    broken = _by_rank(outcomes, "broken", "misread")
    return result, broken, bool(broken) and not _by_rank(outcomes, "broken")


def _attempt(read: Callable[[Checkpoint], T], path: Path) -> tuple[T | None, Exception | None]:
    try:
        return read(Checkpoint(path)), None
    except Exception as error:  # told to the other ranks, raised by `load`
        return None, error


def _kind(error: Exception | None) -> str:
    if error is None:
        return ""
    if isinstance(error, MisreadCheckpoint):
        return "misread"
    return "broken" if isinstance(error, BrokenCheckpoint) else "refused"


def _told(error: Exception | None) -> tuple[str, str]:
    plain = isinstance(error, CheckpointError) or error is None
    return _kind(error), str(error) if plain else f"{type(error).__name__}: {error}"


def _by_rank(outcomes: Sequence[tuple[str, str]], *kinds: str) -> str:
    """What the ranks say about these kinds of failure, each sentence once."""
    said: dict[str, list[int]] = {}
    for rank, (its_kind, text) in enumerate(outcomes):
        if its_kind in kinds:
            said.setdefault(text, []).append(rank)
    if len(outcomes) == 1:
        return "; ".join(said)
    return "; ".join(f"rank {ranks[0]}: {text}" for text, ranks in said.items())
