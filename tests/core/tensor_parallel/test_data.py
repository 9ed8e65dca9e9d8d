"""broadcast_data: what the first rank read arrives everywhere, and so does its failure."""

import pytest
import torch

from core import parallel_state
from core.comm import Group, Ledger
from core.tensor_parallel import broadcast_data
from tests.ranks import RankPool

DATA = {
    "tokens": torch.arange(12).view(3, 4),
    "number": torch.tensor(7),
    "empty": torch.zeros(2, 0, dtype=torch.int64),
    "mask": torch.arange(16).view(1, 2, 2, 4).transpose(1, 3),
}


def receive(world):
    group = Group("tp", world.ranks, world.rank, Ledger(), world.handle)
    data = DATA if world.rank == 0 else None
    got = broadcast_data(list(DATA), data, torch.int64, group)
    return got, [(e.op, e.numel) for e in group.ledger.events()]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_gets_all_shapes(ranks: RankPool, size: int) -> None:
    for got, calls in ranks.run(receive, size=size):
        assert list(got) == list(DATA)
        assert all(torch.equal(got[k], DATA[k]) for k in DATA)
        assert calls == ([] if size == 1 else [("broadcast", 4 * 9), ("broadcast", 29)])


def default_group(world):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    data = {"x": torch.full((2,), float(world.rank), requires_grad=True)}
    return broadcast_data(["x"], data, torch.float32)["x"].tolist()


def test_default_group_is_tensor_parallel(ranks: RankPool) -> None:
    assert ranks.run(default_group, size=4) == [[0, 0], [0, 0], [2, 2], [2, 2]]


def failures(world):
    told = []
    for data in ({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2).double()}, None):
        with pytest.raises((KeyError, TypeError, RuntimeError)) as caught:
            broadcast_data(["a", "b"], data if world.rank == 0 else None, torch.float32, world)
        told.append(str(caught.value))
    return told


def test_a_bad_batch_fails_on_every_rank(ranks: RankPool) -> None:
    first, second = ranks.run(failures)
    assert "has no 'b'" in first[0] and "has no 'a'" in first[2]
    assert "'b' is of type torch.float64, not torch.float32" in first[1]
    assert all("could not broadcast ['a', 'b']" in message for message in second)


def test_no_keys() -> None:
    assert broadcast_data([], {}, torch.int64) == {}


def test_the_result_is_a_copy() -> None:
    data = {"x": torch.zeros(3)}
    broadcast_data(["x"], data, torch.float32)["x"].fill_(1)
    assert not data["x"].any()
