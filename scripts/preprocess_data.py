"""Turn JSON lines into the .bin/.idx files that pretraining reads.

    python scripts/preprocess_data.py --input corpus.jsonl --output-prefix corpus --append-eod \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json

writes corpus_text_document.bin and .idx; `--data-path corpus_text_document` trains on them. Flags
are Megatron's. The output is the same, byte for byte, for any number of workers.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import glob
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.encode import Encoded, EncodeSettings, encode_block, tokenizer_of
from data.indexed import DataError, IndexedBuilder, bin_path
from data.records import Block, read_blocks

BAD_LINES_SHOWN = 10
PROGRESS_SECONDS = 2.0


def main(argv: list[str] | None = None) -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a worker; --workers says how many
    args = parse(argv)
    settings = EncodeSettings(
        tokenizer_type=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        vocab_size=args.vocab_size,
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
    )
    try:
        preprocess(settings, args.input, args.output_prefix, args.workers, args.on_bad_line)
    except DataError as error:
        print(f"preprocess_data.py: {error}", file=sys.stderr)
        return 2
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add(
        "--input",
        required=True,
        nargs="+",
        help="JSON lines, one document a line, plain or .gz; patterns with * work",
    )
    add("--output-prefix", required=True, help="PREFIX of PREFIX_text_document.bin and .idx")
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="keys to take, a pair of files for each (default: text)",
    )
    add(
        "--tokenizer-type",
        required=True,
        help="HuggingFaceTokenizer, GPT2BPETokenizer or NullTokenizer",
    )
    add("--tokenizer-model", help="tokenizer.json or its folder, for HuggingFaceTokenizer")
    add("--vocab-file", help="vocab.json, for GPT2BPETokenizer")
    add("--merge-file", help="merges.txt, for GPT2BPETokenizer")
    add("--vocab-size", type=int, help="number of token ids, for NullTokenizer")
    add("--append-eod", action="store_true", help="close every document with the end token")
    add(
        "--workers",
        type=int,
        default=default_workers(),
        help="processes (default here: %(default)s)",
    )
    add(
        "--on-bad-line",
        choices=["stop", "skip"],
        default="stop",
        help="a line that is no record (default: stop)",
    )
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error(f"--workers {args.workers} is less than 1")
    return args


def default_workers() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def preprocess(
    settings: EncodeSettings, inputs: list[str], output_prefix: str, workers: int, on_bad_line: str
) -> None:
    """Tokenize `inputs` into one pair of files for each key. Raises DataError; then nothing is left
    behind."""
    paths = find_inputs(inputs)
    if settings.append_eod:
        _ = tokenizer_of(settings).eod  # refuse before the work, not after
    progress = Progress(sum(os.path.getsize(path) for path in paths), workers)
    blocks = (block for path in paths for block in read_blocks(path))
    with contextlib.ExitStack() as stack:
        prefixes = {key: f"{output_prefix}_{key}_document" for key in settings.json_keys}
        builders = {
            key: stack.enter_context(IndexedBuilder(prefix, settings.dtype))
            for key, prefix in prefixes.items()
        }
        for block, encoded in encode_all(settings, blocks, workers):
            if encoded.bad and on_bad_line == "stop":
                raise DataError(f"{encoded.bad[0]}; correct it or pass --on-bad-line skip")
            for key, builder in builders.items():
                builder.add_documents(encoded.tokens[key], encoded.lengths[key])
            progress.add(block, encoded)
        for key, builder in builders.items():
            if not builder.num_tokens:
                raise DataError(
                    f"{' '.join(paths)}: no text under key {key!r} in {progress.records} records"
                )
    progress.finish({prefixes[key]: builder for key, builder in builders.items()})


def find_inputs(inputs: list[str]) -> list[str]:
    """The files meant, in the order given; a pattern stands for its matches in sorted order."""
    paths = []
    for item in inputs:
        matches = [item] if os.path.isfile(item) else sorted(glob.glob(item))
        if not matches:
            raise DataError(f"--input {item} does not exist")
        paths += matches
    return paths


def encode_all(
    settings: EncodeSettings, blocks: Iterable[Block], workers: int
) -> Iterator[tuple[Block, Encoded]]:
    """Encode blocks in `workers` processes, in order, with a bounded number of them in memory."""
    if workers == 1:
        for block in blocks:
            yield block, encode_block(settings, block)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        flying: collections.deque[tuple[Block, Future]] = collections.deque()
        try:
            for block in blocks:
                flying.append((block, pool.submit(encode_block, settings, block)))
                if len(flying) > 2 * workers:
                    first, future = flying.popleft()
                    yield first, future.result()
            while flying:
                first, future = flying.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class Progress:
    """Counts, and says them on stderr: at once, after the first block, then every few seconds."""

    def __init__(self, total_bytes: int, workers: int):
        self.total = total_bytes
        self.records = self.documents = self.tokens = self.empty = self.bad = 0
        self._started = time.perf_counter()
        self._said = -PROGRESS_SECONDS
        self._finished_files, self._path, self._read = 0, "", 0
        say(f"{total_bytes / 1e6:,.1f} MB to read with {workers} worker{'s' * (workers > 1)}")

    def add(self, block: Block, encoded: Encoded) -> None:
        if block.path != self._path:
            self._finished_files += self._read
            self._path = block.path
        self._read = block.read
        self.records += encoded.records
        self.empty += encoded.empty
        self.documents += sum(map(len, encoded.lengths.values()))
        self.tokens += sum(map(len, encoded.tokens.values()))
        for sentence in encoded.bad[: max(0, BAD_LINES_SHOWN - self.bad)]:
            say(f"skipped: {sentence}")
        self.bad += len(encoded.bad)
        elapsed = time.perf_counter() - self._started
        if elapsed - self._said >= PROGRESS_SECONDS:
            self._said = elapsed
            done = self._finished_files + self._read
            left = elapsed / done * (self.total - done)
            say(
                f"{self.documents:,} documents ({self.documents / elapsed:,.0f}/s), "
                f"{done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB ({done / 1e6 / elapsed:.2f} "
                "MB/s), "
                f"{self.tokens:,} tokens, {left:.0f} s left"
            )

    def finish(self, written: dict[str, IndexedBuilder]) -> None:
        elapsed = time.perf_counter() - self._started
        for prefix, builder in written.items():
            print(
                f"{bin_path(prefix)} and .idx: {builder.num_documents:,} documents, "
                f"{builder.num_tokens:,} tokens"
            )
        print(
            f"{self.records:,} records in {elapsed:.1f} s ({self.total / 1e6 / elapsed:.2f} MB/s), "
            f"{self.empty:,} empty texts and {self.bad:,} bad lines skipped"
        )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
