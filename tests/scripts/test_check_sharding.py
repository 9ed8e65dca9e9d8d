"""scripts/check_sharding.py: its list, that its verdict bites, and samples of its rows."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from scripts import check_sharding
from scripts.check_sharding import (
    LIMITS,
    MODELS,
    SAMPLES,
    SHARDED_BYTES,
    SHORT,
    STRATEGIES,
    Matrix,
    cases,
    layouts,
    main,
    memory_table,
    parse,
    weights_apart,
)
from tests.training import Layout, Run

LAYOUT = Layout(sharding="optim", micro_batch_size=8, global_batch_size=SAMPLES)
QKV = torch.arange(1.0, 97.0)  # of 4 heads: 8 queries, 8 keys, 8 values each
ONE = Run([4.0, 3.0], [2.0, 1.0], {}, {"a": torch.ones(2), "layers.0.qkv.bias": QKV})


def test_the_list():
    every = list(layouts())
    assert Counter(layout.sharding for _, layout in every) == dict.fromkeys(STRATEGIES, 16)
    assert len(set(every)) == 64 and {size for size, _ in every} == {2, 4, 8, 16}
    for size, layout in every:
        dp = size // (layout.tp * layout.pp)
        assert dp in (2, 4) and SAMPLES // (dp * layout.micro_batch_size) in (1, 4)
    whole = cases(parse([]))
    per_type = Counter(kind for _, kind, *_ in whole)  # a short type has nothing to say of no_shard
    assert per_type == {**dict.fromkeys(LIMITS, 2 * 64), **dict.fromkeys(SHORT, 2 * 48)}
    one = cases(parse(["--model", "llama", "--type", "fp16", "--only", "pp=2"]))
    assert {(name, kind, layout.pp) for name, kind, _, layout in one} == {("llama", "fp16", 2)}


def test_every_value_of_every_axis_is_in_the_quick_sample():
    sample = cases(parse(["--quick"]))
    assert {layout.sharding for *_, layout in sample} == set(STRATEGIES)
    assert {layout.tp for *_, layout in sample} == {layout.pp for *_, layout in sample} == {1, 2}
    assert {kind for _, kind, *_ in sample} == {*LIMITS, *SHORT}
    assert {name for name, *_ in sample} == set(MODELS)
    assert len({(size, layout.micro_batch_size) for _, _, size, layout in sample}) > 6


class Told(Matrix):
    """Runs that are given instead of made."""

    def __init__(self, alone: Run, no_shard: Run, found: Run) -> None:
        super().__init__(None, 2)
        self.one, self.no_shard, self.found = alone, no_shard, found

    def alone(self, name: str, kind: str) -> Run:
        return self.one

    def run(self, name: str, kind: str, size: int, layout: Layout) -> Run:
        return self.no_shard if layout.sharding == "no_shard" else self.found


def with_weight(name: str, place: int, factor: float) -> Run:
    value = ONE.final[name].clone()
    value[place] *= factor
    return replace(ONE, final={**ONE.final, name: value})


NAN, OTHER_NAN = (replace(ONE, norms=[2.0, float("nan")]) for _ in range(2))
NEAR, FAR = replace(ONE, losses=[4.0, 3.00001]), replace(ONE, losses=[4.0, 3.0001])
BITS = replace(ONE, losses=[4.0, 3.0 + 1e-15])


@pytest.mark.parametrize(
    ("kind", "no_shard", "found", "verdict"),  # one process has ONE
    [
        ("fp32", ONE, ONE, "holds"),
        ("fp32", ONE, NEAR, "holds"),
        ("fp32", ONE, FAR, "WRONG"),
        ("fp32", ONE, NAN, "WRONG"),
        ("fp32", ONE, replace(ONE, losses=[4.0]), "WRONG"),
        ("fp32", ONE, with_weight("a", 0, 1.001), "WRONG"),
        ("fp32", FAR, FAR, "WRONG"),  # one process is what it is held against
        ("fp64", ONE, BITS, "holds"),
        ("fp64", ONE, NEAR, "WRONG"),
        ("fp64", ONE, with_weight("layers.0.qkv.bias", 8, 1.001), "WRONG"),
        ("bf16", ONE, ONE, "bitwise"),
        ("bf16", FAR, FAR, "bitwise"),  # no_shard's bits, however far that is from float32
        ("bf16", FAR, NEAR, "holds"),  # nearer to no_shard than that is to float32
        ("bf16", NEAR, FAR, "WRONG"),
        ("bf16", ONE, NEAR, "WRONG"),
        ("bf16", NAN, OTHER_NAN, "WRONG"),  # not equal to itself, and nothing to measure by
        ("fp16", FAR, replace(FAR, norms=[2.0, 2.0]), "WRONG"),
    ],
)
def test_the_verdict(kind, no_shard, found, verdict):
    matrix = Told(ONE, no_shard, found)
    row = matrix.try_one("gpt2", kind, 2, LAYOUT)
    assert row.split()[-1] == verdict
    assert matrix.tally["wrong"] == (verdict == "WRONG") == 1 - matrix.tally["held"]
    assert matrix.tally["bitwise"] == (verdict == "bitwise")


def test_only_biases_of_keys_are_left_out_and_not_in_float64():
    model = MODELS["gpt2"]
    for place, seen in ((7, True), (8, False), (15, False), (16, True), (24 + 8, False)):
        found = with_weight("layers.0.qkv.bias", place, 2.0)
        assert (weights_apart(found, ONE, model, "fp32") > 0) == seen, place
        assert weights_apart(found, ONE, model, "fp64") > 0


@pytest.mark.parametrize(
    ("name", "kind", "size", "layout", "verdict"),
    [
        ("llama", "fp64", 4, replace(LAYOUT, sharding="optim_grads", pp=2), "holds"),
        ("gpt2", "bf16", 2, replace(LAYOUT, sharding="optim_grads_params"), "bitwise"),
    ],
)
def test_a_sample_holds(ranks, name, kind, size, layout, verdict):
    assert Matrix(ranks, 3).try_one(name, kind, size, layout).split()[-1] == verdict


@pytest.mark.parametrize(("found", "code", "said"), [(ONE, 0, "WRONG"), (FAR, 1, "1 wrong")])
def test_the_exit_code(monkeypatch, capsys, found, code, said):
    monkeypatch.setattr(check_sharding, "Matrix", lambda ranks, steps: Told(ONE, ONE, found))
    monkeypatch.setattr(check_sharding, "memory_table", lambda ranks: 0)
    monkeypatch.setattr(check_sharding, "cases", lambda args: [("gpt2", "bf16", 2, LAYOUT)])
    assert main([]) == code
    out = capsys.readouterr().out
    assert (said in out) == (code == 1)
    assert f"1 tried, {1 - code} held, {1 - code} of them bit for bit, {code} wrong" in out


def test_no_layout_is_bad_input(capsys):
    assert main(["--only", "pp=3"]) == 2
    assert "no layout holds 'pp=3'" in capsys.readouterr().err


def test_the_table_of_memory(ranks, monkeypatch):
    """What is held is the formula's; a formula that is three per cent off is seen."""
    monkeypatch.setattr(check_sharding, "STRATEGIES", ("optim_grads_params",))
    assert memory_table(ranks) == 0
    off = {"optim_grads_params": lambda *sizes: SHARDED_BYTES["optim_grads_params"](*sizes) * 1.03}
    monkeypatch.setattr(check_sharding, "SHARDED_BYTES", off)
    assert memory_table(ranks) == 3  # float32, bf16, fp16
