#!/usr/bin/env python
"""Draw a pipeline schedule, with its bubble and its live activations beside the closed form.

    python scripts/draw_schedule.py --pp 4 --microbatches 8 --schedule zb_h1
    python scripts/draw_schedule.py --pp 4 --microbatches 8 --chunks 2 --svg plan.svg
    python scripts/draw_schedule.py --pp 4 --microbatches 8 --measured run.jsonl --trace run.json

Needs no torch, no processes and no GPU. The trace opens in ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core.pipeline_parallel.actions import Op, Plan
from core.pipeline_parallel.draw import LEGEND, chrome_trace, draw, draw_svg
from core.pipeline_parallel.measured import measured_costs, read_measured
from core.pipeline_parallel.placement import CHUNKS, PP
from core.pipeline_parallel.schedules import ORDERS, build_plan, default_schedule
from core.pipeline_parallel.simulate import (
    Costs,
    Timeline,
    closed_form,
    live_activations,
    simulate,
)

WIDEST = 160  # columns; a longer timeline is scaled down to this unless --width says otherwise


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pp", PP, type=int, required=True, help="pipeline ranks")
    add("--microbatches", type=int, required=True, help="microbatches per step and replica")
    add("--chunks", CHUNKS, type=int, default=1, help="stages per rank (virtual pipeline)")
    names = ", ".join(ORDERS)
    schedule = f"{names}, or a schedule file; default 1f1b, or interleaved if there are chunks"
    add("--schedule", "--pipeline-schedule", help=schedule)
    add("--forward-only", action="store_true", help="what an evaluation runs")
    add("--forward", type=float, default=1.0, help="cost of a forward")
    add("--input-grad", type=float, default=1.0, help="cost of an input gradient")
    add("--weight-grad", type=float, default=1.0, help="cost of a weight gradient")
    add("--stage-costs", type=_numbers, default=(), help="a factor per stage, as in 1,1,1,1.5")
    add("--link", type=float, default=0.0, help="time of a transfer between ranks")
    add("--blocking", action="store_true", help="sends and receives wait for each other")
    add("--measured", metavar="JSONL", help="what a run with --log-pipeline wrote, to compare")
    add("--width", type=int, help="columns of the drawing")
    add("--actions", action="store_true", help="print each rank's actions, transfers included")
    add("--svg", metavar="FILE", help="write the drawing as SVG")
    add("--trace", metavar="FILE", help="write Chrome-trace JSON")
    return parser.parse_args(argv)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(","))


def costs_of(args: argparse.Namespace) -> Costs:
    backward = args.input_grad + args.weight_grad
    op = {Op.F: args.forward, Op.B: backward, Op.I: args.input_grad, Op.W: args.weight_grad}
    if min(*op.values(), *args.stage_costs, 0 if args.link < 0 else 1) <= 0:
        raise ValueError("costs have to be above 0, and --link 0 or more")
    return Costs(op=op, stage=args.stage_costs, link=args.link)


def text_width(timeline: Timeline, asked: int | None) -> int | None:
    """None draws one column per unit of time, which needs times that are whole numbers."""
    whole = all(t.start.is_integer() and t.end.is_integer() for t in timeline.events)
    if asked is not None or (whole and timeline.span <= WIDEST):
        return asked
    return WIDEST


def summary(args: argparse.Namespace, plan: Plan, timeline: Timeline) -> str:
    """The numbers of the simulated plan, and the closed form where it holds."""
    unit = (args.forward, args.input_grad, args.weight_grad, args.link) == (1, 1, 1, 0)
    form = None
    if unit and not (args.measured or args.stage_costs or args.blocking or args.forward_only):
        schedule = args.schedule or default_schedule(args.chunks)
        form = closed_form(schedule, args.pp, args.microbatches, args.chunks)
    rows = [
        ("span", f"{timeline.span:g}", form and f"{form.span}"),
        ("bubble", f"{timeline.bubble:.4f}", form and f"{form.bubble:.4f}"),
        ("live activations", _spaced(live_activations(plan)), form and _spaced(form.live)),
    ]
    if args.forward_only:
        del rows[-1]  # nothing is kept for a backward
    return "\n".join(
        f"{name:<18}{found}" + (f"   closed form {expected}" if expected else "")
        for name, found, expected in rows
    )


def _spaced(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def write(args: argparse.Namespace, timelines: Mapping[str, Timeline]) -> None:
    if args.svg:
        Path(args.svg).write_text(draw_svg(timelines), encoding="utf-8")
    if args.trace:
        unit = 1e6 if args.measured else 1e3  # seconds of a run; a plan's unit is shown as 1 ms
        Path(args.trace).write_text(chrome_trace(timelines, unit), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        plan = build_plan(
            args.schedule, args.pp, args.microbatches, args.chunks, forward_only=args.forward_only
        )
        costs, timelines = costs_of(args), {}
        if args.measured:
            timelines["measured"] = read_measured(args.measured, plan)
            costs = measured_costs(timelines["measured"])
        timelines = {"plan": simulate(plan, costs, blocking=args.blocking), **timelines}
        write(args, timelines)
    except (ValueError, OSError) as error:
        print(f"draw_schedule: {error}", file=sys.stderr)
        return 2

    for name, timeline in timelines.items():
        if len(timelines) > 1:
            print(f"{name}: span {timeline.span:g} s, bubble {timeline.bubble:.4f}")
        print(draw(timeline, text_width(timeline, args.width)))
    print(LEGEND)
    print(summary(args, plan, timelines["plan"]))
    if args.actions:
        print(plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
