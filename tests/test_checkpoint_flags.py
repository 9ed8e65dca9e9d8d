"""The checkpoint flags from the outside: what is kept, what is loaded, what a failed save does."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import pretrain_gpt
from core.checkpoint import directory, files, staging, store
from core.checkpoint.directory import saved_iterations
from core.checkpoint.errors import CheckpointError, MissingCheckpoint, SaveError
from core.checkpoint.preflight import problems
from core.checkpoint.reader import open_checkpoint
from core.checkpoint_args import with_checkpoint_args
from core.comm import Group
from core.config import parse
from core.train import Trainer, TrainingStopped
from core.train_config import CheckpointConfig
from scripts import convert_hf
from tests.recipe import TINY, assert_same_bits, contents, rows, run_recipe
from tests.scripts.test_convert_hf import write_theirs

ROOT = Path(__file__).parents[1]
TINY_HF = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16,
           "vocab_size": 50}  # fmt: skip


def run(*flags: object) -> str:
    code, text = run_recipe(Group.single("world"), *flags)
    assert code == 0
    return text


# ---- what is kept --------------------------------------------------------------------------------


def test_keep_last(tmp_path):
    """NVIDIA/Megatron-LM#1354: six saves, keep two: two folders, and the pointer is right."""
    run("--train-iters", 6, "--save-interval", 1, "--keep-last", 2, "--save", tmp_path)
    assert saved_iterations(tmp_path) == [6, 5]
    assert (tmp_path / "latest").read_text() == "iter_0000006\n"


def test_every_third_for_good_and_never_the_one_loaded(tmp_path):
    save = ("--save", tmp_path, "--save-interval", 1, "--train-iters", 8)
    run(*save, "--exit-interval", 2, "--keep-last", 1)
    retain = (*save, "--keep-last", 2, "--save-retain-interval", 3)
    run(*retain, "--load", tmp_path)
    assert saved_iterations(tmp_path) == [8, 7, 6, 3, 2], "2 is the one that was loaded"


def test_a_step_loaded_from_elsewhere_protects_nothing_here(tmp_path):
    run("--save", tmp_path / "a", "--train-iters", 6, "--exit-interval", 2)
    load = ("--load", tmp_path / "a", "--finetune", "--train-iters", 4)
    run(*load, "--save", tmp_path / "b", "--save-interval", 1, "--keep-last", 1)
    assert saved_iterations(tmp_path / "b") == [4]


def test_a_branch_that_was_given_up_neither_counts_nor_is_turned_to(tmp_path, capsys):
    """Steps 4 and 6 of the branch were kept as the newest, and stood in for a damaged 5."""
    flags = ("--save", tmp_path, "--load", tmp_path, "--train-iters", 6)
    run(*flags, "--save-interval", 1)
    theirs = contents(tmp_path, 5)
    capsys.readouterr()
    again = (*flags, "--ckpt-step", 1, "--save-interval", 2, "--keep-last", 2)
    run(*again, "--exit-interval", 5, "--lr", 1e-2, "--override-opt-param-scheduler")
    assert saved_iterations(tmp_path) == [5, 4, 1]
    branch = tmp_path / "branch_1"
    assert saved_iterations(branch) == [6, 5, 4, 3, 2]
    assert_same_bits(contents(branch, 5), theirs)
    (said,) = capsys.readouterr().err.splitlines()
    assert "iter_0000002, iter_0000003" in said and str(branch) in said
    (tmp_path / "iter_0000005" / "index.json").write_text("torn")
    assert f"loaded {tmp_path / 'iter_0000004'}" in run(*flags)
    assert saved_iterations(tmp_path / "branch_2") == [5]


def test_a_checkpoint_that_is_a_link_to_an_archive_is_resumed_from_where_the_link_is(tmp_path):
    """All there was in the folder was set aside, as if the run had begun elsewhere."""
    flags = ("--save", tmp_path / "run", "--load", tmp_path / "run", "--train-iters", 3)
    run(*flags, "--save-interval", 1, "--exit-interval", 2)
    newest, archived = tmp_path / "run" / "iter_0000002", tmp_path / "archived"
    newest.rename(archived)
    newest.symlink_to(archived)
    run(*flags)
    assert saved_iterations(tmp_path / "run") == [3, 2, 1]
    (tmp_path / "link").symlink_to(tmp_path / "run" / "iter_0000001")
    run(*flags, "--load", tmp_path / "link", "--keep-last", 1)
    assert saved_iterations(tmp_path / "run") == [3, 1], "the one begun with stays"


def test_a_run_without_load_sets_aside_what_it_finds(tmp_path, capsys):
    run("--save", tmp_path, "--train-iters", 3, "--save-interval", 1)
    run("--save", tmp_path, "--train-iters", 2, "--keep-last", 1)
    assert saved_iterations(tmp_path) == [2]
    assert saved_iterations(tmp_path / "branch_1") == [3, 2, 1]
    assert "are not of this run" in capsys.readouterr().err


# ---- saving in the background --------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_saved_in_the_background_it_is_the_same(ranks, tmp_path, size):
    """The sharded optimizer's steps go on after a save. (They did not: a save made the memory that
    parameters are gathered in one that could not be resized.)"""
    flags = ("--train-iters", 4, "--save-interval", 1, "--hidden-dropout", 0.1)
    flags += ("--use-distributed-optimizer",) if size > 1 else ()
    for name, way in (("plain", ()), ("behind", ("--async-save", "--keep-last", 3))):
        how = (*flags, *way, "--save", tmp_path / name)
        results = ranks.run(run_recipe, *how, size=size)
        assert [code for code, _ in results] == [0] * size
    assert saved_iterations(tmp_path / "plain") == [4, 3, 2, 1]
    assert saved_iterations(tmp_path / "behind") == [4, 3, 2]
    for step in (2, 3, 4):
        assert_same_bits(contents(tmp_path / "plain", step), contents(tmp_path / "behind", step))


def test_the_update_waits_for_the_copy(tmp_path, monkeypatch):
    """A copy that takes longer than a step's forward and backward has none of the update in it."""
    made = staging.Copies.made

    def slowly(self):
        time.sleep(0.3)
        yield from made(self)

    monkeypatch.setattr(staging.Copies, "made", slowly)
    flags = ("--train-iters", 3, "--save-interval", 1)
    run(*flags, "--save", tmp_path / "behind", "--async-save")
    run(*flags, "--save", tmp_path / "plain")
    for step in (1, 2, 3):
        assert_same_bits(contents(tmp_path / "plain", step), contents(tmp_path / "behind", step))


# ---- a disk that is full -------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch):
    """The numbers of the saves that find no space; returned to be filled in."""
    full, count = set(), [0]
    write_file = files.write_file

    def write(path, *args):
        count[0] += 1
        if count[0] in full:
            raise OSError(28, "No space left on device")
        return write_file(path, *args)

    monkeypatch.setattr(files, "write_file", write)
    return full


@pytest.mark.parametrize("behind", [(), ("--async-save",)], ids=["", "async"])
def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path, full_disk, behind):
    full_disk |= set(range(2, 9))
    flags = ("--train-iters", 4, "--save-interval", 1, "--save", tmp_path, *behind)
    with pytest.raises(SaveError, match=r"iteration 2 was not saved .*No space left on device"):
        run(*flags)
    assert saved_iterations(tmp_path) == [1]
    full_disk.clear()
    assert f"loaded {tmp_path / 'iter_0000001'}" in run(*flags, "--load", tmp_path)
    assert saved_iterations(tmp_path) == [4, 3, 2, 1]


@pytest.mark.parametrize("behind", [(), ("--async-save",)], ids=["", "async"])
def test_a_full_disk_with_on_failed_save_continue(tmp_path, full_disk, behind, capsys):
    """Training goes on and the next save tries again; nothing of the numbers changes."""
    full_disk |= {2, 3}
    flags = ("--train-iters", 4, "--save-interval", 1, "--on-failed-save", "continue")
    run(*flags, "--save", tmp_path / "full", *behind)
    said = capsys.readouterr().err
    assert len(re.findall("WARNING: training goes on, as --on-failed-save", said)) == 2
    assert "iteration 2 was not saved" in said and "iteration 3 was not saved" in said
    assert saved_iterations(tmp_path / "full") == [4, 1]
    run(*flags, "--save", tmp_path / "whole")
    assert_same_bits(contents(tmp_path / "full"), contents(tmp_path / "whole"))


def test_a_disk_without_room_for_a_save(tmp_path, monkeypatch, capsys):
    """Nothing is written of it; the run goes on or ends, as --on-failed-save says."""
    free = []
    monkeypatch.setattr(
        directory.shutil, "disk_usage", lambda path: SimpleNamespace(free=free.pop(0))
    )
    flags = ("--train-iters", 3, "--save-interval", 1, "--keep-last", 1)
    lack = r"cannot save iteration 2: a checkpoint takes 323\.2 KiB, .* has 1000 bytes free"
    free += [10**9, 1000, 10**9]
    run(*flags, "--on-failed-save", "continue", "--save", tmp_path / "on")
    assert re.search(f"WARNING: training goes on, .* {lack}", capsys.readouterr().err)
    assert (saved_iterations(tmp_path / "on"), free) == ([3], [])
    free += [10**9, 1000]
    with pytest.raises(SaveError, match=lack):
        run(*flags, "--save", tmp_path / "off")
    assert saved_iterations(tmp_path / "off") == [1]
    assert not list((tmp_path / "off").glob("*.tmp"))


@pytest.mark.parametrize("behind", [(), ("--async-save",)], ids=["", "async"])
def test_the_last_save_must_not_fail(tmp_path, full_disk, behind):
    full_disk |= {2, 3}
    flags = ("--train-iters", 2, "--save-interval", 1, "--on-failed-save", "continue")
    with pytest.raises(SaveError, match="iteration 2 was not saved"):
        run(*flags, "--save", tmp_path, *behind)
    assert saved_iterations(tmp_path) == [1]


@pytest.mark.parametrize("how", [("--on-failed-save", "continue"), ("--async-save",)])
def test_the_last_save_is_tried_once_more(tmp_path, full_disk, how):
    full_disk.add(2)
    flags = ("--train-iters", 2, "--save-interval", 1)
    run(*flags, *how, "--save", tmp_path / "full")
    assert saved_iterations(tmp_path / "full") == [2, 1]
    run(*flags, "--save", tmp_path / "whole")
    assert_same_bits(contents(tmp_path / "full"), contents(tmp_path / "whole"))


# ---- the end of a run with a save under way ------------------------------------------------------


@pytest.fixture
def slow_disk(monkeypatch):
    """Writing takes longer than a rank that fails alone waits for it."""
    monkeypatch.setattr(store, "PATIENCE", 0.05)
    write_file = files.write_file

    def write(*args):
        time.sleep(1.0)
        return write_file(*args)

    monkeypatch.setattr(files, "write_file", write)


@pytest.fixture
def stuck_disk(monkeypatch):
    """Writing does not end before the test."""
    monkeypatch.setattr(store, "PATIENCE", 0.05)
    write_file, go = files.write_file, threading.Event()

    def write(*args):
        go.wait(120)
        return write_file(*args)

    monkeypatch.setattr(files, "write_file", write)
    yield
    go.set()


def stop_at_3(monkeypatch, error):
    """The third step fails, after the save of the second has begun."""
    train_step = Trainer.train_step

    def step(self, state, feed):
        if state.iteration == 2:
            raise error
        return train_step(self, state, feed)

    monkeypatch.setattr(Trainer, "train_step", step)


BEHIND = ("--train-iters", 4, "--save-interval", 2, "--async-save")


def test_a_nan_waits_for_the_save_under_way(tmp_path, slow_disk, monkeypatch):
    stop_at_3(monkeypatch, TrainingStopped("planted"))
    with pytest.raises(TrainingStopped, match="planted"):
        run(*BEHIND, "--save", tmp_path)
    assert saved_iterations(tmp_path) == [2]


def test_a_nan_is_told_first_when_that_save_fails_too(tmp_path, full_disk, monkeypatch):
    full_disk |= {1, 2}
    stop_at_3(monkeypatch, TrainingStopped("planted"))
    with pytest.raises(TrainingStopped, match="planted") as raised:
        run(*BEHIND, "--save", tmp_path)
    assert isinstance(raised.value.__cause__, SaveError)
    assert "iteration 2 was not saved" in str(raised.value.__cause__)


def test_an_error_of_one_rank_waits_for_nobody(tmp_path, stuck_disk, monkeypatch):
    stop_at_3(monkeypatch, ZeroDivisionError("planted"))
    with pytest.raises(ZeroDivisionError):
        run(*BEHIND, "--save", tmp_path)
    (path,) = tmp_path.glob("iter*")
    assert path.match("iter_0000002.*.tmp")


def test_a_failed_background_save_ends_the_run_with_the_next_one_saved(tmp_path, full_disk):
    full_disk.add(2)
    flags = ("--train-iters", 6, "--save-interval", 1, "--async-save", "--save", tmp_path)
    with pytest.raises(SaveError, match="iteration 2 was not saved"):
        run(*flags)
    assert saved_iterations(tmp_path) == [3, 1]


# ---- where a run starts --------------------------------------------------------------------------


@pytest.fixture
def imported(tmp_path, capsys):
    """A --save folder that scripts/convert_hf.py has written: weights, and no state of a run."""
    write_theirs(tmp_path / "hf", TINY_HF)
    assert convert_hf.main(["import", str(tmp_path / "hf"), str(tmp_path / "imported")]) == 0
    capsys.readouterr()
    return tmp_path / "imported"


@pytest.mark.parametrize("how", ["--finetune", "--no-load-optim"])
def test_an_import_is_trained_on(imported, tmp_path, how):
    start = ("--load", imported, "--train-iters", 1, "--lr", 1e-9, "--save", tmp_path / "tuned")
    said = run(*start, how)
    assert f"loaded {imported / 'iter_0000000'}" in said and "iteration        1/" in said
    before, after = contents(imported), contents(tmp_path / "tuned")
    name = "model/layers.1.mlp.up.weight"
    assert 0 < (before[name] - after[name]).abs().max() < 2e-9 + 1e-7


def test_an_import_has_no_moments(imported):
    with pytest.raises(CheckpointError, match="holds weights alone; add --no-load-optim, or --fin"):
        run("--load", imported, "--train-iters", 1)


def test_pretrained_checkpoint_starts_what_has_no_checkpoint_yet(imported, tmp_path):
    """The same command line starts from the weights, and goes on from its own checkpoint."""
    folder = ("--save", tmp_path / "run", "--load", tmp_path / "run")
    flags = (*folder, "--pretrained-checkpoint", imported, "--train-iters", 4)
    first = run(*flags, "--exit-interval", 2)
    assert f"loaded {imported / 'iter_0000000'}" in first
    second = run(*flags, "--exit-on-missing-checkpoint")
    assert f"loaded {tmp_path / 'run' / 'iter_0000002'}" in second
    assert "iteration        3/       4" in second and "iteration        2/" not in second
    metrics = ("--metrics-file", tmp_path / "tuned.jsonl", "--train-iters", 1)
    run("--load", imported, "--finetune", *metrics)
    run("--pretrained-checkpoint", imported, "--metrics-file", tmp_path / "x.jsonl", *metrics[2:])
    assert rows(tmp_path / "tuned.jsonl") == rows(tmp_path / "x.jsonl")


def test_pretrained_checkpoint_must_be_there(tmp_path):
    config = CheckpointConfig(load=str(tmp_path / "a"), pretrained_checkpoint=str(tmp_path / "b"))
    assert list(problems(config, None, 0)) == [
        f"--pretrained-checkpoint: {tmp_path / 'b'} has no checkpoint"
    ]
    with pytest.raises(MissingCheckpoint):
        run("--pretrained-checkpoint", tmp_path / "b", "--train-iters", 1)


def refused(**flags) -> str:
    return "; ".join(problems(CheckpointConfig(**flags), None, 0))


def test_a_start_from_weights_must_not_save_over_them(imported, tmp_path):
    """Started again, it began from its own last step, as iteration 0."""
    here, own = str(imported), str(tmp_path / "own")
    said = refused(load=here, save=f"{tmp_path}/./imported", finetune=True)
    assert f"--finetune with --load {here}" in said and "a folder of its own" in said
    step = str(imported / "iter_0000000")
    assert "--finetune with" in refused(load=step, save=here, finetune=True)
    assert "--pretrained-checkpoint" in refused(pretrained_checkpoint=here, save=here)
    assert "--pretrained-checkpoint" in refused(pretrained_checkpoint=here, load=own, save=here)
    assert not refused(load=here, save=own, finetune=True)
    assert not refused(load=here, save=here)
    assert not refused(load=here, save=here, pretrained_checkpoint=here)
    assert not refused(load=own, save=own, finetune=True), "nothing is there yet"


# ---- the checkpoint's flags ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The folder of a run of 48 channels with gated MLPs."""
    folder = tmp_path_factory.mktemp("wide")
    run("--hidden-size", 48, "--swiglu", "--hidden-dropout", 0.3, "--train-iters", 1,
        "--group-query-attention", "--num-query-groups", 2, "--label-smoothing", 0.2, "--z-loss",
        1e-3, "--fp64", "--save", folder)  # fmt: skip
    return folder


SHAPELESS = """--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 2 --mock-data
    --eval-iters 0""".split()


def test_the_checkpoints_flags_stand_for_those_not_given(wide):
    argv = [*SHAPELESS, "--load", str(wide), "--use-checkpoint-args", "--hidden_dropout", "0"]
    config = parse(pretrain_gpt.RunConfig, with_checkpoint_args(pretrain_gpt.RunConfig, argv))
    saved = open_checkpoint(wide).meta
    assert config.model.identity() == saved["model"]
    assert (config.model.seq_length, config.model.hidden_dropout) == (16, 0.0)
    assert list(problems(config.checkpoint, config.model.identity(), 0)) == []
    differ = with_checkpoint_args(pretrain_gpt.RunConfig, [*argv, "--hidden-size", "64"])
    (said,) = problems(config.checkpoint, parse(pretrain_gpt.RunConfig, differ).model.identity(), 0)
    assert "--hidden-size: 48 in the checkpoint, 64 given" in said


def test_how_it_was_trained_is_not_taken(wide):
    argv, said = [*SHAPELESS, "--load", str(wide), "--use-checkpoint-args"], []
    words = with_checkpoint_args(pretrain_gpt.RunConfig, argv, said.append)
    model = parse(pretrain_gpt.RunConfig, words).model
    trained = (model.hidden_dropout, model.label_smoothing, model.z_loss, model.fp64)
    assert trained == (0.1, 0.0, 0.0, False)
    assert (model.query_groups, model.seq_length) == (2, 16)
    (line,) = said
    assert "--hidden-size 48" in line and "--swiglu" in line and "iter_0000001" in line


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_speaks(wide, tmp_path):
    """The run was refused for want of --num-layers, though it would have fallen back."""
    shutil.copytree(wide, tmp_path / "run")
    shutil.copytree(wide / "iter_0000001", tmp_path / "run" / "iter_0000002")
    (tmp_path / "run" / "iter_0000002" / "index.json").write_text("torn")
    (tmp_path / "run" / "latest").write_text("iter_0000002")
    argv, said = [*SHAPELESS, "--load", str(tmp_path / "run"), "--use-checkpoint-args"], []
    words = with_checkpoint_args(pretrain_gpt.RunConfig, argv, said.append)
    assert parse(pretrain_gpt.RunConfig, words).model.hidden_size == 48
    assert "iter_0000002 is damaged" in said[0] and "run/iter_0000001;" in said[0]


@pytest.mark.parametrize("more", [[], ["--use-checkpoint-args", "--load", "nowhere"]])
def test_without_a_checkpoint_or_the_flag_nothing_is_supplied(more):
    assert with_checkpoint_args(pretrain_gpt.RunConfig, [*SHAPELESS, *more]) == [*SHAPELESS, *more]


def test_a_pretrained_checkpoint_has_flags_too(imported, tmp_path):
    argv = [*SHAPELESS, "--load", str(tmp_path / "none"), "--use-checkpoint-args"]
    argv += ["--pretrained-checkpoint", str(imported)]
    words = with_checkpoint_args(pretrain_gpt.RunConfig, argv)
    assert parse(pretrain_gpt.RunConfig, words).model.vocab_size == 50


def program(*flags: object) -> subprocess.CompletedProcess:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "error", "pretrain_gpt.py", *map(str, flags)]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120
    )


def test_ranks_of_nproc_read_the_checkpoints_flags(wide):
    """NVIDIA/Megatron-LM#838: no size is typed."""
    shape = ("--load", wide, "--use-checkpoint-args", "--nproc", 2)
    done = program(*SHAPELESS, *shape, "--tensor-model-parallel-size", 2, "--log-interval", 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert "iteration        2/       2" in done.stdout


# ---- two jobs ------------------------------------------------------------------------------------


def test_a_second_job_in_the_folder_is_refused_before_it_starts(tmp_path):
    """The first one's status and checkpoints are left alone."""
    long = ("--train-iters", 100_000, "--save-interval", 50_000, "--save", tmp_path / "run")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "pretrain_gpt.py", *TINY, *map(str, long)]
    first = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        while "iteration " not in (line := first.stdout.readline()):
            assert line, "it ended before its first step"
        status = (tmp_path / "run" / "status.json").read_text()
        second = program(*TINY, *long)
        assert second.returncode == 2
        assert re.search(rf"another run is saving in .* \(process {first.pid} on", second.stderr)
        assert (tmp_path / "run" / "status.json").read_text() == status
        assert json.loads(status)["outcome"] == "running"
    finally:
        first.kill()
        first.communicate()
    shutil.rmtree(tmp_path / "run")
