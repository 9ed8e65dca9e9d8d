"""Train a tokenizer on JSON lines, plain text or Parquet.

    python scripts/train_tokenizer.py --input corpus.jsonl --output tokenizer.json

writes a byte-level BPE for `--tokenizer-type HuggingFaceTokenizer --tokenizer-model
tokenizer.json`: it has the 256 bytes, so that any text can be encoded, and the end token
<|endoftext|>.

    python scripts/train_tokenizer.py --kind wordpiece --input corpus.jsonl --output vocab.txt

writes a WordPiece for BERT, for `--tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt`.
Needs the package tokenizers.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.index_format import DataError
from data.records import parse_block, read_blocks

END = "<|endoftext|>"
BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", required=True, nargs="+", help="files, as for preprocess_data.py")
    add("--output", required=True, help="tokenizer.json or vocab.txt to write")
    add("--kind", choices=["bpe", "wordpiece"], default="bpe", help="(%(default)s)")
    add("--json-keys", nargs="+", default=["text"], help="keys to learn from (text)")
    add("--vocab-size", type=int, default=8192, help="tokens, special ones included (8192)")
    add("--cased", action="store_true", help="wordpiece keeps capitals: BertWordPieceCase")
    args = parser.parse_args(argv)
    try:
        train(args)
    except DataError as error:
        print(f"train_tokenizer.py: {error}", file=sys.stderr)
        return 2
    return 0


def train(args: argparse.Namespace) -> None:
    try:
        library = importlib.import_module("tokenizers")
    except ImportError:
        raise DataError("training needs the package tokenizers: pip install tokenizers") from None
    for path in args.input:
        if not Path(path).is_file():
            raise DataError(f"--input {path} does not exist")
    started = time.perf_counter()
    tokenizer, trainer = (byte_pairs if args.kind == "bpe" else word_pieces)(library, args)
    tokenizer.train_from_iterator(texts(args.input, tuple(args.json_keys)), trainer)
    part = Path(f"{args.output}.partial")
    part.parent.mkdir(parents=True, exist_ok=True)
    if args.kind == "bpe":
        tokenizer.save(str(part))
    else:
        ids = tokenizer.get_vocab()
        part.write_text("".join(f"{token}\n" for token in sorted(ids, key=ids.get)), "utf-8")
    os.replace(part, args.output)
    size, seconds = tokenizer.get_vocab_size(), time.perf_counter() - started
    print(f"{args.output}: {size:,} tokens in {seconds:.1f} s")


def byte_pairs(library, args: argparse.Namespace):
    """GPT-2's kind: bytes, merged within words."""
    if args.vocab_size < 257:
        raise DataError(
            f"--vocab-size {args.vocab_size} has no room for 256 bytes and the end token; use 257 "
            "or more"
        )
    level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=args.vocab_size,
        special_tokens=[END],
        initial_alphabet=level.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    return tokenizer, trainer


def word_pieces(library, args: argparse.Namespace):
    """BERT's kind: words, cut into pieces whose inner ones begin with ##."""
    if args.vocab_size < 2 * len(BERT_TOKENS):
        raise DataError(
            f"--vocab-size {args.vocab_size} has no room beside {' '.join(BERT_TOKENS)}"
        )
    tokenizer = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=not args.cased)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=args.vocab_size,
        special_tokens=BERT_TOKENS,
        show_progress=sys.stderr.isatty(),
    )
    return tokenizer, trainer


def texts(inputs: list[str], keys: tuple[str, ...]) -> Iterator[str]:
    """Every text under `keys`, with a line about progress every few seconds."""
    total = sum(os.path.getsize(path) for path in inputs)
    before, said = 0, time.perf_counter()
    for path in inputs:
        for block in read_blocks(path, keys):
            for _, row in parse_block(block, keys):
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
