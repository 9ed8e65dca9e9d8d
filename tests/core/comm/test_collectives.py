"""Every verb on real gloo ranks: values, ledger lines, and refusals before the call."""

import pytest
import torch

from core.comm import (
    P2P,
    Group,
    all_gather,
    all_reduce_,
    all_to_all,
    barrier,
    broadcast_,
    broadcast_object,
    exchange,
    gather_objects,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)


def every_verb(world: Group) -> list[tuple]:
    n, r = world.size, world.rank
    x = torch.arange(4.0 * n).view(n, 4) + 100 * r
    total = sum(torch.arange(4.0 * n).view(n, 4) + 100 * i for i in range(n))
    assert torch.equal(all_reduce_(x.clone(), world, tag="a"), total)
    biggest = all_reduce_(torch.tensor([float(r)]), world, op="max", tag="a")
    assert biggest.item() == n - 1
    whole = torch.cat([torch.full((2, 3), float(i)) for i in range(n)])
    mine = torch.full((2, 3), float(r))
    assert torch.equal(all_gather(mine, world, tag="b"), whole)
    wide = torch.cat(whole.chunk(n), dim=1)
    assert torch.equal(all_gather(mine, world, dim=-1, tag="b"), wide)
    out = torch.empty(2 * n, 3)
    assert start_all_gather(mine, world, out=out, tag="b").wait() is out
    assert torch.equal(out, whole)
    assert torch.equal(reduce_scatter(x, world, tag="c"), total[r : r + 1])
    assert torch.equal(reduce_scatter(x.t(), world, dim=1, tag="c"), total.t()[:, r : r + 1])
    part = torch.empty(1, 4)
    assert start_reduce_scatter(x, world, out=part, tag="c").wait() is part
    sent_to_me = torch.stack([torch.arange(4.0) + 4 * r + 100 * i for i in range(n)])
    assert torch.equal(all_to_all(x, world, tag="d"), sent_to_me)
    assert broadcast_(torch.tensor([r]), world, root=n - 1, tag="e").item() == n - 1
    barrier(world, tag="f")
    assert gather_objects({"rank": r}, world, tag="g") == [{"rank": i} for i in range(n)]
    assert broadcast_object(["x", r], world, root=1, tag="h") == ["x", 1]
    peer = r ^ 1
    received = torch.empty(3)
    ops = [P2P("send", torch.full((3,), float(r)), peer), P2P("recv", received, peer)]
    exchange(ops if r % 2 == 0 else ops[::-1], world, tag="i").wait()
    assert received.tolist() == [peer] * 3
    return [(e.op, e.numel, e.payload, e.wire) for e in world.ledger.events()]


@pytest.mark.parametrize("size", [2, 4])
def test_values_and_ledger(ranks, size):
    lines = ranks.run(every_verb, size=size)
    first = lines[0]
    assert all(line[:8] == first[:8] for line in lines)
    assert first[0] == ("all_reduce", 4 * size, 16 * size, 2 * (size - 1) * 16)
    assert first[2] == ("all_gather", 6 * size, 24 * size, (size - 1) * 24)


def uneven_all_to_all(world: Group) -> None:
    x = torch.arange(3.0).view(3, 1) + 10 * world.rank
    splits = ([1, 2], [2, 1])[world.rank]
    back = ([1, 2], [2, 1])[world.rank]
    got = all_to_all(x, world, output_splits=back, input_splits=splits, tag="x")
    assert got.view(-1).tolist() == ([0, 10, 11], [1, 2, 12])[world.rank]


def test_uneven_all_to_all(ranks):
    ranks.run(uneven_all_to_all, size=2)


def refusals(world: Group) -> None:
    cases = [
        (lambda: reduce_scatter(torch.ones(3), world, tag="x"), "does not divide by the 2 ranks"),
        (lambda: all_reduce_(torch.ones(4, 2).t(), world, tag="x"), "needs a contiguous tensor"),
        (lambda: all_reduce_(torch.ones(2, requires_grad=True), world, tag="x"), "mappings"),
        (lambda: all_gather(torch.ones(2), world, tag=""), "needs a tag"),
        (lambda: broadcast_(torch.ones(2), world, root=2, tag="x"), "root 2 is outside"),
        (lambda: start_all_gather(torch.ones(2), world, out=torch.ones(3), tag="x"), "not fit"),
        (lambda: exchange([P2P("send", torch.ones(1), world.rank)], world, tag="x"), "no peer"),
        (lambda: all_to_all(torch.ones(2), world, input_splits=[1, 1], tag="x"), "give both"),
    ]
    for call, text in cases:
        with pytest.raises(ValueError, match=text):
            call()
    assert not world.ledger.events()


def test_wrong_calls_are_refused_before_anything_is_sent(ranks):
    ranks.run(refusals, size=2)


def test_a_group_of_one_does_nothing():
    group = Group.single()
    x = torch.arange(3.0)
    assert all_reduce_(x, group, tag="x") is x
    assert all_gather(x, group, tag="x") is x
    assert reduce_scatter(x, group, tag="x") is x
    assert all_to_all(x, group, tag="x") is x
    assert gather_objects(1, group, tag="x") == [1]
    barrier(group, tag="x")
    assert not group.ledger.events()


def test_a_larger_group_needs_a_handle():
    with pytest.raises(ValueError, match="needs a torch ProcessGroup"):
        Group("tp", (0, 1), 0, Group.single().ledger)
