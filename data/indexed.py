"""Token files in Megatron's .bin/.idx format (data/index_format.py): reading and writing.

IndexedDataset maps a pair into memory, or reads it piece by piece; IndexedBuilder writes one as a
stream and publishes it whole. Imports numpy, the standard library and data/index_format.py.
data/sample_index.py cuts samples out of what is read here; scripts/preprocess_data.py writes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from pathlib import Path

import numpy as np

from data.index_format import (
    DTYPES,
    HEADER,
    LONGEST_SEQUENCE,
    REWRITE,
    DataError,
    bin_path,
    check_files,
    idx_path,
    pack_header,
    read_header,
    token_dtype,
)

__all__ = ["IndexedDataset", "IndexedBuilder", "DataError", "token_dtype", "bin_path", "idx_path"]

COPIED_TOKENS = 1 << 22


class IndexedDataset:
    """One PREFIX.bin/.idx pair. Opening costs the same for any size; `verify` reads the whole
    index.

    prefix             path without .bin or .idx
    mmap_bin_files     map the .bin file into memory; False reads what is asked for, each time
    sequence_lengths   int32 [sequences]    in tokens
    sequence_pointers  int64 [sequences]    in bytes
    document_indices   int64 [documents + 1]

    Raises DataError for a missing, truncated or foreign file.
    """

    def __init__(self, prefix: str | os.PathLike, *, mmap_bin_files: bool = True):
        self.prefix = os.fspath(prefix)
        check_files(prefix)
        self.dtype, sequences, boundaries = read_header(idx_path(prefix))
        index = _map(idx_path(prefix), np.dtype("u1"))
        at = HEADER.size
        self.sequence_lengths = index[at : (at := at + 4 * sequences)].view("<i4")
        self.sequence_pointers = index[at : (at := at + 8 * sequences)].view("<i8")
        self.document_indices = index[at : at + 8 * boundaries].view("<i8")
        self.num_tokens = self._check_ends()
        self._tokens = _map(bin_path(prefix), self.dtype) if mmap_bin_files else None
        self._file = None
        if not mmap_bin_files:
            self._file = os.open(bin_path(prefix), os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        """Tokens of sequence i."""
        return self.get(i)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens of sequence i from token `offset` on (to its end by default)."""
        start = int(self.sequence_pointers[i]) // self.dtype.itemsize
        stop = start + int(self.sequence_lengths[i])
        start += offset
        return self.read(start, stop if length is None else min(stop, start + length))

    def document(self, d: int) -> np.ndarray:
        """All tokens of document d, its sequences joined."""
        return self.read(*(self.document_offset(i) for i in (d, d + 1)))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop - 1 of the .bin file: a view of the map, or a copy."""
        if self._file is None:
            return self._tokens[start:stop]
        size = self.dtype.itemsize
        data = os.pread(self._file, (stop - start) * size, start * size)
        while len(data) < (stop - start) * size:  # one call returns at most 2 GiB
            at = start * size + len(data)
            more = os.pread(self._file, stop * size - at, at)
            if not more:
                raise DataError(f"{bin_path(self.prefix)} was cut short after it was opened")
            data += more
        return np.frombuffer(data, self.dtype)

    def document_offset(self, d: int) -> int:
        """The token at which document d starts; for d = num_documents, the end of the file."""
        sequence = int(self.document_indices[d])
        if sequence == len(self):
            return self.num_tokens
        return int(self.sequence_pointers[sequence]) // self.dtype.itemsize

    def document_offsets(self) -> np.ndarray:
        """int64 [documents + 1]: document_offset of all, from an index verified on the way."""
        self.verify()
        starts = np.append(self.sequence_pointers // self.dtype.itemsize, self.num_tokens)
        return starts[self.document_indices]

    def verify(self) -> None:
        """Read the whole index; raise DataError where it contradicts itself or the .bin file."""
        path, lengths, pointers = (
            idx_path(self.prefix),
            self.sequence_lengths,
            self.sequence_pointers,
        )
        if len(lengths) and int(lengths.min()) < 0:
            raise DataError(
                f"{path}: sequence {int(lengths.argmin())} has {int(lengths.min())} tokens; "
                f"{REWRITE}"
            )
        gaps = np.flatnonzero(np.diff(pointers) != lengths[:-1] * np.int64(self.dtype.itemsize))
        if len(gaps) or (len(pointers) and pointers[0] != 0):
            where = 0 if pointers[0] != 0 else int(gaps[0]) + 1
            raise DataError(
                f"{path}: sequence {where} does not start where the one before it ends; {REWRITE}"
            )
        falls = np.flatnonzero(np.diff(self.document_indices) < 0)
        if len(falls):
            raise DataError(f"{path}: document {int(falls[0])} ends before it starts; {REWRITE}")

    def _check_ends(self) -> int:
        """The last entries against the sizes: finds files that do not belong together at once.

        Returns the number of tokens."""
        idx, documents, lengths = (
            idx_path(self.prefix),
            self.document_indices,
            self.sequence_lengths,
        )
        if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths):
            raise DataError(
                f"{idx}: document boundaries do not span its {len(lengths)} sequences; {REWRITE}"
            )
        size = bin_path(self.prefix).stat().st_size
        expected = 0
        if len(lengths):
            expected = int(self.sequence_pointers[-1]) + int(lengths[-1]) * self.dtype.itemsize
        if size != expected:
            state = "truncated" if size < expected else "not the file this index was written for"
            raise DataError(
                f"{bin_path(self.prefix)} has {size} bytes where {idx} needs {expected}: it is "
                f"{state}; {REWRITE}"
            )
        return size // self.dtype.itemsize


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    """The file as a flat read-only array; a plain one, since slicing a memmap costs ten times as
    much."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


class IndexedBuilder:
    """Writes PREFIX.bin/.idx as a stream, in memory that does not grow, and publishes both whole.

        with IndexedBuilder("corpus", token_dtype(vocab_size)) as builder:
            builder.add(tokens)                       # one document of one sequence
            builder.add(tokens, lengths=[3, 5])       # one document of two sequences
            builder.add_documents(tokens, lengths)    # many documents of one sequence each

    Everything goes to the folder PREFIX.partial, which becomes the pair when the block ends and
    goes away when it raises. An existing pair is replaced at the end; until then it stays readable.
    Only one process at a time writes a PREFIX. To go on after a kill, keep what `mark` returned and
    pass it as `mark` to a new builder: whatever was written after it is dropped.
    """

    def __init__(
        self, prefix: str | os.PathLike, dtype: np.dtype | type, mark: dict[str, int] | None = None
    ):
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in DTYPES.values():
            known = ", ".join(map(str, DTYPES.values()))
            raise DataError(f"tokens cannot be stored as {self.dtype}; use {known}")
        self._folder = Path(f"{self.prefix}.partial")
        self._lock = _lock(self._folder)
        counts = mark or {"tokens": 0, "sequences": 0, "documents": 0}
        self.num_tokens = counts["tokens"]
        self.num_sequences = counts["sequences"]
        self.num_documents = counts["documents"]
        try:
            self._tokens = self._open("tokens", self.num_tokens * self.dtype.itemsize)
            self._lengths = self._open("lengths", self.num_sequences * 4)
            self._boundaries = self._open("boundaries", self.num_documents * 8)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> IndexedBuilder:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def add(self, tokens: np.ndarray, lengths: list[int] | np.ndarray | None = None) -> None:
        """Append a document; `lengths` cuts it into sequences, by default it is one."""
        tokens = np.asarray(tokens)
        self._write(tokens, np.asarray([len(tokens)] if lengths is None else lengths, np.int64))
        self._close_documents(np.asarray([self.num_sequences]))

    def add_documents(
        self, tokens: np.ndarray, lengths: np.ndarray, sequences: np.ndarray | None = None
    ) -> None:
        """Append many documents, their tokens joined in `tokens` and their sequence lengths in
        `lengths`; `sequences` says how many sequences each document has, by default one."""
        lengths = np.asarray(lengths, np.int64)
        ends = self.num_sequences + np.cumsum(
            np.ones(len(lengths), np.int64) if sequences is None else sequences
        )
        self._write(np.asarray(tokens), lengths)
        self._close_documents(ends)

    def add_dataset(self, data: IndexedDataset) -> None:
        """Append every document of another pair, empty ones included."""
        data.verify()
        first = self.num_sequences
        for start in range(0, data.num_tokens, COPIED_TOKENS):
            self._write_tokens(data.read(start, min(start + COPIED_TOKENS, data.num_tokens)))
        self._write_lengths(data.sequence_lengths)
        self._close_documents(data.document_indices[1:] + first)

    def mark(self) -> dict[str, int]:
        """Make what was added durable; the place from which a new builder can go on."""
        for file in (self._tokens, self._lengths, self._boundaries):
            file.flush()
            os.fsync(file.fileno())
        return {
            "tokens": self.num_tokens,
            "sequences": self.num_sequences,
            "documents": self.num_documents,
        }

    def finish(self) -> None:
        """Put the complete pair in place: tokens first, the index that makes them visible last."""
        self.mark()
        self._close_files()
        index = self._write_index()
        idx_path(self.prefix).unlink(missing_ok=True)  # never an old index beside new tokens
        os.replace(self._folder / "tokens", bin_path(self.prefix))
        os.replace(index, idx_path(self.prefix))
        _sync_folder(idx_path(self.prefix).parent)
        shutil.rmtree(self._folder)
        self._lock.close()

    def abandon(self) -> None:
        """Remove what was written so far; an existing pair is left as it is."""
        self._close_files()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def close(self) -> None:
        """Leave PREFIX.partial as it is, for a builder that goes on from a mark."""
        self._close_files()
        self._lock.close()

    def _close_files(self) -> None:
        for file in (self._tokens, self._lengths, self._boundaries):
            try:
                file.close()
            except OSError:  # a full disk; what counts is the last mark
                pass

    def _open(self, name: str, size: int):
        """A side file cut to `size` bytes, positioned at its end."""
        path = self._folder / name
        if size and (not path.is_file() or path.stat().st_size < size):
            raise DataError(f"{path} is shorter than the {size} bytes it was left with; start anew")
        file = open(path, "r+b" if size else "wb")
        file.truncate(size)
        file.seek(size)
        return file

    def _write(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        total = int(lengths.sum())
        if total != len(tokens) or (len(lengths) and int(lengths.min()) < 0):
            raise ValueError(
                f"{len(lengths)} sequence lengths sum to {total}, not to {len(tokens)} tokens"
            )
        if len(lengths) and int(lengths.max()) > LONGEST_SEQUENCE:
            raise DataError(
                f"a sequence of {int(lengths.max())} tokens does not fit the format "
                f"({LONGEST_SEQUENCE} at most); cut the document into several sequences"
            )
        self._write_tokens(tokens)
        self._write_lengths(lengths)

    def _write_tokens(self, tokens: np.ndarray) -> None:
        if self.dtype.kind in "iu" and len(tokens) and tokens.dtype != self.dtype:
            low, high, limits = int(tokens.min()), int(tokens.max()), np.iinfo(self.dtype)
            if low < limits.min or high > limits.max:
                raise DataError(
                    f"token ids {low} to {high} do not fit {self.dtype} "
                    f"({limits.min} to {limits.max})"
                )
        self._tokens.write(np.ascontiguousarray(tokens, self.dtype).data)
        self.num_tokens += len(tokens)

    def _write_lengths(self, lengths: np.ndarray) -> None:
        self._lengths.write(np.ascontiguousarray(lengths, "<i4").data)
        self.num_sequences += len(lengths)

    def _close_documents(self, boundaries: np.ndarray) -> None:
        self._boundaries.write(np.ascontiguousarray(boundaries, "<i8").data)
        self.num_documents += len(boundaries)

    def _write_index(self) -> Path:
        """Assemble the .idx file block by block from the side files."""
        path = self._folder / "index"
        with open(path, "wb") as index:
            index.write(pack_header(self.dtype, self.num_sequences, self.num_documents))
            with open(self._folder / "lengths", "rb") as lengths:
                shutil.copyfileobj(lengths, index)
                lengths.seek(0)
                start = 0
                while block := lengths.read(1 << 16):  # eight times as much while it is worked on
                    sizes = np.frombuffer(block, "<i4").astype("<i8") * self.dtype.itemsize
                    ends = start + np.cumsum(sizes)
                    index.write((ends - sizes).astype("<i8").data)
                    start = int(ends[-1])
            index.write(np.zeros(1, "<i8").data)
            with open(self._folder / "boundaries", "rb") as boundaries:
                shutil.copyfileobj(boundaries, index)
            index.flush()
            os.fsync(index.fileno())
        return path


def _lock(folder: Path):
    """Create `folder` and hold its lock file, or raise DataError if another process does."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise DataError(f"another process is writing {folder.with_suffix('')}") from None
        try:  # the folder may have gone between opening and locking
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / "lock")):
                return file
        except FileNotFoundError:
            pass
        file.close()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
