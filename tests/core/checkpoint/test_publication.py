"""A crash or a full disk at any step of publishing: what a load finds, and that nothing is lost."""

import errno
import os
import shutil

import pytest

from core.checkpoint import publication
from core.checkpoint.directory import MissingCheckpoint, candidates, complete, folder_name
from core.checkpoint.publication import publish, tidy


class Crash(BaseException):
    """Not an Exception: nothing cleans up after it."""


@pytest.fixture
def crash(monkeypatch):
    """A function to call with the number of steps on disk that succeed before the crash."""
    left = [10**9]

    def limited(real):
        def step(*args, **keywords):
            if not left[0]:
                raise Crash
            left[0] -= 1
            return real(*args, **keywords)

        return step

    for name in ("rename", "replace", "unlink", "mkdir", "rmdir", "fsync"):
        monkeypatch.setattr(os, name, limited(getattr(os, name)))

    def after(steps, function, *args):
        left[0] = steps
        try:
            return function(*args)
        finally:
            left[0] = 10**9

    return after


def make(root, iteration, who):
    new = root / f"{folder_name(iteration)}.tmp"
    new.mkdir(parents=True)
    (new / "index.json").write_text(f"{iteration} {who}")
    return new


def publish_one(root, iteration, after=None):
    name = folder_name(iteration)
    return publish(root, name, root / f"{name}.tmp", after)


def loaded(root):
    """What a load takes."""
    try:
        return (candidates(root)[0] / "index.json").read_text()
    except MissingCheckpoint:
        return None


def everything(root):
    """What is there, set aside or not, but for what is not published."""
    files = [path for path in root.rglob("index.json") if path.parent.suffix != ".tmp"]
    return sorted(path.read_text() for path in files)


def crashed(crash, root, steps, after, iteration):
    """A folder of another run's 2 and 4 in which a save of this one's was cut short, or was not."""
    for theirs in (2, 4):
        make(root, theirs, "theirs")
        publish_one(root, theirs)
    make(root, iteration, "ours")
    try:
        crash(steps, publish_one, root, iteration, after)
    except Crash:
        return True
    return False


BEGAN_ELSEWHERE, WENT_BACK = -1, 2


@pytest.mark.parametrize(
    "after, iteration",
    [*((BEGAN_ELSEWHERE, n) for n in (1, 3, 4, 5)), *((WENT_BACK, n) for n in (3, 4, 5))],
)
def test_a_crash_while_another_runs_are_set_aside(tmp_path, crash, after, iteration):
    """They were moved before the new one was there: for a moment, or a full disk, none was."""
    ours, steps, more = f"{iteration} ours", 0, True
    while more:
        root = tmp_path / str(steps)
        more = crashed(crash, root, steps, after, iteration)
        found = loaded(root)
        assert found == (ours if ours in everything(root) else "4 theirs"), steps
        there = everything(root)
        assert {"2 theirs", "4 theirs"} <= set(there), steps
        for cut in range(20):
            again = tmp_path / f"{steps}-{cut}"
            shutil.copytree(root, again)
            try:
                crash(cut, tidy, again)
                break
            except Crash:
                assert loaded(again) == found, (steps, cut)
                assert everything(again) == there, (steps, cut)
        assert loaded(again) == found, steps
        assert everything(again) == there, steps
        assert not list(again.glob("*.old")) + list(again.glob("iter_*.tmp")), steps
        steps += 1
    assert steps > 8, "the steps were not seen"
    kept = [path.name for path in complete(root)]
    assert kept == [folder_name(n) for n in (iteration, 2) if n == iteration or n <= after]
    aside = [path.name for path in complete(root / "branch_1")]
    assert aside == [folder_name(n) for n in (4, 2) if n > after]


def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    """`latest.tmp` could not be written, and what the run had begun with had been moved."""

    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    make(tmp_path, 2, "theirs")
    publish_one(tmp_path, 2)
    make(tmp_path, 1, "ours")
    with monkeypatch.context() as patch:
        patch.setattr(publication, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            publish_one(tmp_path, 1, -1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["iter_0000001.tmp", "iter_0000002", "latest"]
    (said,) = publish_one(tmp_path, 1, -1)
    assert "iter_0000002 in" in said and "branch_1" in said
    assert loaded(tmp_path) == "1 ours"


def test_a_link_that_is_set_aside_still_points_to_its_archive(tmp_path):
    make(tmp_path / "archive", 2, "theirs").rename(tmp_path / "archive" / "two")
    here = tmp_path / "here"
    make(here, 1, "ours")
    (here / folder_name(2)).symlink_to("../archive/two")
    publish_one(here, 1, -1)
    assert (here / "branch_1" / folder_name(2) / "index.json").read_text() == "2 theirs"


def test_what_cannot_be_moved_is_said_and_the_save_is_there(tmp_path, monkeypatch):
    make(tmp_path, 2, "theirs")
    publish_one(tmp_path, 2)
    make(tmp_path, 1, "ours")

    def refuse(path, to):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(publication, "_move", refuse)
    (said,) = publish_one(tmp_path, 1, -1)
    assert "cannot be moved" in said and str(tmp_path / "iter_0000002") in said
    assert loaded(tmp_path) == "1 ours"
