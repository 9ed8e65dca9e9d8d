"""A resumed run whose numbers depend on other settings than before says which."""

import dataclasses

import pytest

import pretrain_bert
import pretrain_gpt
from core.comm import Group
from core.config import parse
from core.config_record import to_json
from core.resume import Checkpoints, batch_line, compared
from core.train import TrainState
from core.train_config import CheckpointConfig
from data.config import FILES, BertDataConfig, GPTDataConfig
from tests.recipe import TINY
from tests.training import GPT2, Layout, make_trainer

# What of the data's flags changes no number, or is told by its sets.
HARMLESS = {*FILES, "multiple_validation_sets", "full_validation", "num_dataset_builder_threads",
            "mmap_bin_files", "data_cache_path"}  # fmt: skip
ONE_STEP = ("--train-iters", "1")
BATCH = ("--global-batch-size", "8")


def resumed(world: Group, record: dict, folder: str, save: bool) -> list[str]:
    """Save at the start of a run with this record, or load: what is said of it."""
    trainer, _ = make_trainer(world, GPT2, Layout())
    config = CheckpointConfig(**{"save" if save else "load": folder})
    checkpoints = Checkpoints(config, trainer, record, {})
    state = TrainState() if save else checkpoints.load()
    with checkpoints:
        if save:
            checkpoints.save(state)
    return checkpoints.notes


def recorded(*flags: str, script=pretrain_gpt) -> dict:
    at = TINY.index(BATCH[0])
    words = [*TINY[:at], *TINY[at + 2 :]]
    words[words.index("--mock-data")] = "--data-path=a"  # mock data comes with a batch of its own
    return to_json(parse(script.RunConfig, [*words, *ONE_STEP, *flags]))


@pytest.mark.parametrize(
    ("flags", "now", "lines"),
    [
        ((), (), []),
        (BATCH, BATCH, []),
        ((), ("--global-batch-size", "2"), []),
        (
            (),
            ("--micro-batch-size", "4"),
            ["--global-batch-size: 2 in the checkpoint, 4 given",
             "4 is --micro-batch-size 4 x 1 data parallel ranks; to go on with 2, give "
             "--global-batch-size 2 --micro-batch-size 2"],
        ),
        ((), BATCH, ["--global-batch-size: 2 in the checkpoint, 8 given"]),
        (
            (),
            ("--split", "1", "--reset-position-ids", "--document-attention-mask"),
            ["--split: 969,30,1 in the checkpoint, 1 given",
             "--reset-position-ids: False in the checkpoint, True given",
             "--document-attention-mask: False in the checkpoint, True given"],
        ),
    ],
)  # fmt: skip
def test_what_is_said(tmp_path, flags, now, lines):
    world, folder = Group.single("world"), str(tmp_path)
    resumed(world, recorded(*flags), folder, save=True)
    _, *said = resumed(world, recorded(*now), folder, save=False)
    assert said == (["settings differ; the command line's hold", *lines] if lines else [])


def test_a_batch_that_is_not_given_doubles_with_the_ranks(ranks, tmp_path):
    """None before and None now: nothing was said."""
    resumed(Group.single("world"), recorded(), str(tmp_path), save=True)
    said = ranks.run(resumed, recorded(), str(tmp_path), False, size=2)[0]
    assert "--global-batch-size: 2 in the checkpoint, 4 given" in said
    assert said[-1] == batch_line(2, 2, 2)


@pytest.mark.parametrize(
    ("before", "micro", "dp", "way_out"),
    [
        (8, 2, 2, "; to go on with 8, give --global-batch-size 8"),
        (2, 2, 2, "; to go on with 2, give --global-batch-size 2 --micro-batch-size 1"),
        (12, 4, 2, "; to go on with 12, give --global-batch-size 12 --micro-batch-size 2"),
        (2, 2, 4, ""),
    ],
)
def test_the_way_back_to_the_batch_before(before, micro, dp, way_out):
    line = f"{micro * dp} is --micro-batch-size {micro} x {dp} data parallel ranks"
    assert batch_line(before, micro, dp) == line + way_out


@pytest.mark.parametrize(
    ("script", "section"), [(pretrain_gpt, GPTDataConfig), (pretrain_bert, BertDataConfig)]
)
def test_every_flag_of_the_data_is_compared_or_harmless(script, section):
    names = {field.name for field in dataclasses.fields(section)}
    assert names - compared(recorded(script=script), 1).keys() <= HARMLESS
    assert not HARMLESS & compared(recorded(script=script), 1).keys()
