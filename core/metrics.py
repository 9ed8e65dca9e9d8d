"""What a run tells the world: log lines, the progress bar, the metrics file, TensorBoard.

One rank writes; on the others every method returns at once, so the training loop needs no `if`.
Communicates nothing and imports no torch: rows are plain numbers that the loop has reduced.

Read in this order: Metrics, _Interval (what the next log line sums up), `log_line` (Megatron-LM's
fields, in its order, which people's scripts parse). Neighbours: core/metrics_sinks.py (files),
core/progress.py (the bar), models/flops.py (the cost of a token, given as a number).
"""

from __future__ import annotations

import errno
import math
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TextIO

from core.metrics_sinks import MetricsFile, Tracker, open_tracker, perplexity
from core.progress import ProgressBar
from core.step_clock import StepClock, breakdown, breakdown_line

Row = Mapping[str, Any]
QUIET_SECONDS = 60.0  # a slow run is seen to live: at least one line a minute


class Metrics:
    """Everything a run prints and records.

    Call `begin_step()`, make the step, call `train(row)`; `evaluation(row)` after an evaluation;
    `message(text)` for any other line; `close()` at the end, whatever the end (also a context
    manager). The rows are Python numbers:

    train       iteration, consumed_samples (after the step), lm_loss (mean over the step's kept
                tokens), grad_norm (before clipping), learning_rate (of the step),
                global_batch_size, tokens (in the step, over all ranks); optional skipped (the step
                made no update), loss_scale, num_zeros, params_norm, and further names in _loss,
                which are shown as lm_loss is
    evaluation  iteration, consumed_samples, lm_loss; optional further names in _loss, split
                ("validation" or "test"), and set: the name of one set, where the row without it
                is the mean over several

    `train` adds step_time_s, tokens_per_s and, where the cost of a token is known,
    tflops_per_rank; under --timing-log-level also time_compute_s (2: time_forward_s and
    time_backward_s), time_tp_s, time_dp_s, time_pp_s, time_optimizer_s, time_data_s and
    time_other_s, which add up to step_time_s (see core/step_clock.py), and time_checkpoint_s, which
    saving took since the last step. Any further key goes to the metrics file as it is.
    """

    def __init__(
        self,
        *,
        is_writer: bool,
        total_iterations: int,
        first_iteration: int = 0,
        world_size: int = 1,
        flops_per_token: int = 0,
        log_interval: int = 100,
        log_throughput: bool = False,
        metrics_file: str | None = None,
        tensorboard_dir: str | None = None,
        tensorboard_log_interval: int = 1,
        progress_bar: bool = False,
        out: TextIO | None = None,
        err: TextIO | None = None,
        step_clock: StepClock | None = None,
        timing_log_level: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`first_iteration` iterations were made by earlier runs (0: a fresh start).

        world_size        ranks that share the work, for TFLOP/s per rank
        flops_per_token   forward and backward, of the whole model
        step_clock        what was told where time goes; shown as timing_log_level says
        progress_bar      draw one on `err`; the caller knows whether a person watches
        Raises OSError, naming the flag, when the metrics file cannot be written.
        """
        self._is_writer = is_writer
        self._total, self._first = total_iterations, first_iteration
        self._world_size, self._flops_per_token = world_size, flops_per_token
        self._log_interval, self._log_throughput = log_interval, log_throughput
        self._out, self._clock = out or sys.stdout, clock
        self._step_clock, self._timing = step_clock, timing_log_level
        self._saving = 0.0
        self._interval = _Interval()
        self._began = self._spoke = clock()
        self._bar: ProgressBar | None = None
        self._file: MetricsFile | None = None
        self._tracker: Tracker | None = None
        if not is_writer:
            return
        if metrics_file:
            self._file = MetricsFile(metrics_file, first_iteration)
            if self._file.moved:
                self.message(self._file.moved)
        if tensorboard_dir:
            self._tracker = open_tracker(
                tensorboard_dir, first_iteration, tensorboard_log_interval, self.message
            )
        if progress_bar:
            self._bar = ProgressBar(
                total_iterations, first_iteration, stream=err or sys.stderr, clock=clock
            )

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin_step(self) -> None:
        """Starts the step timer."""
        if self._step_clock is not None:
            self._saving = self._step_clock.take().get("checkpoint", 0.0)
        self._began = self._clock()

    def train(self, row: Row) -> None:
        """Records one iteration; prints a line where one is due."""
        if not self._is_writer:
            return
        now = self._clock()
        row = {**row, **self._speed(row["tokens"], now - self._began), **self._times(now)}
        self._interval.add(row)
        if self._file:
            self._file.write("train", row)
        if self._tracker:
            self._tracker.train(row)
        if self._bar:
            self._bar.update(row["iteration"], self._bar_text(row))
        if self._line_is_due(row["iteration"], now):
            self.message(log_line(self._interval, row, self._total, self._log_throughput))
            if self._interval.times:
                self.message(breakdown_line(self._interval.times, self._interval.iterations))
            self._interval = _Interval()

    def evaluation(self, row: Row) -> None:
        """Records and prints the result of one evaluation."""
        if not self._is_writer:
            return
        row = {"split": "validation", **row}
        if self._file:
            self._file.write("eval_set" if "set" in row else "eval", row)
        if self._tracker:
            self._tracker.evaluation(row)
        self.message(evaluation_lines(row))

    def message(self, text: str) -> None:
        """Prints whole lines on stdout, above the progress bar if there is one."""
        if not self._is_writer:
            return
        self._spoke = self._clock()
        if self._bar:
            self._bar.print_above(lambda: self._print(text))
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        try:
            print(text, file=self._out, flush=True)
        except OSError as error:  # a disk that is full, a terminal that was closed
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise

    def close(self) -> None:
        """Ends the bar and the files; may be called twice."""
        for part in (self._bar, self._file, self._tracker):
            if part:
                part.close()
        self._bar = self._file = self._tracker = None

    def _speed(self, tokens: int, seconds: float) -> dict[str, float]:
        seconds = max(seconds, 1e-9)  # a coarse clock may see none pass
        speed = {"step_time_s": seconds, "tokens_per_s": tokens / seconds}
        if self._flops_per_token:
            flops = tokens * self._flops_per_token
            speed["tflops_per_rank"] = flops / (seconds * self._world_size * 1e12)
        return speed

    def _times(self, now: float) -> dict[str, float]:
        """Where the time of this step went."""
        if self._step_clock is None:
            return {}
        spent = self._step_clock.take()
        times = breakdown(spent, now - self._began, fine=self._timing > 1)
        return {**times, "time_checkpoint_s": self._saving}

    def _line_is_due(self, iteration: int, now: float) -> bool:
        first_or_last = iteration in (self._first + 1, self._total)
        silent = now - self._spoke >= QUIET_SECONDS
        return first_or_last or iteration % self._log_interval == 0 or silent

    def _bar_text(self, row: Row) -> str:
        text = f"loss {row['lm_loss']:.3f} | lr {row['learning_rate']:.2e}"
        text += f" | {row['tokens_per_s']:,.0f} tokens/s"
        if "tflops_per_rank" in row:
            text += f" | {_significant(row['tflops_per_rank'])} TFLOP/s per rank"
        return text


class _Interval:
    """The iterations since the last log line."""

    def __init__(self) -> None:
        self.iterations = self.skipped = self.nan = self.counted = 0
        self.uncounted: list[dict[str, float]] = []  # losses of steps without an update
        self.seconds = self.tflop = 0.0
        self.losses: dict[str, float] = {}
        self.times: dict[str, float] = {}

    def add(self, row: Row) -> None:
        self.iterations += 1
        for name in row:
            if name.startswith("time_"):
                self.times[name] = self.times.get(name, 0.0) + row[name]
        self.seconds += row["step_time_s"]
        self.tflop += row.get("tflops_per_rank", 0.0) * row["step_time_s"]
        finite = math.isfinite(row["lm_loss"])
        skipped = bool(row.get("skipped", False))
        self.skipped += skipped
        self.nan += not finite
        counts = finite and not skipped
        self.counted += counts
        if finite and skipped and row.get("tokens", 1):
            self.uncounted.append({name: row[name] for name in loss_names(row)})
        for name in loss_names(row):
            self.losses[name] = self.losses.get(name, 0.0) + (row[name] if counts else 0.0)

    def mean_losses(self) -> dict[str, float]:
        """By name, over iterations that made an update; over the others that have a loss when none
        did; nan when none has."""
        if self.counted:
            return {name: total / self.counted for name, total in self.losses.items()}
        found = self.uncounted
        return {
            name: sum(row[name] for row in found) / len(found) if found else math.nan
            for name in self.losses
        }


def loss_names(row: Row) -> list[str]:
    """lm_loss first, whatever else the model reports behind it."""
    return ["lm_loss", *(name for name in row if name.endswith("_loss") and name != "lm_loss")]


def _words(name: str) -> str:
    return name.replace("_", " ")


# Optional fields of a row, with the words and the format of the log line.
_EXTRAS_BEFORE = (("loss_scale", "loss scale", ".1f"),)
_EXTRAS_AFTER = (("num_zeros", "num zeros", "d"), ("params_norm", "params norm", ".3f"))


def log_line(interval: _Interval, row: Row, total: int, throughput: bool) -> str:
    """Megatron-LM's line: the last iteration's values, means and counts over the interval."""
    fields = [
        f"iteration {row['iteration']:8d}/{total:8d}",
        f"consumed samples: {row['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {interval.seconds / interval.iterations * 1000:.1f}",
    ]
    if throughput and interval.tflop:
        rate = _significant(interval.tflop / interval.seconds)
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {rate}")
    fields += [
        f"learning rate: {row['learning_rate']:.6E}",
        f"global batch size: {row['global_batch_size']:5d}",
        *(f"{_words(name)}: {mean:.6E}" for name, mean in interval.mean_losses().items()),
        *_extras(row, _EXTRAS_BEFORE),
        f"grad norm: {row['grad_norm']:.3f}",
        *_extras(row, _EXTRAS_AFTER),
        f"number of skipped iterations: {interval.skipped:3d}",
        f"number of nan iterations: {interval.nan:3d}",
    ]
    return f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] " + " | ".join(fields) + " |"


def evaluation_lines(row: Row) -> str:
    """Megatron-LM's framed line: every loss and its exponential."""
    which = f"{row['split']} ({row['set']})" if "set" in row else row["split"]
    line = f" {which} loss at iteration {row['iteration']} | "
    for name in loss_names(row):
        line += f"{_words(name)} value: {row[name]:.6E} | "
        line += f"{_words(name)} PPL: {perplexity(row[name]):.6E} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def _extras(row: Row, table: tuple[tuple[str, str, str], ...]) -> list[str]:
    return [f"{words}: {row[key]:{form}}" for key, words, form in table if key in row]


def _significant(rate: float) -> str:
    """One digit after the point, as Megatron-LM prints it; three digits for a laptop's rates.

    >>> _significant(412.34), _significant(0.01234)
    ('412.3', '0.0123')
    """
    return f"{rate:.1f}" if rate >= 10 else f"{rate:.3g}"
