#!/usr/bin/env python
"""Train the same small models at every sharding stage and compare with one process.

    python scripts/check_sharding.py                       the whole matrix, up to 16 ranks
    python scripts/check_sharding.py --quick               a sample of it
    python scripts/check_sharding.py --only tp=2 --model llama --type fp64
    python scripts/check_sharding.py --memory              only the table of memory

--data-parallel-sharding-strategy x dp {2, 4} x tp {1, 2} x pp {1, 2} x accumulation {1, 4}, GPT-2's
shape (tied tables, dropout) and Llama's, 20 steps. In float32 and float64 losses and gradient norms
are those of one process to 1e-5 and 1e-12, final weights to 1e-4 and 1e-12 of each tensor's norm;
biases of keys are left out in float32: their gradient is rounding noise, which Adam scales up. In
bf16 and fp16 every stage equals no_shard of the same layout bit for bit, or differs by no more than
no_shard does from float32. The second table says what a rank holds between steps, by stage and
precision, beside the formula of core/data_parallel/memory.py: 2 % at most. Exit code 1 if any of it
does not hold.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch import Tensor

from core.comm import Group
from models.config import GPTConfig
from tests.core.data_parallel.test_memory import STRATEGIES, between_and_within_steps, parameters_of
from tests.layouts import deviation
from tests.ranks import RankPool
from tests.training import GPT2, LLAMA, WITH_DROPOUT, Layout, Run, short_run

SAMPLES = 16  # of a step
MODELS = {
    "gpt2": replace(GPT2, num_layers=4, **WITH_DROPOUT),
    "llama": replace(LLAMA, num_layers=4),
}
LIMITS = {"fp32": (1e-5, 1e-4), "fp64": (1e-12, 1e-12)}  # losses and norms; weights
SHORT = ("bf16", "fp16")
# no step of fp16 is skipped, so that every norm can be compared
PRECISIONS = {"bf16": (("bf16", True),), "fp16": (("fp16", True), ("initial_loss_scale", 1024.0))}
QUICK = 11  # every so many runs: no divisor of the matrix's own periods
SHARDED_BYTES = {  # per parameter of a short or a whole type, over n ranks
    "no_shard": lambda short, master, n: short + 4 + master + 8,
    "optim": lambda short, master, n: short + 4 + (master + 8) / n,
    "optim_grads": lambda short, master, n: short + (4 + master + 8) / n,
    "optim_grads_params": lambda short, master, n: (short + 4 + master + 8) / n,
}


def layouts() -> Iterator[tuple[int, Layout]]:
    """(ranks, layout)"""
    for pp in (1, 2):
        for tp in (1, 2):
            for dp in (2, 4):
                for accumulation in (1, 4):
                    for sharding in STRATEGIES:
                        yield (
                            dp * tp * pp,
                            Layout(
                                tp=tp,
                                pp=pp,
                                sharding=sharding,
                                micro_batch_size=SAMPLES // (dp * accumulation),
                                global_batch_size=SAMPLES,
                            ),
                        )


def typed(model: GPTConfig, layout: Layout, kind: str) -> tuple[GPTConfig, Layout]:
    precision = PRECISIONS.get(kind, ())
    return replace(model, fp64=kind == "fp64"), replace(layout, precision=precision)


def apart(found: Tensor, wanted: Tensor) -> float:
    """Of the difference and of `wanted`, the norms' quotient."""
    difference = (found.double() - wanted.double()).norm()
    return (difference / wanted.double().norm().clamp_min(1e-30)).item()


def weights_apart(found: Run, wanted: Run, model: GPTConfig, kind: str) -> float:
    """The largest over parameters, without the biases of keys in a type where they are noise."""
    worst = 0.0
    for name, value in found.final.items():
        other = wanted.final[name]
        if name.endswith("qkv.bias") and kind != "fp64":
            groups, d = model.query_groups, model.head_dim
            queries = model.num_attention_heads // groups
            keep = [*range(queries), queries + 1]  # of each group's queries, key and value
            value, other = (x.view(groups, -1, d)[:, keep] for x in (value, other))
        worst = max(worst, apart(value, other))
    return worst


class Matrix:
    """The runs, what they are compared with, and the tally."""

    def __init__(self, ranks: RankPool, steps: int) -> None:
        self.ranks, self.steps = ranks, steps
        self.tally: Counter[str] = Counter()
        self.worst: dict[str, tuple[float, float]] = {}
        self._known: dict[tuple, Run] = {}

    def alone(self, name: str, kind: str) -> Run:
        if (name, kind) not in self._known:
            model, layout = typed(MODELS[name], Layout(global_batch_size=SAMPLES), kind)
            run = short_run(Group.single("world"), model, layout, self.steps)
            self._known[name, kind] = run
        return self._known[name, kind]

    def run(self, name: str, kind: str, size: int, layout: Layout) -> Run:
        key = (name, kind, size, layout)
        if key not in self._known:
            model, layout = typed(MODELS[name], layout, kind)
            runs = self.ranks.run(short_run, model, layout, self.steps, size=size, limit=600)
            for stage in runs[1:]:  # other pipeline ranks have other parameters
                runs[0].initial.update(stage.initial)
                runs[0].final.update(stage.final)
            self._known = {k: v for k, v in self._known.items() if len(k) == 2 or k[2:] == key[2:]}
            self._known[key] = runs[0]
        return self._known[key]

    def try_one(self, name: str, kind: str, size: int, layout: Layout) -> str:
        """The row of one run."""
        start = time.monotonic()
        found = self.run(name, kind, size, layout)
        if kind in SHORT:
            wanted = self.run(name, kind, size, replace(layout, sharding="no_shard"))
            same = (found.losses, found.norms) == (wanted.losses, wanted.norms)
            same = same and weights_apart(found, wanted, MODELS[name], "fp64") == 0.0
            error, _ = self.numbers(wanted, self.alone(name, "fp32"), name, kind)
        else:
            wanted, same, error = self.alone(name, kind), False, LIMITS[kind][0]
        numbers, weights = self.numbers(found, wanted, name, kind)
        holds = same or numbers <= error < math.inf
        if kind in LIMITS:
            holds = holds and weights <= LIMITS[kind][1]
        self.tally["held" if holds else "wrong"] += 1
        self.tally["bitwise"] += same
        worst = self.worst.get(kind, (0.0, 0.0))
        self.worst[kind] = (max(worst[0], numbers), max(worst[1], weights))
        dp = size // (layout.tp * layout.pp)
        accumulation = SAMPLES // (dp * layout.micro_batch_size)
        verdict = ("bitwise" if same else "holds") if holds else "WRONG"
        return (
            f"{name:6} {kind:5} {layout.sharding:19} {dp:2} {layout.tp:2} {layout.pp:2} "
            f"{accumulation:3} {numbers:9.1e} {weights:9.1e} {time.monotonic() - start:6.1f}  "
            + verdict
        )

    def numbers(self, found: Run, wanted: Run, name: str, kind: str) -> tuple[float, float]:
        """(of losses and norms, of weights)"""
        pairs = ((found.losses, wanted.losses), (found.norms, wanted.norms))
        return (
            max(deviation(a, b) for a, b in pairs),
            weights_apart(found, wanted, MODELS[name], kind),
        )


def memory_table(ranks: RankPool) -> int:
    """Prints it; returns how many rows are more than 2 % off."""
    model, n, wrong = replace(GPT2, hidden_size=128, vocab_size=500), 4, 0
    count = parameters_of(model)
    print(f"\nbytes that a rank of {n} holds between steps, {count:,} parameters")
    print(f"{'precision':9} {'stage':19} {'formula':>12} {'measured':>12} {'apart':>7}")
    for kind, short in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
        for sharding in STRATEGIES:
            precision = PRECISIONS.get(kind, ())
            layout = Layout(sharding=sharding, precision=precision, micro_batch_size=1)
            held = ranks.run(between_and_within_steps, model, layout, size=n)[0][0].kept
            formula = SHARDED_BYTES[sharding](short, 4 if short < 4 else 0, n) * count
            off = held / formula - 1
            wrong += abs(off) > 0.02
            print(f"{kind:9} {sharding:19} {formula:12,.0f} {held:12,} {off:7.2%}", flush=True)
    return wrong


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK}th run")
    parser.add_argument("--only", default="", help="layouts whose description holds this text")
    parser.add_argument("--model", choices=MODELS, help="one of the models")
    parser.add_argument("--type", choices=(*LIMITS, *SHORT), help="one of the element types")
    parser.add_argument("--memory", action="store_true", help="only the table of memory")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args(argv)


def cases(args: argparse.Namespace) -> list[tuple[str, str, int, Layout]]:
    found = [
        (name, kind, size, layout)
        for name in MODELS
        if args.model in (None, name)
        for kind in (*LIMITS, *SHORT)
        if args.type in (None, kind)
        for size, layout in layouts()
        if args.only in str(layout) and (kind in LIMITS or layout.sharding != "no_shard")
    ]
    return found[:: QUICK if args.quick else 1]


def main(argv: Sequence[str] | None = None) -> int:
    args, began = parse(argv), time.monotonic()
    todo, wrong = [] if args.memory else cases(args), 0
    if not todo and not args.memory:
        print(f"check_sharding: no layout holds {args.only!r}", file=sys.stderr)
        return 2
    ranks = RankPool()
    try:
        if todo:
            matrix = Matrix(ranks, args.steps)
            print("model  type  stage               dp tp pp acc      loss   weights      s")
            for case in todo:
                print(matrix.try_one(*case), flush=True)
            tally, wrong = matrix.tally, matrix.tally["wrong"]
            print(
                f"{len(todo)} tried, {tally['held']} held, {tally['bitwise']} of them bit for bit, "
                f"{wrong} wrong, {math.ceil((time.monotonic() - began) / 60)} minutes"
            )
            for kind, (numbers, weights) in matrix.worst.items():
                print(f"  {kind}: losses and norms {numbers:.1e}, weights {weights:.1e} at most")
        wrong += memory_table(ranks)
    finally:
        ranks.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
