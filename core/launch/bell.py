"""Is that process still there? Its kernel says so, however busy the process is. No torch.

A thread that beats needs Python's global lock; one call that holds it for minutes (a sort, a
parser, a compiler) silences every thread of the process. A port that listens is answered all the
same, and refused as soon as the process is dead. Used by core/launch/watch.py before it calls a
host gone.
"""

from __future__ import annotations

import socket
from contextlib import suppress

BACKLOG = 128
RING_SECONDS = 2.0


class Bell:
    """A port that takes connections and says nothing, open as long as the process is there."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=dual, backlog=BACKLOG
        )
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]

    def drain(self) -> None:
        """Forgets who has rung, so that the kernel can take more."""
        while True:
            try:
                self._server.accept()[0].close()
            except OSError:  # nobody
                return

    def close(self) -> None:
        self._server.close()


def address_towards(host: str, port: int) -> str:
    """Of this machine, as `host` would see it; "" if there is no way there. Sends nothing."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, _, _, target in found:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    return ""


def rings(bell: tuple[str, int]) -> bool:
    """Whether a process takes connections at (address, port)."""
    address, port = bell
    if not address:
        return False
    try:
        socket.create_connection((address, port), RING_SECONDS).close()
    except OSError:
        return False
    return True
