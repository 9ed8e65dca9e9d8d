"""Simulated time: by hand for small plans, by longest paths for random costs."""

import random
from itertools import pairwise

import pytest

from core.pipeline_parallel.actions import COMPUTE, Op, Plan
from core.pipeline_parallel.passes import with_comms
from core.pipeline_parallel.schedules import gpipe, interleaved, one_f_one_b, zb_h1
from core.pipeline_parallel.simulate import UNIT, Costs, Stuck, live_activations, simulate

ORDERS = [gpipe(3, 4), one_f_one_b(4, 6), interleaved(2, 5, 3), zb_h1(3, 5)]


def times(plan, costs=None, **options):
    events = simulate(plan, costs, **options).events
    return {str(t.action): (t.start, t.end) for t in events if t.action.op in COMPUTE}


def test_two_ranks_by_hand():
    plan = Plan.parse("F0@0 F1@0 B0@0 B1@0\nF0@1 B0@1 F1@1 B1@1")
    timeline = simulate(plan)
    assert times(plan) == {
        "F0@0": (0, 1),
        "F1@0": (1, 2),
        "F0@1": (1, 2),
        "B0@1": (2, 4),
        "F1@1": (4, 5),
        "B0@0": (4, 6),
        "B1@1": (5, 7),
        "B1@0": (7, 9),
    }
    assert [str(t.action) for t in timeline.events[:3]] == ["F0@0", "F1@0", "F0@1"]
    assert (timeline.span, timeline.busy, timeline.bubble) == (9, (6, 6), 1 - 12 / 18)
    assert live_activations(plan) == (2, 1)


def test_costs_per_op_per_stage_exact_and_link():
    plan = Plan.parse("F0@0 B0@0\nF0@1 B0@1")
    costs = Costs(op={Op.F: 2, Op.B: 3}, stage=(1, 10), exact={(Op.B, 1): 7}, link=0.5)
    assert times(plan, costs) == {
        "F0@0": (0, 2),
        "F0@1": (2.5, 22.5),
        "B0@1": (22.5, 29.5),
        "B0@0": (30, 33),
    }
    with pytest.raises(ValueError, match="the costs say nothing about B on stage 1"):
        simulate(plan, Costs(op={Op.F: 1}))


def test_a_receive_posted_late_delays_the_transfer_and_a_blocking_send_delays_its_rank():
    plan = Plan.parse("F0@0 SA0@0~1 F1@0 SA1@0~1\nRA0@1~0 F0@1 RA1@1~0 F1@1")
    costs = Costs(op={Op.F: 1}, stage=(1, 5), link=1)
    assert times(plan, costs)["F1@1"] == (8, 13)  # posted at 7, one unit on its way
    assert times(plan, costs)["F1@0"] == (1, 2)
    # Blocking, rank 0 is free again only when F0 has arrived.
    assert times(plan, costs, blocking=True)["F1@0"] == (2, 3)


@pytest.mark.parametrize("order", ORDERS)
def test_transfers_change_no_time_under_the_costs_they_were_placed_with(order):
    assert times(with_comms(order)) == times(order)


def longest_paths(plan, costs):
    """End of each action, relaxed until nothing changes: row order and data are the only edges."""
    end = {a: 0.0 for row in plan.rows for a in row}
    before = {a: [] for a in end}
    owner = plan.owner
    for row in plan.rows:
        for one, following in pairwise(row):
            before[following].append((one, 0.0))
    for a in end:
        for b in end:
            if a.microbatch != b.microbatch:
                continue
            link = costs.link if owner[a.stage] != owner[b.stage] else 0.0
            forward = a.op is b.op is Op.F and a.stage + 1 == b.stage
            turn = a.op is Op.F and b.op in (Op.B, Op.I) and a.stage == b.stage
            back = a.op in (Op.B, Op.I) and b.op in (Op.B, Op.I) and a.stage == b.stage + 1
            if forward or turn or back:
                before[b].append((a, link))
    for _ in end:
        for a, sources in before.items():
            end[a] = costs.of(a.op, a.stage) + max((end[b] + x for b, x in sources), default=0.0)
    return end


@pytest.mark.parametrize("order", ORDERS)
def test_the_replay_equals_longest_paths_for_random_costs(order):
    chance = random.Random(order.stages)
    for _ in range(3):
        op = {op: chance.uniform(0.5, 3) for op in COMPUTE}
        stage = [chance.uniform(0.5, 2) for _ in range(order.stages)]
        costs = Costs(op=op, stage=stage, link=chance.uniform(0, 1))
        found = {t.action: t.end for t in simulate(order, costs).events}
        assert found == pytest.approx(longest_paths(order, costs))
        assert simulate(with_comms(order), costs).span >= max(found.values()) - 1e-9


def test_uneven_stages_slow_the_pipeline_to_the_slowest():
    even, uneven = Costs(), Costs(stage=(1, 1, 2, 1))
    plan = one_f_one_b(4, 32)
    assert simulate(plan, even).span == 3 * 35
    # Stage 2 is reached at 2, waits 1 for its first gradient, never again, and B31 goes back in 4.
    assert simulate(plan, uneven).span == 2 + 1 + 32 * 6 + 4
    assert simulate(plan, uneven).bubble > simulate(plan, even).bubble


def test_blocking_transfers_finish_and_are_never_faster():
    for order in ORDERS:
        plan, costs = with_comms(order), Costs(link=0.25)
        assert simulate(plan, costs, blocking=True).span >= simulate(plan, costs).span


def test_a_plan_that_cannot_finish_says_where_each_rank_stands():
    with pytest.raises(Stuck) as caught:
        simulate(Plan.parse("F0@0 B0@0\nB0@1 F0@1"))
    assert caught.value.at == (1, 0)
    assert caught.value.why == {
        0: "rank 1 to finish the backward of microbatch 0 on stage 1",
        1: "rank 1 to finish F0@1",
    }


def test_live_activations_last_until_the_weight_gradient():
    assert live_activations(Plan.parse("F0@0 I0@0 F1@0 I1@0 W0@0 W1@0")) == (2,)
    assert live_activations(gpipe(2, 5)) == (5, 5)


def test_nothing_takes_no_time():
    timeline = simulate(Plan.of([[], []]))
    assert (timeline.span, timeline.bubble, timeline.busy) == (0, 0, (0, 0))
    assert UNIT[Op.B] == UNIT[Op.I] + UNIT[Op.W]


def test_a_send_waits_for_what_it_sends():
    with pytest.raises(Stuck) as caught:
        simulate(Plan.parse("SA0@0~1 F0@0\nRA0@1~0 F0@1"))
    assert caught.value.why == {0: "rank 0 to finish F0@0", 1: "rank 0 to reach SA0@0~1"}
