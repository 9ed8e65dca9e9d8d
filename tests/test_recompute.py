"""Recomputation is invisible in the numbers and visible in the memory.

Bit for bit: losses, norms, weights with dropout on, over layouts and shapes. Reported for other
frameworks: allenai/OLMo-core#828, pytorch/torchtitan#1323 (another dropout mask in backward).
"""

from dataclasses import replace

import pytest
import torch

from core.comm import Group
from core.saved_activations import SavedActivations
from core.train import TrainState
from models.config import BertConfig, GPTConfig
from tests.test_traffic_bert import BERT
from tests.training import GPT2, LLAMA, WITH_DROPOUT, Layout, Run, make_trainer, short_run

FULL = (("recompute_granularity", "full"),)
UNITS = (*FULL, ("recompute_num_layers", 2))
FIRST = (*FULL, ("recompute_method", "block"), ("recompute_num_layers", 1))
CUT = (*UNITS, ("distribute_saved_activations", True))
CORE = (("recompute_activations", True),)
PARTS = (*CORE, ("recompute_modules", ("core_attn", "mlp", "layernorm")))
MLP = (*CORE, ("recompute_modules", ("mlp",)))

SHAPES = {
    "gpt2": replace(GPT2, num_layers=3, **WITH_DROPOUT),
    "llama": replace(LLAMA, num_layers=3),
    "bert": replace(BERT, num_layers=3, **WITH_DROPOUT),
}
SP = Layout(tp=2, sequence_parallel=True)
ALONE = [
    *((shape, 1, Layout(), way) for shape in ("gpt2", "llama") for way in (FULL, UNITS, PARTS)),
    ("gpt2", 1, Layout(precision=(("bf16", True),)), PARTS),
    ("bert", 1, Layout(), FIRST),
    ("bert", 1, Layout(), MLP),
]
TOGETHER = [
    ("gpt2", 2, Layout(tp=2), CUT),
    ("llama", 2, SP, UNITS),
    ("gpt2", 2, SP, PARTS),
    ("gpt2", 2, Layout(pp=2, schedule="zb_h1"), FULL),
    ("gpt2", 2, Layout(pp=2, schedule="zb_h1"), PARTS),
    ("gpt2", 4, Layout(pp=2, tp=2), CUT),
    ("gpt2", 2, Layout(pp=2, layers=(1, 1, 0, 1)), UNITS),
    ("bert", 2, SP, FULL),
    ("gpt2", 2, Layout(sharding="optim", overlap=True), FULL),
    ("gpt2", 2, Layout(sharding="optim_grads"), UNITS),
    ("gpt2", 2, Layout(sharding="optim_grads_params"), PARTS),
    ("gpt2", 2, Layout(sharding="optim_grads_params", overlap=True), UNITS),
]
STEPS = 2


def same_bits(found: Run, wanted: Run) -> None:
    assert found.losses == wanted.losses
    assert found.norms == wanted.norms
    assert found.final.keys() == wanted.final.keys()
    assert [n for n, value in found.final.items() if not torch.equal(value, wanted.final[n])] == []


@pytest.mark.parametrize(("shape", "size", "layout", "way"), ALONE, ids=str)
def test_one_process_computes_the_same_bits(shape, size, layout, way):
    world, model = Group.single("world"), SHAPES[shape]
    plain = short_run(world, model, layout, STEPS)
    same_bits(short_run(world, model, replace(layout, recompute=way), STEPS), plain)


def both(world: Group, model: GPTConfig | BertConfig, layout: Layout, way: tuple) -> list[Run]:
    return [short_run(world, model, replace(layout, recompute=w), STEPS) for w in ((), way)]


@pytest.mark.parametrize(("shape", "size", "layout", "way"), TOGETHER, ids=str)
def test_every_layout_computes_the_same_bits(ranks, shape, size, layout, way):
    for plain, again in ranks.run(both, SHAPES[shape], layout, way, size=size):
        same_bits(again, plain)


def most_saved(world: Group, model: GPTConfig, layout: Layout) -> int:
    """Bytes kept for backward at most, in the second step."""
    trainer, feed = make_trainer(world, model, layout)
    state = TrainState()
    trainer.train_step(state, feed)
    with SavedActivations(trainer.stages[0].parameters()) as saved:
        trainer.train_step(state, feed)
    assert saved.now == 0
    return saved.most


DEEP = replace(GPT2, num_layers=12, hidden_size=64, seq_length=64)


def test_full_needs_a_fourth_of_the_memory():
    world = Group.single("world")
    plain = most_saved(world, DEEP, Layout())
    full = most_saved(world, DEEP, Layout(recompute=FULL))
    assert plain >= 4 * full


@pytest.fixture(scope="module")
def plain_with_dropout() -> int:
    return most_saved(Group.single("world"), replace(DEEP, **WITH_DROPOUT), Layout())


@pytest.mark.parametrize(
    ("way", "most"), [(CORE, 0.7), (MLP, 0.85), (PARTS, 0.5), (FIRST, 0.95)], ids=str
)
def test_the_other_ways_need_less(plain_with_dropout, way, most):
    model = replace(DEEP, **WITH_DROPOUT)
    saved = most_saved(Group.single("world"), model, Layout(recompute=way))
    assert saved <= most * plain_with_dropout


def test_an_input_that_is_cut_over_tp_takes_half(ranks):
    whole, cut = (
        ranks.run(most_saved, DEEP, Layout(tp=2, recompute=way), size=2)[0]
        for way in (FULL, (*FULL, ("distribute_saved_activations", True)))
    )
    one = DEEP.seq_length * 2 * DEEP.hidden_size * 4
    # the layer that is computed again has its whole input beside the cut one
    assert whole - cut == pytest.approx(12 * one // 2 - one, rel=0.1)
