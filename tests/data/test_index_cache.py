"""Order files: the same samples from them, named by what they depend on, whole or not used."""

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from data.gpt import GPTDataset
from data.index_cache import STALE_SECONDS, OrderCache, damaged_files
from data.indexed import IndexedBuilder
from data.sample_index import Epoch


def write(prefix, lengths=(5, 7, 9)):
    with IndexedBuilder(prefix, np.uint16) as builder:
        for length in lengths:
            builder.add(np.arange(length))


@pytest.fixture
def prefix(tmp_path):
    write(tmp_path / "a")
    return tmp_path / "a"


def windows(prefix, folder, seed=1, documents=None, seq_length=4, write=True):
    data = GPTDataset(prefix, documents, seq_length, seed, cache_folder=folder, cache_write=write)
    return [data.window(n).tolist() for n in range(15)]


def test_samples_from_the_cache_are_the_same(prefix, tmp_path, monkeypatch):
    expected = windows(prefix, None)
    folder = tmp_path / "cache"
    assert windows(prefix, folder) == expected
    files = sorted(path.name for path in folder.iterdir())
    assert len(files) == 3 and all(name.endswith(".order") for name in files)
    monkeypatch.setattr("data.gpt.draw_epoch", None)  # must not be needed any more
    assert windows(prefix, folder) == expected


def test_other_settings_have_other_files(prefix, tmp_path):
    folder = tmp_path / "cache"
    windows(prefix, folder)
    for other in ({"seed": 2}, {"documents": range(2)}, {"seq_length": 3}):
        before = set(folder.iterdir())
        assert windows(prefix, folder, **other) == windows(prefix, None, **other)
        assert len(set(folder.iterdir()) - before) >= 3


def test_changed_data_has_other_files(prefix, tmp_path):
    """Also where the header of the index stays the same: another order of the same lengths."""
    folder = tmp_path / "cache"
    windows(prefix, folder)
    kept = (tmp_path / "a.idx").stat().st_mtime_ns
    write(prefix, (9, 7, 5))
    os.utime(tmp_path / "a.idx", ns=(kept, kept))
    assert windows(prefix, folder) == windows(prefix, None)


@pytest.mark.parametrize("size", [0, 1, 50, -1])
def test_half_a_file_is_not_used(prefix, tmp_path, size):
    folder = tmp_path / "cache"
    expected = windows(prefix, folder)
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:size])
    assert len(list(damaged_files(folder))) == 3
    assert windows(prefix, folder) == expected
    assert list(damaged_files(folder)) == []


def test_a_flipped_bit_is_found_by_reading_all(prefix, tmp_path):
    folder = tmp_path / "cache"
    windows(prefix, folder)
    path = sorted(folder.iterdir())[1]
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    path.write_bytes(content)
    (sentence,) = damaged_files(folder)
    assert str(path) in sentence and "not what was written" in sentence


def test_only_the_writer_writes(prefix, tmp_path):
    assert windows(prefix, tmp_path / "cache", write=False) == windows(prefix, None)
    assert not (tmp_path / "cache").exists()


def test_many_build_one_cache_at_once(prefix, tmp_path):
    folder = tmp_path / "cache"
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda _: windows(prefix, folder), range(16)))
    assert all(found == windows(prefix, None) for found in seen)
    assert list(damaged_files(folder)) == []
    assert all(path.suffix == ".order" for path in folder.iterdir())


def test_a_folder_that_cannot_be_written_is_logged_and_changes_nothing(prefix, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert windows(prefix, tmp_path / "file" / "cache") == windows(prefix, None)
    assert "--data-cache-path" in caplog.text


def test_what_a_killed_writer_left_is_removed(tmp_path, monkeypatch):
    """Of the same settings, and once it is too old to have a writer; nothing else."""
    cache, other = OrderCache(tmp_path, {"seed": 1}), OrderCache(tmp_path, {"seed": 2})
    epoch = Epoch(*(np.arange(n) for n in (2, 3, 5)))

    def killed(handle):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        for one in (cache, cache, other):
            with pytest.raises(KeyboardInterrupt):
                one.store(0, epoch)
    left = sorted(tmp_path.glob("*.partial"))
    assert len(left) == 3 and len({path.name[:32] for path in left}) == 2
    mine = [path for path in left if path.name[:32] == cache.path(0).name[:32]]
    (theirs,) = set(left) - set(mine)
    age = {mine[0]: STALE_SECONDS + 60, mine[1]: STALE_SECONDS - 60, theirs: STALE_SECONDS + 60}
    for path, seconds in age.items():
        os.utime(path, (time.time() - seconds,) * 2)
    cache.store(0, epoch)
    assert set(tmp_path.iterdir()) == {mine[1], theirs, cache.path(0)}
    assert np.array_equal(cache.load(0).samples, np.arange(5))
