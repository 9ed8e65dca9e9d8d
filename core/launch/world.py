"""From a `Place` to a running world: connect, compare notes, start torch.distributed; and the end.

`start` in order: (1) a device; (2) one store, and in it a note from every rank, compared by rank 0
(rendezvous.py); (3) the Watch; (4) the default process group, on the store that is there already.
A single process does only the first: torch.distributed stays untouched.

The only file with a device by name.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from core.launch.bell import Bell, address_towards
from core.launch.failure import Failure, Reporter, leave
from core.launch.hang import Progress, done_in_looks
from core.launch.here import STARTED, reporter_for
from core.launch.place import PARENT, LaunchError, Place
from core.launch.rendezvous import circle_of, connect, meet
from core.launch.signals import (
    AFTERWARDS,
    FOLLOWS,
    StopSignal,
    early_signal,
    grace_after_term,
    job_end,
)
from core.launch.status import Status
from core.launch.supervise import GOOD_EXITS
from core.launch.tee import tee_output
from core.launch.versions import versions
from core.launch.watch import Watch

if TYPE_CHECKING:
    from core.comm import Group

# Seconds for torch to take its groups apart, and between looks.
DESTROY_WAIT, LOOK = 10.0, 0.1


class Settings(Protocol):
    """What `launch` reads; core.train_config.LaunchConfig has it."""

    distributed_backend: str | None
    distributed_timeout_minutes: float
    rendezvous_timeout_seconds: float
    heartbeat_seconds: float
    hang_timeout_seconds: float | None
    exit_signal: str | None
    log_dir: str | None


@dataclass(frozen=True)
class World:
    """The processes of this run and this one's place among them.

    device    "cpu", or "cuda:N" with that GPU made the current one
    rule      how the place was found, for the log
    backend   "gloo" or "nccl"; "none" for a single process
    group     all ranks, as core.comm talks to them, with this run's ledger
    began     time.monotonic() when this process did
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: str
    rule: str
    backend: str
    group: Group = field(repr=False, compare=False)
    reporter: Reporter = field(repr=False, compare=False)
    signals: StopSignal = field(repr=False, compare=False)
    progress: Progress = field(repr=False, compare=False)
    watch: Watch | None = field(default=None, repr=False, compare=False)
    began: float = field(default=STARTED, repr=False, compare=False)

    def stop_requested(self) -> str | None:
        """Why this rank should stop: a signal's name, the time limit; or None. One is enough."""
        self.progress.polled()
        return self.signals.poll(self.progress.longest + self.progress.longest_write)

    def stops_at(self) -> float | None:
        """time.time() at which this rank will be asked to stop at the latest; None: not known."""
        latest = self.signals.latest(self.progress.longest + self.progress.longest_write)
        if latest is None:
            return None
        return min(latest, self.signals.end - early_signal(os.environ))

    def afterwards(self) -> str:
        """What follows when the job's limit has stopped this run, in words; "": not known."""
        return FOLLOWS.get(os.environ.get(AFTERWARDS, ""), "")

    def has_terminal(self) -> bool:
        """Whether somebody watches this rank's stderr on a screen that can redraw a line."""
        dumb = os.environ.get("TERM", "dumb") == "dumb" or "SLURM_JOB_ID" in os.environ
        return self.rank == 0 and sys.stderr.isatty() and not dumb

    def at_step(self, step: int) -> None:
        """Says that `step` begins, for failure records, the time limit and the hang watch."""
        self.reporter.step = step
        self.progress.begin_step(step)

    def at_write(self, seconds: float) -> None:
        """Says how long a checkpoint in the background took to write, for the time limit."""
        self.progress.longest_write = max(self.progress.longest_write, seconds)

    def knows_groups(self, members: Mapping[str, Sequence[int]]) -> None:
        """Says which ranks my groups hold, by ledger name: a hang report compares their calls."""
        self.progress.members = {**self.progress.members, **members}

    def report(self, outcome: str, reason: str = "") -> None:
        """Writes status.json, on rank 0: "complete", or "stopped" when all is saved.

        A full disk is no reason to call a run failed whose checkpoint is there: it is warned of.
        """
        folder = self.reporter.status_dir
        if self.rank != 0 or folder is None:
            return
        facts = {"reason": reason, "step": self.reporter.step, "ranks": self.size}
        try:
            Status.here(outcome, os.environ, **facts).write(folder)
        except OSError as error:
            what = f"WARNING: {folder}/status.json does not say {outcome!r}: {error.strerror}"
            print(what, file=sys.stderr, flush=True)


def start(place: Place, settings: Settings, fingerprint: Mapping[str, str] | None = None) -> World:
    """Connects this process with the others and returns the world.

    `fingerprint` is what must be the same on every rank beside versions and source: flag -> value.
    Raises LaunchError, in the same words on all ranks where that is possible, for ranks that do
    not arrive, ranks that were started differently or run other versions, two ranks on one GPU, a
    port that is in use, a host that does not resolve or a log directory that cannot be written.
    """
    from core.comm import Group, Ledger

    backend, device = _device(settings.distributed_backend, place)
    reporter = reporter_for(place)
    reporter.install()
    where = (place.rank, place.size, place.local_rank, place.local_size, device, place.rule)
    signals, ledger = _stop_signal(place, settings.exit_signal), Ledger()
    minutes = settings.distributed_timeout_minutes
    progress = Progress(ledger, settings.hang_timeout_seconds, 60 * minutes)
    if place.size == 1:
        _start_log(reporter, settings.log_dir)
        return World(*where, "none", Group.single("world", ledger), reporter, signals, progress)
    progress.members = {"world": range(place.size)}
    seconds = settings.rendezvous_timeout_seconds
    store, served_here = connect(place, seconds)
    prefix = f"launch/{place.run}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    bell = Bell()
    number = (address_towards(place.master_addr, place.master_port), bell.port)
    same = {**(fingerprint or {}), **versions()}
    processes = meet(store, prefix, place, _identity(device), same, seconds, number)
    circle = circle_of(store, prefix, place, processes, served_here)
    silence = settings.heartbeat_seconds
    watch = Watch(store, prefix, circle, reporter, progress, silence=silence, bell=bell).start()
    _start_log(reporter, settings.log_dir)  # not before: of all ranks that cannot, one says so
    handle = _start_torch(place, store, f"{prefix}/group", backend, device, minutes)
    reporter.install()  # once more: torch has put a hook of its own in front
    group = Group("world", tuple(range(place.size)), place.rank, ledger, handle)
    return World(*where, backend, group, reporter, signals, progress, watch)


def stop(world: World, *, seconds: float = 60.0) -> None:
    """Leaves in good order, when all ranks are here or after so many seconds.

    Never hangs: if torch cannot take its groups apart the process ends itself, with exit code 0.
    """
    if world.watch is None:
        return
    import torch.distributed as dist

    world.watch.finish(seconds)
    taking_apart = threading.Thread(target=dist.destroy_process_group, daemon=True)
    taking_apart.start()
    if not done_in_looks(
        lambda: not taking_apart.is_alive(), DESTROY_WAIT, LOOK, taking_apart.join
    ):
        leave(0)
    sys.excepthook = sys.__excepthook__


@contextmanager
def launch(
    place: Place,
    settings: Settings,
    fingerprint: Mapping[str, str] | None = None,
    status_dir: str | Path | None = None,
) -> Iterator[World]:
    """`start`, signals turned into `world.stop_requested()`, then `stop`.

    `status_dir`, where the checkpoints go, gets a status.json: running, then what the body reports
    with `world.report`, or failed.
    The end is in good order if the body returns or exits with 0 or 85. What it raises is not
    cleaned up after: it goes to the reporter, which ends the process.
    """
    world = start(place, settings, fingerprint)
    world.signals.install()
    world.reporter.status_dir = status_dir
    world.report("running")
    try:
        yield world
    except SystemExit as error:
        code = _exit_code(error)
        if code not in GOOD_EXITS and world.watch:
            cause = f"left with exit code {code}"
            world.reporter.fail(Failure(world.rank, cause, step=world.reporter.step), code)
        _leave_in_order(world)
        raise
    except BaseException:
        # Of several ranks, none may die of TERM before it has told, or heard, who is to blame.
        if world.watch is None:
            world.signals.remove()
        raise
    _leave_in_order(world)


def _leave_in_order(world: World) -> None:
    stop(world)
    if world.watch is None:
        world.signals.remove()  # a rank's own keep until its end: a signal changes nothing any more


def _exit_code(error: SystemExit) -> int:
    if isinstance(error.code, str):
        print(error.code, file=sys.stderr, flush=True)
        return 1
    return int(error.code or 0)


def _start_log(reporter: Reporter, log_dir: str | None) -> None:
    """Starts this rank's log file; failure records go beside it."""
    if log_dir is None:
        return
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        tee_output(Path(log_dir) / f"rank_{reporter.rank:04d}.log")
    except OSError as error:
        raise LaunchError(f"--log-dir {log_dir} cannot be written: {error.strerror}") from None
    reporter.folders.append(log_dir)


def _stop_signal(place: Place, more: str | None) -> StopSignal:
    names = ["SIGTERM", "SIGUSR1", "SIGINT", *([more] if more else [])]
    end, grace = job_end(os.environ, place.rank), grace_after_term(os.environ)
    return StopSignal(names, end=end, grace=grace, give_up=leave, echoed=PARENT in os.environ)


# ---- devices --------------------------------------------------------------------------------


def _device(backend: str | None, place: Place) -> tuple[str, str]:
    """("gloo", "cpu") or ("nccl", "cuda:N"), the GPU chosen by local rank and made current.

    Ranks of --nproc and torchrun see the same GPUs; a task of srun may see just its own.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" and not count:
        raise LaunchError("--distributed-backend nccl needs a GPU and none is visible; use gloo")
    enough = count >= place.local_size or (count > 0 and bool(place.nodes))
    if backend == "gloo" or not (enough or backend == "nccl"):
        return "gloo", "cpu"
    device = f"cuda:{place.local_rank % count}"
    torch.cuda.set_device(device)
    return "nccl", device


def _identity(device: str) -> str:
    """The GPU's own id: under --gpus-per-task every task calls its GPU number 0."""
    if device == "cpu":
        return ""
    import torch

    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))


# ---- torch.distributed ----------------------------------------------------------------------


def _start_torch(
    place: Place, store: Any, prefix: str, backend: str, device: str, timeout_minutes: float
) -> Any:
    """The default process group."""
    import torch
    import torch.distributed as dist

    if backend == "gloo" and place.local_size == place.size:
        # All on one machine: its own name may resolve to nothing, or to an address behind a VPN.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(prefix, store),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(minutes=timeout_minutes),
        device_id=None if device == "cpu" else torch.device(device),
    )
    return dist.group.WORLD


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])
