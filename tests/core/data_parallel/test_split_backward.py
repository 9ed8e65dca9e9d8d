"""Gradients that are not kept, where a backward is split into I and W (zb_h1, or a user's rows).

A bucket travels once with every W, as core.traffic predicts it to the byte, and its memory is there
during a W only. It used to travel when autograd was done with it, which is in I, before its weight
gradients: those stayed on every rank, whole, until the next I, and travelled once more at the end.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from core.comm import Group
from core.train import TrainState
from models.config import GPTConfig
from tests.layouts import predicted, recorded
from tests.training import GPT2, LLAMA, Layout, make_trainer

TAGS = {  # what core.traffic's totals of a group and operation consist of
    ("dp_cp", "reduce_scatter"): "gradients",
    ("dp_cp", "all_gather"): "parameters",
    ("embed", "all_reduce"): "gradients.embed",
}
OWN = (  # some backwards whole, W in another order than I, four microbatches
    "F1@0 F0@0 F2@0 I0@0 F3@0 B1@0 W0@0 I3@0 I2@0 W3@0 W2@0\n"
    "F0@1 B0@1 F1@1 I1@1 F3@1 F2@1 B3@1 W1@1 B2@1\n"
)


@dataclass
class Step:
    """What one rank saw of a step.

    traffic   (recorded, predicted) by (group, operation): calls, payload, wire
    by_tag    the same of TAGS alone, as recorded
    sent_at   how many buckets' gradients left in each action
    wanted    all of them, once in every B or W
    held      (action, buckets whose gradients are in memory after it), where there are any
    """

    traffic: tuple[dict, dict]
    by_tag: dict
    sent_at: Counter
    wanted: Counter
    held: list[tuple[str, int]]


def watched_step(world: Group, model: GPTConfig, layout: Layout) -> Step:
    trainer, feed = make_trainer(world, model, layout)
    trainer.open_wires()
    memories, held = trainer.replicas.memories, []

    def look_after(step: Callable) -> Callable:
        def both(*args: object) -> object:
            out = step(*args)
            if here := sum(memory.grads is not None for memory in memories):
                held.append((world.ledger.place, here))
            return out

        return both

    for stage in trainer.stages:
        for name in ("backward_step", "input_grad_step", "weight_grad_step"):
            setattr(stage, name, look_after(getattr(stage, name)))
    trainer.train_step(TrainState(), feed)
    events = trainer.grid.ledger.events(step=1)
    by_tag: dict[tuple, Counter] = {}
    for event in events:
        if event.tag in TAGS.values():
            sums = by_tag.setdefault((event.group, event.op), Counter())
            assert TAGS[event.group, event.op] == event.tag
            sums.update(calls=1, payload=event.payload, wire=event.wire)
    row = trainer.make_row(trainer.batch_schedule.microbatches(0), False)
    return Step(
        (recorded(trainer), predicted(trainer, model, layout)),
        {key: tuple(sums.values()) for key, sums in by_tag.items()},
        Counter(event.at for event in events if event.tag == "gradients"),
        Counter({str(a): len(memories) for a in row if a.op.value in "BW"}),
        held,
    )


def holds(ranks, size: int, model: GPTConfig, layout: Layout) -> None:
    for step in ranks.run(watched_step, model, layout, size=size):
        found, foretold = step.traffic
        assert found == foretold
        assert step.by_tag == {key: total for key, total in foretold.items() if key in TAGS}
        assert step.sent_at == step.wanted
        assert step.held == []


@pytest.mark.parametrize("micro_batch_size", [4, 1], ids=["once", "accumulation"])
@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["tied", "untied"])
@pytest.mark.parametrize("sharding", ["optim_grads", "optim_grads_params"])
def test_a_bucket_travels_once_with_every_w(ranks, sharding, model, micro_batch_size):
    layout = Layout(
        pp=2,
        schedule="zb_h1",
        sharding=sharding,
        micro_batch_size=micro_batch_size,
        overlap=model is LLAMA,
    )
    holds(ranks, 4, model, layout)


def test_with_sequence_parallelism(ranks):
    layout = Layout(
        tp=2,
        sequence_parallel=True,
        pp=2,
        schedule="zb_h1",
        sharding="optim_grads_params",
        micro_batch_size=1,
    )
    holds(ranks, 8, replace(GPT2, loss_mode="unfused"), layout)


@pytest.mark.parametrize("sharding", ["optim_grads", "optim_grads_params"])
def test_rows_of_a_user_that_split_some_backwards(ranks, sharding, tmp_path):
    rows = tmp_path / "mine.txt"
    rows.write_text(OWN)
    layout = Layout(pp=2, schedule=str(rows), sharding=sharding, micro_batch_size=1)
    holds(ranks, 4, replace(GPT2, num_layers=4), layout)
