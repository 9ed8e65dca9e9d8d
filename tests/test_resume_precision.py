"""A run that goes on in another precision: masters and moments bit for bit, and it is said."""

import pytest
import torch

from core.comm import Group
from core.config_record import to_json
from core.optimizer.precision import PrecisionConfig
from core.resume import Checkpoints
from core.train import Trainer, TrainState
from core.train_config import CheckpointConfig
from tests.recipe import assert_same_bits, contents
from tests.training import GPT2, Layout, make_trainer

PRECISIONS = {"fp32": (), "bf16": (("bf16", True),), "fp16": (("fp16", True),)}


def made(precision: str, **folders) -> tuple[Trainer, Checkpoints, object]:
    flags = PRECISIONS[precision]
    trainer, feed = make_trainer(Group.single("world"), GPT2, Layout(precision=flags))
    record = {"model": to_json(GPT2), "precision": to_json(PrecisionConfig(**dict(flags)))}
    folders = {name: str(path) for name, path in folders.items()}
    return trainer, Checkpoints(CheckpointConfig(**folders), trainer, record, {}), feed


@pytest.mark.parametrize(
    ("before", "after"), [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "fp16"), ("bf16", "bf16")]
)
def test_masters_are_the_weights(tmp_path, before, after):
    trainer, checkpoints, feed = made(before, save=tmp_path / "a")
    state = TrainState()
    for _ in range(2):
        trainer.train_step(state, feed)
    with checkpoints:
        checkpoints.save(state)
    short = trainer.optimizer.parts[0].master
    assert not torch.equal(short, short.bfloat16().float()), "rounding would not be seen"

    trainer, checkpoints, feed = made(after, load=tmp_path / "a", save=tmp_path / "b")
    state = checkpoints.load()
    for memory, part in zip(trainer.replicas.memories, trainer.optimizer.parts, strict=True):
        assert part.master.dtype == torch.float32
        assert torch.equal(memory.kept, part.master.to(memory.kept.dtype))
    assert trainer.optimizer.steps == state.updates == 2
    with checkpoints:
        checkpoints.save(state)
    assert_same_bits(contents(tmp_path / "a"), contents(tmp_path / "b"))
    said = [f"loaded {tmp_path / 'a' / 'iter_0000002'}"]
    if before != after:
        said += ["settings differ; the command line's hold"]
        for flag in ("bf16", "fp16"):
            if flag in (before, after):
                was, now = flag == before, flag == after
                said += [f"--{flag}: {was} in the checkpoint, {now} given"]
        said += ["its weights and moments, which are float32, are taken as they are"]
    assert checkpoints.notes == said
    assert trainer.train_step(state, feed)["lm_loss"] < 4
