"""Reads ahead in one background thread, so that the next batch is ready when a step ends.

The order and content are those of the iterator itself: only time changes. Standard library only.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

Item = TypeVar("Item")
_END = object()


def prefetch(items: Iterable[Item], depth: int = 2) -> Generator[Item, None, None]:
    """Yield `items`, up to `depth` of them made before they are asked for.

    An error in `items` is raised here, after the items before it. Closing the generator (leaving
    the loop, or its end) stops the thread. depth 0 reads nothing ahead and starts no thread.
    """
    if depth < 1:
        yield from items
        return
    ready: queue.Queue = queue.Queue(depth)
    stopped = threading.Event()

    def put(entry: object) -> bool:
        """Wait for room; False when nobody will take it any more."""
        while not stopped.is_set():
            try:
                ready.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def read() -> None:
        try:
            for item in items:
                if not put((item, None)):
                    return
            put((_END, None))
        except BaseException as error:  # any: it belongs to the reader of the items
            put((_END, error))

    thread = threading.Thread(target=read, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        stopped.set()
        thread.join()
