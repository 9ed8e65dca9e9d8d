"""pretrain_bert.py: every layout's numbers equal one process's; sentences, pairs, masks from files;
what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pretrain_bert
from core.checkpoint.reader import open_checkpoint
from core.comm import Group
from core.config import parse
from data.indexed import IndexedBuilder
from tests.recipe import assert_same_bits, contents, rows, run_recipe

ROOT = Path(__file__).parents[1]
ALONE = Group.single("world")
TP2 = ("--tensor-model-parallel-size", 2)
SP2 = (*TP2, "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", 2)
DROPOUT = ("--attention-dropout", 0.1, "--hidden-dropout", 0.1)


def run(ranks, size: int, *flags: object) -> str:
    """A run that must succeed; returns what rank 0 printed."""
    if size == 1:
        results = [run_recipe(ALONE, *flags, script="pretrain_bert")]
    else:
        results = ranks.run(run_recipe, *flags, size=size, script="pretrain_bert")
    assert [code for code, _ in results] == [0] * size
    return results[0][1]


# ---- layouts -------------------------------------------------------------------------------------

SHAPE = ("--fp64", "--num-layers", 4, "--train-iters", 3, "--eval-iters", 1, *DROPOUT)
LAYOUTS = {
    "dp2": (2, ("--micro-batch-size", 4)),
    "tp2": (2, TP2),
    "tp2-sp": (2, SP2),
    "pp2": (2, PP2),
    "pp2-zb": (2, (*PP2, "--pipeline-schedule", "zb_h1")),
    "dp2-tp2-sp": (4, (*SP2, "--micro-batch-size", 1)),
    "pp2-tp2-sp": (4, (*PP2, *SP2)),
    "pp2-dp2-chunks": (4, (*PP2, "--num-virtual-stages-per-pipeline-rank", 2)),
}
MODELS = {
    "post": (),
    "pre-rope": ("--norm-placement", "pre", "--position-embedding-type", "rope"),
}
_references: dict[str, list[dict]] = {}


def assert_same_numbers(found: list[dict], wanted: list[dict]) -> None:
    for mine, one in zip(found, wanted, strict=True):
        assert mine.keys() == one.keys()
        for name, value in one.items():
            known = value if isinstance(value, str) else pytest.approx(value, rel=1e-12, abs=0)
            assert mine[name] == known, f"{name} of {one}"


def reference(ranks, folder: Path, model: str) -> list[dict]:
    if model not in _references:
        path = folder / f"{model}.jsonl"
        run(ranks, 1, *SHAPE, *MODELS[model], "--metrics-file", path)
        _references[model] = [*rows(path), *rows(path, "eval")]
    return _references[model]


@pytest.mark.parametrize(
    ("model", "name"),
    [*(("post", name) for name in LAYOUTS), ("pre-rope", "pp2-tp2-sp"), ("pre-rope", "dp2-tp2-sp")],
)
def test_every_layout_equals_one_process(ranks, tmp_path, model, name):
    """Both losses, the norm of the gradients and the validation: C028 for two losses at once."""
    size, layout = LAYOUTS[name]
    path = tmp_path / "m.jsonl"
    run(ranks, size, *SHAPE, *MODELS[model], *layout, "--metrics-file", path)
    found = [*rows(path), *rows(path, "eval")]
    wanted = reference(ranks, tmp_path, model)
    assert [row["kind"] for row in found] == ["train"] * 3 + ["eval"] * 2
    assert_same_numbers(found, wanted)
    assert len({row["lm_loss"] for row in found}) == len({row["sop_loss"] for row in found}) == 5


def test_the_losses_fall(ranks, tmp_path):
    path = tmp_path / "m.jsonl"
    said = run(ranks, 1, "--train-iters", 25, "--lr", 3e-3, "--metrics-file", path)
    losses = [row["lm_loss"] for row in rows(path)]
    assert losses[-1] < losses[0] - 0.3
    assert " | sop loss: " in said
    assert rows(path)[0]["tokens"] == 8 * 16
    assert 8 <= rows(path)[0]["masked_tokens"] <= 8 * 4


def test_a_resumed_run_equals_the_unbroken_one(ranks, tmp_path):
    """Saved at tp 2 x pp 2, where the table lies on both stages, and its heads on the last."""
    flags = (*DROPOUT, *PP2, *SP2, "--train-iters", 4, "--fp64")
    for name, steps in (("unbroken", ((),)), ("broken", (("--exit-interval", 2), ()))):
        folder = tmp_path / name
        for more in steps:
            load = ("--load", folder) if folder.exists() else ()
            record = ("--save", folder, "--metrics-file", f"{folder}.jsonl")
            run(ranks, 4, *flags, *more, *load, *record)
    unbroken = rows(tmp_path / "unbroken.jsonl")
    assert rows(tmp_path / "broken.jsonl") == unbroken
    assert_same_bits(contents(tmp_path / "broken"), contents(tmp_path / "unbroken"))
    load = ("--load", tmp_path / "broken", "--ckpt-step", 2)
    alone = (*load, "--metrics-file", tmp_path / "one.jsonl")
    run(ranks, 1, *DROPOUT, "--train-iters", 4, "--fp64", *alone)
    assert_same_numbers(rows(tmp_path / "one.jsonl"), unbroken[2:])
