"""The numbers do not depend on the layout: weights, losses and norms of every tp x dp x sequence
parallelism x microbatch equal those of one process.

Reported for other frameworks: NVIDIA/Megatron-LM#1736, pytorch/torchtitan#1750 (the loss curve
moves with tp), NVIDIA-NeMo/Megatron-Bridge#5840 (initial spread grows with tp).
"""

from dataclasses import replace

import pytest
import torch

from core.comm import Group
from tests.training import GPT2, LLAMA, WITH_DROPOUT, Layout, Run, short_run

SHAPES = {
    "gpt2": GPT2,
    "gpt2-dropout": replace(GPT2, **WITH_DROPOUT),
    "llama": LLAMA,
    "llama-dropout": replace(LLAMA, **WITH_DROPOUT),
}
LAYOUTS = [  # (ranks, layout): tp 1/2/4 x dp 1/2 x sequence parallel x microbatch 1/2/4
    (1, Layout(micro_batch_size=1)),
    (1, Layout(micro_batch_size=4)),
    (2, Layout(micro_batch_size=2)),
    (2, Layout(tp=2, micro_batch_size=4)),
    (2, Layout(tp=2, sequence_parallel=True, micro_batch_size=2)),
    (4, Layout(tp=2, micro_batch_size=2)),
    (4, Layout(tp=2, sequence_parallel=True, micro_batch_size=2)),
    (4, Layout(tp=4, micro_batch_size=4)),
    (4, Layout(tp=4, sequence_parallel=True, micro_batch_size=4)),
]
STEPS = 20
# Every layout with one shape in float32, and with the other in float64 with dropout; in both types
# each shape has tp 1, 2 and 4, dp 2, sequence parallelism and other microbatches.
# scripts/check_layouts.py has both shapes in both types.
LLAMAS = (1, 4, 5, 8)  # in float32
FP32 = [("llama" if n in LLAMAS else "gpt2", False, n) for n in range(9)]
FP64 = [("gpt2-dropout" if n in LLAMAS else "llama-dropout", True, n) for n in range(9)]
_references: dict[tuple[str, bool], Run] = {}


def reference(shape: str, fp64: bool) -> Run:
    key = (shape, fp64)
    if key not in _references:
        model = replace(SHAPES[shape], fp64=fp64)
        _references[key] = short_run(Group.single("world"), model, Layout(), STEPS)
    return _references[key]


def close(a: list[float], b: list[float], rtol: float) -> None:
    torch.testing.assert_close(
        torch.tensor(a, dtype=torch.float64),
        torch.tensor(b, dtype=torch.float64),
        rtol=rtol,
        atol=0,
    )


@pytest.mark.parametrize(
    ("shape", "fp64", "size", "layout"),
    [(shape, fp64, *LAYOUTS[n]) for shape, fp64, n in (*FP32, *FP64)],
    ids=str,
)
def test_every_layout_equals_one_process(ranks, shape, fp64, size, layout):
    one = reference(shape, fp64)
    model = replace(SHAPES[shape], fp64=fp64)
    for run in ranks.run(short_run, model, layout, STEPS, size=size):
        assert run.initial.keys() == one.initial.keys()
        for name, value in run.initial.items():
            assert torch.equal(value, one.initial[name]), f"initial {name}"
        first, later = (1e-12, 1e-12) if fp64 else (1e-6, 1e-5)
        close(run.losses[:1], one.losses[:1], first)
        close(run.norms[:1], one.norms[:1], first)
        close(run.losses, one.losses, later)
        close(run.norms, one.norms, later)


def test_the_loss_falls():
    one = reference("gpt2", False)
    assert one.losses[-1] < one.losses[0] - 0.3
