"""Pipeline parallelism does not change the numbers: every schedule, placement and mixture with tp,
sequence parallelism and dp equals one process, evaluation and tied tables included.

A few layouts and short runs; `python scripts/check_layouts.py` runs the whole matrix. Reported for
other frameworks: NVIDIA/Megatron-LM#844 (tied tables summed after the gradients were scattered),
pytorch/torchtitan#514 (weights that depend on the stage), NVIDIA/Megatron-LM#381 (any layer count).
"""

from collections import Counter
from dataclasses import astuple, dataclass, replace

import pytest
import torch

from core.comm import Group
from core.pipeline_parallel.schedules import row_maker
from core.pipeline_parallel.stage import Stage
from core.traffic import BucketSizes, Sizes, StageSizes, step_traffic
from core.train import Trainer, TrainingStopped, TrainState
from models.config import GPTConfig
from tests.training import GPT2, LLAMA, WITH_DROPOUT, Layout, gathered, make_trainer

STEPS = 4
SP = {"tp": 2, "sequence_parallel": True}
SHAPES = {
    "gpt2": replace(GPT2, num_layers=6, **WITH_DROPOUT),
    "llama": replace(LLAMA, num_layers=6),
    "gpt2-fp32": replace(GPT2, num_layers=6, **WITH_DROPOUT),
    "gpt2-split": replace(GPT2, num_layers=6, loss_mode="split"),
    "gpt2-unfused": replace(GPT2, num_layers=6, loss_mode="unfused"),
}
CASES = [  # shape, ranks, layout
    ("gpt2", 2, Layout(pp=2, micro_batch_size=1)),
    ("gpt2", 2, Layout(pp=2, schedule="gpipe")),
    ("gpt2", 2, Layout(pp=2, chunks=3)),
    ("gpt2", 4, Layout(pp=4)),  # 6 layers over 4 ranks
    ("gpt2", 4, Layout(pp=2, micro_batch_size=1, schedule="zb_h1")),  # and dp 2
    ("gpt2", 4, Layout(pp=2, chunks=2, **SP)),
    ("gpt2", 8, Layout(pp=2, micro_batch_size=1)),  # dp 4: more than two terms to add
    ("gpt2", 8, Layout(pp=2, chunks=2, micro_batch_size=1, **SP)),
    ("llama", 2, Layout(pp=2, schedule="zb_h1")),
    ("llama", 4, Layout(pp=4, layers=(0, 3, 0, 3), micro_batch_size=1)),
    ("llama", 4, Layout(pp=4, layers=(3, 0, 3, 0), schedule="zb_h1")),
    ("llama", 4, Layout(pp=2, layers=(0, 2, 3, 1), **SP)),
    ("gpt2-fp32", 4, Layout(pp=4, micro_batch_size=1, schedule="zb_h1")),
    ("gpt2-fp32", 4, Layout(pp=2, chunks=2, **SP)),
    ("gpt2-split", 2, Layout(pp=2, schedule="zb_h1")),
    ("gpt2-unfused", 4, Layout(pp=2, schedule="zb_h1", **SP)),
]


@dataclass
class Trained:
    """numbers: every step's loss and norm, then the validation loss."""

    numbers: list[float]
    initial: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]


def trained(world: Group, model: GPTConfig, layout: Layout) -> Trained:
    trainer, feed = make_trainer(world, model, layout)
    trainer.open_wires()
    initial, state, numbers = gathered(trainer), TrainState(), []
    for _ in range(STEPS):
        row = trainer.train_step(state, feed)
        numbers += [row["lm_loss"], row["grad_norm"]]
    numbers.append(trainer.evaluate(feed, 2)["lm_loss"])
    return Trained(numbers, initial, gathered(trainer))


def model_of(shape: str) -> GPTConfig:
    return replace(SHAPES[shape], fp64=not shape.endswith("fp32"))


_references: dict[str, Trained] = {}


def reference(shape: str) -> Trained:
    if shape not in _references:
        one = trained(Group.single("world"), model_of(shape), Layout())
        _references[shape] = one
    return _references[shape]


@pytest.mark.parametrize(("shape", "size", "layout"), CASES, ids=str)
def test_every_pipeline_equals_one_process(ranks, shape, size, layout):
    one = reference(shape)
    runs = ranks.run(trained, model_of(shape), layout, size=size)
    held = {name for run in runs for name in run.initial}
    assert held == one.initial.keys()
    final: dict[str, torch.Tensor] = {}
    for run in runs:
        assert run.numbers == runs[0].numbers, "a number differs between ranks"
        for name, value in run.initial.items():
            assert torch.equal(value, one.initial[name]), f"initial {name}"
        for name, value in run.final.items():  # replicas, and both copies of a tied table
            assert torch.equal(value, final.setdefault(name, value)), f"copies of {name}"
    rtol = 1e-12 if model_of(shape).fp64 else 1e-5
    for found, wanted in zip(runs[0].numbers, one.numbers, strict=True):
        assert found == pytest.approx(wanted, rel=rtol, abs=0)


def test_a_tied_table_is_held_twice_and_its_layers_differ():
    one = reference("gpt2")
    assert not torch.equal(
        one.initial["layers.0.mlp.up.weight"], one.initial["layers.2.mlp.up.weight"]
    )


def poisoned(world: Group) -> str:
    """What stops a run in which one weight of the last stage is not a number."""
    layout = Layout(pp=2, micro_batch_size=1)
    trainer, feed = make_trainer(world, model_of("gpt2"), layout)
    if world.rank == world.size - 1:
        with torch.no_grad():
            trainer.stages[0].final_norm.weight[0] = float("nan")
    with pytest.raises(TrainingStopped) as stopped:
        trainer.train_step(TrainState(), feed)
    return str(stopped.value)


def test_every_rank_tells_of_a_loss_that_is_not_finite(ranks):
    texts = ranks.run(poisoned, size=2)
    assert texts[0] == texts[1]
    assert "rank 1: 1 parameter is not finite: final_norm.weight" in texts[0]
    assert "rank 1: microbatch 7, samples 7" in texts[0]


# ---- traffic -------------------------------------------------------------------------------------


def ledger_and_prediction(world: Group, model: GPTConfig, layout: Layout) -> tuple[dict, dict]:
    """(group, op) -> (calls, payload, wire) of a step: as recorded, and as core.traffic has it."""
    trainer, feed = make_trainer(world, model, layout)
    trainer.train_step(TrainState(), feed)
    grid, found = trainer.grid, {}
    for event in grid.ledger.events(step=1):
        sums = found.setdefault((event.group, event.op), Counter())
        sums.update(calls=1, payload=event.payload, wire=event.wire)
    microbatches = trainer.batch_schedule.microbatches(0)
    sizes = Sizes(
        seq=model.seq_length,
        micro_batch=layout.micro_batch_size,
        hidden=model.hidden_size,
        microbatches=microbatches,
        stages=tuple(stage_sizes(trainer, stage) for stage in trainer.stages),
        sequence_parallel=layout.sequence_parallel,
        loss_mode="split" if layout.schedule == "zb_h1" else "pipelined",
    )
    chunks = trainer.stages[0].count // grid.pp.size
    row = row_maker(layout.schedule, grid.pp.size, grid.pp.rank, chunks)(microbatches, False)
    predicted = step_traffic(sizes, grid.shape, row)
    predicted = {key: astuple(total) for key, total in predicted.items() if key[0] != "world"}
    return {key: tuple(sums.values()) for key, sums in found.items()}, predicted


def stage_sizes(trainer: Trainer, stage: Stage) -> StageSizes:
    buckets = [memory.bucket for memory in trainer.replicas.memories_of(stage)]
    return StageSizes(
        layers=len(stage.layers),
        buckets=tuple(BucketSizes.of(bucket, 0, 1) for bucket in buckets),
        first=stage.is_first,
        last=stage.is_last,
    )


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, Layout(pp=2, chunks=2)),
        (4, Layout(pp=2, schedule="zb_h1", **SP)),
        (4, Layout(pp=2, micro_batch_size=1)),
        (4, Layout(pp=4)),
    ],
    ids=str,
)
def test_predicted_bytes_equal_the_ledger(ranks, size, layout):
    model = replace(GPT2, num_layers=6)
    sent = received = 0
    for found, predicted in ranks.run(ledger_and_prediction, model, layout, size=size):
        assert found == predicted
        sent += found["pp", "send"][1]
        received += found["pp", "recv"][1]
    assert sent == received > 0
