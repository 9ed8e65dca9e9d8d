"""Input files of preprocessing, read as blocks of records in bounded memory.

A block is what one worker takes at a time: whole lines of about half a megabyte together, or some
rows of a Parquet file, with the place they came from, so that a bad one can be named. A file's name
says what it is:

    *.parquet                   one record a row (needs the package pyarrow)
    *.txt                       plain text, one document a line or one a file
    anything else               JSON, one record a line
    each of them .gz or .zst    compressed (.zst: Python 3.14, or the package zstandard)

Imports the standard library and data/index_format.py; data/encode.py makes tokens of a block.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data.index_format import DataError

BLOCK_BYTES = 1 << 19
PARQUET_ROWS = 256
PARQUET_BUFFER = 1 << 20
ZSTANDARD_BYTES = 1 << 13  # of the file at a time; repetitive text is a hundred times as long
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class Place:
    """Where reading stands in a file: bytes of its content (rows of a Parquet file) behind it, and
    the next line."""

    offset: int = 0
    line: int = 1


@dataclass(frozen=True)
class Block:
    """Some records of one input file.

    path  the file
    kind  "json" or "text": lines; "file": one text; "rows": values by key, from Parquet
    data  the lines' bytes, or the rows
    line  number of the first line or row, from 1
    end   where the next block starts
    read  bytes of the file as stored (compressed or not) read up to here
    file  number of the file among the inputs, set by who reads several
    """

    path: str
    kind: str
    data: bytes | list[dict]
    line: int
    end: Place
    read: int
    file: int = 0


def read_blocks(
    path: str,
    keys: tuple[str, ...] = ("text",),
    *,
    text_documents: str = "line",
    start: Place | None = None,
    size: int = BLOCK_BYTES,
) -> Iterator[Block]:
    """The records from `start` on, in blocks of about `size` bytes (more where one is longer).

    keys            columns to take of a Parquet file
    text_documents  "line" or "file": what a document is in plain text
    """
    start = start or Place()
    if Path(path).suffix == ".parquet":
        yield from _read_rows(path, keys, start)
        return
    kind = "json"
    if _plain_suffix(path) == ".txt":
        kind = "text" if text_documents == "line" else "file"
    if kind == "file" and start.offset:
        return
    with open(path, "rb") as raw, _content(path, raw) as file:
        _skip(file, path, start.offset)
        place, parts = start, []
        while chunk := _read(file, path, size):
            cut = chunk.rfind(b"\n") + 1 if kind != "file" else 0
            parts.append(chunk[:cut] or chunk)
            if cut:
                data = b"".join(parts)
                end = Place(place.offset + len(data), place.line + data.count(b"\n"))
                yield Block(path, kind, data, place.line, end, raw.tell())
                place, parts = end, [chunk[cut:]] if cut < len(chunk) else []
        if parts:
            data = b"".join(parts)
            end = Place(place.offset + len(data), place.line + 1)
            yield Block(path, kind, data, place.line, end, raw.tell())


def parse_block(block: Block, keys: tuple[str, ...]) -> Iterator[tuple[int, list[str] | DataError]]:
    """For each record its line and its texts under `keys`, or a DataError naming file and line.
    Blank lines are no records.

    Plain text has one text a record, whatever the keys.
    """
    if block.kind == "rows":
        records = enumerate(block.data, block.line)
    elif block.kind == "file":
        records = [(block.line, block.data.removeprefix(BYTE_ORDER_MARK))]
    else:
        records = enumerate(_lines(block), block.line)
    for number, record in records:
        if block.kind in ("json", "text") and (not record or record.isspace()):
            continue
        try:
            if block.kind == "json":
                yield number, _texts(json.loads(record.decode("utf-8")), keys)
            elif block.kind == "rows":
                yield number, _texts(record, keys)
            else:
                yield number, [record.decode("utf-8")]
        except (ValueError, RecursionError) as error:
            yield number, DataError(f"{block.path} line {number}: {_reason(error)}")


def _reason(error: Exception) -> str:
    """What is wrong with a record, in a user's words."""
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte 0x{error.object[error.start]:02x} at column {error.start + 1}"
    if isinstance(error, RecursionError):
        return "not JSON that can be read: it nests too deeply"
    return str(error)


def _lines(block: Block) -> list[bytes]:
    lines = block.data.split(b"\n")
    if block.line == 1:
        lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
    return [line[:-1] if line.endswith(b"\r") else line for line in lines]


def _texts(record: object, keys: tuple[str, ...]) -> list[str]:
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__} where an object is needed")
    texts = []
    for key in keys:
        if key not in record:
            known = ", ".join(map(repr, record)) or "none"
            raise ValueError(f"no key {key!r} (--json-keys); it has {known}")
        text = record[key]
        if isinstance(text, bytes):  # a Parquet column that does not say it is text, or is not
            text = text.decode("utf-8")
        if not isinstance(text, str):
            raise ValueError(f"key {key!r} holds {type(text).__name__}, not text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can write one, and no text has any
            half = ascii(text[error.start])[1:-1]
            raise ValueError(
                f"key {key!r} holds {half}, half of a surrogate pair, which is no character"
            ) from None
        texts.append(text)
    return texts


def _read_rows(path: str, keys: tuple[str, ...], start: Place) -> Iterator[Block]:
    parquet = _package("pyarrow.parquet", path)
    try:
        # buffered without reading ahead, or a whole row group of the file would be in memory
        file = parquet.ParquetFile(path, buffer_size=PARQUET_BUFFER, pre_buffer=False)
    except Exception as error:  # pyarrow's errors share no class of their own
        raise DataError(f"{path} is not a Parquet file: {error}") from None
    with file:
        missing = [key for key in keys if key not in file.schema_arrow.names]
        if missing:
            known = ", ".join(file.schema_arrow.names)
            raise DataError(f"{path} has no column {missing[0]!r} (--json-keys); it has {known}")
        size, total, row = Path(path).stat().st_size, file.metadata.num_rows, 0
        for batch in _batches(file, path, keys):
            rows = _rows(batch)
            row += len(rows)
            if row > start.offset:
                first = row - len(rows) + 1
                yield Block(path, "rows", rows, first, Place(row, row + 1), size * row // total)


def _batches(file, path: str, keys: tuple[str, ...]) -> Iterator:
    try:
        yield from file.iter_batches(PARQUET_ROWS, columns=list(keys))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read to its end, it is damaged: {reason}") from None


def _rows(batch) -> list[dict]:
    """The rows of a pyarrow batch; a text that is not UTF-8 stays bytes, a bad row for
    parse_block."""

    def value(scalar) -> object:
        try:
            return scalar.as_py()
        except UnicodeDecodeError as error:
            return error.object

    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        columns = [[value(scalar) for scalar in column] for column in batch.columns]
        return [dict(zip(batch.schema.names, values)) for values in zip(*columns)]


def _plain_suffix(path: str) -> str:
    name = Path(path)
    return name.with_suffix("").suffix if name.suffix in COMPRESSED else name.suffix


def _content(path: str, raw: BinaryIO) -> contextlib.AbstractContextManager[BinaryIO]:
    """The file's content as a stream."""
    suffix = Path(path).suffix
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if suffix == ".zst":
        with contextlib.suppress(ImportError):
            return importlib.import_module("compression.zstd").ZstdFile(raw)
        return io.BufferedReader(_Zstandard(_package("zstandard", path), raw))
    return contextlib.nullcontext(raw)


class _Zstandard(io.RawIOBase):
    """What a .zst file holds. The package's own reader takes a file that was cut short for a
    whole one, and refuses what `zstd --long=31` writes."""

    def __init__(self, library, raw: BinaryIO) -> None:
        self._decompressor = library.ZstdDecompressor(max_window_size=1 << 31)
        self._raw, self._frame = raw, None
        self._stored, self._content = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._content:
            self._stored = self._stored or self._raw.read(ZSTANDARD_BYTES)
            if not self._stored:
                if self._frame:
                    raise EOFError("it ends too early")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._content = memoryview(self._frame.decompress(self._stored))
            self._stored = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count


def _skip(file: BinaryIO, path: str, count: int) -> None:
    """Go to byte `count` of the content; what is compressed must be read for that."""
    if Path(path).suffix not in COMPRESSED:
        file.seek(count)
    while count and Path(path).suffix in COMPRESSED:
        count -= len(_read(file, path, min(count, 1 << 20)))


def _read(file: BinaryIO, path: str, size: int) -> bytes:
    if Path(path).suffix not in COMPRESSED:
        return file.read(size)
    try:
        return file.read(size)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} cannot be decompressed: {error}") from None
    except Exception as error:  # zstandard.ZstdError, whose module may not be here
        if type(error).__name__ != "ZstdError":
            raise
        raise DataError(f"{path} cannot be decompressed: {error}") from None


def _package(name: str, path: str):
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise DataError(f"{path} needs the package {package}: pip install {package}") from None
