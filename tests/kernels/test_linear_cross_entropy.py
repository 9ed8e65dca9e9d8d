"""One rank's logits in tiles and blocks: what a small vocabulary in one tile would not show.

The loss itself is tested in tests/core/tensor_parallel/test_output_loss.py.
"""

import pytest
import torch

from kernels import linear_cross_entropy as lce
from kernels.linear_cross_entropy import LossTerms, TokenGradient, TorchLogits, local_target

N, H, V = 11, 16, 50


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 7 columns and 64 rows of weight, blocks of 3 tokens: none divides its whole."""
    monkeypatch.setattr(lce, "TILE_BYTES", 7 * N * 8)
    monkeypatch.setattr(lce, "UPCAST_BYTES", 1)
    monkeypatch.setattr(lce, "BLOCK_BYTES", 3 * V * 8)


def operands(dtype=torch.float64):
    torch.manual_seed(3)
    hidden, weight, bias = torch.randn(N, H) * 3, torch.randn(V, H), torch.randn(V)
    target = local_target(torch.randint(0, V + 20, (N,)), 10, V, None)
    return *(x.to(dtype) for x in (hidden, weight, bias)), target


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_statistics_over_many_tiles(softcap):
    hidden, weight, bias, target = operands()
    terms = LossTerms(V, label_smoothing=0.1, softcap=softcap)
    logits = hidden @ weight.T + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    mine = target >= 0
    at_target = torch.where(mine, logits.gather(1, target.clamp(min=0)[:, None])[:, 0], 0)
    lse = torch.logsumexp(logits, 1)
    head = TorchLogits(weight, bias, terms)
    stats = head.statistics(hidden, target, entropy=True)
    both = head.exponentials(hidden, target, head.slot(N + 4))
    for got in (stats, both):
        torch.testing.assert_close(got.lse, lse)
        torch.testing.assert_close(got.target, at_target)
        torch.testing.assert_close(got.score, 0.9 * at_target + 0.1 / V * logits.sum(1))
    torch.testing.assert_close(stats.top, logits.amax(1))
    mean = (torch.softmax(logits, 1) * logits).sum(1)
    torch.testing.assert_close(stats.mean, mean)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing, softcap", [(0.0, None), (0.1, None), (0.1, 4.0)])
def test_gradients_of_both_ways_agree(dtype, smoothing, softcap):
    """The same operands in float64 give the exact answer; one rounding is allowed."""
    hidden, weight, bias, target = operands(dtype)
    terms = LossTerms(V, smoothing, 1e-2, softcap)
    results = []
    for kind in (dtype, torch.float64):
        h, w, b = hidden.to(kind), weight.to(kind), bias.to(kind)
        head = TorchLogits(w, b, terms)
        lse = head.statistics(h, target).lse + 0.25  # other ranks' share
        tokens = TokenGradient(lse, torch.linspace(-1, 1, N, dtype=lse.dtype))
        for recompute in (True, False):
            out = {
                "dhidden": torch.full((N, H), 9.0, dtype=kind),
                "dweight": torch.ones(V, H, dtype=lse.dtype),
                "dbias": torch.ones(V, dtype=lse.dtype),
            }
            if recompute:
                head.recomputed_gradient(h, target, tokens, **out)
            else:
                slot = head.slot(N)
                head.exponentials(h, target, slot)
                head.gradient(slot, h, target, tokens, **out)
            results.append(out)
    exact = results[2]
    for out in results:
        for name, value in out.items():
            rounding = torch.finfo(value.dtype).eps
            error = (value.double() - exact[name]).norm() / exact[name].norm()
            assert error < 8 * max(rounding, 2e-7 if dtype != torch.float64 else 0), name


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients_of_both_ways_are_autograds(smoothing):
    *leaves, target = operands()
    hidden, weight, bias = (x.requires_grad_() for x in leaves)
    logits, weights = hidden @ weight.T + bias, torch.linspace(-1, 1, N).double()
    lse = torch.logsumexp(logits, 1)
    at_target = logits.gather(1, target.clamp(min=0)[:, None])[:, 0]
    score = (1 - smoothing) * torch.where(target >= 0, at_target, 0)
    score = score + smoothing / V * logits.sum(1)
    (weights * (lse - score + 1e-2 * lse.square())).sum().backward()
    head = TorchLogits(weight, bias, LossTerms(V, smoothing, 1e-2))
    tokens, slot = TokenGradient(lse.detach(), weights), head.slot(N)
    for recompute in (True, False):
        out = {
            "dhidden": torch.empty(N, H).double(),
            "dweight": torch.zeros(V, H).double(),
            "dbias": torch.zeros(V).double(),
        }
        if recompute:
            head.recomputed_gradient(hidden.detach(), target, tokens, **out)
        else:
            head.exponentials(hidden.detach(), target, slot)
            head.gradient(slot, hidden.detach(), target, tokens, **out)
        for got, leaf in zip(out.values(), (hidden, weight, bias), strict=True):
            torch.testing.assert_close(got, leaf.grad, rtol=1e-10, atol=1e-12)


def test_a_token_of_weight_zero_leaves_no_trace():
    hidden, weight, bias, target = operands()
    head = TorchLogits(weight, bias, LossTerms(V, 0.1, 1e-2))
    tokens = TokenGradient(head.statistics(hidden, target).lse, torch.zeros(N).double())
    dhidden, dweight = torch.ones(N, H).double(), torch.zeros(V, H).double()
    head.recomputed_gradient(
        hidden, target, tokens, dhidden=dhidden, dweight=dweight, dbias=None
    )
    assert not dhidden.any() and not dweight.any()


@pytest.mark.parametrize("large", [0, 1, N - 1])
@pytest.mark.parametrize("factor", [100.0, -100.0])
def test_logits_too_large_for_plain_exponentials(large, factor, monkeypatch):
    """Wherever the first such token is: exp(z) leaves its range, and the largest is subtracted."""
    monkeypatch.setattr(lce, "BLOCK_BYTES", 1)  # a row at a time
    hidden, weight, _, target = operands(torch.float32)
    weight = weight.abs()
    hidden[large] = factor * hidden[large].abs()  # its logits are all above 88, or all below -88
    head = TorchLogits(weight, None, LossTerms(V))
    slot = head.slot(N)
    stats = head.exponentials(hidden, target, slot)
    assert not head.plain
    exact = torch.logsumexp(hidden.double() @ weight.double().T, 1)
    torch.testing.assert_close(stats.lse.double(), exact, rtol=2e-6, atol=0)
    tokens = TokenGradient(exact.float(), torch.ones(N))
    out = {"dhidden": torch.empty(N, H), "dweight": torch.zeros(V, H)}
    head.gradient(slot, hidden, target, tokens, dbias=None, **out)
    assert all(gradient.isfinite().all() for gradient in out.values())


def test_minus_infinite_logits():
    """A bias of -inf bans an entry; tiles in which every entry is banned give no NaN."""
    hidden, weight, bias, target = operands()
    bias[:20] = float("-inf")
    target = torch.full_like(target, 30)
    head = TorchLogits(weight, bias, LossTerms(V))
    exact = torch.logsumexp(hidden @ weight.T + bias, 1)
    slot = head.slot(N)
    for stats in (head.statistics(hidden, target), head.exponentials(hidden, target, slot)):
        torch.testing.assert_close(stats.lse, exact)
    out = {"dhidden": torch.empty(N, H).double(), "dweight": torch.zeros(V, H).double()}
    tokens = TokenGradient(exact, torch.ones(N).double())
    head.gradient(slot, hidden, target, tokens, dbias=None, **out)
    assert out["dhidden"].isfinite().all() and not out["dweight"][:20].any()
