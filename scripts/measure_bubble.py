#!/usr/bin/env python
"""Measure the bubble of each schedule on real ranks, with sleeps for compute, against the plan's.

    python scripts/measure_bubble.py
    python scripts/measure_bubble.py --pp 4 --microbatches 8 --unit 0.1 --schedule zb_h1

Every action of a stage sleeps as long as the plan says (a forward of all chunks together one unit,
a backward two), so cores do not matter; plan, executor, transfers and log are the real ones. The
bubble is the share of ranks x time in which no rank computes, of the best of three steps: whatever
else a machine does can only add to it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

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
from tests.ranks import RankPool

STEPS = 3
CASES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb_h1", 1))


class Sleeper(Stage):
    """A stage that takes `unit` seconds for a forward, and does nothing."""

    def __init__(self, index: int, count: int, unit: float) -> None:
        super().__init__(index, count, WireSpec((1, 1, 64), torch.float32))
        self.unit = unit

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
        time.sleep(UNIT[op] * self.unit)


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
    with tempfile.TemporaryDirectory() as folder:
        pool.run(run_steps, plan, unit, folder, size=pp)
        logs = (read_measured(Path(folder, f"{step}.jsonl"), plan) for step in range(STEPS))
        return min(log.bubble for log in logs), simulate(plan).bubble


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pp", type=int, default=4, help="ranks")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.3, help="seconds of a rank's forward")
    parser.add_argument("--schedule", help="one of them", choices=sorted({s for s, _ in CASES}))
    args = parser.parse_args(argv)
    pool = RankPool()
    print(f"{'schedule':<12} {'chunks':>6} {'measured':>9} {'plan':>7} {'ratio':>6}")
    try:
        for schedule, chunks in CASES:
            if args.schedule in (None, schedule):
                size = (args.pp, args.microbatches, chunks)
                found, planned = bubbles(pool, schedule, *size, args.unit)
                ratio = found / planned
                print(f"{schedule:<12} {chunks:>6} {found:>9.4f} {planned:>7.4f} {ratio:>6.3f}")
    finally:
        pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
