"""The disk begins while a file is being written; what waits to be written stays bounded."""

import threading
import time
import weakref

import torch

from core.checkpoint import files, write_back
from core.checkpoint.files import Deferred


def test_every_large_block_is_handed_to_the_disk(tmp_path, monkeypatch):
    handed = []
    monkeypatch.setattr(write_back, "_SYNC_FILE_RANGE", lambda *args: handed.append(args[1:]))
    tensors = [("large", torch.ones(files.BLOCK // 4 * 2 + 70_000)), ("small", torch.ones(9))]
    facts, sums = files.write_file(tmp_path / "x", tensors)
    start = facts.bytes - 4 * (tensors[0][1].numel() + 9)
    sizes = [files.BLOCK, files.BLOCK, 280_000]
    starts = [start, start + files.BLOCK, start + 2 * files.BLOCK]
    assert sorted(handed) == [(at, size, 2) for at, size in zip(starts, sizes)]
    assert [len(crcs) for crcs in sums] == [3, 1]


def test_it_is_a_hint(tmp_path, monkeypatch):
    """Where there is no such call, and where it fails, nothing else changes."""
    assert write_back.start_write_back(-1, 0, files.BLOCK) is None
    monkeypatch.setattr(write_back.sys, "platform", "darwin")
    assert write_back._system_call() is None
    monkeypatch.setattr(write_back, "_SYNC_FILE_RANGE", None)
    files.write_file(tmp_path / "x", [("w", torch.ones(100_000))])
    assert (tmp_path / "x").stat().st_size > 400_000


def peak_of_made_tensors(path, blocks: int, monkeypatch) -> int:
    """Bytes of tensors made for a file that are alive at once; the disk is slow."""
    alive, peak, lock = [0], [0], threading.Lock()

    def changed(by):
        with lock:
            alive[0] += by
            peak[0] = max(peak[0], alive[0])

    def make():
        tensor = torch.zeros(blocks * files.BLOCK // 4)
        changed(blocks * files.BLOCK)
        weakref.finalize(tensor.untyped_storage(), changed, -blocks * files.BLOCK)
        return tensor

    real = files._write
    monkeypatch.setattr(files, "_write", lambda *args: (time.sleep(0.001), real(*args))[1])
    shape = (blocks * files.BLOCK // 4,)
    entries = [(f"x{i}", Deferred(shape, torch.float32, make)) for i in range(64 // blocks)]
    files.write_file(path, entries)
    return peak[0]


def test_what_is_made_for_a_file_is_the_largest_tensor_and_twelve_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 4096)
    for blocks in (1, 4, 5, 32):
        with monkeypatch.context() as patch:
            peak = peak_of_made_tensors(tmp_path / "x", blocks, patch)
        assert blocks * 4096 <= peak <= (blocks + 12) * 4096
