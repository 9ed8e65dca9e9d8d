"""Input files of preprocessing, read as blocks of whole lines in bounded memory.

A block is what one worker takes at a time: about half a megabyte, cut at a line end, with the place
it came from, so that a bad line can be named. Imports the standard library and data/indexed.py;
data/encode.py makes tokens of a block.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data.indexed import DataError

BLOCK_BYTES = 1 << 19
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Block:
    """Whole lines of one input file.

    path  the file           line  number of the first line, from 1
    data  the lines' bytes   read  bytes of the file (as stored, compressed or not) read up to here
    """

    path: str
    line: int
    data: bytes
    read: int


def read_blocks(path: str, size: int = BLOCK_BYTES) -> Iterator[Block]:
    """The file's lines in order, in blocks of about `size` bytes (more where one line is
    longer)."""
    with open(path, "rb") as raw, _decompressed(path, raw) as file:
        line, parts = 1, []
        while chunk := _read(file, path, size):
            cut = chunk.rfind(b"\n") + 1
            parts.append(chunk[:cut] or chunk)
            if cut:
                data = b"".join(parts)
                yield Block(path, line, data, raw.tell())
                line += data.count(b"\n")
                parts = [chunk[cut:]] if cut < len(chunk) else []
        if parts:
            yield Block(path, line, b"".join(parts), raw.tell())


def parse_jsonl(block: Block, keys: tuple[str, ...]) -> Iterator[list[str] | DataError]:
    """For each line that is not blank its texts under `keys`, or a DataError naming file and
    line."""
    for number, line in enumerate(block.data.split(b"\n"), block.line):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line and not line.isspace():
            try:
                yield _texts(line, keys)
            except ValueError as error:
                yield DataError(f"{block.path} line {number}: {error}")


def _texts(line: bytes, keys: tuple[str, ...]) -> list[str]:
    record = json.loads(line.decode("utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__} where an object is needed")
    texts = []
    for key in keys:
        if key not in record:
            raise ValueError(
                f"no key {key!r} (--json-keys); it has {', '.join(map(repr, record)) or 'none'}"
            )
        if not isinstance(record[key], str):
            raise ValueError(f"key {key!r} holds {type(record[key]).__name__}, not text")
        record[key].encode("utf-8")  # a lone surrogate, which JSON can write and no text has
        texts.append(record[key])
    return texts


def _decompressed(path: str, raw: BinaryIO) -> BinaryIO:
    return gzip.GzipFile(fileobj=raw) if Path(path).suffix == ".gz" else raw


def _read(file: BinaryIO, path: str, size: int) -> bytes:
    try:
        return file.read(size)
    except (EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} cannot be decompressed: {error}") from None
