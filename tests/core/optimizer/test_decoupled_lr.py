"""--decoupled-lr: the word table and the output layer move at their own rate, all else at --lr.

Plain SGD shows the rate of every parameter: one step moves it by rate x gradient.
"""

from dataclasses import replace

import pytest
import torch

from core.comm import Group
from core.optimizer.config import OptimizerConfig
from core.optimizer.schedule import Schedule
from core.train import TrainState
from models.config import GPTConfig
from tests.recipe import assert_same_bits, contents, run_recipe
from tests.training import GPT2, Layout, gathered, make_trainer

LR, OTHER = 0.5, 0.125
PLAIN = {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}
TIED = replace(GPT2, fp64=True)
UNTIED = replace(TIED, untie_embeddings_and_output_weights=True)
TABLES = {"tied": {"embedding.word.weight"}, "untied": {"embedding.word.weight", "output.weight"}}


def moved(
    world: Group, model: GPTConfig, layout: Layout, other: float | None
) -> dict[str, torch.Tensor]:
    """By how much one step moves every parameter."""
    trainer, feed = make_trainer(world, model, layout, lr=LR, **PLAIN)
    if other is not None:
        config = OptimizerConfig(lr=LR, decoupled_lr=other, lr_decay_style="constant")
        sizes = {"train_samples": 8000, "global_batch_size": 8}
        trainer.vocabulary_schedule = Schedule.of(config.of_vocabulary(), **sizes)
    before = gathered(trainer)
    trainer.train_step(TrainState(), feed)
    return {name: weight - before[name] for name, weight in gathered(trainer).items()}


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2), Layout(pp=2), Layout(sharding="optim")], ids=str
)
def test_tables_move_at_their_own_rate(ranks, layout, tables):
    model = TIED if tables == "tied" else UNTIED
    if layout == Layout():
        same, apart = ([moved(Group.single("world"), model, layout, x)] for x in (None, OTHER))
    else:
        same, apart = (ranks.run(moved, model, layout, x) for x in (None, OTHER))
    seen = set()
    for one, other in zip(same, apart, strict=True):
        seen |= one.keys() & TABLES[tables]
        for name, step in one.items():
            share = OTHER / LR if name in TABLES[tables] else 1.0
            assert share == 1.0 or step.abs().max() > 1e-3
            torch.testing.assert_close(other[name], step * share, rtol=1e-6, atol=1e-12)
    assert seen == TABLES[tables]


@pytest.mark.parametrize("tables", TABLES)
def test_the_flag_reaches_the_tables(tmp_path, tables):
    flags = ["--train-iters", 1, "--optimizer", "sgd", "--lr-decay-style", "constant"]
    flags += ["--untie-embeddings-and-output-weights"] * (tables == "untied")
    for name, more in {"same": (), "apart": ("--decoupled-lr", 1e-1)}.items():
        run_recipe(Group.single("world"), *flags, *more, "--save", tmp_path / name)
    same, apart = (contents(tmp_path / name) for name in ("same", "apart"))
    moved = {name for name in same if not torch.equal(same[name], apart[name])}
    assert moved == {f"model/{name}" for name in TABLES[tables]}


# ---- resuming ------------------------------------------------------------------------------------

ALONE = Group.single("world")
FOUR = ("--train-iters", 4, "--lr-decay-style", "cosine", "--min-lr", 1e-4)
RATE = ("--decoupled-lr", 1e-1)
OVERRIDE = "--override-opt-param-scheduler"


@pytest.fixture(scope="module")
def two_of_four(tmp_path_factory):
    """{"with", "without" --decoupled-lr: a folder with iterations 2 and 4 of 4}"""
    folders = {}
    for name, more in (("with", RATE), ("without", ())):
        folders[name] = tmp_path_factory.mktemp(name)
        run_recipe(ALONE, *FOUR, *more, "--save", folders[name], "--save-interval", 2)
    return folders


@pytest.mark.parametrize(
    ("saved", "flags", "said"),
    [
        ("with", RATE, ""),
        ("with", (), f"--decoupled-lr is on, as the checkpoint has it; {OVERRIDE} takes"),
        ("with", ("--decoupled-lr", 1e-2), f"the checkpoint wins; {OVERRIDE} takes"),
        ("without", RATE, f"--decoupled-lr is off, as the checkpoint has it; {OVERRIDE} takes"),
    ],
    ids=["same", "dropped", "other", "added"],
)
def test_a_resumed_run_keeps_the_tables_rate(two_of_four, tmp_path, saved, flags, said):
    load = ("--load", two_of_four[saved], "--ckpt-step", 2, "--save", tmp_path)
    code, printed = run_recipe(ALONE, *FOUR, *flags, *load)
    assert code == 0
    assert said in printed and (OVERRIDE in printed) == bool(said)
    assert_same_bits(contents(tmp_path), contents(two_of_four[saved], 4))


@pytest.mark.parametrize(("saved", "flags"), [("with", ()), ("without", RATE)])
def test_or_takes_the_command_lines(two_of_four, tmp_path, saved, flags):
    load = ("--load", two_of_four[saved], "--ckpt-step", 2, "--save", tmp_path, OVERRIDE)
    _, printed = run_recipe(ALONE, *FOUR, *flags, *load)
    assert f"--decoupled-lr is {'on' if flags else 'off'}, as the command line has it" in printed
    assert "takes the command line's" not in printed
    kept, here = contents(two_of_four[saved], 4), contents(tmp_path)
    for name in ("model/embedding.word.weight", "optimizer/exp_avg/embedding.word.weight"):
        assert not torch.equal(here[name], kept[name])
