"""Masking: the paper's shares, whole words, runs; nothing special is ever chosen."""

import numpy as np
import pytest

from data.draws import uniform
from data.masking import Masking

MASK, VOCABULARY = 3, 1000


def masked(masking, tokens, special=None, n=0):
    tokens = np.asarray(tokens)
    special = np.zeros(len(tokens), bool) if special is None else special
    seen, chosen = masking.apply(tokens, special, uniform(masking.draws(len(tokens)), 7, n))
    return seen, chosen


def word_starts(share_inside=0.4):
    """A vocabulary in which that share of the tokens goes on with a word."""
    return uniform(VOCABULARY, 1, 0) >= share_inside


@pytest.mark.parametrize(
    "options",
    [
        {"max_ngram": 1},
        {"max_ngram": 3},
        {"max_ngram": 3, "word_starts": word_starts()},
        {"max_ngram": 10, "geometric": True},
        {"max_ngram": 10, "geometric": True, "word_starts": word_starts()},
    ],
)
@pytest.mark.parametrize("length", [37, 128])
def test_fifteen_percent_and_eighty_ten_ten(options, length):
    """Over 10^5 tokens: 15 % chosen; of those 80 % masked, 10 % random, 10 % kept (5 sigma)."""
    masking = Masking(MASK, VOCABULARY, **options)
    samples = 100_000 // length
    total = kept = hidden = 0
    for n in range(samples):
        tokens = 10 + (uniform(length, 3, n) * (VOCABULARY - 10)).astype(np.int64)
        seen, chosen = masked(masking, tokens, n=n)
        total += chosen.sum()
        hidden += (seen[chosen] == MASK).sum()
        kept += (seen[chosen] == tokens[chosen]).sum()
        assert (seen[~chosen] == tokens[~chosen]).all()
    count = samples * length
    assert abs(total / count - 0.15) < 5 * np.sqrt(0.15 * 0.85 / count)
    for number, share in ((hidden, 0.8), (kept, 0.1)):
        # one in a thousand random tokens is [MASK] or the true one by chance
        assert abs(number / total - share) < 5 * np.sqrt(share * (1 - share) / total) + 1e-3 * 0.1


def test_whole_words():
    """A word is chosen whole or not at all, within its text."""
    starts = word_starts()
    masking = Masking(MASK, VOCABULARY, starts, prob=0.3)
    for n in range(50):
        tokens = (uniform(60, 5, n) * VOCABULARY).astype(np.int64)
        special = np.zeros(60, bool)
        special[[0, 30, 59]] = True
        _, chosen = masked(masking, tokens, special, n)
        assert not chosen[special].any()
        for i in range(1, 60):
            inside = not special[i] and not special[i - 1] and not starts[tokens[i]]
            assert not inside or chosen[i] == chosen[i - 1]


def test_runs_do_not_cross_special_tokens_or_each_other():
    masking = Masking(MASK, VOCABULARY, prob=0.5, max_ngram=10, geometric=True)
    special = np.arange(60) % 4 == 0
    for n in range(20):
        _, chosen = masked(masking, np.arange(60), special, n)
        assert chosen.sum() == 30 and not chosen[special].any()


def test_run_lengths_follow_their_distribution():
    draws = uniform(100_000, 1, 2)
    for masking, expected in (
        (Masking(MASK, VOCABULARY, max_ngram=3), np.array([6, 3, 2]) / 11),
        (Masking(MASK, VOCABULARY, max_ngram=2, geometric=True), np.array([1, 0.8]) / 1.8),
    ):
        shares = np.bincount(masking._run_lengths(draws))[1:] / 100_000
        assert abs(shares - expected).max() < 0.01


def test_longer_runs_come_in_one_piece():
    masking = Masking(MASK, VOCABULARY, prob=0.05, max_ngram=3)
    runs = []
    for n in range(300):
        _, chosen = masked(masking, np.arange(100, 160), n=n)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], chosen, [0]))))
        runs += (edges[1::2] - edges[::2]).tolist()
    assert set(runs) == {1, 2, 3}


def test_at_least_one_token_is_chosen_if_any_can_be():
    masking = Masking(MASK, VOCABULARY)
    assert masked(masking, [5])[1].tolist() == [True]
    assert masked(masking, [5, 6], np.array([True, True]))[1].tolist() == [False, False]
