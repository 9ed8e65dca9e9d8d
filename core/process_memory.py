"""A process's own memory: on a CPU, each step uses that of the last one again.

glibc gives large blocks back to the system as soon as they are freed. Every step would then fetch
its activations' memory anew, a page at a time, each zeroed first: 5 to 10 % of a small model's
step (`keep_freed_memory`). MKL in turn keeps what its products have copied, 24 MiB a thread, where
nobody else can use it, and glibc some freed blocks of every small size, which lie between the large
ones: those do not grow together again (`share_freed_memory`).

Pure but for calls into the C library. Used by core/launch/here.py, core.run, bench_step.py and
preprocess_data.py, for which every block of documents is a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import MutableMapping

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt(3)
KEEP_NO_SMALL_BLOCKS = "glibc.malloc.tcache_count=0"
KEPT_BLOCK = 32 << 20  # larger ones are few, and would leave holes; glibc allows no more


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


def share_freed_memory(environ: MutableMapping[str, str]) -> None:
    """Adds to an environment what gives freed memory to whoever asks next; what is set there stays.

    MKL looks at it before its first product, glibc when a process starts: that part works in the
    processes that are started with it, such as the ranks of --nproc.
    """
    environ.setdefault("MKL_DISABLE_FAST_MM", "1")
    environ.setdefault("GLIBC_TUNABLES", KEEP_NO_SMALL_BLOCKS)
