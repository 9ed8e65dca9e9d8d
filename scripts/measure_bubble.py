#!/usr/bin/env python
"""Measure the bubble of each schedule on real ranks, with sleeps for compute, against the plan's.

    python scripts/measure_bubble.py
    python scripts/measure_bubble.py --pp 4 --microbatches 8 --unit 0.1 --schedule zb_h1

Exit code 1 if a schedule's bubble is more than 5 % off the plan's, 2 for bad input.

Every action of a stage sleeps as long as the plan says (a forward of all chunks together one unit,
a backward two), so cores do not matter; plan, executor, transfers and log are the real ones. The
bubble is the share of ranks x time in which no rank computes, of the best of three steps: whatever
else a machine does can only add to it. A schedule that misses the bar is measured again with longer
sleeps, in up to --rounds rounds, of which the best counts: what a busy machine adds to a transfer
weighs less then, while a rank that waits for the wrong thing waits longer.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core.comm import Group, barrier
from core.pipeline_parallel.actions import Op, Plan
from core.pipeline_parallel.executor import Executor
from core.pipeline_parallel.measured import PipelineLog, read_measured
from core.pipeline_parallel.schedules import build_plan
from core.pipeline_parallel.simulate import UNIT, simulate
from core.pipeline_parallel.stage import Batch, Loss, Stage, WireSpec
from tests.ranks import LIMIT, RankPool

STEPS, ROUNDS = 3, 3
BAR = 0.05  # of the plan's bubble
CASES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb_h1", 1))


class Sleeper(Stage):
    """A stage that takes `unit` seconds for a forward, and does nothing."""

    def __init__(
        self,
        index: int,
        count: int,
        unit: float,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(index, count, WireSpec((1, 1, 64), torch.float32))
        self.unit, self.sleep = unit, sleep

    def compute(self, batch: Batch, activation: Tensor | None) -> Tensor | Loss:
        x = torch.zeros(self.wire.shape, requires_grad=True) if self.is_first else activation
        self._sleep(Op.F)
        return Loss(x.sum(), torch.ones(())) if self.is_last else x * 1

    def backward_step(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        self._sleep(Op.B)
        return super().backward_step(microbatch, gradient)

    def input_grad_step(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        self._sleep(Op.I)
        return super().input_grad_step(microbatch, gradient)

    def weight_grad_step(self, microbatch: int) -> None:
        self._sleep(Op.W)
        super().weight_grad_step(microbatch)

    def _sleep(self, op: Op) -> None:
        self.sleep(UNIT[op] * self.unit)


def run_steps(world: Group, plan: Plan, unit: float, folder: str) -> None:
    """On every rank: the steps, each to a log of its own."""
    torch.set_num_threads(1)
    mine = range(world.rank, plan.stages, world.size)
    stages = [Sleeper(index, plan.stages, unit / plan.chunks) for index in mine]
    for step in range(STEPS):
        log = PipelineLog(Path(folder, f"{step}.jsonl"), world.rank)
        executor = Executor(plan.row(world.rank), stages, world, log=log)
        executor.open_wires()
        barrier(world, tag="measure")
        executor.run(itertools.repeat({}))


def bubbles(
    pool: RankPool, schedule: str, pp: int, microbatches: int, chunks: int, unit: float
) -> tuple[float, float]:
    """(measured, simulated)"""
    plan = build_plan(schedule, pp, microbatches, chunks)
    planned = simulate(plan)
    seconds = STEPS * planned.span * unit / chunks
    with tempfile.TemporaryDirectory() as folder:
        pool.run(run_steps, plan, unit, folder, size=pp, limit=LIMIT + 2 * seconds)
        logs = (read_measured(Path(folder, f"{step}.jsonl"), plan) for step in range(STEPS))
        return min(log.bubble for log in logs), planned.bubble


class Row(NamedTuple):
    """One round of one schedule, with forwards of `unit` seconds."""

    schedule: str
    chunks: int
    unit: float
    found: float
    planned: float

    @property
    def ratio(self) -> float:
        return self.found / self.planned

    @property
    def holds(self) -> bool:
        return abs(self.ratio - 1) <= BAR

    def __str__(self) -> str:
        return (
            f"{self.schedule:<12} {self.chunks:>6} {self.unit:>5g} {self.found:>9.4f} "
            f"{self.planned:>7.4f} {self.ratio:>6.3f}  {'holds' if self.holds else 'MISSES'}"
        )


def best_of(rows: Sequence[Row]) -> list[Row]:
    """Of each schedule the round that comes nearest to its plan, in the order of the schedules."""
    best: dict[tuple[str, int], Row] = {}
    for row in rows:
        key = row.schedule, row.chunks
        if key not in best or abs(row.ratio - 1) < abs(best[key].ratio - 1):
            best[key] = row
    return list(best.values())


def verdict(rows: Sequence[Row]) -> int:
    """The exit code: 1 if a schedule misses the bar in every one of its rounds, or none was run."""
    return 0 if rows and all(row.holds for row in best_of(rows)) else 1


def measure(
    pool: RankPool, cases: Sequence[tuple[str, int]], args: argparse.Namespace
) -> list[Row]:
    """Prints a row per round and returns all of them."""
    rows: list[Row] = []
    print(f"{'schedule':<12} {'chunks':>6} {'unit':>5} {'measured':>9} {'plan':>7} {'ratio':>6}")
    for schedule, chunks in cases:
        for number in range(1, args.rounds + 1):
            size, unit = (args.pp, args.microbatches, chunks), number * args.unit
            rows.append(Row(schedule, chunks, unit, *bubbles(pool, schedule, *size, unit)))
            print(rows[-1], flush=True)
            if rows[-1].holds:
                break
    return rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pp", type=int, default=4, help="ranks")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.3, help="seconds of a rank's forward")
    parser.add_argument("--schedule", help="one of them", choices=sorted({s for s, _ in CASES}))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at most, for each schedule")
    args = parser.parse_args(argv)
    if args.pp < 2:
        parser.error(f"--pp {args.pp}: one rank has no bubble; use 2 or more")
    for flag in ("microbatches", "rounds"):
        if (value := getattr(args, flag)) < 1:
            parser.error(f"--{flag} {value}: use 1 or more")
    if not 0 < args.unit < math.inf:
        parser.error(f"--unit {args.unit:g}: use seconds above 0, such as 0.3")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    cases = [case for case in CASES if args.schedule in (None, case[0])]
    pool = RankPool()
    try:
        rows = measure(pool, cases, args)
    finally:
        pool.close()
    best = best_of(rows)
    wrong = [f"{row.schedule} x {row.chunks}" for row in best if not row.holds]
    print(
        f"bar: a bubble within {BAR:.0%} of the plan's, best of up to {args.rounds} rounds; "
        f"{len(best) - len(wrong)} of {len(best)} schedules hold"
        + (f", missed by {', '.join(wrong)}" if wrong else "")
    )
    if wrong:
        print(
            "a busy machine adds to every bubble, the less the longer the sleeps: try a longer "
            f"--unit than {args.unit:g} or more --rounds than {args.rounds}"
        )
    return verdict(rows)


if __name__ == "__main__":
    sys.exit(main())
