"""Train a byte-level BPE tokenizer on JSON lines.

    python scripts/train_tokenizer.py --input corpus.jsonl --output tokenizer.json

writes a tokenizer.json for `--tokenizer-type HuggingFaceTokenizer --tokenizer-model
tokenizer.json`. It has the 256 bytes, so that any text can be encoded, and the end token
<|endoftext|>. Needs the package tokenizers.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.index_format import DataError
from data.records import parse_block, read_blocks

END = "<|endoftext|>"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--input", required=True, nargs="+", help="JSON lines, plain or .gz")
    add("--output", required=True, help="tokenizer.json to write")
    add("--json-keys", nargs="+", default=["text"], help="keys to learn from (default: text)")
    add(
        "--vocab-size",
        type=int,
        default=8192,
        help="tokens, bytes and end token included (default: 8192)",
    )
    args = parser.parse_args(argv)
    try:
        train(args.input, args.output, tuple(args.json_keys), args.vocab_size)
    except DataError as error:
        print(f"train_tokenizer.py: {error}", file=sys.stderr)
        return 2
    return 0


def train(inputs: list[str], output: str, keys: tuple[str, ...], vocab_size: int) -> None:
    if importlib.util.find_spec("tokenizers") is None:
        raise DataError("training needs the package tokenizers: pip install tokenizers")
    if vocab_size < 257:
        raise DataError(
            f"--vocab-size {vocab_size} has no room for 256 bytes and the end token; use 257 or "
            "more"
        )
    for path in inputs:
        if not Path(path).is_file():
            raise DataError(f"--input {path} does not exist")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    started = time.perf_counter()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(inputs, keys), trainer)
    part = Path(f"{output}.partial")
    part.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(part))
    os.replace(part, output)
    print(
        f"{output}: {tokenizer.get_vocab_size():,} tokens in {time.perf_counter() - started:.1f} s"
    )


def texts(inputs: list[str], keys: tuple[str, ...]) -> Iterator[str]:
    """Every text under `keys`, with a line about progress every few seconds."""
    total = sum(os.path.getsize(path) for path in inputs)
    before, said = 0, time.perf_counter()
    for path in inputs:
        for block in read_blocks(path, keys):
            for row in parse_block(block, keys):
                if isinstance(row, DataError):
                    raise row
                yield from row
            if time.perf_counter() - said > 2:
                said = time.perf_counter()
                print(
                    f"read {(before + block.read) / 1e6:.1f} of {total / 1e6:.1f} MB",
                    file=sys.stderr,
                    flush=True,
                )
        before += os.path.getsize(path)


if __name__ == "__main__":
    sys.exit(main())
