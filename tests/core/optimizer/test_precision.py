"""float16 in training: the loss scale falls, grows and gives up on all ranks, and never shows.

Overflows are planted in the gradient of one parameter on one rank. Adam hides a gradient that is
scaled wrongly; the norm that is reported does not.
"""

import math
from dataclasses import replace

import pytest
import torch

from core.comm import Group
from core.optimizer.precision import LARGEST, PATIENCE, SMALLEST, LossScale, PrecisionConfig
from core.train import Trainer, TrainingStopped, TrainState
from tests.recipe import rows as rows_of
from tests.recipe import run_recipe
from tests.training import GPT2, Layout, make_trainer, short_run

UP, TABLE = "layers.0.mlp.up.weight", "embedding.word.weight"
PLACES = {  # layout, the rank of the fault, its parameter there
    "tp2": (Layout(tp=2), 1, UP),
    "pp2-first-stage": (Layout(pp=2), 0, UP),
    "pp2-tied-table": (Layout(pp=2), 1, TABLE),
    "dp2-optim": (Layout(sharding="optim"), 1, UP),
}


def fp16(layout: Layout, **settings: object) -> Layout:
    return replace(layout, precision=(("fp16", True), *settings.items()))


def plant(trainer: Trainer, rank: int, name: str, when: set[int]) -> None:
    """An infinity in one gradient on one rank, before ranks add theirs, in the steps `when`."""
    sum_gradients, step = trainer.replicas.sum_gradients, 0

    def hurt() -> None:
        nonlocal step
        step += 1
        if step in when and trainer.grid.world.rank == rank:
            ((memory, slot),) = [
                (memory, slot)
                for memory in trainer.replicas.memories
                for slot in memory.bucket.slots
                if slot.name == name
            ]
            memory.grads[slot.start + 1] = math.inf
        sum_gradients()

    trainer.replicas.sum_gradients = hurt


def held(trainer: Trainer) -> list[torch.Tensor]:
    """What an update changes: weights, masters, moments."""
    return [
        x.clone()
        for memory, part in zip(trainer.replicas.memories, trainer.optimizer.parts, strict=True)
        for x in (memory.params, part.master, *part.arrays.values())
    ]


def overflow(
    world: Group, layout: Layout, rank: int, name: str, when: set[int], steps: int
) -> tuple[list[dict], list[set[bool]], TrainState]:
    """(rows, by step whether each tensor stayed as it was, the state at the end)"""
    trainer, feed = make_trainer(world, GPT2, layout)
    plant(trainer, rank, name, when)
    state, rows, stayed = TrainState(), [], []
    before = held(trainer)
    for _ in range(steps):
        rows.append(trainer.train_step(state, feed))
        after = held(trainer)
        stayed.append({torch.equal(a, b) for a, b in zip(before, after, strict=True)})
        before = after
    return rows, stayed, state


@pytest.mark.parametrize("place", PLACES)
def test_one_ranks_overflow_is_everybodys(ranks, place):
    layout, rank, name = PLACES[place]
    layout = fp16(layout, initial_loss_scale=2.0**10, hysteresis=1)
    for rows, stayed, state in ranks.run(overflow, layout, rank, name, {2}, 3):
        assert [row["skipped"] for row in rows] == [False, True, False]
        assert [row["loss_scale"] for row in rows] == [2.0**10, 2.0**9, 2.0**9]
        assert [math.isfinite(row["grad_norm"]) for row in rows] == [True, False, True]
        assert stayed == [{False}, {True}, {False}]
        assert state == TrainState(iteration=3, consumed_samples=24, updates=2, skipped=1)


def test_hysteresis_and_growth():
    """Two overflows until it falls; every two good steps it grows, and overflows are forgiven."""
    layout = fp16(Layout(), initial_loss_scale=256.0, loss_scale_window=2, hysteresis=2)
    rows, *_ = overflow(Group.single("world"), layout, 0, UP, {1, 2, 4, 7, 8}, 8)
    # steps              overflows 1, 2; good, overflow 3 at once; good, good; overflows 1, 2
    assert [row["loss_scale"] for row in rows] == [256, 128, 128, 64, 64, 128, 128, 64]


FAULTS = [True, False, True, False, False, True, True, False, True]


@pytest.mark.parametrize("at", range(len(FAULTS)))
def test_a_scale_goes_on_as_if_never_interrupted(at):
    """Saved after any step; in between it falls, grows, and overflows are forgiven."""
    settings = {"floor": 1.0, "window": 2, "hysteresis": 2}
    unbroken, resumed = LossScale(8.0, **settings), LossScale(32.0, **settings)
    seen = []
    for step, overflow in enumerate(FAULTS):
        if step == at:
            resumed.restore(unbroken.to_json())
        for scale in (unbroken, *([resumed] if step >= at else [])):
            scale.update(overflow)
        seen.append(unbroken.scale)
    assert resumed == unbroken
    assert seen == [8, 8, 4, 4, 8, 8, 4, 4, 2]


@pytest.mark.parametrize("constant", [False, True], ids=["adapts", "constant"])
def test_patience_counts_over_restarts(constant):
    """Eleven overflows at the lowest scale, in runs of six, end as in one."""
    settings = {"loss_scale": 4.0} if constant else {"initial_loss_scale": 4.0, "min_loss_scale": 4}
    saved, steps = {}, 0
    for _ in range(2):
        scale = LossScale.of(PrecisionConfig(fp16=True, **settings), tokens=1)
        scale.restore(saved)
        for _ in range(6):
            if not scale.is_hopeless:
                scale.update(overflow=True)
                steps += 1
        saved = scale.to_json()
    assert scale.is_hopeless
    assert steps == PATIENCE + 1


def test_what_was_in_vain_at_another_scale_is_forgotten():
    saved = LossScale(1024.0, floor=1024.0, patience=PATIENCE, in_vain=6).to_json()
    for other in (LossScale(8.0, floor=8.0), LossScale(1024.0, window=2), LossScale(1024.0)):
        fresh = replace(other)
        other.restore(saved)
        assert replace(other, in_vain=0) == fresh
        assert other.in_vain == (6 if fresh == LossScale(1024.0) else 0)


def test_an_overflow_is_a_row_like_any_other(tmp_path):
    """A first scale that is too high, with all that can be logged."""
    path = tmp_path / "metrics.jsonl"
    flags = ["--fp16", "--initial-loss-scale", 2.0**26, "--hysteresis", 1, "--train-iters", 12]
    flags += ["--log-layer-grad-norms", "--log-num-zeros-in-grad", "--log-params-norm"]
    code, _ = run_recipe(Group.single("world"), *flags, "--metrics-file", path)
    found = rows_of(path)
    skipped = [row["skipped"] for row in found]
    assert (code, len(found)) == (0, 12)
    assert skipped[0] and not skipped[-1]
    for row in found:
        norms = row["layer_grad_norms"].values()
        assert (row["grad_norm"] is None) == (None in norms) == row["skipped"]
        assert row["params_norm"] > 1


def hopeless(world: Group, layout: Layout, rank: int, name: str) -> tuple[str, TrainState]:
    trainer, feed = make_trainer(world, GPT2, layout)
    plant(trainer, rank, name, set(range(1, 100)))
    state = TrainState()
    with pytest.raises(TrainingStopped) as stop:
        for _ in range(PATIENCE + 5):
            trainer.train_step(state, feed)
    return str(stop.value), state


@pytest.mark.parametrize("place", ["tp2", "pp2-first-stage"])
@pytest.mark.parametrize("constant", [False, True], ids=["adapts", "constant"])
def test_at_the_lowest_scale_all_ranks_stop(ranks, place, constant):
    layout, rank, name = PLACES[place]
    settings = {"initial_loss_scale": 16.0, "min_loss_scale": 4.0, "hysteresis": 1}
    layout = replace(layout, global_batch_size=2)
    layout = fp16(layout, **({"loss_scale": 4.0} if constant else settings))
    borne = PATIENCE + (0 if constant else 2)  # 16 -> 8 -> 4, then ten in vain and one too many
    (text, state), (other, state_there) = ranks.run(hopeless, layout, rank, name)
    assert text == other
    assert f"{PATIENCE + 1} times in a row at the lowest loss scale 4" in text
    assert f"of iteration {borne + 1} is " in text
    assert f"rank {rank}: 1 gradient is not finite: {name}" in text
    assert f"rank {1 - rank}" not in text
    wanted = TrainState(iteration=borne, consumed_samples=2 * borne, skipped=borne)
    assert state == state_there == wanted


def test_upstream_is_the_scale_by_a_tokens_power_of_two():
    scale = LossScale.of(PrecisionConfig(fp16=True, initial_loss_scale=2.0**16), tokens=128)
    assert scale.upstream == 2.0**9
    assert LossScale.of(PrecisionConfig(bf16=True), tokens=128).upstream == 1.0


@pytest.mark.parametrize("scale", [SMALLEST, LARGEST])
@pytest.mark.parametrize("tokens", [1, 2**12, 2**62])
def test_upstream_is_a_normal_float32_for_every_batch(scale, tokens):
    upstream = LossScale.of(PrecisionConfig(fp16=True, loss_scale=scale), tokens).upstream
    assert torch.tensor(upstream, dtype=torch.float32).item() == upstream
    assert upstream >= torch.finfo(torch.float32).tiny


def test_a_scale_that_only_grows_stays_in_range():
    scale = LossScale(LARGEST / 2, window=1)
    for _ in range(3):
        scale.update(overflow=False)
    assert scale.scale == LARGEST


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"loss_scale": 1e300}, ["--loss-scale 1e+300 is outside"]),
        ({"loss_scale": math.nan}, ["--loss-scale nan is outside"]),
        ({"loss_scale": 0.0}, ["--loss-scale 0 is outside 5.42e-20 to 1.7e+38: "]),
        ({"initial_loss_scale": 1e45}, ["--initial-loss-scale 1e+45 is outside"]),
        ({"min_loss_scale": 1e-44}, ["--min-loss-scale 1e-44 is outside"]),
        ({}, []),
        ({"loss_scale": LARGEST, "min_loss_scale": SMALLEST}, []),
    ],
)
def test_a_scale_that_float32_cannot_hold_is_refused(settings, named):
    found = list(PrecisionConfig(fp16=True, **settings).problems())
    assert len(found) == len(named)
    assert all(text.startswith(name) for text, name in zip(found, named, strict=True))


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2, sequence_parallel=True), Layout(pp=2)], ids=str
)
def test_the_scale_does_not_show(ranks, layout):
    """Losses, norms and weights after 4 steps, against float32."""
    size = layout.tp * layout.pp
    wanted = short_run(Group.single("world"), GPT2, Layout(), 4)
    for scale in (2.0**8, 2.0**16):
        scaled = fp16(layout, initial_loss_scale=scale)
        if size == 1:
            found = short_run(Group.single("world"), GPT2, scaled, 4)
        else:
            found = ranks.run(short_run, GPT2, scaled, 4, size=size)[0]
        assert found.losses == pytest.approx(wanted.losses, rel=1e-3)
        assert found.norms == pytest.approx(wanted.norms, rel=1e-2)
