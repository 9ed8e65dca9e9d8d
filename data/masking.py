"""Which tokens of a text BERT has to guess, and what it sees in their place.

About `prob` of the tokens are chosen (the number is exact for each sample, rounded up or down at
random so that the mean is right): whole words or single tokens, in runs of up to max_ngram words
whose length is drawn with probability proportional to 1/n, or geometric as in SpanBERT. Of the
chosen, 80 % become [MASK], 10 % a random token, 10 % stay. Imports numpy only; data/bert.py draws
the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MASKED = 0.8  # a draw below this: [MASK]
RANDOM = 0.9  # else below this: a random token; else unchanged
GEOMETRIC = 0.2  # SpanBERT's p


@dataclass(frozen=True)
class Masking:
    """How tokens are chosen.

    mask         id of [MASK]
    vocab_size   random tokens are below it
    word_starts  bool [vocab_size], see data/vocabulary.py; None: every token is a word of its own
    prob         share of the tokens (--mask-prob)
    max_ngram    longest run, in words: 1 for the paper's first version, 3 in Megatron, 10 for spans
    geometric    run lengths from SpanBERT's distribution instead of 1/n
    """

    mask: int
    vocab_size: int
    word_starts: np.ndarray | None = None
    prob: float = 0.15
    max_ngram: int = 3
    geometric: bool = False

    def draws(self, length: int) -> int:
        """How many uniform numbers `apply` takes for `length` tokens."""
        return 4 * length + 1

    def apply(
        self, tokens: np.ndarray, special: np.ndarray, uniform: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Masked tokens, and bool [length] which are to be guessed.

        tokens   int64 [length]  without padding
        special  bool [length]   [CLS] and [SEP], which are never chosen
        uniform  float64 [draws(length)]
        """
        length = len(tokens)
        order, runs, action, other = uniform[1:].reshape(4, length)
        chosen = self._choose(tokens, special, int(length * self.prob + uniform[0]), order, runs)
        seen = tokens.copy()
        seen[chosen & (action < MASKED)] = self.mask
        swapped = chosen & (action >= MASKED) & (action < RANDOM)
        seen[swapped] = (other[swapped] * self.vocab_size).astype(np.int64)
        return seen, chosen

    def _choose(
        self,
        tokens: np.ndarray,
        special: np.ndarray,
        budget: int,
        order: np.ndarray,
        runs: np.ndarray,
    ) -> np.ndarray:
        """bool [length]: runs of words in random order, none over another, until `budget`
        tokens."""
        begins = ~special
        if self.word_starts is not None:
            after_special = np.append(True, special[:-1])
            begins &= self.word_starts[tokens] | after_special
        firsts = np.flatnonzero(begins)
        # a word ends where the next begins, or at a special token, which a run does not cross
        edges = np.flatnonzero(begins | special)
        ends = np.append(edges, len(tokens))[np.searchsorted(edges, firsts, "right")]
        breaks = np.append(np.flatnonzero(ends[:-1] != firsts[1:]), len(firsts) - 1)
        last_of_text = breaks[np.searchsorted(breaks, np.arange(len(firsts)))].tolist()
        lengths = self._run_lengths(runs[firsts]).tolist()
        starts, stops, taken = firsts.tolist(), ends.tolist(), bytearray(len(tokens))
        left = max(budget, 1)
        for word in np.argsort(order[firsts]).tolist():
            start = starts[word]
            for last in range(min(word + lengths[word] - 1, last_of_text[word]), word - 1, -1):
                stop = stops[last]
                if stop - start <= left and taken.find(1, start, stop) < 0:
                    taken[start:stop] = b"\1" * (stop - start)
                    left -= stop - start
                    break
            if not left:
                break
        return np.frombuffer(taken, bool)

    def _run_lengths(self, uniform: np.ndarray) -> np.ndarray:
        """int64: run lengths 1 .. max_ngram by their distribution."""
        n = np.arange(1, self.max_ngram + 1)
        weights = GEOMETRIC * (1 - GEOMETRIC) ** (n - 1) if self.geometric else 1 / n
        bounds = np.cumsum(weights)
        return np.minimum(np.searchsorted(bounds, uniform * bounds[-1], "right"), len(n) - 1) + 1
