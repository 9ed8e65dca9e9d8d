"""Parameters with requires_grad False, as forks freeze them: they stay as they are, to the bit, in
every layout, and all else trains as it would beside them.
"""

from dataclasses import replace

import pytest
import torch

from core.comm import Group
from core.resume import Checkpoints
from core.train import TrainState
from core.train_config import CheckpointConfig
from tests.training import GPT2, Layout, Run, gathered, make_trainer, short_run

ALONE = Group.single("world")
MODEL = replace(GPT2, fp64=True)
ATTENTION = ("attention_norm.weight", "attention_norm.bias", "attention.qkv.weight")
FROZEN = (  # the tied table; one block in part; of another, what a backward needs to its end
    *("embedding.word.weight", "embedding.position.weight", "layers.0.attention.qkv.weight"),
    *(f"layers.1.{name}" for name in (*ATTENTION, "attention.qkv.bias", "attention.out.weight")),
    *("layers.1.attention.out.bias", "layers.1.mlp_norm.weight", "layers.1.mlp_norm.bias"),
    *("layers.1.mlp.up.weight", "layers.1.mlp.up.bias"),
)
PLAIN = Layout(frozen=FROZEN)
FULL = (("recompute_granularity", "full"),)


@pytest.fixture(scope="module")
def alone() -> Run:
    return short_run(ALONE, MODEL, PLAIN, 3, weight_decay=0.1)


def test_what_is_frozen_stays_and_the_rest_trains(alone):
    moved = {name for name, x in alone.final.items() if not torch.equal(x, alone.initial[name])}
    assert moved == alone.final.keys() - set(FROZEN)
    plain = {"optimizer": "sgd", "sgd_momentum": 0.0, "clip_grad": 0.0, "weight_decay": 0.1}
    free, frozen = (short_run(ALONE, MODEL, layout, 1, **plain) for layout in (Layout(), PLAIN))
    for name in moved:  # the first step's gradients are the same
        assert torch.equal(free.final[name], frozen.final[name]), name


@pytest.mark.parametrize(
    "layout",
    [
        replace(PLAIN, recompute=FULL),
        replace(PLAIN, sharding="optim", overlap=True, bucket=3000),
        replace(PLAIN, sharding="optim_grads", overlap=True),
        replace(PLAIN, sharding="optim_grads_params", overlap=True),
        replace(PLAIN, sharding="optim_grads_params", recompute=FULL),
        replace(PLAIN, tp=2, sequence_parallel=True),
        replace(PLAIN, pp=2, schedule="zb_h1"),
    ],
    ids=lambda layout: str(replace(layout, frozen=())),
)
def test_no_layout_shows(ranks, alone, layout):
    for found in ranks.run(short_run, MODEL, layout, 3, size=2, weight_decay=0.1):
        assert found.losses == pytest.approx(alone.losses, rel=1e-12)
        assert found.norms == pytest.approx(alone.norms, rel=1e-12)
        for name, weight in found.final.items():
            if name in FROZEN:
                assert torch.equal(weight, alone.initial[name]), name
            else:
                torch.testing.assert_close(weight, alone.final[name], rtol=1e-9, atol=1e-12)


def test_it_is_saved_and_loaded_but_not_counted(tmp_path):
    trainer, feed = make_trainer(ALONE, GPT2, PLAIN, log_num_zeros_in_grad=True)
    sizes = {name: x.numel() for name, x in trainer.stages[0].named_parameters()}
    assert trainer.optimizer.elements == sum(n for name, n in sizes.items() if name not in FROZEN)
    state = TrainState()
    assert trainer.train_step(state, feed)["num_zeros"] < trainer.optimizer.elements / 2
    with Checkpoints(CheckpointConfig(save=str(tmp_path)), trainer, {}, {}) as checkpoints:
        checkpoints.save(state)
    wanted = gathered(trainer)
    other, _ = make_trainer(ALONE, GPT2, Layout())
    with torch.no_grad():
        for memory in other.replicas.memories:
            memory.kept.zero_()
    Checkpoints(CheckpointConfig(load=str(tmp_path)), other, {}, {}).load()
    assert all(torch.equal(x, wanted[name]) for name, x in gathered(other).items())
