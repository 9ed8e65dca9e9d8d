"""The training loop: `train_step` in a few paragraphs, `train` around it, `evaluate` beside it.

Given a model as stages and a feed of batches; knows neither models nor datasets nor a command line.
Read in this order: `TrainState`, `Trainer.train_step`, `train`. Progress has one owner,
`TrainState.consumed_samples`: batch size, learning rate, data and dropout are functions of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from core.batch_schedule import BatchSchedule
from core.comm import Group, all_reduce_, gather_objects
from core.data_parallel.ddp import DataParallel
from core.feed import Feed
from core.not_finite import describe
from core.optimizer.adam import Optimizer
from core.optimizer.clip import sum_of_squares
from core.optimizer.precision import LossScale
from core.optimizer.schedule import Schedule
from core.pipeline_parallel.actions import Action
from core.pipeline_parallel.executor import Executor, StepResult
from core.pipeline_parallel.measured import PipelineLog
from core.pipeline_parallel.stage import Batch, Stage
from core.process_grid import ProcessGrid
from core.rerun import Checks, verdict


class TrainingStopped(RuntimeError):
    """The run cannot go on; the text says why, on which ranks, and for which samples."""


@dataclass(frozen=True)
class Stopped:
    """A run that ended before its last iteration, saved and resumable.

    planned  by --exit-interval: a success; otherwise a signal or a time limit
    """

    why: str
    planned: bool = False


@dataclass
class TrainState:
    """Everything a restart needs besides arrays.

    iteration          steps of all runs together
    consumed_samples   the one owner of progress
    updates            steps that changed the weights (Adam's count)
    skipped            steps without an update: no token was kept, or float16 overflowed
    """

    iteration: int = 0
    consumed_samples: int = 0
    updates: int = 0
    skipped: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, int]) -> TrainState:
        return cls(**saved)


@dataclass(frozen=True)
class HeldOut:
    """A set to evaluate on.

    name     among several; empty for the only one
    weight   its share in the mean over several
    samples  all there are, and all are used; None: endless, --eval-iters says how many batches
    """

    feed: Feed
    name: str = ""
    weight: float = 1.0
    samples: int | None = None


class Reporter(Protocol):
    """What the loop tells; core.metrics.Metrics is one."""

    def begin_step(self) -> None: ...
    def train(self, row: dict) -> None: ...
    def evaluation(self, row: dict) -> None: ...
    def message(self, text: str) -> None: ...


@dataclass
class Trainer:
    """The parts of a step, put together once by the recipe.

    make_row      (microbatches, forward_only) -> this rank's row of the plan
    pipeline_log  is told when each forward and backward of training ran
    vocabulary_schedule  of embedding and output layer, where --decoupled-lr gives them another
    repeats_faults  make a step that is not finite once more, to find the layer
    before_update   is called before a step changes what a checkpoint holds
    """

    grid: ProcessGrid
    stages: Sequence[Stage]
    replicas: DataParallel
    optimizer: Optimizer
    schedule: Schedule
    batch_schedule: BatchSchedule
    make_row: Callable[[int, bool], Sequence[Action]]
    pipeline_log: PipelineLog | None = None
    vocabulary_schedule: Schedule | None = None
    repeats_faults: bool = False
    before_update: Callable[[], None] = lambda: None
    _executors: dict[tuple[int, bool], Executor] = field(default_factory=dict)

    def executor(self, microbatches: int, forward_only: bool = False) -> Executor:
        """One per number of microbatches: a batch ramp-up needs several in a run."""
        key = (microbatches, forward_only)
        if key not in self._executors:
            row = self.make_row(microbatches, forward_only)
            log = None if forward_only else self.pipeline_log
            sync = None if forward_only else self.replicas.sync
            self._executors[key] = Executor(row, self.stages, self.grid.pp, sync, log)
        return self._executors[key]

    def open_wires(self) -> None:
        """Set up the connections between pipeline ranks; all of them call it before they train."""
        self.executor(self.batch_schedule.microbatches(0)).open_wires()

    def train_step(self, state: TrainState, feed: Feed) -> dict:
        """One step from `state`, which it advances. Returns the row for the log."""
        batch_size = self.batch_schedule.size(state.consumed_samples)
        values = self.schedule.at(state.consumed_samples)
        loss_scale = self.optimizer.scale
        self.grid.ledger.begin_step(state.iteration + 1)
        for stage in self.stages:
            stage.train()

        # 1. every microbatch forward and backward, and the sums over ranks
        result, sums, samples = self._gradients(state, feed)
        loss = _mean(sums)
        if not math.isfinite(loss):
            self._stop("loss", "", loss, state, feed, bad_samples(result, samples))
        # 2. norm and clip, update
        self.before_update()
        with self.grid.ledger.at("optimizer"):
            vocabulary_rate = None
            if self.vocabulary_schedule is not None:
                vocabulary_rate = self.vocabulary_schedule.at(state.consumed_samples).learning_rate
            with self.grid.ledger.timed("optimizer"):
                stats = self.optimizer.step(*values, sums["tokens"], vocabulary_rate)
        if not math.isfinite(stats.grad_norm) and loss_scale.is_hopeless:
            story, found = loss_scale.story(), bad_samples(result, samples)
            self._stop("gradient norm", story, stats.grad_norm, state, feed, found)
        state.iteration += 1
        state.consumed_samples += batch_size
        state.updates += stats.updated
        state.skipped += not stats.updated
        return {
            "iteration": state.iteration,
            "consumed_samples": state.consumed_samples,
            "grad_norm": stats.grad_norm,
            "learning_rate": values.learning_rate,
            "global_batch_size": batch_size,
            "tokens": int(sums["tokens"]),
            "skipped": not stats.updated,
            **loss_scale.row(),
            **stats.extra,
            **self.stages[0].report(sums),
        }

    def _gradients(
        self, state: TrainState, feed: Feed
    ) -> tuple[StepResult, dict[str, float], list[Tensor]]:
        """What the microbatches make on this rank, its sums over all ranks, and this rank's sample
        numbers; gradients are summed where they lie."""
        batch_size = self.batch_schedule.size(state.consumed_samples)
        microbatches = self.batch_schedule.microbatches(state.consumed_samples)
        batches = _Remembered(feed.step(state.consumed_samples, batch_size, microbatches))
        self.replicas.zero_grad()
        for stage in self.stages:
            stage.upstream = self.optimizer.scale.upstream
        result = self.executor(microbatches).run(batches)
        with self.grid.ledger.at("gradients"):
            sums = self._reduce(result)
            # what other ranks share: norms over tp, tied table over embed, all over dp
            self.replicas.sum_gradients()
        return result, sums, batches.samples

    @torch.no_grad()
    def evaluate(
        self, feed: Feed, iterations: int, interrupted: Callable[[], object] = lambda: None
    ) -> dict[str, float] | None:
        """The stages' report on the first `iterations` full batches of a feed: the same samples
        each time. None when `interrupted`, asked on all ranks before every batch, says so.

        Nothing is left behind: no gradient, no dropout, no sample is consumed.
        """
        for stage in self.stages:
            stage.eval()
        full = self.batch_schedule.full
        microbatches = full // (self.batch_schedule.micro * self.batch_schedule.dp)
        totals = dict.fromkeys(self.stages[0].reports, 0.0)
        with self.grid.ledger.at("evaluation"):
            for i in range(iterations):
                if interrupted():
                    self.replicas.release()
                    return None
                batches = feed.step(i * full, full, microbatches)
                sums = self._reduce(self.executor(microbatches, forward_only=True).run(batches))
                totals = {name: total + sums[name] for name, total in totals.items()}
        self.replicas.release()
        return self.stages[0].report(totals)

    def _reduce(self, result: StepResult) -> dict[str, float]:
        """Sums over dp, then from the last stage to all of pp; float64."""
        names = self.stages[0].reports
        zero = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        vector = torch.stack([result.sums.get(name, zero) for name in names])
        for group in (self.grid.dp_cp, self.grid.pp):
            all_reduce_(vector, group, tag="loss")
        return dict(zip(names, vector.tolist(), strict=True))

    def _stop(
        self,
        what: str,
        story: str,
        value: float,
        state: TrainState,
        feed: Feed,
        samples: dict[int, list[int]],
    ) -> None:
        """Raise one error on all ranks: a step that cannot be made, and who is to blame."""
        text = (
            f"the {what}{story} of iteration {state.iteration + 1} is {value}; nothing was updated "
            "or saved"
        )
        world, replicas = self.grid.world, self.replicas
        text = describe(text, world, replicas, samples, gradients=what != "loss")
        if self.repeats_faults:
            text = f"{text}\n{self._repeat(what, state, feed)}"
        raise TrainingStopped(text)

    def _repeat(self, what: str, state: TrainState, feed: Feed) -> str:
        """The same step with every layer looked at: whether it fails again, and where first."""
        with Checks(self.stages, self.grid.ledger) as checks:
            _, sums, _ = self._gradients(state, feed)
        value = _mean(sums)
        if what != "loss":
            reduced = [memory.reduced for memory in self.replicas.memories]
            scale = sums["tokens"] * self.optimizer.scale.upstream
            value = math.sqrt(self.optimizer.sums.over(reduced, sum_of_squares).item()) / scale
        found = gather_objects(checks.first, self.grid.world, tag="stop.first")
        return verdict(what, value, found)


def _mean(sums: dict[str, float]) -> float:
    return sums["loss"] / sums["tokens"] if sums["tokens"] else 0.0


def bad_samples(result: StepResult, samples: Sequence[Tensor]) -> dict[int, list[int]]:
    """{microbatch: sample numbers} of this rank, where the loss is not finite."""
    return {
        m: samples[m].tolist()
        for m, total in result.by_microbatch.items()
        if not math.isfinite(total.item())
    }


class _Remembered:
    """Passes microbatches on and keeps their sample numbers, to name those behind a NaN: where they
    are, since reading them from a GPU would wait for all that it still computes."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self.samples: list[Tensor] = []

    def __iter__(self) -> _Remembered:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self.samples.append(batch["sample"])
        return batch


@dataclass(kw_only=True)
class Limits:
    """When a run evaluates, saves and stops. Iterations count all runs together."""

    last_iteration: int
    eval_interval: int | None = None
    eval_iters: int = 0
    save_interval: int | None = None
    exit_interval: int | None = None
    exit_duration_in_mins: float | None = None


def refuse_in_vain(state: TrainState, scale: LossScale) -> None:
    """A run that is complete has changed something; if not, it is not saved as complete, so that
    who starts it again sees this again."""
    if state.iteration and not state.updates:
        why = "no token was kept in any of them; look at the data's loss mask"
        if scale.overflows or scale.in_vain:
            why = (
                f"gradients overflowed float16, and the loss scale is {scale.scale:g} now; "
                "--initial-loss-scale can start it lower, more iterations let it fall"
            )
        raise TrainingStopped(
            f"all {state.iteration} iterations were skipped and the weights are the initial ones: "
            + why
        )


def train(
    trainer: Trainer,
    state: TrainState,
    feed: Feed,
    *,
    limits: Limits,
    reporter: Reporter,
    save: Callable[[TrainState], bool] | None = None,
    valid: Sequence[HeldOut] = (),
    stop_requested: Callable[[], str | None] = lambda: None,
    at_step: Callable[[int], None] = lambda step: None,
    began: float | None = None,
) -> Stopped | None:
    """Train until `limits` say so. Returns None when the run is complete.

    save            writes a checkpoint of `state`; called at intervals and when the run ends, then
                    once more if it said that this step's was not written
    valid           what is evaluated at intervals, and when the run is complete
    stop_requested  a reason to stop after this step (a signal), or None; asked on every rank, and
                    one rank's reason is everybody's
    at_step         told the number of a step before it begins (for failure records)
    began           time.monotonic() from which --exit-duration-in-mins counts; default: now

    Raises TrainingStopped when it cannot go on, and when it is complete but no step made an update.
    """
    began = time.monotonic() if began is None else began
    saved_at = state.iteration

    def reason() -> str | None:
        if requested := stop_requested():
            return requested
        minutes = limits.exit_duration_in_mins
        if minutes is not None and time.monotonic() - began > minutes * 60:
            return f"--exit-duration-in-mins {minutes:g} is over"
        return None

    def asked() -> Stopped | None:
        return agreed(reason(), trainer.grid.world, trainer.grid.device)

    stopped = None
    while state.iteration < limits.last_iteration and stopped is None:
        at_step(state.iteration + 1)
        reporter.begin_step()
        reporter.train(trainer.train_step(state, feed))
        done = state.iteration >= limits.last_iteration
        if _due(limits.eval_interval, state.iteration) and valid and not done:
            report_evaluation(trainer, state, valid, limits.eval_iters, reporter, asked)
        if save is not None and _due(limits.save_interval, state.iteration):
            with trainer.grid.ledger.timed("checkpoint"):
                if save(state):
                    saved_at = state.iteration
        stopped = asked()
        if stopped is None and _due(limits.exit_interval, state.iteration):
            stopped = Stopped(f"--exit-interval {limits.exit_interval}", planned=True)
    complete = state.iteration >= limits.last_iteration
    if complete:
        refuse_in_vain(state, trainer.optimizer.scale)
    if save is not None and saved_at != state.iteration:
        save(state)
    if complete:
        stopped = None
        if valid:
            report_evaluation(trainer, state, valid, limits.eval_iters, reporter, asked)
    if stopped is not None:
        reporter.message(f"stopped after iteration {state.iteration}: {stopped.why}")
    return stopped


def report_evaluation(
    trainer: Trainer,
    state: TrainState,
    sets: Sequence[HeldOut],
    iterations: int,
    reporter: Reporter,
    interrupted: Callable[[], object] = lambda: None,
    split: str = "validation",
) -> bool:
    """Evaluate and report each set, if there are several, and their weighted mean.

    A stop that is asked for meanwhile ends it at once, with nothing but a line, and returns False.
    """
    when = {"iteration": state.iteration, "consumed_samples": state.consumed_samples}
    full, means = trainer.batch_schedule.full, {}
    for held in sets:
        batches = iterations if held.samples is None else -(-held.samples // full)
        found = trainer.evaluate(held.feed, batches, interrupted)
        if found is None:
            reporter.message(f"{split} at iteration {state.iteration} was abandoned")
            return False
        losses = {name: value for name, value in found.items() if name.endswith("_loss")}
        if len(sets) > 1:
            reporter.evaluation({**when, "split": split, "set": held.name, **losses})
        share = held.weight / sum(each.weight for each in sets)
        for name, value in losses.items():
            means[name] = means.get(name, 0.0) + share * value
    reporter.evaluation({**when, "split": split, **means})
    return True


def _due(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0


def agreed(why: str | None, world: Group, device: torch.device) -> Stopped | None:
    """One reduced flag: if any rank has a reason to stop, all do. Collective."""
    flag = torch.tensor([int(why is not None)], device=device)
    if not all_reduce_(flag, world, op="max", tag="stop.flag").item():
        return None
    return Stopped(why or "another rank was asked to stop")
