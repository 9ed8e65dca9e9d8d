"""scripts/gpu_check.py and scripts/bench_loss.py where there is no GPU."""

import json
import runpy
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from core.random import DropoutKeys
from scripts import gpu_check_training as training

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run(*command):
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_skips(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(SCRIPTS / "gpu_check.py"), run_name="__main__")
    assert not left.value.code
    said = capsys.readouterr().out
    assert "no GPU" in said and "8192 tokens, a rank of tp 8" in said
    assert "training: 20 steps of a small GPT, fp32 and bf16" in said


def test_its_checks_hold_on_the_torch_paths():
    """The same code on the CPU: a check that is wrong itself would cost time on a GPU."""
    script = runpy.run_path(str(SCRIPTS / "gpu_check.py"))
    script["check_loss"].__globals__["DEVICE"] = "cpu"
    lines = script["check_loss"](torch.bfloat16, 0.1, 1e-4, True)
    lines += script["check_probabilities"]() + script["check_pointwise"]()
    assert len(lines) > 40 and not [line for line in lines if line.startswith("BAD")]


@pytest.fixture(scope="module")
def exact() -> training.Curve:
    return training.train_curve("cpu", torch.float32)


def test_the_training_check_passes_on_the_cpu(monkeypatch, exact):
    """In float32 the same numbers; in bfloat16 others, within the limit and near it."""
    script = runpy.run_path(str(SCRIPTS / "gpu_check.py"))
    monkeypatch.setitem(script["check_training"].__globals__, "DEVICE", "cpu")
    made = partial(remembered, exact, training.train_curve)
    monkeypatch.setattr(training, "train_curve", made)
    same, short = script["check_training"]()
    assert same.startswith("ok ") and same.endswith(": 0.0e+00 0.0e+00 0.0e+00")
    assert short.startswith("ok ") and "bfloat16, limits 0 2e-03 3e-02: 0.0e+00 " in short
    loss, norm = map(float, short.split()[-2:])
    assert loss > 1e-4 and norm > 1e-3  # the float32 limits would not do
    assert exact.losses[-1] < 0.75 * exact.losses[0]  # it learns: no curve of noise is compared


def remembered(exact, train_curve, device, dtype, steps=training.STEPS):
    known = dtype == torch.float32 and steps == training.STEPS
    return exact if known else train_curve(device, dtype, steps)


def test_a_device_that_cannot_train_is_a_failed_check(monkeypatch, exact):
    """The machine's other checks are still worth running."""
    script = runpy.run_path(str(SCRIPTS / "gpu_check.py"))
    monkeypatch.setitem(script["check_training"].__globals__, "DEVICE", "no such device")
    broken = partial(remembered_on_cpu, exact, training.train_curve)
    monkeypatch.setattr(training, "train_curve", broken)
    lines = script["check_training"]()
    assert [line[:4] for line in lines] == ["BAD ", "BAD "] and "no such device" in lines[0]


def remembered_on_cpu(exact, train_curve, device, dtype, steps=training.STEPS):
    return exact if device == "cpu" else train_curve(device, dtype, steps)


def test_what_the_training_check_must_not_let_pass(monkeypatch, exact):
    def bad(got, dtype=torch.float32):
        good, errors = training.judged(got, exact, exact, training.LIMITS[dtype])
        return not good and errors

    def changed(values, factor):
        return [*values[:9], values[9] * factor, *values[10:]]

    assert not bad(exact)
    for dtype, limits in training.LIMITS.items():
        loss, norm = limits.loss, limits.norm
        assert bad(replace(exact, losses=changed(exact.losses, 1 - 1.1 * loss)), dtype)
        assert not bad(replace(exact, losses=changed(exact.losses, 1 - 0.9 * loss)), dtype)
        assert bad(replace(exact, norms=changed(exact.norms, 1 + 1.1 * norm)), dtype)
        assert bad(replace(exact, losses=changed(exact.losses, float("nan"))), dtype)
    first = exact.initial[0].clone()
    first[1000] = torch.nextafter(first[1000], torch.tensor(1.0))
    assert bad(replace(exact, initial=[first, *exact.initial[1:]])) == [1, 0.0, 0.0]

    # masks of another seed, as a device whose hash is wrong would make them
    keys = DropoutKeys.rows
    monkeypatch.setattr(
        DropoutKeys, "rows", lambda self, *place: keys(replace(self, seed=self.seed + 1), *place)
    )
    assert bad(training.train_curve("cpu", torch.float32), torch.bfloat16)


def test_bench_loss(tmp_path):
    said = run(
        SCRIPTS / "bench_loss.py", "--tokens", 64, "--hidden", 16, "--vocab", 512, "--rounds", 1,
        "--threads", 1, "--only", "floor", "pipelined", "unfused", "--json", tmp_path / "out.json",
    )  # fmt: skip
    results = json.loads((tmp_path / "out.json").read_text())
    assert "pipelined" in said and results["floor"]["wall_s"] > 0
    assert results["pipelined"]["loss"] == pytest.approx(results["unfused"]["loss"], rel=1e-6)
