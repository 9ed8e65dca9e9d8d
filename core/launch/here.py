"""The first call of a program that trains: find this process's place and get ready to fail well.

Comes before the first import of torch, and imports none of it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time

from core.launch.failure import Reporter, leave
from core.launch.place import PARENT, Place, find_place
from core.launch.signals import listen_early
from core.launch.supervise import RECORDS
from core.process_memory import share_freed_memory

STARTED = time.monotonic()  # before anything heavy


def find_here(nproc: str | int | None = None) -> Place:
    """This process's place, from --nproc (a number, "gpu" or None) and the environment.

    A place with `children` is the --nproc parent's: it calls `supervise`. From here on, a rank of
    several ends at once when it raises, with a record for the others, and when its parent ends; and
    SIGUSR1 waits until somebody polls for it.
    Raises LaunchError for contradictions. Calling it again changes nothing.
    """
    # torch's C++ side prints pages about lost connections that the launcher tells in a line
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    share_freed_memory(os.environ)
    place = find_place(nproc, os.environ)
    if PARENT in os.environ:
        _die_with(int(os.environ[PARENT]))
    if not place.children:
        reporter_for(place).install()
        if threading.current_thread() is threading.main_thread():
            listen_early()
        if sys.__stderr__ is not None and not faulthandler.is_enabled():
            faulthandler.enable(sys.__stderr__, all_threads=False)  # a segfault says where
    return place


def reporter_for(place: Place) -> Reporter:
    """A Reporter that writes into the folder that the --nproc parent or a batch script has made."""
    return Reporter(
        place.rank,
        [os.environ[RECORDS]] if RECORDS in os.environ else [],
        parent_tells=PARENT in os.environ,
        alone=place.size == 1,
    )


def _die_with(parent: int) -> None:
    """Ends this process when its parent ends, kill -9 included."""
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)
    else:
        threading.Thread(target=_poll_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        leave(1)


def _poll_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    leave(1)
