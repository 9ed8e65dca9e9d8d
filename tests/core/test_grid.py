"""RankGrid against Megatron's published example, by arithmetic and by enumeration."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.grid import AXES, TP_PP_DP_ORDER, Coord, RankGrid


def test_megatrons_example_of_sixteen_ranks():
    grid = RankGrid(tp=2, dp=2, pp=4)
    assert grid.groups("tp")[:2] == ((0, 1), (2, 3))
    assert grid.groups("dp")[:3] == ((0, 2), (1, 3), (4, 6))
    assert grid.groups("pp") == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert grid.groups("tp", "pp")[0] == (0, 1, 4, 5, 8, 9, 12, 13)


def test_the_other_order_swaps_pipeline_and_data():
    grid = RankGrid(tp=2, dp=2, pp=2, order=TP_PP_DP_ORDER)
    assert grid.groups("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))


sizes = st.integers(1, 4)


@settings(deadline=None)
@given(tp=sizes, cp=sizes, dp=sizes, pp=sizes, order=st.permutations("tp cp ep dp pp".split()))
def test_groups_partition_the_world(tp, cp, dp, pp, order):
    grid = RankGrid(tp=tp, cp=cp, dp=dp, pp=pp, order="-".join(order))
    assert [grid.rank(grid.coord(r)) for r in range(grid.size)] == list(range(grid.size))
    for axes in (("tp",), ("dp", "cp"), ("tp", "pp"), AXES):
        table = grid.groups(*axes)
        assert sorted(r for row in table for r in row) == list(range(grid.size))
        assert len(table) == grid.group_count(*axes)
        for row in table:
            assert list(row) == sorted(row)
            for r in row:
                assert grid.group_of(r, *axes) == row
                same = {a: getattr(grid.coord(r), a) for a in AXES if a not in axes}
                assert all(getattr(grid.coord(row[0]), a) == v for a, v in same.items())


def test_sixteen_thousand_ranks_are_arithmetic():
    grid = RankGrid(tp=8, dp=128, pp=16)
    assert grid.size == 16384
    assert grid.coord(16383) == Coord(tp=7, dp=127, pp=15)
    assert grid.group_of(16383, "pp")[:2] == (1023, 2047)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RankGrid.fit(6, tp=4), "6 does not divide by tensor x context x pipeline = 4"),
        (lambda: RankGrid.fit(2, tp=4), "start 4 ranks or a multiple"),
        (lambda: RankGrid(tp=0), "the tp size is 0"),
        (lambda: RankGrid(tp=2, order="cp-dp-pp"), "it lacks tp"),
        (lambda: RankGrid(order="tp-cp-ep-dp-pp-xp"), "it has xp"),
        (lambda: RankGrid(tp=2).coord(2), "rank 2 is outside a grid of 2"),
        (lambda: RankGrid().groups("zz"), "distinct names"),
    ],
)
def test_what_cannot_be_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_fit_gives_the_rest_to_data_parallel():
    assert RankGrid.fit(8, tp=2, pp=2).dp == 2
