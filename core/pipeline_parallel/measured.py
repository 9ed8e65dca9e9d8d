"""What a real run did: the executor's time stamps, written and read back to compare with the plan.

Pure: standard library, `actions` and `simulate`. One JSON object per line and action:

    {"step": 1, "rank": 0, "action": "F0@0", "start": 12.0, "end": 12.5}

`rank` is the pipeline rank, times are seconds on one clock. A file may hold several steps: told
apart by "step" where it is given, otherwise by an action coming again on the same rank.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from core.pipeline_parallel.actions import COMPUTE, Action, Op, Plan
from core.pipeline_parallel.simulate import Costs, Timed, Timeline


class PipelineLog:
    """Writes what one rank does to a file that all ranks of a pipeline append to.

    Lines leave in one write at the end of a step, so that those of several ranks do not mix. Times
    are the system's clock, read once and carried on by a clock that never goes back.
    """

    def __init__(self, path: str | Path, rank: int) -> None:
        self.path, self.rank = Path(path), rank
        self._offset = time.time() - time.perf_counter()
        self._lines: list[dict[str, object]] = []

    def now(self) -> float:
        return self._offset + time.perf_counter()

    def add(self, action: Action, start: float, end: float) -> None:
        times = {"start": round(start, 6), "end": round(end, 6)}
        self._lines.append({"rank": self.rank, "action": str(action), **times})

    def write(self, step: int) -> None:
        text = "".join(json.dumps({"step": step, **line}) + "\n" for line in self._lines)
        self._lines.clear()
        with self.path.open("ab", buffering=0) as file:
            file.write(text.encode())


def read_measured(path: str | Path, plan: Plan) -> Timeline:
    """The last complete step of `plan` in the file; ValueError tells the line that is wrong."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the file cannot be read: {error}") from None
    return parse_measured(lines, plan, str(path))


def parse_measured(lines: Iterable[str], plan: Plan, name: str = "measured") -> Timeline:
    wanted = {
        (rank, action) for rank, row in enumerate(plan.rows) for action in row if _computes(action)
    }
    steps: dict[object, dict[tuple[int, Action], Timed]] = defaultdict(dict)
    times_seen: dict[tuple[int, Action], int] = defaultdict(int)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            step, timed = _parse_line(line)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{name}:{number}: {error!r}; a line looks like "
                '{"rank": 0, "action": "F0@0", "start": 0.0, "end": 0.5}'
            ) from None
        if not _computes(timed.action):
            continue
        key = timed.rank, timed.action
        if key not in wanted:
            raise ValueError(
                f"{name}:{number}: the plan has no {timed.action} on rank {timed.rank}"
            )
        if step is None:
            step = times_seen[key]
            times_seen[key] += 1
        steps[step][key] = timed
    complete = [done for done in steps.values() if len(done) == len(wanted)]
    if not complete:
        done = list(steps.values())[-1] if steps else {}
        rank, action = min(wanted - done.keys(), key=lambda k: (k[0], str(k[1])))
        raise ValueError(f"{name}: no step is complete; the last has no {action} on rank {rank}")
    events = sorted(complete[-1].values(), key=lambda t: (t.end, t.rank))
    return Timeline(plan.ranks, tuple(events))


def measured_costs(timeline: Timeline) -> Costs:
    """The mean time of each op on each stage; simulated, it gives the bubble the plan allows."""
    times: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for start, end, _, action in timeline.events:
        times[action.op, action.stage].append(end - start)
    return Costs(op={}, exact={key: sum(spent) / len(spent) for key, spent in times.items()})


def _computes(action: Action) -> bool:
    return action.op in COMPUTE


def _parse_line(line: str) -> tuple[object, Timed]:
    found = json.loads(line)
    start, end = float(found["start"]), float(found["end"])
    if not start <= end:
        raise ValueError(f"it starts at {start} and ends at {end}")
    timed = Timed(start, end, int(found["rank"]), Action.parse(found["action"]))
    return found.get("step"), timed
