"""Sample orders kept in files, so that a restart maps them instead of drawing them again.

FOLDER/HASH.epoch-N.order is one Epoch of data/sample_index.py. HASH covers everything the order
depends on: the settings, and the .idx file by its header, size, time of change and pieces of its
content. A file is written under a name of its own and renamed, so that any number of jobs may build
the same one at once and none ever reads half of it:

    8 bytes      b"PHXORDER"
    int64[2]     documents, windows
    int64[...]   starts, bounds, samples
    32 bytes     BLAKE2b of all that
    8 bytes      b"REDROXHP"

A process that is killed while it writes leaves FOLDER/HASH....partial; whoever next writes an order
of the same settings removes it. Opening checks marks and size; `damaged_files` reads everything.
Imports numpy, the standard library and its neighbours in data/.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.index_format import idx_path
from data.sample_index import Epoch

HEAD, TAIL = b"PHXORDER", b"REDROXHP"
ENDING, PARTIAL = ".order", ".partial"
DIGEST_BYTES = 32
# Every write renews a file's time of change, and an order is written in one go: a file that has not
# grown for an hour has no writer. Were one only suspended, its rename would fail, which is logged.
STALE_SECONDS = 3600.0
SAMPLED_PIECES, PIECE_BYTES = 32, 4096


def fingerprint(prefix: str | os.PathLike) -> str:
    """A short text that changes when PREFIX.idx does; reads at most 132 KiB of it."""
    path = idx_path(prefix)
    state = path.stat()
    digest = hashlib.blake2b(f"{state.st_size} {state.st_mtime_ns}".encode(), digest_size=16)
    with open(path, "rb") as file:
        for start in np.linspace(0, state.st_size, SAMPLED_PIECES + 1).astype(np.int64).tolist():
            file.seek(start)
            digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


class OrderCache:
    """The files of one set of settings.

    folder    where they lie (--data-cache-path)
    settings  JSON values that the order depends on, the fingerprint of the data among them
    write     whether this process writes what it had to draw: one a node is enough
    """

    def __init__(self, folder: str | os.PathLike, settings: dict, *, write: bool = True):
        self._folder = Path(folder)
        text = json.dumps(settings, sort_keys=True)
        self._name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._write = write

    def path(self, number: int) -> Path:
        return self._folder / f"{self._name}.epoch-{number}{ENDING}"

    def load(self, number: int) -> Epoch | None:
        """Epoch `number`, mapped; None when there is no whole file of it."""
        try:
            content = np.asarray(np.memmap(self.path(number), np.uint8, mode="r"))
        except (OSError, ValueError):  # ValueError: an empty file
            return None
        return None if _fault(content) else _arrays(content)

    def store(self, number: int, epoch: Epoch) -> None:
        """Write epoch `number`. What keeps it from being written is logged and changes nothing."""
        if not self._write:
            return
        part = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(dir=self._folder, prefix=self._name, suffix=PARTIAL)
            self._remove_stale(os.fstat(handle).st_mtime)
            digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
            sizes = np.array([len(epoch.starts), len(epoch.samples)], "<i8")
            with open(handle, "wb") as file:
                for data in (HEAD, sizes, epoch.starts, epoch.bounds, epoch.samples):
                    content = data if data is HEAD else np.ascontiguousarray(data, "<i8").data
                    file.write(content)
                    digest.update(content)
                file.write(digest.digest() + TAIL)
                file.flush()
                os.fsync(handle)
            os.chmod(part, 0o644)
            os.replace(part, self.path(number))
        except OSError as error:
            if part is not None:
                Path(part).unlink(missing_ok=True)
            logging.getLogger(__name__).warning("--data-cache-path %s: %s", self._folder, error)

    def _remove_stale(self, now: float) -> None:
        """now: by the clock of the folder's file system, which need not be this machine's"""
        for path in self._folder.glob(f"{self._name}*{PARTIAL}"):
            with contextlib.suppress(OSError):  # gone by now, or another user's
                if now - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()


def damaged_files(folder: str | os.PathLike) -> Iterator[str]:
    """One sentence for each file of the cache whose content is not what was written. Reads all."""
    for path in sorted(Path(folder).glob(f"*{ENDING}")):
        content = np.fromfile(path, np.uint8)
        fault = _fault(content)
        if not fault:
            end = len(content) - DIGEST_BYTES - len(TAIL)
            digest = hashlib.blake2b(content[:end].data, digest_size=DIGEST_BYTES).digest()
            if digest != content[end : end + DIGEST_BYTES].tobytes():
                fault = "its content is not what was written"
        if fault:
            yield f"{path}: {fault}; delete it, and it is built again"


def _fault(content: np.ndarray) -> str:
    """What is wrong with a file by its marks and size; empty if nothing."""
    fixed = len(HEAD) + 16 + DIGEST_BYTES + len(TAIL)
    if len(content) < fixed or content[: len(HEAD)].tobytes() != HEAD:
        return "not a file of this cache"
    documents, windows = content[8:24].view("<i8").tolist()
    if len(content) != fixed + 8 * (2 * documents + 1 + windows):
        return "not as long as its head says"
    return "" if content[-len(TAIL) :].tobytes() == TAIL else "it does not end as it should"


def _arrays(content: np.ndarray) -> Epoch:
    documents, windows = content[8:24].view("<i8").tolist()
    numbers = content[24 : 24 + 8 * (2 * documents + 1 + windows)].view("<i8")
    return Epoch(
        numbers[:documents],
        numbers[documents : 2 * documents + 1],
        numbers[2 * documents + 1 :],
    )
