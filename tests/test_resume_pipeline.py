"""Saving and resuming in a pipeline: bit for bit on the same layout, to rounding on any other.

Reported for huggingface/nanotron#221: resuming fails only when pp is above 1.
"""

import pytest

from core.comm import Group
from core.pipeline_parallel.actions import COMPUTE
from core.pipeline_parallel.measured import read_measured
from core.pipeline_parallel.schedules import build_plan
from tests.recipe import assert_same_bits, contents, rows, run_recipe

BASE = """--num-layers 4 --attention-dropout 0.1 --hidden-dropout 0.1 --train-iters 4
    --lr-warmup-iters 2 --eval-interval 2 --eval-iters 1""".split()
PP = "--pipeline-model-parallel-size"
UNTIED = ("--untie-embeddings-and-output-weights", "--position-embedding-type", "rope")
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
SP = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
CASES = {
    "pp2": (2, (PP, 2)),
    "pp2-chunks": (2, (PP, 2, CHUNKS, 2, "--pipeline-schedule", "interleaved")),
    "pp2-dp2": (4, (PP, 2, "--decoder-last-pipeline-num-layers", 1)),
    "pp2-tp2-zb_h1": (4, (*SP, PP, 2, "--pipeline-schedule", "zb_h1")),
    "pp4-untied": (4, (*UNTIED, PP, 4, "--pipeline-model-parallel-layout", "E|tt||ttL")),
}


def run(ranks, size: int, *flags: object) -> str:
    if size == 1:
        code, text = run_recipe(Group.single("world"), *BASE, *flags)
        assert code == 0
        return text
    results = ranks.run(run_recipe, *BASE, *flags, size=size)
    assert [code for code, _ in results] == [0] * size
    return results[0][1]


@pytest.mark.parametrize("name", CASES)
def test_two_and_two_iterations_equal_four(ranks, tmp_path, name):
    size, layout = CASES[name]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run(ranks, size, *layout, "--save", whole, "--metrics-file", tmp_path / "whole.jsonl")
    flags = (*layout, "--save", halves, "--metrics-file", tmp_path / "halves.jsonl")
    run(ranks, size, *flags, "--exit-interval", 2)
    run(ranks, size, *flags, "--load", halves)
    assert_same_bits(contents(whole), contents(halves))
    assert rows(tmp_path / "whole.jsonl") == rows(tmp_path / "halves.jsonl")


def test_any_layout_goes_on_from_a_pipeline(ranks, tmp_path):
    """Saved by an interleaved pipeline, resumed by one process, tp, and other pipelines."""
    fp64 = ("--fp64",)
    run(ranks, 1, *fp64, "--metrics-file", tmp_path / "one.jsonl")
    size, layout = CASES["pp2-chunks"]
    run(ranks, size, *fp64, *layout, "--save", tmp_path / "saved", "--exit-interval", 2)
    wanted = rows(tmp_path / "one.jsonl")[2:]
    for number, (size, layout) in enumerate(
        [(1, ()), (2, SP), CASES["pp2-tp2-zb_h1"], (4, (PP, 4))]
    ):
        found = tmp_path / f"{number}.jsonl"
        run(ranks, size, *fp64, *layout, "--load", tmp_path / "saved", "--metrics-file", found)
        for row, other in zip(rows(found), wanted, strict=True):
            assert row["iteration"] == other["iteration"]
            assert row["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-12)
            assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-12)


def test_log_pipeline_holds_every_step_of_one_pipeline(ranks, tmp_path):
    """Of dp 2 only the first pipeline writes, and what an earlier run wrote is gone."""
    log = tmp_path / "run.jsonl"
    log.write_text("of an earlier run\n")
    run(ranks, 4, PP, 2, "--log-pipeline", log)
    plan = build_plan(None, 2, 2)
    lines = log.read_text().splitlines()
    assert len(lines) == 4 * sum(len(row) for row in plan.only(*COMPUTE).rows)
    timeline = read_measured(log, plan)
    assert len({t.action for t in timeline.events}) == 8
