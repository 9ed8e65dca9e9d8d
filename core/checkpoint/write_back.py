"""`start_write_back`: the disk begins on what was written while more is being written.

Pure: standard library only. Without it the kernel keeps the bytes of a file in memory until fsync,
which then takes as long as the disk needs for all of them. Only a hint: that a file is on the disk
is what fsync says, and files.py always asks. The call is Linux's own; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

SMALLEST = 256 * 1024  # bytes worth a call; what is smaller is left to fsync
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start on all dirty pages of the range, wait for none


def _system_call() -> Callable[[int, int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


_SYNC_FILE_RANGE = _system_call()


def start_write_back(file: int, at: int, size: int) -> None:
    """Starts writing bytes [at, at + size) of an open file to the disk; any error is fsync's."""
    if _SYNC_FILE_RANGE is not None and size >= SMALLEST:
        _SYNC_FILE_RANGE(file, at, size, _WRITE)
