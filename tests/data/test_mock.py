"""The synthetic text: determined by (seed, split, n), skewed and repetitive."""

import numpy as np

from data.mock import MockGPTDataset


def sample(n, seed=1, split=0, seq_length=33):
    return MockGPTDataset(512, seq_length, seed, split=split)[n]["tokens"].tolist()


def test_a_sample_is_a_function_of_seed_split_and_n():
    assert sample(5) == sample(5)
    seen = [sample(5), sample(6), sample(5, seed=2), sample(5, split=1), sample(5, split=2)]
    assert len({tuple(tokens) for tokens in seen}) == 5
    assert all(0 <= t < 512 for tokens in seen for t in tokens)


def test_every_length_is_served():
    for seq_length in (1, 7, 8, 9, 64):
        assert len(sample(0, seq_length=seq_length)) == seq_length


def test_there_is_something_to_learn():
    """Unigrams cost well under log2(512) = 9 bits, and a token tells much about the next."""
    data = MockGPTDataset(512, 256, seed=1)
    text = np.stack([data.window(n) for n in range(400)])
    held_out = np.stack([MockGPTDataset(512, 256, seed=1, split=1).window(n) for n in range(100)])
    pairs = np.full((512, 512), 1e-3)
    np.add.at(pairs, (text[:, :-1], text[:, 1:]), 1)
    unigram = pairs.sum(0) / pairs.sum()
    bigram = pairs / pairs.sum(1, keepdims=True)
    cost = -np.log2(unigram[held_out[:, 1:]]).mean()
    conditional = -np.log2(bigram[held_out[:, :-1], held_out[:, 1:]]).mean()
    assert cost < 7.5
    assert conditional < cost - 2
