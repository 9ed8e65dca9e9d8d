"""Shard: the boxes of all ranks tile the logical parameter, whatever its padding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.shard import Shard, shard_of


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 5), st.integers(0, 1))
def test_ranks_cover_every_element_once(rows, columns, size, dim):
    shape = (rows, columns)
    padded = -(-shape[dim] // size) * size + size
    shard = Shard(shape, dim=dim, padded=padded)
    seen = np.zeros(shape, int)
    for rank in range(size):
        local, whole = shard.local_slices(rank, size)
        part = np.ones(shard.local_shape(size), int)[local]
        seen[whole] += part
    assert (seen == 1).all()


def test_replicated_is_whole_everywhere():
    shard = Shard((3, 4))
    assert shard.local_shape(8) == (3, 4)
    assert shard.box(5, 8) == ((0, 3), (0, 4))


def test_a_rank_with_only_padding_holds_nothing():
    assert Shard((5, 2), dim=0, padded=16).box(3, 4) == ((5, 5), (0, 2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Shard((4,), dim=1), "dim 1 is outside"),
        (lambda: Shard((4,), dim=0, padded=3), "padded 3 does not fit"),
        (lambda: Shard((5, 2), dim=0).local_shape(2), "5 long and does not divide by 2"),
        (lambda: Shard((5,)).bounds(0, 1), "no cut dimension"),
    ],
)
def test_impossible_shards_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_a_parameter_without_shard_is_a_build_error():
    with pytest.raises(TypeError, match="has no Shard"):
        shard_of(np.zeros((2, 3)))
