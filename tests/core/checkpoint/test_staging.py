"""Saves in the background: when the originals may be written to, and what failures there do."""

import threading

import numpy as np
import pytest
import torch

from core.checkpoint import files, staging, store
from core.checkpoint.errors import SaveError
from core.checkpoint.reader import open_checkpoint
from core.checkpoint.staging import Staging
from core.checkpoint.store import Saver
from core.comm import Group
from tests.core.checkpoint.states import owned, single

ALONE = Group.single("world")


def raising(error):
    def call(*_, **__):
        raise error

    return call


def test_the_call_does_not_wait_for_the_copy_and_the_update_does(tmp_path, monkeypatch):
    go, begun, copied = threading.Event(), threading.Event(), threading.Event()
    real = np.copyto

    def copy_when_told(*args):
        begun.set()
        assert go.wait(60)
        real(*args)

    monkeypatch.setattr(staging.np, "copyto", copy_when_told)
    values = torch.full((300_000,), 1.0)
    with Saver(tmp_path, ALONE, asynchronous=True) as saver:
        saver.copied()  # nothing is under way: returns
        saver.save(1, [single("x", values)], {})
        assert begun.wait(60)
        update = threading.Thread(target=lambda: (saver.copied(), values.fill_(-1), copied.set()))
        update.start()
        assert not copied.wait(0.1)
        go.set()
        update.join(60)
        assert copied.is_set()
    assert (open_checkpoint(tmp_path).read("x") == 1).all()


@pytest.mark.parametrize("dtype", files.SAFETENSORS_NAMES)
def test_copies_are_equal_and_their_own(dtype):
    """Of every type, one element and none, strided, and next to one another in one memory."""
    wide = torch.arange(60).view(6, 10).to(dtype)
    originals = [wide, wide[:, 3:7], wide[2:3, 1:2], wide[:0], wide[0, 0]]
    pieces = [single(f"x{i}", tensor) for i, tensor in enumerate(originals)]
    wanted = [tensor.clone() for tensor in originals]
    copies = Staging().begin(pieces)
    made = list(copies.made())
    copies.wait()
    wide.view(torch.uint8).fill_(1)
    for copy, piece, tensor in zip(made, pieces, wanted, strict=True):
        assert copy.name == piece.name and copy.tensor.dtype == dtype
        assert copy.tensor.shape == tensor.shape
        assert files.host_bytes(copy.tensor) == files.host_bytes(tensor)


def test_the_memory_of_a_save_serves_the_next():
    memory = Staging()
    addresses = []
    for size in (1000, 1000, 500):
        (copy,) = memory.begin([single("x", torch.ones(size))]).made()
        addresses.append(copy.tensor.data_ptr())
    assert len(set(addresses)) == 1


def test_a_copy_that_fails_lets_the_update_go_on_and_is_not_tried_on_changed_values(
    tmp_path, monkeypatch
):
    said = []
    values = torch.ones(9)
    with monkeypatch.context() as patch:
        patch.setattr(staging.np, "copyto", raising(MemoryError("planted")))
        saver = Saver(tmp_path, ALONE, asynchronous=True, say=said.append)
        saver.save(1, [single("x", values)], {})
        saver.copied()
        values.fill_(2)
        saver._under_way.thread.join(60)
    with pytest.raises(SaveError, match="has not been copied, and may have changed"):
        saver.close()
    assert any("MemoryError: planted" in line for line in said)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("what", ["memory", "threads"])
def test_no_memory_or_no_thread_is_a_failed_save(tmp_path, monkeypatch, what):
    saver = Saver(tmp_path, ALONE, asynchronous=True, say=lambda line: None)
    with monkeypatch.context() as patch:
        if what == "memory":
            patch.setattr(staging.torch, "empty", raising(RuntimeError("planted")))
        else:
            patch.setattr(store.threading.Thread, "start", raising(RuntimeError("planted")))
        saver.save(1, [single("x", torch.ones(9))], {})
        saver.copied()
    with pytest.raises(SaveError, match=r"iteration 1 was not saved .*planted"):
        saver.close()
    with Saver(tmp_path, ALONE, asynchronous=True) as again:
        again.save(2, [single("x", torch.ones(9))], {})
    assert open_checkpoint(tmp_path).iteration == 2


def last_save_fails_on_rank_1(world, directory, times):
    """Whether the run ended well, and what was said; the first `times` writes of rank 1 fail."""
    said, left, real = [], [times if world.rank == 1 else 0], files.write_file

    def write(*args):
        if left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        return real(*args)

    files.write_file = write
    try:
        with Saver(directory, world, asynchronous=True, say=said.append) as saver:
            mine = owned(world.rank, world.size)
            saver.save(1, mine, {})
            saver.copied()
            for piece in mine:
                piece.tensor.fill_(-1)
        return "", said
    except SaveError as error:
        return str(error), said
    finally:
        files.write_file = real


def test_the_last_save_that_fails_on_one_rank_is_tried_once_more_on_all(ranks, tmp_path):
    told = ranks.run(last_save_fails_on_rank_1, tmp_path / "once", 1, size=2)
    assert [error for error, _ in told] == ["", ""]
    assert "tried once more" in told[0][1][-1] and "rank 1: OSError" in told[0][1][-1]
    assert list(open_checkpoint(tmp_path / "once").verify()) == []
    ranks.run(last_save_fails_on_rank_1, tmp_path / "whole", 0, size=2)
    once, whole = open_checkpoint(tmp_path / "once"), open_checkpoint(tmp_path / "whole")
    assert all(torch.equal(once.read(name), whole.read(name)) for name in whole.names())
    told = ranks.run(last_save_fails_on_rank_1, tmp_path / "twice", 2, size=2)
    assert "iteration 1 was not saved" in told[0][0] and told[0][0] == told[1][0]
    assert sorted(path.name for path in (tmp_path / "twice").iterdir()) == [".lock"]
