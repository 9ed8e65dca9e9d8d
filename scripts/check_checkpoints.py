#!/usr/bin/env python
"""Save at one layout, load at another: prints tried and held.

    python scripts/check_checkpoints.py                   every pair below, up to 4 ranks
    python scripts/check_checkpoints.py --quick           a sample of them
    python scripts/check_checkpoints.py --model bert --only pp4

Pairs of (saving layout, loading layout) over dp, tp, pp, virtual stages and sharding stage, for
GPT-2's shape (tied tables), Llama's and BERT: 4 layers, float32, dropout 0.1, saved in the middle
of a ramp of the batch size. A pair holds when every logical tensor, moments included, is bit for
bit what was saved, and 5 more steps follow the unbroken run's losses to 1e-6; bit for bit where the
layout is the same. Exit code 1 if any does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from core.checkpoint.reader import open_checkpoint
from core.comm import Group
from scripts.check_layouts import deviation
from tests.ranks import RankPool
from tests.resumes import FIRST, MODELS, RESUMED, load_and_train, train_and_save

LIMIT = 1e-6
STEP = 5  # from a saving layout to its loading one in the list: no divisor of its length
ALIKE = ("one", "dp2 optim", "tp2 pp2")  # saved and loaded at one layout
QUICK = 4  # every so many pairs


def pairs() -> list[tuple[str, str]]:
    """(saving layout, loading layout): every layout saves and loads at least once."""
    names = list(RESUMED)
    around = [(name, names[(n + STEP) % len(names)]) for n, name in enumerate(names)]
    return [*around, *((name, name) for name in ALIKE)]


def cases(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    found = [
        (model, saving, loading)
        for model in MODELS
        if args.model in (None, model)
        for saving, loading in pairs()
        if args.only in (None, saving, loading)
    ]
    return found[:: QUICK if args.quick else 1]


class Trials:
    """Runs on a pool of ranks; what a layout has saved once serves all its pairs."""

    def __init__(self, folder: Path, pool: RankPool) -> None:
        self.folder, self.pool = folder, pool
        self._saved: dict[tuple[str, str], tuple[Path, list[list[float]]]] = {}

    def run(self, function, layout: str, *args) -> list[list[float]]:
        """The ranks' losses."""
        size = RESUMED[layout][0]
        if size == 1:
            return [function(Group.single("world"), *args)]
        return self.pool.run(function, *args, size=size, limit=300)

    def saved(self, model: str, layout: str) -> tuple[Path, list[list[float]]]:
        """The folder, and the unbroken curve as every rank has seen it."""
        if (model, layout) not in self._saved:
            folder = self.folder / f"{model} {layout}"
            curve = self.run(train_and_save, layout, model, layout, folder)
            self._saved[model, layout] = (folder, curve)
        return self._saved[model, layout]

    def resume(self, model: str, saving: str, loading: str) -> tuple[float, list[str]]:
        """(largest deviation of a loss, what is wrong)"""
        saved, unbroken = self.saved(model, saving)
        again = self.folder / f"{model} {saving} {loading}"
        curves = self.run(load_and_train, loading, model, loading, saved, again)
        wanted = unbroken[0][FIRST:]
        limit = 0.0 if saving == loading else LIMIT
        return judge(curves, wanted, limit, changed(saved, again))


def changed(saved: Path, again: Path) -> list[str]:
    """Names of the tensors of two checkpoints that are not bit for bit equal."""
    a, b = open_checkpoint(saved), open_checkpoint(again)
    names = sorted({*a.names(), *b.names()})
    both = set(a.names()) & set(b.names())
    return [n for n in names if n not in both or not torch.equal(a.read(n), b.read(n))]


def judge(
    curves: list[list[float]], wanted: list[float], limit: float, unequal: list[str]
) -> tuple[float, list[str]]:
    worst = max(deviation(curve, wanted) for curve in curves)
    wrong = [f"losses differ by more than {limit:g}"] if worst > limit else []
    if unequal:
        wrong.append(f"{len(unequal)} tensors are not what was saved: {', '.join(unequal[:3])}")
    return worst, wrong


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK}th pair")
    parser.add_argument("--only", choices=RESUMED, metavar="LAYOUT", help="pairs with this one")
    parser.add_argument("--model", choices=MODELS, help="one of the models")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    todo, bad, largest, began = cases(parse(argv)), 0, 0.0, time.monotonic()
    print(f"{'model':6} {'saved by':24} {'loaded by':24} {'loss':>8} {'s':>6}")
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
        trials = Trials(Path(folder), RankPool())
        try:
            for model, saving, loading in todo:
                start = time.monotonic()
                worst, wrong = trials.resume(model, saving, loading)
                bad, largest = bad + bool(wrong), max(largest, worst)
                spent = time.monotonic() - start
                row = f"{model:6} {saving:24} {loading:24} {worst:8.1e} {spent:6.1f}"
                print(f"{row}  {'; '.join(wrong)}".rstrip(), flush=True)
        finally:
            trials.pool.close()
    minutes = (time.monotonic() - began) / 60
    print(
        f"held {len(todo) - bad} of {len(todo)} tried, {minutes:.1f} minutes; "
        f"largest deviation of a loss {largest:.1e}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
