#!/usr/bin/env python
"""Train the same small models on every layout and compare with one process.

    python scripts/check_layouts.py                  the whole matrix, up to 8 ranks
    python scripts/check_layouts.py --quick          a sample of it
    python scripts/check_layouts.py --only pp=4 --model gpt2

dp x tp x sequence parallelism x pp x schedule, for GPT-2's shape (tied tables, dropout 0.1) and
Llama's (untied, grouped queries), in float32 and float64: 8 layers, 8 microbatches, 10 steps. On
every layout initial weights are bit for bit those of one process; losses (and a validation loss)
and gradient norms agree to 1e-5 in float32, 1e-12 in float64; copies of a parameter on several
ranks end bit for bit equal; the bytes on the wire are those that core.traffic predicts. Exit code 1
if any of it does not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core.comm import Group
from models.config import GPTConfig
from tests.layouts import Outcome, deviation, outcome
from tests.ranks import RankPool
from tests.training import GPT2, LLAMA, WITH_DROPOUT, Layout

SAMPLES, MICROBATCHES, MOST_RANKS = 16, 8, 8
MODELS = {
    "gpt2": replace(GPT2, num_layers=8, **WITH_DROPOUT),
    "llama": replace(LLAMA, num_layers=8, num_query_groups=4),
}
LIMITS = {"fp32": 1e-5, "fp64": 1e-12}
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved", 2))
QUICK = 7  # every so many layouts: no divisor of the matrix's own periods


def layouts() -> Iterator[tuple[int, Layout]]:
    """(ranks, layout): all that fit."""
    for pp in (1, 2, 4):
        for schedule, chunks in SCHEDULES if pp > 1 else ((None, 1),):
            for dp in (1, 2):
                for tp, sequence_parallel in ((1, False), (2, False), (2, True)):
                    if dp * tp * pp <= MOST_RANKS:
                        yield (
                            dp * tp * pp,
                            Layout(
                                tp=tp,
                                sequence_parallel=sequence_parallel,
                                micro_batch_size=SAMPLES // (dp * MICROBATCHES),
                                pp=pp,
                                chunks=chunks,
                                schedule=schedule,
                                global_batch_size=SAMPLES,
                            ),
                        )


def compare(runs: list[Outcome], one: Outcome, limit: float) -> tuple[float, float, list[str]]:
    """(loss deviation, norm deviation, what is wrong) over all ranks."""
    losses = max(deviation(run.losses, one.losses) for run in runs)
    norms = max(deviation(run.norms, one.norms) for run in runs)
    final: dict[str, str] = {}
    copies = {
        name
        for run in runs
        for name, digest in run.final.items()
        if digest != final.setdefault(name, digest)
    }
    wrong = []
    if {n for run in runs for n in run.initial} != one.initial.keys():
        wrong.append("parameters")
    if any(not run.initial.items() <= one.initial.items() for run in runs):
        wrong.append("initial weights")
    if max(losses, norms) > limit:
        wrong.append(f"deviation above {limit:g}")
    if copies:
        wrong.append(f"copies of {', '.join(sorted(copies))}")
    if any(recorded != predicted for recorded, predicted in (run.traffic for run in runs)):
        wrong.append("traffic")
    return losses, norms, wrong


def row(*cells: object) -> str:
    widths = (3, 3, 3, 3, 4, 12, 6, 5, 9, 9, 6)
    return " ".join(f"{cell!s:>{w}}" for cell, w in zip(cells, widths)) + "  " + str(cells[-1])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK}th run")
    parser.add_argument("--only", default="", help="layouts whose description holds this text")
    parser.add_argument("--model", choices=MODELS, help="one of the models")
    parser.add_argument("--type", choices=LIMITS, help="one of the element types")
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args(argv)


def cases(args: argparse.Namespace) -> list[tuple[str, str, GPTConfig, int, Layout]]:
    found = [
        (name, kind, replace(model, fp64=kind == "fp64"), size, layout)
        for name, model in MODELS.items()
        if args.model in (None, name)
        for kind in LIMITS
        if args.type in (None, kind)
        for size, layout in layouts()
        if args.only in str(layout)
    ]
    return found[:: QUICK if args.quick else 1]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    todo, references, bad, began = cases(args), {}, 0, time.monotonic()
    if not todo:
        print(f"check_layouts: no layout holds {args.only!r}", file=sys.stderr)
        return 2
    print(row("dp", "tp", "sp", "pp", "vpp", "schedule", "model", "type", "loss", "norm", "s", ""))
    worst = dict.fromkeys(LIMITS, 0.0)
    pool = RankPool()
    try:
        for name, kind, model, size, layout in todo:
            if (name, kind) not in references:
                alone = Layout(micro_batch_size=SAMPLES // MICROBATCHES, global_batch_size=SAMPLES)
                references[name, kind] = outcome(Group.single("world"), model, alone, args.steps)
            start = time.monotonic()
            runs = pool.run(outcome, model, layout, args.steps, size=size, limit=300)
            spent = time.monotonic() - start
            losses, norms, wrong = compare(runs, references[name, kind], LIMITS[kind])
            worst[kind] = max(worst[kind], losses, norms)
            bad += bool(wrong)
            place = (size // (layout.tp * layout.pp), layout.tp, "x" * layout.sequence_parallel)
            plan = (layout.pp, layout.chunks, layout.schedule or "")
            numbers = (f"{losses:.1e}", f"{norms:.1e}", f"{spent:.1f}")
            print(row(*place, *plan, name, kind, *numbers, "; ".join(wrong)), flush=True)
    finally:
        pool.close()
    largest = ", ".join(f"{kind} {value:.1e}" for kind, value in worst.items() if value)
    minutes = (time.monotonic() - began) / 60
    print(f"{len(todo)} runs, {bad} wrong, {minutes:.1f} minutes; largest deviation: {largest}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
