"""What the executor does takes the time that the plan says, action by action, on a virtual clock.

Executor, stages, transfers in flight and log are the real ones; a rank is a thread, its clock moves
by what an action costs and, where it waits for a transfer, to the moment both ends were there. No
processor is part of it, so a busy machine changes nothing: scripts/measure_bubble.py has real time.
"""

import itertools
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from core.comm import P2P, Group
from core.comm.ledger import Ledger
from core.pipeline_parallel import executor
from core.pipeline_parallel.actions import Plan
from core.pipeline_parallel.measured import PipelineLog, read_measured
from core.pipeline_parallel.schedules import build_plan
from core.pipeline_parallel.simulate import Costs, Timeline, closed_form, simulate
from scripts.measure_bubble import CASES, Sleeper

PATIENCE = 60.0  # seconds of real time


@dataclass
class Transfer:
    """The times at which its two ends were reached."""

    sent: float | None = None
    posted: float | None = None
    tensor: torch.Tensor | None = None
    buffer: torch.Tensor | None = None

    @property
    def done(self) -> bool:
        return self.sent is not None and self.posted is not None


class Wires:
    """Between all ranks; transfers of a wire are matched by order."""

    def __init__(self) -> None:
        self.changed, self.failed = threading.Condition(), False
        self.transfers: dict[tuple[int, int, int], Transfer] = {}


@dataclass
class Rank:
    """A rank's end of all wires, and its clock; stands for the process group."""

    wires: Wires
    now: float = 0.0
    used: dict[tuple[int, int], int] = field(default_factory=dict)

    def spend(self, cost: float) -> None:
        self.now += cost

    def start(self, end: P2P, rank: int) -> "Pending":
        wire = (rank, end.peer) if end.op == "send" else (end.peer, rank)
        number = self.used[wire] = self.used.get(wire, 0) + 1
        with self.wires.changed:
            transfer = self.wires.transfers.setdefault((*wire, number), Transfer())
            if end.op == "send":
                transfer.sent, transfer.tensor = self.now, end.tensor
            else:
                transfer.posted, transfer.buffer = self.now, end.tensor
            if transfer.done:
                transfer.buffer.copy_(transfer.tensor)
            self.wires.changed.notify_all()
        return Pending(self, transfer)


@dataclass
class Pending:
    rank: Rank
    transfer: Transfer

    def wait(self) -> list[torch.Tensor]:
        wires, transfer = self.rank.wires, self.transfer
        with wires.changed:
            over = wires.changed.wait_for(lambda: transfer.done or wires.failed, PATIENCE)
            assert over and not wires.failed, "another rank failed, or none goes on"
        self.rank.now = max(self.rank.now, transfer.sent, transfer.posted)
        return [transfer.buffer]


class VirtualLog(PipelineLog):
    def __init__(self, path: Path, index: int, rank: Rank) -> None:
        super().__init__(path, index)
        self.now = lambda: rank.now


def run_rank(plan: Plan, costs: Sequence[float], index: int, wires: Wires, path: Path) -> None:
    """costs: of each stage's forward"""
    rank = Rank(wires)
    group = Group("pp", tuple(range(plan.ranks)), index, Ledger(), rank)
    mine = range(index, plan.stages, plan.ranks)
    stages = [Sleeper(stage, plan.stages, costs[stage], rank.spend) for stage in mine]
    log = VirtualLog(path, index, rank)
    try:
        executor.Executor(plan.row(index), stages, group, log=log).run(itertools.repeat({}))
    except BaseException:
        with wires.changed:
            wires.failed = True
            wires.changed.notify_all()
        raise


@pytest.fixture
def execute(monkeypatch, tmp_path):
    """(plan, each stage's cost) -> the timeline that the ranks' log tells"""
    monkeypatch.setattr(
        executor, "exchange", lambda ops, group, tag: group.handle.start(*ops, group.rank)
    )

    def run(plan: Plan, costs: Sequence[float]) -> Timeline:
        wires, path = Wires(), tmp_path / "run.jsonl"
        path.unlink(missing_ok=True)
        with ThreadPoolExecutor(plan.ranks) as threads:
            ranks = [
                threads.submit(run_rank, plan, costs, index, wires, path)
                for index in range(plan.ranks)
            ]
            for rank in ranks:
                rank.result()
        return read_measured(path, plan)

    return run


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
def test_the_executed_bubble_is_the_formulas(execute, schedule, chunks):
    for pp in (2, 4, 8):
        for microbatches in (1, pp, 2 * pp + 1):
            plan = build_plan(schedule, pp, microbatches, chunks)
            found = execute(plan, [1.0] * plan.stages)
            form = closed_form(schedule, pp, microbatches, chunks)
            assert found == simulate(plan), (pp, microbatches)
            assert (found.span, found.bubble) == (form.span, pytest.approx(form.bubble))


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
def test_sends_cost_nothing_where_stages_are_uneven(execute, schedule, chunks):
    """With even stages a receive is always posted before its send; here many come later, and an
    executor that waited for its sends would be slower than the plan."""
    for pp, microbatches in ((2, 5), (4, 4), (4, 9), (8, 17)):
        plan = build_plan(schedule, pp, microbatches, chunks)
        costs = random.Random(pp).choices((1.0, 1.5, 2.0), k=plan.stages)
        found, planned = execute(plan, costs), simulate(plan, Costs(stage=costs))
        assert (found.span, found.busy) == (planned.span, planned.busy), (pp, microbatches)
