"""What is wrong with a data set for a run, said before the run starts: one sentence for each
problem.

Cheap enough for every start: reads the index and, of a large .bin, evenly spaced pieces. Imports
numpy and its neighbours in data/. scripts/check_data.py reads everything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from data.gpt import split_documents
from data.indexed import DataError, IndexedDataset, bin_path

SPLITS = ("train", "valid", "test")
SCANNED_TOKENS = 1 << 22
PIECE_TOKENS = 1 << 14


def problems(
    prefix: str | os.PathLike,
    seq_length: int,
    vocab_size: int | None = None,
    split: str = "969,30,1",
    needed: tuple[str, ...] = ("train",),
) -> Iterator[str]:
    """Everything that keeps `prefix` from serving a run.

    vocab_size  every token id must be below it; None to leave that out
    needed      which of "train", "valid", "test" the run will read
    """
    try:
        data = IndexedDataset(prefix)
        offsets = data.document_offsets()
    except DataError as error:
        yield str(error)
        return
    yield from _short_splits(os.fspath(prefix), offsets, seq_length, split, needed)
    if data.dtype.kind not in "iu":
        yield f"{bin_path(prefix)} holds {data.dtype} values, which are no token ids"
    elif data.num_tokens and vocab_size is not None:
        low, high = token_range(data)
        if high >= vocab_size or low < 0:
            yield (
                f"{bin_path(prefix)} holds token id {high if low >= 0 else low}, outside the "
                f"vocabulary of {vocab_size} "
                "tokens; use the tokenizer that made the data, or its --vocab-size"
            )


def token_range(data: IndexedDataset, budget: int = SCANNED_TOKENS) -> tuple[int, int]:
    """Smallest and largest id among about `budget` tokens, in evenly spaced pieces; of all tokens
    if there are fewer."""
    total = data.num_tokens
    count = -(-min(total, budget) // PIECE_TOKENS)
    starts = np.linspace(0, max(0, total - PIECE_TOKENS), count).astype(np.int64)
    pieces = [data.read(start, min(start + PIECE_TOKENS, total)) for start in starts.tolist()]
    return min(int(piece.min()) for piece in pieces), max(int(piece.max()) for piece in pieces)


def _short_splits(
    prefix: str, offsets: np.ndarray, seq_length: int, split: str, needed: tuple[str, ...]
) -> Iterator[str]:
    try:
        parts = dict(zip(SPLITS, split_documents(split, len(offsets) - 1)))
    except DataError as error:
        yield str(error)
        return
    for name in needed:
        documents = parts[name]
        tokens = int(offsets[documents.stop] - offsets[documents.start])
        if tokens < seq_length + 1:
            yield (
                f"{prefix}: --split {split} gives {name} {len(documents)} of {len(offsets) - 1} "
                f"documents with {tokens} "
                f"tokens, and one sample at --seq-length {seq_length} takes {seq_length + 1}; "
                "give it a larger share, more data or a shorter sequence"
            )
