"""Initial values: gathering the shards gives one matrix at every tp, bit for bit."""

import pytest
import torch
from torch import nn

from core.comm import Group, gather_objects
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tests.ranks import RankPool

METHODS = {"normal": None, "xavier": nn.init.xavier_normal_, "uniform": nn.init.uniform_}
SEEDS = {"stateless": 1, "generator": None}


def make(kind, group, **options):
    if kind == "column":
        return ColumnParallelLinear(64, 256, tp_group=group, name="up", **options)
    if kind == "strided":
        return ColumnParallelLinear(64, 256, stride=2, tp_group=group, name="up", **options)
    if kind == "row":
        return RowParallelLinear(256, 64, tp_group=group, name="down", **options)
    return VocabParallelEmbedding(128, 32, vocab_size=100, tp_group=group, name="word", **options)


def gathered(world, kind, method, seed):
    """The logical weight as its ranks hold it, and the one made on one rank."""
    options = {"init_method": METHODS[method], "seed": seed}
    torch.manual_seed(42)
    weight = make(kind, world, **options).weight
    shard = weight.shard
    whole = torch.full(shard.shape, torch.nan)
    parts = gather_objects(weight.flatten().tolist(), world, tag="test")
    for rank, part in enumerate(parts):
        local, logical = shard.local_slices(rank, world.size)
        whole[logical] = torch.tensor(part).view(shard.local_shape(world.size))[local]
    torch.manual_seed(42)
    alone = make(kind, Group.single(), **options).weight
    local, _ = alone.shard.local_slices(0, 1)
    return whole, alone.detach().view(alone.shard.local_shape(1))[local].clone()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["column", "strided", "row", "embedding"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", SEEDS)
def test_c003_initial_values_come_from_the_full_matrix(
    ranks: RankPool, size: int, kind: str, method: str, seed: str
) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5840: an initialisation whose spread depends on the shape was
    applied to the shard, so that the spread grew with the root of tp."""
    for whole, alone in ranks.run(gathered, kind, method, SEEDS[seed], size=size):
        assert torch.equal(whole, alone)


def test_the_spread_is_the_full_matrix_s() -> None:
    for layer in (make("row", Group.single()), make("column", Group.single())):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
    xavier = make("row", Group.single(), init_method=nn.init.xavier_normal_)
    assert xavier.weight.std().item() == pytest.approx((2 / (256 + 64)) ** 0.5, rel=0.05)


def test_values_depend_on_seed_and_name_alone() -> None:
    def weight(**options):
        return ColumnParallelLinear(8, 8, **options).weight.detach()

    for method in (None, nn.init.xavier_normal_):
        one = weight(seed=1, name="a", init_method=method)
        torch.rand(7)
        assert torch.equal(weight(seed=1, name="a", init_method=method), one)
        assert not torch.equal(weight(seed=2, name="a", init_method=method), one)
        assert not torch.equal(weight(seed=1, name="b", init_method=method), one)


def test_a_seeded_layer_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    ColumnParallelLinear(8, 8, seed=1, name="a", init_method=nn.init.xavier_normal_)
    ColumnParallelLinear(8, 8, seed=1, name="a")
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_layers_differ() -> None:
    assert not torch.equal(ColumnParallelLinear(8, 8).weight, ColumnParallelLinear(8, 8).weight)


def test_biases_start_at_zero_and_nothing_starts_when_not_asked_to() -> None:
    assert not ColumnParallelLinear(8, 8).bias.any() and not RowParallelLinear(8, 8).bias.any()

    def planted(weight):
        raise AssertionError("initialised")

    for make_layer in (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding):
        layer = make_layer(8, 8, init_method=planted, perform_initialization=False)
        assert layer.weight.tensor_model_parallel


def masters(world):
    layer = ColumnParallelLinear(
        4, 8, stride=2, tp_group=world, keep_master_weight_for_test=True, seed=1, name="a"
    )
    return layer.master_weight, layer.weight.detach()


def test_master_weight_and_strides(ranks: RankPool) -> None:
    """Megatron's rule: with stride 2 the matrix is two, one after the other, and each is cut."""
    (master, first), (_, second) = ranks.run(masters)
    assert torch.equal(first, torch.cat((master[0:2], master[4:6])))
    assert torch.equal(second, torch.cat((master[2:4], master[6:8])))
    assert ColumnParallelLinear(4, 8).master_weight is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_type_of_the_parameters(dtype: torch.dtype) -> None:
    for method in METHODS.values():
        layer = ColumnParallelLinear(8, 8, dtype=dtype, seed=1, name="a", init_method=method)
        assert layer.weight.dtype == layer.bias.dtype == dtype
