"""core/assemble.py: which rank writes the cache of sample orders; what weight decay applies to."""

import logging
import re

import pytest

from core.assemble import decay_fact, writes_first
from core.comm import Group
from tests.recipe import run_recipe
from tests.training import GPT2, Layout, make_trainer


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


def test_what_weight_decay_applies_to_is_said_of_the_whole_model(ranks):
    """C083: four matrices a layer and the two tables (once, where two stages hold one) decay."""

    def said(text: str) -> list[int]:
        line = re.search(r"^weight decay on (.*) biases and norms$", text, re.M)[1]
        return [int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", line)]

    text = run_recipe(Group.single("world"), "--train-iters", 1)[1]
    total = int(re.search(r"^GPT of ([\d,]+) parameters", text)[1].replace(",", ""))
    on, tensors, off, others = said(text)
    assert on + off == total
    assert (on, tensors) == (2 * 12 * 32 * 32 + (50 + 16) * 32, 2 * 4 + 2)
    assert others == 2 * 8 + 2
    for flag in ("--pipeline-model-parallel-size", "--tensor-model-parallel-size"):
        assert said(ranks.run(run_recipe, flag, 2, "--train-iters", 1, size=2)[0][1]) == [
            on, tensors, off, others,
        ]  # fmt: skip


def test_what_a_fork_has_frozen_is_said_not_to_decay():
    def said(*frozen: str) -> str:
        trainer, _ = make_trainer(Group.single("world"), GPT2, Layout(frozen=frozen))
        return decay_fact(trainer.stages, trainer.grid)

    assert said().endswith("; none on 896 in 18 biases and norms")
    text = said("layers.0.mlp.up.weight", "layers.0.mlp.up.bias")
    assert text.endswith(f"; none on {896 + 128 * 32:,} in 19 biases and norms and frozen ones")
