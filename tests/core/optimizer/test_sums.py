"""What --log-num-zeros-in-grad, --log-params-norm and --log-layer-grad-norms show is the model's:
every layout shows the same.

The word table and the positions have rows that no token uses, whose gradients are zeros, and the
vocabulary does not divide by tp, so that there are padding rows, which do not count.
"""

import math
from dataclasses import replace

import pytest
import torch

from core.comm import Group
from core.train import TrainState
from models.config import GPTConfig
from tests.training import GPT2, Layout, gathered, make_trainer

MODEL = replace(
    GPT2,
    num_layers=4,
    vocab_size=301,
    max_position_embeddings=24,
    disable_bias_linear=True,  # the gradient of a key's bias is rounding, at times 0
    fp64=True,
)
UNTIED = replace(MODEL, untie_embeddings_and_output_weights=True)
SHOW = {"log_num_zeros_in_grad": True, "log_params_norm": True, "log_layer_grad_norms": True}
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
LAYOUTS = [
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(pp=2, chunks=2, schedule="interleaved"),
    *(Layout(sharding=strategy) for strategy in STRATEGIES),
]
UNITS = ["embedding", *(f"layers.{i}" for i in range(4)), "final_norm"]


def shown(
    world: Group, model: GPTConfig, layout: Layout
) -> tuple[dict, dict[str, torch.Tensor]]:
    """(the second step's row, the weights after it)"""
    trainer, feed = make_trainer(world, model, layout, clip_grad=0.1, **SHOW)
    state = TrainState()
    for _ in range(2):
        row = trainer.train_step(state, feed)
    return row, gathered(trainer)


@pytest.fixture(scope="module", params=["tied", "untied"])
def alone(request):
    """(the model, its row and weights from one process)"""
    model = MODEL if request.param == "tied" else UNTIED
    return model, *shown(Group.single("world"), model, Layout())


def test_one_process_shows_the_model(alone):
    model, row, weights = alone
    units = UNITS if model is MODEL else [*UNITS, "output"]
    assert list(row["layer_grad_norms"]) == units
    squares = sum(norm**2 for norm in row["layer_grad_norms"].values())
    assert math.sqrt(squares) == pytest.approx(row["grad_norm"], rel=1e-12)
    assert row["grad_norm"] > 0.2  # what is shown is not clipped
    norm = math.sqrt(sum(weight.square().sum().item() for weight in weights.values()))
    assert row["params_norm"] == pytest.approx(norm, rel=1e-12)
    # the first 16 positions are used; of an untied word table some rows are not
    assert row["num_zeros"] >= 8 * model.hidden_size
    assert row["num_zeros"] % model.hidden_size == 0
    assert (row["num_zeros"] > 8 * model.hidden_size) == (model is UNTIED)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_shows_the_same(ranks, alone, layout):
    model, row, _ = alone
    for found, _ in ranks.run(shown, model, layout):
        assert found["num_zeros"] == row["num_zeros"]
        assert found["params_norm"] == pytest.approx(row["params_norm"], rel=1e-10)
        assert list(found["layer_grad_norms"]) == list(row["layer_grad_norms"])
        assert found["layer_grad_norms"] == pytest.approx(row["layer_grad_norms"], rel=1e-7)
