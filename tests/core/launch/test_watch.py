"""One process watches others, with short beats; the others are entries in a real store."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from core.comm.ledger import Ledger
from core.launch import watch
from core.launch.bell import Bell
from core.launch.failure import Failure, Reporter
from core.launch.hang import Progress
from core.launch.watch import Circle, Process, Watch


class Heard(Reporter):
    """A Reporter that notes what would have ended the process."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.said: list[Failure] = []
        self.event = threading.Event()

    def yield_to(self, first: Failure) -> None:
        self.said.append(first)
        self.event.set()
        threading.Event().wait()  # like the real one, it does not return

    def fail(self, failure: Failure, code: int = 1) -> None:
        self.yield_to(failure)


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)


@pytest.fixture
def watching(monkeypatch, store):
    """`watching(circle)` starts a Watch with short beats; its threads end with the test."""
    started: list[Watch] = []

    def start(circle: Circle, at=store) -> tuple[Watch, Heard]:
        reporter = Heard(circle.me.rank)
        progress = Progress(Ledger(), 60.0, 600.0)
        started.append(Watch(at, "w", circle, reporter, progress, silence=0.3).start())
        return started[-1], reporter

    monkeypatch.setattr(watch, "BEAT", 0.02)
    monkeypatch.setattr(watch, "LONE_SILENCE", 0.6)
    yield start
    for one in started:
        one._over.set()
    store.compare_set("w/end", "", watch.DONE)
    time.sleep(0.1)


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def here(rank: int, pid: int | None = None, host: str = "a") -> Process:
    return Process(rank, host, pid or os.getpid(), "")


def test_all_finish_together_and_the_owner_of_the_store_last(watching, store) -> None:
    processes = [here(rank) for rank in range(3)]
    all_of_them = [
        watching(Circle(me, None, processes[0], (), 3))[0] for me in processes
    ]
    left: dict[int, int] = {}  # rank -> ranks that had left the store when it did
    goodbye = all_of_them[1]._say_goodbye
    all_of_them[1]._say_goodbye = lambda seconds: (time.sleep(0.2), goodbye(seconds))

    def finish(rank: int) -> None:
        time.sleep(0.1 * (2 - rank))
        all_of_them[rank].finish(120)
        left[rank] = store.add("w/gone", 0)

    threads = [threading.Thread(target=finish, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(left) == [0, 1, 2] and left[0] == 3


def test_the_first_failure_reaches_all_and_the_second_is_no_news(watching, store) -> None:
    processes = [here(rank, pid=1000 + rank) for rank in range(3)]
    all_of_them = [watching(Circle(me, None, None, (), 3)) for me in processes]
    first = Failure(1, "ValueError: planted", pid=1001)
    all_of_them[1][1]._leaving.acquire()
    assert all_of_them[1][0].announce(first)
    assert not all_of_them[2][0].announce(Failure(2, "later", pid=1002))
    for rank in (0, 2):
        assert all_of_them[rank][1].event.wait(60)
        assert all_of_them[rank][1].said[0].cause == "ValueError: planted"
    assert all_of_them[1][1].said == []  # the culprit is on its way out by itself


def test_who_fails_after_the_owner_has_failed_and_left_is_not_the_first(watching) -> None:
    """Bad input that all ranks see was said twice: with the store gone, each was the first."""
    server = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)
    watched, reporter = watching(Circle(here(1), None, here(0), (), 2), server.clone())
    server.compare_set("w/end", "", Failure(0, "first", pid=1000).to_json())
    assert reporter.event.wait(60)
    del server
    assert not watched.announce(Failure(1, "later"))


def test_a_rank_that_others_found_hanging_ends_too(watching, store) -> None:
    _, reporter = watching(Circle(here(1), None, None, (), 2))
    store.compare_set("w/end", "", Failure(1, "hung", pid=os.getpid()).to_json())
    assert reporter.event.wait(60)


def test_a_stopped_neighbour_is_named_and_killed(watching, sleeper) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    _, reporter = watching(Circle(here(0), here(1, sleeper.pid), here(0), (), 2))
    assert reporter.event.wait(60)
    assert reporter.said[0].rank == 1 and "SIGSTOP" in reporter.said[0].cause
    assert sleeper.wait(60) == -signal.SIGKILL


def test_a_busy_neighbour_is_left_alone(watching, sleeper) -> None:
    watched, reporter = watching(Circle(here(0), here(1, sleeper.pid), here(0), (), 1))
    assert not reporter.event.wait(0.5)
    watched.finish(1)


def test_a_neighbour_that_died_is_named(watching, sleeper) -> None:
    sleeper.kill()
    _, reporter = watching(Circle(here(0), here(1, sleeper.pid), here(0), (), 2))
    assert reporter.event.wait(60)
    assert (reporter.said[0].rank, reporter.said[0].cause) == (1, "died without a word")


def test_a_host_that_went_away_is_named(watching, store, monkeypatch) -> None:
    """Host b has two ranks and host c one; one rank of b goes on, c is silent."""
    everyone = [here(0), here(1, host="b"), here(2, host="b"), here(3, host="c")]
    for rank in (1, 2, 3):
        store.set(f"w/beat/{rank}", "1")
    check = Watch._check_hosts

    def one_goes_on(watched: Watch, at, *seen) -> None:
        at.add("w/beat/2", 1)
        check(watched, at, *seen)

    monkeypatch.setattr(Watch, "_check_hosts", one_goes_on)
    start = time.monotonic()
    _, reporter = watching(Circle(everyone[0], None, everyone[0], everyone, 4))
    assert reporter.event.wait(60)
    assert reporter.said[0].rank == 3 and "no sign of life from its host" in reporter.said[0].cause
    assert time.monotonic() - start > 0.6  # a lone rank may be busy for longer


@pytest.mark.parametrize("longest", [False, True])
def test_a_busy_host_is_told_from_one_that_went_away(
    watching, store, monkeypatch, longest
) -> None:
    """All its ranks may hold Python's global lock at once; its kernel answers for them, for a
    while: it would for a rank that is stopped, too."""
    bell = Bell()
    busy = replace(here(1, host="b"), bell=("127.0.0.1", bell.port))
    everyone = [here(0), busy, replace(busy, rank=2)]
    for rank in (1, 2):
        store.set(f"w/beat/{rank}", "1")
    watched, reporter = watching(Circle(everyone[0], None, everyone[0], everyone, 3))
    watched._bell = bell
    assert not reporter.event.wait(1.0)
    if longest:
        monkeypatch.setattr(watch, "BUSY_SILENCE", 0.5)
    else:
        bell.close()
    assert reporter.event.wait(60)
    bell.close()
    assert reporter.said[0].rank == 1


def test_a_rank_whose_threads_could_not_run_blames_nobody(watching) -> None:
    """The store's silence it finds when the global lock is free again is its own."""
    _, reporter = watching(Circle(here(1), None, here(0), (), 2))
    ctypes.PyDLL(None).usleep(900_000)  # keeps the lock
    assert not reporter.event.wait(0.3)


def test_beats_that_are_slow_since_ranks_are_many_are_no_silence(watching) -> None:
    """40,000 ranks beat every 20 s."""
    assert watching(Circle(here(1), None, here(0), (), 40_000))[0]._silence == 60.0
    assert watching(Circle(here(1), None, here(0), (), 100))[0]._silence == 0.3


def test_a_busy_rank_is_named_when_another_has_waited_in_vain(watching, store) -> None:
    """A collective has timed out, long before a rank that reads data runs out of patience."""
    everyone = [here(0), here(1)]
    watched, reporter = watching(Circle(everyone[0], None, everyone[0], everyone, 2))
    usual = {"step": 7, "count": 90, "still": 61.0, "busy": "", "stack": "…", "events": []}
    answers = {0: {**usual, "waiting": True}, 1: {**usual, "waiting": False, "busy": "data"}}
    watched._gather = lambda store, question: answers
    watched._progress.still = lambda: 61.0
    watched._asked -= 40.0
    assert not reporter.event.wait(0.3)
    watched.ask_around()
    assert reporter.event.wait(60)
    assert reporter.said[0].rank == 1 and "reading or writing data" in reporter.said[0].cause
    assert "--log-dir D would keep them" in reporter.said[0].traceback


@pytest.mark.parametrize("place", ["beside the checkpoints", "a file is in the way"])
def test_every_rank_of_a_hung_run_leaves_its_stacks(watching, tmp_path, capfd, place) -> None:
    """Without --log-dir too: beside the checkpoints, and where nothing can be written in the
    output. Who hangs after a week cannot be asked again."""
    save = tmp_path / "run"
    save.mkdir() if place == "beside the checkpoints" else save.write_text("")
    everyone = [here(0), here(1)]
    watched, reporter = watching(Circle(everyone[0], None, everyone[0], everyone, 2))
    _, other = watching(Circle(everyone[1], None, None, (), 2))
    reporter.status_dir = other.status_dir = save
    usual = {"step": 7, "count": 90, "still": 61.0, "busy": "", "stack": "…", "events": []}
    answers = {rank: {**usual, "waiting": rank == 0} for rank in (0, 1)}
    watched._gather = lambda store, question: answers
    watched._progress.still = lambda: 61.0
    watched._asked -= 40.0
    for one in (reporter, other):
        assert one.event.wait(60)
        assert (one.said[0].rank, one.said[0].stacks) == (1, reporter.said[0].stacks)
    (folder,) = {one.said[0].stacks for one in (reporter, other)}
    assert folder.startswith(f"{save}/hang-")
    assert f"all threads of every rank: {folder}/hang.rank*.txt" in reporter.said[0].traceback
    said, name = capfd.readouterr().err, "test_every_rank_of_a_hung_run_leaves_its_stacks"
    if save.is_dir():
        written = [Path(folder, f"hang.rank{rank}.txt").read_text() for rank in (0, 1)]
        assert all(text.count("thread ") > 3 and name in text for text in written)
        assert "thread MainThread" not in said
    else:
        parts = [said.index(f"all threads of rank {rank}:") for rank in (0, 1)]
        assert all(name in said[part:] for part in parts)
        assert said.count("thread MainThread") == 2


def test_no_stacks_of_a_run_that_did_not_hang(watching, store, tmp_path) -> None:
    watched, reporter = watching(Circle(here(0), None, here(0), (here(0), here(1)), 2))
    reporter.status_dir = tmp_path
    watched.announce(Failure(1, "ValueError: planted"))
    assert reporter.event.wait(60)
    assert list(tmp_path.iterdir()) == []


def test_an_owner_that_finds_itself_hanging_says_so_to_all(watching, store) -> None:
    """Else the others see its store close, and the last lines name no cause."""
    owner = here(0, pid=1000)
    watched, _ = watching(Circle(owner, None, owner, (), 2))
    _, other = watching(Circle(here(1, pid=1001), None, owner, (), 2))
    thread = threading.Thread(target=watched._declare, args=(owner, "hung"), daemon=True)
    thread.start()
    assert other.event.wait(60)
    assert (other.said[0].rank, other.said[0].cause) == (0, "hung")


def test_an_owner_that_was_stopped_and_killed_was_stopped(watching, sleeper) -> None:
    """Whoever finds it first kills it; the others still know why."""
    server = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)
    client = server.clone()
    watched, reporter = watching(Circle(here(1), None, here(0, sleeper.pid), (), 3), client)
    os.kill(sleeper.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while "T" not in watched._owner_states:
        assert time.monotonic() < deadline, "it was not seen stopped"
        time.sleep(0.01)
    sleeper.kill()
    del server
    assert reporter.event.wait(60)
    assert "stopped (SIGSTOP), its store closed" in reporter.said[0].cause


def test_a_stopped_owner_that_runs_once_more_to_die_was_stopped(store) -> None:
    class Dying(Process):
        states = iter(["S", "T", "R", "Z", "Z"])

        def state(self) -> str:
            return next(self.states)

    owner = Dying(0, "a", 1, "")
    watched = Watch(store, "w", Circle(here(1), None, owner, (), 2), Heard(1), None)
    for _ in range(5):
        watched._look_at_owner()
    assert "T" in watched._owner_states
    owner.states = iter("RR")  # it was told to go on
    for _ in range(2):
        watched._look_at_owner()
    assert "T" not in watched._owner_states


def test_a_machine_that_stood_still_lets_everybody_answer(store, monkeypatch) -> None:
    """By the clock rank 1 had been silent for an hour, and was called hung."""
    now = [0.0]
    watched = Watch(store, "w", Circle(here(0), None, here(0), (), 2), Heard(0), None)

    def sleep(_: float) -> None:
        now[0] += 3600.0
        if now[0] > 10_000:
            store.set("w/answer/1/1", "{}")

    monkeypatch.setattr("core.launch.hang.time.monotonic", lambda: now[0])
    monkeypatch.setattr("core.launch.watch.time.sleep", sleep)
    store.set("w/answer/1/0", "{}")
    assert watched._gather(store, 1) == {0: {}, 1: {}}


def test_a_store_that_is_gone_is_named_by_its_owner(watching) -> None:
    seconds = timedelta(seconds=60)
    server = dist.TCPStore("127.0.0.1", 0, 1, True, seconds, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, 1, False, seconds, wait_for_workers=False)
    _, reporter = watching(Circle(here(1), None, here(0), (), 2), client)
    assert not reporter.event.wait(0.1)
    del server  # closes its port and all connections
    assert reporter.event.wait(60)
    assert reporter.said[0].rank == 0 and "its store" in reporter.said[0].cause
