"""Where the time of a step goes: every moment once, and the parts add up to the step."""

import io
import json
import time

import pytest
import torch

from core.comm import Group, all_reduce_, start_all_reduce_
from core.metrics import Metrics
from core.step_clock import StepClock, breakdown
from tests.core.test_metrics import Clock
from tests.recipe import run_recipe

ROW = {
    "consumed_samples": 16,
    "lm_loss": 2.0,
    "grad_norm": 1.0,
    "learning_rate": 1e-3,
    "global_batch_size": 16,
    "tokens": 1024,
}


def test_an_inner_part_takes_its_time_away_from_the_outer_one():
    now = Clock()
    clock = StepClock(now=now)
    with clock.during("backward"):
        now.now += 1
        with clock.during("tp"):
            now.now += 2
        now.now += 4
    now.now += 8  # nobody's
    with clock.during("tp"):
        now.now += 16
    assert clock.take() == {"backward": 5.0, "tp": 18.0}
    assert clock.take() == {}


def test_a_part_that_fails_ends():
    now = Clock()
    clock = StepClock(now=now)
    with pytest.raises(RuntimeError), clock.during("data"):
        now.now += 1
        raise RuntimeError
    now.now += 1
    assert clock.take() == {"data": 1.0}


def test_the_device_is_waited_for_at_both_ends():
    calls = []
    with StepClock(synchronize=lambda: calls.append(1)).during("forward"):
        assert len(calls) == 1
    assert len(calls) == 2


def test_the_line_and_the_row(tmp_path):
    now, out = Clock(), io.StringIO()
    clock = StepClock(now=now)
    file = tmp_path / "metrics.jsonl"
    with Metrics(
        is_writer=True,
        total_iterations=4,
        log_interval=2,
        metrics_file=str(file),
        step_clock=clock,
        timing_log_level=1,
        out=out,
        clock=now,
    ) as metrics:
        for iteration in (1, 2, 3, 4):
            with clock.during("backward"):
                now.now += 10  # of an evaluation: in no step
            if iteration == 4:
                with clock.during("checkpoint"):
                    now.now += 0.25
            metrics.begin_step()
            for part, seconds in (("forward", 1), ("backward", 2), ("pp", 0.5), ("data", 0.125)):
                with clock.during(part):
                    now.now += seconds
            now.now += 0.0625
            metrics.train({**ROW, "iteration": iteration})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        parts = {name: row[name] for name in row if name.startswith("time_")}
        assert parts.pop("time_checkpoint_s") == (0.25 if row["iteration"] == 4 else 0.0)
        assert sum(parts.values()) == row["step_time_s"] == 3.6875
        assert parts["time_compute_s"] == 3.0
        assert parts["time_other_s"] == 0.0625
    lines = [line for line in out.getvalue().splitlines() if line.startswith(" time per")]
    assert lines[1] == (
        " time per iteration (ms), rank 0 | compute: 3000.0 | tp: 0.0 | dp: 0.0 | pp: 500.0 | "
        "optimizer: 0.0 | data: 125.0 | other: 62.5 | sum: 3687.5 |"
    )
    assert lines[2].endswith("sum: 3687.5 | beside it, checkpoints: 125.0 |")  # mean of two


def test_level_2_is_finer():
    fine = breakdown({"forward": 1.0, "backward": 2.0}, 4.0, fine=True)
    assert (fine["time_forward_s"], fine["time_backward_s"]) == (1.0, 2.0)
    assert "time_compute_s" not in fine


def one_is_late(world: Group) -> dict[str, float]:
    clock = world.ledger.clock = StepClock()
    all_reduce_(torch.ones(1), world, tag="test.start")
    clock.take()
    with clock.during("backward"):
        time.sleep(0.6 * world.rank)
        all_reduce_(torch.ones(1), world, tag="test.blocking")
        pending = start_all_reduce_(torch.ones(1), world, tag="test.started")
        time.sleep(0.3)  # work that hides it
        pending.wait()
    world.ledger.clock = None
    return clock.take()


def test_waiting_for_others_is_no_work(ranks):
    for _ in range(5):  # rank 0 must be in the call before rank 1 wakes
        early, late = ranks.run(one_is_late, size=2)
        if early["world"] > 0.4:
            break
    assert early["world"] > 0.4
    assert late["backward"] > 0.8
    assert early["backward"] > 0.25


def times_of_a_run(world: Group, folder: str, level: int) -> tuple[list[dict], str]:
    file = f"{folder}/metrics.jsonl"
    _, printed = run_recipe(
        world,
        *("--train-iters", 4, "--metrics-file", file, "--timing-log-level", level),
        *("--tensor-model-parallel-size", 2, "--save", f"{folder}/save", "--save-interval", 2),
    )
    if world.rank:
        return [], printed
    with open(file) as lines:
        return [json.loads(line) for line in lines], printed


def test_a_run_adds_up(ranks, tmp_path):
    rows, printed = ranks.run(times_of_a_run, str(tmp_path), 2, size=4)[0]
    assert len(rows) == 4
    for row in rows:
        parts = {k: v for k, v in row.items() if k.startswith("time_") and "checkpoint" not in k}
        assert sum(parts.values()) == pytest.approx(row["step_time_s"])
        for name in ("forward", "backward", "tp", "dp", "optimizer", "data"):
            assert parts[f"time_{name}_s"] > 0, name
    others = [row["time_other_s"] / row["step_time_s"] for row in rows]
    assert min(others) >= 0
    assert min(others) < 0.5  # of the step in which the machine had least else to do
    assert [row["time_checkpoint_s"] > 0 for row in rows] == [False, False, True, False]
    assert printed.count("time per iteration (ms), rank 0 | forward:") == 4


def test_off_is_off(ranks, tmp_path):
    rows, printed = ranks.run(times_of_a_run, str(tmp_path), 0, size=2)[0]
    assert not [name for name in rows[0] if name.startswith("time_")]
    assert "time per iteration (ms), rank" not in printed
