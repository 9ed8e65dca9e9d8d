"""The memory report: predicted before the first step, measured in the second, and they agree."""

import re

import pytest

from core.comm import Group
from tests.recipe import run_recipe

SIZE = ("--num-layers", 6, "--hidden-size", 128, "--seq-length", 128, "--vocab-size", 500)


def lines_of(text: str) -> dict[str, dict[str, float]]:
    """title -> part -> MiB"""
    found = {}
    for title, cells in re.findall(r"^memory of (.*?) \(MiB\): ([^;\n]*)", text, re.M):
        pairs = (cell.rsplit(" ", 1) for cell in cells.split(" | "))
        found[title] = {name: float(value.replace(",", "")) for name, value in pairs}
    return found


def printed(world: Group, *flags: object) -> str:
    return run_recipe(world, *SIZE, "--train-iters", 3, *flags)[1]


@pytest.mark.parametrize(
    "flags", [(), ("--bf16",), ("--recompute-granularity", "full"), ("--optimizer", "sgd")], ids=str
)
def test_predicted_is_what_is_measured(flags):
    text = printed(Group.single("world"), *flags)
    found = lines_of(text)
    said, seen = found["rank 0, predicted"], found["rank 0, measured in step 2 of this run"]
    assert len(found) == 2
    for part in ("parameters", "gradients", "optimizer"):
        assert seen[part] == said[part] > 0
    assert seen["activations"] == pytest.approx(said["activations"], rel=0.15)
    assert said["loss buffer"] > 0
    assert "resident at most" in text
    assert text.index("measured in step 2") > text.index("iteration        2/")


def test_the_rank_that_needs_most_is_named(ranks):
    """Of a pipeline the first rank holds most microbatches; the last one has a large table here."""
    flags = ("--pipeline-model-parallel-size", 2, "--vocab-size", 20000)
    found = lines_of(ranks.run(printed, *flags, size=2)[0])
    first = found["rank 0, predicted"]
    most = found["rank 1, which needs most, predicted"]
    assert most["sum"] > first["sum"]
    assert first["loss buffer"] == 0 < most["loss buffer"]
    assert most["activations"] < first["activations"]
