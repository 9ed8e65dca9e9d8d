"""What the output loss is predicted to hold is what it holds, in every mode, to 1 %."""

import pytest
import torch

from core.comm import Group
from core.loss_memory import LossMemory
from core.tensor_parallel.output_loss import vocab_parallel_linear_cross_entropy
from core.tensor_parallel.output_loss_memory import LossShape, loss_bytes

FEW = LossShape(tokens=256, hidden=64, vocabulary=1500, padded=1536)
MANY = LossShape(tokens=512, hidden=64, vocabulary=20000, padded=20096)  # several chunks and tiles


def held(world: Group, shape: LossShape, mode: str, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes predicted, bytes measured)"""
    torch.manual_seed(7)
    hidden = torch.randn(shape.tokens // shape.strips, shape.hidden, dtype=dtype)
    hidden = hidden.requires_grad_() * 1
    weight = torch.nn.Parameter(torch.randn(shape.padded // world.size, shape.hidden).to(dtype))
    memory, sums = LossMemory(), torch.zeros(weight.shape)
    target = torch.randint(shape.vocabulary, (shape.tokens,))
    with memory.forward(hidden):
        loss = vocab_parallel_linear_cross_entropy(
            hidden,
            weight,
            target,
            vocab_size=shape.vocabulary,
            sequence_parallel=shape.strips > 1,
            reduction="sum",
            mode=mode,
            accumulate=sums,
            tp_group=world,
        )
    with memory.backward():
        loss.backward()
    assert sums.any()
    return loss_bytes(shape, mode, weight)[1], memory.most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["pipelined", "one-shot", "split"])
@pytest.mark.parametrize("shape", [FEW, MANY], ids=["few", "many"])
def test_one_process(shape, mode, dtype):
    predicted, measured = held(Group.single("tp"), shape, mode, dtype)
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("strips", [1, 2])
@pytest.mark.parametrize("mode", ["pipelined", "one-shot"])
def test_two_ranks(ranks, mode, strips):
    """Of a chunk that is alone nothing travels meanwhile: it has one buffer, not two."""
    for name, dtype in ((FEW, torch.bfloat16), (MANY, torch.float32)):
        shape = LossShape(**{**vars(name), "ranks": 2, "strips": strips})
        for predicted, measured in ranks.run(held, shape, mode, dtype, size=2)[:1]:
            assert predicted == pytest.approx(measured, rel=0.01)
