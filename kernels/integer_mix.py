"""Mixing the bits of integers on a CPU, by numpy: it has unsigned numbers, and costs less a call.

The loop of stateless_mask.py's hash (32 bits) and core/random.py's generator (64), whose rounds are
their own. Imports numpy only.
"""

from __future__ import annotations

import numpy as np


def mix_unsigned_(
    x: np.ndarray, spare: np.ndarray, rounds: tuple[tuple[int, int | None], ...]
) -> None:
    """A mix of this kind in place: x ^= x >> bits; x *= factor, for every (bits, factor).

    x, spare  unsigned, of one shape; spare's values are lost
    """
    for bits, factor in rounds:
        np.right_shift(x, bits, out=spare)
        np.bitwise_xor(x, spare, out=x)
        if factor is not None:
            np.multiply(x, factor, out=x)
