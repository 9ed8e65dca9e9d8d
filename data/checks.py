"""What is wrong with data for a run, said before the run starts: one sentence for each problem.

Cheap enough for every start: reads the index and, of a large .bin, evenly spaced pieces. Imports
numpy and its neighbours in data/. scripts/check_data.py reads everything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import numpy as np

from data.index_format import DataError, bin_path
from data.indexed import IndexedDataset
from data.sets import SPLITS, Mix

SCANNED_TOKENS = 1 << 22
PIECE_TOKENS = 1 << 14


def problems(
    prefix: str | os.PathLike,
    seq_length: int,
    vocab_size: int | None = None,
    split: str = "969,30,1",
    needed: tuple[str, ...] = ("train",),
) -> Iterator[str]:
    """Everything that keeps one pair, cut by `split`, from serving a run; see mix_problems."""
    found = {name: Mix((os.fspath(prefix),), None, split, i) for i, name in enumerate(SPLITS)}
    yield from mix_problems(found, seq_length, vocab_size, needed)


def mix_problems(
    found: Mapping[str, Mix],
    seq_length: int | None,
    vocab_size: int | None = None,
    needed: tuple[str, ...] = ("train",),
) -> Iterator[str]:
    """Everything that keeps the data of data/sets.py's `mixes` from serving a run.

    seq_length  a sample takes one token more; None where samples are padded and any token will do
    vocab_size  every token id must be below it; None to leave that out
    needed      which of "train", "valid", "test" the run will read
    """
    offsets: dict[str, np.ndarray | None] = {}
    for name in needed:
        if name not in found:
            yield (
                f"there is no data for {name}; give --{name}-data-path, or a --data-path with "
                "--split"
            )
            continue
        mix = found[name]
        for prefix, weight in zip(mix.prefixes, mix.weights or [1] * len(mix.prefixes)):
            if not weight:
                continue
            if prefix not in offsets:
                offsets[prefix] = None
                try:
                    data = IndexedDataset(prefix)
                    offsets[prefix] = data.document_offsets()
                    yield from _token_problems(data, vocab_size)
                except DataError as error:
                    yield str(error)
            if offsets[prefix] is not None:
                yield from _short_split(name, mix, prefix, offsets[prefix], seq_length)


def _token_problems(data: IndexedDataset, vocab_size: int | None) -> Iterator[str]:
    path = bin_path(data.prefix)
    if data.dtype.kind not in "iu":
        yield f"{path} holds {data.dtype} values, which are no token ids"
    elif data.num_tokens and vocab_size is not None:
        low, high = token_range(data)
        if high >= vocab_size or low < 0:
            yield (
                f"{path} holds token id {high if low >= 0 else low}, outside the vocabulary of "
                f"{vocab_size} tokens; use the tokenizer that made the data, or its --vocab-size"
            )


def _short_split(
    name: str, mix: Mix, prefix: str, offsets: np.ndarray, seq_length: int | None
) -> Iterator[str]:
    count = len(offsets) - 1
    try:
        documents = mix.documents(count)
    except DataError as error:
        yield str(error)
        return
    tokens = int(offsets[documents.stop] - offsets[documents.start])
    how = f"--split {mix.split} gives {name}" if mix.split else f"{name} has"
    has = f"{prefix}: {how} {len(documents)} of {count} documents with {tokens} tokens"
    if seq_length is None and not tokens:
        yield f"{has}; give it a larger share or more data"
    elif seq_length is not None and tokens < seq_length + 1:
        yield (
            f"{has}, and one sample at --seq-length {seq_length} takes {seq_length + 1}; give it a "
            "larger share, more data or a shorter sequence"
        )


def token_range(data: IndexedDataset, budget: int = SCANNED_TOKENS) -> tuple[int, int]:
    """Smallest and largest id among about `budget` tokens, in evenly spaced pieces; of all tokens
    if there are fewer."""
    total = data.num_tokens
    count = -(-min(total, budget) // PIECE_TOKENS)
    starts = np.linspace(0, max(0, total - PIECE_TOKENS), count).astype(np.int64)
    pieces = [data.read(start, min(start + PIECE_TOKENS, total)) for start in starts.tolist()]
    return min(int(piece.min()) for piece in pieces), max(int(piece.max()) for piece in pieces)
