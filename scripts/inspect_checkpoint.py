"""What is in a checkpoint; how two differ; whether every byte is as it was written.

    python scripts/inspect_checkpoint.py D [--step N] [--match layers.0] [--json FILE]
    python scripts/inspect_checkpoint.py D --diff E [--step N] [--diff-step M]
    python scripts/inspect_checkpoint.py D --verify

D is a --save folder or one checkpoint's own folder in it. The table needs the index alone, no
tensor is read and torch is not imported. A diff lists the settings that differ, then the tensors,
largest difference first, however the two were cut. Exit code: 0 whole or equal, 1 damaged or
different, 2 when there is nothing to inspect.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core.checkpoint.directory import (
    INDEX,
    candidates,
    differences,
    latest,
    saved_iterations,
    size_text,
)
from core.checkpoint.errors import BrokenCheckpoint, CheckpointError
from core.checkpoint.index import Index, StoredTensor

ITEM_BYTES = {"64": 8, "32": 4, "16": 2, "8": 1}  # by the number in a dtype's name; bool is 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="--save folder, or iter_NNNNNNN in it")
    parser.add_argument("--step", type=int, help="this iteration (default: what `latest` names)")
    parser.add_argument("--match", default="", help="only names that contain this, or match a glob")
    parser.add_argument("--diff", type=Path, metavar="E", help="compare with the checkpoint in E")
    parser.add_argument("--diff-step", type=int, metavar="M", help="the iteration in E")
    parser.add_argument("--verify", action="store_true", help="read and check every byte")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    args = parser.parse_args(argv)
    try:
        path = chosen(args.directory, args.step)
        if args.diff:
            return show_diff(path, chosen(args.diff, args.diff_step), args.match, args.json)
        if args.verify:
            return show_problems(path, args.json)
        show_table(args.directory, path, args.match, args.json)
        return 0
    except BrokenCheckpoint as error:
        print(f"damaged: {error}", file=sys.stderr)
        return 1
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2


def chosen(directory: Path, step: int | None) -> Path:
    """The checkpoint asked for, damaged or not: an inspection falls back to no other."""
    return candidates(directory, step)[0]


def matches(name: str, pattern: str) -> bool:
    return pattern in name or fnmatchcase(name, pattern)


# ---- the table -------------------------------------------------------------------------------


def show_table(directory: Path, path: Path, pattern: str, file: Path | None) -> None:
    index = Index.read(path)
    tensors = {n: t for n, t in index.tensors.items() if matches(n, pattern)}
    print(f"{path}: iteration {index.iteration}, written by {index.ranks} ranks")
    print(f"{len(index.tensors)} tensors, {size_text(index.bytes)} in {len(index.files)} files")
    if not (directory / INDEX).exists():
        steps = ", ".join(map(str, reversed(saved_iterations(directory))))
        print(f"checkpoints in {directory}: {steps}; latest is {latest(directory)}")
    for line in settings_lines(index.meta):
        print(line)
    print()
    rows = [("tensor", "shape", "dtype", "size", "pieces")]
    rows += [
        (n, shape_text(t.shape), t.dtype, size_text(tensor_bytes(t)), str(len(t.boxes)))
        for n, t in tensors.items()
    ]
    print_rows(rows)
    if pattern:
        print(f"{len(tensors)} of {len(index.tensors)} tensors match {pattern!r}")
    write_json(
        file,
        {
            "path": str(path),
            "iteration": index.iteration,
            "ranks": index.ranks,
            "bytes": index.bytes,
            "meta": index.meta,
            "tensors": {
                n: {
                    "shape": t.shape,
                    "dtype": t.dtype,
                    "bytes": tensor_bytes(t),
                    "boxes": [b.box for b in t.boxes],
                }
                for n, t in tensors.items()
            },
        },
    )


def settings_lines(meta: dict, indent: str = "") -> Iterator[str]:
    """The saved settings, groups indented."""
    for key, value in meta.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from settings_lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {value}"


def shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def tensor_bytes(tensor: StoredTensor) -> int:
    """Size of the whole tensor by its dtype's name ("float8_e5m2" is 1 byte an element)."""
    name = tensor.dtype.split("_")[0]
    size = next((n for bits, n in ITEM_BYTES.items() if name.endswith(bits)), 1)
    return tensor.numel * size


# ---- two of them -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Of one tensor: max |a − b|, the same over max |a|, and how many elements are not equal."""

    name: str
    largest: float
    relative: float
    unequal: int
    numel: int


def show_diff(path: Path, other: Path, pattern: str, file: Path | None) -> int:
    from core.checkpoint.reader import Checkpoint

    a, b = Checkpoint(path), Checkpoint(other)
    print(f"a: {path}, iteration {a.iteration}")
    print(f"b: {other}, iteration {b.iteration}")
    settings = [
        line.replace("in the checkpoint", "in a").replace(" given", " in b")
        for line in differences(a.meta, b.meta)
    ]
    names = [name for name in dict.fromkeys(a.names() + b.names()) if matches(name, pattern)]
    unlike, both = [], []
    for name in names:
        shapes = [c.shape(name) if name in c.index.tensors else None for c in (a, b)]
        if None in shapes:
            unlike.append(f"{name}: only in {'b' if shapes[0] is None else 'a'}")
        elif shapes[0] != shapes[1]:
            unlike.append(f"{name}: {shape_text(shapes[0])} in a, {shape_text(shapes[1])} in b")
        else:
            both.append(name)
    for line in settings + unlike:
        print(line)
    found = sorted(
        (difference(a, b, name) for name in both), key=lambda d: (-d.largest, -d.unequal, d.name)
    )
    rows = [("tensor", "largest", "relative", "unequal")]
    rows += [
        (d.name, f"{d.largest:.3g}", f"{d.relative:.3g}", f"{d.unequal} of {d.numel}")
        for d in found
        if d.unequal
    ]
    equal = sum(not d.unequal for d in found)
    if len(rows) > 1:
        print_rows(rows)
    print(f"{equal} of {len(names)} tensors are equal")
    write_json(
        file,
        {"settings": settings, "unlike": unlike, "tensors": [vars(d) for d in found]},
    )
    return 0 if equal == len(names) else 1


def difference(a, b, name: str) -> Difference:
    """Compares in float64, one of a's boxes at a time; NaN equals NaN, and differs without end."""
    import torch

    largest, top, unequal = 0.0, 0.0, 0
    for box in a.boxes(name):
        x, y = a.read(name, box), b.read(name, box)
        x, y = x.double().flatten(), y.double().flatten()
        same = (x == y) | (x.isnan() & y.isnan())
        unequal += int((~same).sum())
        gap = torch.where(same, 0.0, (x - y).abs()).nan_to_num(float("inf"), float("inf"))
        largest = max(largest, float(gap.max()))
        top = max(top, float(x.abs().nan_to_num(0.0, 0.0).max()))
    relative = largest / top if top else largest
    return Difference(name, largest, relative, unequal, a.index.tensors[name].numel)


# ---- every byte ------------------------------------------------------------------------------


def show_problems(path: Path, file: Path | None) -> int:
    from core.checkpoint.reader import Checkpoint

    checkpoint = Checkpoint(path)
    problems = list(checkpoint.verify())
    for line in problems:
        print(line)
    size = size_text(checkpoint.index.bytes)
    if not problems:
        print(f"{path}: {len(checkpoint.names())} tensors, {size}, every byte as it was written")
    write_json(file, {"path": str(path), "problems": problems})
    return 1 if problems else 0


# ---- output ----------------------------------------------------------------------------------


def print_rows(rows: list[tuple[str, ...]]) -> None:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:]))]
        print("  ".join(cells).rstrip())


def write_json(file: Path | None, figures: dict) -> None:
    if file:
        file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a table is often read through `head`
    sys.exit(main())
