"""What autograd keeps is what models/activations.py says, by shape, type and recomputation."""

from dataclasses import replace

import pytest

from core.comm import Group
from core.saved_activations import SavedActivations
from models.activations import Cut, StageBytes, kept_bytes
from models.config import GPTConfig
from tests.test_recompute import CORE, FIRST, FULL, MLP, PARTS, UNITS
from tests.training import GPT2, LLAMA, WITH_DROPOUT, Layout, make_trainer

GPT = replace(GPT2, num_layers=4, hidden_size=64, seq_length=64)
GROUPED = replace(LLAMA, num_layers=4, hidden_size=64, seq_length=64)
SP = {"tp": 2, "sequence_parallel": True}
BF16 = (("bf16", True),)
SHAPES = {
    "gpt": GPT,
    "gpt-dropout": replace(GPT, **WITH_DROPOUT),
    "gpt-squared": replace(GPT, squared_relu=True),
    "llama": GROUPED,
    "llama-dropout": replace(GROUPED, **WITH_DROPOUT),
    "llama-plain": replace(GROUPED, qk_layernorm=False, position_embedding_type="none"),
    "llama-heads": replace(GROUPED, qk_layernorm=False, num_query_groups=8),
}


def kept(world: Group, model: GPTConfig, layout: Layout) -> tuple[int, int, StageBytes]:
    """(bytes that the blocks keep after a forward, the most while its backward runs, formula)"""
    trainer, feed = make_trainer(world, model, layout)
    (stage,) = trainer.stages
    stage.train()
    trainer.replicas.zero_grad()
    batch = next(iter(feed.step(0, layout.micro_batch_size, 1)))
    with SavedActivations(stage.parameters()) as saved:
        stage.forward_step(0, batch, None)
        after = saved.now
        stage.backward_step(0, None)
    formula = kept_bytes(
        model,
        layout.recomputation(),
        range(model.num_layers),
        Cut(
            layout.micro_batch_size,
            layout.tp,
            layout.sequence_parallel,
            stage.build.dtype.itemsize,
            stage.wire.dtype.itemsize,
        ),
    )
    return after, saved.most, formula


def check(after: int, most: int, formula: StageBytes, rel: float = 0.05) -> None:
    ends = 2 * 64 * 64 * 2 * 4  # embedding, last norm
    assert after == pytest.approx(formula.kept, rel=rel, abs=ends)
    assert most == pytest.approx(formula.most, rel=rel, abs=ends)


@pytest.mark.parametrize("shape", SHAPES)
def test_kept_by_shape(shape):
    check(*kept(Group.single("world"), SHAPES[shape], Layout()))


def test_kept_in_a_short_type():
    check(*kept(Group.single("world"), GPT, Layout(precision=BF16)))


@pytest.mark.parametrize("way", [(), FULL], ids=str)
def test_kept_with_a_wide_residual(way):
    wide = replace(GPT, fp32_residual_connection=True)
    check(*kept(Group.single("world"), wide, Layout(precision=BF16, recompute=way)))


@pytest.mark.parametrize("way", [FULL, UNITS, FIRST, CORE, MLP, PARTS], ids=str)
def test_kept_by_recomputation(way):
    check(*kept(Group.single("world"), SHAPES["gpt-dropout"], Layout(recompute=way)))


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(**SP)], ids=str)
def test_kept_on_a_tp_rank(ranks, layout):
    for found in ranks.run(kept, GROUPED, layout, size=2):
        check(*found)
