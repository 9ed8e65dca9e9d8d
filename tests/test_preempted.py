"""Asked to stop while data is built: no step is made, every rank leaves, nothing is lost. And while
a run without training evaluates.

In training, in evaluation between steps and while a checkpoint is written:
tests/core/test_train.py and tests/scripts/test_chaos.py, which sends real signals to real runs.
"""

import time
from unittest import mock

import pytest

import data.gpt
from core.checkpoint import store
from core.comm import Group
from core.train import Trainer
from tests import recipe
from tests.recipe import rows, run_recipe, write_corpus

FLAGS = ("--train-iters", 3, "--global-batch-size", 4, "--split", 1, "--no-mock-data")


def flags_of(folder, name: str) -> tuple:
    files = ("--save", folder / name, "--load", folder / name, "--data-path", folder / "text")
    return (*FLAGS, *files, "--metrics-file", folder / f"{name}.jsonl")


def asked_while_drawing(world: Group, rank: int, *flags: object) -> tuple[int, str, list[int]]:
    """(exit code, what was printed, epochs drawn on this rank) of a run of which one rank is asked
    to stop as soon as it draws the order of its samples."""
    drawn = []

    def draw(offsets, seq_length, seed, number, poll):
        drawn.append(number)
        epoch = draw_epoch(offsets, seq_length, seed, number, poll)
        drawn.append("whole")
        return epoch

    def stop_requested(_) -> str | None:
        return "SIGUSR1" if drawn and world.rank == rank else None

    draw_epoch = data.gpt.draw_epoch
    with (
        mock.patch.object(data.gpt, "draw_epoch", draw),
        mock.patch.object(recipe.StandInWorld, "stop_requested", stop_requested),
    ):
        return (*run_recipe(world, *flags), drawn)


@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_while_data_is_built(ranks, tmp_path, size):
    """Elsewhere a signal is polled at step boundaries only, and 0 of 6 runs had saved."""
    write_corpus(tmp_path / "text", [range(i, i + 40) for i in range(8)])
    ranks.run(run_recipe, *flags_of(tmp_path, "whole"), size=size)
    mine = flags_of(tmp_path, "broken")
    asked = size - 1
    results = ranks.run(asked_while_drawing, asked, *mine, size=size)
    assert [code for code, _, _ in results] == [85] * size
    assert results[asked][2] == [0]  # and not "whole"
    assert "stopped before the first step: " in results[0][1]
    assert rows(tmp_path / "broken.jsonl") == []
    assert [code for code, _ in ranks.run(run_recipe, *mine, size=size)] == [0] * size
    assert rows(tmp_path / "broken.jsonl") == rows(tmp_path / "whole.jsonl") != []


def epochs_opened(world: Group, *flags: object) -> tuple[int, int]:
    """(exit code, epochs whose order this rank has drawn or mapped)"""
    order = data.gpt.GPTDataset._epoch
    with mock.patch.object(data.gpt.GPTDataset, "_epoch", autospec=True, side_effect=order) as got:
        return run_recipe(world, *flags)[0], got.call_count


@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_the_middle_of_a_pipeline_draws_no_order(ranks, tmp_path, positions):
    """It looks at no token; positions are known without the samples."""
    write_corpus(tmp_path / "text", [range(i, i + 40) for i in range(8)])
    flags = (*FLAGS, "--data-path", tmp_path / "text", "--position-embedding-type", positions)
    flags += ("--num-layers", 3, "--pipeline-model-parallel-size", 3)
    flags += ("--data-cache-path", tmp_path / "cache")
    assert ranks.run(epochs_opened, *flags, size=3) == [(0, 1), (0, 0), (0, 1)]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def asked_while_evaluating(world: Group, rank: int, batches: int, *flags: object):
    """(exit code, what was printed, batches evaluated on this rank) of a run of which one rank is
    asked to stop once it has evaluated so many."""
    done, evaluated = [], Trainer._reduce

    def counted(trainer, result):
        done.append(result)
        return evaluated(trainer, result)

    def stop_requested(_) -> str | None:
        return "SIGTERM" if world.rank == rank and len(done) >= batches else None

    with (
        mock.patch.object(Trainer, "_reduce", counted),
        mock.patch.object(recipe.StandInWorld, "stop_requested", stop_requested),
    ):
        return (*run_recipe(world, *flags), len(done))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("batches", [2, 7])
def test_a_signal_while_a_run_without_training_evaluates(ranks, tmp_path, size, batches):
    """Whichever of the two splits it comes in."""
    metrics = tmp_path / "metrics.jsonl"
    flags = ("--skip-train", "--train-iters", 3, "--eval-iters", 5, "--metrics-file", metrics)
    results = ranks.run(asked_while_evaluating, size - 1, batches, *flags, size=size)
    assert [(code, done) for code, _, done in results] == [(85, batches)] * size
    split = "validation" if batches < 5 else "test"
    assert f"{split} at iteration 0 was abandoned" in results[0][1]
    assert len(rows(metrics, "eval")) == batches // 5
    # asked for when all is done, it changes nothing
    results = ranks.run(asked_while_evaluating, size - 1, 10, *flags, size=size)
    assert [(code, done) for code, _, done in results] == [(0, 10)] * size


@pytest.mark.parametrize("mode", [(), ("--async-save",)])
def test_the_time_limit_learns_how_long_writes_beside_the_steps_take(tmp_path, mode):
    """Those within a step are part of it."""
    took, write = [], store.Part.write

    def slowly(part, path):
        time.sleep(0.3)
        write(part, path)

    flags = ("--train-iters", 4, "--save", tmp_path / "run", "--save-interval", 2, *mode)
    with (
        mock.patch.object(store.Part, "write", slowly),
        mock.patch.object(recipe.StandInWorld, "at_write", lambda _, seconds: took.append(seconds)),
    ):
        assert run_recipe(Group.single("world"), *flags)[0] == 0
    assert len(took) == (2 if mode else 0)
    assert all(0.3 <= seconds < 30 for seconds in took)
