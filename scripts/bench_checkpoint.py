"""How fast checkpoints are saved and loaded, beside torch.save and torch.load of the same bytes.

    python scripts/bench_checkpoint.py [--megabytes 512] [--rounds 5] [--folder DIR] [--json F]

One rank. The state is a GPT's: parameters and two moments of matrices, norms and a word table, in
float32. Each round does everything once, every other one backwards; a row is the median. --folder
says on which disk. torch.save leaves the bytes in the machine's cache, ours are on the disk when a
save returns: the bar is against torch.save with an fsync of the file and of its folder, and the row
without them stands beside. Loads find the files in the cache; ours check every byte.

What --async-save blocks is the call that starts it and what is left to wait for before the next
update; the copy is made while that step's forward and backward run, here of 128 tokens through the
matrices of the state. How much slower such a step is, in all, is two rows of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from core.checkpoint import directory
from core.checkpoint.pieces import Piece
from core.checkpoint.reader import open_checkpoint
from core.checkpoint.slices import whole
from core.checkpoint.store import Saver, save
from core.comm import Group
from scripts.bench_data import Row

HIDDEN, TABLE = 512, (16_384, 512)  # the largest box is 32 MiB
MEBIBYTE = 1024**2
TOKENS = 128  # of a step: few, a real one takes longer and leaves more time for the copy
STEP, BEHIND = "a step up to its update", "the same with --async-save"
BLOCKED = "of which the step waits"
ALONE = Group.single("world")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=512, help="size of the state, about")
    parser.add_argument("--rounds", type=int, default=5, help="median of so many (default 5)")
    parser.add_argument("--folder", help="where to write (default: the system's temporary folder)")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--memory-of-a-save", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.megabytes < 100 or args.rounds < 1:
        parser.error(f"--megabytes {args.megabytes} must be 100 or more, --rounds 1 or more")
    if args.memory_of_a_save:
        print(memory_of_a_save(args.megabytes, Path(args.folder)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for row in measure(args.megabytes, args.rounds, Path(folder)):
            rows.append(row)
            bar = "" if row.bar is None else f"{row.bar:,.4g}"
            mark = "" if row.met() else "  MISSED"
            print(f"{row.what:58}{row.value:>10,.4g}  {row.unit:8}{bar:>8}{mark}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(row.met() for row in rows) else 1


def state_of(megabytes: int) -> dict[str, Tensor]:
    """Tensors by name: one of the word table's shape in three kinds, matrices, norms between."""
    shapes = {"embedding.word.weight": TABLE}
    layer = {"qkv": (3 * HIDDEN, HIDDEN), "up": (4 * HIDDEN, HIDDEN), "norm": (HIDDEN,)}
    size = 4 * 3 * TABLE[0] * TABLE[1]
    while size < megabytes * MEBIBYTE:
        n = len(shapes) // len(layer)
        for name, shape in layer.items():
            shapes[f"layers.{n}.{name}.weight"] = shape
            size += 4 * 3 * torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(0)
    kinds = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    return {
        f"{kind}/{name}": torch.randn(shape, generator=generator)
        for kind in kinds
        for name, shape in shapes.items()
    }


def pieces_of(state: dict[str, Tensor]) -> list[Piece]:
    return [Piece(name, tuple(t.shape), whole(t.shape), t) for name, t in state.items()]


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(megabytes: int, rounds: int, folder: Path) -> Iterator[Row]:
    state = state_of(megabytes)
    size = sum(t.numel() * 4 for t in state.values())
    yield Row("bytes of the state", size / MEBIBYTE, "MiB")
    times = run_rounds(state, rounds, folder)
    median = {what: statistics.median(found) for what, found in times.items()}
    for what, seconds in median.items():
        if what in (STEP, BEHIND, BLOCKED):
            yield Row(what, 1000 * seconds, "ms")
            continue
        yield Row(what, size / MEBIBYTE / seconds, "MiB/s")
    saved, synced = median["save"], median["torch.save and fsync"]
    yield Row("save over torch.save and fsync", synced / saved, "x", 0.8, "more")
    yield Row("save over torch.save", median["torch.save"] / saved, "x")
    loaded = median["torch.load"] / median["load"]
    yield Row("load over torch.load", loaded, "x", 0.8, "more")
    share = 100 * median[BLOCKED] / saved
    yield Row("--async-save blocks, of a synchronous save", share, "%", 10)
    del state
    yield Row("extra memory of a save", peak_of_a_save(megabytes, folder), "MiB", allowed())


def allowed() -> float:
    """64 MiB and the largest box."""
    return 64 + 4 * TABLE[0] * TABLE[1] / MEBIBYTE


class Times(dict[str, list[float]]):
    """Seconds by what was done, a number for every round."""

    def add(self, what: str, work: Callable[[], object]) -> None:
        self.setdefault(what, []).append(seconds_of(work))


def run_rounds(state: dict[str, Tensor], rounds: int, folder: Path) -> Times:
    pieces, target = pieces_of(state), {name: torch.empty_like(t) for name, t in state.items()}
    theirs, ours = folder / "state.pt", folder / "ours"
    times = Times()

    def torch_save(sync: bool) -> None:
        torch.save(state, theirs)
        for path in (theirs, folder) if sync else ():
            directory.sync(path)

    saves = [
        ("torch.save", theirs, lambda: torch_save(False)),
        ("torch.save and fsync", theirs, lambda: torch_save(True)),
        ("save", ours, lambda: save(ours, 1, pieces, {}, ALONE)),
    ]
    with Saver(folder / "behind", ALONE, asynchronous=True, keep_last=1) as behind:
        behind.save(1, pieces, {})  # makes the memory that the copies go to
        for n in range(rounds):
            behind.wait()
            for what, path, work in saves[:: -1 if n % 2 else 1]:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                os.sync()
                times.add(what, work)
            times.add("torch.load", lambda: torch.load(theirs, weights_only=True))
            times.add("load", lambda: open_checkpoint(ours).fill(pieces_of(target)))
            times.add(STEP, lambda: step(state))
            times.add(BEHIND, lambda n=n: step_behind(behind, n + 2, pieces, state, times))
    for name, tensor in state.items():
        if not torch.equal(tensor, target[name]):
            raise AssertionError(f"{name} did not come back as it was")
    return times


def step_behind(
    saver: Saver, iteration: int, pieces: list[Piece], state: dict[str, Tensor], times: Times
) -> None:
    """What a training loop does between two updates when a save is due."""
    called = seconds_of(lambda: saver.save(iteration, pieces, {}))
    step(state)
    waited = seconds_of(saver.copied)
    times.setdefault(BLOCKED, []).append(called + waited)


def step(state: dict[str, Tensor]) -> None:
    """Forward and backward through each matrix: three products of 128 tokens."""
    for name, weight in state.items():
        if name.startswith("model/") and weight.dim() == 2:
            x = torch.ones(TOKENS, weight.shape[1])
            grad = x @ weight.t()
            grad.t() @ x
            grad @ weight


def peak_of_a_save(megabytes: int, folder: Path) -> float:
    """In a fresh process, whose peak nothing else has raised."""
    command = [sys.executable, __file__, "--memory-of-a-save", "--folder", str(folder)]
    command += ["--megabytes", str(megabytes)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def memory_of_a_save(megabytes: int, folder: Path) -> float:
    """MiB that resident memory grows beyond what it is before a save; a small one came before."""
    save(folder / "first", 1, pieces_of({"x": torch.ones(8 * MEBIBYTE)}), {}, ALONE)
    pieces = pieces_of(state_of(megabytes))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = status_of("VmRSS")
    save(folder / "second", 1, pieces, {}, ALONE)
    return (status_of("VmHWM") - before) / 1024


def status_of(name: str) -> int:
    """KiB"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    sys.exit(main())
