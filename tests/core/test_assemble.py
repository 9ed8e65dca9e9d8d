"""core/assemble.py: which rank writes the cache of sample orders."""

import logging

import pytest

from core.assemble import writes_first
from core.comm import Group


def first(world, folder):
    return writes_first(folder, world.rank > 0, world)


def test_one_rank_of_a_folder_writes(ranks, tmp_path):
    """Rank 0 reads nothing here, so rank 1 is the first that does."""
    assert ranks.run(first, str(tmp_path / "cache"), size=3) == [False, True, False]
    assert (tmp_path / "cache").is_dir()


@pytest.mark.parametrize("reads", [False, True])
def test_a_folder_that_cannot_be_made_is_said_and_stops_nothing(tmp_path, caplog, reads):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        assert not writes_first(str(tmp_path / "file"), reads, Group.single("world"))
    assert ("file cannot be made (File exists)" in caplog.text) == reads
