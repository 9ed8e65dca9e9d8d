"""Show a run: loss, throughput, restarts, failures.

    python scripts/report.py runs/a                      in the terminal
    python scripts/report.py runs/a --html report.html   a page with no other file, curve included
    python scripts/report.py --failures DIR              the cause of a failure, nothing else

RUN_DIR is searched for what a run leaves: the file of `--metrics-file` (*.jsonl), status.json,
requeue.json, checkpoints, failure.rankN.json. scripts/plot_loss.py draws several runs as a PNG.
"""

from __future__ import annotations

import argparse
import html
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from core.launch.failure import Failure, read_failures
from core.launch.status import Status, read_status

WIDTH, HEIGHT = 72, 14  # of the curve in a terminal
Row = dict[str, Any]


@dataclass
class Run:
    """What a folder says about a run."""

    name: str
    train: list[Row]
    evaluations: list[Row]
    status: Status | None
    restarts: list[Row]
    checkpoints: list[str]
    failures: list[tuple[Path, Failure]]  # the first of each folder of records


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run_dir", nargs="?", type=Path)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page as well")
    parser.add_argument("--failures", type=Path, metavar="DIR", help="a folder of failure records")
    args = parser.parse_args(argv)
    if args.failures is not None:
        print(first_failure(args.failures), end="", file=sys.stderr)
        return 0
    if args.run_dir is None or not args.run_dir.is_dir():
        parser.error(f"{args.run_dir or 'RUN_DIR'} is no folder")
    run = read_run(args.run_dir)
    print("\n".join(describe(run)))
    if args.html is not None:
        args.html.write_text(page(run), encoding="utf-8")
        print(f"wrote {args.html}")
    return 0


def first_failure(folder: Path) -> str:
    """The cause as it should stand at the end of a log; "" if nothing failed."""
    failures = read_failures(folder) if folder.is_dir() else []
    if failures and failures[0].victim:
        return (
            "no rank has said why: one was killed or lost its node, see SLURM's lines above; "
            f"{failures[0].headline}\n"
        )
    return f"{failures[0]}\n" if failures else ""


# ---- reading --------------------------------------------------------------------------------


def read_run(folder: Path) -> Run:
    rows = [row for path in sorted(folder.rglob("*.jsonl")) for row in read_rows(path)]
    status = [found for path in folder.rglob("status.json") if (found := read_status(path.parent))]
    records = sorted({path.parent for path in folder.rglob("failure.rank*.json")})
    histories = sorted(folder.rglob("requeue.json"))
    return Run(
        name=folder.resolve().name,
        train=[row for row in rows if row["kind"] == "train"],
        evaluations=[row for row in rows if row["kind"] == "eval"],
        status=max(status, key=lambda found: found.time, default=None),
        restarts=[entry for path in histories for entry in json.loads(path.read_text())],
        checkpoints=sorted(path.name for path in folder.rglob("iter_*") if path.suffix == ""),
        failures=[(path, read_failures(path)[0]) for path in records],
    )


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a metrics file; other lines (a half-written one, another file's) are left out."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("kind") in ("train", "eval"):
            yield row


# ---- the terminal ---------------------------------------------------------------------------


def describe(run: Run) -> Iterator[str]:
    yield f"run {run.name}: {headline(run)}"
    losses = loss_points(run)
    if losses:
        yield ""
        yield from curve(losses)
        yield f"{'':9}step {losses[0][0]} … {losses[-1][0]}"
    yield ""
    yield from (f"{name:<14}{value}" for name, value in facts(run))
    for number, entry in enumerate(run.restarts):
        again = f"{entry['outcome']} at step {entry['step']} ({entry['reason']})"
        yield f"{'run ' + str(number):<14}{again}"
    for folder, failure in run.failures:
        yield f"\nfailure in {folder}"
        yield str(failure)


def headline(run: Run) -> str:
    if run.status is None:
        return "no status.json"
    status = run.status
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.time))
    reason = f" ({status.reason})" if status.reason else ""
    return f"{status.outcome}{reason}, step {status.step}, {status.ranks} ranks, {when}"


def facts(run: Run) -> Iterator[tuple[str, str]]:
    """What the metrics and the folder say, in words."""
    if run.train:
        first, last = run.train[0], run.train[-1]
        yield "steps", f"{first['iteration']} to {last['iteration']}"
        yield "loss", f"{number(first.get('lm_loss'))} to {number(last.get('lm_loss'))}"
        for name, key, unit in (
            ("throughput", "tokens_per_s", "tokens/s"),
            ("step time", "step_time_s", "s"),
        ):
            values = [row[key] for row in run.train if row.get(key) is not None]
            if values:
                low, middle, high = min(values), statistics.median(values), max(values)
                yield name, f"{middle:,.4g} {unit} (median; {low:,.4g} to {high:,.4g})"
        skipped = [row["iteration"] for row in run.train if row.get("lm_loss") is None]
        if skipped:
            yield "no loss at", ", ".join(map(str, skipped[:10]))
    if run.evaluations:
        best = min(run.evaluations, key=lambda row: row.get("lm_loss") or float("inf"))
        last = run.evaluations[-1]
        yield "validation", (
            f"{number(last.get('lm_loss'))} at step {last['iteration']}, "
            f"best {number(best.get('lm_loss'))} at step {best['iteration']}"
        )
    if run.checkpoints:
        yield "checkpoints", f"{len(run.checkpoints)}, newest {run.checkpoints[-1]}"


def number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def loss_points(run: Run) -> list[tuple[int, float]]:
    return [
        (row["iteration"], row["lm_loss"]) for row in run.train if row.get("lm_loss") is not None
    ]


def curve(points: list[tuple[int, float]], width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """A chart of text: one column per stretch of steps, its mean loss a dot.

    >>> print("\\n".join(curve([(1, 2.0), (2, 1.0)], width=2, height=2)))
      2.0000 ●
      1.0000  ●
    """
    width = min(width, len(points))
    columns: list[list[float]] = [[] for _ in range(width)]
    for place, (_, loss) in enumerate(points):
        columns[place * width // len(points)].append(loss)
    means = [statistics.fmean(column) for column in columns]
    low, high = min(means), max(means)
    step = (high - low) / (height - 1) or 1.0
    rows = [round((high - mean) / step) for mean in means]
    return [
        f"{high - line * step:8.4f} {''.join('●' if row == line else ' ' for row in rows)}".rstrip()
        for line in range(height)
    ]


# ---- the page -------------------------------------------------------------------------------


def page(run: Run) -> str:
    """One HTML file: the curve as SVG, the facts as a table, restarts and failures as text."""
    rows = "".join(f"<tr><th>{name}<td>{html.escape(value)}" for name, value in facts(run))
    restarts = "".join(
        f"<li>{html.escape(str(e['outcome']))} at step {e['step']} ({html.escape(e['reason'])})"
        for e in run.restarts
    )
    failures = "".join(
        f"<h2>Failure in {html.escape(str(folder))}</h2><pre>{html.escape(str(failure))}</pre>"
        for folder, failure in run.failures
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(run.name)}</title>"
        "<style>body{font:15px sans-serif;max-width:50em;margin:2em auto}"
        "th{text-align:left;padding-right:1em}pre{background:#f4f4f4;padding:1em}</style>"
        f"<h1>{html.escape(run.name)}</h1><p>{html.escape(headline(run))}</p>{svg(run)}"
        f"<table>{rows}</table>"
        f"{f'<h2>Runs</h2><ol>{restarts}</ol>' if restarts else ''}{failures}\n"
    )


def svg(run: Run, width: int = 760, height: int = 300) -> str:
    """Training loss as a line, validation as dots; the ends of both axes are labelled."""
    points = loss_points(run)
    checks = [
        (row["iteration"], row["lm_loss"])
        for row in run.evaluations
        if row.get("lm_loss") is not None
    ]
    if not points:
        return ""
    steps, losses = zip(*points, *checks)
    left, right, low, high = min(steps), max(steps), min(losses), max(losses)

    def place(step: int, loss: float) -> str:
        x = 60 + (step - left) / (right - left or 1) * (width - 80)
        y = 20 + (high - loss) / (high - low or 1) * (height - 50)
        return f"{x:.1f},{y:.1f}"

    line = " ".join(place(*point) for point in points)
    circle = "<circle r=3 cx={} cy={} fill=crimson />"
    dots = "".join(circle.format(*place(*check).split(",")) for check in checks)
    labels = "".join(
        f"<text x={x} y={y} font-size=12>{text}</text>"
        for x, y, text in (
            (5, 24, f"{high:.3f}"),
            (5, height - 26, f"{low:.3f}"),
            (60, height - 8, f"step {left}"),
            (width - 90, height - 8, f"step {right}"),
        )
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" role=img aria-label="loss">'
        f'<polyline points="{line}" fill=none stroke=steelblue />{dots}{labels}</svg>'
    )


if __name__ == "__main__":
    sys.exit(main())
