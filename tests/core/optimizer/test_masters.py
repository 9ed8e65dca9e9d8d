"""Masters of a short type are what is updated: steps too small for the weights are not lost."""

import pytest
import torch

from core.comm import Group
from core.train import TrainState
from tests.training import GPT2, Layout, make_trainer

STEPS = 40
ULP = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # below 1; above it is twice that


def gains(kind: str, rate: float) -> tuple[torch.Tensor, float]:
    """(weights of all norms after STEPS, the largest change of a master in one)"""
    precision = {"fp32": (), "bf16": (("bf16", True),)}
    precision["fp16"] = (("fp16", True), ("initial_loss_scale", 1024.0))
    layout = Layout(global_batch_size=2, precision=precision[kind])
    trainer, feed = make_trainer(Group.single("world"), GPT2, layout, lr=rate, weight_decay=0.0)
    norms = [p for name, p in trainer.stages[0].named_parameters() if name.endswith("norm.weight")]
    assert all(p.eq(1).all() for p in norms)
    state, largest = TrainState(), 0.0
    (part,) = trainer.optimizer.parts
    for _ in range(STEPS):
        before = part.master.clone()
        trainer.train_step(state, feed)
        assert part.master.dtype == torch.float32
        largest = max(largest, (part.master - before).abs().max().item())
    return torch.cat([p.detach().float() for p in norms]), largest


@pytest.mark.parametrize(("kind", "rate"), [("bf16", 2e-4), ("fp16", 4e-5)])
def test_updates_below_the_weights_resolution_add_up(kind, rate):
    """None of them would move a weight of 1, whose neighbour is an ulp away; together they move
    many gains of the norms, to where they go in float32, give or take the rounding."""
    found, largest = gains(kind, rate)
    wanted, _ = gains("fp32", rate)
    assert 0 < largest < ULP[kind] / 2
    assert (found != 1).float().mean() > 0.25
    assert (found - wanted).abs().max() < ULP[kind] * 1.25
    assert set(torch.sign(found - 1)[found != 1].tolist()) == {-1.0, 1.0}
