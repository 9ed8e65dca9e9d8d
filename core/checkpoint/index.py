"""`Index`: what one checkpoint holds, as one JSON file; how the ranks' parts are merged into it.

Pure: standard library only, so that a checkpoint can be listed without torch. Neighbours: slices.py
(boxes), files.py (the bytes), store.py (who calls whom).

    {"checksum": crc32 of the rest as compact JSON,
     "index": {"format", "version", "iteration", "ranks", "block", "meta",
               "files":   {"rank_00000.safetensors": {"bytes", "header"}},
               "tensors": {"model/…": {"shape", "dtype",
                                       "boxes": [{"box", "file", "key", "sums"}]}}}}

`sums` are the crc32 of each `block` bytes of a box, so that a reader of a slice verifies exactly
the blocks it reads; `header` is the crc32 of a safetensors file's header.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from core.checkpoint.directory import INDEX, write_text
from core.checkpoint.errors import BrokenCheckpoint, CheckpointError, MisreadCheckpoint
from core.checkpoint.slices import Box, tiling_problem, volume, whole

FORMAT, VERSION = "phalanx checkpoint", 1
_FILE = re.compile(r"rank_\d{5,}\.safetensors")


def file_name(rank: int) -> str:
    """The file a rank writes."""
    return f"rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class StoredFile:
    """A safetensors file: its size in bytes and the crc32 of its header."""

    bytes: int
    header: int


@dataclass(frozen=True)
class StoredBox:
    """One box of a tensor: in which file, under which key, and the crc32 of each of its blocks."""

    box: Box
    file: str
    key: str
    sums: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A logical tensor and the boxes that tile it; `dtype` is torch's name, as "float32"."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]

    @property
    def numel(self) -> int:
        return volume(whole(self.shape))


@dataclass(frozen=True)
class Part:
    """What one rank wrote; `file` is None when it owned nothing."""

    rank: int
    file: StoredFile | None
    tensors: dict[str, StoredTensor]

    def write(self, path: Path) -> None:
        """Appears under its name only when complete: other processes wait for that."""
        new = path.with_name(path.name + ".new")
        new.write_text(json.dumps(asdict(self)), encoding="utf-8")
        new.replace(path)

    @classmethod
    def read(cls, path: Path) -> Part:
        data = json.loads(path.read_text(encoding="utf-8"))
        file = StoredFile(**data["file"]) if data["file"] else None
        return cls(data["rank"], file, {n: _tensor(t) for n, t in data["tensors"].items()})


@dataclass(frozen=True)
class Index:
    """Everything about a checkpoint except its tensors' values.

    iteration  the step it was saved at
    ranks      how many wrote it
    block      bytes covered by one checksum
    meta       the caller's JSON: arguments, layout, consumed samples …
    files      by name
    tensors    by name
    """

    iteration: int
    ranks: int
    block: int
    meta: dict
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]

    @property
    def bytes(self) -> int:
        """Size of all tensor files."""
        return sum(file.bytes for file in self.files.values())

    def write(self, directory: Path) -> None:
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        text = _compact(body)
        write_text(directory / INDEX, f'{{"checksum": {_crc(text)},\n"index": {text}}}\n')

    @classmethod
    def read(cls, directory: Path) -> Index:
        """The verified index of a checkpoint folder, its files present and of the right size.

        Raises BrokenCheckpoint naming the damage, CheckpointError for another or newer format.
        """
        path = directory / INDEX
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BrokenCheckpoint(f"{path} is missing") from None
        except (OSError, ValueError) as error:
            raise MisreadCheckpoint(f"{path} is not readable JSON ({error})") from None
        body = data.get("index") if isinstance(data, dict) else None
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not the index of a {FORMAT}")
        if data.get("checksum") != _crc(_compact(body)):
            raise MisreadCheckpoint(f"{path} does not match its own checksum")
        if body["version"] > VERSION:
            raise CheckpointError(
                f"{path} has format version {body['version']}, this program reads up to {VERSION}; "
                "use the program that wrote it, or a newer one"
            )
        index = cls(
            body["iteration"],
            body["ranks"],
            body["block"],
            body["meta"],
            {name: StoredFile(**file) for name, file in body["files"].items()},
            {name: _tensor(tensor) for name, tensor in body["tensors"].items()},
        )
        if problems := list(index.file_problems(directory)):
            raise BrokenCheckpoint("; ".join(problems))
        return index

    def file_problems(self, directory: Path) -> Iterator[str]:
        """One sentence per tensor file that is missing or has another size."""
        for name, file in self.files.items():
            if not _FILE.fullmatch(name):
                yield f"{directory / INDEX} names a file {name!r}, which is no tensor file"
                continue
            try:
                size = (directory / name).stat().st_size
            except OSError as error:
                yield f"{directory / name}: {error.strerror}"
                continue
            if size != file.bytes:
                yield f"{directory / name} has {size} bytes, it was written with {file.bytes}"


def merge(iteration: int, block: int, meta: dict, parts: Iterable[Part]) -> Index:
    """One index of all ranks' parts.

    Raises CheckpointError, all problems at once, unless every tensor has one shape and dtype and is
    tiled exactly by the boxes its owners wrote.
    """
    files: dict[str, StoredFile] = {}
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    ranks = 0
    for part in parts:
        ranks += 1
        if part.file:
            files[file_name(part.rank)] = part.file
        for name, mine in part.tensors.items():
            known = tensors.get(name, mine)
            if (known.shape, known.dtype) != (mine.shape, mine.dtype):
                problems.append(
                    f"{name}: rank {part.rank} owns a piece of {mine.dtype} {mine.shape}, another "
                    f"rank of {known.dtype} {known.shape}"
                )
                continue
            boxes = known.boxes + mine.boxes if name in tensors else mine.boxes
            tensors[name] = StoredTensor(mine.shape, mine.dtype, boxes)
    for name, tensor in tensors.items():
        if tensor.numel and (why := tiling_problem(tensor.shape, [b.box for b in tensor.boxes])):
            problems.append(f"{name}: {why}")
    if problems:
        raise CheckpointError("; ".join(problems))
    return Index(iteration, ranks, block, meta, files, dict(sorted(tensors.items())))


def _tensor(data: dict) -> StoredTensor:
    boxes = tuple(
        StoredBox(tuple(map(tuple, b["box"])), b["file"], b["key"], tuple(b["sums"]))
        for b in data["boxes"]
    )
    return StoredTensor(tuple(data["shape"]), data["dtype"], boxes)


def _compact(body: dict) -> str:
    return json.dumps(body, separators=(",", ":"))


def _crc(text: str) -> int:
    return zlib.crc32(text.encode())
