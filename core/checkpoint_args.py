"""--use-checkpoint-args: the model flags of a checkpoint in front of those that were typed.

Pure: standard library only; reads a checkpoint's index, never a tensor. Neighbours: core/start.py
(calls it before the command line is parsed), core/checkpoint/preflight.py (compares afterwards).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.checkpoint.directory import candidates
from core.checkpoint.errors import CheckpointError
from core.checkpoint.index import Index
from core.config import typed_values
from core.flag_table import leaves, tokens


def with_checkpoint_args(recipe: type, argv: Sequence[str]) -> list[str]:
    """argv, with the checkpoint's model flags in front when --use-checkpoint-args asks for them.

    What is typed wins: a shape that differs is then refused with both values, dropout may differ.
    Without a checkpoint, or with one that cannot be read, argv is left as it is; what follows says
    what is missing.
    """
    given = typed_values(recipe, argv)
    if given.get("use_checkpoint_args") is not True:
        return list(argv)
    saved = _saved_model(given, "load", _step(given))
    saved = saved or _saved_model(given, "pretrained_checkpoint")
    model = {name: leaf for name, leaf in leaves(recipe).items() if leaf.path[0] == "model"}
    words: list[str] = []
    for name, value in (saved or {}).items():
        if name in model and value is not None and name not in given:
            words += tokens(model[name], tuple(value) if isinstance(value, list) else value)
    return [*words, *argv]


def _step(given: dict[str, Any]) -> int | None:
    text = given.get("ckpt_step")
    return int(text) if text and text.isdecimal() else None


def _saved_model(given: dict[str, Any], flag: str, step: int | None = None) -> dict | None:
    if not given.get(flag):
        return None
    try:
        return Index.read(candidates(Path(given[flag]), step)[0]).meta["config"]["model"]
    except (CheckpointError, KeyError):
        return None
