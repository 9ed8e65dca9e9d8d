"""Where parameters lie: every element once, in equal parts, whatever is asked for."""

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.data_parallel.layout import AXES, BLOCK, axis_of, lay_out
from core.shard import Shard

axes = st.sampled_from(AXES)
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
params = st.lists(st.tuples(shapes, axes, st.booleans(), st.integers(0, 4)), max_size=12)


def named(drawn):
    """Parameters in order of use: unit u holds those drawn with number u."""
    drawn = sorted(drawn, key=lambda each: each[3])
    return [
        (
            f"layers.{unit}.p{n}",
            shape,
            Shard(shape, sum_over=(axis,) if axis else (), decay=decay),
        )
        for n, (shape, axis, decay, unit) in enumerate(drawn)
    ]


def unit_of(name: str) -> str:
    return name.rpartition(".")[0]


@settings(deadline=None)
@given(
    params,
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 20_000)),
    st.booleans(),
)
def test_every_element_has_one_place(drawn, ways, largest, by_unit):
    given_params = named(drawn)
    options = {"ways": ways, "largest": largest, "unit_of": unit_of, "by_unit": by_unit}
    buckets = lay_out(given_params, **options)
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert sorted((s.name, s.shape) for s in slots) == sorted(p[:2] for p in given_params)
    for bucket in buckets:
        assert bucket.slots and bucket.length % (ways * BLOCK) == 0
        assert bucket.slots[-1].stop <= bucket.length
        assert all(a.stop <= b.start for a, b in pairwise(bucket.slots))
        for slot in bucket.slots:
            assert slot.start % BLOCK == 0 and slot.stop - slot.start == prod(slot.shape)
        filled = sum(s.stop - s.start for s in bucket.slots)
        assert filled + sum(b - a for a, b in bucket.gaps()) == bucket.length
        parts = [bucket.part(rank, ways) for rank in range(ways)]
        assert parts[0][0] == 0 and parts[-1][1] == bucket.length
        assert all(a[1] == b[0] and a[0] % BLOCK == 0 for a, b in pairwise(parts))
        if by_unit:
            assert len({slot.unit for slot in bucket.slots}) == 1
        # a table of two stages is with its like only
        assert len({slot.axis == "embed" for slot in bucket.slots}) == 1


@settings(deadline=None)
@given(params, st.integers(1, 4))
def test_runs_cut_into_parts_are_the_runs(drawn, ways):
    for bucket in lay_out(named(drawn), ways=ways):
        for axis in AXES:
            whole = {x for a, b in bucket.shared(axis) for x in range(a, b)}
            cut = [
                x
                for rank in range(ways)
                for a, b in bucket.shared(axis, bucket.part(rank, ways))
                for x in range(a, b)
            ]
            assert len(cut) == len(set(cut)) and set(cut) == whole
            mine = {x for s in bucket.slots if s.axis == axis for x in range(s.start, s.stop)}
            assert mine <= whole


def test_gradients_that_are_ready_first_are_in_the_first_bucket():
    w = Shard((32, 32))
    buckets = lay_out([(f"p{n}", (32, 32), w) for n in range(6)], largest=2000)
    names = [[s.name for s in b.slots] for b in buckets]
    assert names == [["p5", "p4"], ["p3", "p2"], ["p1", "p0"]]


def test_a_table_that_two_stages_hold_is_cut_alike_on_both():
    """NVIDIA/Megatron-LM#844: gradients were scattered before the two copies had been added, and
    the other parameters of a stage moved the cuts of its copy."""
    table = ("embedding.word.weight", (100, 8), Shard((100, 8), dim=0, sum_over=("embed",)))
    w = Shard((8, 8))
    first = lay_out([table, ("a", (8, 8), w), ("b", (8, 8), w)], ways=3)
    last = lay_out([table, ("final_norm", (8,), Shard((8,), decay=False))], ways=3)
    alone = [b for b in first + last if b.slots[0].name == table[0]]
    assert len(alone) == 2 and alone[0] == alone[1]


def test_what_cannot_be_summed():
    with pytest.raises(ValueError, match="no gradient is summed over 'cp'"):
        axis_of(Shard((4,), sum_over=("cp",)))
    with pytest.raises(ValueError, match="one axis besides dp at most"):
        axis_of(Shard((4,), sum_over=("tp", "embed")))
