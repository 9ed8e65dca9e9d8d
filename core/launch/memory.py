"""`keep_freed_memory`: on a CPU, each step uses the memory of the last one again.

glibc gives large blocks back to the system as soon as they are freed. Every step would then fetch
its activations' memory anew, a page at a time, each zeroed first: 5 to 10 % of a small model's
step. Pure but for the calls into the C library. Used by core.run and scripts/bench_step.py.
"""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt(3)
KEPT_BLOCK = 16 << 20  # larger ones are few, and would leave holes


def keep_freed_memory() -> bool:
    """To be called when the model is built: what that has left behind goes back first.

    Whether the C library could be told to: only glibc can.
    """
    try:
        library = ctypes.CDLL(None)
        mallopt, malloc_trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        return False
    malloc_trim(0)
    settings = (TRIM_THRESHOLD, 2**31 - 1), (MMAP_THRESHOLD, KEPT_BLOCK)
    return all(mallopt(name, value) for name, value in settings)
