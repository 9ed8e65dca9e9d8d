"""The pointwise kernels' torch paths, which CPUs run: values and gradients against the formulas.

The Triton kernels run the same comparisons in tests/kernels/interpreted.py.
"""

import pytest
import torch

from kernels.bias_gelu import bias_gelu
from kernels.dropout_add import bias_dropout_add
from kernels.layer_norm import add_layer_norm, layer_norm
from kernels.masked_softmax import scaled_masked_softmax
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import rotary
from kernels.stateless_mask import keep_mask
from kernels.swiglu import swiglu
from tests.kernels import formulas

S, B, H = 5, 3, 20
KEYS = torch.arange(S * B).view(S, B) * 0x1234_5678_9ABC
MASK = (torch.arange(6 * 7).view(1, 1, 6, 7) % 3 != 0).repeat(2, 1, 1, 1)
MASK[1, 0, 4] = False  # a query that may look at nothing


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def mask_for(x, masked):
    return MASK.to(x.device) if masked else None


ANGLE = normal(S, B, 4)
CASES = {
    "layer_norm": (layer_norm, formulas.layer_norm, [normal(S, B, H), normal(H), normal(H)]),
    "add_layer_norm": (
        add_layer_norm,
        lambda x, r, w, b: (formulas.layer_norm(x + r, w, b), x + r),
        [normal(S, B, H), normal(B, S, H).transpose(0, 1), normal(H), normal(H)],
    ),
    "rms_norm": (rms_norm, formulas.rms_norm, [normal(S, B, H), normal(H)]),
    "add_rms_norm": (
        add_rms_norm,
        lambda x, r, w: (formulas.rms_norm(x + r, w), x + r),
        [normal(S, B, H), normal(S, B, H) * 2, normal(H)],
    ),
    "bias_gelu": (bias_gelu, formulas.bias_gelu, [normal(S, B, H) * 3, normal(H)]),
    "gelu": (
        lambda x: bias_gelu(x), lambda x: formulas.bias_gelu(x, 0.0), [normal(S, B, H) * 3],
    ),
    "swiglu": (swiglu, formulas.swiglu, [normal(S, B, H) * 3]),
    "swiglu of a view": (
        lambda x: swiglu(x.transpose(0, 1)),
        lambda x: formulas.swiglu(x.transpose(0, 1)),
        [normal(S, B, H) * 3],
    ),
    "bias_dropout_add": (
        bias_dropout_add,
        formulas.bias_dropout_add,
        [normal(S, B, H), normal(H), normal(S, B, H), KEYS, 0.3],
    ),
    "dropout_add": (
        lambda x, r: bias_dropout_add(x, None, r, KEYS.to(x.device), 0.3),
        lambda x, r: formulas.bias_dropout_add(x, 0.0, r, KEYS.to(x.device), 0.3),
        [normal(S, B, H), normal(S, B, H)],
    ),
    "bias_add": (
        lambda x, b, r: bias_dropout_add(x, b, r, KEYS.to(x.device), 0.0),
        lambda x, b, r: x + b + r,
        [normal(S, B, H), normal(H), normal(S, B, H)],
    ),
    "bias_add in evaluation": (
        lambda x, b, r: bias_dropout_add(x, b, r, None, 0.5),
        lambda x, b, r: x + b + r,
        [normal(S, B, H), normal(H), normal(S, B, H)],
    ),
}  # fmt: skip
for interleaved in (False, True):
    for width in (8, 11):  # all of a head turns, or 8 channels of 11
        CASES[f"rotary {interleaved=} {width=}"] = (
            lambda x, i=interleaved: rotary(x, ANGLE.cos().to(x), ANGLE.sin().to(x), i),
            lambda x, i=interleaved: formulas.rotary(x, ANGLE.cos().to(x), ANGLE.sin().to(x), i),
            [normal(S, B, 2, width)],
        )
for causal in (False, True):
    for masked in (False, True):
        CASES[f"softmax {causal=} {masked=}"] = (
            lambda x, c=causal, m=masked: scaled_masked_softmax(x, mask_for(x, m), 0.3, c),
            lambda x, c=causal, m=masked: formulas.masked_softmax(x, mask_for(x, m), 0.3, c),
            [normal(2, 3, 6, 7) * 5],
        )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_formula(name, dtype):
    function, formula, operands = CASES[name]
    operands = [
        x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for x in operands
    ]
    exact = formulas.gradients(formula, *formulas.double(operands))
    got = formulas.gradients(function, *operands)
    assert all(g.dtype == dtype for g in got)
    limit = 1e-14 if dtype == torch.float64 else 1e-6
    assert max(formulas.errors(got, exact)) < limit


@pytest.mark.parametrize("name", CASES)
def test_low_precision_errs_no_more_than_plain_torch(name):
    function, formula, operands = CASES[name]
    operands = [
        x.bfloat16() if torch.is_tensor(x) and x.is_floating_point() else x for x in operands
    ]
    exact = formulas.gradients(formula, *formulas.double(operands))
    plain = formulas.errors(formulas.gradients(formula, *operands), exact)
    got = formulas.errors(formulas.gradients(function, *operands), exact)
    for mine, other in zip(got, plain, strict=True):
        assert mine <= 1.2 * max(other, 2**-9)


def test_the_comparison_bites():
    exact = formulas.gradients(formulas.swiglu, normal(S, B, H).double())
    wrong = formulas.gradients(lambda x: formulas.swiglu(x * (1 + 1e-5)), normal(S, B, H).double())
    assert min(formulas.errors(wrong, exact)) > 1e-6


def test_a_query_that_sees_nothing_gives_zeros():
    p = scaled_masked_softmax(normal(2, 4, 6, 7), MASK)
    assert not p[1, :, 4].any()
    rows = p.sum(-1)
    assert torch.allclose(rows, (rows > 0).float())


def wide_residual(p, **how):
    """(y, dx, dbias, dresidual) of x and bias in bf16 and a float32 residual, and the formula's."""
    x, bias = normal(S, B, H).bfloat16(), normal(H).bfloat16()
    residual = normal(B, S, H).view(S, B, H)
    exact = formulas.gradients(
        lambda x, b, r: formulas.bias_dropout_add(x, b, r, KEYS, p),
        *formulas.double([x, bias, residual]),
    )
    got = formulas.gradients(
        lambda x, b, r: bias_dropout_add(x * 1, b, r, KEYS, p, **how), x, bias, residual
    )
    return got, exact


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_wide_residual_loses_nothing(p, overwrite):
    (y, dx, dbias, dresidual), exact = wide_residual(p, overwrite=overwrite)
    assert (y.dtype, dresidual.dtype) == (torch.float32, torch.float32)
    assert (dx.dtype, dbias.dtype) == (torch.bfloat16, torch.bfloat16)
    errors = formulas.errors([y, dx, dbias, dresidual], exact)
    assert max(errors[0], errors[3]) < 1e-6
    assert max(errors) < 2**-8


@pytest.mark.parametrize("bias", [None, normal(H)], ids=["no bias", "bias"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_overwriting_gives_the_same_in_the_same_memory(p, bias):
    x, residual = normal(S, B, H), normal(B, S, H).view(S, B, H)
    kept = x.clone()
    usual = bias_dropout_add(x, bias, residual, KEYS, p)
    assert torch.equal(x, kept)
    y = bias_dropout_add(x, bias, residual, KEYS, p, overwrite=True)
    assert torch.equal(y, usual)
    assert y.data_ptr() == x.data_ptr()


def test_overwriting_what_a_backward_needs_is_an_error():
    leaf = normal(S, B, H).requires_grad_()
    x = leaf.exp()  # whose backward needs its value
    y = bias_dropout_add(x, normal(H), normal(S, B, H), overwrite=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_dropout_keeps_what_the_mask_says():
    zeros, ones = torch.zeros(S, B, H), torch.ones(S, B, H)
    y = bias_dropout_add(ones, None, zeros, KEYS, 0.25)
    assert torch.equal(y > 0, keep_mask(KEYS, H, 0.25))
    assert torch.all((y == 0) | (y == 1 / 0.75))


def test_what_is_kept_for_backward():
    """SwiGLU keeps its operand, RMSNorm that and a number per row, softmax its result, no more."""
    kept = []

    def pack(x):
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        x = normal(S, B, H).requires_grad_()
        swiglu(x)
        assert kept == [S * B * H]
        kept.clear()
        rms_norm(x, normal(H).requires_grad_())
        assert sorted(kept) == [S * B, H, S * B * H]
        kept.clear()
        scaled_masked_softmax(normal(2, 4, 6, 7).requires_grad_(), MASK)
        assert kept == [2 * 4 * 6 * 7]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: swiglu(torch.zeros(2, 3)), "even last dimension"),
        (lambda: rotary(normal(S, B, 2, 6), ANGLE, ANGLE), "do not fit"),
        (lambda: rotary(normal(S, 1, 2, 8), ANGLE, ANGLE), "do not fit"),
        (lambda: scaled_masked_softmax(normal(2, 4, 6, 7), MASK[:, 0]), "b, 1, q, k"),
        (lambda: scaled_masked_softmax(normal(2, 4, 6, 7), MASK.float()), "must be bool"),
        (
            lambda: bias_dropout_add(normal(S, B, H), None, normal(S, B, H), KEYS[:2], 0.1),
            "one per row",
        ),
        (
            lambda: bias_dropout_add(normal(S, B, H), None, normal(S, B, H), KEYS, 1.0),
            "dropout probability of 1.0",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
