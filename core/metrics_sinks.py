"""Where metrics are kept: the metrics file and TensorBoard. Used by core/metrics.py alone.

Both continue the same axis after a restart: what a broken run recorded beyond the iteration that
the resumed run starts from is set aside, since those iterations are made again. Standard library,
and core.optional for TensorBoard.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from core import optional

Row = Mapping[str, Any]


class MetricsFile:
    """One JSON object a line, numbers in full precision, first `kind`: "train", "eval", or
    "eval_set" for one of several sets.

    A number that is not finite is null (JSON has neither nan nor infinity). On opening, lines of
    iterations beyond `first_iteration`, and lines that are no rows (a half-written last one), move
    to `<name>.old`: the file has one train row per iteration, and nothing is lost. `moved` tells
    how many, or is empty.
    """

    def __init__(self, path: str, first_iteration: int) -> None:
        self._path, self._warned = Path(path), False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.moved = self._set_aside(first_iteration)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            reason = error.strerror or error
            raise OSError(f"--metrics-file {path} cannot be written: {reason}") from error

    def write(self, kind: str, row: Row) -> None:
        """Appends one row; it is on its way to the disk when this returns.

        On a full disk rows are kept back, and lost if there is never room: a warning, said once.
        """
        values = {"kind": kind, **{key: _plain(value) for key, value in row.items()}}
        line = json.dumps(values, allow_nan=False) + "\n"
        self._try(lambda: self._file.write(line))
        self._try(self._file.flush)

    def close(self) -> None:
        self._try(self._file.close)

    def _try(self, job: Callable[[], object]) -> None:
        try:
            job()
        except OSError as error:
            if not self._warned:
                self._warned = True
                what = f"WARNING: --metrics-file {self._path} lacks rows: {error.strerror}"
                print(what, file=sys.stderr, flush=True)

    def _set_aside(self, first_iteration: int) -> str:
        if not self._path.is_file():
            return ""
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if _made_by(line, first_iteration)]
        if len(kept) == len(lines):
            return ""
        old = self._path.with_name(self._path.name + ".old")
        with old.open("a", encoding="utf-8") as file:
            file.writelines(
                line if line.endswith("\n") else line + "\n"
                for line in lines
                if not _made_by(line, first_iteration)
            )
        fresh = self._path.with_name(self._path.name + ".tmp")
        with fresh.open("w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._path)
        return (
            f"metrics: {len(lines) - len(kept)} lines beyond iteration {first_iteration} "
            f"moved from {self._path} to {old.name}"
        )


def _made_by(line: str, iteration: int) -> bool:
    """Whether a line is a whole row of `iteration` or an earlier one."""
    if not line.endswith("\n"):
        return False
    try:
        return json.loads(line)["iteration"] <= iteration
    except (ValueError, KeyError, TypeError):
        return False


def perplexity(loss: float) -> float:
    """exp(loss), cut at exp(20) as Megatron-LM does; nan stays nan."""
    return math.exp(min(loss, 20.0))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):  # norms by layer
        return {key: _plain(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _losses(row: Row) -> dict[str, float]:
    """{"lm loss": …} and what else a model reports."""
    return {key.replace("_", " "): row[key] for key in row if key.endswith("_loss")}


class Tracker:
    """TensorBoard under Megatron-LM's names; one commit per iteration, never an earlier one.

    Values of an iteration are held until the next one (or `close`), so that its evaluation is
    written with it: trackers drop what is sent to a step that is already committed.
    """

    def __init__(self, writer: Any, interval: int) -> None:
        """`writer` has torch's SummaryWriter's add_scalar(tag, value, step), flush and close."""
        self._writer, self._interval = writer, interval
        self._step = -1
        self._held: dict[str, float] = {}

    def train(self, row: Row) -> None:
        self._advance(row["iteration"])
        if row["iteration"] % self._interval:
            return
        names = {
            "learning_rate": "learning-rate",
            "grad_norm": "grad-norm",
            "global_batch_size": "batch-size",
            "loss_scale": "loss-scale",
            "num_zeros": "num-zeros",
            "params_norm": "params-norm",
            "step_time_s": "iteration-time",
            "tokens_per_s": "tokens-per-second",
            "tflops_per_rank": "throughput",
        }
        self._held.update({tag: row[key] for key, tag in names.items() if key in row})
        self._held.update({key: row[key] for key in row if key.startswith("time_")})
        self._held.update(_losses(row))

    def evaluation(self, row: Row) -> None:
        self._advance(row["iteration"])
        which = f"{row['split']} {row['set']}" if "set" in row else row["split"]
        for name, loss in _losses(row).items():
            self._held[f"{name} {which}"] = loss
            self._held[f"{name} {which} ppl"] = perplexity(loss)

    def close(self) -> None:
        self._commit()
        self._writer.close()

    def _advance(self, step: int) -> None:
        assert step >= self._step, f"iteration {step} after iteration {self._step}"
        if step > self._step:
            self._commit()
            self._step = step

    def _commit(self) -> None:
        for tag, value in self._held.items():
            self._writer.add_scalar(tag, value, self._step)
        self._held = {}


def open_tracker(
    folder: str, first_iteration: int, interval: int, say: Callable[[str], None]
) -> Tracker | None:
    """A tracker that writes to `folder`, or None where TensorBoard is not installed."""
    writer_class = optional.summary_writer()
    if writer_class is None:
        say(f"--tensorboard-dir {folder} is ignored: tensorboard is not installed")
        return None
    return Tracker(writer_class(folder, purge_step=first_iteration + 1), interval)
