"""scripts/check_checkpoints.py: its list, that its verdict bites, and a sample of its pairs."""

import pytest
import torch

from core.checkpoint.store import save
from core.comm import Group
from scripts.check_checkpoints import Trials, cases, changed, judge, pairs, parse
from tests.core.checkpoint.states import single
from tests.resumes import RESUMED


def test_the_list():
    assert len(cases(parse([]))) == 3 * len(pairs()) >= 40
    assert {saving for saving, _ in pairs()} == {loading for _, loading in pairs()} == set(RESUMED)
    quick = cases(parse(["--quick"]))
    assert {model for model, *_ in quick} == {"gpt2", "llama", "bert"} and len(quick) == 12
    assert all("pp4" in pair for pair in cases(parse(["--only", "pp4"])))


@pytest.mark.parametrize(
    ("curves", "limit", "unequal", "wrong"),
    [
        ([[4.0, 3.0]], 0.0, [], []),
        ([[4.0, 3.0], [4.0, 3.000001]], 1e-6, [], []),
        ([[4.0, 3.0], [4.0, 3.00001]], 1e-6, [], ["losses differ by more than 1e-06"]),
        ([[4.0, 3.0000000000000004]], 0.0, [], ["losses differ by more than 0"]),
        ([[4.0]], 1e-6, [], ["losses differ by more than 1e-06"]),
        ([[4.0, 3.0]], 0.0, ["a"], ["1 tensors are not what was saved: a"]),
    ],
)
def test_the_verdict(curves, limit, unequal, wrong):
    assert judge(curves, [4.0, 3.0], limit, unequal)[1] == wrong


def test_tensors_are_compared_bit_for_bit_and_by_name(tmp_path):
    alone, x = Group.single("world"), torch.ones(3)
    for name, tensors in (("a", {"x": x, "y": x}), ("b", {"x": x, "y": x + 1e-7, "z": x})):
        save(tmp_path / name, 1, [single(*item) for item in tensors.items()], {}, alone)
    assert changed(tmp_path / "a", tmp_path / "b") == ["y", "z"]


@pytest.mark.parametrize(
    ("model", "saving", "loading"),
    [
        ("gpt2", "tp2 pp2", "dp2 optim_grads_params"),
        ("llama", "dp2 optim_grads_params", "pp2 vpp2"),
        ("bert", "pp2 vpp2", "tp2 sp"),
        ("gpt2", "one", "one"),
    ],
)
def test_a_sample_holds(ranks, tmp_path, model, saving, loading):
    trials = Trials(tmp_path, ranks)
    assert trials.resume(model, saving, loading)[1] == []
