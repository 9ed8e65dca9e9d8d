"""From built stages to a finished run: what pretrain_gpt.py and pretrain_bert.py share.

    stages -> DataParallel -> Optimizer -> Trainer -> load -> train -> evaluate -> save

Given stages and feeds, it knows neither models nor datasets. Read `run` first. Neighbour:
core/resume.py (checkpoints).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from core.comm import barrier
from core.comm.ledger import format_table
from core.data_parallel.config import DataParallelConfig
from core.data_parallel.ddp import DataParallel
from core.feed import Feed
from core.forecast import Forecast
from core.grid import ParallelConfig
from core.memory_report import MemoryReport
from core.metrics import Metrics
from core.optimizer import schedule as schedules
from core.optimizer.adam import Optimizer
from core.optimizer.config import OptimizerConfig
from core.optimizer.precision import LossScale, PrecisionConfig
from core.pipeline_parallel.measured import PipelineLog
from core.pipeline_parallel.schedules import row_maker
from core.pipeline_parallel.stage import Stage
from core.process_grid import ProcessGrid
from core.process_memory import keep_freed_memory
from core.resume import Checkpoints
from core.sharding_cost import sharding_cost
from core.step_clock import StepClock
from core.train import (
    HeldOut,
    Limits,
    Stopped,
    Trainer,
    TrainState,
    agreed,
    refuse_in_vain,
    report_evaluation,
    train,
)
from core.train_config import CheckpointConfig, LoggingConfig, TrainConfig

READ_AHEAD = 2  # microbatches of training
JOB_LIMIT = "the job's time limit"


class Sections(Protocol):
    """The sections of a recipe's config that a run reads; model and data are its own affair."""

    parallel: ParallelConfig
    data_parallel: DataParallelConfig
    precision: PrecisionConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig


class Sets(Protocol):
    """A recipe's data sets, see data/from_flags.py: to train on, to evaluate on by split, what a
    checkpoint keeps of them, and lines about them."""

    train: Any
    held_out: Mapping[str, Sequence[Any]]
    record: dict
    facts: Sequence[str]

    def uses(self, samples: int) -> Iterable[str]: ...


@dataclass(kw_only=True)
class Data:
    """What a run trains and evaluates on.

    held_out  "valid" and "test", where there are such samples
    record    plain JSON that a checkpoint keeps for the run that resumes it
    facts     lines to print before the first step
    """

    train: Feed
    held_out: Mapping[str, Sequence[HeldOut]]
    record: dict = field(default_factory=dict)
    facts: Sequence[str] = ()

    @classmethod
    def of(cls, sets: Sets, feed: Callable[..., Feed], samples: int) -> Data:
        """From a recipe's data sets, for a run of so many samples. `feed` makes a Feed of one, and
        may read microbatches ahead."""
        return cls(
            train=feed(sets.train, READ_AHEAD),
            held_out={
                split: [HeldOut(feed(one.data), one.name, one.weight, one.samples) for one in found]
                for split, found in sets.held_out.items()
            },
            record=sets.record,
            facts=[*sets.facts, *sets.uses(samples)],
        )


@dataclass(kw_only=True)
class Inputs:
    """What a recipe hands over.

    stages           of this rank
    open_data        (record of the data in the checkpoint, samples consumed, poll) -> Data; for a
                     fresh start the record is empty. Long work calls `poll`, which may raise
    record           the settings as plain JSON, stored in checkpoints
    model_record     those of them that a checkpoint must agree with
    tokens_per_sample  --seq-length
    flops_per_token  forward and backward, of the whole model
    facts            lines to print before the first step
    stop_requested   a reason to stop (a signal), or None
    at_step          told the number of every step before it begins
    at_write         told the seconds that each write of --async-save has taken
    began            time.monotonic() of the process, for --exit-duration-in-mins
    stops_at         time.time() at which the job's limit will stop the run, or None
    afterwards       what follows then, or ""
    """

    stages: Sequence[Stage]
    open_data: Callable[[dict, int, Callable[[], None]], Data]
    record: dict
    model_record: dict
    tokens_per_sample: int = 1
    flops_per_token: int = 0
    facts: Sequence[str] = ()
    stop_requested: Callable[[], str | None] = lambda: None
    at_step: Callable[[int], None] = lambda step: None
    at_write: Callable[[float], None] = lambda seconds: None
    began: float = field(default_factory=time.monotonic)
    stops_at: Callable[[], float | None] = lambda: None
    afterwards: str = ""
    progress_bar: bool = False


def run(config: Sections, grid: ProcessGrid, inputs: Inputs) -> Stopped | None:
    """Train as `config` says. Returns None when the run is complete, else why it stopped."""
    trainer = trainer_of(config, grid, inputs)
    if grid.device.type == "cpu":
        keep_freed_memory()
    trainer.open_wires()
    checkpoints = Checkpoints(
        config.checkpoint,
        trainer,
        inputs.record,
        inputs.model_record,
        took=inputs.at_write,
    )
    state = checkpoints.load()
    last = config.train.last_iteration(grid.shape.dp, state.iteration, state.consumed_samples)
    data = opened(inputs, checkpoints.data_record, state.consumed_samples)

    def asked() -> Stopped | None:
        return agreed(inputs.stop_requested(), grid.world, grid.device)

    stopped = asked()
    if data is not None:
        checkpoints.data_record = data.record
    with reporting(config, grid, inputs, state, last) as metrics, checkpoints:
        for line in (*inputs.facts, *(data.facts if data else ()), *checkpoints.notes):
            metrics.message(line)
        if stopped is not None:
            metrics.message(f"stopped before the first step: {stopped.why}")
        elif config.train.skip_train:
            iterations = config.train.eval_iters
            stopped = evaluate_only(trainer, state, data.held_out, iterations, metrics, asked)
        elif state.iteration >= last:
            metrics.message(complete(trainer, state, last))
        else:
            for line in sharding_cost(trainer, state.consumed_samples):
                metrics.message(line)
            forecast = forecast_of(config, inputs, state.iteration, last, metrics.message)
            with MemoryReport(trainer, metrics.message, forecast.at_step) as memory:
                stopped = train(
                    trainer,
                    state,
                    data.train,
                    limits=limits(config, last),
                    reporter=metrics,
                    save=checkpoints.saying(metrics.message) if config.checkpoint.save else None,
                    valid=data.held_out.get("valid", ()),
                    stop_requested=inputs.stop_requested,
                    at_step=memory.at_step,
                    began=inputs.began,
                )
            if stopped is None and "test" in data.held_out:
                test = data.held_out["test"]
                report_evaluation(
                    trainer, state, test, config.train.eval_iters, metrics, asked, "test"
                )
        if config.logging.log_communication:
            totals = grid.ledger.grand_totals()
            metrics.message("communication of rank 0, by group and operation")
            metrics.message(format_table(("group", "operation"), totals))
    return stopped


def complete(trainer: Trainer, state: TrainState, last: int) -> str:
    """A line about a run without a step left. Raises TrainingStopped if none changed a weight."""
    refuse_in_vain(state, trainer.optimizer.scale)
    return f"nothing to do: iteration {state.iteration} of {last} is complete"


def trainer_of(config: Sections, grid: ProcessGrid, inputs: Inputs) -> Trainer:
    batch_schedule = config.train.batch_schedule(grid.shape.dp)
    replicas, optimizer = replicas_and_optimizer(config, grid, inputs, batch_schedule.full)
    return Trainer(
        grid,
        inputs.stages,
        replicas,
        optimizer,
        schedule_of(config.optimizer, config.train, grid),
        batch_schedule,
        row_maker(
            config.parallel.pipeline_schedule, grid.pp.size, grid.pp.rank, len(inputs.stages)
        ),
        pipeline_log(config.logging.log_pipeline, grid),
        schedule_of(config.optimizer.of_vocabulary(), config.train, grid),
        repeats_faults=config.train.rerun_mode != "disabled",
    )


class _Abandoned(Exception):
    """The data is not opened: a stop was asked for."""


def opened(inputs: Inputs, record: dict, consumed: int) -> Data | None:
    """What a run reads; None when this rank was asked to stop meanwhile."""

    def poll() -> None:
        if inputs.stop_requested():
            raise _Abandoned

    try:
        return inputs.open_data(record, consumed, poll)
    except _Abandoned:
        return None


def replicas_and_optimizer(
    config: Sections, grid: ProcessGrid, inputs: Inputs, batch_size: int
) -> tuple[DataParallel, Optimizer]:
    replicas = DataParallel(
        inputs.stages,
        grid.dp_cp,
        grid.tp,
        grid.embed,
        config.data_parallel,
        message=torch.bfloat16 if config.precision.grad_reduce_in_bf16 else None,
    )
    scale = LossScale.of(config.precision, tokens=inputs.tokens_per_sample * batch_size)
    return replicas, Optimizer(replicas, grid.tp, grid.pp, config.optimizer, scale)


def schedule_of(
    flags: OptimizerConfig | None, train: TrainConfig, grid: ProcessGrid
) -> schedules.Schedule | None:
    if flags is None:
        return None
    return schedules.Schedule.of(
        flags,
        train_samples=train.samples(grid.shape.dp),
        global_batch_size=train.batch_schedule(grid.shape.dp).full,
    )


def evaluate_only(
    trainer: Trainer,
    state: TrainState,
    held_out: Mapping[str, Sequence[HeldOut]],
    iterations: int,
    reporter: Metrics,
    asked: Callable[[], Stopped | None],
) -> Stopped | None:
    """Every split; why it stopped before the end, or None."""
    for name, split in (("valid", "validation"), ("test", "test")):
        if name in held_out and not report_evaluation(
            trainer, state, held_out[name], iterations, reporter, asked, split
        ):
            return asked()
    return None


def pipeline_log(path: str | None, grid: ProcessGrid) -> PipelineLog | None:
    """On the ranks of the first pipeline, for a file that is empty when they begin. Collective."""
    if path is None:
        return None
    if grid.world.rank == 0:
        Path(path).write_bytes(b"")
    barrier(grid.world, tag="startup.pipeline_log")
    here = grid.coord
    return PipelineLog(path, here.pp) if here.tp == here.dp == here.cp == 0 else None


def limits(config: Sections, last: int) -> Limits:
    return Limits(
        last_iteration=last,
        eval_interval=config.train.eval_interval,
        eval_iters=config.train.eval_iters,
        save_interval=config.checkpoint.save_interval,
        exit_interval=config.train.exit_interval,
        exit_duration_in_mins=config.train.exit_duration_in_mins,
    )


def forecast_of(
    config: Sections, inputs: Inputs, done: int, last: int, say: Callable[[str], None]
) -> Forecast:
    """Whether this run, with so many iterations done, fits into its job or its own duration."""
    minutes, interval = config.train.exit_duration_in_mins, config.train.exit_interval

    def ends() -> tuple[float, str] | None:
        found = []
        if (at := inputs.stops_at()) is not None:
            found.append((at, JOB_LIMIT))
        if minutes is not None:
            left = inputs.began + 60 * minutes - time.monotonic()
            found.append((time.time() + left, f"--exit-duration-in-mins {minutes:g}"))
        return min(found, default=None)

    def then(why: str) -> str:
        if config.checkpoint.save is None:
            return "without --save nothing of it is kept"
        if inputs.afterwards:
            return f"it saves and stops there, and {inputs.afterwards}"
        hint = " (scripts/submit.py would have it requeued)" if why == JOB_LIMIT else ""
        return f"it saves and stops there{hint}"

    if interval is not None:
        last = min(last, done - done % interval + interval)
    return Forecast(say, inputs.at_step, last=last, ends=ends, then=then)


def reporting(
    config: Sections, grid: ProcessGrid, inputs: Inputs, state: TrainState, last: int
) -> Metrics:
    logging = config.logging
    if logging.timing_log_level:
        on_cpu = grid.device.type == "cpu"
        grid.ledger.clock = StepClock(None if on_cpu else torch.accelerator.synchronize)
    return Metrics(
        is_writer=grid.world.rank == 0,
        total_iterations=last,
        first_iteration=state.iteration,
        world_size=grid.world.size,
        flops_per_token=inputs.flops_per_token,
        log_interval=logging.log_interval,
        log_throughput=logging.log_throughput,
        metrics_file=logging.metrics_file,
        tensorboard_dir=logging.tensorboard_dir,
        tensorboard_log_interval=logging.tensorboard_log_interval,
        step_clock=grid.ledger.clock,
        timing_log_level=logging.timing_log_level,
        progress_bar=inputs.progress_bar and logging.progress_bar,
    )
