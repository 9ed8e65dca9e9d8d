"""The sections about a run as a whole: batches and length, checkpoints, logging, launch.

Pure: standard library only. core/train.py, core/checkpoint, core/metrics.py and core/launch.py read
them; the flags are Megatron's, but for those of LaunchConfig and a few of LoggingConfig.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from core.batch_schedule import BatchSchedule


def _at_least(low: float, **values: float | None) -> Iterator[str]:
    """One sentence for every value below `low`; None is absent."""
    for name, value in values.items():
        if value is not None and value < low:
            yield f"--{name.replace('_', '-')} {value:g} must be {low:g} or more"


@dataclass(kw_only=True)
class TrainConfig:
    """Batches and length of the run"""

    micro_batch_size: int = field(metadata={"mock": 2})
    """Samples of one forward on one data parallel rank."""
    global_batch_size: int | None = field(default=None, metadata={"mock": 16})
    """Samples of an optimizer step; by default micro batch x data parallel size."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """START INCREMENT SAMPLES: grow from START by INCREMENT over the first SAMPLES samples."""
    train_iters: int | None = field(default=None, metadata={"mock": 20, "unless": "train_samples"})
    """Optimizer steps of all runs together: a resumed run keeps its command line."""
    train_samples: int | None = None
    """The same, counted in samples."""
    exit_interval: int | None = None
    """Save and leave once the iteration is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """Save and leave after this many minutes."""
    seed: int = 1234
    """Of initial values, dropout and the order of samples."""
    eval_interval: int | None = None
    """Steps between validations; by default only at the end."""
    eval_iters: int = field(default=100, metadata={"mock": 2})
    """Batches of a validation; 0 turns it off."""
    skip_train: bool = False
    """Validate only."""
    rerun_mode: Literal["disabled", "validate_results"] = "disabled"
    """validate_results: a step whose loss is not finite is made again, to find layer and cause."""

    def problems(self) -> Iterator[str]:
        yield from _at_least(
            1,
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.global_batch_size,
            train_iters=self.train_iters,
            train_samples=self.train_samples,
            exit_interval=self.exit_interval,
            eval_interval=self.eval_interval,
        )
        yield from _at_least(0, eval_iters=self.eval_iters, seed=self.seed)
        if self.exit_duration_in_mins is not None and self.exit_duration_in_mins <= 0:
            yield f"--exit-duration-in-mins {self.exit_duration_in_mins:g} must be above 0"
        if self.seed >= 1 << 63:
            yield f"--seed {self.seed} must be below 2**63"
        if self.train_iters is None and self.train_samples is None:
            yield "no length: give --train-iters N, or --train-samples N"
        if self.train_iters is not None and self.train_samples is not None:
            yield (
                f"--train-iters {self.train_iters} and --train-samples {self.train_samples} both "
                f"say how long the run is; give one"
            )

    def batch_schedule(self, dp: int) -> BatchSchedule:
        """Batch sizes on `dp` data parallel ranks."""
        full = self.global_batch_size or self.micro_batch_size * dp
        return BatchSchedule(self.micro_batch_size, dp, full, self.rampup_batch_size)

    def last_iteration(self, dp: int, iteration: int = 0, consumed: int = 0) -> int:
        """Optimizer steps of the whole run; with --train-samples, those made and those that fit
        into what is left: earlier parts of the run may have had other batches."""
        if self.train_iters is not None:
            return self.train_iters
        left = self.batch_schedule(dp).iterations_within(self.train_samples, consumed)
        return iteration + left

    def samples(self, dp: int) -> int:
        """Samples of the whole run."""
        return self.train_samples or self.batch_schedule(dp).consumed_after(self.train_iters)

    def batch_problems(self, dp: int) -> Iterator[str]:
        """What does not divide on `dp` data parallel ranks."""
        sizes = (self.micro_batch_size, self.global_batch_size)
        if any(size is not None and size < 1 for size in sizes):
            return
        step = self.micro_batch_size * dp
        unit = f"--micro-batch-size {self.micro_batch_size}"
        unit += f" x data parallel size {dp} = {step}" if dp > 1 else ""
        if self.global_batch_size is not None and self.global_batch_size % step:
            yield (
                f"--global-batch-size {self.global_batch_size} does not divide by {unit}; "
                f"use {_multiples_around(self.global_batch_size, step)}"
            )
        if self.rampup_batch_size is not None:
            ramp_problems = list(self._ramp_problems(step, unit, self.global_batch_size or step))
            yield from ramp_problems
            if ramp_problems:
                return
        first = self.batch_schedule(dp).size(0)
        if self.train_samples is not None and self.train_samples < first:
            yield (
                f"--train-samples {self.train_samples} is less than one batch of {first}; "
                f"use {first} or more"
            )

    def _ramp_problems(self, step: int, unit: str, full: int) -> Iterator[str]:
        start, increment, samples = self.rampup_batch_size
        ramp = f"--rampup-batch-size {start} {increment} {samples}"
        if start < 1 or increment < 1 or samples < 0:
            yield f"{ramp}: START and INCREMENT must be 1 or more, SAMPLES 0 or more"
            return
        for name, value in (("START", start), ("INCREMENT", increment)):
            if value % step:
                yield (
                    f"{ramp}: {name} {value} does not divide by {unit}; "
                    f"use {_multiples_around(value, step)}"
                )
        if start > full:
            yield f"{ramp}: START {start} is above --global-batch-size {full}"
        elif (full - start) % increment:
            yield (
                f"{ramp}: steps of {increment} from {start} miss --global-batch-size {full}; "
                f"use a batch size of {start + (full - start) // increment * increment}"
            )


def _multiples_around(n: int, step: int) -> str:
    below = n // step * step
    return f"{below} or {below + step}" if below else f"{step}"


@dataclass(kw_only=True)
class CheckpointConfig:
    """Checkpoints"""

    save: str | None = None
    """Directory to write to; also at the end of the run."""
    load: str | None = None
    """Directory to go on from; when it has no checkpoint the run starts fresh."""
    pretrained_checkpoint: str | None = None
    """Directory of weights to start from, as with --finetune, when --load has no checkpoint."""
    use_checkpoint_args: bool = False
    """The shape of the checkpoint's model, as far as it is not given here."""
    save_interval: int | None = None
    """Steps between saves."""
    keep_last: int | None = None
    """Keep this many of the newest checkpoints; by default all."""
    save_retain_interval: int | None = None
    """Keep for good those whose step is a multiple of this, and the newest."""
    async_save: bool = False
    """Copy what is to be saved and write it in the background."""
    on_failed_save: Literal["stop", "continue"] = "stop"
    """When a save fails (disk full): end the run, or train on and try again at the next."""
    ckpt_step: int | None = None
    """Load this step instead of the latest."""
    finetune: bool = False
    """Load the weights only and start at iteration 0."""
    load_optim: bool = True
    """Leave the optimizer's state behind."""
    save_optim: bool = True
    """Write checkpoints without the optimizer's state."""
    exit_on_missing_checkpoint: bool = False
    """Fail when --load has no checkpoint."""
    override_opt_param_scheduler: bool = False
    """The command line's schedules win over those in the checkpoint."""

    def problems(self) -> Iterator[str]:
        yield from _at_least(
            1,
            save_interval=self.save_interval,
            keep_last=self.keep_last,
            save_retain_interval=self.save_retain_interval,
        )
        yield from _at_least(0, ckpt_step=self.ckpt_step)
        yield from self._retains_nothing()
        needs_save = {
            f"--save-interval {self.save_interval}": self.save_interval is not None,
            f"--keep-last {self.keep_last}": self.keep_last is not None,
            f"--save-retain-interval {self.save_retain_interval}": (
                self.save_retain_interval is not None
            ),
            "--async-save": self.async_save,
            f"--on-failed-save {self.on_failed_save}": self.on_failed_save != "stop",
        }
        needs_load = {
            f"--ckpt-step {self.ckpt_step}": self.ckpt_step is not None,
            "--override-opt-param-scheduler": self.override_opt_param_scheduler,
            "--exit-on-missing-checkpoint": self.exit_on_missing_checkpoint,
        }
        needs_source = {
            "--finetune": self.finetune,
            "--use-checkpoint-args": self.use_checkpoint_args,
        }
        for flags, need, given in (
            (needs_save, "--save", self.save),
            (needs_load, "--load", self.load),
            (needs_source, "--load", self.load or self.pretrained_checkpoint),
        ):
            for flag, typed in flags.items():
                if typed and given is None:
                    yield f"{flag} does nothing without {need} DIR"

    def _retains_nothing(self) -> Iterator[str]:
        """Steps that are to be kept for good must be steps that are saved."""
        kept, saved = self.save_retain_interval, self.save_interval
        if self.save is None or kept is None or kept < 1:
            return
        if saved is None:
            yield f"--save-retain-interval {kept} does nothing without --save-interval"
        elif saved >= 1 and kept % saved:
            yield (
                f"--save-retain-interval {kept} is no multiple of --save-interval {saved}, so most "
                f"of the steps to keep are never saved; use {_multiples_around(kept, saved)}"
            )


@dataclass(kw_only=True)
class LoggingConfig:
    """Logging"""

    log_interval: int = field(default=100, metadata={"mock": 1})
    """Steps between log lines."""
    log_throughput: bool = False
    """TFLOP/s per rank in the log line."""
    metrics_file: str | None = None
    """One JSON object a line for every step and validation."""
    tensorboard_dir: str | None = None
    """Events for TensorBoard, when it is installed."""
    tensorboard_log_interval: int = 1
    """Steps between its events."""
    timing_log_level: Literal[0, 1, 2] = 0
    """Where the time of a step goes: 1 compute, communication by axis, optimizer, data; 2 finer.
    On a GPU every part is waited for: nothing overlaps, and steps take longer than untimed ones."""
    log_communication: bool = False
    """Print every collective by group and operation at the end."""
    log_pipeline: str | None = None
    """When each forward and backward ran, for scripts/draw_schedule.py --measured."""
    progress_bar: bool = True
    """No progress bar on a terminal."""

    def problems(self) -> Iterator[str]:
        intervals = (self.log_interval, self.tensorboard_log_interval)
        yield from _at_least(1, log_interval=intervals[0], tensorboard_log_interval=intervals[1])
        if self.log_pipeline is not None and not Path(self.log_pipeline).parent.is_dir():
            yield (
                f"--log-pipeline {self.log_pipeline}: there is no folder "
                f"{Path(self.log_pipeline).parent}"
            )
        if self.metrics_file is not None:
            yield from _unwritable("--metrics-file", Path(self.metrics_file), is_folder=False)
        if self.tensorboard_dir is not None:
            yield from _unwritable("--tensorboard-dir", Path(self.tensorboard_dir), is_folder=True)


def _unwritable(flag: str, path: Path, *, is_folder: bool) -> Iterator[str]:
    """Why nothing could be written there; nothing is made yet."""
    if path.exists() and path.is_dir() != is_folder:
        yield f"{flag} {path} is a {'file' if is_folder else 'folder'}"
        return
    nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
    if nearest != path and not nearest.is_dir():
        yield f"{flag} {path}: {nearest} is not a folder"
    elif not os.access(nearest, os.W_OK):
        yield f"{flag} {path} cannot be written: no permission for {nearest}"


@dataclass(kw_only=True)
class LaunchConfig:
    """Processes"""

    nproc: str | None = None
    """Start this many ranks on this machine, without torchrun; gpu: one for each GPU."""
    distributed_backend: Literal["gloo", "nccl"] | None = None
    """By default nccl where there is a GPU for every rank, else gloo."""
    distributed_timeout_minutes: float = 10.0
    """How long a collective may take."""
    rendezvous_timeout_seconds: float = 120.0
    """How long the ranks may take to find each other."""
    heartbeat_seconds: float = 10.0
    """A rank or host without a sign of life for so long ends the run."""
    hang_timeout_seconds: float | None = None
    """So long without a step or collective is a hang; by default 10 median steps, at least 120 s.
    Counts from the last one. A rank that is reading data or writing a checkpoint has three times as
    long, at least 30 minutes."""
    exit_signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"] | None = None
    """One more signal that saves and stops; SIGTERM, SIGINT and SIGUSR1 always do."""
    log_dir: str | None = None
    """A file for every rank's output."""

    def problems(self) -> Iterator[str]:
        """What is out of range; --nproc is looked at with the environment, in core/launch."""
        for name in (
            "distributed_timeout_minutes",
            "rendezvous_timeout_seconds",
            "heartbeat_seconds",
            "hang_timeout_seconds",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield f"--{name.replace('_', '-')} {value:g} must be above 0"
