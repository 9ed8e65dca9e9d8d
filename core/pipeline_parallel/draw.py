"""Pictures of a schedule: text for terminals and tests, SVG, and a trace that Perfetto opens.

Pure: standard library, `actions` and `simulate`. Everything is drawn from a `Timeline`, so a
simulated and a measured run look alike and can stand above each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape

from core.pipeline_parallel.actions import Op, Plan
from core.pipeline_parallel.simulate import Timed, Timeline, simulate

_FIRST_LETTER = {Op.F: "0", Op.B: "a", Op.I: "a", Op.W: "A"}
_COLOUR = {Op.F: "#6a9fd8", Op.B: "#6fbf73", Op.I: "#6fbf73", Op.W: "#e3a857"}
_MEANING = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
LEGEND = "digit: forward   small letter: backward (input gradient)   capital: weight gradient"


def draw(what: Plan | Timeline, width: int | None = None) -> str:
    """One line per rank, time to the right, one character per unit of time (or `width` in all).

    Digits are forwards, small letters backwards or input gradients, capitals weight gradients, dots
    idle time. A character tells the microbatch modulo ten: 0, a and A belong together. When ranks
    hold several stages, a second line tells which of its chunks a rank works on (modulo ten).

    >>> print(draw(Plan.parse("F0@0 F1@0 B0@0 B1@0\\nF0@1 B0@1 F1@1 B1@1")))
    0 01..aa.bb
    1 .0aa1bb..
    """
    timeline = what if isinstance(what, Timeline) else simulate(what)
    cell = timeline.span / width if width else 1.0
    columns = round(timeline.span / cell) if timeline.span else 0
    work = [["."] * columns for _ in range(timeline.ranks)]
    chunk = [[" "] * columns for _ in range(timeline.ranks)]
    for start, end, rank, action in timeline.events:
        if action.op not in _FIRST_LETTER:
            continue
        letter = chr(ord(_FIRST_LETTER[action.op]) + action.microbatch % 10)
        first, last = (round((t - timeline.start) / cell) for t in (start, end))
        work[rank][first:last] = letter * (last - first)
        chunk[rank][first:last] = str(action.stage // timeline.ranks % 10) * (last - first)
    pad = len(str(timeline.ranks - 1))
    lines = []
    for rank in range(timeline.ranks):
        lines.append(f"{rank:>{pad}} {''.join(work[rank])}")
        if _several_chunks(timeline):
            lines.append(f"{'':>{pad}} {''.join(chunk[rank])}".rstrip())
    return "\n".join(lines)


def draw_svg(timelines: Mapping[str, Timeline], width: int = 1200, row: int = 26) -> str:
    """An SVG with one panel per named timeline, all on one scale. Hovering names the action."""
    left, gap = 70, 34
    scale = (width - left - 10) / (max((t.span for t in timelines.values()), default=0) or 1)
    parts, y = [], 8
    for name, timeline in timelines.items():
        title = f"{name}: span {timeline.span:g}, bubble {timeline.bubble:.1%}"
        parts.append(f'<text x="8" y="{y + 12}" font-weight="bold">{escape(title)}</text>')
        y += 22
        for rank in range(timeline.ranks):
            parts.append(f'<text x="8" y="{y + rank * row + 16}">rank {rank}</text>')
            parts.append(
                f'<rect x="{left}" y="{y + rank * row}" width="{timeline.span * scale:.2f}" '
                f'height="{row - 4}" fill="#eeeeee"/>'
            )
        for event in timeline.events:
            if event.action.op in _COLOUR:
                parts.append(_box(event, timeline, left, y, row, scale))
        y += timeline.ranks * row + gap
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" '
        f'viewBox="0 0 {width} {y}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def chrome_trace(timelines: Mapping[str, Timeline], microseconds: float = 1000.0) -> str:
    """The timelines as Chrome-trace JSON (chrome://tracing, ui.perfetto.dev), each from time 0.

    A timeline is a process and a rank a thread; one unit of time is shown as `microseconds`.
    """
    events: list[dict[str, object]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append(_label(process, 0, "process_name", name))
        events += [
            _label(process, rank, "thread_name", f"rank {rank}") for rank in range(timeline.ranks)
        ]
        for start, end, rank, action in timeline.events:
            events.append(
                {
                    "ph": "X",
                    "name": str(action),
                    "cat": _MEANING.get(action.op.value, action.op.value),
                    "pid": process,
                    "tid": rank,
                    "ts": round((start - timeline.start) * microseconds, 3),
                    "dur": round((end - start) * microseconds, 3),
                    "args": {"stage": action.stage, "microbatch": action.microbatch},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _several_chunks(timeline: Timeline) -> bool:
    return any(t.action.stage >= timeline.ranks for t in timeline.events)


def _label(process: int, thread: int, kind: str, name: str) -> dict[str, object]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _box(event: Timed, timeline: Timeline, left: int, top: int, row: int, scale: float) -> str:
    """One action: a coloured box, paler for later chunks, with its microbatch where it fits."""
    start, end, rank, action = event
    x, wide = left + (start - timeline.start) * scale, (end - start) * scale
    y = top + rank * row
    opacity = max(0.4, 1 - 0.2 * (action.stage // timeline.ranks))
    tip = f"{action} {_MEANING[action.op.value]}, {start - timeline.start:g} to "
    box = (
        f'<g><title>{tip}{end - timeline.start:g}</title><rect x="{x:.2f}" y="{y}" '
        f'width="{wide:.2f}" height="{row - 4}" fill="{_COLOUR[action.op]}" '
        f'fill-opacity="{opacity:g}" stroke="white" stroke-width="0.5"/>'
    )
    text = str(action.microbatch)
    if wide > 7 * len(text) + 2:
        box += f'<text x="{x + wide / 2:.2f}" y="{y + 15}" text-anchor="middle">{text}</text>'
    return box + "</g>"
