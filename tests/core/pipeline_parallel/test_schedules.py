"""Every schedule, for all small sizes, against its closed form; the refusals; planning time."""

import itertools
import subprocess
import sys
from collections import Counter

import pytest

from core.pipeline_parallel.actions import COMPUTE, Op, ScheduleError
from core.pipeline_parallel.passes import check, forward_only, with_comms
from core.pipeline_parallel.schedules import (
    build_plan,
    gpipe,
    interleaved,
    one_f_one_b,
    schedule_problems,
    zb_h1,
)
from core.pipeline_parallel.simulate import closed_form, live_activations, simulate

RANKS, MICROBATCHES, CHUNKS = range(1, 9), range(1, 17), range(1, 5)


def all_orders():
    for pp, microbatches in itertools.product(RANKS, MICROBATCHES):
        yield "gpipe", gpipe(pp, microbatches)
        yield "1f1b", one_f_one_b(pp, microbatches)
        yield "zb_h1", zb_h1(pp, microbatches)
        for chunks in CHUNKS:
            yield "interleaved", interleaved(pp, microbatches, chunks)


def test_each_order_has_each_action_once_and_gives_the_closed_form():
    for name, plan in all_orders():
        p, m, v = plan.ranks, plan.microbatches, plan.chunks
        ops = (Op.F, Op.I, Op.W) if name == "zb_h1" else (Op.F, Op.B)
        for rank, row in enumerate(plan.rows):
            wanted = itertools.product(ops, range(rank, p * v, p), range(m))
            assert Counter((a.op, a.stage, a.microbatch) for a in row) == Counter(wanted)
        timeline, form = simulate(plan), closed_form(name, p, m, v)
        found = (timeline.span, pytest.approx(timeline.bubble), live_activations(plan))
        assert tuple(form) == found, (name, p, m, v)


def test_the_closed_forms_are_those_of_the_papers():
    """closed_form() covers more than the published formulas; where these hold, they agree."""
    for p, m, v in itertools.product(RANKS, MICROBATCHES, CHUNKS):
        simple = (p - 1) / (m + p - 1)
        assert closed_form("gpipe", p, m).bubble == pytest.approx(simple)
        assert closed_form("1f1b", p, m).bubble == pytest.approx(simple)
        assert closed_form("1f1b", p, m).live == tuple(min(p - r, m) for r in range(p))
        if m >= p:
            several = closed_form("interleaved", p, m, v)
            assert several.bubble == pytest.approx((p - 1) / (v * m + p - 1))
            zero = closed_form("zb_h1", p, m)
            assert zero.span == 3 * m + (p - 1)
            assert max(zero.live) <= p
        if m % p == 0:
            live = tuple(min(2 * (p - 1 - r) + (v - 1) * p + 1, v * m) for r in range(p))
            assert several.live == live
    assert closed_form("my_schedule.txt", 2, 2) is None


def test_every_plan_finishes_under_blocking_sends_and_keeps_its_order():
    """C044: hand-written interleaving has points where transfers cross; a plan is proved first."""
    for _, order in all_orders():
        plan = with_comms(order)
        check(plan)
        assert plan.only(*COMPUTE).rows == order.rows
        check(forward_only(plan))


def test_interleaving_any_number_of_microbatches():
    """C037: others refuse, or deadlock on, microbatches that are not a multiple of pp."""
    for pp, microbatches, chunks in ((2, 3, 2), (4, 5, 4), (8, 9, 4), (4, 23, 3), (5, 2, 3)):
        plan = build_plan("interleaved", pp, microbatches, chunks)
        assert simulate(plan).span == closed_form("interleaved", pp, microbatches, chunks).span


def test_fewer_microbatches_than_ranks():
    """C036: training hung when there were fewer microbatches than stages."""
    for schedule in ("gpipe", "1f1b", "zb_h1"):
        for microbatches in (1, 2, 3):
            check(build_plan(schedule, 4, microbatches))


def test_one_rank_is_a_plan_of_one_row():
    assert str(build_plan("1f1b", 1, 2)) == "F0@0 B0@0 F1@0 ARM@0 B1@0 DRAIN@0"
    assert str(build_plan("gpipe", 1, 2)) == "F0@0 F1@0 B0@0 ARM@0 B1@0 DRAIN@0"
    assert str(build_plan("zb_h1", 1, 2)) == "F0@0 I0@0 W0@0 F1@0 I1@0 ARM@0 W1@0 DRAIN@0"
    assert str(build_plan(None, 1, 2, forward_only=True)) == "F0@0 F1@0"


def test_the_default_schedule():
    assert build_plan(None, 2, 4) == build_plan("1f1b", 2, 4)
    assert build_plan(None, 2, 4, 2) == build_plan("interleaved", 2, 4, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1f1b", 1, 4, 2), "--num-virtual-stages-per-pipeline-rank 2 needs --pipeline-model-"),
        (("1f1b", 2, 4, 2), "use --pipeline-schedule interleaved"),
        (("interleaved", 2, 4, 1), "which is 1; use --pipeline-schedule 1f1b"),
        (("zbh1", 2, 4, 1), "use gpipe, 1f1b, interleaved, zb_h1 or the path of a schedule file"),
        (("1f1b", 2, 0, 1), "0 microbatches and 1 virtual stages per rank: each must be 1 or more"),
        ((None, 0, 4, 1), "a pipeline of 0 ranks"),
    ],
)
def test_refusals_name_the_flag_and_the_way_out(arguments, said):
    (problem,) = schedule_problems(*arguments)
    assert said in problem
    with pytest.raises(ScheduleError) as caught:
        build_plan(*arguments)
    assert said in str(caught.value)


def test_all_problems_are_told_at_once():
    assert len(list(schedule_problems("zbh1", 1, 4, 2))) == 2
    assert not list(schedule_problems("interleaved", 2, 3, 2))


def test_planning_a_large_pipeline_takes_seconds_of_cpu_at_most():
    """16 ranks x 256 microbatches x 8 chunks: 65,536 actions, then 130,048 transfers, checked.

    It takes about one; the limit is that of a much slower machine, and the best of ten counts.
    """
    code = (
        "import time\n"
        "from core.pipeline_parallel.schedules import build_plan\n"
        "spent = []\n"
        "while len(spent) < 10 and min(spent, default=4.0) >= 4.0:\n"
        "    start = time.process_time()\n"
        "    plan = build_plan('interleaved', 16, 256, 8)\n"
        "    spent.append(time.process_time() - start)\n"
        "print(min(spent), sum(map(len, plan.rows)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, actions = done.stdout.split()
    assert int(actions) == 65_536 + 2 * 2 * 127 * 256 + 2 * 128
    assert float(seconds) < 4.0
