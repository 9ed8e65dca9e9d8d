"""How ranks find each other: one store, and everybody's note in it.

Rank 0 serves a TCPStore (torchrun's agent does where it is the launcher); every rank leaves a note
saying who it is, with which flags it was started and which versions it runs; rank 0 compares them
and leaves a verdict.
Called by core/launch/world.py, which owns everything that happens after.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from core.launch.hang import AwakeClock
from core.launch.place import LaunchError, Place
from core.launch.supervise import LISTENER
from core.launch.watch import Circle, Process

VERDICT_WAIT = 10.0  # seconds after the time for arrivals, for rank 0 to compare the notes
READ_WAIT = 5.0  # seconds for all to have read that they do not fit, before rank 0 leaves
NAMED = 8  # ranks and differences that an error names one by one
SAME_EVERYWHERE = "all nodes need the same packages and the same copy of the source files"


# ---- the store ------------------------------------------------------------------------------


def connect(place: Place, seconds: float) -> tuple[Any, bool]:
    """A client of the run's TCPStore, and whether this process serves it."""
    import torch.distributed as dist

    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serve = place.rank == 0 and not agent_serves
    address, port = place.master_addr, place.master_port
    listener = _listen(place) if serve else None
    if not serve:
        _wait_for_port(place, seconds)
    made: list[Any] = []

    def make() -> None:
        try:
            store = dist.TCPStore(
                "127.0.0.1" if serve else address,
                port,
                place.size,
                serve,
                timedelta(seconds=seconds),
                wait_for_workers=False,
                master_listen_fd=listener,
            )
            made.append(store)
        except RuntimeError as error:
            made.append(error)

    # In a thread: torch waits without end for the greeting of a program that takes connections and
    # is no store.
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(2 * seconds)
    if not made or isinstance(made[0], RuntimeError):
        why = made[0] if made else f"no greeting within {2 * seconds:g} s"
        raise LaunchError(
            f"rank {place.rank} on {socket.gethostname()}: what answers at {address}:{port} is not "
            f"this run's rank 0 ({why}); another program has that port, set MASTER_PORT to a "
            f"free one"
        )
    return made[0], serve


def _listen(place: Place) -> int:
    """A file descriptor of a socket that listens on MASTER_PORT: the parent's, or a new one."""
    if inherited := os.environ.pop(LISTENER, ""):
        return int(inherited)
    _resolve(place)
    try:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(
            ("", place.master_port), family=family, dualstack_ipv6=dual, backlog=1024
        )
    except OSError as error:
        raise LaunchError(
            f"rank 0 cannot listen on MASTER_PORT={place.master_port} of {socket.gethostname()} "
            f"({os.strerror(error.errno)}): another run or a left-over process has it; set "
            f"MASTER_PORT to a free port"
        ) from None
    return server.detach()


def _resolve(place: Place) -> None:
    try:
        socket.getaddrinfo(place.master_addr, place.master_port)
    except OSError as error:
        raise LaunchError(
            f"MASTER_ADDR={place.master_addr} does not resolve on {socket.gethostname()}: "
            f"{error.strerror}"
        ) from None


def _wait_for_port(place: Place, seconds: float) -> None:
    """Returns once somebody listens there; torch would print a page for every refused attempt."""
    _resolve(place)
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((place.master_addr, place.master_port), 5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                host = f" (node {node})" if (node := place.node_of(0)) else ""
                raise LaunchError(
                    f"rank {place.rank} on {socket.gethostname()}: rank 0{host} did not answer at "
                    f"{place.master_addr}:{place.master_port} within {seconds:g} s ({error})"
                ) from None
        time.sleep(0.1)


# ---- comparing notes ------------------------------------------------------------------------


def meet(
    store: Any,
    prefix: str,
    place: Place,
    gpu: str,
    fingerprint: Mapping[str, str],
    seconds: float,
    bell: tuple[str, int] = ("", 0),
) -> list[Process]:
    """Says who I am and returns, on rank 0, everybody in order; elsewhere an empty list.

    `gpu` is the device's own id, "" on a CPU; `fingerprint` maps flags to values, and what
    core/launch/versions.py finds to versions; `bell` is this process's.
    Raises what rank 0 finds wrong, on every rank; only rank 0 is to print it.
    """
    me = replace(_myself(place.rank), bell=bell)
    note = {"process": asdict(me), "gpu": gpu, "size": place.size}
    note["flags"] = {key: str(value) for key, value in fingerprint.items()}
    mine = json.dumps(note)
    key = f"{prefix}/rank/{place.rank}"
    if (other := store.compare_set(key, "", mine).decode()) != mine:
        twin = json.loads(other)["process"]
        raise LaunchError(
            f"two processes say that they are rank {place.rank}: pid {twin['pid']} on "
            f"{twin['host']} and pid {me.pid} on {me.host}"
        )
    if place.rank == 0:
        notes = _await_notes(store, prefix, place.size, seconds)
        problems = _problems(notes, place, seconds)
        store.set(f"{prefix}/verdict", "\n".join(problems))
        if problems:
            _await_readers(store, prefix, len(notes) - 1)
            raise LaunchError("\n".join(problems))
        return [Process(**note["process"]) for note in notes.values()]
    try:
        store.wait([f"{prefix}/verdict"], timedelta(seconds=seconds + VERDICT_WAIT))
        verdict = store.get(f"{prefix}/verdict").decode()
    except RuntimeError:
        raise LaunchError(
            f"rank {place.rank} on {me.host}: rank 0 at {place.master_addr}:{place.master_port} "
            f"left or fell silent before all ranks had met"
        ) from None
    if verdict:
        with suppress(RuntimeError):  # rank 0 has waited long enough, and is gone
            store.add(f"{prefix}/read", 1)
        error = LaunchError(verdict)
        error.mine = False
        raise error
    return []


def _myself(rank: int) -> Process:
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return Process(rank, socket.gethostname(), os.getpid(), space)


def _await_notes(store: Any, prefix: str, size: int, seconds: float) -> dict[int, dict]:
    """What each rank that arrives in time says, by rank."""
    deadline = time.monotonic() + seconds
    notes: dict[int, dict] = {}
    for rank in range(size):
        key = f"{prefix}/rank/{rank}"
        while not store.check([key]) and time.monotonic() < deadline:
            time.sleep(0.02)
        if store.check([key]):
            notes[rank] = json.loads(store.get(key))
    return notes


def _await_readers(store: Any, prefix: str, readers: int) -> None:
    """Returns once so many ranks know the verdict: the store ends with this process."""
    clock = AwakeClock()
    while store.add(f"{prefix}/read", 0) < readers and clock.now(0.5) < READ_WAIT:
        time.sleep(0.02)


def _problems(notes: dict[int, dict], place: Place, seconds: float) -> list[str]:
    """Everything that is wrong with this set of ranks, in words for the user."""
    missing = [rank for rank in range(place.size) if rank not in notes]
    problems = []
    if missing:
        where = [_with_node(rank, place.node_of(rank)) for rank in missing[:NAMED]]
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        problems.append(
            f"{', '.join(where)}{more} did not arrive within {seconds:g} s; "
            f"{len(notes)} of {place.size} ranks are here"
        )
    mine, gpus, versions_differ = notes[0], {}, False
    for rank, note in notes.items():
        name = _with_node(rank, note["process"]["host"])
        if note["size"] != mine["size"]:
            problems.append(f"{name} belongs to a run of {note['size']} ranks, not {place.size}")
        differing = {key for key, _ in mine["flags"].items() ^ note["flags"].items()}
        for key in sorted(differing):
            there, here = note["flags"].get(key, "nothing"), mine["flags"].get(key, "nothing")
            problems.append(_difference(name, key, there, here))
            versions_differ |= _is_version(key)
        twin = gpus.setdefault((note["process"]["host"], note["gpu"]), rank)
        if note["gpu"] and twin != rank:
            problems.append(f"{name} has the same GPU as rank {twin}; start one rank a GPU")
    if len(problems) > NAMED:
        problems[NAMED:] = [f"… and {len(problems) - NAMED} differences more"]
    if versions_differ:
        problems.append(SAME_EVERYWHERE)
    return problems


def _is_version(key: str) -> bool:
    return not key.startswith("--")


def _difference(name: str, key: str, there: str, here: str) -> str:
    if _is_version(key):
        return f"{name} has {key} {there}, rank 0 has {here}"
    return f"{name} was started with {key} {there}, rank 0 with {here}"


def _with_node(rank: int, host: str) -> str:
    return f"rank {rank} (node {host})" if host else f"rank {rank}"


def circle_of(
    store: Any, prefix: str, place: Place, processes: list[Process], served_here: bool
) -> Circle:
    def look_up(rank: int) -> Process:
        return Process(**json.loads(store.get(f"{prefix}/rank/{rank}"))["process"])

    me = _myself(place.rank)
    first_local = place.rank - place.local_rank
    following = first_local + (place.local_rank + 1) % place.local_size
    neighbour = look_up(following) if following != place.rank and following < place.size else None
    if neighbour and not neighbour.shares_host_with(me):
        neighbour = None
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    owner = None if agent_serves else me if served_here else look_up(0)
    return Circle(me, neighbour, owner, processes, place.size)
