"""The two ends of scripts/quickstart.sh: measure the held-out files, and sum up the run.

    python scripts/quickstart_report.py measure --data-path runs/quickstart/corpus_text_document ...
    python scripts/quickstart_report.py report --run runs/quickstart

`measure` finds the documents that `--split` keeps from training, counts their tokens and bytes,
compresses each with gzip -9, and says how many batches cover them once. `report` prints what the
model makes of the same files: bits per byte = loss / ln 2 x tokens / bytes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.gpt import split_documents
from data.indexed import DataError, IndexedDataset
from data.tokenizer import build_tokenizer


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure")
    measuring.set_defaults(call=measure)
    measuring.add_argument("--data-path", required=True)
    measuring.add_argument("--tokenizer-model", required=True)
    measuring.add_argument("--split", required=True)
    measuring.add_argument("--seq-length", type=int, required=True)
    measuring.add_argument("--global-batch-size", type=int, required=True)
    measuring.add_argument("--output", required=True, help="JSON file to write")
    reporting = commands.add_parser("report")
    reporting.set_defaults(call=report)
    reporting.add_argument("--run", required=True, help="folder of metrics.jsonl, held_out.json")
    args = parser.parse_args(argv)
    try:
        args.call(args)
    except (DataError, OSError) as error:
        print(f"quickstart_report.py: {error}", file=sys.stderr)
        return 2
    return 0


def measure(args: argparse.Namespace) -> None:
    """Writes documents, tokens, bytes, gzip_bytes and batches of the validation split."""
    corpus = IndexedDataset(args.data_path)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=args.tokenizer_model)
    _, held_out, _ = split_documents(args.split, corpus.num_documents)
    documents = [corpus.document(d) for d in held_out]
    texts = [tokenizer.decode(tokens[:-1]).encode() for tokens in documents]
    tokens = sum(len(tokens) for tokens in documents)
    samples = (tokens - 1) // args.seq_length
    found = {
        "documents": len(documents),
        "tokens": tokens,
        "bytes": sum(len(text) for text in texts),
        "gzip_bytes": sum(len(gzip.compress(text, 9)) for text in texts),
        "batches": max(samples // args.global_batch_size, 1),
    }
    Path(args.output).write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(
        f"held out: {found['documents']} files, {found['bytes'] / 1e6:.2f} MB, {tokens:,} tokens, "
        f"{found['batches']} batches"
    )


def report(args: argparse.Namespace) -> None:
    """Prints the outcome of a run."""
    run = Path(args.run)
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    held_out = json.loads((run / "held_out.json").read_text(encoding="utf-8"))
    train = [row for row in rows if row["kind"] == "train"]
    loss = [row["lm_loss"] for row in rows if row["kind"] == "eval"][-1]
    bits = loss / math.log(2) * held_out["tokens"] / held_out["bytes"]
    gzip_bits = 8 * held_out["gzip_bytes"] / held_out["bytes"]
    speed = statistics.median(row["tokens_per_s"] for row in train)
    print(
        f"""
validation loss   {loss:.4f} nats per token, after {train[-1]["iteration"]} iterations
bits per byte     {bits:.3f} on {held_out["documents"]} files the model has not seen
gzip -9           {gzip_bits:.3f} on the same files
speed             {speed:,.0f} tokens/s

loss curve        {run / "loss.png"}
communication     {run / "communication.txt"}
checkpoint        {run / "checkpoints"}"""
    )


if __name__ == "__main__":
    sys.exit(main())
