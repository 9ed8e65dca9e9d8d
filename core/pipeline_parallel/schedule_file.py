"""A schedule that a user wrote: a text file, one row per rank, read with the place of each mistake.

Pure: standard library, `actions` and `passes`. The form:

    # 1F1B on two ranks, two microbatches; rank r holds stages r, r + 2, ...
    F0@0 F1@0 B0@0 B1@0
    F0@1 B0@1 F1@1 B1@1

A word is F, B, I or W, the microbatch, @ and the stage. Empty lines and what follows a # are
skipped. Transfers (SA RA SG RG) may be left out, then they are added; gradient sums (ARM, DRAIN)
are always placed anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from core.pipeline_parallel.actions import Action, Op, Plan, ScheduleError
from core.pipeline_parallel.passes import check


def parse_schedule(text: str, name: str = "schedule") -> Plan:
    """The plan in `text`, unchecked; an error tells line and column of the word it stumbles on."""
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        row = []
        for word in re.finditer(r"\S+", line.split("#")[0]):
            try:
                row.append(Action.parse(word[0]))
            except ValueError as error:
                raise ScheduleError(f"{name}:{number}:{word.start() + 1}: {error}") from None
        if row:
            rows.append(row)
    return Plan.of(rows)


def read_schedule(path: str | Path, pp: int, microbatches: int, chunks: int = 1) -> Plan:
    """The schedule in the file `path`, checked, for exactly these sizes; else ScheduleError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"--pipeline-schedule {path} cannot be read: {error}") from None
    plan = parse_schedule(text, str(path))
    asked = (
        (plan.ranks, pp, "rows", "--pipeline-model-parallel-size"),
        (plan.stages, pp * chunks, "stages", "pipeline-model-parallel-size x virtual stages ="),
        (plan.microbatches, microbatches, "microbatches", "and the run has"),
    )
    for found, wanted, what, flag in asked:
        if found != wanted:
            raise ScheduleError(f"{path} has {found} {what}, {flag} {wanted}; they must be equal")
    for rank, row in enumerate(plan.rows):
        for action in row:
            if action.stage % pp != rank:
                raise ScheduleError(
                    f"{path} has {action} in the row of rank {rank}; stage {action.stage} is on "
                    f"rank {action.stage % pp} of {pp} (stage mod ranks)"
                )
    if not any(action.op in (Op.B, Op.I) for row in plan.rows for action in row):
        raise ScheduleError(f"{path} has forwards only; write B, or I and W, for each F")
    try:
        return check(plan)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
