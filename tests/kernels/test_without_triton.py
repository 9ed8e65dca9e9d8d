"""Without Triton, or with something else of that name, everything imports and runs in torch."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, types
sys.modules["triton"] = {stand_in}
import torch
from kernels import bias_gelu, dropout_add, gpu, layer_norm, masked_softmax, rms_norm
from kernels import rotary, swiglu
from core.tensor_parallel import vocab_parallel_linear_cross_entropy

assert gpu.triton is None and not gpu.use_triton(torch.ones(1))
x = torch.ones(2, 4, requires_grad=True)
y = swiglu.swiglu(layer_norm.layer_norm(x, torch.ones(4), torch.zeros(4)))
loss = vocab_parallel_linear_cross_entropy(y, torch.ones(3, 2), torch.tensor([0, 2]))
loss.backward()
print(float(loss.detach()))
"""


@pytest.mark.parametrize("stand_in", ["None", "types.ModuleType('triton')"])
def test_imports_and_runs(stand_in):
    program = PROGRAM.format(stand_in=stand_in)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(1.0986, abs=1e-4)  # log 3: all entries are alike
