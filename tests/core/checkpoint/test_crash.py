"""On disk after a crash, a full disk or bit rot: always a whole checkpoint, and it is found."""

import errno
import os
import pickle
import random
import shutil
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from core.checkpoint.directory import candidates, saved_iterations
from core.checkpoint.errors import BrokenCheckpoint, CheckpointError
from core.checkpoint.index import Index
from core.checkpoint.reader import Checkpoint, load, open_checkpoint
from core.checkpoint.store import Saver, save
from core.comm import Group
from tests.core.checkpoint.states import (
    flat_pieces,
    load_layout,
    owned,
    rank_that_saves,
    save_layout,
    save_until,
    save_with_little_space,
    single,
    whole_iteration,
)

ALONE = Group.single("world")


def start(function, *args):
    """`function` in a process of its own, forked from one that has imported torch."""
    process = get_context("forkserver").Process(target=function, args=args, daemon=True)
    process.start()
    return process


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


# ---- killed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size, asynchronous", [(1, False), (1, True), (2, False), (2, True)])
def test_killed_at_random_moments_a_whole_checkpoint_is_left(ranks, tmp_path, size, asynchronous):
    """Every kill is followed by a load of every byte; the next process goes on from there."""
    directory, rng, first, last = tmp_path / "run", random.Random(size), 1, 0
    for trial in range(4):
        args = (size, tmp_path / f"rendezvous{trial}", directory, asynchronous, first)
        processes = [start(rank_that_saves, rank, *args) for rank in range(size)]
        visible, deadline = directory / f"iter_{first:07d}", time.monotonic() + 120
        while not visible.exists():
            assert time.monotonic() < deadline, f"nothing was saved: {names_in(tmp_path)}"
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        last = whole_iteration(directory)
        assert last >= first, "the one that was complete before the kill is not lost"
        first = last + 1
    save(directory, first, flat_pieces(first, 0, 1), {"n": first}, ALONE, keep_last=2)
    assert whole_iteration(directory) == first
    assert not [name for name in names_in(directory) if name.endswith((".tmp", ".old"))]


@pytest.mark.parametrize("again", [False, True], ids=["the next iteration", "the same iteration"])
def test_killed_at_every_step_of_a_save(ranks, tmp_path, again):
    """keep_last 1, so that publishing, removing and replacing are all among the steps."""
    for crash_at in range(1, 100):
        directory = tmp_path / str(crash_at)
        save(directory, 1, [single("x", torch.full((9,), 1.0))], {"n": 1}, ALONE)
        process = start(save_until, directory, 1 if again else 2, crash_at)
        process.join()
        assert whole_iteration(directory) == max(saved_iterations(directory))
        for path in candidates(directory):
            assert list(Checkpoint(path).verify()) == [], "half of one was visible"
        save(directory, 3, [single("x", torch.full((9,), 3.0))], {"n": 3}, ALONE, keep_last=1)
        assert names_in(directory) == [".lock", "iter_0000003", "latest"]
        if process.exitcode == 0:
            break
        assert process.exitcode == 77
    assert crash_at > 12, "the steps were not seen"


def test_a_save_that_runs_out_of_space_leaves_the_older_one(ranks, tmp_path):
    """`ulimit -f`: the write itself fails, in the middle of a tensor."""
    save(tmp_path, 1, flat_pieces(1, 0, 1), {"n": 1}, ALONE)
    process = start(save_with_little_space, tmp_path)
    process.join()
    assert process.exitcode == 77
    assert whole_iteration(tmp_path) == 1
    assert names_in(tmp_path) == [".lock", "iter_0000001", "latest"]


# ---- damaged ---------------------------------------------------------------------------------


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


def truncate(file: Path, at: int) -> None:
    os.truncate(file, at)


def pickle_instead(file: Path, at: int) -> None:
    """A pickle that would make a folder when opened, padded to the size of the file."""
    payload = pickle.dumps(Trap(str(file.parent.parent / "executed")))
    file.write_bytes(payload.ljust(file.stat().st_size, b"\0"))


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def missing(file: Path, at: int) -> None:
    file.unlink()


def empty(file: Path, at: int) -> None:
    file.write_bytes(b"")


TENSORS, INDEX = "rank_00000.safetensors", "index.json"


def read_all(checkpoint):
    return checkpoint.iteration, [checkpoint.read(name) for name in checkpoint.names()]


@pytest.mark.parametrize("file", [TENSORS, INDEX])
@pytest.mark.parametrize("damage", [flip, truncate, pickle_instead, missing, empty])
@pytest.mark.parametrize("where", [0.0, 0.02, 0.5, 0.99])
def test_a_damaged_one_is_named_and_the_one_before_is_loaded(tmp_path, damage, file, where):
    for iteration in (1, 2):
        tensor = torch.full((40, 50), float(iteration))
        save(tmp_path, iteration, [single("x", tensor)], {"n": iteration}, ALONE)
    path = tmp_path / "iter_0000002" / file
    damage(path, int(where * path.stat().st_size))
    said = []
    iteration, (x,) = load(tmp_path, read_all, ALONE, say=said.append)
    assert iteration == 1 and (x == 1).all()
    assert str(path) in said[0] and "damaged" in said[0]
    assert "iter_0000001 instead of the newest" in said[1]
    with pytest.raises(BrokenCheckpoint, match="is whole"):
        load(tmp_path, read_all, ALONE, step=2, say=said.append)
    assert not (tmp_path / "executed").exists()


def test_a_flipped_byte_is_located(tmp_path):
    save(tmp_path, 1, [single("w", torch.zeros(3_000_000))], {}, ALONE)  # 12 MB, three blocks
    flip(tmp_path / "iter_0000001" / TENSORS, 9_000_000)
    checkpoint = open_checkpoint(tmp_path)
    (problem,) = checkpoint.verify()
    assert "block 2 of w" in problem
    assert (checkpoint.read("w", ((0, 2_000_000),)) == 0).all(), "the other blocks are good"
    with pytest.raises(BrokenCheckpoint):
        checkpoint.read("w", ((2_500_000, 2_500_001),))


def test_every_single_byte_matters(tmp_path):
    """No byte of a small checkpoint can flip unnoticed, save the index's white space."""
    save(tmp_path, 1, [single("w", torch.arange(4.0))], {"n": 1}, ALONE)
    path = tmp_path / "iter_0000001"
    for file in (TENSORS, INDEX):
        good = (path / file).read_bytes()
        for at in range(len(good)):
            flip(path / file, at)
            try:
                checkpoint = open_checkpoint(tmp_path, say=lambda line: None)
                problems = list(checkpoint.verify())
            except CheckpointError:
                problems = ["found when opened"]
            unchanged = file == INDEX and good[at : at + 1] in b' \n'
            assert problems or unchanged, (file, at, good[at - 20 : at + 20])
            (path / file).write_bytes(good)


def test_a_newer_format_is_refused_not_skipped(tmp_path, monkeypatch):
    save(tmp_path, 1, [single("w", torch.ones(1))], {}, ALONE)
    with monkeypatch.context() as patch:
        patch.setattr("core.checkpoint.index.VERSION", 2)
        save(tmp_path, 2, [single("w", torch.ones(1))], {}, ALONE)
    with pytest.raises(CheckpointError, match="format version 2, this program reads up to 1"):
        open_checkpoint(tmp_path)


def test_verify_points_at_files_that_do_not_belong(tmp_path):
    path = save(tmp_path, 1, [single("w", torch.ones(1))], {}, ALONE)
    pickle_instead(shutil.copy(path / INDEX, path / "extra.pt"), 0)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("w").item() == 1
    assert [line for line in checkpoint.verify() if "extra.pt does not belong" in line]
    assert not (tmp_path / "executed").exists()


def test_ranks_fall_back_together(ranks, tmp_path):
    """The byte is in what only one rank reads: none may go on with the newest."""
    for iteration in (1, 2):
        ranks.run(save_layout, tmp_path, iteration, 2, size=2)
    path = tmp_path / "iter_0000002"
    file = Index.read(path).tensors["model/column"].boxes[1].file
    flip(path / file, (path / file).stat().st_size - 30)
    told = ranks.run(load_layout, tmp_path, 2, size=2)
    assert [iteration for iteration, _ in told] == [1, 1]
    assert [wrong for _, wrong in told] == [[], []]


def load_stumbling(world, directory, failing):
    """Rank 1's calls of `preadv` in `failing` fail; what was loaded, and what was said."""
    real, calls, said = os.preadv, [], []

    def stumbling(*args):
        calls.append(args)
        if world.rank == 1 and len(calls) in failing:
            raise OSError(errno.EIO, "Input/output error")
        return real(*args)

    os.preadv = stumbling
    try:
        iteration, (x,) = load(directory, read_all, world, say=said.append)
    finally:
        os.preadv = real
    return iteration, x.unique().tolist(), said


def test_one_read_error_costs_no_checkpoint(ranks, tmp_path):
    """The run went back by an interval, and set the good newest aside."""
    for iteration in (1, 2):
        save(tmp_path, iteration, [single("x", torch.full((9,), float(iteration)))], {}, ALONE)
    first, second = ranks.run(load_stumbling, tmp_path, (1,), size=2)
    assert (first[:2], second) == ((2, [2.0]), (2, [2.0], []))
    (said,) = first[2]
    assert "iter_0000002 could be read at the second try only: rank 1" in said
    assert "Input/output error" in said
    first, second = ranks.run(load_stumbling, tmp_path, (1, 2), size=2)
    assert first[:2] == second[:2] == (1, [1.0]), "twice is damage"
    assert "is damaged" in first[2][0] and "instead of the newest" in first[2][1]


def test_a_pointer_to_nothing_is_said(tmp_path):
    save(tmp_path, 1, [single("w", torch.ones(1))], {}, ALONE)
    (tmp_path / "latest").write_text("iter_0000009\n")
    said = []
    assert open_checkpoint(tmp_path, say=said.append).iteration == 1
    assert said == [f"WARNING: {tmp_path / 'latest'} names 'iter_0000009', which is not there"]


def abandon(world, directory):
    """A rank fails in the middle of training with a save under way: nobody may wait for it."""
    saver = Saver(directory, world, asynchronous=True)
    try:
        with saver:
            saver.save(1, owned(world.rank, world.size), {})
            raise ZeroDivisionError
    except ZeroDivisionError:
        return True


def test_a_failing_run_does_not_wait_for_the_others(ranks, tmp_path):
    assert ranks.run(abandon, tmp_path, size=2) == [True, True]
    assert open_checkpoint(tmp_path).iteration == 1
