"""A run that saves in its middle and goes on, and one that goes on from that checkpoint.

Sent to ranks by scripts/check_checkpoints.py and its test. `RESUMED` are the layouts, `MODELS` the
models: with dropout, in the middle of a ramp of the batch size.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from core.comm import Group
from core.resume import Checkpoints
from core.train import Trainer, TrainState
from core.train_config import CheckpointConfig
from models.config import BertConfig, GPTConfig
from tests.training import GPT2, LLAMA, WITH_DROPOUT, Layout, make_trainer

FIRST, MORE = 3, 5  # steps before and after the checkpoint
RAMP = (8, 8, 40)  # five steps of 8 samples, then 16: the checkpoint is at sample 24
_SHAPE = {"num_layers": 4, **WITH_DROPOUT}
MODELS: dict[str, GPTConfig | BertConfig] = {
    "gpt2": replace(GPT2, **_SHAPE),
    "llama": replace(LLAMA, **_SHAPE),
    "bert": BertConfig(
        hidden_size=32,
        num_attention_heads=4,
        seq_length=16,
        vocab_size=50,
        make_vocab_size_divisible_by=2,
        **_SHAPE,
    ),
}


def _layout(dp: int = 1, **axes) -> Layout:
    micro = 1 if dp == 4 else 2 // dp
    return Layout(micro_batch_size=micro, global_batch_size=16, rampup=RAMP, **axes)


RESUMED: dict[str, tuple[int, Layout]] = {  # name -> ranks, layout
    "one": (1, _layout()),
    "dp2": (2, _layout(2)),
    "pp2": (2, _layout(pp=2)),
    "dp2 optim": (2, _layout(2, sharding="optim")),
    "tp2 sp": (2, _layout(tp=2, sequence_parallel=True)),
    "pp2 vpp2": (2, _layout(pp=2, chunks=2, schedule="interleaved")),
    "dp2 optim_grads_params": (2, _layout(2, sharding="optim_grads_params", bucket=2000)),
    "tp2 pp2": (4, _layout(tp=2, pp=2)),
    "dp4 optim_grads": (4, _layout(4, sharding="optim_grads")),
    "tp2 dp2 optim": (4, _layout(2, tp=2, sharding="optim")),
    "pp4": (4, _layout(pp=4, schedule="zb_h1")),
    "pp2 dp2 optim": (4, _layout(2, pp=2, sharding="optim", overlap=True)),
    "tp4": (4, _layout(tp=4)),
}


def train_and_save(world: Group, model: str, layout: str, folder: Path) -> list[float]:
    """The unbroken curve, as this rank sees it; a checkpoint is left after FIRST steps."""
    trainer, feed = make_trainer(world, MODELS[model], RESUMED[layout][1])
    trainer.open_wires()
    state = TrainState()
    losses = [trainer.train_step(state, feed)["lm_loss"] for _ in range(FIRST)]
    save(trainer, state, model, folder)
    return losses + [trainer.train_step(state, feed)["lm_loss"] for _ in range(MORE)]


def load_and_train(
    world: Group, model: str, layout: str, folder: Path, again: Path
) -> list[float]:
    """The losses after the checkpoint; before, all that was loaded is saved once more."""
    trainer, feed = make_trainer(world, MODELS[model], RESUMED[layout][1])
    trainer.open_wires()
    state = checkpoints(trainer, model, load=str(folder)).load()
    save(trainer, state, model, again)
    return [trainer.train_step(state, feed)["lm_loss"] for _ in range(MORE)]


def save(trainer: Trainer, state: TrainState, model: str, folder: Path) -> None:
    with checkpoints(trainer, model, save=str(folder)) as saving:
        saving.save(state)


def checkpoints(trainer: Trainer, model: str, **flags) -> Checkpoints:
    return Checkpoints(CheckpointConfig(**flags), trainer, {}, MODELS[model].identity())
