"""Two command lines in bf16 over dp 2 x tp 2, whole: what is sharded leaves the losses alone."""

from pathlib import Path

import pytest

from core.comm import Group
from tests.recipe import rows, run_recipe

STEPS = 4
LOSS, NORM = 2**-11, 2**-8
ONE = Group.single("world")
LINE = (
    *("--tensor-model-parallel-size", 2, "--use-distributed-optimizer"),
    *("--overlap-grad-reduce", "--overlap-param-gather", "--bf16", "--mock-data"),
)
LINES = {
    "optim": LINE,
    "optim_grads_params": (*LINE, "--data-parallel-sharding-strategy", "optim_grads_params"),
}


def curves(metrics: Path) -> tuple[list[float], list[float]]:
    """(losses, gradient norms)"""
    found = rows(metrics)
    return [row["lm_loss"] for row in found], [row["grad_norm"] for row in found]


def test_two_command_lines_train_alike(ranks, tmp_path):
    """To bfloat16's rounding, as each other and as one process in float32; all exit with 0."""
    found = {}
    for name, line in LINES.items():
        metrics = tmp_path / f"{name}.jsonl"
        flags = (*line, "--train-iters", STEPS, "--metrics-file", metrics)
        answers = ranks.run(run_recipe, *flags, size=4)
        assert [code for code, _ in answers] == [0] * 4
        assert "tp 2 x dp 2 x pp 1" in answers[0][1]
        sends_more = "--data-parallel-sharding-strategy optim_grads_params sends"
        assert (sends_more in answers[0][1]) == (name == "optim_grads_params")
        found[name] = curves(metrics)
    alone = tmp_path / "alone.jsonl"
    assert run_recipe(ONE, "--train-iters", STEPS, "--metrics-file", alone)[0] == 0
    losses, norms = curves(alone)
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.1
    for name, (its_losses, its_norms) in found.items():
        assert its_losses == pytest.approx(losses, rel=LOSS), name
        assert its_norms == pytest.approx(norms, rel=NORM), name
    assert found["optim_grads_params"][0] == pytest.approx(found["optim"][0], rel=2**-16)
