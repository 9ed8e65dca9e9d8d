"""The sample index against a loop that builds the whole stream, and its promises at any size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.draws import permutation
from data.indexed import DataError
from data.sample_index import DOCUMENTS, SAMPLES, SampleIndex, draw_epoch


def offsets_of(lengths, base=0):
    return base + np.concatenate(([0], np.cumsum(np.array(lengths, np.int64)))).astype(np.int64)


def index_of(offsets, seq_length, seed):
    def draw(number, poll):
        return draw_epoch(offsets, seq_length, seed, number, poll)

    return SampleIndex(int(offsets[-1] - offsets[0]), seq_length, draw)


def tokens_of(index, n):
    starts, stops = index.pieces(n)
    return [t for a, b in zip(starts, stops) for t in range(int(a), int(b))]


def naive_samples(offsets, seq_length, seed, epochs):
    """Every sample of the first epochs, by joining the shuffled documents token by token."""
    filled = [d for d in range(len(offsets) - 1) if offsets[d + 1] > offsets[d]]
    stream, ends = [], [0]
    for epoch in range(epochs + 1):
        for place in permutation(len(filled), seed, epoch << 8 | DOCUMENTS):
            d = filled[place]
            stream += range(offsets[d], offsets[d + 1])
        ends.append(len(stream))
    samples = []
    for epoch in range(epochs):
        windows = [
            stream[start : start + seq_length + 1]
            for start in range(0, len(stream), seq_length)
            if ends[epoch] <= start < ends[epoch + 1]
        ]
        order = permutation(len(windows), seed, epoch << 8 | SAMPLES, last_stays=True)
        assert order[-1] == len(windows) - 1
        samples += [windows[i] for i in order]
    return samples


@settings(deadline=None, max_examples=150)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    seq_length=st.integers(1, 12),
    seed=st.integers(0, 2**64 - 1),
    base=st.sampled_from([0, 2**31 - 5, 2**33 - 5]),
)
def test_equals_the_naive_loop(lengths, seq_length, seed, base):
    offsets = offsets_of(lengths, base)
    if sum(lengths) < seq_length + 1:
        with pytest.raises(DataError, match=f"{sum(lengths)} tokens are fewer than the"):
            index_of(offsets, seq_length, seed)
        return
    index = index_of(offsets, seq_length, seed)
    expected = naive_samples(offsets.tolist(), seq_length, seed, epochs=3)
    assert index.first_sample(3) == len(expected)
    backwards = range(len(expected) - 1, -1, -1)  # no sample needs one before it
    assert [tokens_of(index, n) for n in backwards] == expected[::-1]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.integers(1, 6), st.integers(0, 99))
def test_every_token_is_a_label_once_before_any_is_twice(lengths, seq_length, seed):
    """C054: after any whole number of epochs, uses differ by at most one."""
    total = sum(lengths)
    if total < seq_length + 1:
        return
    index = index_of(offsets_of(lengths), seq_length, seed)
    uses = np.zeros(total, int)
    for epoch in range(4):
        for n in range(index.first_sample(epoch), index.first_sample(epoch + 1)):
            assert index.epoch_of(n) == epoch
            np.add.at(uses, tokens_of(index, n)[:-1], 1)
        assert uses.max() - uses.min() <= 1


def test_two_and_a_half_epochs_over_twenty_documents():
    """C054's own trial: one document a sample; within a pass none repeats before all are used."""
    index = index_of(offsets_of([8] * 20), 8, seed=5)
    documents = [tokens_of(index, n)[0] // 8 for n in range(50)]
    assert sorted(documents[:20]) == sorted(documents[20:40]) == list(range(20))
    assert len(set(documents[40:])) == 10
    assert documents[:20] != documents[20:40]


def test_exact_boundary():
    index = index_of(offsets_of([3, 0, 2]), 4, seed=1)
    assert sorted(tokens_of(index, 0)) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="5 tokens are fewer than the 6"):
        index_of(offsets_of([3, 0, 2]), 5, seed=1)
    with pytest.raises(DataError, match="0 tokens are"):
        index_of(offsets_of([0, 0]), 1, seed=1)
    with pytest.raises(IndexError):
        index.pieces(-1)


def test_a_terabyte_is_arithmetic():
    """Documents beyond 2^31 and 2^40 tokens, sample numbers beyond 2^31: ends stay exact."""
    lengths = [2**40 + 3, 1, 2**31 + 7, 2**33]
    offsets = offsets_of(lengths)
    index = index_of(offsets, 2**30, seed=3)
    total = sum(lengths)
    for epoch in (0, 1, 10**6):
        last = index.first_sample(epoch + 1) - 1
        starts, stops = index.pieces(last)
        assert (stops - starts).sum() == 2**30 + 1
        assert starts.min() >= 0 and stops.max() <= total
        assert index.epoch_of(last) == epoch and index.epoch_of(last + 1) == epoch + 1
