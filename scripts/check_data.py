"""Look through a .bin/.idx pair: is it whole, what is in it, does it fit a tokenizer.

    python scripts/check_data.py --data-path corpus_text_document \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json

reads everything, prints counts and the beginning of a document, and exits with 2 when something is
wrong. With --data-cache-path the cached orders there are read and verified too.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.index_cache import damaged_files
from data.index_format import DataError, bin_path
from data.indexed import COPIED_TOKENS, IndexedDataset
from data.tokenizer import build_tokenizer
from scripts.tokenizer_flags import add_tokenizer_flags, settings_of

SHOWN_TOKENS = 60


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-path", required=True, nargs="+", help="prefixes")
    add_tokenizer_flags(
        add,
        kind="as for pretraining; tokens outside its vocabulary are counted",
        vocab_size="as for pretraining; without a tokenizer, tokens must be below it",
    )
    add("--document", type=int, default=0, help="the document to show (0)")
    add("--data-cache-path", help="folder of cached orders to verify")
    args = parser.parse_args(argv)
    problems = 0
    try:
        tokenizer = tokenizer_of(args)
        size = args.vocab_size if tokenizer is None else tokenizer.vocab_size
        for prefix in args.data_path:
            for sentence in check(prefix, size, tokenizer, args.document):
                print(f"check_data.py: {sentence}", file=sys.stderr)
                problems += 1
    except DataError as error:
        print(f"check_data.py: {error}", file=sys.stderr)
        problems += 1
    for sentence in cache_problems(args.data_cache_path) if args.data_cache_path else ():
        print(f"check_data.py: {sentence}", file=sys.stderr)
        problems += 1
    print(f"{problems} problems" if problems else "no problems")
    return 2 if problems else 0


def cache_problems(folder: str) -> Iterator[str]:
    """A sentence for each cached order that is damaged, or for a folder that holds none."""
    if not os.path.isdir(folder):
        yield f"--data-cache-path {folder} is no folder"
        return
    yield from damaged_files(folder)


def tokenizer_of(args: argparse.Namespace):
    if args.tokenizer_type is None:
        return None
    return build_tokenizer(args.tokenizer_type, **settings_of(args))


def check(prefix: str, vocab_size: int | None, tokenizer, document: int) -> Iterator[str]:
    """Print what a pair holds; yield a sentence for each thing wrong with it."""
    try:
        data = IndexedDataset(prefix)
        offsets = data.document_offsets()
    except DataError as error:
        yield str(error)
        return
    lengths = np.diff(offsets)
    print(
        f"{prefix}: {data.num_documents:,} documents, {len(data):,} sequences, "
        f"{data.num_tokens:,} tokens of {data.dtype}"
    )
    if data.num_documents:
        print(
            f"tokens a document: {lengths.min():,} to {lengths.max():,}, median "
            f"{np.median(lengths):,.0f}; "
            f"{(lengths == 0).sum():,} documents are empty"
        )
    if data.dtype.kind not in "iu":
        yield f"{bin_path(prefix)} holds {data.dtype} values, which are no token ids"
        return
    yield from out_of_vocabulary(data, vocab_size)
    if 0 <= document < data.num_documents:
        tokens = data.read(
            int(offsets[document]),
            min(int(offsets[document]) + SHOWN_TOKENS, int(offsets[document + 1])),
        )
        shown = tokens.tolist()
        print(f"document {document} begins: {' '.join(map(str, shown))}")
        if tokenizer is not None and all(0 <= token < tokenizer.vocab_size for token in shown):
            print(f"decoded: {tokenizer.decode(tokens)!r}")
    elif data.num_documents:
        yield f"--document {document} is not in 0 .. {data.num_documents - 1}"


def out_of_vocabulary(data: IndexedDataset, vocab_size: int | None) -> Iterator[str]:
    """Count the tokens that are no ids of the vocabulary, reading all."""
    ends: list[int] = []  # the smallest and the largest seen
    wrong, first = 0, -1
    for start in range(0, data.num_tokens, COPIED_TOKENS):
        tokens = data.read(start, min(start + COPIED_TOKENS, data.num_tokens))
        ends += int(tokens.min()), int(tokens.max())
        ends = [min(ends), max(ends)]
        outside = tokens < 0
        if vocab_size is not None:
            outside |= tokens >= vocab_size
        count = int(outside.sum())
        if count and not wrong:
            first = start + int(outside.argmax())
        wrong += count
    print(f"token ids {ends[0]} to {ends[1]}" if ends else "no tokens")
    if wrong:
        size = "0 or more" if vocab_size is None else f"0 .. {vocab_size - 1}"
        yield (
            f"{bin_path(data.prefix)}: {wrong:,} of {data.num_tokens:,} tokens are not in {size}, "
            f"the first is token {first:,}; use the "
            "tokenizer that made the data"
        )


if __name__ == "__main__":
    sys.exit(main())
