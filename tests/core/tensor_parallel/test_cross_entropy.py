"""Cross entropy over a cut vocabulary against a dense formula in float64."""

import pytest
import torch
import torch.nn.functional as F

from core.comm import Group, Ledger
from core.tensor_parallel import cross_entropy as module
from core.tensor_parallel import vocab_parallel_cross_entropy
from tests.core.tensor_parallel.cuts import cut, gradients, leaf, whole
from tests.ranks import RankPool

S, B = 6, 2
SIZES = pytest.mark.parametrize("size", [1, 2, 4])
close = torch.testing.assert_close


def dense_loss(logits, target, smoothing):
    """The target gets 1 - smoothing, every other word an equal share of the rest."""
    k = logits.shape[-1]
    wanted = torch.full_like(logits, smoothing / (k - 1))
    wanted.scatter_(-1, target.unsqueeze(-1), 1 - smoothing)
    return -(wanted * F.log_softmax(logits, dim=-1)).sum(-1)


def problem(vocab, padded, dtype=torch.float64):
    logits = 4 * whole(S, B, padded)
    logits[..., vocab:] = 50  # what stands in padding columns must not matter
    target = torch.arange(S * B).view(S, B) * 5 % vocab
    return logits.to(dtype), target, whole(S, B, seed=3)


def dense(vocab, padded, smoothing):
    logits, target, weights = problem(vocab, padded)
    real = leaf(logits[..., :vocab])
    loss = dense_loss(real, target, smoothing)
    (grad,) = gradients(loss, weights, real)
    return loss.detach(), F.pad(grad, (0, padded - vocab))


def check(world, vocab, padded, smoothing, dtype, tolerance):
    logits, target, weights = problem(vocab, padded, dtype)
    loss, grad = dense(vocab, padded, smoothing)
    mine = leaf(cut(logits, world, -1))
    kept = mine.detach().clone()
    out = vocab_parallel_cross_entropy(mine, target, smoothing, world, vocab_size=vocab)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(out.detach().double(), loss, **tolerance)
    (dmine,) = gradients(out, weights.to(out.dtype), mine)
    close(dmine.double(), cut(grad, world, -1), **tolerance)
    assert torch.equal(mine.detach(), kept), "the logits were changed"
    return out.detach()


EXACT = {"rtol": 1e-12, "atol": 1e-13}


@SIZES
@pytest.mark.parametrize(("vocab", "padded"), [(8, 8), (9, 12), (5, 8), (3, 8)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_c018_loss_and_gradient_are_those_of_the_whole_vocabulary(
    ranks: RankPool, size: int, vocab: int, padded: int, smoothing: float
) -> None:
    """NVIDIA/Megatron-LM#737: smoothing used the size and mean of the local slice, so ranks
    disagreed. With 3 of 8 columns real and four ranks, two ranks hold nothing but padding."""
    losses = ranks.run(check, vocab, padded, smoothing, torch.float64, EXACT, size=size)
    assert all(torch.equal(loss, losses[0]) for loss in losses)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, {"rtol": 2e-6, "atol": 2e-6}),
        (torch.bfloat16, {"rtol": 2**-7, "atol": 2**-4}),
    ],
)
def test_narrow_logits_are_added_up_in_fp32(ranks: RankPool, dtype, tolerance) -> None:
    ranks.run(check, 9, 12, 0.1, dtype, tolerance)


def check_sizes(world, rows, vocab):
    """More than one block of rows, and a block of a single row."""
    logits, target = leaf(whole(rows, vocab)), torch.arange(rows) % vocab
    mine = leaf(cut(logits.detach(), world, -1))
    loss = vocab_parallel_cross_entropy(mine, target, tp_group=world)
    wanted = F.cross_entropy(logits, target, reduction="none")
    close(loss.detach(), wanted.detach())
    (grad,) = gradients(wanted, torch.tensor(1.0), logits)
    (dmine,) = gradients(loss, torch.tensor(1.0), mine)
    close(dmine, cut(grad, world, -1))


def test_blocks_of_rows(monkeypatch) -> None:
    for block in (1, 24, 100):
        monkeypatch.setitem(module.BLOCK, "cpu", block)
        check_sizes(Group.single(), 7, 8)


def check_minus_infinity(world):
    """A masked logit has probability 0, also where a rank has nothing but masked ones."""
    logits = whole(S, 8)
    logits[:, 4:] = -torch.inf
    target = torch.arange(S) % 4
    mine = leaf(cut(logits, world, -1))
    loss = vocab_parallel_cross_entropy(mine, target, tp_group=world)
    close(loss.detach(), F.cross_entropy(logits, target, reduction="none"))
    (grad,) = gradients(loss, torch.tensor(1.0), mine)
    assert grad.isfinite().all()


@SIZES
def test_masked_logits(ranks: RankPool, size: int) -> None:
    ranks.run(check_minus_infinity, size=size)


def calls(world, smoothing):
    group = Group("tp", world.ranks, world.rank, Ledger(), world.handle)
    mine = leaf(cut(whole(S, B, 8, dtype=torch.float32), world, -1))
    target = torch.zeros(S, B, dtype=torch.int64)
    vocab_parallel_cross_entropy(mine, target, smoothing, group).sum().backward()
    return [(e.op, e.tag, e.dtype, e.numel) for e in group.ledger.events()]


def test_ledger_has_two_reductions(ranks: RankPool) -> None:
    n = S * B
    for smoothing, sums in ((0.0, 2), (0.1, 3)):
        assert ranks.run(calls, smoothing)[0] == [
            ("all_reduce", "cross_entropy.max", "float32", n),
            ("all_reduce", "cross_entropy.sums", "float32", sums * n),
        ]


def test_value_needs_no_gradient() -> None:
    logits, target, _ = problem(8, 8)
    with_grad = vocab_parallel_cross_entropy(leaf(logits), target).detach()
    with torch.no_grad():
        assert torch.equal(vocab_parallel_cross_entropy(logits, target), with_grad)
    with torch.inference_mode():
        assert torch.equal(vocab_parallel_cross_entropy(logits, target), with_grad)


def test_backward_twice_gives_the_same() -> None:
    logits, target, _ = problem(8, 8)
    logits = leaf(logits)
    loss = vocab_parallel_cross_entropy(logits, target).sum()
    loss.backward(retain_graph=True)
    first = logits.grad.clone()
    loss.backward()
    close(logits.grad, 2 * first)


def test_refusals() -> None:
    logits, target, _ = problem(8, 8)
    with pytest.raises(ValueError, match=r"need a target of shape \(6, 2\), not \(2, 6\)"):
        vocab_parallel_cross_entropy(logits, target.t())
    with pytest.raises(ValueError, match=r"label_smoothing 1.0 must be in \[0, 1\)"):
        vocab_parallel_cross_entropy(logits, target, 1.0)
