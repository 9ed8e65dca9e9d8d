"""--use-checkpoint-args: the shape of a checkpoint's model in front of the flags that were typed.

Pure: standard library only; reads a checkpoint's index, never a tensor. Neighbours: core/start.py
(calls it before the command line is parsed), core/checkpoint/preflight.py (compares afterwards).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from core.checkpoint.directory import candidates
from core.checkpoint.errors import BrokenCheckpoint, CheckpointError
from core.checkpoint.index import Index
from core.config import typed_values
from core.flag_table import leaves, tokens

LENGTHS = ("seq_length", "max_position_embeddings")
SWITCHES = ("group_query_attention",)  # by which the identity's --num-query-groups may be given


def with_checkpoint_args(
    recipe: type, argv: Sequence[str], say: Callable[[str], None] = lambda line: None
) -> list[str]:
    """argv, with the checkpoint's model flags in front when --use-checkpoint-args asks for them.

    Those of the model's identity and the lengths; how it is trained, and in which precision, is the
    command line's affair. What is typed wins: a shape that differs is then refused with both
    values. `say` is told what was taken. Without a checkpoint, or with none that can be read, argv
    is left as it is; what follows says what is missing.
    """
    given = typed_values(recipe, argv)
    if given.get("use_checkpoint_args") is not True:
        return list(argv)
    saved, source = _saved_shape(given, "load", _step(given))
    if not saved:
        saved, source = _saved_shape(given, "pretrained_checkpoint")
    model = {name: leaf for name, leaf in leaves(recipe).items() if leaf.path[0] == "model"}
    words: list[str] = []
    for name, value in saved.items():
        if name in model and value is not None and name not in given:
            words += tokens(model[name], tuple(value) if isinstance(value, list) else value)
    if words:
        say(f"--use-checkpoint-args: {' '.join(words)}, from {source}")
    return [*words, *argv]


def _step(given: dict[str, Any]) -> int | None:
    text = given.get("ckpt_step")
    return int(text) if text and text.isdecimal() else None


def _saved_shape(given: dict[str, Any], flag: str, step: int | None = None) -> tuple[dict, str]:
    """{flag's name: value} of the first checkpoint whose index can be read, and which that is."""
    damage = ""
    try:
        for path in candidates(Path(given[flag]), step) if given.get(flag) else ():
            try:
                meta = Index.read(path).meta
            except BrokenCheckpoint as error:
                damage += f"; {path.name} is damaged: {error}"
                continue
            kept = {*meta["model"], *LENGTHS, *SWITCHES}
            shape = {n: value for n, value in meta["config"]["model"].items() if n in kept}
            return shape, f"{path}{damage}"
    except (CheckpointError, KeyError):
        pass  # another program's, or not written by a run
    return {}, ""
