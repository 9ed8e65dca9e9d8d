"""Freed memory stays with the process: counted by page faults, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import resource, sys
import torch
from core.launch.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [torch.ones(1 << 20) for _ in range(8)]  # 8 x 4 MiB
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = faults()
told = keep_freed_memory()
faults()
print(told, usual, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be told")
def test_the_next_step_finds_the_memory_of_the_last():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    told, usual, kept = done.stdout.split()
    if told == "True":
        assert int(kept) < 100 < 10_000 < int(usual)  # 10 x 32 MiB are 81,920 pages
