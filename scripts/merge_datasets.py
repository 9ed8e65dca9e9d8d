"""Join several .bin/.idx pairs into one: the documents of the first, then those of the second, ...

    python scripts/merge_datasets.py --input part1_text_document part2_text_document --output-prefix
    all python scripts/merge_datasets.py --input FOLDER --output-prefix all

A folder stands for its pairs in sorted order, as in Megatron. What was written is read back and
compared, token for token and boundary for boundary.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.index_format import DataError, bin_path
from data.indexed import COPIED_TOKENS, IndexedBuilder, IndexedDataset


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", required=True, nargs="+", help="prefixes, or folders of pairs")
    add("--output-prefix", required=True, help="prefix to write")
    args = parser.parse_args(argv)
    try:
        merge(find_pairs(args.input), args.output_prefix)
    except (DataError, OSError) as error:
        print(f"merge_datasets.py: {error}", file=sys.stderr)
        return 2
    return 0


def find_pairs(inputs: list[str]) -> list[str]:
    """The prefixes meant, in order."""
    prefixes = []
    for item in inputs:
        found = [item]
        if Path(item).is_dir():
            found = sorted(str(path.with_suffix("")) for path in Path(item).glob("*.idx"))
            if not found:
                raise DataError(f"--input {item} is a folder without .idx files")
        prefixes += found
    return prefixes


def merge(prefixes: list[str], output_prefix: str) -> None:
    """Write and compare. Raises DataError for unusable pairs; then nothing is left."""
    if any(Path(prefix).absolute() == Path(output_prefix).absolute() for prefix in prefixes):
        raise DataError(f"--output-prefix {output_prefix} is one of the inputs; choose another")
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    dtype = widest([part.dtype for part in parts])
    with IndexedBuilder(output_prefix, dtype) as builder:
        for part in parts:
            builder.add_dataset(part)
            print(
                f"{part.prefix}: {part.num_documents:,} documents, {part.num_tokens:,} tokens",
                file=sys.stderr,
                flush=True,
            )
    compare(parts, IndexedDataset(output_prefix))
    print(
        f"{bin_path(output_prefix)} and .idx: {builder.num_documents:,} documents, "
        f"{builder.num_tokens:,} tokens, compared with the {len(parts)} inputs"
    )


def widest(dtypes: list[np.dtype]) -> np.dtype:
    """The integer type that holds all tokens; uint16 beside a type of the other kind becomes
    int32."""
    kinds = {dtype.kind for dtype in dtypes}
    if kinds <= {"i", "u"}:
        return np.result_type(*dtypes) if len(set(dtypes)) > 1 else dtypes[0]
    if len(set(dtypes)) > 1:
        raise DataError(f"pairs of {' and '.join(sorted(map(str, set(dtypes))))} cannot be joined")
    return dtypes[0]


def compare(parts: list[IndexedDataset], whole: IndexedDataset) -> None:
    """Raise DataError unless `whole` is the parts, in order."""
    whole.verify()
    token = sequence = document = 0
    for part in parts:
        for start in range(0, part.num_tokens, COPIED_TOKENS):
            stop = min(start + COPIED_TOKENS, part.num_tokens)
            if not np.array_equal(part.read(start, stop), whole.read(token + start, token + stop)):
                raise DataError(f"{whole.prefix} does not hold the tokens of {part.prefix}")
        lengths = whole.sequence_lengths[sequence : sequence + len(part)]
        boundaries = whole.document_indices[document : document + part.num_documents + 1]
        if not np.array_equal(lengths, part.sequence_lengths) or not np.array_equal(
            boundaries, part.document_indices + sequence
        ):
            raise DataError(f"{whole.prefix} does not hold the documents of {part.prefix}")
        token += part.num_tokens
        sequence += len(part)
        document += part.num_documents
    if (token, sequence, document) != (whole.num_tokens, len(whole), whole.num_documents):
        raise DataError(f"{whole.prefix} holds more than its inputs")


if __name__ == "__main__":
    sys.exit(main())
