"""scripts/gpu_check.py and scripts/bench_loss.py where there is no GPU."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run(*command):
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_skips():
    said = run(SCRIPTS / "gpu_check.py")
    assert "no GPU" in said and "8192 tokens, a rank of tp 8" in said


def test_its_checks_hold_on_the_torch_paths():
    """The same code on the CPU: a check that is wrong itself would cost time on a GPU."""
    script = runpy.run_path(str(SCRIPTS / "gpu_check.py"))
    script["check_loss"].__globals__["DEVICE"] = "cpu"
    lines = script["check_loss"](torch.bfloat16, 0.1, 1e-4, True)
    lines += script["check_probabilities"]() + script["check_pointwise"]()
    assert len(lines) > 40 and not [line for line in lines if line.startswith("BAD")]


def test_bench_loss(tmp_path):
    said = run(
        SCRIPTS / "bench_loss.py", "--tokens", 64, "--hidden", 16, "--vocab", 512, "--rounds", 1,
        "--threads", 1, "--only", "floor", "pipelined", "unfused", "--json", tmp_path / "out.json",
    )  # fmt: skip
    results = json.loads((tmp_path / "out.json").read_text())
    assert "pipelined" in said and results["floor"]["wall_s"] > 0
    assert results["pipelined"]["loss"] == pytest.approx(results["unfused"]["loss"], rel=1e-6)
