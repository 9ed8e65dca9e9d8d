"""Saving and loading: any cut to any other, every dtype, all ranks of one mind."""

import errno
import json
import os
import tracemalloc
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.checkpoint import directory as folders
from core.checkpoint import files, publication
from core.checkpoint.errors import CheckpointError, MissingCheckpoint, SaveError
from core.checkpoint.pieces import Piece
from core.checkpoint.reader import load, open_checkpoint
from core.checkpoint.slices import lengths, slices
from core.checkpoint.store import Saver, save
from core.comm import Group
from tests.core.checkpoint.states import load_layout, owned, save_layout, single
from tests.core.checkpoint.test_slices import boxes_in, tilings

ALONE = Group.single("world")


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 64 bytes, so that small tensors have many."""
    monkeypatch.setattr(files, "BLOCK", 64)


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


def test_what_a_checkpoint_looks_like_on_disk(tmp_path):
    path = save(tmp_path, 100, [single("w", torch.ones(3))], {"arguments": {"seed": 1}}, ALONE)
    assert path == tmp_path / "iter_0000100"
    assert names_in(tmp_path) == [".lock", "iter_0000100", "latest"]
    assert names_in(path) == ["index.json", "rank_00000.safetensors"]
    assert (tmp_path / "latest").read_text() == "iter_0000100\n"
    index = json.loads((path / "index.json").read_text())["index"]
    assert index["meta"] == {"arguments": {"seed": 1}}
    assert index["tensors"]["w"]["shape"] == [3]


def test_the_files_are_plain_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        "odd": torch.arange(3, dtype=torch.int8),
        "half": torch.randn(5, 7).bfloat16(),
        "double": torch.randn(2, dtype=torch.float64),
        "turned": torch.randn(4, 6).t(),
    }
    path = save(tmp_path, 1, [single(n, t) for n, t in tensors.items()], {}, ALONE)
    read = safetensors.load_file(path / "rank_00000.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    for file in path.iterdir():
        assert not file.read_bytes().startswith((b"\x80", b"PK")), "a pickle, or a zip with one"


@pytest.mark.parametrize("dtype", list(files.SAFETENSORS_NAMES))
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (33, 5)])
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype, shape, small_blocks):
    values = torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
    save(tmp_path, 1, [single("x", values)], {}, ALONE)
    checkpoint = open_checkpoint(tmp_path)
    read = checkpoint.read("x")
    assert (read.dtype, read.shape, checkpoint.dtype("x")) == (dtype, values.shape, dtype)
    assert bytes(files.host_bytes(read)) == bytes(files.host_bytes(values))


def test_nan_infinities_and_negative_zero_survive(tmp_path):
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    save(tmp_path, 1, [single("x", values)], {"loss": float("nan")}, ALONE)
    checkpoint = open_checkpoint(tmp_path)
    assert bytes(files.host_bytes(checkpoint.read("x"))) == bytes(files.host_bytes(values))
    assert checkpoint.meta["loss"] != checkpoint.meta["loss"]


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(tilings(), st.data())
def test_any_box_is_read_from_any_tiling(tmp_path_factory, small_blocks, tiling, data):
    shape, boxes = tiling
    logical = torch.arange(int(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)
    pieces = [Piece("x", shape, box, logical[slices(box)].clone()) for box in boxes]
    directory = tmp_path_factory.mktemp("tiling")
    save(directory, 1, pieces, {}, ALONE)
    checkpoint = open_checkpoint(directory)
    box = data.draw(boxes_in(shape))
    assert torch.equal(checkpoint.read("x", box), logical[slices(box)])
    strided = torch.full([2 * n for n in lengths(box)], -1.0, dtype=torch.float32)
    view = strided[tuple(slice(None, None, 2) for _ in shape)]
    checkpoint.read_into("x", box, view)
    assert torch.equal(view, logical[slices(box)].float())
    assert (strided == -1).sum() == strided.numel() - view.numel(), "nothing else was touched"


def test_precision_changes_on_request_and_kinds_do_not(tmp_path):
    save(tmp_path, 1, [single("x", torch.tensor([1.25, 2.5]).bfloat16())], {}, ALONE)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("x", dtype=torch.float64).tolist() == [1.25, 2.5]
    with pytest.raises(CheckpointError, match="x is bfloat16 in the checkpoint"):
        checkpoint.read("x", dtype=torch.int64)


def test_all_that_does_not_fit_is_said_at_once_and_nothing_is_read(tmp_path):
    save(tmp_path, 1, [single("a", torch.ones(2)), single("b", torch.ones(3))], {}, ALONE)
    mine = [single(name, torch.zeros(2)) for name in ("a", "b", "c", "d")]
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(tmp_path).fill(mine)
    said = "not in the checkpoint: c, d; b is (3,) in the checkpoint, (2,) here"
    assert said in str(raised.value)
    assert not any(piece.tensor.any() for piece in mine)


@pytest.mark.parametrize("problem", ["hole", "overlap", "shape", "dtype", "twice"])
def test_a_checkpoint_with_holes_or_two_owners_is_not_published(tmp_path, problem):
    """A rank had silently not saved its shard; it was found at the resume, weeks later."""
    save(tmp_path, 1, [single("x", torch.ones(4))], {}, ALONE)
    second = {
        "hole": Piece("x", (4,), ((2, 3),), torch.ones(1)),
        "overlap": Piece("x", (4,), ((1, 4),), torch.ones(3)),
        "shape": Piece("x", (5,), ((2, 5),), torch.ones(3)),
        "dtype": Piece("x", (4,), ((2, 4),), torch.ones(2, dtype=torch.int64)),
        "twice": Piece("x", (4,), ((0, 2),), torch.ones(2)),
    }[problem]
    words = {
        "hole": "3 of 4 elements have an owner",
        "overlap": "two owners",
        "shape": "two shapes",
        "dtype": "two shapes or dtypes",
        "twice": "twice",
    }[problem]
    with pytest.raises(SaveError, match=words):
        save(tmp_path, 2, [Piece("x", (4,), ((0, 2),), torch.ones(2)), second], {}, ALONE)
    assert names_in(tmp_path) == [".lock", "iter_0000001", "latest"]
    assert open_checkpoint(tmp_path).iteration == 1


def test_a_piece_says_what_is_wrong_with_it():
    with pytest.raises(ValueError, match="inside the shape"):
        Piece("x", (4,), ((2, 5),), torch.ones(3))
    with pytest.raises(ValueError, match="cannot hold the box"):
        Piece("x", (4,), ((2, 4),), torch.ones(3))


def test_an_iteration_saved_again_replaces_the_first(tmp_path):
    for value in (1.0, 2.0):
        save(tmp_path, 7, [single("x", torch.tensor([value]))], {}, ALONE)
    assert open_checkpoint(tmp_path).read("x").item() == 2.0
    assert names_in(tmp_path) == [".lock", "iter_0000007", "latest"]


def test_a_rank_that_outlives_its_run_cannot_write_into_the_next_ones(tmp_path, monkeypatch):
    """Rank 0 was killed and the run started again; rank 1's old part passed every checksum."""
    written_to = []

    def killed(directory, name, new, *_):
        written_to.append(new)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(publication, "publish", killed)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                save(tmp_path, 7, [single("x", torch.ones(1))], {}, ALONE)
    before, now = written_to
    assert now.exists() and not before.exists()
    with pytest.raises(FileNotFoundError):
        files.write_file(before / "rank_00001.safetensors", [("x", torch.zeros(1))])
    save(tmp_path, 7, [single("x", torch.ones(1))], {}, ALONE)
    assert names_in(tmp_path) == [".lock", "iter_0000007", "latest"]


def test_a_file_system_without_locks_is_said_once(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folders.fcntl, "lockf", no_locks)
    said = []
    with Saver(tmp_path, ALONE, say=said.append) as saver:
        for iteration in (1, 2):
            saver.save(iteration, [single("x", torch.ones(1))], {})
    assert open_checkpoint(tmp_path).iteration == 2
    (line,) = said
    assert f"{tmp_path} has no locks (No locks available)" in line


def test_meta_that_is_not_json_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(SaveError, match="not JSON serializable"):
        save(tmp_path, 1, [single("x", torch.ones(1))], {"x": torch.ones(1)}, ALONE)
    assert names_in(tmp_path) == [".lock"]


def test_old_ones_go_only_after_the_new_one_and_never_the_loaded_one(tmp_path):
    with Saver(tmp_path, ALONE, keep_last=2, loaded=1) as saver:
        for iteration in range(1, 6):
            saver.save(iteration, [single("x", torch.ones(1))], {})
    assert [n for n in names_in(tmp_path) if n.startswith("iter")] == [
        "iter_0000001",
        "iter_0000004",
        "iter_0000005",
    ]
    with pytest.raises(ValueError, match="keep_last is 0"):
        Saver(tmp_path, ALONE, keep_last=0)


def test_in_the_background_the_values_are_those_of_the_call(tmp_path):
    values = torch.zeros(300_000)
    with Saver(tmp_path, ALONE, asynchronous=True) as saver:
        for iteration in (1, 2, 3):
            values.fill_(iteration)
            saver.save(iteration, [single("x", values)], {})
            saver.copied()
            values.fill_(-1)
        assert saver.wait() == 3
        assert saver.wait() is None
    for iteration in (1, 2, 3):
        assert (open_checkpoint(tmp_path, iteration).read("x") == iteration).all()


def test_in_the_background_a_failure_is_raised_at_the_next_call(tmp_path, monkeypatch):
    said = []
    with Saver(tmp_path, ALONE, asynchronous=True, say=said.append) as saver:
        saver.save(1, [single("x", torch.ones(9))], {})
        saver.wait()
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "pwrite", no_space)
            saver.save(2, [single("x", torch.ones(9))], {})
            with pytest.raises(SaveError, match="No space left"):
                saver.save(3, [single("x", torch.ones(9))], {})
        assert "saving iteration 2" in said[0]
        saver.save(3, [single("x", torch.ones(9))], {})
    assert names_in(tmp_path) == [".lock", "iter_0000001", "iter_0000003", "latest"]


def test_a_save_copies_no_more_than_a_block(tmp_path):
    """The safetensors package made a copy of the whole state first."""
    tensors = [single(f"x{i}", torch.zeros(2_000_000)) for i in range(8)]  # 8 MB each
    tracemalloc.start()
    save(tmp_path, 1, tensors, {}, ALONE)
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.fill(tensors)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * files.BLOCK


def test_only_the_blocks_of_the_wanted_rows_are_read(tmp_path, monkeypatch, small_blocks):
    save(tmp_path, 1, [single("x", torch.arange(1024.0).view(64, 16))], {}, ALONE)  # a row a block
    checkpoint = open_checkpoint(tmp_path)
    read, real = [], files.TensorFile.read_block

    def counted(self, source, key, i, *rest):
        read.append(i)
        return real(self, source, key, i, *rest)

    monkeypatch.setattr(files.TensorFile, "read_block", counted)
    checkpoint.read("x", ((10, 13), (0, 8)))
    assert sorted(read) == [10, 11, 12]


def test_nothing_saved_yet(tmp_path):
    with pytest.raises(MissingCheckpoint):
        open_checkpoint(tmp_path)


# ---- several ranks --------------------------------------------------------------------------


@pytest.mark.parametrize("saved, tp", [(2, 2), (4, 2), (1, 1)])
def test_saved_at_one_layout_loaded_at_the_others(ranks, tmp_path, saved, tp):
    ranks.run(save_layout, tmp_path, 5, tp, size=saved)
    assert open_checkpoint(tmp_path).meta == {"layout": f"tp {tp}"}
    for size, other in [(1, 1), (4, 4), (4, 2), (2, 1)]:
        assert ranks.run(load_layout, tmp_path, other, size=size) == [(5, [])] * size


def test_padding_is_nobodys(ranks, tmp_path):
    """11 rows padded to 12: the file has 11, and the padding row of the loader stays zero."""
    ranks.run(save_layout, tmp_path, 1, 2, size=2)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.shape("model/embedding") == checkpoint.shape("moment/embedding") == (11, 6)
    assert checkpoint.boxes("model/embedding") == [((0, 6), (0, 6)), ((6, 11), (0, 6))]


def no_space(*_):
    raise OSError(28, "No space left on device")


def fail_on_rank_1(world, directory, asynchronous):
    with Saver(directory, world, asynchronous=asynchronous, say=lambda line: None) as saver:
        saver.save(1, owned(world.rank, world.size), {})
        saver.wait()
        real = os.pwrite
        if world.rank == 1:
            os.pwrite = no_space
        try:
            saver.save(2, owned(world.rank, world.size), {})
            saver.wait()
        except SaveError as error:
            text = str(error)
        finally:
            os.pwrite = real
        saver.save(3, owned(world.rank, world.size), {})
    return text


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_on_one_rank_is_an_error_on_all(ranks, tmp_path, asynchronous):
    told = ranks.run(fail_on_rank_1, tmp_path, asynchronous, size=2)
    assert told[0] == told[1]
    assert "iteration 2 was not saved" in told[0] and "rank 1: OSError" in told[0]
    assert names_in(tmp_path) == [".lock", "iter_0000001", "iter_0000003", "latest"]


def save_with_room_for(world, directory, free, asynchronous):
    """What each save said; the disk has that many bytes free."""
    real, told = folders.shutil.disk_usage, []
    with Saver(directory, world, asynchronous=asynchronous, keep_last=1) as saver:
        try:
            for iteration, room in enumerate(free, start=1):
                folders.shutil.disk_usage = lambda path, room=room: SimpleNamespace(free=room)
                try:
                    saver.save(iteration, owned(world.rank, world.size), {})
                    saver.wait()
                    told.append("")
                except SaveError as error:
                    told.append(str(error))
        finally:
            folders.shutil.disk_usage = real
    return told


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_would_not_fit_writes_nothing(ranks, tmp_path, asynchronous):
    """The new one stands beside the old one for a moment, so what --keep-last frees counts not."""
    pieces = [piece for rank in range(2) for piece in owned(rank, 2)]
    needed = sum(piece.tensor.numel() * piece.tensor.element_size() for piece in pieces)
    room = (needed, needed - 1, 0)
    first, second = ranks.run(save_with_room_for, tmp_path, room, asynchronous, size=2)
    assert first == second and first[0] == ""
    for iteration, text in enumerate(first[1:], start=2):
        assert text == (
            f"{tmp_path}: cannot save iteration {iteration}: a checkpoint takes "
            f"{folders.size_text(needed)}, {tmp_path} has {folders.size_text(room[iteration - 1])} "
            "free; free some space or choose another folder"
        )
    assert names_in(tmp_path) == [".lock", "iter_0000001", "latest"]


def pieces_fail_on_rank_1(world, directory):
    def mine():
        yield from owned(world.rank, world.size)
        if world.rank == 1:
            raise RuntimeError("planted")

    try:
        save(directory, 1, mine(), {}, world)
    except SaveError as error:
        return str(error)


def test_a_rank_that_cannot_say_what_it_saves_is_told_to_all(ranks, tmp_path):
    first, second = ranks.run(pieces_fail_on_rank_1, tmp_path, size=2)
    assert first == second == f"{tmp_path}: cannot save iteration 1: rank 1: RuntimeError: planted"


def save_twice_the_same(world, directory):
    try:
        save(directory, 1, [single("x", torch.ones(2))], {}, world)
    except SaveError as error:
        return str(error)


def test_two_ranks_that_own_the_same_elements_are_told_apart(ranks, tmp_path):
    first, second = ranks.run(save_twice_the_same, tmp_path, size=2)
    assert first == second
    assert "[0:2] and [0:2] overlap" in first


def no_folder(world, directory):
    try:
        Saver(directory / "file" / "x", world)
    except CheckpointError as error:
        return str(error)


def test_a_folder_that_cannot_be_made_is_an_error_on_all(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    first, second = ranks.run(no_folder, tmp_path, size=2)
    assert first == second and "NotADirectoryError" in first


def load_refusing(world, directory, failing, kind):
    def read(checkpoint):
        if world.rank == failing:
            raise kind("planted")
        return checkpoint.iteration

    try:
        return load(directory, read, world)
    except Exception as error:
        return type(error).__name__, str(error)


def test_what_one_rank_cannot_load_no_rank_loads(ranks, tmp_path):
    save(tmp_path, 1, [single("x", torch.ones(2))], {}, ALONE)
    told = ranks.run(load_refusing, tmp_path, 1, CheckpointError, size=2)
    assert told == [("CheckpointError", "rank 1: planted"), ("CheckpointError", "planted")]
    told = ranks.run(load_refusing, tmp_path, 0, ZeroDivisionError, size=2)
    assert told[0] == ("ZeroDivisionError", "planted")
    assert told[1] == ("CheckpointError", "rank 0: ZeroDivisionError: planted")


def load_missing(world, directory):
    with pytest.raises(MissingCheckpoint):
        load(directory, lambda checkpoint: None, world)


def test_nothing_there_is_the_same_for_all(ranks, tmp_path):
    ranks.run(load_missing, tmp_path / "absent", size=2)
