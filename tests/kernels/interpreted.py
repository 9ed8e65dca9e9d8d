"""Values of the Triton kernels in Triton's interpreter, on a CPU. test_triton_values.py runs this
file in a process of its own with TRITON_INTERPRET=1, which must be set before Triton is imported.

float32 and float16; bf16 where a kernel casts on load (the interpreter truncates where a GPU
rounds, hence twice the tolerance). Races and TF32 errors are not to be seen here.
"""

import importlib

import pytest
import torch

from kernels import gpu
from kernels.dropout_add import bias_dropout_add
from tests.kernels import formulas
from tests.kernels.test_pointwise import CASES, KEYS, B, H, S

# 1 / (1 + exp(-x)) is 0 where exp overflows, as it should be
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

POINTWISE = [
    "bias_gelu", "dropout_add", "layer_norm", "masked_softmax", "rms_norm", "rotary", "swiglu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def triton_for_all(monkeypatch):
    assert gpu.INTERPRETED, "run with TRITON_INTERPRET=1"
    for name in POINTWISE:
        module = importlib.import_module(f"kernels.{name}")
        monkeypatch.setattr(module, "use_triton", lambda *tensors: True)


@pytest.mark.parametrize("name", CASES)
def test_pointwise(name):
    function, formula, operands = CASES[name]
    for dtype, limit in ((torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 1.6e-2)):
        typed = [
            x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for x in operands
        ]
        exact = formulas.gradients(formula, *formulas.double(typed))
        got = formulas.gradients(function, *typed)
        assert max(formulas.errors(got, exact)) < limit, dtype


def test_dropout_masks_are_the_same_bits():
    x, zeros = torch.ones(S, B, H), torch.zeros(S, B, H)
    keys = KEYS * -7_777_777_777
    y = bias_dropout_add(x, None, zeros, keys, 0.4)
    assert torch.equal(y > 0, formulas.keep_mask(keys, H, 0.4))
