"""Transfers, gradient sums, and a check that is shown to bite."""

import random
from collections import Counter

import pytest

from core.pipeline_parallel.actions import TWIN, Action, Op, Plan, ScheduleError
from core.pipeline_parallel.passes import check, forward_only, with_comms, with_grad_sync
from core.pipeline_parallel.schedules import build_plan, gpipe, interleaved, one_f_one_b, zb_h1


def edited(plan, rank, edit):
    rows = [list(row) for row in plan.rows]
    edit(rows[rank])
    return Plan(tuple(map(tuple, rows)), plan.stages, plan.microbatches)


def swapped(plan, rank, one, other):
    def swap(row):
        i, j = row.index(Action.parse(one)), row.index(Action.parse(other))
        row[i], row[j] = row[j], row[i]

    return edited(plan, rank, swap)


def rejected(plan):
    with pytest.raises(ScheduleError) as caught:
        check(plan)
    return str(caught.value)


def with_comms_by_hand(plan):
    """What a programmer writes: receive just before the use, send just after the production."""
    owner = plan.owner
    rows = []
    for rank, row in enumerate(plan.rows):
        out = []
        for a in row:
            forward = a.op is Op.F
            source, target = (a.stage - 1, a.stage + 1) if forward else (a.stage + 1, a.stage - 1)
            send, receive = (Op.SEND_ACT, Op.RECV_ACT) if forward else (Op.SEND_GRAD, Op.RECV_GRAD)
            if a.op is not Op.W and 0 <= source < plan.stages and owner[source] != rank:
                out.append(Action(receive, a.stage, a.microbatch, owner[source]))
            out.append(a)
            if a.op is not Op.W and 0 <= target < plan.stages and owner[target] != rank:
                out.append(Action(send, a.stage, a.microbatch, owner[target]))
        rows.append(tuple(out))
    return Plan(tuple(rows), plan.stages, plan.microbatches)


# ---- with_comms and with_grad_sync --------------------------------------------------------------


def test_both_ends_of_every_transfer_are_there_and_nothing_else():
    plan = with_comms(interleaved(3, 4, 2))
    ends = Counter()
    for rank, row in enumerate(plan.rows):
        for a in row:
            if a.op in TWIN:
                ends["activation" if a.op is Op.SEND_ACT else "gradient", rank, a.peer] += 1
            elif a.peer is not None:
                ends["activation" if a.op is Op.RECV_ACT else "gradient", a.peer, rank] += 1
    # Stages 0 to 5 on ranks 0 1 2 0 1 2: each border is crossed by 4 microbatches, at two ends.
    assert ends == {
        ("activation", 0, 1): 16,
        ("activation", 1, 2): 16,
        ("activation", 2, 0): 8,
        ("gradient", 1, 0): 16,
        ("gradient", 2, 1): 16,
        ("gradient", 0, 2): 8,
    }


def test_stages_on_one_rank_hand_over_without_a_transfer():
    plan = with_comms(Plan.parse("F0@0 F0@1 B0@1 B0@0"))
    assert str(plan) == "F0@0 F0@1 B0@1 B0@0"
    check(plan)


def test_two_ranks_in_a_ring():
    """C040: with two stages and interleaving, previous and next peer are one, so untagged tensors
    pair by order only: all four kinds of transfer on a wire come in one order on both sides."""
    check(with_comms(interleaved(2, 5, 2)))
    plan = with_comms(interleaved(2, 2, 2))
    received = [str(a) for a in plan.rows[1] if a.op in (Op.RECV_ACT, Op.RECV_GRAD)]
    assert received == ["RA0@1~0", "RA1@1~0", "RA0@3~0", "RA1@3~0", "RG0@1~0", "RG1@1~0"]
    wrong = swapped(plan, 1, "RA1@1~0", "RA0@3~0")
    assert "disagree on tensor 1 between them" in rejected(wrong)


def test_gradients_are_marked_before_the_last_backward_of_each_stage():
    plan = with_grad_sync(interleaved(1, 2, 2))
    assert str(plan) == ("F0@0 F0@1 B0@1 F1@0 B0@0 F1@1 ARM@1 B1@1 ARM@0 B1@0 DRAIN@0 DRAIN@1")
    assert with_grad_sync(plan) == plan
    split = with_grad_sync(zb_h1(2, 2))
    assert str(split).splitlines()[1] == "F0@1 I0@1 F1@1 I1@1 W0@1 ARM@1 W1@1 DRAIN@1"


def test_an_evaluation_runs_the_forwards_in_the_same_order():
    plan = build_plan("interleaved", 2, 3, 2)
    forwards = build_plan("interleaved", 2, 3, 2, forward_only=True)
    assert forwards.only(Op.F) == plan.only(Op.F)
    assert {a.op for row in forwards.rows for a in row} == {Op.F, Op.SEND_ACT, Op.RECV_ACT}
    check(forward_only(plan))


# ---- check: what it rejects, and what it says ---------------------------------------------------

PLAN = with_comms(one_f_one_b(4, 6))


def test_a_dropped_receive():
    broken = edited(PLAN, 1, lambda row: row.remove(Action.parse("RA3@1~0")))
    assert rejected(broken) == (
        "pairing: SA3@0~1 has no other end\n"
        "rank 0  ... SA1@0~1 F2@0 SA2@0~1 F3@0 SA3@0~1 RG0@0~1 B0@0 F4@0 SA4@0~1 ...\n"
        "                                      ^ rank 1 has no RA3@1~0"
    )


def test_swapped_sends():
    broken = with_comms(gpipe(2, 2))
    assert str(broken).splitlines()[0] == "F0@0 SA0@0~1 F1@0 SA1@0~1 RG0@0~1 B0@0 RG1@0~1 B1@0"
    broken = swapped(broken, 0, "SA0@0~1", "F1@0")
    broken = swapped(broken, 0, "SA0@0~1", "SA1@0~1")
    assert rejected(broken) == (
        "order: rank 0 and rank 1 disagree on tensor 0 between them\n"
        "rank 1  RA0@1~0 RA1@1~0 F0@1 F1@1 B0@1 ...\n"
        "        ^ rank 0 sends what RA1@1~0 receives"
    )


def test_backward_before_forward():
    assert rejected(swapped(PLAN, 3, "F0@3", "B0@3")) == (
        "order: B0@3 needs F0@3, which comes after it\n"
        "rank 3  RA0@3~2 RA1@3~2 B0@3 F0@3 SG0@3~2 F1@3 RA2@3~2 ...\n"
        "                        ^ F0@3 has to come first"
    )


def test_a_doubled_forward():
    broken = edited(PLAN, 2, lambda row: row.insert(5, Action.parse("F0@2")))
    assert rejected(broken) == (
        "F0@2 comes twice\n"
        "rank 2  ... RA1@2~1 F0@2 SA0@2~3 RA2@2~1 F0@2 F1@2 SA1@2~3 RG0@2~3 B0@2 ...\n"
        "                                         ^ already action 2 of this row, counted from 0"
    )


@pytest.mark.parametrize("order", [one_f_one_b(4, 6), interleaved(2, 4, 2), zb_h1(4, 6)])
def test_transfers_inserted_by_hand_deadlock(order):
    """Why with_comms exists. gpipe alone survives: the insertion itself is not at fault."""
    assert rejected(with_comms_by_hand(order)).startswith("deadlock: ")
    check(with_comms_by_hand(gpipe(4, 6)))


def test_a_deadlock_shows_each_rank_and_what_it_waits_for():
    assert rejected(with_comms_by_hand(interleaved(2, 4, 2))) == (
        "deadlock: 2 of 2 ranks can never go on\n"
        "rank 0  F0@0 SA0@0~1 F1@0 SA1@0~1 RA0@2~1 F0@2 SA0@2~1 RA1@2~1 ...\n"
        "                          ^ waits for rank 1 to reach RA1@1~0\n"
        "rank 1  RA0@1~0 F0@1 SA0@1~0 RA1@1~0 F1@1 SA1@1~0 RA0@3~0 ...\n"
        "                     ^ waits for rank 0 to reach RA0@2~1"
    )


def test_a_compute_order_that_deadlocks():
    assert rejected(Plan.parse("F0@0 B0@0 F1@0 B1@0\nF1@1 F0@1 B0@1 B1@1")) == (
        "deadlock: 2 of 2 ranks can never go on\n"
        "rank 0  F0@0 B0@0 F1@0 B1@0\n"
        "             ^ waits for rank 1 to finish the backward of microbatch 0 on stage 1\n"
        "rank 1  F1@1 F0@1 B0@1 B1@1\n"
        "        ^ waits for rank 0 to finish F1@0"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the plan is empty"),
        ("F0@0 B0@0\nF0@1", "microbatch 0 on stage 1 (rank 1) has F; it needs F0@1 once, and B"),
        ("F0@0 I0@0", "has F and I; it needs F0@0 once, and B once or I and W once"),
        ("F0@0 B0@0 W0@0", "has F and B and W"),
        ("F0@0 F1@0\nF0@1", "microbatch 1 on stage 1 (rank 1) has no action; it needs F1@1 once"),
        ("F0@0 B0@0 F0@2 B0@2", "stage 1, which no rank holds, has no action"),
        ("F0@0 B0@0\nF0@0", "stage 0 is on rank 0 and on rank 1"),
        ("F0@0 W0@0 I0@0", "order: W0@0 needs I0@0, which comes after it"),
        ("F0@0 SA0@0~0\nRA0@1~0 F0@1", "names the wrong rank"),
        ("F0@0 SA0@0~1 SA0@1~2\nRA0@1~0 F0@1", "stage 1 is on rank 0 and on rank 1"),
        ("F0@0 SA0@0~1 RA0@0~1\nRA0@1~0 F0@1", "on stage -1, which is not in the plan"),
        ("SA0@0~1 F0@0\nRA0@1~0 F0@1", "order: SA0@0~1 needs F0@0, which comes after it"),
        ("F0@0 SA0@0~1\nF0@1 RA0@1~0", "order: F0@1 needs RA0@1~0, which comes after it"),
        ("F0@0\nF0@1 B0@1", "microbatch 0 on stage 0 (rank 0) has F"),
        ("F0@0 SA0@0~1 B0@0\nRA0@1~0 F0@1 B0@1", "order: B0@0 needs RG0@0~1, which its row lacks"),
    ],
)
def test_other_plans_that_are_not_whole(text, said):
    assert said in rejected(Plan.parse(text))


def test_a_plan_smaller_than_its_actions():
    rows = Plan.parse("F0@0 B0@0 F1@0 B1@0").rows
    assert "F1@0 is outside the plan" in rejected(Plan(rows, stages=1, microbatches=1))


# ---- check against a second opinion -------------------------------------------------------------


def finishes(plan):
    """The rules once more, by brute force: facts are strings, a transfer needs both heads."""
    rows = [list(row) for row in plan.rows]
    words = Counter(str(a) for row in rows for a in row)
    if max(words.values()) > 1:
        return False
    facts = set()

    def ready(rank, a):
        s, m = a.stage, a.microbatch
        here = lambda kind, stage: f"{kind}{m}@{stage} on {rank}" in facts  # noqa: E731
        if a.op is Op.F:
            return s == 0 or here("act", s - 1)
        return here("act", s) and (s == plan.stages - 1 or here("grad", s + 1))

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if not row:
                continue
            a = row[0]
            if a.op in (Op.F, Op.B) and ready(rank, a):
                kind = "act" if a.op is Op.F else "grad"
                facts.add(f"{kind}{a.microbatch}@{a.stage} on {rank}")
                row.pop(0)
                moved = True
            elif a.op in TWIN:
                kind = "act" if a.op is Op.SEND_ACT else "grad"
                fact = f"{kind}{a.microbatch}@{a.stage} on "
                receive, step = TWIN[a.op]
                wanted = Action(receive, a.stage + step, a.microbatch, rank)
                other = rows[a.peer]
                if fact + str(rank) in facts and other and other[0] == wanted:
                    facts.add(fact + str(a.peer))
                    row.pop(0)
                    other.pop(0)
                    moved = True
    done = sum(a.op in (Op.F, Op.B) for row in plan.rows for a in row)
    return not any(rows) and done == 2 * plan.stages * plan.microbatches


def damaged(plan, chance):
    rows = [list(row) for row in plan.rows]
    row = chance.choice(rows)
    i, j = chance.randrange(len(row)), chance.randrange(len(row))
    kind = chance.choice(["swap neighbours", "swap", "move", "drop", "double"])
    if kind == "swap neighbours":
        j = min(i + 1, len(row) - 1)
    if kind.startswith("swap"):
        row[i], row[j] = row[j], row[i]
    elif kind == "move":
        row.insert(j, row.pop(i))
    elif kind == "drop":
        row.pop(i)
    else:
        row.insert(j, row[i])
    return Plan(tuple(map(tuple, rows)), plan.stages, plan.microbatches)


def test_the_check_agrees_with_brute_force_on_thousands_of_damaged_plans():
    chance = random.Random(4)
    sound = [with_comms(o) for o in (gpipe(3, 3), one_f_one_b(3, 4), interleaved(2, 3, 2))]
    verdicts = Counter()
    for _ in range(2000):
        plan = chance.choice(sound)
        for _ in range(chance.randint(1, 2)):
            plan = damaged(plan, chance)
        try:
            check(plan)
            accepted = True
        except ScheduleError:
            accepted = False
        assert accepted == finishes(plan), str(plan)
        verdicts[accepted] += 1
    assert min(verdicts.values()) > 100  # both verdicts were at stake
