"""Text to token ids and back, under Megatron's `--tokenizer-type` names.

Every tokenizer has vocab_size (largest id + 1), eod (id of the end of a document), encode,
encode_batch (of many texts at once, in Rust where the library can) and decode. `build_tokenizer`
picks one by name. The `tokenizers` package is imported when a tokenizer that needs it is built, not
before. Imports the standard library, numpy and data/indexed.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import numpy as np

from data.indexed import DataError

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


def build_tokenizer(
    tokenizer_type: str,
    *,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
):
    """The tokenizer that the flags of the same names ask for. Raises DataError naming the flag that
    is missing or wrong."""
    flags = {
        "--tokenizer-model": tokenizer_model,
        "--vocab-file": vocab_file,
        "--merge-file": merge_file,
        "--vocab-size": vocab_size,
    }
    if tokenizer_type not in TOKENIZERS:
        raise DataError(
            f"--tokenizer-type {tokenizer_type} is not known; use {', '.join(TOKENIZERS)}"
        )
    kind, needed = TOKENIZERS[tokenizer_type]
    missing = [flag for flag in needed if flags[flag] is None]
    if missing:
        raise DataError(f"--tokenizer-type {tokenizer_type} needs {' and '.join(missing)}")
    return kind(*(flags[flag] for flag in needed))


class HuggingFaceTokenizer:
    """A tokenizer.json, or a folder that holds one (and perhaps a tokenizer_config.json, which
    names the end token).

    Adds no token of its own: a sample is exactly its text; preprocessing appends the end of
    document when asked.
    """

    def __init__(self, path: str):
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise DataError(
                f"--tokenizer-model {path}: {file} does not exist; give a tokenizer.json or its "
                "folder"
            )
        try:
            self._inner = _tokenizers().Tokenizer.from_file(str(file))
        except DataError:
            raise
        except Exception as error:  # the Rust side raises plain Exception
            raise DataError(f"--tokenizer-model {file} is not a tokenizer.json: {error}") from None
        self._inner.no_truncation()
        self._inner.no_padding()
        self._file = file
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._eod = vocabulary.get(_end_name(file.parent / "tokenizer_config.json", vocabulary))

    @property
    def eod(self) -> int:
        if self._eod is None:
            raise DataError(
                f"{self._file} has none of the end tokens {', '.join(END_NAMES)}; add one of them "
                "to it"
            )
        return self._eod

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [e.ids for e in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids) -> str:
        return self._inner.decode(_plain(ids), skip_special_tokens=False)


class GPT2BPETokenizer(HuggingFaceTokenizer):
    """GPT-2's byte-level BPE from vocab.json and merges.txt. The text "<|endoftext|>" in a document
    is plain text."""

    def __init__(self, vocab_file: str, merge_file: str):
        for flag, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
            if not Path(path).is_file():
                raise DataError(f"{flag} {path} does not exist")
        library = _tokenizers()
        try:
            vocabulary = json.loads(Path(vocab_file).read_text("utf-8"))
            model = library.models.BPE.from_file(vocab_file, merge_file)
        except Exception as error:  # json's errors, and the Rust side's plain Exception
            raise DataError(
                f"--vocab-file {vocab_file} with --merge-file {merge_file}: {error}"
            ) from None
        self._inner = library.Tokenizer(model)
        self._inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._inner.decoder = library.decoders.ByteLevel()
        self._file = Path(vocab_file)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._eod = vocabulary.get(END_NAMES[0])


class NullTokenizer:
    """Documents that already are token ids, as numbers between spaces: 0 .. vocab_size - 1, and
    then one end token."""

    def __init__(self, vocab_size: int):
        self.eod = int(vocab_size)
        self.vocab_size = self.eod + 1

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"NullTokenizer reads numbers between spaces: {error}") from None
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise DataError(
                f"token id {wrong} is not in 0 .. {self.vocab_size - 1}; raise --vocab-size "
                f"{self.eod}"
            )
        return ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids) -> str:
        return " ".join(map(str, _plain(ids)))


TOKENIZERS = {
    "HuggingFaceTokenizer": (HuggingFaceTokenizer, ("--tokenizer-model",)),
    "GPT2BPETokenizer": (GPT2BPETokenizer, ("--vocab-file", "--merge-file")),
    "NullTokenizer": (NullTokenizer, ("--vocab-size",)),
}


def _tokenizers():
    if importlib.util.find_spec("tokenizers") is None:
        raise DataError("this tokenizer needs the package tokenizers: pip install tokenizers")
    import tokenizers

    return tokenizers


def _end_name(config: str | os.PathLike, vocabulary: dict[str, int]) -> str | None:
    """The end token's text: what tokenizer_config.json calls eos_token, or else the first usual
    name there is."""
    if Path(config).is_file():
        token = json.loads(Path(config).read_text("utf-8")).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in vocabulary:
            return token
    return next((name for name in END_NAMES if name in vocabulary), None)


def _plain(ids) -> list[int]:
    return np.asarray(ids, np.int64).tolist()
