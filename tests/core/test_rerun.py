"""A step that is not finite, made once more: layer, rank and microbatch are named, and whether the
fault repeats. tests/core/test_train.py has what is said without --rerun-mode."""

import math

import pytest

from core.comm import Group
from core.train import TrainingStopped, TrainState
from tests.training import GPT2, Layout, make_trainer

TP, PP = Layout(tp=2), Layout(pp=2)
BOTH = Layout(tp=2, sequence_parallel=True, pp=2)
SHARDED = Layout(sharding="optim_grads_params", overlap=True)
NAME = "layers.1.mlp.up"


def plant(trainer, kind: str) -> None:
    """A NaN in one weight for good, in one output once, or an infinite gradient for good."""
    if kind == "weight":
        for name, values, _ in trainer.replicas.named_parts():
            if name == f"{NAME}.weight" and len(values):
                values.view(-1)[7] = math.nan
        return
    left = [1]

    def hook(module, given, made):
        output, bias = made
        if kind == "gradient":
            output.register_hook(lambda gradient: gradient * math.inf)
        elif left.pop() if left else 0:
            return output * math.nan, bias

    for stage in trainer.stages:
        for name, module in stage.named_modules():
            if name == NAME:
                module.register_forward_hook(hook)


def stopped(world: Group, layout: Layout, rank: int, kind: str, repeats: bool = True) -> str:
    """Why the second step ends the run, with a fault planted on one rank before it."""
    trainer, feed = make_trainer(world, GPT2, layout)
    trainer.repeats_faults = repeats
    state = TrainState()
    trainer.train_step(state, feed)
    if world.rank == rank:
        plant(trainer, kind)
    with pytest.raises(TrainingStopped) as caught:
        trainer.train_step(state, feed)
    assert (state.iteration, state.consumed_samples) == (1, 8)
    return str(caught.value)


@pytest.mark.parametrize(
    ("size", "layout", "rank", "named", "stage"),
    [
        (1, Layout(), 0, 0, 0),
        (2, TP, 1, 1, 0),
        (2, Layout(), 1, 1, 0),
        (2, PP, 1, 1, 1),
        (4, BOTH, 3, 3, 1),
        (2, SHARDED, 1, 0, 0),  # what one rank holds, both compute with
    ],
    ids=str,
)
def test_a_bad_weight_is_found_where_it_is(ranks, size, layout, rank, named, stage):
    """One row of a weight makes its output NaN in one column, for all 32 tokens of a microbatch."""
    texts = ranks.run(stopped, layout, rank, "weight", size=size)
    assert len(set(texts)) == 1
    width = 4 * GPT2.hidden_size // layout.tp
    assert texts[0].startswith("the loss of iteration 2 is nan; nothing was updated or saved\n")
    assert "1 parameter is not finite: layers.1.mlp.up.weight" in texts[0]
    assert "the loss is nan again: the fault lies in the weights, the samples or" in texts[0]
    assert texts[0].endswith(
        f"it begins on rank {named}: the output of {NAME}, 32 of {32 * width} elements, in the "
        f"forward of microbatch 0 on stage {stage}"
    )


@pytest.mark.parametrize(
    ("size", "layout", "rank"), [(1, Layout(), 0), (2, TP, 1), (2, PP, 1), (2, SHARDED, 1)], ids=str
)
def test_a_fault_that_does_not_repeat_is_the_machines(ranks, size, layout, rank):
    """The loss of the second attempt is the one of a sound run."""
    text, *others = ranks.run(stopped, layout, rank, "once", size=size)
    assert set(others) <= {text}
    # a NaN in the first microbatch: of dp rank 1, or of the only one
    samples = "10, 11" if layout.tp == layout.pp == 1 and size == 2 else "8, 9"
    assert "iteration 2 is nan" in text and f"microbatch 0, samples {samples}" in text
    (sound,) = ranks.run(second_loss, size=1)
    assert f"made once more, the loss is {sound:g}: the fault does not repeat" in text
    assert "it begins" not in text


def second_loss(world: Group) -> float:
    trainer, feed = make_trainer(world, GPT2, Layout())
    state = TrainState()
    return [trainer.train_step(state, feed)["lm_loss"] for _ in range(2)][-1]


@pytest.mark.parametrize(("size", "layout", "rank"), [(1, Layout(), 0), (2, PP, 1)], ids=str)
def test_a_gradient_is_followed_backwards(ranks, size, layout, rank):
    text = ranks.run(stopped, layout, rank, "gradient", size=size)[0]
    assert "the gradient norm of iteration 2 is " in text
    assert "the gradient norm is " in text and " again: the fault lies in" in text
    assert f"it begins on rank {rank}: the gradient of the output of {NAME}, " in text
    assert "in the backward of microbatch 0 " in text


def test_without_the_flag_nothing_is_made_again():
    text = stopped(Group.single("world"), Layout(), 0, "weight", repeats=False)
    assert "1 parameter is not finite" in text and "once more" not in text
