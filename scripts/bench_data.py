"""How fast the data path is, against the figures it must keep.

    python scripts/bench_data.py [--json F] [--quick] [--megabytes 300 1000 10000]

Makes its own inputs in a temporary folder. Times are CPU seconds of this process and its children,
so that other work on the machine disturbs them little. --quick uses a twentieth of the size and
keeps no bar. --megabytes: of input whose peak memory is measured; 10 GB take minutes, and 16 GB of
disk.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.bert import BertDataset, PairSampler
from data.gpt import GPTDataset
from data.index_format import pack_header
from data.masking import Masking

SCRIPTS = Path(__file__).resolve().parent
SEQ_LENGTH = 1024


@dataclass
class Row:
    """One line of the table; `better` is "less" or "more" than `bar`."""

    what: str
    value: float
    unit: str
    bar: float | None = None
    better: str = "less"

    def met(self) -> bool:
        return self.bar is None or (
            self.value <= self.bar if self.better == "less" else self.value >= self.bar
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the size")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[300, 1000], metavar="MB")
    args = parser.parse_args(argv)
    memory = functools.partial(memory_rows, sizes=args.megabytes)
    rows: list[Row] = []
    print(f"{'what':58}{'measured':>12}  {'unit':14}{'bar':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for measure in (index_rows, access_rows, bert_rows, preprocess_rows, memory):
            for row in measure(Path(folder), 20 if args.quick else 1):
                rows.append(row)
                bar = "" if row.bar is None else f"{row.bar:,.6g}"
                mark = "" if args.quick or row.met() else "  MISSED"
                print(f"{row.what:58}{row.value:>12,.4g}  {row.unit:14}{bar:>9}{mark}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if args.quick or all(row.met() for row in rows) else 1


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of `work` in this process: the least of three."""
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def write_sparse(prefix: Path, documents: int, mean_tokens: int) -> str:
    """A pair of documents of about mean_tokens tokens whose .bin is a hole in the file system."""
    lengths = np.random.default_rng(0).integers(mean_tokens // 5, mean_tokens * 9 // 5, documents)
    ends = np.cumsum(lengths * 2)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(pack_header(np.dtype("<u2"), documents, documents))
        for column, dtype in (
            (lengths, "<i4"),
            (ends - lengths * 2, "<i8"),
            (np.arange(documents + 1), "<i8"),
        ):
            file.write(column.astype(dtype).data)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(ends[-1]))
    return str(prefix)


def index_rows(folder: Path, scale: int) -> Iterator[Row]:
    """First build and cached start of a large index."""
    documents = 5_000_000 // scale
    prefix = write_sparse(folder / "large", documents, 1000)
    name = f"index of {documents:,} documents, sequence {SEQ_LENGTH}"
    build = cpu_seconds(lambda: GPTDataset(prefix, None, SEQ_LENGTH, 1).index.epoch(0))
    yield Row(f"{name}: first build", build, "CPU s", 1.1)

    def cached() -> object:
        return GPTDataset(prefix, None, SEQ_LENGTH, 1, cache_folder=folder / "cache")[0]

    cached()
    yield Row(f"{name}: from cache", cpu_seconds(cached), "CPU s", 0.02)


def access_rows(folder: Path, scale: int) -> Iterator[Row]:
    """Random access to a middling index."""
    documents = 100_000 // scale
    data = GPTDataset(write_sparse(folder / "middling", documents, 600), None, SEQ_LENGTH, 1)
    count = 20_000 // scale
    places = np.random.default_rng(1).integers(0, data.samples_per_epoch, count).tolist()
    seconds = cpu_seconds(lambda: [data[n] for n in places])
    yield Row(
        f"random GPT samples, {documents:,} documents", count / seconds, "a CPU s", 8000, "more"
    )


def bert_rows(folder: Path, scale: int) -> Iterator[Row]:
    """Pairs with whole-word masks, sequence 512."""
    prefix = write_sparse(folder / "sentences", 200_000 // scale, 30)
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    sequences = 200_000 // scale
    boundaries = np.arange(0, sequences + 1, 20)  # documents of 20 sentences
    size = len(index) - 8 * (sequences + 1)
    header = pack_header(np.dtype("<u2"), sequences, len(boundaries) - 1)
    Path(f"{prefix}.idx").write_bytes(
        header + index[len(header) : size] + boundaries.astype("<i8").tobytes()
    )
    starts = np.random.default_rng(2).random(30_000) < 0.8
    sampler = PairSampler(512, 1, 2, 0, Masking(3, 30_000, starts))
    data = BertDataset(prefix, None, 1, sampler)
    count = min(2000, data.samples_per_epoch)
    seconds = cpu_seconds(lambda: [data[n] for n in range(count)])
    yield Row("BERT samples of 512, whole-word n-grams", count / seconds, "a CPU s")


# CPU seconds of a command and its children, and nothing else on its standard output.
CHILDREN_SECONDS = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
"""

# CPU seconds of the encoder, without start-up, on every argv[4]th document from argv[3] on.
ENCODE_ALONE = """
import itertools, json, sys, time, tokenizers
part, parts = int(sys.argv[3]), int(sys.argv[4])
lines = itertools.islice(open(sys.argv[1], encoding="utf-8"), part, None, parts)
texts = [json.loads(line)["text"] for line in lines]
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[2])
started = time.process_time()
for i in range(0, len(texts), 64):
    tokenizer.encode_batch_fast(texts[i : i + 64], add_special_tokens=False)
print(time.process_time() - started)
"""


def at_once(*programs: list[str]) -> list[float]:
    """What each of some Python programs (arguments of python) prints, all running together."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([sys.executable, *program], stdout=subprocess.PIPE, env=environment)
        for program in programs
    ]
    printed = [process.communicate()[0] for process in running]
    for process in running:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return [float(text) for text in printed]


def preprocess_rows(folder: Path, scale: int) -> Iterator[Row]:
    """preprocess_data.py, start-up and all, against the library's encoder alone on the same
    documents.

    A core's speed changes with what else the machine does, by half and more. So one worker runs
    beside the encoder, and two workers between two runs of two encoders with half of the documents
    each; the figure is the median of the rounds' quotients.
    """
    corpus, model = str(folder / "corpus.jsonl"), str(folder / "tokenizer.json")
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    build = ["build_corpus.py", "--output", corpus, "--max-megabytes", str(25 / scale)]
    for script, *flags in (build, ["train_tokenizer.py", "--input", corpus, "--output", model]):
        subprocess.run([sys.executable, str(SCRIPTS / script), *flags], **quiet)

    def ours(workers: int) -> list[str]:
        program = [sys.executable, str(SCRIPTS / "preprocess_data.py"), "--input", corpus]
        program += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model]
        program += ["--output-prefix", str(folder / f"out{workers}"), "--workers", str(workers)]
        return ["-c", CHILDREN_SECONDS, *program]

    def alone(part: int, parts: int) -> list[str]:
        return ["-c", ENCODE_ALONE, corpus, model, str(part), str(parts)]

    quotients: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(5 if scale == 1 else 1):
        encoder, one = at_once(alone(0, 1), ours(1))
        quotients[1].append(one / encoder)
        before = sum(at_once(alone(0, 2), alone(1, 2)))
        (two,) = at_once(ours(2))
        after = sum(at_once(alone(0, 2), alone(1, 2)))
        quotients[2].append(two / ((before + after) / 2))
    yield Row("encode_batch_fast alone, last round", encoder, "CPU s")
    for workers, found in quotients.items():
        what = f"preprocess_data.py, workers: {workers}, over encode_batch_fast"
        yield Row(what, statistics.median(found), "x", 1.1)


# Run from a small process: a child's peak counts what its parent was before it.
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def memory_rows(folder: Path, scale: int, sizes: Sequence[int]) -> Iterator[Row]:
    """Peak memory of preprocess_data.py does not grow with the input."""
    line = json.dumps({"text": " ".join(map(str, range(1000)))}) + "\n"
    peaks = []
    for megabytes in sizes:
        source = folder / "numbers.jsonl"
        with open(source, "w") as file:
            for _ in range(megabytes * 1_000_000 // scale // len(line)):
                file.write(line)
        command = [
            sys.executable,
            str(SCRIPTS / "preprocess_data.py"),
            "--input",
            str(source),
        ]
        command += ["--output-prefix", str(folder / "numbers"), "--workers", "1"]
        command += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
        peak = subprocess.run(
            [sys.executable, "-c", PEAK, *command], check=True, capture_output=True, text=True
        )
        peaks.append(int(peak.stdout) / 1024)
        yield Row(f"preprocess_data.py, {megabytes // scale:,} MB of input: peak", peaks[-1], "MiB")
    yield Row("growth of that peak", max(peaks) / peaks[0], "x", 1.05)


if __name__ == "__main__":
    sys.exit(main())
