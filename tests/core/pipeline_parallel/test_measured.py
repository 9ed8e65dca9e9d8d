"""Time stamps of a run, read back beside the plan."""

import json

import pytest

from core.pipeline_parallel.actions import Op
from core.pipeline_parallel.measured import measured_costs, parse_measured, read_measured
from core.pipeline_parallel.schedules import build_plan
from core.pipeline_parallel.simulate import Costs, simulate

PLAN = build_plan("1f1b", 3, 4)


def stamped(timeline, begin=100.0, **more):
    return [
        json.dumps({"rank": rank, "action": str(a), "start": begin + s, "end": begin + e} | more)
        for s, e, rank, a in timeline.events
    ]


def test_a_run_as_simulated_has_the_bubble_of_the_plan(tmp_path):
    real = simulate(PLAN, Costs(op={Op.F: 0.25, Op.B: 0.75}, stage=(1, 2, 1)))
    path = tmp_path / "run.jsonl"
    transfer = json.dumps({"rank": 0, "action": "SA0@0~1", "start": 100.25, "end": 100.3})
    path.write_text("\n".join([*stamped(real), transfer, ""]))
    found = read_measured(path, PLAN)
    assert found.start == 100.0
    assert (found.span, found.bubble) == (real.span, real.bubble)
    costs = measured_costs(found)
    assert costs.of(Op.B, 1) == 1.5 and costs.of(Op.W, 0) is None
    assert simulate(PLAN, costs) == real


def test_the_last_complete_step_counts():
    slow, fast = simulate(PLAN, Costs(op={Op.F: 2, Op.B: 4})), simulate(PLAN)
    lines = stamped(slow) + stamped(fast, begin=500.0) + stamped(fast, begin=900.0)[:5]
    assert parse_measured(lines, PLAN).start == 500.0
    # With "step", an evaluation between two steps (forwards only) does not shift the count.
    forwards = [line for line in stamped(slow, 300.0, step="eval") if '"F' in line]
    lines = stamped(slow, step=1) + forwards + stamped(fast, 500.0, step=2)
    assert parse_measured(lines, PLAN).span == fast.span


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "run:2: JSONDecodeError"),
        ("[1]", "run:2: TypeError"),
        ('{"rank": 0, "action": "F0@0", "start": 1}', "run:2: KeyError('end'); a line looks like"),
        ('{"rank": 0, "action": "F0", "start": 1, "end": 2}', "'F0' is not an action"),
        ('{"rank": 0, "action": "F0@0", "start": 3, "end": 2}', "it starts at 3.0 and ends at 2.0"),
        ('{"rank": 1, "action": "F0@0", "start": 1, "end": 2}', "the plan has no F0@0 on rank 1"),
        ('{"rank": 0, "action": "W0@0", "start": 1, "end": 2}', "the plan has no W0@0 on rank 0"),
    ],
)
def test_a_line_that_is_wrong(line, said):
    with pytest.raises(ValueError) as caught:
        parse_measured([stamped(simulate(PLAN))[0], line], PLAN, "run")
    assert said in str(caught.value)


def test_no_complete_step_names_what_is_missing(tmp_path):
    lines = [line for line in stamped(simulate(PLAN)) if '"B3@1"' not in line]
    with pytest.raises(ValueError, match="no step is complete; the last has no B3@1 on rank 1"):
        parse_measured(lines, PLAN)
    with pytest.raises(ValueError, match="no step is complete; the last has no B0@0 on rank 0"):
        parse_measured([], PLAN)
    with pytest.raises(ValueError, match="cannot be read"):
        read_measured(tmp_path / "none", PLAN)
