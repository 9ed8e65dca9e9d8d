"""--fp32-residual-connection: what is float32, what stays short, and that it helps."""

from dataclasses import replace

import pytest
import torch

from core.comm import Group
from core.process_grid import ProcessGrid
from models import bert, gpt
from models.config import BertConfig
from models.transformer import Block
from tests.layouts import outcome
from tests.models.test_activations import BF16
from tests.test_recompute import FULL, PARTS
from tests.training import GPT2, LLAMA, WITH_DROPOUT, Layout, make_trainer, short_run

WIDE = {"fp32_residual_connection": True}
BERT = BertConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, vocab_size=50
)
MODELS = {
    "gpt": replace(GPT2, **WIDE),
    "gpt-dropout": replace(GPT2, **WIDE, **WITH_DROPOUT),
    "llama": replace(LLAMA, **WIDE),
    "bert-post": replace(BERT, **WIDE),
    "bert-pre": replace(BERT, norm_placement="pre", **WIDE),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_stream_is_float32_and_the_products_are_not(name):
    trainer, feed = make_trainer(Group.single("world"), MODELS[name], Layout(precision=BF16))
    (stage,) = trainer.stages
    assert stage.wire.dtype == torch.float32
    seen = {"stream": set(), "products": set(), "gradients": set()}

    def block(module, inputs, y):
        seen["stream"] |= {inputs[0].dtype, y.dtype}
        y.register_hook(lambda g: seen["gradients"].add(g.dtype))

    for module in stage.modules():
        if isinstance(module, Block):
            module.register_forward_hook(block)
            for part in (module.attention.qkv, module.attention.out, module.mlp.up):
                part.register_forward_hook(
                    lambda _, x, y: seen["products"].update({x[0].dtype, y[0].dtype})
                )
    stage.train()
    trainer.replicas.zero_grad()
    loss = stage.forward_step(0, next(iter(feed.step(0, 2, 1))), None)
    stage.backward_step(0, None)
    assert loss.total.dtype == torch.float32
    assert seen["stream"] == seen["gradients"] == {torch.float32}
    assert seen["products"] == {torch.bfloat16}


def errors(model, build_stages) -> tuple[float, float]:
    """How far a deep model in bf16 is from the same weights in float32: without and with."""
    deep = replace(model, num_layers=24)
    grid = ProcessGrid.single()
    place = {"micro_batch_size": 2, "sequence_parallel": False, "seed": 3}
    (exact,) = build_stages(deep, grid, **place)
    found = []
    for wide in (False, True):
        config = replace(deep, fp32_residual_connection=wide)
        (stage,) = build_stages(config, grid, dtype=torch.bfloat16, **place)
        exact.load_state_dict({k: v.float() for k, v in stage.state_dict().items()})
        with torch.no_grad():
            found.append((through(stage).float() - through(exact)).norm().item())
    return found[0], found[1]


def through(stage) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (2, 16), generator=generator)
    batch = {
        "tokens": tokens,
        "position_ids": torch.arange(16).expand(2, 16),
        "sample": torch.arange(2),
        "token_types": torch.zeros_like(tokens),
        "padding_mask": torch.ones_like(tokens),
    }
    stage.eval()
    return stage.hidden(batch, None)


@pytest.mark.parametrize(
    ("model", "build_stages"),
    [(GPT2, gpt.build_stages), (LLAMA, gpt.build_stages), (BERT, bert.build_stages)],
    ids=["gpt", "llama", "bert"],
)
def test_a_deep_model_is_nearer_to_float32(model, build_stages):
    without, with_it = errors(model, build_stages)
    assert with_it < 0.5 * without


@pytest.mark.parametrize("recompute", [FULL, PARTS], ids=str)
def test_recomputation_does_not_show(recompute):
    model, world = MODELS["gpt-dropout"], Group.single("world")
    plain = short_run(world, model, Layout(precision=BF16), 3)
    again = short_run(world, model, Layout(precision=BF16, recompute=recompute), 3)
    assert (plain.losses, plain.norms) == (again.losses, again.norms)


@pytest.mark.parametrize("name", ["gpt-dropout", "llama"])
def test_stages_send_float32_and_change_nothing(ranks, name):
    one = outcome(Group.single("world"), MODELS[name], Layout(precision=BF16), 3)
    layout = Layout(pp=2, precision=BF16)
    for found in ranks.run(outcome, MODELS[name], layout, 3, size=2):
        assert found.losses == one.losses
        recorded, predicted = found.traffic
        assert recorded == predicted
        assert recorded["pp", "send"][1] == 4 * 16 * 2 * 32 * 4  # microbatches x [s, b, h] float32


def test_parallel_layers_and_a_cut_sequence_agree(ranks):
    one = short_run(Group.single("world"), MODELS["gpt"], Layout(precision=BF16), 3)
    for cut in (False, True):
        layout = Layout(tp=2, sequence_parallel=cut, precision=BF16)
        for found in ranks.run(short_run, MODELS["gpt"], layout, 3, size=2):
            assert found.losses == pytest.approx(one.losses, rel=2e-3)
