"""Turn text into the .bin/.idx files that pretraining reads.

    python scripts/preprocess_data.py --input corpus.jsonl --output-prefix corpus --append-eod \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json

writes corpus_text_document.bin and .idx; `--data-path corpus_text_document` trains on them. Input
is JSON lines, plain text (.txt) or Parquet (.parquet), the first two also .gz or .zst. Flags are
Megatron's. The output is the same, byte for byte, for any number of workers. After a kill, the same
command goes on where it was.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import glob
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# numpy's own threads have nothing to do here, and would be in the way of forks
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from core.process_memory import keep_freed_memory
from data.encode import Encoded, EncodeSettings, encode_block, tokenizer_of
from data.index_format import DataError, bin_path
from data.indexed import IndexedBuilder
from data.records import Block, Place, read_blocks
from scripts.tokenizer_flags import add_tokenizer_flags, settings_of

BAD_LINES_SHOWN = 10
PROGRESS_SECONDS = 2.0
MARK_SECONDS = 10.0
PARENT_SECONDS = 1.0
# Flags of Megatron's script that say how to do what this one always does.
NO_EFFECT = {
    "partitions": "one pass in bounded memory needs no partitions",
    "lang": "sentences are split by rules for all languages",
    "log_interval": "progress comes every few seconds",
    "dataset_impl": "there is one format",
    "keep_sequential_samples": "records always keep their order",
}


def main(argv: list[str] | None = None) -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a worker; --workers says how many
    keep_freed_memory()  # a twentieth of the time; workers inherit it by the fork
    args = parse(argv)
    for name, why in NO_EFFECT.items():
        if getattr(args, name) not in (None, False):
            say(f"--{name.replace('_', '-')} has no effect: {why}")
    tokenizer = settings_of(args).items()
    settings = EncodeSettings(
        args.tokenizer_type,
        tuple((n, tuple(v) if isinstance(v, list) else v) for n, v in tokenizer),
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        split_sentences=args.split_sentences,
        keep_newlines=args.keep_newlines,
    )
    again = "the same command starts anew"
    try:
        job = Job(settings, find_inputs(args.input), args.text_documents, args.output_prefix)
        try:
            job.run(args.workers, args.on_bad_line)
        finally:
            if job.is_marked:
                again = "the same command goes on from the last mark"
    except DataError as error:
        say(f"preprocess_data.py: {error}")
        return 2
    except OSError as error:
        where = error.filename or args.output_prefix  # a write that fails names no file
        say(f"preprocess_data.py: {where}: {error.strerror}; {again}")
        return 2
    except BrokenExecutor:
        say(
            f"preprocess_data.py: a worker died, perhaps for want of memory; {again}, with fewer "
            "--workers if need be"
        )
        return 1
    except KeyboardInterrupt:
        say(f"preprocess_data.py: stopped; {again}")
        return 130
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument_group("input and output").add_argument
    add("--input", required=True, nargs="+", help="files; patterns with * work")
    add("--output-prefix", required=True, help="PREFIX of PREFIX_text_document.bin and .idx")
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="keys or columns to take, a pair of files for each (text)",
    )
    add(
        "--text-documents",
        choices=["line", "file"],
        default="line",
        help="what a document is in a .txt (line)",
    )
    add(
        "--on-bad-line",
        choices=["stop", "skip"],
        default="stop",
        help="a line that is no record (stop)",
    )
    add("--workers", type=int, default=default_workers(), help="processes (%(default)s here)")
    add_token_flags(parser)
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error(f"--workers {args.workers} is less than 1")
    return args


def add_token_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tokens").add_argument
    kind = "as for pretraining: HuggingFaceTokenizer, GPT2BPETokenizer, ..."
    add_tokenizer_flags(add, kind=kind, required=True)
    add("--append-eod", action="store_true", help="close every document with the end token")
    add(
        "--split-sentences",
        action="store_true",
        help="one sequence a sentence, for BERT: PREFIX_text_sentence",
    )
    add("--keep-newlines", action="store_true", help="keep newlines within sentences")
    add = parser.add_argument_group("known from Megatron, without effect here").add_argument
    add("--partitions", type=int)
    add("--lang")
    add("--log-interval", type=int)
    add("--dataset-impl")
    add("--keep-sequential-samples", action="store_true")


def default_workers() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_inputs(inputs: list[str]) -> list[str]:
    """The files meant, in the order given; a pattern stands for its matches in sorted order."""
    paths = []
    for item in inputs:
        matches = (
            [item] if os.path.isfile(item) else sorted(filter(os.path.isfile, glob.glob(item)))
        )
        if not matches and os.path.isdir(item):
            raise DataError(f"--input {item} is a folder; name its files, such as {item}/*.jsonl")
        if not matches:
            raise DataError(f"--input {item} does not exist")
        paths += matches
    return paths


@dataclass
class Counts:
    """What has been done so far, over all keys."""

    records: int = 0
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    bad: int = 0


class Job:
    """One run: inputs in order, one pair of files for each key, and a mark from which to go on."""

    def __init__(
        self, settings: EncodeSettings, paths: list[str], text_documents: str, output_prefix: str
    ):
        if len(settings.json_keys) > 1 and any(".txt" in Path(path).suffixes for path in paths):
            raise DataError(
                "plain text has one text a document; give one --json-keys or JSON lines"
            )
        self.settings, self.paths, self.text_documents = settings, paths, text_documents
        self.prefixes = {k: f"{output_prefix}_{k}_{settings.level}" for k in settings.json_keys}
        self.counts = Counts()
        self._mark_path = Path(f"{next(iter(self.prefixes.values()))}.partial", "mark.json")

    @property
    def is_marked(self) -> bool:
        """Whether a run that ended early left a mark to go on from."""
        return self._mark_path.is_file()

    def run(self, workers: int, on_bad_line: str) -> None:
        """Raises DataError, and then nothing is left; any other error keeps what is marked."""
        tokenizer = tokenizer_of(self.settings)
        if self.settings.append_eod:
            _ = tokenizer.eod  # refuse before the work, not after
        with worker_pool(workers) as pool:  # before any file is open, which workers would share
            self._run(pool, workers, on_bad_line)

    def _run(self, pool: ProcessPoolExecutor | None, workers: int, on_bad_line: str) -> None:
        mark = self._read_mark()
        builders: dict[str, IndexedBuilder] = {}
        try:
            for key, prefix in self.prefixes.items():
                builders[key] = IndexedBuilder(
                    prefix, self.settings.dtype, mark and mark["pairs"][key]
                )
            start = (mark["file"], mark["read"]) if mark else (0, 0)
            progress = Progress(self.paths, workers, self.counts, start)
            encoded = encode_all(self.settings, self._blocks(mark), pool, 2 * workers)
            self._write(encoded, builders, on_bad_line, progress)
            for key, builder in builders.items():
                if not builder.num_tokens:
                    source = f"{' '.join(self.paths)}: no text under key {key!r}"
                    raise DataError(f"{source} in {self.counts.records} records")
            for builder in builders.values():
                builder.finish()
        except (OSError, KeyboardInterrupt, BrokenExecutor):
            for builder in builders.values():
                builder.close()
            raise
        except BaseException:
            for builder in builders.values():
                builder.abandon()
            raise
        for key, builder in builders.items():
            print(
                f"{bin_path(self.prefixes[key])} and .idx: {builder.num_documents:,} documents, "
                f"{builder.num_tokens:,} tokens"
            )
        progress.finish()

    def _blocks(self, mark: dict | None) -> Iterator[Block]:
        first, start = (mark["file"], Place(**mark["place"])) if mark else (0, Place())
        for file, path in enumerate(self.paths[first:], first):
            for block in read_blocks(
                path, self.settings.json_keys, text_documents=self.text_documents, start=start
            ):
                yield replace(block, file=file)
            start = Place()

    def _write(self, everything, builders, on_bad_line, progress) -> None:
        marked = time.perf_counter()
        for block, encoded in everything:
            if encoded.bad and on_bad_line == "stop":
                raise DataError(f"{encoded.bad[0]}; correct it or pass --on-bad-line skip")
            for key, builder in builders.items():
                texts = encoded.texts[key]
                builder.add_documents(texts.tokens, texts.lengths, texts.sequences)
                self.counts.documents += len(texts.sequences)
                self.counts.tokens += len(texts.tokens)
            self.counts.records += encoded.records
            self.counts.empty += encoded.empty
            progress.after(block, encoded)
            if time.perf_counter() - marked >= MARK_SECONDS:
                self._write_mark(block, builders)
                marked = time.perf_counter()

    def _fingerprint(self) -> str:
        """What a mark holds for: settings, inputs and tokenizer files, by size and time of
        change."""
        files = [*self.paths, *(str(value) for _, value in self.settings.tokenizer)]
        states = [
            (f, os.stat(f).st_size, os.stat(f).st_mtime_ns) for f in files if os.path.exists(f)
        ]
        everything = json.dumps([asdict(self.settings), self.text_documents, states], default=str)
        return hashlib.sha256(everything.encode()).hexdigest()

    def _write_mark(self, block: Block, builders: dict[str, IndexedBuilder]) -> None:
        mark = {
            "fingerprint": self._fingerprint(),
            "pairs": {key: builder.mark() for key, builder in builders.items()},
            "file": block.file,
            "read": block.read,
            "place": asdict(block.end),
            "counts": asdict(self.counts),
        }
        part = self._mark_path.with_suffix(".new")
        part.write_text(json.dumps(mark))
        os.replace(part, self._mark_path)

    def _read_mark(self) -> dict | None:
        if not self.is_marked:
            return None
        mark = json.loads(self._mark_path.read_text())
        if mark["fingerprint"] != self._fingerprint():
            say("an unfinished run had other inputs or settings: starting anew")
            return None
        self.counts = Counts(**mark["counts"])
        say(f"going on after {self.counts.records:,} records of an unfinished run")
        return mark


@contextlib.contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor | None]:
    """Processes that encode; None for one worker, which is this process.

    They are forked where this process has no other thread (on Linux, as a script): each has the
    tokenizer and the imports then, which would cost it half a second.
    """
    if workers == 1:
        yield None
        return
    threads = Path("/proc/self/task")
    alone = threads.is_dir() and len(list(threads.iterdir())) == 1
    method = "fork" if alone else "spawn"
    with ProcessPoolExecutor(workers, get_context(method), start_worker) as pool:
        pool.submit(os.getpid).result()  # all are there
        try:
            yield pool
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def encode_all(
    settings: EncodeSettings, blocks: Iterable[Block], pool: ProcessPoolExecutor | None, most: int
) -> Iterator[tuple[Block, Encoded]]:
    """Encode blocks in the pool, in order, with at most so many of them waiting for it."""
    if pool is None:
        for block in blocks:
            yield block, encode_block(settings, block)
        return
    flying: collections.deque[tuple[Block, Future]] = collections.deque()
    for block in blocks:
        flying.append((block, pool.submit(encode_block, settings, block)))
        if len(flying) > most:
            first, future = flying.popleft()
            yield first, future.result()
    while flying:
        first, future = flying.popleft()
        yield first, future.result()


def start_worker() -> None:
    """A worker leaves interrupts to the parent, and goes when the parent is gone.

    It looks every second, by a signal: a thread that waits for the parent's end would make every
    malloc of the tokenizer take a lock, a twentieth of the time.
    """
    parent = parent_process().pid

    def look(*_) -> None:
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, PARENT_SECONDS, PARENT_SECONDS)


class Progress:
    """Says on stderr how far a job is: at once, after the first block, then every few seconds."""

    def __init__(self, paths: list[str], workers: int, counts: Counts, start: tuple[int, int]):
        """start  (file, bytes of it) where reading begins"""
        sizes = [os.path.getsize(path) for path in paths]
        self._before = [sum(sizes[:i]) for i in range(len(sizes))]
        self._total = sum(sizes)
        self._counts = counts
        self._first_byte = self._before[start[0]] + start[1]
        self._first_document = counts.documents
        self._started = time.perf_counter()
        self._said = -PROGRESS_SECONDS
        plural = "s" * (workers > 1)
        say(
            f"{(self._total - self._first_byte) / 1e6:,.1f} MB to read with {workers} "
            f"worker{plural}"
        )

    def after(self, block: Block, encoded: Encoded) -> None:
        for sentence in encoded.bad[: max(0, BAD_LINES_SHOWN - self._counts.bad)]:
            say(f"skipped: {sentence}")
        self._counts.bad += len(encoded.bad)
        elapsed = time.perf_counter() - self._started
        if elapsed - self._said < PROGRESS_SECONDS:
            return
        self._said = elapsed
        done = self._before[block.file] + block.read
        speed = (done - self._first_byte) / elapsed
        documents = (self._counts.documents - self._first_document) / elapsed
        left = f"{(self._total - done) / speed:.0f} s left" if speed else "time left unknown"
        say(
            f"{self._counts.documents:,} documents ({documents:,.0f}/s), "
            f"{done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB ({speed / 1e6:.2f} MB/s), "
            f"{self._counts.tokens:,} tokens, {left}"
        )

    def finish(self) -> None:
        print(
            f"{self._counts.records:,} records in {time.perf_counter() - self._started:.1f} s, "
            f"{self._counts.empty:,} empty texts and {self._counts.bad:,} bad lines skipped"
        )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
