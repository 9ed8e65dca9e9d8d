"""The folder of checkpoints: what is tried in which order, what goes, who may write."""

import errno
import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest

from core.checkpoint import directory as folders
from core.checkpoint import publication
from core.checkpoint.directory import candidates, differences, obsolete, problems
from core.checkpoint.errors import CheckpointError, MissingCheckpoint


def make(directory, *names, latest=None, index=True):
    for name in names:
        (directory / name).mkdir(parents=True)
        if index:
            (directory / name / "index.json").write_text("{}")
    if latest:
        (directory / "latest").write_text(latest)


def order(directory, step=None):
    return [path.name for path in candidates(directory, step)]


def test_the_pointer_first_then_older_then_what_lies_beyond(tmp_path):
    make(tmp_path, *(f"iter_{n:07d}" for n in (10, 20, 30, 40)), latest="iter_0000030\n")
    make(tmp_path, "iter_0000030.old", "iter_0000050.tmp", "notes")
    assert order(tmp_path) == [
        "iter_0000030",
        "iter_0000030.old",
        "iter_0000020",
        "iter_0000010",
        "iter_0000040",
    ]
    (tmp_path / "latest").write_bytes(b"\xff\x00")
    assert order(tmp_path)[0] == "iter_0000040"
    assert order(tmp_path, 30) == ["iter_0000030", "iter_0000030.old"]
    for asked in (None, 20):
        assert candidates(tmp_path / "iter_0000020", asked) == [tmp_path / "iter_0000020"]
    with pytest.raises(CheckpointError, match="is one checkpoint, not that of iteration 35"):
        candidates(tmp_path / "iter_0000020", 35)
    with pytest.raises(CheckpointError, match="no iteration 35; it has 10, 20, 30, 40"):
        order(tmp_path, 35)


def test_a_pointer_to_checkpoints_that_have_vanished_is_no_fresh_start(tmp_path):
    make(tmp_path, latest="iter_0000030\n")
    with pytest.raises(CheckpointError, match=r"names iter_0000030, and neither .* put one back"):
        candidates(tmp_path)


def test_nothing_there_is_not_an_error_of_the_input(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "corpus.bin").write_bytes(b"text")
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(MissingCheckpoint):
            candidates(folder)


@pytest.mark.parametrize(
    "name",
    [
        "latest_checkpointed_iteration.txt",
        "iter_0000100/mp_rank_00/model_optim_rng.pt",
        "iter_0000100/.metadata",
        "pytorch_model.bin",
        "model-00001-of-00002.safetensors",
        "global_step5/mp_rank_00_model_states.pt",
    ],
)
def test_another_programs_checkpoint_is_named_and_not_opened(tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"\x80\x04this is not opened")
    with pytest.raises(CheckpointError, match="another program's checkpoint") as raised:
        candidates(tmp_path)
    assert not isinstance(raised.value, MissingCheckpoint)
    assert name in str(raised.value)
    refused_for_saving = name.startswith(("iter_", "latest"))
    assert any("another program" in line for line in problems(tmp_path, 0)) == refused_for_saving


def test_what_is_kept_as_a_run_goes_on():
    """keep_last 2, retain_interval 300, loaded from 100: the folders after each save."""
    have, lines = [100], []
    for newest in range(200, 900, 100):
        have.append(newest)
        gone = obsolete(have, newest, 2, 300, loaded=100)
        have = [n for n in have if n not in gone]
        lines.append(" ".join(map(str, have)))
    assert lines == [
        "100 200",
        "100 200 300",
        "100 300 400",
        "100 300 400 500",
        "100 300 500 600",
        "100 300 600 700",
        "100 300 600 700 800",
    ]


def test_what_is_kept_at_the_edges():
    assert obsolete([1, 2, 3], 3, None, None) == []
    assert obsolete([1, 2, 3], 3, 1, None) == [1, 2]
    assert obsolete([1, 2, 3], 3, None, 2) == [1]
    assert obsolete([0, 1, 2], 2, None, 1) == [0]
    assert obsolete([5, 10, 200], 10, 1, None) == [5], "200 is of a run that was given up"
    assert obsolete([], 7, 1, None) == []


def test_differences_are_one_line_per_flag():
    saved = {"model": {"hidden_size": 64, "spans": (1, 2)}, "seed": 1, "gone": None}
    given = {"hidden_size": 96, "spans": [1, 2], "seed": 1, "extra": True}
    assert differences(saved, given) == [
        "--hidden-size: 64 in the checkpoint, 96 given",
        "--gone: None in the checkpoint, absent given",
        "--extra: absent in the checkpoint, True given",
    ]


def test_tidy_removes_litter_and_restores_what_was_about_to_be_replaced(tmp_path):
    make(tmp_path, "iter_0000001", "iter_0000001.old", "iter_0000002.old", "iter_0000003.tmp")
    make(tmp_path, "iter_0000004.old.tmp", "mine.tmp", "iter_5.tmp", "iter_0000006.3f9c06d1.tmp")
    (tmp_path / "latest.tmp").write_text("iter_00")
    publication.tidy(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["iter_0000001", "iter_0000002", "iter_5.tmp", "mine.tmp"]


def test_a_link_to_an_archive_is_removed_and_the_archive_is_not(tmp_path):
    """--keep-last renamed the link and could not remove it: no save and no restart went on."""
    archive, here = tmp_path / "archive", tmp_path / "here"
    make(archive, "iter_0000001", "iter_0000002", "iter_0000003")
    make(here, "iter_0000003.tmp")
    (here / "iter_0000001").symlink_to(archive / "iter_0000001")
    (here / "iter_0000002.tmp").symlink_to(archive / "iter_0000002")
    (here / "iter_0000003").symlink_to(archive / "iter_0000003")
    publication.discard(here / "iter_0000001")
    publication.publish(here, "iter_0000003", here / "iter_0000003.tmp")
    assert publication.tidy(here) == []
    assert sorted(path.name for path in here.iterdir()) == ["iter_0000003", "latest"]
    assert not (here / "iter_0000003").is_symlink()
    for path in archive.iterdir():
        assert (path / "index.json").exists()


def test_litter_that_cannot_be_removed_is_said_and_ends_nothing(tmp_path, monkeypatch):
    """A file that another process still has open over NFS stays as .nfsXXXX until it closes."""
    make(tmp_path, "iter_0000001", "iter_0000002", "iter_0000009.tmp", latest="iter_0000002\n")

    def busy(path):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path / ".nfs01"))

    with monkeypatch.context() as patch:
        patch.setattr(folders.shutil, "rmtree", busy)
        (said,) = publication.tidy(tmp_path)
        assert str(tmp_path / "iter_0000009.tmp") in said and "busy" in said
        for _ in range(2):
            make(tmp_path, "iter_0000002.tmp")
            publication.publish(tmp_path, "iter_0000002", tmp_path / "iter_0000002.tmp")
        with pytest.raises(OSError):
            publication.discard(tmp_path / "iter_0000001")
        assert order(tmp_path) == ["iter_0000002"]
        assert len(publication.tidy(tmp_path)) == 4
    assert publication.tidy(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", "latest"]


def test_a_crash_between_the_two_renames_of_publishing_loses_nothing(tmp_path):
    """The new checkpoint is in its place, the pointer to it is still beside the old one."""
    make(tmp_path, "iter_0000001", "iter_0000002", latest="iter_0000001\n")
    (tmp_path / "latest.tmp").write_text("iter_0000002\n")
    assert order(tmp_path) == ["iter_0000002", "iter_0000001"]
    assert folders.latest(tmp_path) == "iter_0000002"
    publication.tidy(tmp_path)
    assert (tmp_path / "latest").read_text() == "iter_0000002\n"
    assert not (tmp_path / "latest.tmp").exists()


@pytest.mark.parametrize("following", ["iter_0000003\n", "iter_0000002", "", "notes\n"])
def test_a_pointer_that_does_not_name_a_checkpoint_yet_counts_for_nothing(tmp_path, following):
    make(tmp_path, "iter_0000001", "iter_0000002", "iter_0000003.tmp", latest="iter_0000001\n")
    (tmp_path / "latest.tmp").write_text(following)
    assert order(tmp_path)[0] == "iter_0000001"
    publication.tidy(tmp_path)
    assert folders.latest(tmp_path) == "iter_0000001"
    assert not (tmp_path / "latest.tmp").exists()


def test_a_pointer_written_since_the_crash_counts_more(tmp_path):
    make(tmp_path, "iter_0000001", "iter_0000002", latest="iter_0000001\n")
    (tmp_path / "latest.tmp").write_text("iter_0000002\n")
    os.utime(tmp_path / "latest.tmp", (1, 1))
    assert order(tmp_path) == ["iter_0000001", "iter_0000002"]


def test_publishing_never_replaces_another_programs_folder(tmp_path):
    theirs = tmp_path / "iter_0000001" / "model_optim_rng.pt"
    make(tmp_path, "iter_0000001.tmp")
    make(tmp_path, "iter_0000001", index=False)
    theirs.write_bytes(b"theirs")
    with pytest.raises(CheckpointError, match="choose another --save folder"):
        publication.publish(tmp_path, "iter_0000001", tmp_path / "iter_0000001.tmp")
    assert theirs.read_bytes() == b"theirs"


HOLDER = """
import sys, pathlib
from core.checkpoint.directory import Lock
lock = Lock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    """The flag --save of two jobs named one folder; each deleted the other's checkpoints."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(CheckpointError, match=rf"another run .*process {holder.pid} on"):
            folders.Lock(tmp_path)
        holder.kill()
    folders.Lock(tmp_path).release()


def test_problems_before_a_run(tmp_path, monkeypatch):
    assert list(problems(tmp_path / "new" / "folder", 1000)) == []
    assert list(tmp_path.iterdir()) == [], "nothing was written"
    (tmp_path / "file").write_text("")
    assert list(problems(tmp_path / "file" / "x", 1)) == [
        f"{tmp_path / 'file'} is not a folder"
    ]
    make(tmp_path, "runs/iter_0000001")
    (line,) = problems(tmp_path / "runs" / "iter_0000001", 1)
    assert line.endswith(f"is one checkpoint; give the folder it lies in, {tmp_path / 'runs'}")
    usage = SimpleNamespace(free=5 * 1024**2)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage)
    (line,) = problems(tmp_path, 20 * 1024**2)
    assert "takes 20.0 MiB" in line and "has 5.0 MiB free" in line


def test_what_a_crashed_save_left_is_not_in_the_way_of_the_next(tmp_path, monkeypatch):
    """A full disk ended a save; the run started again was refused for the space of its litter."""
    make(tmp_path, "iter_0000001", "iter_0000001.old", "iter_0000002.tmp", "kept")
    for name in ("iter_0000001", "iter_0000001.old", "iter_0000002.tmp", "kept"):
        (tmp_path / name / "rank_00000.safetensors").write_bytes(bytes(2**20))
    (tmp_path / "iter_0000003.tmp").symlink_to(tmp_path / "kept")
    used = sum(
        file.stat().st_blocks * 512
        for name in ("iter_0000001.old", "iter_0000002.tmp")
        for file in (tmp_path / name).iterdir()
    )
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage)
    assert used >= 2**21
    assert list(problems(tmp_path, used + 1000)) == []
    (line,) = problems(tmp_path, used + 1001)
    assert "free some space" in line


def test_a_read_only_folder_is_found_before_the_run(tmp_path, monkeypatch):
    def refuse(dir):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    (line,) = problems(tmp_path, 1)
    assert "cannot write in" in line and "Read-only file system" in line


def test_sizes_in_words():
    sizes = [0, 1023, 1024, 1536, 1024**2, 3 * 1024**3, 5 * 1024**5]
    texts = ["0 bytes", "1023 bytes", "1.0 KiB", "1.5 KiB", "1.0 MiB", "3.0 GiB", "5120.0 TiB"]
    assert [folders.size_text(n) for n in sizes] == texts
