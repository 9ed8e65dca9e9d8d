"""One rank's safetensors file: writing it in blocks, reading any block of it, checksums of both.

May import torch. The format is the public one (8 bytes of header length, a JSON header, the tensors
back to back), written and read here directly because the safetensors package copies everything it
saves: this writer holds one block at a time, and a block that is read is verified in place. The
checksums are returned to the caller, who keeps them in the index (index.py).
"""

from __future__ import annotations

import json
import math
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from core.checkpoint.errors import BrokenCheckpoint, MisreadCheckpoint
from core.checkpoint.index import StoredFile
from core.checkpoint.write_back import start_write_back

BLOCK = 4 * 1024**2  # bytes per checksum, and per read or write; a multiple of every item size
THREADS = 2  # blocks being read: checksum of one while another is on its way from the disk
WRITERS = 3  # blocks being written: one more, because a disk with enough to do makes one wait
AHEAD = 8  # blocks of a file that wait to be written while the next tensor is made ready

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_NAMES}


def dtype_name(dtype: torch.dtype) -> str:
    """"float32" for torch.float32; TypeError for what cannot be stored."""
    if dtype not in SAFETENSORS_NAMES:
        raise TypeError(f"{dtype} cannot be stored; a checkpoint holds {', '.join(_DTYPES)}")
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The inverse of `dtype_name`."""
    return _DTYPES[name]


@dataclass(frozen=True)
class Deferred:
    """A tensor that is made when its turn to be written comes, and dropped after: for a model that
    is converted without ever being whole in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    is_cuda = False

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize


def write_file(
    path: Path,
    entries: Sequence[tuple[str, Tensor | Deferred]],
    metadata: dict[str, str] | None = None,
) -> tuple[StoredFile, list[tuple[int, ...]]]:
    """Writes tensors under their keys and syncs the file.

    Returns the file's facts and, per entry, the crc32 of each of its blocks. A tensor that is not
    contiguous on the host is copied when its turn comes: extra memory is the largest of those and
    at most 12 blocks. `metadata` is what the format allows besides tensors. OSError when the disk
    is full.
    """
    order = sorted(range(len(entries)), key=lambda i: -entries[i][1].element_size())  # stay aligned
    header, end = _header([entries[i] for i in order], metadata)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        at = _write(target, memoryview(header), 0)
        sums = _write_tensors(target, at, [entries[i][1] for i in order])
        os.fsync(target)
    finally:
        os.close(target)
    facts = StoredFile(len(header) + end, zlib.crc32(header))
    return facts, [crcs for _, crcs in sorted(zip(order, sums, strict=True))]


def _write_tensors(
    target: int, at: int, tensors: Sequence[Tensor | Deferred]
) -> list[tuple[int, ...]]:
    """Writes them one behind the other from offset `at`; the crc32 of the blocks of each."""
    pool = ThreadPoolExecutor(WRITERS)
    sums: list[list[Future[int]]] = []
    under_way: deque[Future[int]] = deque()

    def leave(blocks: int) -> None:
        while len(under_way) > blocks:
            under_way.popleft().result()

    def write(data: memoryview, at: int) -> int:
        """Returns the offset behind it, and keeps nothing of it."""
        sums.append([])
        for start in range(0, len(data), BLOCK):
            leave(AHEAD - 1)
            block = [data[start : start + BLOCK]]
            under_way.append(pool.submit(_write_block, target, block, at + start))
            sums[-1].append(under_way[-1])
        return at + len(data)

    try:
        for tensor in tensors:
            if _is_made(tensor) and tensor.numel() * tensor.element_size() > AHEAD // 2 * BLOCK:
                leave(0)  # two large ones at a time would be too much
            at = write(host_bytes(tensor), at)
        return [tuple(future.result() for future in blocks) for blocks in sums]
    finally:
        pool.shutdown(cancel_futures=True)  # after a failure the rest is not tried


def _write_block(target: int, only: list[memoryview], at: int) -> int:
    """Takes the block out of its list: a pool keeps what it calls with a little too long."""
    block = only.pop()
    _write(target, block, at)
    start_write_back(target, at, len(block))
    return zlib.crc32(block)


def _is_made(tensor: Tensor | Deferred) -> bool:
    """Whether `host_bytes` takes memory for it."""
    if isinstance(tensor, Deferred):
        return True
    return tensor.device.type != "cpu" or not tensor.is_contiguous()


def _header(
    entries: Sequence[tuple[str, Tensor | Deferred]], metadata: dict[str, str] | None
) -> tuple[bytes, int]:
    """The header with its length in front, and the number of bytes that will follow it."""
    facts: dict[str, dict] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for key, tensor in entries:
        if key in facts:
            raise ValueError(f"{key} is written twice by one rank")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        dtype_name(tensor.dtype)
        facts[key] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(facts, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _write(target: int, data: memoryview, at: int) -> int:
    """All of `data` at offset `at`; returns the offset behind it."""
    while data:
        written = os.pwrite(target, data, at)
        data, at = data[written:], at + written
    return at


class TensorFile:
    """A written file, opened anew for each tensor read from it: no descriptor outlives a read.

    Raises BrokenCheckpoint, naming the file and what is wrong, from every method.
    """

    def __init__(self, path: Path, facts: StoredFile, block: int = BLOCK) -> None:
        self.path = path
        self.block = block
        self._facts = facts

    @cached_property
    def header(self) -> dict[str, dict]:
        """The verified header: {key: {"dtype", "shape", "data_offsets"}}."""
        return self._read_header[1]

    @cached_property
    def _read_header(self) -> tuple[int, dict[str, dict]]:
        """Where the tensors begin, and the header."""
        try:
            with open(self.path, "rb") as file:
                start = file.read(8)
                length = int.from_bytes(start, "little")
                text = file.read(length) if length < self._facts.bytes else b""
        except OSError as error:
            raise MisreadCheckpoint(f"{self.path}: {error.strerror}") from error
        if zlib.crc32(start + text) != self._facts.header:
            raise MisreadCheckpoint(f"{self.path}: its header does not match the index's checksum")
        return 8 + length, json.loads(text)

    def check(self, key: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """That the tensor under `key` is what the index says."""
        facts = self.header.get(key)
        if not facts or (facts["dtype"], facts["shape"]) != (SAFETENSORS_NAMES[dtype], list(shape)):
            raise BrokenCheckpoint(f"{self.path}: {key} is {facts}, not {dtype} {tuple(shape)}")

    def open(self) -> int:
        """A descriptor for `read_block`; the caller closes it."""
        try:
            return os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise MisreadCheckpoint(f"{self.path}: {error.strerror}") from error

    def read_block(
        self, source: int, key: str, i: int, crc: int, into: memoryview | None = None
    ) -> memoryview:
        """Block `i` of the tensor under `key`, verified; `into` (its exact length) is filled."""
        begin, end = self.header[key]["data_offsets"]
        at = begin + i * self.block
        size = min(self.block, end - at)
        view = _scratch(size) if into is None else into
        at += self._read_header[0]
        done = 0
        while done < size:
            try:
                count = os.preadv(source, [view[done:]], at + done)
            except OSError as error:
                raise MisreadCheckpoint(f"{self.path}: {error.strerror}") from error
            if not count:
                raise BrokenCheckpoint(f"{self.path} ends inside {key}")
            done += count
        if zlib.crc32(view) != crc:
            raise MisreadCheckpoint(
                f"{self.path}: bytes {at} to {at + size} (block {i} of {key}) have crc32 "
                f"{zlib.crc32(view):08x}, {crc:08x} was written"
            )
        return view


_THREAD = threading.local()


def _scratch(size: int) -> memoryview:
    """Memory of this thread, valid until its next call."""
    buffer = getattr(_THREAD, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _THREAD.buffer = bytearray(size)
    return memoryview(buffer)[:size]


def host_bytes(tensor: Tensor | Deferred) -> memoryview:
    """The bytes in row-major order: a view if the tensor is contiguous on the host, else a copy."""
    if isinstance(tensor, Deferred):
        made, tensor = tensor, tensor.make()
        if (tensor.shape, tensor.dtype) != (torch.Size(made.shape), made.dtype):
            raise ValueError(f"{made} made {tensor.dtype} of shape {tuple(tensor.shape)}")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def in_threads(job: Callable[[int], object], numbers: Iterable[int]) -> list:
    """The job's results in order; alone in this thread when there is one number."""
    numbers = list(numbers)
    if len(numbers) < 2:
        return [job(n) for n in numbers]
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(job, n) for n in numbers]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()  # no effect on finished ones; after a failure the rest is not tried
