"""Values of the Triton kernels in Triton's interpreter, on a CPU. test_triton_values.py runs this
file in a process of its own with TRITON_INTERPRET=1, which must be set before Triton is imported.

float32 and float16; bf16 where a kernel casts on load (the interpreter truncates where a GPU
rounds, hence twice the tolerance). Races and TF32 errors are not to be seen here.
"""

import importlib

import pytest
import torch

from kernels import gpu, linear_cross_entropy_triton
from kernels.dropout_add import bias_dropout_add
from kernels.linear_cross_entropy import LossTerms, TokenGradient, TorchLogits
from kernels.linear_cross_entropy_triton import TritonLogits
from tests.kernels import formulas
from tests.kernels.test_pointwise import CASES, KEYS, B, H, S, wide_residual

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
    limits = {torch.float32: 2e-6, torch.float16: 1e-3}
    if name in ("swiglu", "add_rms_norm"):
        limits[torch.bfloat16] = 1.6e-2
    for dtype, limit in limits.items():
        typed = [
            x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for x in operands
        ]
        exact = formulas.gradients(formula, *formulas.double(typed))
        got = formulas.gradients(function, *typed)
        assert max(formulas.errors(got, exact)) < limit, dtype


def test_a_wide_residual_loses_nothing():
    (y, dx, dbias, dresidual), exact = wide_residual(0.3)
    assert (y.dtype, dx.dtype, dresidual.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    errors = formulas.errors([y, dx, dbias, dresidual], exact)
    assert max(errors[0], errors[3]) < 1e-6
    assert max(errors) < 2**-8


def test_dropout_masks_are_the_same_bits():
    x, zeros = torch.ones(S, B, H), torch.zeros(S, B, H)
    keys = KEYS * -7_777_777_777
    y = bias_dropout_add(x, None, zeros, keys, 0.4)
    assert torch.equal(y > 0, formulas.keep_mask(keys, H, 0.4))


# ---- the output loss -----------------------------------------------------------------------------

SHAPES = [
    (45, 72, 150),  # by descriptor, where rows are on 16 bytes
    (45, 70, 150),  # by pointer, hidden size no multiple of its tile
    (33, 64, 96),  # whole tiles
    (1, 8, 5),  # one token, one partial tile
]


def loss_operands(shape, dtype):
    n, h, v = shape
    make = torch.Generator().manual_seed(n + h + v)
    hidden, weight = (torch.randn(k, h, generator=make).to(dtype) for k in (n, v))
    bias = torch.randn(v, generator=make)
    target = torch.randint(-v // 2, v, (n,), generator=make).clamp(min=-1)  # a third not mine
    return hidden, weight, bias, target


ALL = {"label_smoothing": 0.1, "z_loss": 1e-2, "bias": True}
LOSS_CASES = [
    *((shape, torch.float32, ALL) for shape in SHAPES),
    (SHAPES[0], torch.float32, {}),
    *((shape, torch.float16, ALL) for shape in SHAPES[:2]),
    (SHAPES[0], torch.bfloat16, {}),
]


@pytest.mark.parametrize("shape, dtype, options", LOSS_CASES)
def test_output_loss(shape, dtype, options):
    """Both ways to the gradient against the torch path on the same operands in float64."""
    n, h, v = shape
    hidden, weight, bias, target = loss_operands(shape, dtype)
    bias = bias if options.get("bias") else None
    terms = LossTerms(v, options.get("label_smoothing", 0.0), options.get("z_loss", 0.0))
    exact = TorchLogits(weight.double(), bias, terms)
    kernels = TritonLogits(weight, bias, terms)
    limit = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]

    stats = exact.statistics(hidden.double(), target)
    slot = kernels.slot(n + 3)
    both = kernels.statistics(hidden, target), kernels.exponentials(hidden, target, slot)
    for name in ("lse", "score", "target", "top"):
        for got in both:
            wanted = getattr(stats, name)
            assert (getattr(got, name) - wanted).norm() <= 1e-5 * (1 + wanted.norm())

    weights = torch.linspace(-1, 1, n)
    tokens = TokenGradient(stats.lse + 0.25, weights.double())
    single = TokenGradient(tokens.lse.float(), weights)

    def outputs(kind, wide):
        return {
            "dhidden": torch.full((n, h), 9.0, dtype=kind),
            "dweight": torch.ones(v, h, dtype=wide),
            "dbias": torch.ones(v, dtype=wide),
        }

    reference = outputs(torch.float64, torch.float64)
    exact.recomputed_gradient(hidden.double(), target, tokens, **reference)
    again, at_once = outputs(dtype, torch.float32), outputs(dtype, torch.float32)
    kernels.recomputed_gradient(hidden, target, single, **again)
    kernels.gradient(slot, hidden, target, single, **at_once)
    for got in (again, at_once):
        for name, value in got.items():
            offset = 0 if name == "dhidden" else 1
            error = (value - reference[name]).norm() / (reference[name] - offset).norm()
            assert error < limit, (name, float(error))


def test_recomputed_in_several_tiles(monkeypatch):
    """Columns 8 at a time, so that every slice of the weight begins inside the vocabulary."""
    hidden, weight, bias, target = loss_operands((20, 16, 50), torch.float32)
    logits = TritonLogits(weight, bias, LossTerms(50))
    tokens = TokenGradient(torch.full((20,), 5.0), torch.ones(20))
    results = []
    for size, fresh in ((1 << 30, False), (1, True)):
        monkeypatch.setattr(linear_cross_entropy_triton, "GRADIENT_BYTES", size)
        dweight = torch.full((50, 16), torch.nan if fresh else 0.0)
        out = {"dhidden": torch.empty(20, 16), "dweight": dweight}
        logits.recomputed_gradient(hidden, target, tokens, dbias=None, fresh=fresh, **out)
        results.append(out)
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


def test_a_banned_tile_and_an_empty_shard():
    """A tile of entries that a bias of -inf bans, and a rank that holds nothing but padding."""
    hidden, weight, bias, target = loss_operands((5, 16, 96), torch.float32)
    bias[32:64] = float("-inf")
    target[:] = 3
    logits = TritonLogits(weight, bias, LossTerms(96))
    exact = torch.logsumexp(hidden @ weight.T + bias, 1)
    slot = logits.slot(5)
    for stats in (logits.statistics(hidden, target), logits.exponentials(hidden, target, slot)):
        torch.testing.assert_close(stats.lse, exact)
    dhidden = torch.empty(5, 16)
    tokens = TokenGradient(exact, torch.ones(5))
    logits.gradient(slot, hidden, target, tokens, dhidden=dhidden, dweight=None, dbias=None)
    assert dhidden.isfinite().all()
    nothing = TritonLogits(weight[:0], None, LossTerms(96))
    slot = nothing.slot(5)
    assert (nothing.exponentials(hidden, target - 9, slot).lse == float("-inf")).all()
    nothing.gradient(slot, hidden, target - 9, tokens, dhidden=dhidden, dweight=None, dbias=None)
    assert not dhidden.any()
