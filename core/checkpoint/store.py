"""Saving: `Saver` for a run, `save` for a single checkpoint. Reading is in reader.py.

May import torch and core.comm. Every rank writes one safetensors file with the pieces it owns;
rank 0 merges the ranks' parts into the index and publishes the folder by a rename. Nothing on disk
depends on the writers' layout, and nothing is pickled.

Plain safetensors with an index of our own, not torch.distributed.checkpoint: its metadata is
pickled, and its planners exchange Python objects through collectives, which a background save must
not issue. Here the parts meet in the folder being written, so a save in the background
communicates with nobody.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from core.checkpoint import directory as folders
from core.checkpoint import files, publication
from core.checkpoint.errors import CheckpointError, SaveError
from core.checkpoint.index import Part, StoredBox, StoredTensor, file_name, merge
from core.checkpoint.pieces import Piece
from core.checkpoint.reader import Say, to_stderr
from core.checkpoint.slices import show, whole
from core.checkpoint.staging import Copies, Staging
from core.comm import Group, broadcast_object, gather_objects

GRACE = 90.0  # seconds in which rank 0 must see what another rank has written and synced
PATIENCE = 5.0  # seconds for the save under way when a rank fails, before it leaves


def save(
    directory: Path | str,
    iteration: int,
    pieces: Iterable[Piece],
    meta: dict,
    world: Group,
    *,
    keep_last: int | None = None,
    retain_interval: int | None = None,
    loaded: int | None = None,
) -> Path:
    """Saves one checkpoint and returns its folder; see `Saver`. Collective over `world`."""
    with Saver(
        directory, world, keep_last=keep_last, retain_interval=retain_interval, loaded=loaded
    ) as saver:
        saver.save(iteration, pieces, meta)
    return Path(directory) / folders.folder_name(iteration)


class Saver:
    """Saves a run's checkpoints into one folder, one at a time, and removes those it may.

    directory        made if need be, and locked against other runs until `close`
    keep_last        keep this many of the newest (None: all)
    retain_interval  keep multiples of it for good; see `directory.obsolete`
    asynchronous     return at once; a thread of each rank copies the pieces, then writes the copies
    loaded           iteration this run was loaded from: never removed
    after            what lies beyond it is not of this run, and is set aside as soon as the first
                     save is there (-1: all there is; None: nothing)
    took             told, in that thread, the seconds that each such write has taken
    say              where warnings go

    All methods are collective over `world`; use it in a `with`. Raises CheckpointError when another
    run holds the folder, SaveError on all ranks when a save failed on any.
    """

    def __init__(
        self,
        directory: Path | str,
        world: Group,
        *,
        keep_last: int | None = None,
        retain_interval: int | None = None,
        asynchronous: bool = False,
        loaded: int | None = None,
        after: int | None = None,
        took: Callable[[float], object] = lambda seconds: None,
        say: Say = to_stderr,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("retain_interval", retain_interval)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.directory = Path(directory)
        self.world = world
        self.asynchronous = asynchronous
        self._keep = (keep_last, retain_interval, loaded)
        self._after = after
        self._took, self._say = took, say
        self._staging = Staging()
        self._under_way: _Save | None = None
        self._stuck: set[str] = set()
        self._lock: folders.Lock | None = None
        self._on_rank_0(self._take_folder, "cannot save here", CheckpointError)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def save(self, iteration: int, pieces: Iterable[Piece], meta: dict) -> None:
        """Saves what the ranks' pieces add up to; returns when it is complete, or being written.

        pieces  what this rank owns; over all ranks they tile every tensor exactly. Making them must
                not communicate. May be written to when this returns; if asynchronous, only after
                `copied`, which a training loop calls between its backward and its update.
        meta    plain JSON; rank 0's is kept

        First waits for the save under way; a failure of that one is raised now and nothing is
        started, so a caller that wants to go on calls again. Where the disk has no room for the
        whole, beside all that is there, nothing is written.
        """
        self.wait()
        pieces, needed = self._weighed(pieces, f"cannot save iteration {iteration}")
        self._under_way = under_way = self._prepared(iteration, meta, needed)
        if not self.asynchronous:
            under_way.write(pieces)
            self.wait()
            return
        under_way.begin(pieces, self._staging, self._in_background)

    def copied(self) -> None:
        """Returns when the pieces of the save under way may be written to. Talks to nobody."""
        if self._under_way and self._under_way.copies:
            self._under_way.copies.wait()

    def wait(self) -> int | None:
        """Waits for the save under way and returns its iteration, None when there is none."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return None
        under_way.written.wait()
        failure = None if under_way.error is None else _text(under_way.error)
        told = gather_objects(failure, self.world, tag="checkpoint.written")
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
        outcome = ""
        if self.world.rank == 0:
            outcome = self._settle(under_way, failures)
        outcome = broadcast_object(outcome, self.world, tag="checkpoint.published")
        if outcome:
            raise SaveError(
                f"iteration {under_way.iteration} was not saved in {self.directory}: {outcome}. "
                "Older checkpoints are as they were"
            ) from under_way.error
        return under_way.iteration

    def close(self) -> None:
        """Waits for the save under way and lets other runs save here.

        If that one has failed there is no next save to be told of it, so it is tried once more.
        """
        last = self._under_way
        try:
            self.wait()
        except SaveError as error:
            if self.world.rank == 0:
                self._say(f"WARNING: {error}. It is the last one, and is tried once more")
            self._once_more(last)
        finally:
            self._release()

    def _once_more(self, failed: _Save) -> None:
        """Writes the copies of a save that failed in the background, in this thread."""
        self._under_way = self._prepared(failed.iteration, failed.meta, failed.needed)
        if failed.copies is None:
            self._under_way.fail(failed.error)
        else:
            self._under_way.write(failed.copies.made())
        self.wait()

    def _prepared(self, iteration: int, meta: dict, needed: int) -> _Save:
        """A save that every rank can write to, for which rank 0 has made room and a folder."""
        what = f"cannot save iteration {iteration}"
        name = self._on_rank_0(lambda: self._make_folder(iteration, meta, needed), what)
        return _Save(iteration, self.directory / name, meta, self.world.rank, needed)

    def _weighed(self, pieces: Iterable[Piece], what: str) -> tuple[list[Piece], int]:
        """This rank's pieces, and the bytes of all ranks'."""
        failure, size = None, 0
        try:
            pieces = list(pieces)
            size = sum(piece.tensor.numel() * piece.tensor.element_size() for piece in pieces)
        except Exception as error:  # raised on every rank
            failure = error
        told = gather_objects([failure and _text(failure), size], self.world, tag="checkpoint.size")
        failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text]
        if failures:
            raise SaveError(f"{self.directory}: {what}: {'; '.join(failures)}") from failure
        return pieces, sum(size for _, size in told)

    # ---- rank 0 ---------------------------------------------------------------------------------

    def _on_rank_0(self, job, what: str, kind: type[CheckpointError] = SaveError) -> str | None:
        """Runs the job there; every rank returns its result or, if it fails, raises."""
        failure, result = "", None
        if self.world.rank == 0:
            try:
                result = job()
            except (CheckpointError, OSError, TypeError, ValueError) as error:
                failure = _text(error)
        failure, result = broadcast_object((failure, result), self.world, tag="checkpoint.prepare")
        if failure:
            raise kind(f"{self.directory}: {what}: {failure}")
        return result

    def _take_folder(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = folders.Lock(self.directory)
        if self._lock.unprotected:
            self._say(
                f"WARNING: the file system of {self.directory} has no locks "
                f"({self._lock.unprotected}): nothing keeps a second run from saving there too; "
                "give each run a folder of its own"
            )

    def _make_folder(self, iteration: int, meta: dict, needed: int) -> str:
        """Its name is like no other: a rank that outlives a killed run finds its own gone, and
        cannot write into the one of the run started again."""
        json.dumps(meta)
        for stuck in set(publication.tidy(self.directory)) - self._stuck:
            self._stuck.add(stuck)
            self._say(f"WARNING: {stuck}")
        if lack := folders.no_room(self.directory, needed):
            raise SaveError(lack)
        name = f"{folders.folder_name(iteration)}.{publication.token()}.tmp"
        (self.directory / name).mkdir()
        return name

    def _settle(self, under_way: _Save, failures: list[str]) -> str:
        """Publishes, or cleans up; returns why the checkpoint is not there, "" when it is."""
        if failures:
            under_way.cancelled.set()
        if under_way.thread:
            under_way.thread.join(GRACE)
            under_way.cancelled.set()
            under_way.thread.join()
        elif not failures:
            self._publish(under_way)
        if not failures and under_way.error:
            failures = [_text(under_way.error)]
        if failures:
            shutil.rmtree(under_way.folder, ignore_errors=True)
        return "; ".join(failures)

    def _publish(self, under_way: _Save) -> None:
        """Publishes and removes what is obsolete; a failure is left in `under_way.error`."""
        try:
            under_way.assemble(self.world.size)
            name = folders.folder_name(under_way.iteration)
            said = publication.publish(self.directory, name, under_way.folder, self._after)
        except Exception as error:  # told to every rank by `wait`
            under_way.error = error
            return
        self._after = None
        for line in said:
            self._say(f"WARNING: {line}")
        have = folders.saved_iterations(self.directory)
        for iteration in folders.obsolete(have, under_way.iteration, *self._keep):
            try:
                publication.discard(self.directory / folders.folder_name(iteration))
            except OSError as error:
                self._say(f"WARNING: an old checkpoint could not be removed: {error}")

    # ---- the background --------------------------------------------------------------------------

    def _in_background(self, under_way: _Save) -> None:
        began = time.monotonic()
        under_way.write(under_way.copies.made())
        if under_way.error:
            self._say(f"WARNING: saving iteration {under_way.iteration}: {_text(under_way.error)}")
        elif self.world.rank == 0:
            self._publish(under_way)
        self._took(time.monotonic() - began)

    def _abandon(self) -> None:
        """After a failure of this rank alone: gives a save under way seconds, talks to nobody."""
        if self._under_way and self._under_way.thread:
            self._under_way.thread.join(PATIENCE)
        self._release()

    def _release(self) -> None:
        if self._lock:
            self._lock.release()
            self._lock = None


@dataclass
class _Save:
    """One checkpoint on its way, as one rank sees it.

    needed     bytes of all ranks' tensors
    written    set when this rank's part is on disk, or has failed
    cancelled  set when the ranks' parts will not all come
    error      what went wrong on this rank
    """

    iteration: int
    folder: Path
    meta: dict
    rank: int
    needed: int
    copies: Copies | None = None
    written: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    error: Exception | None = None

    def begin(
        self, pieces: Iterable[Piece], staging: Staging, job: Callable[[_Save], None]
    ) -> None:
        """Starts the job in a thread of its own; fails where memory or threads have run out."""
        try:
            self.copies = staging.begin(pieces)
            self.thread = threading.Thread(target=job, args=(self,), daemon=True)
            self.thread.start()
        except Exception as error:  # told to every rank by `Saver.wait`
            self.copies = self.thread = None
            self.fail(error)

    def fail(self, error: Exception) -> None:
        self.error = error
        self.written.set()

    def write(self, pieces: Iterable[Piece]) -> None:
        """Writes this rank's file, then its part of the index: the sign that it is done."""
        try:
            part = _write_tensors(self.folder, self.rank, list(pieces))
            part.write(self._part_path(self.rank))
        except Exception as error:  # told to every rank by `Saver.wait`
            self.error = error
        finally:
            self.written.set()

    def assemble(self, ranks: int) -> None:
        """On rank 0: waits for all parts and writes the index."""
        paths = [self._part_path(rank) for rank in range(ranks)]
        parts = [Part.read(self._await(path)) for path in paths]
        merge(self.iteration, files.BLOCK, self.meta, parts).write(self.folder)
        for path in paths:
            path.unlink()

    def _part_path(self, rank: int) -> Path:
        return self.folder / f"part_{rank:05d}.json"

    def _await(self, path: Path) -> Path:
        """The path, once it is there; in the background others may take as long as they need."""
        patience = 0.01
        deadline = None if self.thread else time.monotonic() + GRACE
        while not path.exists():
            if self.cancelled.is_set() or (deadline and time.monotonic() > deadline):
                raise SaveError(
                    f"{path} was written by another rank and is not visible to rank 0; the folder "
                    "must be on a file system that all nodes share"
                )
            self.cancelled.wait(patience)
            patience = min(1.0, patience * 2)
        return path


def _write_tensors(folder: Path, rank: int, pieces: list[Piece]) -> Part:
    """This rank's file (none when it owns no element) and what to say about it."""
    written = [piece for piece in pieces if piece.tensor.numel()]
    keys = [_key(piece) for piece in written]
    file, sums = None, []
    if written:
        entries = list(zip(keys, [piece.tensor for piece in written], strict=True))
        file, sums = files.write_file(folder / file_name(rank), entries)
    tensors: dict[str, StoredTensor] = {}
    for piece in pieces:
        mine = StoredTensor(tuple(piece.shape), files.dtype_name(piece.tensor.dtype), ())
        known = tensors.setdefault(piece.name, mine)
        if (known.shape, known.dtype) != (mine.shape, mine.dtype):
            raise ValueError(f"{piece.name} has pieces of two shapes or dtypes: {known}, {mine}")
    for piece, key, crcs in zip(written, keys, sums, strict=True):
        known = tensors[piece.name]
        box = StoredBox(piece.box, file_name(rank), key, crcs)
        tensors[piece.name] = replace(known, boxes=(*known.boxes, box))
    return Part(rank, file, tensors)


def _key(piece: Piece) -> str:
    return piece.name if piece.box == whole(piece.shape) else piece.name + show(piece.box)


def _text(error: BaseException) -> str:
    """An exception for a message that names the rank and the folder itself."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
