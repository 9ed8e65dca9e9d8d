"""The line about what a sharding stage sends beyond `optim`: the ledger holds what it says."""

import re
from dataclasses import replace

import pytest

from core.comm import Group
from core.sharding_cost import sharding_cost
from core.train import TrainState
from tests.recipe import run_recipe
from tests.training import GPT2, Layout, make_trainer

MODEL = replace(GPT2, hidden_size=128, vocab_size=5000)


def said_and_sent(world: Group, layout: Layout) -> tuple[list[str], float, float]:
    """(the lines, MiB that the first step sent of gradients, of parameters)"""
    trainer, feed = make_trainer(world, MODEL, layout)
    lines = list(sharding_cost(trainer, 0))
    trainer.train_step(TrainState(), feed)
    sent = dict.fromkeys(("reduce_scatter", "all_gather"), 0)
    for event in trainer.grid.ledger.events(step=1):
        if event.group == "dp_cp" and event.op in sent:
            sent[event.op] += event.wire
    return lines, sent["reduce_scatter"] / 2**20, sent["all_gather"] / 2**20


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("precision", [(), (("bf16", True),)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_says_what_is_sent(ranks, strategy, precision, pp):
    layout = Layout(pp=pp, sharding=strategy, precision=precision)
    cheapest = replace(layout, sharding="optim")
    for ((line,), *sent), (none, *less) in zip(
        ranks.run(said_and_sent, layout, size=2 * pp),
        ranks.run(said_and_sent, cheapest, size=2 * pp),
        strict=True,
    ):
        assert none == []
        assert line.startswith(f"--data-parallel-sharding-strategy {strategy} sends ")
        assert "over dp 2" in line and "2 microbatches" in line
        numbers = [float(n) for n in re.findall(r"\d+\.\d", line)]
        wanted = [sum(sent), *sent, sum(less)]
        assert numbers == pytest.approx(wanted, abs=0.051)


def test_one_microbatch_costs_nothing_more(ranks):
    for lines, *_ in ranks.run(
        said_and_sent, Layout(sharding="optim_grads", micro_batch_size=4), size=2
    ):
        assert lines == []


def test_a_rank_without_parameters_says_nothing(ranks):
    """A stage may be empty; rank 0's line is about its own."""
    layout = Layout(pp=3, layers=(1, 0, 1), sharding="optim_grads")
    found = ranks.run(said_and_sent, layout, size=6)
    assert [len(lines) for lines, *_ in found].count(0) == 2
    assert len(found[0][0]) == 1


def test_a_run_says_it_before_the_first_step(ranks):
    flags = ("--data-parallel-sharding-strategy", "optim_grads", "--train-iters", 1)
    text = ranks.run(run_recipe, *flags, size=2)[0][1]
    line = "--data-parallel-sharding-strategy optim_grads sends "
    assert text.index(line) < text.index("iteration        1/")
