"""Blends: exact counts at every sample, no table, no repeats when the weights change."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.blend import Blend, BlendedDataset, parse_blend
from data.indexed import DataError

WEIGHTS = st.lists(
    st.one_of(st.integers(0, 20), st.sampled_from([Fraction(1, 10**6), 10**6, Fraction(1, 3)])),
    min_size=1,
    max_size=12,
).filter(lambda weights: sum(weights) > 0)


@settings(deadline=None, max_examples=60)
@given(WEIGHTS, st.integers(0, 10**12))
def test_counts_follow_the_weights(weights, start):
    """At any place of the run: locate() counts on where counts() stands, shares stay exact."""
    weights = [Fraction(w) for w in weights]
    blend, total = Blend(weights), sum(weights)
    counts = blend.counts(start)
    for n in range(start, start + 40):
        for count, weight in zip(counts, weights):
            assert abs(count - weight / total * n) <= 2
            assert weight or not count
        which, k = blend.locate(n)
        assert k == counts[which]
        counts[which] += 1
    assert counts == blend.counts(start + 40) and sum(counts) == start + 40


@pytest.mark.parametrize("weights", [["0.001", "0.999"], ["1e-6", "1"], ["1", "1"], ["0.3", "0.7"]])
def test_two_sets_within_one_sample(weights):
    """C050: extreme weights asked a set for more than it had, or for nothing at all."""
    blend = Blend([Fraction(w) for w in weights])
    share = Fraction(weights[0]) / (Fraction(weights[0]) + Fraction(weights[1]))
    for n in [*range(1000), 10**6, 10**15 + 1]:
        assert abs(blend.counts(n)[0] - share * n) <= Fraction(1, 2)


def test_random_weights_within_one_sample():
    """The promise of 1 for ordinary blends: 8 sets, none lighter than a hundredth of another."""
    import random

    draw = random.Random(0)
    for _ in range(40):
        weights = [Fraction(draw.randint(1, 100)) for _ in range(8)]
        blend = Blend(weights)
        for n in range(0, 3000, 37):
            for count, weight in zip(blend.counts(n), weights):
                assert abs(count - weight / sum(weights) * n) <= Fraction(3, 2)


class Numbers:
    """A data set whose sample k is (name, k)."""

    def __init__(self, name):
        self.name = name

    def __getitem__(self, k):
        return self.name, k


def test_each_set_is_read_in_order():
    data = BlendedDataset([Numbers("a"), Numbers("b"), Numbers("c")], [(0, [1, 0, 2])])
    samples = [data[n] for n in range(30)]
    assert [k for name, k in samples if name == "a"] == list(range(10))
    assert [k for name, k in samples if name == "c"] == list(range(20))
    assert data.counts(30) == [10, 0, 20]
    with pytest.raises(IndexError):
        data[-1]


def test_a_change_of_blend_repeats_nothing():
    phases = [(0, [1, 1, 0]), (11, [0, 1, 3]), (20, [5, 1, 1])]
    data = BlendedDataset([Numbers(name) for name in "abc"], phases)
    samples = [data[n] for n in range(60)]
    for name in "abc":
        used = [k for which, k in samples if which == name]
        assert used == list(range(len(used)))
    earlier = BlendedDataset([Numbers(name) for name in "abc"], phases[:1])
    assert samples[:11] == [earlier[n] for n in range(11)]
    assert data.counts(60) == [sum(which == name for which, _ in samples) for name in "abc"]


def test_phases_are_checked():
    for phases in ([], [(1, [1])], [(0, [1]), (0, [1])], [(0, [1, 2])]):
        with pytest.raises(ValueError):
            BlendedDataset([Numbers("a")], phases)


def test_data_path_forms():
    assert parse_blend(["a"]) == (["a"], None)
    assert parse_blend(["a", "b", "c"]) == (["a", "b", "c"], None)
    assert parse_blend([".5", "a", "1e-1", "b"]) == (["a", "b"], [Fraction(1, 2), Fraction(1, 10)])
    assert parse_blend(["1", "a", "2", "b", "3", "a"]) == (["a", "b"], [4, 2])
    assert parse_blend(["0", "a", "1", "b"]) == (["a", "b"], [0, 1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-1 a 2 b", "weight -1 is negative"),
        ("0 a 0 b", "all weights are 0"),
        ("1 a b", "1 stands where a prefix is expected"),
        ("a 1 b 2", "1 stands where"),
        ("NaN a 1 b", "weight NaN is no finite number"),
        ("1 a inf b", "weight inf is no finite number"),
    ],
)
def test_bad_blends_are_named(words, message):
    with pytest.raises(DataError, match=message):
        parse_blend(words.split())
