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

from data.indexed import DataError, token_dtype
from data.records import Block, parse_jsonl
from data.tokenizer import build_tokenizer


@dataclass(frozen=True)
class EncodeSettings:
    """What the tokens depend on besides the text: the flags of the same names."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False

    @functools.cached_property
    def dtype(self) -> np.dtype:
        return token_dtype(tokenizer_of(self).vocab_size)


@dataclass
class Encoded:
    """Tokens of one block.

    tokens   key -> dtype [tokens], the documents' tokens joined
    lengths  key -> int64 [documents]
    records  lines read, bad ones included
    empty    texts without a token, left out, over all keys
    bad      one sentence for each line that was left out
    """

    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    lengths: dict[str, np.ndarray] = field(default_factory=dict)
    records: int = 0
    empty: int = 0
    bad: list[str] = field(default_factory=list)


@functools.lru_cache(maxsize=1)
def tokenizer_of(settings: EncodeSettings):
    """The tokenizer of these settings, built once a process. Raises DataError."""
    return build_tokenizer(
        settings.tokenizer_type,
        tokenizer_model=settings.tokenizer_model,
        vocab_file=settings.vocab_file,
        merge_file=settings.merge_file,
        vocab_size=settings.vocab_size,
    )


def encode_block(settings: EncodeSettings, block: Block) -> Encoded:
    """Tokenize a block. Bad lines and empty texts are left out and counted."""
    result = Encoded()
    rows: list[list[str]] = []
    for row in parse_jsonl(block, settings.json_keys):
        result.records += 1
        if isinstance(row, DataError):
            result.bad.append(str(row))
        else:
            rows.append(row)
    tokenizer = tokenizer_of(settings)
    for place, key in enumerate(settings.json_keys):
        documents = [ids for ids in tokenizer.encode_batch([row[place] for row in rows]) if ids]
        result.empty += len(rows) - len(documents)
        if settings.append_eod:
            for ids in documents:
                ids.append(tokenizer.eod)
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        flat = itertools.chain.from_iterable(documents)
        result.tokens[key] = np.fromiter(flat, settings.dtype, int(lengths.sum()))
        result.lengths[key] = lengths
    return result
