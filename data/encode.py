"""From a block of records to token ids: the work of one preprocessing worker.

A pure function of (settings, block), so that the output cannot depend on how many workers share the
blocks. Imports numpy and its neighbours in data/; scripts/preprocess_data.py distributes the
blocks.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field

import numpy as np

from data.index_format import DataError, token_dtype
from data.records import Block, parse_block
from data.tokenizer import build_tokenizer


@dataclass(frozen=True)
class EncodeSettings:
    """What the tokens depend on besides the text: the flags of the same names.

    tokenizer  (flag, value) pairs for data/tokenizer.py's build_tokenizer
    """

    tokenizer_type: str
    tokenizer: tuple[tuple[str, object], ...] = ()
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    keep_newlines: bool = False

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(tokenizer_of(self).vocab_size)

    @property
    def level(self) -> str:
        """What a sequence is, as Megatron writes it into the files' names."""
        return "sentence" if self.split_sentences else "document"


@dataclass
class Texts:
    """The tokens of one key's texts.

    tokens     dtype [tokens]    joined
    lengths    int64 [sequences]
    sequences  int64 [documents]  sequences in each: its sentences, or 1
    """

    tokens: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray


@dataclass
class Encoded:
    """Tokens of one block.

    texts    key -> Texts
    records  records read, bad ones included
    empty    texts without a token, left out, over all keys
    bad      one sentence for each record that was left out
    """

    texts: dict[str, Texts] = field(default_factory=dict)
    records: int = 0
    empty: int = 0
    bad: list[str] = field(default_factory=list)


@functools.lru_cache(maxsize=1)
def tokenizer_of(settings: EncodeSettings):
    """The tokenizer of these settings, built once a process. Raises DataError."""
    return build_tokenizer(settings.tokenizer_type, **dict(settings.tokenizer))


def encode_block(settings: EncodeSettings, block: Block) -> Encoded:
    """Tokenize a block. Bad records and empty texts are left out and counted."""
    result = Encoded()
    lines: list[int] = []
    rows: list[list[str]] = []
    for line, row in parse_block(block, settings.json_keys):
        result.records += 1
        if isinstance(row, DataError):
            result.bad.append(str(row))
        else:
            lines.append(line)
            rows.append(row)
    try:
        result.texts = _encode_rows(settings, rows)
    except DataError:  # a text the tokenizer refuses; find which
        good = []
        for line, row in zip(lines, rows):
            try:
                _encode_rows(settings, [row])
                good.append(row)
            except DataError as error:
                result.bad.append(f"{block.path} line {line}: {error}")
        rows = good
        result.texts = _encode_rows(settings, rows)
    found = sum(len(texts.sequences) for texts in result.texts.values())
    result.empty = len(rows) * len(settings.json_keys) - found
    return result


def _encode_rows(settings: EncodeSettings, rows: list[list[str]]) -> dict[str, Texts]:
    return {
        key: _encode(settings, [row[place] for row in rows])
        for place, key in enumerate(settings.json_keys)
    }


def _encode(settings: EncodeSettings, texts: list[str]) -> Texts:
    """Tokens of the texts that have any."""
    tokenizer = tokenizer_of(settings)
    if settings.split_sentences:
        from data.sentences import split_sentences

        sentences = [split_sentences(t, keep_newlines=settings.keep_newlines) for t in texts]
        encoded = iter(tokenizer.encode_batch(list(itertools.chain.from_iterable(sentences))))
        documents = [
            [ids for ids in itertools.islice(encoded, len(parts)) if ids] for parts in sentences
        ]
    else:
        documents = [[ids] if ids else [] for ids in tokenizer.encode_batch(texts)]
    documents = [document for document in documents if document]
    if settings.append_eod:
        for document in documents:
            document[-1].append(tokenizer.eod)
    sequences = list(itertools.chain.from_iterable(documents))
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    flat = itertools.chain.from_iterable(sequences)
    return Texts(
        np.fromiter(flat, settings.dtype, int(lengths.sum())),
        lengths,
        np.fromiter(map(len, documents), np.int64, len(documents)),
    )
