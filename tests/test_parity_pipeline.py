"""Pipeline parallelism does not change the numbers: every schedule, placement and mixture with tp,
sequence parallelism and dp equals one process, evaluation and tied tables included; and the bytes
on the wire are those that core.traffic predicts.

A few layouts and short runs; `python scripts/check_layouts.py` runs the whole matrix. Reported for
other frameworks: NVIDIA/Megatron-LM#844 (tied tables summed after the gradients were scattered),
pytorch/torchtitan#514 (weights that depend on the stage), NVIDIA/Megatron-LM#381 (any layer count).
"""

from dataclasses import replace

import pytest
import torch

from core.comm import Group
from core.train import TrainingStopped, TrainState
from models.config import GPTConfig
from tests.layouts import Outcome, outcome
from tests.training import GPT2, LLAMA, WITH_DROPOUT, Layout, make_trainer

STEPS = 3
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
    ("gpt2", 4, Layout(pp=2, chunks=2, sharding="optim", overlap=True)),
    ("gpt2", 4, Layout(pp=2, schedule="zb_h1", sharding="optim_grads", micro_batch_size=1)),
    ("gpt2", 4, Layout(pp=2, schedule="zb_h1", sharding="optim_grads_params")),
    ("llama", 2, Layout(pp=2, schedule="zb_h1")),
    ("llama", 4, Layout(pp=4, layers=(0, 3, 0, 3), micro_batch_size=1)),
    ("llama", 4, Layout(pp=4, layers=(3, 0, 3, 0), schedule="zb_h1")),
    ("llama", 4, Layout(pp=2, layers=(0, 2, 3, 1), **SP)),
    ("gpt2-fp32", 4, Layout(pp=4, micro_batch_size=1, schedule="zb_h1")),
    ("gpt2-fp32", 4, Layout(pp=2, chunks=2, **SP)),
    ("gpt2-split", 2, Layout(pp=2, schedule="zb_h1")),
    ("gpt2-unfused", 4, Layout(pp=2, schedule="zb_h1", **SP)),
]


def model_of(shape: str) -> GPTConfig:
    return replace(SHAPES[shape], fp64=not shape.endswith("fp32"))


_references: dict[str, Outcome] = {}


def reference(shape: str) -> Outcome:
    if shape not in _references:
        one = Group.single("world")
        _references[shape] = outcome(one, model_of(shape), Layout(), STEPS)
    return _references[shape]


@pytest.mark.parametrize(("shape", "size", "layout"), CASES, ids=str)
def test_every_pipeline_equals_one_process(ranks, shape, size, layout):
    check(ranks, shape, size, layout)


def test_a_users_own_schedule_equals_one_process(ranks, tmp_path):
    """Some backwards whole and some split, late microbatches first, transfers left out."""
    plan = tmp_path / "mine.txt"
    plan.write_text(
        "F1@0 F0@0 F2@0 I0@0 F3@0 B1@0 W0@0 I3@0 I2@0 W3@0 W2@0  # four microbatches\n"
        "F0@1 B0@1 F1@1 B1@1 F3@1 F2@1 B3@1 B2@1\n"
    )
    check(ranks, "gpt2", 2, Layout(pp=2, schedule=str(plan)))


def check(ranks, shape: str, size: int, layout: Layout) -> None:
    one = reference(shape)
    runs = ranks.run(outcome, model_of(shape), layout, STEPS, size=size)
    assert {name for run in runs for name in run.initial} == one.initial.keys()
    final: dict[str, str] = {}
    for run in runs:
        assert (run.losses, run.norms) == (runs[0].losses, runs[0].norms)
        assert run.initial.items() <= one.initial.items()
        for name, digest in run.final.items():  # replicas, and both copies of a tied table
            assert digest == final.setdefault(name, digest), f"copies of {name} differ"
    rtol = 1e-12 if model_of(shape).fp64 else 1e-5
    assert runs[0].losses == pytest.approx(one.losses, rel=rtol, abs=0)
    assert runs[0].norms == pytest.approx(one.norms, rel=rtol, abs=0)
    recorded, predicted = zip(*(run.traffic for run in runs), strict=True)
    assert recorded == predicted
    sent, received = (sum(found["pp", op][1] for found in recorded) for op in ("send", "recv"))
    assert sent == received > 0


def test_layers_start_unlike_each_other():
    initial = reference("gpt2").initial
    weights = [digest for name, digest in initial.items() if name.endswith("mlp.up.weight")]
    assert len(set(weights)) == len(weights) == 6


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

