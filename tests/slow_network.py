"""A network as slow as you like, for the collectives of one group: what would be waited for?

Inside `slow_network(group, seconds_per_byte)` every collective of the group goes over one link that
carries one message after the other. Time is imagined: what this thread has computed, plus what it
would have waited for the link. So the answer does not depend on how many ranks share a core, and
nobody sleeps.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from core.comm import Group, collectives


@dataclass
class Link:
    """busy: seconds of traffic; exposed: seconds that the rank waited for it."""

    seconds_per_byte: float
    busy: float = 0.0
    exposed: float = 0.0
    free_at: float = 0.0

    def now(self) -> float:
        return time.thread_time() + self.exposed

    def send(self, payload: int) -> float:
        """Put a message on the link; returns when it will have arrived."""
        took = payload * self.seconds_per_byte
        self.busy += took
        self.free_at = max(self.free_at, self.now()) + took
        return self.free_at

    def wait(self, arrival: float) -> None:
        self.exposed += max(arrival - self.now(), 0.0)


class _Late:
    """A torch Work that is done when the link has delivered, too."""

    def __init__(self, work: object, link: Link, arrival: float) -> None:
        self._work, self._link, self._arrival = work, link, arrival

    def wait(self) -> None:
        self._work.wait()
        self._link.wait(self._arrival)


@contextmanager
def slow_network(group: Group, seconds_per_byte: float) -> Iterator[Link]:
    link = Link(seconds_per_byte)

    def late(call: Callable, largest: Callable) -> Callable:
        def called(*args, **kwargs):
            work = call(*args, **kwargs)
            if kwargs.get("group") is not group.handle:
                return work
            return _Late(work, link, link.send(largest(*args).nbytes))

        return called

    usual = dist.all_reduce, collectives._all_gather_flat, collectives._reduce_scatter_flat
    dist.all_reduce = late(usual[0], lambda x: x)
    collectives._all_gather_flat = late(usual[1], lambda out, x: out)
    collectives._reduce_scatter_flat = late(usual[2], lambda out, x: x)
    try:
        yield link
    finally:
        dist.all_reduce, collectives._all_gather_flat, collectives._reduce_scatter_flat = usual
