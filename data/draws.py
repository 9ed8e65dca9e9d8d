"""Random numbers as a function of where they are used: no generator, no state.

Philox words are fixed by their definition, so the values are the same on every machine and numpy
version; numpy's own distributions promise no such thing and are not used. Imports numpy only.
"""

from __future__ import annotations

import numpy as np


def random_words(count: int, seed: int, place: int) -> np.ndarray:
    """uint64 [count], from the stream of (seed, place); place counts from 0 and is below 2^64."""
    key = np.array([seed % 2**64, place], np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def uniform(count: int, seed: int, place: int) -> np.ndarray:
    """float64 [count] in [0, 1), 53 bits each."""
    return (random_words(count, seed, place) >> np.uint64(11)) * 2.0**-53


def permutation(count: int, seed: int, place: int, *, last_stays: bool = False) -> np.ndarray:
    """int64 [count]: a random order of 0 .. count - 1; with last_stays, count - 1 keeps its place.

    Sorts random words that carry their index in the low bits, which takes half the time of swapping
    at millions of entries.
    """
    words = random_words(count, seed, place)
    bits = np.uint64(max(count - 1, 1).bit_length())
    if last_stays:
        words[count - 1 :] = 2**64 - 1
    words >>= bits
    words <<= bits
    words |= np.arange(count, dtype=np.uint64)
    words.sort()
    words &= (np.uint64(1) << bits) - np.uint64(1)
    return words.view(np.int64)
