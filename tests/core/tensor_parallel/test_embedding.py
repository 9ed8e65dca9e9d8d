"""Vocabulary-parallel embedding: sharded equals a plain table, forward and gradient."""

import copy

import pytest
import torch
import torch.nn.functional as F

from core.comm import Group, Ledger
from core.tensor_parallel import VocabParallelEmbedding
from tests.core.tensor_parallel.cuts import cut, gradients, leaf, whole
from tests.ranks import RankPool

B, S, H, VOCAB, PADDED = 3, 8, 6, 10, 16
close = torch.testing.assert_close
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


def numbers():
    """Every id, some several times."""
    return (torch.arange(B * S) * 7 % VOCAB).view(B, S)


def dense():
    weight = leaf(whole(VOCAB, H, seed=1))
    y = F.embedding(numbers(), weight)
    dy = whole(B, S, H, seed=2)
    return weight.detach(), y.detach(), dy, *gradients(y, dy, weight)


def table(group, **options):
    layer = VocabParallelEmbedding(
        PADDED,
        H,
        vocab_size=VOCAB,
        tp_group=group,
        dtype=torch.float64,
        name="word",
        seed=1,
        **options,
    )
    local, logical = layer.weight.shard.local_slices(group.rank, group.size)
    with torch.no_grad():
        layer.weight[local] = whole(VOCAB, H, seed=1)[logical]
    return layer


def check(world, scatter, handed_on):
    _, y, dy, dw = dense()
    layer = table(world, reduce_scatter_embeddings=scatter)
    seen = []
    if handed_on:
        layer.weight.main_grad = torch.zeros_like(layer.weight)

        def add(param, grad, ids):
            assert param is layer.weight and grad.shape == (len(ids), H)
            seen.append(len(ids))
            param.main_grad.index_add_(0, ids, grad)

        layer.weight_grad = add
    out = layer(numbers())
    if scatter:
        y, dy = (cut(t.transpose(0, 1).contiguous(), world, 0) for t in (y, dy))
    close(out.detach(), y)
    (grad,) = gradients(out, dy, layer.weight)
    if handed_on:
        assert grad is None
        grad = layer.weight.main_grad
    local, logical = layer.weight.shard.local_slices(world.rank, world.size)
    close(grad[local], dw[logical])
    rest = torch.ones(len(grad), dtype=torch.bool)
    rest[local[0]] = False
    assert not grad[rest].any() and not layer.weight.detach()[rest].any(), "padding rows moved"
    return sum(seen)


@SIZES
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("handed_on", [False, True])
def test_embedding_equals_a_plain_table(
    ranks: RankPool, size: int, scatter: bool, handed_on: bool
) -> None:
    seen = ranks.run(check, scatter, handed_on, size=size)
    if handed_on:
        assert sum(seen) == B * S, "foreign ids must not be handed on"


def calls(world, scatter):
    group = Group("tp", world.ranks, world.rank, Ledger(), world.handle)
    layer = table(group, reduce_scatter_embeddings=scatter)
    layer(numbers()).sum().backward()
    return [(e.op, e.tag, e.numel) for e in group.ledger.events()]


def test_ledger(ranks: RankPool) -> None:
    n = B * S * H
    assert ranks.run(calls, False)[0] == [("all_reduce", "word", n)]
    assert ranks.run(calls, True)[0] == [
        ("reduce_scatter", "word", n),
        ("all_gather", "word.grad", n),
    ]


@pytest.mark.parametrize(("wrong", "shown"), [(-1, -1), (VOCAB, VOCAB), (PADDED + 5, PADDED + 5)])
def test_an_id_outside_the_vocabulary_is_named(wrong: int, shown: int) -> None:
    with pytest.raises(IndexError, match=f"token id {shown} is outside the vocabulary of {VOCAB}"):
        table(Group.single())(torch.tensor([[1, wrong]]))


def test_no_ids_at_all() -> None:
    y = table(Group.single())(torch.zeros(2, 0, dtype=torch.int64))
    assert y.shape == (2, 0, H)
    y.sum().backward()


def test_a_copied_layer_works() -> None:
    layer = table(Group.single())
    assert torch.equal(copy.deepcopy(layer)(numbers()), layer(numbers()))


def attributes(world):
    layer = table(world)
    w = layer.weight
    return (
        (layer.vocab_start_index, layer.vocab_end_index, layer.num_embeddings_per_partition),
        (w.tensor_model_parallel, w.partition_dim, w.partition_stride),
        repr(layer),
    )


def test_attributes_and_repr(ranks: RankPool) -> None:
    assert ranks.run(attributes)[1] == (
        (8, 16, 8),
        (True, 0, 1),
        "VocabParallelEmbedding(10 (+ 6 padding) × 6, mine 8…15 of tp 1/2)",
    )
