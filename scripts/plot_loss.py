"""Draw loss curves from metrics files.

    python scripts/plot_loss.py runs/a/metrics.jsonl runs/b/metrics.jsonl --output loss.png

A metrics file is what `--metrics-file` writes: one JSON object a line. Training loss is drawn thin
with its running mean over it, validation loss as dots. Needs the package matplotlib.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

AXES = {"iteration": "iteration", "consumed_samples": "consumed samples"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("metrics", nargs="+", help="metrics files, one curve each")
    add("--output", required=True, help="PNG to write")
    add("--x", choices=sorted(AXES), default="iteration", help="axis (default: iteration)")
    add("--labels", nargs="+", help="names of the curves (default: the files' folders)")
    args = parser.parse_args(argv)
    labels = args.labels or [Path(name).resolve().parent.name for name in args.metrics]
    if len(labels) != len(args.metrics):
        parser.error(f"{len(labels)} --labels for {len(args.metrics)} metrics files")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("needs the package matplotlib: pip install matplotlib")
    try:
        runs = [read_rows(name) for name in args.metrics]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    draw(runs, labels, args.x, args.output)
    print(f"{args.output}: {', '.join(labels)}")
    return 0


def read_rows(name: str) -> list[dict[str, Any]]:
    """The rows that have a finite loss. Raises ValueError when there is none."""
    with open(name, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    rows = [row for row in rows if row.get("lm_loss") is not None]
    if not rows:
        raise ValueError(f"{name} has no row with a loss")
    return rows


def running_mean(values: list[float], span: int) -> list[float]:
    """Exponential mean with a memory of about `span` values, unbiased at the start.

    >>> running_mean([1.0, 1.0, 1.0], 10)
    [1.0, 1.0, 1.0]
    """
    keep = 1 - 1 / max(span, 1)
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        means.append(total / weight)
    return means


def draw(runs: list[list[dict[str, Any]]], labels: list[str], x: str, output: str) -> None:
    """Writes the picture; no display is needed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for number, (rows, label) in enumerate(zip(runs, labels)):
        color = f"C{number}"
        train = [row for row in rows if row["kind"] == "train"]
        steps, losses = [row[x] for row in train], [row["lm_loss"] for row in train]
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
        mean = running_mean(losses, len(losses) // 50)
        axes.plot(steps, mean, color=color, linewidth=1.8, label=label)
        checks = [row for row in rows if row["kind"] == "eval"]
        if checks:
            places, values = [row[x] for row in checks], [row["lm_loss"] for row in checks]
            axes.plot(places, values, "o", color=color, label=f"{label}, validation")
            where = (places[-1], values[-1])
            axes.annotate(
                f"{values[-1]:.3f}", where, xytext=(0, 8), textcoords="offset points", ha="right"
            )
    axes.set_xlabel(AXES[x])
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
