"""Checkpoint flags against the folders they name, before any process group exists.

Pure: standard library only. Reads an index, never a tensor. The recipe hands the sentences to
`core.config.parse`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from core.checkpoint import directory
from core.checkpoint.errors import BrokenCheckpoint, CheckpointError, MissingCheckpoint
from core.checkpoint.index import Index
from core.train_config import CheckpointConfig


def problems(config: CheckpointConfig, model: dict | None, bytes_needed: int) -> Iterator[str]:
    """What keeps a run from loading or saving as asked.

    model         settings that a checkpoint must agree with (the model's identity); None: unknown
    bytes_needed  size of one checkpoint
    """
    if config.save:
        for sentence in directory.problems(config.save, bytes_needed):
            yield f"--save {config.save}: {sentence}"
    if config.load:
        yield from _load_problems(config, model)


def _load_problems(config: CheckpointConfig, model: dict | None) -> Iterator[str]:
    try:
        path = directory.candidates(Path(config.load), config.ckpt_step)[0]
        saved = Index.read(path).meta.get("model", {})
    except MissingCheckpoint as error:
        if config.exit_on_missing_checkpoint:
            yield f"--load: {error}, and --exit-on-missing-checkpoint was given"
    except BrokenCheckpoint:
        pass  # loading falls back to an older one, and says so
    except CheckpointError as error:
        yield f"--load: {error}"
    else:
        lines = [] if model is None else directory.differences(saved, model)
        if lines:
            yield f"--load {config.load} holds another model: " + "; ".join(lines)
