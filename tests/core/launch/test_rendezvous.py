"""Ranks compare notes through a store: who is missing, who differs, who is there twice.

The ranks are threads of this process around one real TCPStore.
"""

import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from core.launch.place import LaunchError, Place
from core.launch.rendezvous import connect, meet


def place_of(rank: int, size: int, port: int = 0, **more) -> Place:
    return Place("test", rank, size, rank, size, "127.0.0.1", port, **more)


def meet_all(flags: dict[int, dict], size: int, *, gpus=None, seconds=60.0, **more):
    """Lets the ranks in `flags` meet; returns the verdict of each as text, "" for a good one.

    Rank 0, whose clock it is, comes when the others are there.
    """
    server = dist.TCPStore(
        "127.0.0.1", 0, size, True, timedelta(seconds=10), wait_for_workers=False
    )
    verdicts: dict[int, str] = {}

    def one(rank: int) -> None:
        store = server.clone()
        try:
            found = meet(store, "t", place_of(rank, size, **more), (gpus or {}).get(rank, ""),
                         flags[rank], seconds)  # fmt: skip
            verdicts[rank] = ""
            if rank == 0:
                assert [process.rank for process in found] == list(range(size))
        except LaunchError as error:
            verdicts[rank] = str(error)
            assert error.mine == (rank == 0)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in sorted(flags, reverse=True)]
    for thread in threads[:-1]:
        thread.start()
    server.wait([f"t/rank/{rank}" for rank in flags if rank], timedelta(seconds=120))
    threads[-1].start()
    for thread in threads:
        thread.join(120)
    return verdicts


def test_ranks_that_agree_meet() -> None:
    flags = {"--hidden-size": "64", "version": "1"}
    assert meet_all(dict.fromkeys(range(3), flags), 3) == {0: "", 1: "", 2: ""}


def test_a_differing_flag_is_named_on_every_rank() -> None:
    one, other = {"--hidden-size": "64", "--fp64": "yes"}, {"--hidden-size": "128"}
    verdicts = meet_all({0: one, 1: other, 2: one}, 3)
    assert len(set(verdicts.values())) == 1
    host = socket.gethostname()
    assert verdicts[2].splitlines() == [
        f"rank 1 (node {host}) was started with --fp64 nothing, rank 0 with yes",
        f"rank 1 (node {host}) was started with --hidden-size 128, rank 0 with 64",
    ]


def test_a_differing_version_is_named_in_words() -> None:
    one, other = {"--fp64": "yes", "torch": "2.9.1"}, {"--fp64": "no", "torch": "2.8.0"}
    host = socket.gethostname()
    assert meet_all({0: one, 1: other}, 2)[1].splitlines() == [
        f"rank 1 (node {host}) was started with --fp64 no, rank 0 with yes",
        f"rank 1 (node {host}) has torch 2.8.0, rank 0 has 2.9.1",
        "all nodes need the same packages and the same copy of the source files",
    ]


def test_rank_0_and_its_store_stay_until_the_verdict_is_read() -> None:
    """A rank that was slow to read it heard that rank 0 had fallen silent."""
    server = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=120), wait_for_workers=False)
    left = threading.Event()

    def rank_0() -> None:
        with pytest.raises(LaunchError):
            meet(server.clone(), "t", place_of(0, 2), "", {"--seed": "1"}, 60.0)
        left.set()

    class Slow:
        """The store as rank 1 has it."""

        compare_set, wait, add = server.compare_set, server.wait, server.add

        def get(self, key: str) -> bytes:
            assert not left.wait(0.7)
            return server.get(key)

    thread = threading.Thread(target=rank_0)
    thread.start()
    with pytest.raises(LaunchError, match="was started with --seed 2") as caught:
        meet(Slow(), "t", place_of(1, 2), "", {"--seed": "2"}, 60.0)
    thread.join(120)
    assert left.is_set() and not caught.value.mine


def test_missing_ranks_are_named_with_their_nodes() -> None:
    nodes = (("n1", 2), ("n2", 2))
    verdicts = meet_all({0: {}, 1: {}}, 4, seconds=0.3, nodes=nodes)
    text = "rank 2 (node n2), rank 3 (node n2) did not arrive within 0.3 s; 2 of 4 ranks are here"
    assert verdicts == {0: text, 1: text}


def test_many_differences_are_cut_short() -> None:
    flags = {rank: {f"--flag-{i}": str(rank) for i in range(20)} for rank in range(2)}
    lines = meet_all(flags, 2)[0].splitlines()
    assert len(lines) == 9 and lines[-1] == "… and 12 differences more"


def test_two_ranks_on_one_gpu() -> None:
    verdicts = meet_all({0: {}, 1: {}}, 2, gpus={0: "GPU-a", 1: "GPU-a"})
    assert "rank 1" in verdicts[1] and "has the same GPU as rank 0" in verdicts[1]


def test_a_rank_that_is_there_twice() -> None:
    server = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=10), wait_for_workers=False)
    server.set("t/rank/1", '{"process": {"rank": 1, "host": "n9", "pid": 7, "space": ""}}')
    with pytest.raises(LaunchError, match="two processes say that they are rank 1: pid 7 on n9"):
        meet(server.clone(), "t", place_of(1, 2), "", {}, 1.0)


def test_a_port_in_use() -> None:
    """C087: a port that is already bound gives a clear message."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"MASTER_PORT={port} .*Address already in use"):
            connect(place_of(0, 2, port), 1.0)


def test_a_port_of_a_program_that_is_no_store() -> None:
    """It takes the connection and waits; torch waits as well, for ever."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        place = Place(rank=1, size=2, master_addr="127.0.0.1", master_port=mute.getsockname()[1])
        with pytest.raises(LaunchError, match="another program has that port, set MASTER_PORT"):
            connect(place, 0.5)


def test_a_host_that_does_not_resolve() -> None:
    place = Place("test", 1, 2, 1, 2, "no-such-host.invalid", 1234)
    with pytest.raises(LaunchError, match=r"MASTER_ADDR=no-such-host\.invalid does not resolve"):
        connect(place, 1.0)


def test_nobody_listens() -> None:
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))  # and nobody else's meanwhile
        port = mine.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"rank 0 did not answer at 127\.0\.0\.1:{port}"):
            connect(place_of(1, 2, port), 0.3)
