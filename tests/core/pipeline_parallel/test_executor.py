"""The executor on small stages: order, memory, split backward, transfers, and what it refuses."""

import re

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from core.comm import Group
from core.data_parallel.ddp import DataParallel
from core.pipeline_parallel.actions import Action, Op, Plan
from core.pipeline_parallel.executor import Executor
from core.pipeline_parallel.measured import PipelineLog, read_measured
from core.pipeline_parallel.schedules import build_plan
from core.pipeline_parallel.stage import Loss, Stage, WireSpec
from core.shard import Shard
from core.tensor_parallel import ColumnParallelLinear

ROWS, WIDTH = 3, 4
WIRE = WireSpec((ROWS, WIDTH), torch.float64)


class Toy(Stage):
    """Gain, then a linear, then tanh; the first stage makes its input from the batch, the last
    squares. `index` picks the weights, so that the same stage is the same on every layout."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__(index, count, WIRE)
        self.linear = ColumnParallelLinear(
            WIDTH,
            WIDTH,
            tp_group=Group.single(),
            dtype=torch.float64,
            name=f"linear{index}",
            seed=1,
            init_std=0.5,
        )
        self.gain = torch.nn.Parameter(torch.full((WIDTH,), 1.5, dtype=torch.float64))
        self.gain.shard = Shard((WIDTH,))

    def compute(self, batch: dict, activation: Tensor | None) -> Tensor | Loss:
        x = batch["x"] if activation is None else activation
        y, _ = self.linear(x * self.gain)
        y = y.tanh()
        return Loss(y.square().sum(), torch.tensor(ROWS)) if self.is_last else y


def batches(count: int, rows: int = ROWS):
    for m in range(count):
        generator = torch.Generator().manual_seed(m)
        yield {"x": torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)}


def train(stages: list[Stage], row, pp: Group, microbatches: int, **options):
    """Gradients by stage and name, the result, and the executor after one step."""
    DataParallel(stages, ALONE, ALONE, ALONE)
    executor = Executor(row, stages, pp, **options)
    result = executor.run(batches(microbatches))
    grads = {
        f"{stage.index}.{name}": param.main_grad.clone()
        for stage in stages
        for name, param in stage.named_parameters()
    }
    return grads, result, executor


def train_plan(world: Group, schedule: str, microbatches: int, chunks: int) -> tuple:
    """What one rank of a plan ends with: its gradients, the loss sum, sends and receives."""
    plan = build_plan(schedule, world.size, microbatches, chunks)
    stages = [Toy(i, plan.stages) for i in range(world.rank, plan.stages, world.size)]
    grads, result, executor = train(stages, plan.row(world.rank), world, microbatches)
    assert all(stage.in_flight == 0 for stage in stages)
    done = [event.at for event in world.ledger.events(group="world")]
    wanted = [str(a) for a in plan.row(world.rank) if a.peer is not None]
    assert done == wanted
    sums = {name: value.item() for name, value in result.sums.items()}
    executor.open_wires()
    return grads, sums


def dense(count: int, microbatches: int) -> tuple[dict[str, Tensor], float]:
    """The same model as one chain of autograd."""
    stages = [Toy(i, count) for i in range(count)]
    total = 0.0
    for batch in batches(microbatches):
        x = None
        for stage in stages:
            x = stage.compute(batch, x)
        x.total.backward()
        total += x.total.item()
    named = [(f"{s.index}.{n}", p.grad) for s in stages for n, p in s.named_parameters()]
    return dict(named), total


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved", 2)]
)
def test_every_schedule_gives_the_gradients_of_one_chain(ranks, schedule, chunks):
    pp, microbatches = 4, 6
    wanted, total = dense(pp * chunks, microbatches)
    answers = ranks.run(train_plan, schedule, microbatches, chunks, size=pp)
    found = {name: grad for grads, _ in answers for name, grad in grads.items()}
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)
    assert answers[-1][1]["loss"] == pytest.approx(total, rel=1e-12)
    assert answers[-1][1]["tokens"] == ROWS * microbatches
    assert all(not sums for _, sums in answers[:-1])


# ---- one rank: nothing is sent, everything can be looked at ------------------------------------

ALONE = Group.single("pp")


def row_of(text: str) -> tuple[Action, ...]:
    return Plan.parse(text).row(0)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_a_split_backward_adds_the_same_gradients_later():
    whole, _, _ = train([Toy(0, 1)], row_of("F0@0 F1@0 B0@0 B1@0"), ALONE, 2)
    stage = Toy(0, 1)
    split, _, _ = train([stage], row_of("F0@0 F1@0 I0@0 I1@0 W0@0 W1@0"), ALONE, 2)
    assert equal(split, whole)
    assert all(grad.abs().min() > 0 for grad in whole.values())


def test_weight_gradients_wait_for_w_and_norms_do_not():
    stage = Toy(0, 1)
    DataParallel([stage], ALONE, ALONE, ALONE)
    seen = []
    watched = Executor(row_of("F0@0 I0@0 W0@0"), [stage], ALONE)
    for op in (Op.I, Op.W):
        step = watched._do[op]

        def after(action, step=step):
            step(action)
            filled = [stage.linear.weight, stage.linear.bias, stage.gain]
            seen.append([bool(p.main_grad.abs().sum() > 0) for p in filled])
            seen.append(stage.in_flight)

        watched._do[op] = after
    watched.run(batches(1))
    assert seen == [[False, False, True], 1, [True, True, True], 0]
    assert all(param.main_grad.abs().min() > 0 for param in stage.parameters())


def test_a_backward_in_one_piece_does_not_wait():
    """A stage whose rows split some microbatches and not others (a user's schedule)."""
    whole, _, _ = train([Toy(0, 1)], row_of("F0@0 F1@0 B0@0 B1@0"), ALONE, 2)
    mixed, _, _ = train([Toy(0, 1)], row_of("F0@0 F1@0 B0@0 I1@0 W1@0"), ALONE, 2)
    assert equal(mixed, whole)


def test_more_activations_than_planned_are_an_error():
    executor = Executor(row_of("F0@0 F1@0 B0@0 B1@0"), [Toy(0, 1)], ALONE)
    executor.most_live = 1
    with pytest.raises(AssertionError, match="F1@0: 2 activations held, planned 1"):
        executor.run(batches(2))


def test_a_failed_step_leaves_nothing_behind():
    stage = Toy(0, 1)
    executor = Executor(row_of("F0@0 F1@0 I0@0 I1@0 W0@0 W1@0"), [stage], ALONE)
    with pytest.raises(ValueError, match="the data ends after 1 of 2 microbatches"):
        executor.run(batches(1))
    assert stage.in_flight == 1
    executor.run(batches(2))
    assert stage.in_flight == 0


def test_the_log_is_what_draw_schedule_reads(tmp_path):
    plan = Plan.parse("F0@0 F1@0 I0@0 W0@0 B1@0")
    log = PipelineLog(tmp_path / "run.jsonl", rank=0)
    executor = Executor(plan.row(0), [Toy(0, 1)], ALONE, log=log)
    executor.run(batches(2))
    executor.run(batches(2))
    timeline = read_measured(tmp_path / "run.jsonl", plan)
    assert [t.action for t in timeline.events] == list(plan.row(0))
    assert all(a.end <= b.start for a, b in zip(timeline.events, timeline.events[1:]))


# ---- what is refused -----------------------------------------------------------------------------


class Wrong(Toy):
    """Makes something else than it has to."""

    def __init__(self, index: int, count: int, out) -> None:
        super().__init__(index, count)
        self.out = out

    def compute(self, batch, activation):
        return self.out


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        (
            Wrong(0, 2, torch.zeros(2, WIDTH, dtype=torch.float64)),
            "stage 0 of 2 (Wrong) made an activation of float64 (2, 4); the next stage expects "
            "float64 (3, 4)",
        ),
        (
            Wrong(0, 2, torch.zeros(ROWS, WIDTH)),
            "made an activation of float32 (3, 4); the next stage expects float64 (3, 4)",
        ),
        (Wrong(1, 2, torch.zeros(ROWS, WIDTH)), "made Tensor; it has to make a Loss"),
        (Wrong(0, 2, Loss(torch.zeros(()), torch.zeros(()))), "has to make an activation tensor"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_stage_that_makes_the_wrong_thing_is_named(stage, told, training):
    stage.train(training)
    activation = None if stage.is_first else torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    with pytest.raises((TypeError, ValueError), match=re.escape(told)):
        stage.forward_step(0, {}, activation)


def test_a_sequence_of_another_length_is_refused():
    stage = Toy(0, 2)
    stage.forward_step(0, next(batches(1)), None)
    with pytest.raises(ValueError, match=r"made an activation of float64 \(5, 4\); .* pad"):
        stage.forward_step(1, next(batches(1, rows=5)), None)


def test_a_row_for_other_stages_is_refused():
    with pytest.raises(ValueError, match=r"the row uses stages \[1\], built: \[0\]"):
        Executor([Action(Op.F, 1)], [Toy(0, 2)], ALONE)


# ---- memory --------------------------------------------------------------------------------------


class Watched(Toy):
    """Keeps a weak reference to the memory of every activation that it makes."""

    made: dict[int, StorageWeakRef]

    def forward_step(self, microbatch, batch, activation):
        out = super().forward_step(microbatch, batch, activation)
        if isinstance(out, Tensor):
            self.made[microbatch] = StorageWeakRef(out.untyped_storage())
        return out


class Added(Watched):
    """Ends in a sum, which saves nothing (tanh keeps its output for backward)."""

    def compute(self, batch, activation):
        out = super().compute(batch, activation)
        return out if self.is_last else out + 1


def sent_outputs(world: Group, kind: str) -> list[bool]:
    """On rank 0: for each output, whether its memory was still held when the backwards began."""
    plan = build_plan("gpipe", 2, 4)
    stage = {"added": Added, "tanh": Watched}[kind](world.rank, 2)
    stage.made = {}
    DataParallel([stage], ALONE, ALONE, ALONE)
    executor = Executor(plan.row(world.rank), [stage], world)
    held = []
    backward = executor._do[Op.B]

    def first_backward(action):
        if not held:
            held.extend(not ref.expired() for ref in stage.made.values())
        backward(action)

    executor._do[Op.B] = first_backward
    executor.run(batches(4))
    return held


def test_outputs_are_freed_once_they_are_sent(ranks):
    """Their graph stays, their memory goes, but for the sends that may be under way."""
    assert ranks.run(sent_outputs, "added", size=2)[0] == [False, False, True, True]


def test_an_output_that_backward_needs_is_kept(ranks):
    assert ranks.run(sent_outputs, "tanh", size=2)[0] == [True] * 4


class Through(Stage):
    """A stage with nothing in it."""

    def compute(self, batch, activation):
        return activation


def pass_through(world: Group) -> dict[str, Tensor]:
    plan = build_plan("1f1b", 3, 4)
    kind = Through(1, 3, WIRE) if world.rank == 1 else Toy(world.rank, 3)
    grads, _, _ = train([kind], plan.row(world.rank), world, 4)
    return grads


def test_a_stage_without_parameters_passes_on(ranks):
    first, middle, last = ranks.run(pass_through, size=3)
    assert middle == {}
    assert all(grad.abs().min() > 0 for grad in (*first.values(), *last.values()))
