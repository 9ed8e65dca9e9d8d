"""The pool of ranks itself: results by rank, and failures that name their rank and never hang."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailed, RankPool


def report(world, add, *, scale=1):
    x = torch.tensor([float(world.rank + add)])
    dist.all_reduce(x, group=world.handle)
    return world.rank, world.size, x * scale


def draw(world):
    return torch.rand(3), torch.get_num_threads()


def fail_on(world, culprit, how):
    if world.rank == culprit:
        if how == "raise":
            raise ValueError(f"planted on {culprit}")
        if how == "warn":
            warnings.warn("planted warning", stacklevel=1)
        if how == "exit":
            os._exit(7)
        if how == "hang":
            time.sleep(600)
    dist.barrier(group=world.handle)


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raise_unpicklable(world):
    raise Unpicklable(1, 2)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_back_by_rank(ranks: RankPool, size: int) -> None:
    total = 3.0 * (size * 10 + size * (size - 1) / 2)
    assert ranks.run(report, 10, scale=3, size=size) == [
        (rank, size, torch.tensor([total])) for rank in range(size)
    ]


def test_every_run_starts_alike(ranks: RankPool) -> None:
    (first, threads), (other, _) = ranks.run(draw)
    (again, _), _ = ranks.run(draw)
    assert threads == 1
    assert torch.equal(first, other) and torch.equal(first, again)


def test_what_a_rank_raises_is_raised_here_and_the_cause_names_the_rank(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="planted on 1") as caught:
        ranks.run(fail_on, 1, "raise", size=4)
    story = str(caught.value.__cause__)
    assert story.startswith("rank 1 of 4 failed")
    assert "in fail_on" in story and "last communication" in story


def test_warnings_are_errors_in_a_rank(ranks: RankPool) -> None:
    with pytest.raises(UserWarning, match="planted warning"):
        ranks.run(fail_on, 0, "warn")


def test_an_exception_that_cannot_travel_is_told(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"rank [01] of 2 failed(.|\n)*Unpicklable: 1 and 2"):
        ranks.run(raise_unpicklable)


def test_a_dead_rank_is_named_with_its_exit_code(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 died with exit code 7"):
        ranks.run(fail_on, 1, "exit")
    assert len(ranks.run(report, 0)) == 2  # the pool has replaced it


def refuse_to_join(world):
    def refuse(*_, **__):
        raise ConnectionError("planted")

    dist.init_process_group = refuse  # as long as this process lives


def test_ranks_that_could_not_join_are_replaced(ranks: RankPool) -> None:
    """torch goes on counting groups where they stopped: the next would wait under another name."""
    ranks.run(refuse_to_join)
    with pytest.raises(ConnectionError, match="planted"):
        ranks.run(draw)
    assert len(ranks.run(draw)) == 2


def test_a_hung_rank_is_shown_where_it_hangs(ranks: RankPool) -> None:
    for limit in (1, 10, 60):  # on a busy machine it may not even have begun to hang
        with pytest.raises(RankFailed, match=rf"rank 1 .* no answer within {limit} s") as hung:
            ranks.run(fail_on, 1, "hang", limit=limit)
        if "time.sleep(600)" in str(hung.value):
            break
    assert "time.sleep(600)" in str(hung.value)


def test_a_run_costs_little(ranks: RankPool) -> None:
    ranks.run(draw)
    seconds = []
    while len(seconds) < 20 and min(seconds, default=1.0) >= 0.5:
        start = time.monotonic()
        ranks.run(draw)
        seconds.append(time.monotonic() - start)
    assert min(seconds) < 0.5, seconds
