"""`Staging`: where a save in the background writes from, and the copy into it.

May import torch. A step's forward and backward change nothing that is saved, so the copy need not
be complete when the step begins, only when the optimizer does: a thread makes it (on a GPU a stream
of its own), and `Copies.wait` stands before the update. Neighbours: store.py (saves).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from core.checkpoint.files import host_bytes
from core.checkpoint.pieces import Piece


class Staging:
    """Host memory for the pieces of a save in the background, kept from one save to the next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def begin(self, pieces: Iterable[Piece]) -> Copies:
        """Room for the same pieces in memory that nobody else writes to; a GPU starts copying."""
        pieces = list(pieces)
        sizes = [piece.tensor.numel() * piece.tensor.element_size() for piece in pieces]
        starts = [0, *accumulate(-(-size // 64) * 64 for size in sizes)]
        if self._memory.numel() < starts[-1]:
            on_gpu = any(piece.tensor.is_cuda for piece in pieces)
            self._memory = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=on_gpu)
        copies = []
        for piece, start, size in zip(pieces, starts, sizes):
            place = self._memory[start : start + size]
            tensor = place.view(piece.tensor.dtype).view(piece.tensor.shape)
            copies.append(replace(piece, tensor=tensor))
        return Copies(pieces, copies)


class Copies:
    """Pieces on their way into memory of their own."""

    def __init__(self, originals: list[Piece], copies: list[Piece]) -> None:
        self._copies = copies
        self._on_host: list[tuple[Piece, Piece]] = []
        self._stream = None
        self._left, self._whole = threading.Event(), False
        for original, copy in zip(originals, copies, strict=True):
            if not original.tensor.is_cuda:
                self._on_host.append((original, copy))
                continue
            if self._stream is None:
                self._stream = torch.cuda.Stream(original.tensor.device)
                self._stream.wait_stream(torch.cuda.current_stream(original.tensor.device))
            with torch.cuda.stream(self._stream):
                copy.tensor.copy_(original.tensor.detach(), non_blocking=True)

    def made(self) -> Iterator[Piece]:
        """For the thread that writes them: makes what copies are not on their way, waits for all.

        Plain memory copies, without Python's lock: torch's own, over all threads, is slower for
        tensors of a few MB and much slower when the cores are busy.
        """
        if not self._left.is_set():
            try:
                for original, copy in self._on_host:
                    np.copyto(
                        np.asarray(host_bytes(copy.tensor)), np.asarray(host_bytes(original.tensor))
                    )
                if self._stream is not None:
                    self._stream.synchronize()
                self._whole = True
            finally:
                self._left.set()
        if not self._whole:
            raise RuntimeError("what was to be saved has not been copied, and may have changed")
        yield from self._copies

    def wait(self) -> None:
        """Returns when the originals may be written to: on a GPU, by kernels launched from now."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        if self._on_host:
            self._left.wait()
