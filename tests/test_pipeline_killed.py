"""A rank that is killed in the middle of a schedule ends the run in seconds, its cause last: its
neighbours wait for tensors that will never come."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.core.launch.test_supervise import ROOT, clean_environ

FLAGS = """--nproc 3 --pipeline-model-parallel-size 3 --mock-data --train-iters 100000
    --num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 50
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --eval-iters 0
    --log-interval 1000""".split()


def rank_of(pid: int) -> str | None:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = [pair[5:] for pair in pairs if pair.startswith(b"RANK=")]
    return found[0].decode() if found else None


def children(pid: int) -> dict[str, int]:
    """rank -> pid"""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {rank: int(child) for child in pids if (rank := rank_of(int(child))) is not None}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for ranks in /proc")
def test_a_killed_stage_ends_the_run(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *FLAGS, "--metrics-file", str(metrics)],
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert process.poll() is None and time.monotonic() < deadline, "no third step yet"
            time.sleep(0.1)
        os.kill(children(process.pid)["1"], signal.SIGKILL)
        began = time.monotonic()
        _, errors = process.communicate(timeout=120)
        assert time.monotonic() - began < 45  # with a machine that stands still meanwhile
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 137
    last = errors.rstrip().splitlines()[-1]
    assert "rank 1" in last and "SIGKILL" in last, errors[-2000:]
