"""Stateless values: equal for every layout, distributed as they should be."""

import statistics

import pytest
import torch

from core.random import (
    SMALL,
    DropoutKeys,
    bits,
    init_normal_,
    mix64_,
    normal,
    stream_key,
)
from core.shard import Shard
from kernels.stateless_mask import _keep_on_device, _keep_on_host, keep_mask, threshold


def gathered(shard: Shard, size: int, **kwargs) -> torch.Tensor:
    whole = torch.full(shard.shape, torch.nan)
    for rank in range(size):
        part = torch.empty(shard.local_shape(size))
        init_normal_(part, shard=shard, tp_rank=rank, tp_size=size, **kwargs)
        local, here = shard.local_slices(rank, size)
        whole[here] = part[local]
        part[local] = 0
        assert not part.any(), "padding rows must be zero"
    return whole


@pytest.mark.parametrize(
    "make",
    [
        lambda size: Shard((48, 20), dim=0),
        lambda size: Shard((20, 48), dim=1),
        lambda size: Shard((2, 12, 5), dim=1),
        lambda size: Shard((45, 7), dim=0, padded=48),
        lambda size: Shard((12,), dim=0),
        lambda size: Shard((3, 5)),
    ],
)
def test_gathered_shards_are_one_matrix_bit_for_bit(make):
    args = {"seed": 1, "name": "layers.0.mlp.up.weight", "std": 0.02}
    one = gathered(make(1), 1, **args)
    assert not one.isnan().any()
    for size in (2, 3, 4):
        assert torch.equal(gathered(make(size), size, **args), one)


def test_blocks_do_not_show(monkeypatch):
    shard = Shard((37, 11))
    one = gathered(shard, 1, seed=1, name="a")
    monkeypatch.setattr("core.random.BLOCK", 64)
    assert torch.equal(gathered(shard, 1, seed=1, name="a"), one)


def test_name_and_seed_matter():
    shard = Shard((16, 16))
    a = gathered(shard, 1, seed=1, name="layers.0")
    assert not torch.equal(a, gathered(shard, 1, seed=2, name="layers.0"))
    assert not torch.equal(a, gathered(shard, 1, seed=1, name="layers.1"))


def test_normal_is_the_inverse_of_the_distribution():
    raw = bits(stream_key(3, "x"), torch.arange(4000))
    u = ((raw >> 11).double() + 0.5) * 2.0**-53
    exact = statistics.NormalDist()
    wanted = torch.tensor([exact.inv_cdf(0.5 + x) for x in u.tolist()], dtype=torch.float64)
    assert (normal(raw) - wanted).abs().max() < 1e-12


def test_the_far_tails_are_finite_and_symmetric():
    ends = normal(torch.tensor([-(2**63), 2**63 - 1]))
    assert ends[0] == -ends[1]
    assert 8.2 < ends[1] < 8.3


def test_moments():
    z = normal(bits(stream_key(0, "moments"), torch.arange(400_000)))
    assert abs(z.mean()) < 5e-3
    assert abs(z.var() - 1) < 1e-2
    assert abs((z**4).mean() - 3) < 5e-2


def test_float64_and_float32_hold_the_same_values_rounded():
    shard = Shard((9, 9))
    wide, narrow = torch.empty(9, 9, dtype=torch.float64), torch.empty(9, 9)
    for t in (wide, narrow):
        init_normal_(t, seed=5, name="w", shard=shard, std=0.02)
    assert torch.equal(wide.float(), narrow)


def test_dropout_rate_and_independence():
    keys = DropoutKeys(1, torch.arange(4))
    keep = keys.keep(0, "mlp_out", torch.arange(64), 512, 0.1).double()
    assert abs(keep.mean() - 0.9) < 3e-3
    rows = keep.reshape(-1, 512)
    correlation = torch.corrcoef(rows) - torch.eye(rows.shape[0], dtype=torch.float64)
    assert correlation.abs().max() < 0.3  # 32,640 pairs: 6.7 standard deviations
    assert abs(correlation.mean()) < 2e-3


def test_dropout_depends_on_every_coordinate():
    def mask(seed=1, sample=7, layer=2, place="mlp_out", position=5):
        keys = DropoutKeys(seed, torch.tensor([sample]))
        return keys.keep(layer, place, torch.tensor([position]), 256, 0.5)

    base = mask()
    assert torch.equal(base, mask())
    for change in ({"seed": 2}, {"sample": 8}, {"layer": 3}, {"place": "x"}, {"position": 6}):
        assert not torch.equal(base, mask(**change))


def test_a_part_of_a_mask_is_the_mask_of_the_part():
    keys = DropoutKeys(1, torch.arange(6))
    whole = keys.keep(1, "mlp_out", torch.arange(12), 40, 0.3)
    rows = torch.arange(4, 9)
    part = DropoutKeys(1, torch.arange(2, 5)).keep(1, "mlp_out", rows, 40, 0.3)
    assert torch.equal(part, whole[4:9, 2:5])
    row_keys = keys.rows(1, "mlp_out", torch.arange(12))
    assert torch.equal(keep_mask(row_keys, 10, 0.3, offset=30), whole[..., 30:])


@pytest.mark.parametrize(("rows", "length", "offset"), [(3, 40, 0), (70, 1000, 17), (2, 0, 0)])
def test_host_and_device_draw_the_same_masks(rows, length, offset):
    """Many rows and long ones too, so that more than one block of the host's is worked on."""
    keys = mix64_(torch.arange(2 * rows, dtype=torch.int64)).view(rows, 2)
    kept = _keep_on_device(keys, length, threshold(0.3), offset)
    assert torch.equal(_keep_on_host(keys, length, threshold(0.3), offset), kept)
    assert kept.shape == (rows, 2, length)


def test_few_numbers_are_mixed_as_many_are():
    many = torch.arange(-SMALL, SMALL + 1, dtype=torch.int64) * 0x1234567890ABCDEF
    parts = [mix64_(part.clone()) for part in many.split(1000)]
    assert torch.equal(mix64_(many.clone()), torch.cat(parts))


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_impossible_rates_are_refused(p):
    with pytest.raises(ValueError, match="not in"):
        keep_mask(torch.zeros(1, dtype=torch.int64), 4, p)


def test_a_tensor_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="is not rank 0's part"):
        init_normal_(torch.empty(3, 4), seed=0, name="w", shard=Shard((4, 3)))


@pytest.mark.parametrize("numbers", [3, SMALL + 1])
def test_bits_are_those_of_splitmix64(numbers):
    """The published generator's first outputs from state 0, by either way of computing them."""
    known = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    found = bits(0, torch.arange(numbers))[:3].tolist()
    assert [number % (1 << 64) for number in found] == list(known)


@pytest.mark.parametrize("make", [_keep_on_host, _keep_on_device])
def test_masks_are_those_of_the_published_hash(make):
    """lowbias32 in whole numbers, element by element: a resumed run drops what it would have."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D % (1 << 32)
        x = (x ^ (x >> 15)) * 0x846CA68B % (1 << 32)
        return x ^ (x >> 16)

    keys, offset, length, least = [5, -7, (3 << 40) + 11], 1000, 400, threshold(0.3)
    wanted = [
        [mix(mix((j * 0x9E3779B9 + key) % (1 << 32)) ^ (key >> 32) % (1 << 32)) >= least
         for j in range(offset, offset + length)]
        for key in keys
    ]  # fmt: skip
    assert make(torch.tensor(keys), length, least, offset).tolist() == wanted
