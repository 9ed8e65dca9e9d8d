"""Freed memory stays with the process, and products keep none: in processes of their own."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.process_memory import share_freed_memory

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import resource, sys
import torch
from core.process_memory import keep_freed_memory

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


PRODUCTS = """
import ctypes, os, sys
from core.process_memory import share_freed_memory
if sys.argv[1] == "shared":
    share_freed_memory(os.environ)
import torch
a = torch.ones(1500, 1500)
a @ a
mkl = ctypes.CDLL("libtorch_cpu.so")
kept = getattr(mkl, "mkl_serv_mem_stat", None)
print(kept(ctypes.byref(ctypes.c_int())) if kept else None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="MKL's symbols are looked for in a .so")
def test_products_keep_no_memory():
    def kept(how: str) -> str:
        done = subprocess.run(
            ["env", "-u", "MKL_DISABLE_FAST_MM", sys.executable, "-c", PRODUCTS, how],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    usual, shared = kept("usual"), kept("shared")
    if usual != "None":  # a torch with MKL, where it can be asked
        assert int(shared) == 0 < int(usual)


BLOCKS = """
import ctypes
from core.process_memory import keep_freed_memory

class Counts(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in "arena a b c d e f used free top".split()]

keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype, library.mallinfo2.restype = ctypes.c_void_p, Counts
holes = [library.malloc(1000) for _ in range(30_000)]  # are filled: the next lie side by side
blocks = [(library.malloc(1000), library.malloc(1 << 20)) for _ in range(100)]
first = [small for small, _ in blocks[::14]]  # those that are freed first are the ones kept
rest = [block for pair in blocks for block in pair if block not in first]
for block in first + rest:
    library.free(ctypes.c_void_p(block))
before = library.mallinfo2().arena
for _ in range(2):
    library.malloc(24 << 20)
print((library.mallinfo2().arena - before) >> 20)
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc, from 2.33 on, counts them"
)
def test_large_blocks_grow_together_again():
    def grown(environ: dict[str, str]) -> int:
        """MiB that two blocks of 24 MiB need beyond the freed 100."""
        done = subprocess.run(
            [sys.executable, "-c", BLOCKS],
            cwd=ROOT, capture_output=True, text=True, check=True, env=environ,
        )  # fmt: skip
        return int(done.stdout)

    usual = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    shared = dict(usual)
    share_freed_memory(shared)
    assert grown(shared) < 24 <= grown(usual)
