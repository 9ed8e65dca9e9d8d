"""Synthetic text that a model can learn, for `--mock-data`: no file is read.

Every sample is a function of (seed, split, n). The text is made of phrases. A phrase is eight
tokens from a skewed (Zipf) distribution, and phrases are themselves drawn from one. A model finds
first which tokens are common (within a few steps), then how phrases go on (within a few hundred).
Imports numpy and its neighbours in data/.
"""

from __future__ import annotations

import numpy as np

from data.bert import TEXTS, PairSampler
from data.draws import uniform
from data.gpt import gpt_sample
from data.masking import Masking

PHRASES, PHRASE_LENGTH = 64, 8


class MockGPTDataset:
    """Endless synthetic samples, keys as in gpt_sample. Splits share the language, no sample.

    vocab_size  token ids are below it
    seq_length  s
    seed        fixes the language and the samples
    split       0 training, 1 validation, 2 testing
    """

    def __init__(self, vocab_size: int, seq_length: int, seed: int, *, split: int = 0):
        self.seq_length = seq_length
        self._seed = seed
        self._split = split
        language = self._draw(-1, PHRASES * PHRASE_LENGTH)
        self._phrases = _zipf(language, vocab_size).reshape(PHRASES, PHRASE_LENGTH)

    def window(self, n: int) -> np.ndarray:
        """int64 [seq_length + 1]: phrases one after another, the first entered at any token."""
        count = self.seq_length // PHRASE_LENGTH + 2
        words = self._draw(n, count + 1)
        enter = int(words[count] * PHRASE_LENGTH)
        text = self._phrases[_zipf(words[:count], PHRASES)].reshape(-1)
        return text[enter : enter + self.seq_length + 1]

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        if n < 0:
            raise IndexError(f"sample {n}: samples count from 0")
        return gpt_sample(self.window(n), self.seq_length)

    def _draw(self, n: int, count: int) -> np.ndarray:
        """float64 [count], uniform in [0, 1): sample n of this split, or -1 for the language."""
        return uniform(count, self._seed, (n + 1) << 2 | (self._split if n >= 0 else 0))


class MockBertDataset:
    """Endless synthetic samples for BERT, keys as in PairSampler.sample. Ids 0 to 3 are [PAD],
    [CLS], [SEP], [MASK].

    The two parts are one text cut inside a phrase, half of them swapped. Arguments as above;
    `masking` are options of data/masking.py.
    """

    SPECIAL = 4

    def __init__(
        self,
        vocab_size: int,
        seq_length: int,
        seed: int,
        *,
        split: int = 0,
        binary_head: bool = True,
        **masking,
    ):
        self._seed, self._split, self._binary = seed, split, binary_head
        chosen = Masking(mask=3, vocab_size=vocab_size, **masking)
        self._sampler = PairSampler(seq_length, cls=1, sep=2, pad=0, masking=chosen)
        room = self._sampler.room(2 if binary_head else 1)
        self._text = MockGPTDataset(vocab_size - self.SPECIAL, room - 1, seed, split=split)

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        text = self.SPECIAL + self._text.window(n)
        number = n << 2 | self._split
        if not self._binary:
            return self._sampler.sample([text], self._seed, number)
        cut, order = uniform(2, self._seed, number << 8 | TEXTS)
        middle = 1 + int(cut * (len(text) - 1))
        parts = [text[:middle], text[middle:]]
        swapped = int(order < 0.5)
        return self._sampler.sample(parts[::-1] if swapped else parts, self._seed, number, swapped)


def _zipf(uniform: np.ndarray, size: int) -> np.ndarray:
    """int64, 0 .. size - 1 with probability proportional to 1 / (rank + 1)."""
    weights = np.cumsum(1.0 / np.arange(1, size + 1))
    return np.minimum(np.searchsorted(weights, uniform * weights[-1], "right"), size - 1)
