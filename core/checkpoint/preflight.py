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
    yield from _its_own_source(config)
    pretrained = config.pretrained_checkpoint
    try:
        if config.load:
            yield from _unlike("--load", config.load, config.ckpt_step, model)
            return
    except MissingCheckpoint as error:
        if config.exit_on_missing_checkpoint and not pretrained:
            yield f"--load: {error}, and --exit-on-missing-checkpoint was given"
    try:
        if pretrained:
            yield from _unlike("--pretrained-checkpoint", pretrained, None, model)
    except MissingCheckpoint as error:
        yield f"--pretrained-checkpoint: {error}"


def _its_own_source(config: CheckpointConfig) -> Iterator[str]:
    """A start from weights that saves over them: started again, it would begin from its own."""
    sources = {"--pretrained-checkpoint": config.pretrained_checkpoint}
    if config.finetune:
        sources["--finetune with --load"] = config.load
    elif config.load and directory.saved_iterations(Path(config.load)):
        return  # the pretrained weights are not looked at
    for flag, source in sources.items():
        if not (config.save and source):
            continue
        folder, source_folder = Path(config.save).resolve(), Path(source).resolve()
        if folder in (source_folder, source_folder.parent) and directory.saved_iterations(folder):
            yield (
                f"{flag} {source} starts at iteration 0 and --save {config.save} would write over "
                "what it starts from; give --save a folder of its own"
            )


def _unlike(flag: str, folder: str, step: int | None, model: dict | None) -> Iterator[str]:
    """Why what will be loaded from a folder does not fit. MissingCheckpoint when there is none."""
    try:
        path = directory.candidates(Path(folder), step)[0]
        saved = Index.read(path).meta.get("model", {})
    except MissingCheckpoint:
        raise
    except BrokenCheckpoint:
        return  # loading falls back to an older one, and says so
    except CheckpointError as error:
        yield f"{flag}: {error}"
        return
    lines = [] if model is None else directory.differences(saved, model)
    if lines:
        yield f"{flag} {folder} holds another model: " + "; ".join(lines)
