"""The training step and the loop around it: what a step counts, what it leaves alone, how it ends.

Layout parity of whole runs is in tests/test_parity.py, resuming in tests/test_resume.py.
"""

import gc
import math
import time
import weakref
from dataclasses import replace

import pytest
import torch

from core.comm import Group, all_gather
from core.feed import Feed
from core.shard import shard_of
from core.train import HeldOut, Limits, Stopped, TrainingStopped, TrainState, train
from data.batches import microbatches
from data.mock import MockGPTDataset
from tests.training import GPT2, LLAMA, WITH_DROPOUT, Layout, gathered, make_trainer, short_run

TP2, TP4 = Layout(tp=2), Layout(tp=4)
SP2, SP4 = replace(TP2, sequence_parallel=True), replace(TP4, sequence_parallel=True)
SHARDED = Layout(sharding="optim_grads", overlap=True)
ALONE = Group.single("world")


class Recorder:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.evaluations: list[dict] = []
        self.messages: list[str] = []

    def begin_step(self) -> None: ...

    def train(self, row: dict) -> None:
        self.rows.append(row)

    def evaluation(self, row: dict) -> None:
        self.evaluations.append(row)

    def message(self, text: str) -> None:
        self.messages.append(text)


def feed_of(trainer, layout: Layout, dataset) -> Feed:
    grid = trainer.grid

    def source(consumed: int, global_batch: int):
        place = (grid.dp.rank, grid.dp.size)
        return microbatches(dataset, consumed, global_batch, layout.micro_batch_size, *place)

    return Feed(
        source if grid.tp.rank == 0 else None,
        grid.tp,
        grid.device,
        integers=("tokens", "labels", "position_ids", "sample"),
        floats=("loss_mask",),
    )


def close(a: list[float], b: list[float], rtol: float) -> None:
    a, b = (torch.tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, rtol=rtol, atol=0)


# ---- the loss of a step --------------------------------------------------------------------------


class UnevenlyMasked(MockGPTDataset):
    """Sample n keeps its first 5 n mod 17 tokens: none of sample 0, all 16 of sample 10."""

    def __getitem__(self, n: int) -> dict:
        sample = super().__getitem__(n)
        sample["loss_mask"][5 * n % 17 :] = 0
        return sample


def masked_steps(world: Group, layout: Layout) -> tuple[list[float], list[float], list[int]]:
    trainer, _ = make_trainer(world, GPT2, layout)
    feed = feed_of(trainer, layout, UnevenlyMasked(GPT2.vocab_size, GPT2.seq_length, 1))
    state = TrainState()
    rows = [trainer.train_step(state, feed) for _ in range(3)]
    return tuple([row[key] for row in rows] for key in ("lm_loss", "grad_norm", "tokens"))


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, Layout(micro_batch_size=1)),
        (1, Layout(micro_batch_size=2)),
        (1, Layout(micro_batch_size=4)),
        (2, Layout(micro_batch_size=1)),
        (2, Layout(micro_batch_size=4)),
        (4, replace(SP2, micro_batch_size=2)),
    ],
    ids=str,
)
def test_every_kept_token_weighs_the_same(ranks, size, layout):
    """pytorch/torchtitan#2206, NVIDIA-NeMo/Speech#8343: means of microbatches or ranks were
    averaged, so the loss of unevenly masked data moved with the microbatch size and dp."""
    losses, norms, tokens = masked_steps(ALONE, Layout(micro_batch_size=8))
    assert tokens[0] == sum(5 * n % 17 for n in range(8))
    for mine in ranks.run(masked_steps, layout, size=size):
        close(mine[0], losses, 1e-6)
        close(mine[1], norms, 2e-6)
        assert mine[2] == tokens


def test_the_case_above_would_show_a_mean_of_means():
    trainer, _ = make_trainer(ALONE, GPT2, Layout(micro_batch_size=1))
    masked = UnevenlyMasked(GPT2.vocab_size, GPT2.seq_length, 1)
    batches = feed_of(trainer, Layout(micro_batch_size=1), masked).step(0, 8, 8)
    with torch.no_grad():
        losses = [trainer.stages[0].compute(batch, None) for batch in batches]
    kept = [loss for loss in losses if loss.tokens]
    assert len(kept) == 7
    means = sum(float(loss.total / loss.tokens) for loss in kept) / len(kept)
    right = sum(float(loss.total) for loss in kept) / sum(float(loss.tokens) for loss in kept)
    assert abs(means / right - 1) > 1e-4


class FullyMasked(MockGPTDataset):
    """Samples 8 to 15, the second batch, keep no token."""

    def __getitem__(self, n: int) -> dict:
        sample = super().__getitem__(n)
        if 8 <= n < 16:
            sample["loss_mask"][:] = 0
        return sample


def fully_masked_run(world: Group, layout: Layout):
    trainer, _ = make_trainer(world, GPT2, layout, weight_decay=0.1)
    feed = feed_of(trainer, layout, FullyMasked(GPT2.vocab_size, GPT2.seq_length, 1))
    state, weights, rows = TrainState(), [], []
    for _ in range(3):
        rows.append(trainer.train_step(state, feed))
        weights.append(gathered(trainer))
    return rows, weights, state, trainer.optimizer.steps


@pytest.mark.parametrize(("size", "layout"), [(1, Layout()), (4, SP2)], ids=str)
def test_a_fully_masked_batch_is_counted_and_changes_nothing(ranks, size, layout):
    """Loss 0, no update, no division by zero; samples are consumed, Adam's count stands still."""
    for rows, weights, state, steps in ranks.run(fully_masked_run, layout, size=size):
        assert [row["skipped"] for row in rows] == [False, True, False]
        assert (rows[1]["lm_loss"], rows[1]["grad_norm"], rows[1]["tokens"]) == (0.0, 0.0, 0)
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        assert any(not torch.equal(weights[1][name], weights[2][name]) for name in weights[0])
        assert state == TrainState(iteration=3, consumed_samples=24, updates=2, skipped=1)
        assert steps == 2


class NothingKept(MockGPTDataset):
    def __getitem__(self, n: int) -> dict:
        sample = super().__getitem__(n)
        sample["loss_mask"][:] = 0
        return sample


@pytest.mark.parametrize("why", ["overflow", "no token"])
def test_a_run_that_only_skips_ends_with_its_reason(why):
    """And without a checkpoint of its end: started again, it would look complete."""
    precision = (("fp16", True),) if why == "overflow" else ()
    layout, saved = Layout(precision=precision), []
    trainer, feed = make_trainer(ALONE, GPT2, layout)
    if why == "no token":
        feed = feed_of(trainer, layout, NothingKept(GPT2.vocab_size, GPT2.seq_length, 1))
    reason = {
        "overflow": r"overflowed float16, and the loss scale is 1\.07374e\+09 now; --initial-loss",
        "no token": "no token was kept in any of them; look at the data's loss mask",
    }[why]
    with pytest.raises(TrainingStopped, match=f"all 3 iterations were skipped .*{reason}"):
        train(
            trainer,
            TrainState(),
            feed,
            limits=Limits(last_iteration=3),
            reporter=Recorder(),
            save=lambda state: saved.append(state.iteration) or True,
        )
    assert saved == []


# ---- gradients, norm, decay ----------------------------------------------------------------------


def gradients(world: Group, model, layout: Layout) -> tuple[dict, dict, float]:
    """Of the first step: this rank's gradients of replicated parameters (norms, biases, tables),
    all gradients gathered, and the reported norm."""
    trainer, feed = make_trainer(world, model, layout)
    kept: dict[str, torch.Tensor] = {}
    step = trainer.optimizer.step

    def keep_and_step(learning_rate, weight_decay, tokens, *rates):
        for stage in trainer.stages:
            for name, param in stage.named_parameters():
                kept[name] = param.main_grad / tokens
        return step(learning_rate, weight_decay, tokens, *rates)

    trainer.optimizer.step = keep_and_step
    row = trainer.train_step(TrainState(), feed)
    mine, whole, tp = {}, {}, trainer.grid.tp
    for name, param in trainer.stages[0].named_parameters():
        shard, grad = shard_of(param), kept[name]
        if shard.dim is None:
            mine[name] = whole[name] = grad
        else:
            parts = grad.view(shard.local_shape(tp.size))
            parts = all_gather(parts, tp, dim=shard.dim, tag="test.gather")
            whole[name] = parts.narrow(shard.dim, 0, shard.shape[shard.dim])
    return mine, whole, row["grad_norm"]


@pytest.mark.parametrize("layout", [TP2, SP2, TP4, SP4], ids=str)
@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_gradients_of_replicated_parameters(ranks, model, layout):
    """NVIDIA/Megatron-LM#1446: under sequence parallelism every tp rank sees its own tokens, and
    the last norm's gradient was left different on each. All of them agree, and equal tp 1."""
    replicated, whole, norm = gradients(ALONE, model, Layout())
    results = ranks.run(gradients, model, layout, size=layout.tp)
    for mine, gathered_grads, its_norm in results:
        assert mine.keys() < whole.keys() and "final_norm.weight" in mine
        for name, grad in mine.items():
            assert torch.equal(grad, results[0][0][name]), name
        for name, grad in gathered_grads.items():
            scale = float(replicated.get(name, whole[name]).abs().max())
            torch.testing.assert_close(grad, whole[name], rtol=0, atol=2e-6 * scale, msg=name)
        assert its_norm == pytest.approx(norm, rel=1e-6)


def test_the_norm_is_that_of_the_mean_losss_gradient():
    _, whole, norm = gradients(ALONE, GPT2, Layout())
    squares = sum(float(grad.double().square().sum()) for grad in whole.values())
    assert norm == pytest.approx(math.sqrt(squares), rel=1e-6)


@pytest.mark.parametrize(
    ("size", "layout"), [(2, TP2), (2, SP2), (4, TP4), (4, SP2), (2, Layout())], ids=str
)
def test_replicated_parameters_count_once_when_clipping(ranks, size, layout):
    """ROCm/TransformerEngine#715, NVIDIA-NeMo/RL#3788: replicated parameters were counted once per
    tp rank, so the norm was too large and clipping too strong."""
    clip = {"clip_grad": 0.1, "optimizer": "sgd", "lr": 1.0}
    one = short_run(ALONE, GPT2, Layout(), 3, **clip)
    assert one.norms[0] > 0.5  # clipping is at work
    for run in ranks.run(short_run, GPT2, layout, 3, size=size, **clip):
        close(run.norms, one.norms, 1e-5)
        for name, value in one.final.items():
            torch.testing.assert_close(run.final[name], value, rtol=0, atol=1e-6, msg=name)


def test_clipping_bounds_the_update():
    """Plain SGD with rate 1 moves the weights by the clipped gradient."""
    run = short_run(
        ALONE, GPT2, Layout(), 1, clip_grad=0.1, optimizer="sgd", lr=1.0, weight_decay=0.0
    )
    moved = sum(
        float((run.final[name] - run.initial[name]).double().square().sum()) for name in run.final
    )
    assert math.sqrt(moved) == pytest.approx(0.1, rel=1e-4)


def decayed(world: Group, model, layout: Layout) -> dict[str, float]:
    """What one update with gradient zero multiplies each parameter by."""
    trainer, _ = make_trainer(world, model, layout, lr=0.5)
    for stage in trainer.stages:
        for param in stage.parameters():
            param.data += 1.0  # biases are 0 at first
    before = gathered(trainer)
    trainer.replicas.zero_grad()
    trainer.replicas.sum_gradients()
    trainer.optimizer.step(0.5, 0.1, tokens=1.0)
    after = gathered(trainer)
    return {name: float((after[name] / before[name]).mean()) for name in before}


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(("size", "layout"), [(1, Layout()), (2, SP2)], ids=str)
def test_weights_decay_norms_and_biases_do_not(ranks, model, size, layout):
    """ServiceNow/Fast-LLM#545, Lightning-AI/lit-llama#254: decay fell on norm gains and biases."""
    for factors in ranks.run(decayed, model, layout, size=size):
        for name, factor in factors.items():
            spared = name.endswith(".bias") or "norm" in name
            assert factor == pytest.approx(1.0 if spared else 1 - 0.5 * 0.1, rel=1e-5), name
        assert sum(factor != 1.0 for factor in factors.values()) >= 4 * model.num_layers


# ---- evaluation ----------------------------------------------------------------------------------


def with_and_without_evaluation(world: Group, layout: Layout):
    model = replace(GPT2, **WITH_DROPOUT)
    outcomes = []
    for valid in (True, False):
        trainer, feed = make_trainer(world, model, layout)
        held_out = MockGPTDataset(GPT2.vocab_size, GPT2.seq_length, 1, split=1)
        recorder = Recorder()
        train(
            trainer,
            TrainState(),
            feed,
            limits=Limits(last_iteration=5, eval_interval=2, eval_iters=3),
            reporter=recorder,
            valid=[HeldOut(feed_of(trainer, layout, held_out))] if valid else (),
        )
        outcomes.append((recorder, gathered(trainer)))
    return outcomes


@pytest.mark.parametrize(("size", "layout"), [(1, Layout()), (4, SP2)], ids=str)
def test_evaluation_leaves_nothing_behind(ranks, size, layout):
    """Dropout is back after it, no sample is consumed, no gradient stays: not a bit differs."""
    reference = with_and_without_evaluation(ALONE, Layout())
    for (with_it, weights), (without, same) in ranks.run(
        with_and_without_evaluation, layout, size=size
    ):
        assert with_it.rows == without.rows
        assert all(torch.equal(weights[name], same[name]) for name in weights)
        assert [row["iteration"] for row in with_it.evaluations] == [2, 4, 5]
        losses = [row["lm_loss"] for row in with_it.evaluations]
        close(losses, [row["lm_loss"] for row in reference[0][0].evaluations], 1e-5)
        assert losses[0] > losses[1] > losses[2]
        assert without.evaluations == []


def test_evaluation_is_without_dropout_and_repeats():
    trainer, _ = make_trainer(ALONE, replace(GPT2, **WITH_DROPOUT), Layout())
    plain, _ = make_trainer(ALONE, GPT2, Layout())
    held_out = MockGPTDataset(GPT2.vocab_size, GPT2.seq_length, 1, split=1)
    feed = feed_of(trainer, Layout(), held_out)
    first = trainer.evaluate(feed, 2)
    assert first == trainer.evaluate(feed, 2) == plain.evaluate(feed, 2)


def gathered_after_evaluation(world: Group, layout: Layout) -> list[int]:
    """Buckets whose parameters are whole after an evaluation, and after one that is given up."""
    trainer, feed = make_trainer(world, GPT2, layout)
    asked = iter([False, False, False, True])  # two batches, then one
    found = []
    for _ in range(2):
        trainer.evaluate(feed, 2, lambda: next(asked))
        found.append(sum(memory.is_here for memory in trainer.replicas.memories))
    return found


def test_no_parameter_stays_gathered_after_an_evaluation(ranks):
    layout = Layout(sharding="optim_grads_params", overlap=True)
    assert ranks.run(gathered_after_evaluation, layout, size=2) == [[0, 0], [0, 0]]


# ---- not finite ----------------------------------------------------------------------------------


def planted(world: Group, layout: Layout, rank: int, where: str) -> tuple[str, TrainState, list]:
    """Why iteration 3 stops the run, with a NaN in a weight or a gradient of one rank; what was
    done by then, and saved."""
    trainer, feed = make_trainer(world, GPT2, layout)
    state, saved = TrainState(), []

    def plant(step: int) -> None:
        trainer.replicas.settle()  # no gather comes after what is planted
        if step == 3 and world.rank == rank:
            param = dict(trainer.stages[0].named_parameters())["layers.1.mlp.up.weight"]
            if where == "weight":
                param.data.view(-1)[7] = math.nan
            else:
                trainer.stages[0].final_norm.bias.register_hook(lambda grad: grad * math.inf)

    with pytest.raises(TrainingStopped) as stopped:
        train(
            trainer,
            state,
            feed,
            limits=Limits(last_iteration=5, save_interval=1),
            reporter=Recorder(),
            save=lambda state: saved.append(state.iteration),
            at_step=plant,
        )
    return str(stopped.value), state, saved


@pytest.mark.parametrize(
    ("size", "layout", "rank"),
    [(1, Layout(), 0), (2, TP2, 1), (2, SP2, 0), (2, Layout(), 1), (2, SHARDED, 0)],
    ids=str,
)
def test_a_nan_stops_every_rank_with_one_reason(ranks, size, layout, rank):
    """epfLLM/Megatron-LLM#33: the loss was NaN for many iterations and no counter moved. Rank, step
    and samples are named, and nothing is saved after it."""
    results = ranks.run(planted, layout, rank, "weight", size=size)
    for reason, state, saved in results:
        assert reason == results[0][0]
        assert (state.iteration, state.consumed_samples, saved) == (2, 16, [1, 2])
    assert "iteration 3" in reason
    assert f"rank {rank}: 1 parameter is not finite: layers.1.mlp.up.weight" in reason
    # the samples of iteration 3 are 16 to 23; with dp 2 and microbatches of 2, rank 1 has 18, 19, …
    first = 18 if layout.tp == 1 and rank == 1 else 16
    assert f"rank {rank}: microbatch 0, samples {first}, {first + 1}" in reason


@pytest.mark.parametrize(
    ("size", "layout", "rank"),
    [(1, Layout(), 0), (2, TP2, 0), (2, SP2, 1), (2, Layout(), 1), (2, SHARDED, 0)],
)
def test_an_infinite_gradient_stops_every_rank(ranks, size, layout, rank):
    """With a finite loss: nothing is wrong with samples or weights, and none is named."""
    results = ranks.run(planted, layout, rank, "gradient", size=size)
    for reason, state, saved in results:
        assert reason == results[0][0]
        assert (state.iteration, saved) == (2, [1, 2])
    assert "the gradient norm of iteration 3 is " in reason
    assert f"rank {rank}: 1 gradient is not finite: final_norm.bias" in reason
    assert "parameter" not in reason and "samples" not in reason


# ---- how a run ends ------------------------------------------------------------------------------


def ended(world: Group, limits: Limits, asked: dict[int, int] | None = None, failing=()):
    """(Stopped or None, iterations done, iterations saved); rank -> iteration at which it asks;
    the numbers of the saves that say they failed."""
    trainer, feed = make_trainer(world, GPT2, Layout())
    state, saved, recorder = TrainState(), [], Recorder()

    def stop_requested() -> str | None:
        return "SIGTERM" if state.iteration == (asked or {}).get(world.rank) else None

    def save(state: TrainState) -> bool:
        saved.append(state.iteration)
        return len(saved) not in failing

    stopped = train(
        trainer,
        state,
        feed,
        limits=limits,
        reporter=recorder,
        save=save,
        stop_requested=stop_requested,
    )
    return stopped, state.iteration, saved, recorder.messages


def test_a_complete_run_saves_at_intervals_and_at_its_end():
    assert ended(ALONE, Limits(last_iteration=5, save_interval=2)) == (None, 5, [2, 4, 5], [])
    assert ended(ALONE, Limits(last_iteration=4, save_interval=2)) == (None, 4, [2, 4], [])


def test_a_last_save_that_failed_is_tried_once_more():
    limits = Limits(last_iteration=4, save_interval=2)
    assert ended(ALONE, limits, failing={1}) == (None, 4, [2, 4], [])
    assert ended(ALONE, limits, failing={2, 3}) == (None, 4, [2, 4, 4], [])


def test_exit_interval_is_planned_and_saves():
    stopped, done, saved, messages = ended(ALONE, Limits(last_iteration=5, exit_interval=2))
    assert stopped == Stopped("--exit-interval 2", planned=True)
    assert (done, saved) == (2, [2])
    assert messages == ["stopped after iteration 2: --exit-interval 2"]
    assert ended(ALONE, Limits(last_iteration=4, exit_interval=4))[0] is None  # it is complete


def test_the_time_limit_saves_and_is_resumable():
    stopped, done, saved, _ = ended(ALONE, Limits(last_iteration=5, exit_duration_in_mins=1e-9))
    assert stopped == Stopped("--exit-duration-in-mins 1e-09 is over")
    assert (done, saved) == (1, [1])


@pytest.mark.parametrize(("minutes_ago", "done"), [(0, 3), (2, 1)])
def test_the_time_limit_counts_from_when_the_process_began(minutes_ago, done):
    """Loading a checkpoint can take half an hour of a job."""
    trainer, feed = make_trainer(ALONE, GPT2, Layout())
    state, began = TrainState(), time.monotonic() - 60 * minutes_ago
    limits = Limits(last_iteration=3, exit_duration_in_mins=1.9)
    train(trainer, state, feed, limits=limits, reporter=Recorder(), began=began)
    assert state.iteration == done


def test_one_ranks_signal_stops_all_after_the_same_iteration(ranks):
    results = ranks.run(ended, Limits(last_iteration=5), {1: 3}, size=2)
    assert [(done, saved) for _, done, saved, _ in results] == [(3, [3]), (3, [3])]
    whys = [stopped.why for stopped, *_ in results]
    assert whys == ["another rank was asked to stop", "SIGTERM"]
    assert not any(stopped.planned for stopped, *_ in results)


def test_nothing_of_a_run_outlives_it():
    """What autograd's hooks hold no garbage collector frees: weights, and groups whose threads
    spin. Here a step is made, so that the hooks have run."""
    trainer, feed = make_trainer(ALONE, GPT2, Layout())
    trainer.train_step(TrainState(), feed)
    left = [weakref.ref(part) for part in (trainer.replicas, trainer.stages[0])]
    del trainer, feed
    gc.collect()
    assert [part() for part in left] == [None, None]


# ---- the feed ------------------------------------------------------------------------------------


def test_only_the_first_tp_rank_reads():
    names = {"integers": ("tokens",), "floats": ()}
    with pytest.raises(ValueError, match="rank 0, and no other, has a source"):
        Feed(None, ALONE, torch.device("cpu"), **names)


def received(world: Group, layout: Layout) -> list[torch.Tensor]:
    trainer, feed = make_trainer(world, GPT2, layout)
    assert (feed.source is None) == (trainer.grid.tp.rank > 0)
    return [batch["tokens"] for batch in feed.step(8, 8, 4 // trainer.grid.dp.size)]


def test_every_tp_rank_gets_what_the_first_has_read(ranks):
    (alone,) = ranks.run(received, Layout(), size=1)
    for tokens in ranks.run(received, TP2, size=2):
        assert all(torch.equal(a, b) for a, b in zip(tokens, alone, strict=True))
