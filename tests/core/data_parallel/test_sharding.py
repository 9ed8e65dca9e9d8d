"""Sharding over dp does not change the numbers: every strategy equals one process, and the others.

Losses, gradient norms and final weights, with tp, sequence parallelism, pp, accumulation, overlap
and small buckets. `python scripts/check_sharding.py` runs the whole matrix. Reported for other
frameworks: NVIDIA/Megatron-LM#844 (tied tables scattered before they were added), #1256.
"""

import math
from dataclasses import replace

import pytest
import torch

from core.comm import Group
from core.optimizer.precision import PrecisionConfig
from tests.training import GPT2, LLAMA, Layout, Run, short_run

STEPS = 4
SHAPES = {"gpt2": replace(GPT2, fp64=True), "llama": replace(LLAMA, fp64=True), "gpt2-fp32": GPT2}
SP = {"tp": 2, "sequence_parallel": True}
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
BF16 = ("bf16", True)
PRECISIONS = {
    "fp32": (),
    "bf16": (BF16,),
    "bf16, and so do gradients travel": (BF16, ("grad_reduce_in_bf16", True)),
    # the first two of four steps overflow and are skipped
    "fp16": (("fp16", True), ("initial_loss_scale", 2.0**20), ("hysteresis", 1)),
}
CASES = [  # shape, ranks, layout
    ("gpt2", 2, Layout(overlap=True, bucket=3000)),
    ("gpt2", 2, Layout(sharding="optim", micro_batch_size=4)),
    ("gpt2", 4, Layout(sharding="optim", micro_batch_size=1, overlap=True, bucket=3000)),
    ("gpt2", 4, Layout(sharding="optim_grads", micro_batch_size=1)),
    ("gpt2", 2, Layout(sharding="optim_grads", overlap=True, bucket=3000)),
    ("gpt2", 4, Layout(sharding="optim_grads_params", micro_batch_size=1, overlap=True)),
    ("gpt2", 4, Layout(sharding="optim", pp=2, overlap=True)),
    ("gpt2", 4, Layout(sharding="optim", pp=2, micro_batch_size=1, schedule="zb_h1")),
    ("gpt2", 4, Layout(sharding="optim_grads", pp=2, chunks=1, micro_batch_size=1)),
    ("gpt2", 4, Layout(sharding="optim_grads", pp=2, micro_batch_size=1, schedule="zb_h1")),
    ("gpt2", 4, Layout(sharding="optim_grads_params", pp=2, micro_batch_size=1, overlap=True)),
    ("gpt2", 4, Layout(sharding="optim_grads_params", pp=2, chunks=1, schedule="gpipe")),
    ("gpt2", 8, Layout(sharding="optim", pp=2, overlap=True, **SP)),
    ("llama", 4, Layout(sharding="optim", overlap=True, **SP)),
    ("llama", 4, Layout(sharding="optim_grads", overlap=True, **SP)),
    ("llama", 4, Layout(sharding="optim_grads_params", overlap=True, **SP)),
    ("gpt2-fp32", 4, Layout(sharding="optim_grads", overlap=True, **SP)),
    ("gpt2-fp32", 4, Layout(sharding="optim_grads_params", tp=2)),
]
_references: dict[str, Run] = {}


def reference(shape: str) -> Run:
    if shape not in _references:
        _references[shape] = short_run(Group.single("world"), SHAPES[shape], Layout(), STEPS)
    return _references[shape]


@pytest.mark.parametrize(("shape", "size", "layout"), CASES, ids=str)
def test_every_strategy_equals_one_process(ranks, shape, size, layout):
    one = reference(shape)
    rtol, weights = (1e-12, 1e-12) if SHAPES[shape].fp64 else (1e-5, 1e-4)
    copies: dict[str, torch.Tensor] = {}
    for run in ranks.run(short_run, SHAPES[shape], layout, STEPS, size=size):
        assert run.losses == pytest.approx(one.losses, rel=rtol, abs=0)
        assert run.norms == pytest.approx(one.norms, rel=rtol, abs=0)
        for name, value in run.final.items():
            assert torch.equal(value, copies.setdefault(name, value)), f"replicas of {name}"
            if not name.endswith("qkv.bias"):  # the key's gradient is noise that Adam scales up
                distance = (value - one.final[name]).norm() / one.final[name].norm()
                assert distance < weights, name
    assert copies.keys() == one.final.keys()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, Layout()) for kind in PRECISIONS),
        ("bf16, and so do gradients travel", Layout(**SP)),
        ("fp16", Layout(**SP)),
    ],
    ids=str,
)
def test_strategies_equal_each_other_bit_for_bit(ranks, kind, layout):
    """One microbatch on each of two dp ranks, clipping on: the arithmetic is the same.

    (A sum over more than two ranks depends on where in a message an element stands. Gradients of
    several microbatches are added before they travel or after: in another order, and where they
    travel in bfloat16 as other numbers.)
    """
    layout = replace(layout, micro_batch_size=4, precision=PRECISIONS[kind])
    runs = {
        strategy: ranks.run(
            short_run,
            GPT2,
            replace(layout, sharding=strategy),
            4,
            clip_grad=0.5,
            size=2 * layout.tp,
        )[-1]
        for strategy in STRATEGIES
    }
    plain = runs.pop("no_shard")
    assert sum(map(math.isfinite, plain.norms)) == (2 if kind == "fp16" else 4)
    for strategy, run in runs.items():
        assert run.losses == plain.losses, strategy
        # parts are added in float64
        assert run.norms == pytest.approx(plain.norms, rel=1e-14, abs=0, nan_ok=True)
        for name, value in run.final.items():
            assert value.dtype == getattr(torch, PrecisionConfig(**dict(layout.precision)).dtype)
            assert torch.equal(value, plain.final[name]), f"{strategy}: {name}"


@pytest.mark.parametrize("sharding", STRATEGIES)
def test_gradients_that_travel_in_bfloat16_err_by_its_rounding(ranks, sharding):
    """Two microbatches: losses and norms of --bf16 alone, to bfloat16's 2^-9, yet not its bits."""
    layout = Layout(sharding=sharding, overlap=True, precision=PRECISIONS["bf16"])
    short = replace(layout, precision=PRECISIONS["bf16, and so do gradients travel"])
    long, found = (ranks.run(short_run, GPT2, each, STEPS, size=2)[0] for each in (layout, short))
    assert found.losses[0] == long.losses[0] and found.norms != long.norms
    assert found.losses == pytest.approx(long.losses, rel=2**-9, abs=0)
    assert found.norms == pytest.approx(long.norms, rel=2**-9, abs=0)


def test_the_cases_above_would_show_a_lost_bucket(ranks):
    """A bucket that is reduced before its last gradient has come."""
    (found, _) = ranks.run(without_one_bucket, size=2)
    assert found != pytest.approx(reference("gpt2").norms[0], rel=1e-6)


def without_one_bucket(world: Group) -> float:
    from core.data_parallel.buckets import BucketMemory

    usual = BucketMemory.start_reduction
    first = []

    def forgets(memory: BucketMemory) -> None:
        first.append(memory)
        if memory is not first[0]:
            usual(memory)

    BucketMemory.start_reduction = forgets
    try:
        return short_run(world, SHAPES["gpt2"], Layout(sharding="optim", bucket=3000), 1).norms[0]
    finally:
        BucketMemory.start_reduction = usual
