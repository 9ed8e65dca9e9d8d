"""Synthetic text that a model can learn, for `--mock-data`: no file is read.

Every sample is a function of (seed, split, n). The text is made of phrases. A phrase is eight
tokens from a skewed (Zipf) distribution, and phrases are themselves drawn from one. A model finds
first which tokens are common (within a few steps), then how phrases go on (within a few hundred).
Imports numpy and data/gpt.py.
"""

from __future__ import annotations

import numpy as np

from data.gpt import gpt_sample

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
        self._key = seed % 2**64
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
        place = (n + 1) << 2 | (self._split if n >= 0 else 0)
        raw = np.random.Philox(key=np.array([self._key, place], np.uint64)).random_raw(count)
        return (raw >> np.uint64(11)) * 2.0**-53


def _zipf(uniform: np.ndarray, size: int) -> np.ndarray:
    """int64, 0 .. size - 1 with probability proportional to 1 / (rank + 1)."""
    weights = np.cumsum(1.0 / np.arange(1, size + 1))
    return np.minimum(np.searchsorted(weights, uniform * weights[-1], "right"), size - 1)
