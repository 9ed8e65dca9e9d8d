"""Token files in Megatron's .bin/.idx format: reading by memory map, writing as a stream.

PREFIX.bin holds the tokens of every sequence one after another and nothing else. PREFIX.idx says
where they are:

    9 bytes   b"MMIDIDX\\x00\\x00"
    uint64    version, 1
    uint8     dtype code of the tokens (DTYPES below)
    uint64    number of sequences, n
    uint64    number of document boundaries, d + 1
    int32[n]      tokens in each sequence
    int64[n]      byte at which each sequence starts in PREFIX.bin
    int64[d + 1]  document i is sequences boundary[i] .. boundary[i + 1] - 1

All numbers are little-endian. (A file with one more int8[n], the modes of multimodal data, is
refused by name.)

Reading order: IndexedDataset, IndexedBuilder. Imports numpy and the standard library.
data/sample_index.py cuts samples out of what is read here; scripts/preprocess_data.py writes.
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
LONGEST_SEQUENCE = 2**31 - 1  # sequence lengths are int32


class DataError(ValueError):
    """Data that cannot be used, said in one sentence a user can act on."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron chooses for a vocabulary: uint16 below 65,500 tokens, else int32."""
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


def bin_path(prefix: str | os.PathLike) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


class IndexedDataset:
    """One PREFIX.bin/.idx pair, memory-mapped. Opening costs the same for any size; `verify` reads
    the whole index.

    prefix             path without .bin or .idx
    tokens             dtype [tokens]       the .bin file, flat
    sequence_lengths   int32 [sequences]    in tokens
    sequence_pointers  int64 [sequences]    in bytes
    document_indices   int64 [documents + 1]

    Raises DataError for a missing, truncated or foreign file.
    """

    def __init__(self, prefix: str | os.PathLike):
        self.prefix = os.fspath(prefix)
        for path in (idx_path(prefix), bin_path(prefix)):
            if not path.is_file():
                raise DataError(_missing(path))
        self.dtype, sequences, boundaries = _read_header(idx_path(prefix))
        index = _map(idx_path(prefix), np.dtype("u1"))
        at = HEADER.size
        self.sequence_lengths = index[at : (at := at + 4 * sequences)].view("<i4")
        self.sequence_pointers = index[at : (at := at + 8 * sequences)].view("<i8")
        self.document_indices = index[at : at + 8 * boundaries].view("<i8")
        self._check_ends()
        self.tokens = _map(bin_path(prefix), self.dtype)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        """Tokens of sequence i, a view of the file."""
        return self.get(i)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens of sequence i from token `offset` on (to its end by default), a view of
        the file."""
        start = int(self.sequence_pointers[i]) // self.dtype.itemsize
        stop = start + int(self.sequence_lengths[i])
        start += offset
        return self.tokens[start : stop if length is None else min(stop, start + length)]

    def document(self, d: int) -> np.ndarray:
        """All tokens of document d, its sequences joined."""
        sequences = range(int(self.document_indices[d]), int(self.document_indices[d + 1]))
        return np.concatenate([self[i] for i in sequences] or [self.tokens[:0]])

    def document_offsets(self) -> np.ndarray:
        """int64 [documents + 1]: document d is tokens[offsets[d] : offsets[d + 1]]. Verifies the
        index on the way."""
        self.verify()
        ends = np.append(self.sequence_pointers // self.dtype.itemsize, self.num_tokens)
        return ends[self.document_indices]

    def verify(self) -> None:
        """Read the whole index and raise DataError where it contradicts itself or the .bin file."""
        path, lengths, pointers = (
            idx_path(self.prefix),
            self.sequence_lengths,
            self.sequence_pointers,
        )
        if len(lengths) and int(lengths.min()) < 0:
            raise DataError(
                f"{path}: sequence {int(lengths.argmin())} has {int(lengths.min())} tokens; "
                f"{_REWRITE}"
            )
        gaps = np.flatnonzero(np.diff(pointers) != lengths[:-1] * np.int64(self.dtype.itemsize))
        if len(gaps) or (len(pointers) and pointers[0] != 0):
            where = 0 if pointers[0] != 0 else int(gaps[0]) + 1
            raise DataError(
                f"{path}: sequence {where} does not start where the one before it ends; {_REWRITE}"
            )
        falls = np.flatnonzero(np.diff(self.document_indices) < 0)
        if len(falls):
            raise DataError(f"{path}: document {int(falls[0])} ends before it starts; {_REWRITE}")

    def _check_ends(self) -> None:
        """The last entries against the sizes: finds a .bin and an .idx that do not belong together
        at once."""
        idx, documents, lengths = (
            idx_path(self.prefix),
            self.document_indices,
            self.sequence_lengths,
        )
        if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths):
            raise DataError(
                f"{idx}: document boundaries do not span its {len(lengths)} sequences; {_REWRITE}"
            )
        size = bin_path(self.prefix).stat().st_size
        expected = 0
        if len(lengths):
            expected = int(self.sequence_pointers[-1]) + int(lengths[-1]) * self.dtype.itemsize
        if size != expected:
            state = "truncated" if size < expected else "not the file this index was written for"
            raise DataError(
                f"{bin_path(self.prefix)} has {size} bytes where {idx} needs {expected}: it is "
                f"{state}; {_REWRITE}"
            )


_REWRITE = "write the pair again with scripts/preprocess_data.py"


def _missing(path: Path) -> str:
    sentence = (
        f"{path} does not exist; --data-path takes the prefix of a .bin/.idx pair, without the "
        "ending"
    )
    if path.with_suffix("").suffix in (".bin", ".idx"):
        return sentence + f": {path.with_suffix('').with_suffix('')}"
    stem = path.name.removesuffix(path.suffix)
    if path.parent.is_dir():
        near = sorted(
            p.stem for p in path.parent.glob("*.idx") if p.stem.startswith(stem) and p.stem != stem
        )
        if near:
            return sentence + f" (there is {path.parent / near[0]})"
    return sentence


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    """Token dtype, sequences and document boundaries from a header that agrees with its file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if not MAGIC.startswith(head[: len(MAGIC)]) or not head:
        raise DataError(
            f"{path} is not a Megatron index: it starts with {head[: len(MAGIC)]!r}, not "
            f"{MAGIC!r}; {_REWRITE}"
        )
    if len(head) < HEADER.size:
        raise DataError(
            f"{path} is truncated: {size} bytes, and the header alone has {HEADER.size}; {_REWRITE}"
        )
    _, version, code, sequences, boundaries = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path} has format version {version}; this reads version {VERSION}")
    if code not in DTYPES:
        raise DataError(f"{path} names dtype code {code}; known are {min(DTYPES)} to {max(DTYPES)}")
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if sequences and size == expected + sequences:
        raise DataError(
            f"{path} holds sequence modes, that is multimodal data, which is not supported; use "
            "text data"
        )
    if size != expected:
        state = "truncated" if size < expected else "longer than its header says"
        raise DataError(
            f"{path} is {state}: {size} bytes where {sequences} sequences in {boundaries - 1} "
            f"documents need {expected}; {_REWRITE}"
        )
    return DTYPES[code], sequences, boundaries


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    """The file as a flat read-only array (a plain ndarray: slicing a memmap object costs ten times
    as much)."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


class IndexedBuilder:
    """Writes PREFIX.bin/.idx as a stream, in memory that does not grow, and publishes both only
    when complete.

        with IndexedBuilder("corpus", token_dtype(vocab_size)) as builder:
            builder.add(tokens)                       # one document of one sequence
            builder.add(tokens, lengths=[3, 5])       # one document of two sequences
            builder.add_documents(tokens, lengths)    # many documents of one sequence each

    Everything goes to the folder PREFIX.partial, which becomes the pair when the block ends and
    goes away when it raises. An existing pair is replaced at the end; until then it stays readable.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype | type):
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in DTYPES.values():
            raise DataError(
                f"tokens cannot be stored as {self.dtype}; use "
                f"{', '.join(map(str, DTYPES.values()))}"
            )
        self.num_tokens = self.num_sequences = self.num_documents = 0
        self._folder = Path(f"{self.prefix}.partial")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        names = ("tokens", "lengths", "boundaries")
        self._tokens, self._lengths, self._boundaries = (
            open(self._folder / name, "wb") for name in names
        )

    def __enter__(self) -> IndexedBuilder:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def add(self, tokens: np.ndarray, lengths: list[int] | np.ndarray | None = None) -> None:
        """Append one document. `lengths` cuts it into sequences (they sum to len(tokens)); by
        default it is one."""
        tokens = np.asarray(tokens)
        self._write(tokens, np.asarray([len(tokens)] if lengths is None else lengths, np.int64))
        self._close_documents(np.asarray([self.num_sequences], "<i8"))

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append len(lengths) documents of one sequence each, their tokens joined in `tokens`."""
        first = self.num_sequences
        self._write(np.asarray(tokens), np.asarray(lengths, np.int64))
        self._close_documents(np.arange(first + 1, self.num_sequences + 1, dtype="<i8"))

    def finish(self) -> None:
        """Complete the pair and put it in place: tokens first, the index that makes them visible
        last."""
        for file in (self._tokens, self._lengths, self._boundaries):
            _sync_and_close(file)
        index = self._write_index()
        idx_path(self.prefix).unlink(missing_ok=True)  # never an old index beside new tokens
        os.replace(self._folder / "tokens", bin_path(self.prefix))
        os.replace(index, idx_path(self.prefix))
        _sync_folder(idx_path(self.prefix).parent)
        shutil.rmtree(self._folder)

    def abandon(self) -> None:
        """Remove what was written so far; an existing pair is left as it is."""
        for file in (self._tokens, self._lengths, self._boundaries):
            try:
                file.close()
            except OSError:  # a full disk, which is what brought us here
                pass
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        if int(lengths.sum()) != len(tokens) or (len(lengths) and int(lengths.min()) < 0):
            raise ValueError(
                f"{len(lengths)} sequence lengths sum to {int(lengths.sum())}, not to "
                f"{len(tokens)} tokens"
            )
        if len(lengths) and int(lengths.max()) > LONGEST_SEQUENCE:
            raise DataError(
                f"a sequence of {int(lengths.max())} tokens does not fit the format "
                f"({LONGEST_SEQUENCE} at most); cut the document into several sequences"
            )
        if self.dtype.kind in "iu" and len(tokens) and tokens.dtype.newbyteorder("<") != self.dtype:
            low, high, limits = int(tokens.min()), int(tokens.max()), np.iinfo(self.dtype)
            if low < limits.min or high > limits.max:
                raise DataError(
                    f"token ids {low} to {high} do not fit {self.dtype} ({limits.min} to "
                    f"{limits.max})"
                )
        self._tokens.write(np.ascontiguousarray(tokens, self.dtype).data)
        self._lengths.write(lengths.astype("<i4").data)
        self.num_tokens += len(tokens)
        self.num_sequences += len(lengths)

    def _close_documents(self, boundaries: np.ndarray) -> None:
        self._boundaries.write(boundaries.data)
        self.num_documents += len(boundaries)

    def _write_index(self) -> Path:
        """Assemble the .idx file block by block from the side files."""
        path = self._folder / "index"
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        with open(path, "wb") as index:
            index.write(
                HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_documents + 1)
            )
            with open(self._folder / "lengths", "rb") as lengths:
                shutil.copyfileobj(lengths, index)
                lengths.seek(0)
                start = 0
                while block := lengths.read(1 << 20):
                    sizes = np.frombuffer(block, "<i4").astype("<i8") * self.dtype.itemsize
                    ends = start + np.cumsum(sizes)
                    index.write((ends - sizes).astype("<i8").data)
                    start = int(ends[-1])
            index.write(struct.pack("<q", 0))
            with open(self._folder / "boundaries", "rb") as boundaries:
                shutil.copyfileobj(boundaries, index)
            index.flush()
            os.fsync(index.fileno())
        return path


def _sync_and_close(file) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
