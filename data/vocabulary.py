"""What every tokenizer with a table of tokens shares: special tokens by role, where words begin.

Imports numpy, the standard library and data/index_format.py; data/tokenizer.py builds on it.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import numpy as np

from data.index_format import DataError

# A vocabulary's own names for the special tokens, the most telling first.
SPECIAL_NAMES = {
    "eod": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
}


# How byte-level vocabularies write space, newline, tab, return; and SentencePiece a space.
SPACES = "ĠĊĉč▁"


class Vocabulary:
    """What follows from a table of tokens: names of special tokens, and where words begin.

    _ids     {token: id}
    _source  the file, for messages
    """

    _ids: dict[str, int]
    _source: Path

    @property
    def vocab_size(self) -> int:
        return max(self._ids.values(), default=-1) + 1

    def special(self, role: str) -> int:
        """Id of the token that plays a role of SPECIAL_NAMES. Raises DataError when there is
        none."""
        for name in SPECIAL_NAMES[role]:
            if name in self._ids:
                return self._ids[name]
        raise DataError(
            f"{self._source} has no {role} token ({', '.join(SPECIAL_NAMES[role])}); add one of "
            "them to it"
        )

    eod = property(lambda self: self.special("eod"))
    cls = property(lambda self: self.special("cls"))
    sep = property(lambda self: self.special("sep"))
    mask = property(lambda self: self.special("mask"))
    pad = property(lambda self: self.special("pad"))

    def word_starts(self) -> np.ndarray:
        """bool [vocab_size]. Vocabularies mark the inside of a word (##) or its beginning (Ġ and ▁
        for a space)."""
        starts = np.ones(self.vocab_size, bool)
        inside = any(token.startswith("##") and len(token) > 2 for token in self._ids)
        for token, number in self._ids.items():
            first = token[:1]
            starts[number] = (
                not token.startswith("##") if inside else first in SPACES or not first.isalnum()
            )
        return starts


def package(name: str, tokenizer: str):
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(f"{tokenizer} needs the package {name}: pip install {name}") from None


def must_exist(flag: str, path: str | os.PathLike) -> None:
    if not Path(path).is_file():
        raise DataError(f"{flag} {path} does not exist")


def plain(ids) -> list[int]:
    return np.asarray(ids, np.int64).tolist()
