"""The tokenizer flags of the scripts, and the tokenizer that belongs to a checkpoint.

Used by preprocess_data.py, check_data.py, generate.py and convert_hf.py: there is one list of what
a tokenizer can be told, so that none of them drops a setting that training keeps. In this order:
the flags, a tokenizer from them, and the one of a checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from data.config import TOKENIZER_FIELDS
from data.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from core.checkpoint.reader import Checkpoint

SETTINGS = (*TOKENIZER_FIELDS, "vocab_size")
HELP = {
    "tokenizer_model": "tokenizer.json or its folder, or a SentencePiece or tiktoken model",
    "vocab_file": "vocab.json of GPT2BPETokenizer, vocab.txt of BertWordPieceLowerCase and Case",
    "merge_file": "merges.txt of GPT2BPETokenizer",
    "tiktoken_pattern": "v1 or v2, for TikTokenizer",
    "tiktoken_num_special_tokens": "for TikTokenizer (1000)",
    "tiktoken_special_tokens": "for TikTokenizer (<unk> <s> </s>)",
    "vocab_size": "number of token ids, for NullTokenizer and TikTokenizer",
}
OPTIONS = {
    "tiktoken_num_special_tokens": {"type": int},
    "tiktoken_special_tokens": {"nargs": "+"},
    "vocab_size": {"type": int},
}
# What transformers' folders hold, the most complete first.
IN_FOLDERS = {
    "HuggingFaceTokenizer": {"tokenizer_model": "tokenizer.json"},
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    "Llama2Tokenizer": {"tokenizer_model": "tokenizer.model"},
}


def add_tokenizer_flags(add: Callable, *, kind: str, required: bool = False, **other: str) -> None:
    """kind: the help of --tokenizer-type; other: of further flags, where it is not the usual"""
    add("--tokenizer-type", required=required, help=kind)
    for name in SETTINGS:
        said = other.get(name, HELP[name])
        add(f"--{name.replace('_', '-')}", help=said, **OPTIONS.get(name, {}))


def settings_of(args: argparse.Namespace) -> dict[str, object]:
    """What was given besides --tokenizer-type; for `build_tokenizer`."""
    return {name: value for name in SETTINGS if (value := getattr(args, name)) is not None}


def tokenizer_for(kind: str, given: Mapping[str, object], rows: int):
    """The tokenizer that flags, or a checkpoint's settings, name for a model of so many tokens.

    The last of a NullTokenizer's tokens ends a document. Raises DataError.
    """
    settings = {name: given.get(name) for name in SETTINGS}
    if settings["vocab_size"] is None:
        settings["vocab_size"] = rows - (kind == "NullTokenizer")
    return build_tokenizer(kind, **settings)


def tokenizer_of_checkpoint(checkpoint: Checkpoint):
    """The one that its settings name, else the one that was imported with it, else None.

    Raises DataError when it cannot be read.
    """
    data = checkpoint.meta["config"].get("data") or {}
    if kind := data.get("tokenizer_type"):
        return tokenizer_for(kind, data, checkpoint.meta["model"]["vocab_size"])
    return tokenizer_in(checkpoint.path.parent / "tokenizer")


def tokenizer_in(folder: Path):
    """The tokenizer whose files a folder holds, under transformers' names for them; or None.

    Raises DataError when it cannot be read.
    """
    for kind, files in IN_FOLDERS.items():
        found = {setting: folder / name for setting, name in files.items()}
        if all(path.is_file() for path in found.values()):
            return build_tokenizer(kind, **{name: str(path) for name, path in found.items()})
    return None
