"""Loading and saving as the checkpoint flags ask: `Checkpoints`.

May import core and torch. Neighbours: core/run.py (decides when), core/saved_state.py (what of a
run is stored), core.checkpoint (how it is stored).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch

from core.checkpoint.directory import differences
from core.checkpoint.errors import CheckpointError, MissingCheckpoint, SaveError
from core.checkpoint.reader import Checkpoint, load, to_stderr
from core.checkpoint.store import Saver
from core.optimizer import schedule as schedules
from core.saved_state import pieces
from core.train import Trainer, TrainingStopped, TrainState
from core.train_config import CheckpointConfig

# What a run's numbers depend on besides the model's shape and the schedule, by section.
MAY_DIFFER = {
    "model": (
        *("seq_length", "norm_epsilon", "attention_dropout", "hidden_dropout", "label_smoothing"),
        *("z_loss", "attention_softmax_in_fp32", "fp32_residual_connection", "fp64", "mask_prob"),
    ),
    "precision": ("bf16", "fp16"),
    "optimizer": ("adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "clip_grad"),
    "train": ("global_batch_size", "rampup_batch_size", "seed"),
    # not the paths of the data: which of its sets are others, data/known_sets.py tells
    "data": (
        *("mock_data", "split", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"),
        *("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens"),
        *("reset_position_ids", "reset_attention_mask", "document_attention_mask"),
        *("eod_mask_loss", "short_seq_prob", "mask_whole_words", "mask_max_ngram"),
        *("mask_geometric", "bert_pairs"),
    ),
}


def compared(record: dict, dp: int) -> dict[str, object]:
    """The settings of MAY_DIFFER that a run's record has, by name; the batch as it comes out."""
    found = {
        name: record[section][name]
        for section, names in MAY_DIFFER.items()
        for name in names
        if name in record.get(section, {})
    }
    if "global_batch_size" in found:  # one that is not given follows from the ranks
        batch = found["global_batch_size"]
        found["global_batch_size"] = batch or record["train"]["micro_batch_size"] * dp
    return found


def batch_line(before: int, micro: int, dp: int) -> str:
    """Where a batch that is not given comes from, and the way back to the one before, if any."""
    line = f"{micro * dp} is --micro-batch-size {micro} x {dp} data parallel ranks"
    if before % dp:
        return line
    fits = math.gcd(micro, before // dp)
    smaller = "" if fits == micro else f" --micro-batch-size {fits}"
    return f"{line}; to go on with {before}, give --global-batch-size {before}{smaller}"


@dataclass
class Checkpoints:
    """Loads once, then saves into a folder that it holds while it is entered.

    record        the settings as plain JSON, stored with every checkpoint
    model_record  those of them that a checkpoint must agree with
    data_record   the data's own: after `load` the checkpoint's, then what `save` is to keep
    notes         lines about what was loaded
    took          told the seconds of each write in the background
    """

    config: CheckpointConfig
    trainer: Trainer
    record: dict
    model_record: dict
    data_record: dict = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    took: Callable[[float], object] = lambda seconds: None
    _saver: Saver | None = None
    _resumed: Checkpoint | None = None
    _failure: SaveError | None = None

    # ---- saving ---------------------------------------------------------------------------------

    def __enter__(self) -> Checkpoints:
        config = self.config
        if config.save:
            here = self._resumed_from_here()
            self._saver = Saver(
                config.save,
                self.trainer.grid.world,
                keep_last=config.keep_last,
                retain_interval=config.save_retain_interval,
                asynchronous=config.async_save,
                loaded=here,
                after=-1 if here is None else here,
                took=self.took,
            ).__enter__()
            self.trainer.before_update = self._saver.copied
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raises SaveError when the last save of a run has failed, however failures are taken.

        What ends all ranks together, a NaN or a failed save, waits for the save under way.
        """
        if self._saver is None:
            return
        if isinstance(error, (TrainingStopped, SaveError)):
            try:
                self._saver.close()
            except SaveError as failure:
                raise error from failure
            return
        self._saver.__exit__(kind, error, trace)
        if self._failure is not None and error is None:
            raise self._failure

    def save(self, state: TrainState) -> bool:
        """Whether it was saved, or is being written. Collective.

        Raises SaveError when a save fails; under --on-failed-save continue only at the end. One
        that fails in the background is known at the next, which is tried first all the same.
        """
        trainer, other = self.trainer, self.trainer.vocabulary_schedule
        meta = {
            "state": state.to_json(),
            "schedule": trainer.schedule.to_json(),
            "vocabulary_schedule": other and other.to_json(),
            "loss_scale": trainer.optimizer.scale.to_json(),
            "optimizer_steps": trainer.optimizer.steps,
            "config": self.record,
            "model": self.model_record,
            "data": self.data_record,
            "layout": {axis: getattr(trainer.grid.shape, axis) for axis in ("tp", "dp", "pp")},
        }
        before = self._failure_of(self._saver.wait)
        self._failure = self._failure_of(
            lambda: self._saver.save(state.iteration, self._owned(), meta)
        )
        for error in filter(None, (before, self._failure)):
            if self.config.on_failed_save == "stop":
                raise error
            if self.trainer.grid.world.rank == 0:
                to_stderr(f"WARNING: training goes on, as --on-failed-save continue asks: {error}")
        return self._failure is None

    def saying(self, say: Callable[[str], None]) -> Callable[[TrainState], bool]:
        """`save`, and a line about every checkpoint."""

        def save(state: TrainState) -> bool:
            done = self.save(state)
            if done:
                how = "is being written" if self.config.async_save else "is written"
                say(f"checkpoint of iteration {state.iteration} {how} to {self.config.save}")
            return done

        return save

    def _failure_of(self, job: Callable[[], object]) -> SaveError | None:
        """A failed save, the same on every rank."""
        try:
            job()
        except SaveError as error:
            return error
        return None

    def _owned(self):
        trainer = self.trainer
        return pieces(
            trainer.replicas,
            trainer.optimizer,
            trainer.grid.tp,
            owned=True,
            moments=self.config.save_optim,
        )

    def _resumed_from_here(self) -> int | None:
        """The iteration this run goes on from, if it lies in the folder saved to."""
        if self._resumed is None:
            return None
        # as it was named, and as it is stored: either may be a link to the other
        path, save = self._resumed.path.absolute(), Path(self.config.save).resolve()
        here = save in (path.parent.resolve(), path.resolve().parent)
        return self._resumed.iteration if here else None

    # ---- loading --------------------------------------------------------------------------------

    def load(self) -> TrainState:
        """The state to start from: fresh, or the checkpoint's. Collective."""
        config, world = self.config, self.trainer.grid.world
        state = None
        if config.load:
            try:
                state = load(Path(config.load), self._read, world, step=config.ckpt_step)
            except MissingCheckpoint:
                wanted = config.exit_on_missing_checkpoint and not config.pretrained_checkpoint
                if wanted or config.ckpt_step is not None:
                    raise
                if not config.pretrained_checkpoint:
                    self.notes.append(f"no checkpoint in --load {config.load}: a fresh start")
        if state is None and config.pretrained_checkpoint:
            state = load(Path(config.pretrained_checkpoint), self._read_weights, world)
        if state is None:
            return TrainState()
        self.trainer.optimizer.publish()
        return state

    def _read(self, checkpoint: Checkpoint) -> TrainState:
        """Fill parameters and moments from a checkpoint; called again if it proves damaged."""
        meta, trainer = checkpoint.meta, self.trainer
        if self.config.finetune:
            return self._read_weights(checkpoint)
        if self.config.load_optim:
            self._check_moments(checkpoint)
        self._fill(checkpoint, moments=self.config.load_optim)
        self._resumed = checkpoint
        if "state" not in meta:
            self.notes.append("it was not written by a run: a start at iteration 0")
            return TrainState()
        self._say_what_differs(checkpoint)
        state = TrainState.from_json(meta["state"])
        self.data_record = meta.get("data", {})
        if self.config.load_optim:
            # fewer than the run's updates where an earlier part went on with --no-load-optim
            trainer.optimizer.set_steps(meta.get("optimizer_steps", state.updates))
            trainer.optimizer.scale.restore(meta.get("loss_scale", {}))
        for name in ("schedule", "vocabulary_schedule"):
            self._resume_schedule(name, meta.get(name))
        return state

    def _say_what_differs(self, checkpoint: Checkpoint) -> None:
        """Settings of the run that wrote it that are others now; the command line's hold."""
        meta, dp = checkpoint.meta, self.trainer.grid.shape.dp
        before, now = compared(meta["config"], meta["layout"]["dp"]), compared(self.record, dp)
        both = [name for name in before if name in now]
        before, now = ({name: each[name] for name in both} for each in (before, now))
        if lines := differences(before, now):
            self.notes += ["settings differ; the command line's hold", *lines]
        batch, train = "global_batch_size", self.record.get("train", {})
        if before.get(batch) != now.get(batch) and not train[batch]:
            self.notes.append(batch_line(before[batch], train["micro_batch_size"], dp))
        if any(before[name] != now[name] for name in ("bf16", "fp16", "fp64") if name in before):
            stored = checkpoint.dtype(next(n for n in checkpoint.names() if n.startswith("model/")))
            here = self.trainer.optimizer.parts[0].master.dtype
            how = "as they are" if here.itemsize >= stored.itemsize else f"rounded to {here}"
            line = f"its weights and moments, which are {stored}, are taken {how}"
            self.notes.append(line.replace("torch.", ""))

    def _read_weights(self, checkpoint: Checkpoint) -> TrainState:
        """The weights alone, for a start at iteration 0."""
        self._fill(checkpoint, moments=False)
        return TrainState()

    def _check_moments(self, checkpoint: Checkpoint) -> None:
        if not any(name.startswith("optimizer/") for name in checkpoint.names()):
            imported = "state" not in checkpoint.meta
            why = "holds weights alone" if imported else "was written with --no-save-optim"
            raise CheckpointError(
                f"{checkpoint.path} {why}; add --no-load-optim, or --finetune to start at "
                "iteration 0"
            )

    def _fill(self, checkpoint: Checkpoint, *, moments: bool) -> None:
        trainer = self.trainer
        if found := differences(checkpoint.meta["model"], self.model_record):
            raise CheckpointError(
                f"{checkpoint.path} holds another model:\n  " + "\n  ".join(found)
            )
        with torch.no_grad():
            mine = (trainer.replicas, trainer.optimizer, trainer.grid.tp)
            checkpoint.fill(pieces(*mine, owned=False, moments=moments))
        self.notes = [f"loaded {checkpoint.path}"]

    def _resume_schedule(self, name: str, saved: dict | None) -> None:
        """The checkpoint's or the command line's, as --override-opt-param-scheduler says."""
        override, trainer = self.config.override_opt_param_scheduler, self.trainer
        given, saved = getattr(trainer, name), saved and schedules.Schedule.from_json(saved)
        if given and saved:
            chosen, lines = schedules.resume(given, saved, override=override)
            self.notes += lines
        else:
            chosen = given if override else saved
            if given or saved:
                which = "command line" if override else "checkpoint"
                way_out = "" if override else f"; {schedules.WAY_OUT}"
                state = "on" if chosen else "off"
                self.notes.append(f"--decoupled-lr is {state}, as the {which} has it{way_out}")
        setattr(trainer, name, chosen)
