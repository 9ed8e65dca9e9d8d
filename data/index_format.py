"""Megatron's .bin/.idx format: what the bytes mean, and which files are refused.

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
refused by name.) Imports numpy and the standard library; data/indexed.py reads and writes.
"""

from __future__ import annotations

import os
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
REWRITE = "write the pair again with scripts/preprocess_data.py"


class DataError(ValueError):
    """Data that cannot be used, said in one sentence a user can act on."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron chooses for a vocabulary: uint16 below 65,500 tokens, else int32."""
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


def bin_path(prefix: str | os.PathLike) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


def pack_header(dtype: np.dtype, sequences: int, documents: int) -> bytes:
    code = next(code for code, known in DTYPES.items() if known == dtype)
    return HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1)


def read_header(path: Path) -> tuple[np.dtype, int, int]:
    """Token dtype, sequences and document boundaries from a header that agrees with its file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if not head:
        raise DataError(f"{path} is empty; {REWRITE}")
    if not MAGIC.startswith(head[: len(MAGIC)]):
        raise DataError(
            f"{path} is not a Megatron index: it starts with {head[: len(MAGIC)]!r}, not "
            f"{MAGIC!r}; {REWRITE}"
        )
    if len(head) < HEADER.size:
        raise DataError(
            f"{path} is truncated: {size} bytes, and the header alone has {HEADER.size}; {REWRITE}"
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
            f"documents need {expected}; {REWRITE}"
        )
    return DTYPES[code], sequences, boundaries


def check_files(prefix: str | os.PathLike) -> None:
    """Raise DataError, with what was perhaps meant, unless both files of the pair exist."""
    for path in (idx_path(prefix), bin_path(prefix)):
        if not path.is_file():
            sentence = (
                f"{path} does not exist; --data-path takes the prefix of a .bin/.idx pair, "
                "without the ending"
            )
            raise DataError(sentence + _meant(Path(prefix), path))


def _meant(prefix: Path, path: Path) -> str:
    if prefix.suffix in (".bin", ".idx"):
        return f": {prefix.with_suffix('')}"
    if path.suffix == ".idx" and prefix.parent.is_dir():
        near = sorted(p.stem for p in prefix.parent.glob("*.idx") if p.stem.startswith(prefix.name))
        if near:
            return f" (there is {prefix.parent / near[0]})"
    return ""
