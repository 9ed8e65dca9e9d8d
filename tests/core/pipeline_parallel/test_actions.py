"""The text form of schedules."""

import pytest

from core.pipeline_parallel.actions import Action, Op, Plan, picture


def test_every_op_prints_and_parses_back():
    for op in Op:
        peer = 7 if op.value in ("SA", "RA", "SG", "RG") else None
        microbatch = 0 if op in (Op.ARM, Op.DRAIN) else 12
        action = Action(op, 3, microbatch, peer)
        assert Action.parse(str(action)) == action
    assert str(Action(Op.RECV_GRAD, 3, 12, 7)) == "RG12@3~7"
    assert str(Action(Op.DRAIN, 3)) == "DRAIN@3"


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("F0", "is not an action; write F, B, I or W, the microbatch, @ and the stage"),
        ("X0@0", "'X0@0' is not an action"),
        ("F-1@0", "is not an action"),
        ("f0@0", "is not an action"),
        ("ARM0@1", "is not an action"),
        ("SA0@0", "'SA0@0': SA needs ~ and the other rank"),
        ("F0@0~1", "'F0@0~1': F takes no ~rank"),
        ("", "'' is not an action"),
    ],
)
def test_a_word_that_is_no_action(word, complaint):
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(")):
        Action.parse(word)


def test_a_plan_prints_and_parses_back():
    text = "F0@0 SA0@0~1 RG0@0~1 ARM@0 B0@0 DRAIN@0\nRA0@1~0 F0@1 ARM@1 B0@1 SG0@1~0 DRAIN@1"
    plan = Plan.parse(text)
    assert str(plan) == text
    assert (plan.ranks, plan.stages, plan.microbatches, plan.chunks) == (2, 2, 1, 1)
    assert plan.owner == (0, 1)
    assert plan.has_comms
    assert plan.row(1)[1] == Action(Op.F, 1, 0)
    compute = plan.only(Op.F, Op.B)
    assert str(compute) == "F0@0 B0@0\nF0@1 B0@1"
    assert not compute.has_comms


def test_the_picture_shows_a_window_with_an_arrow_under_the_action():
    plan = Plan.parse(" ".join(f"F{m}@0" for m in range(12)))
    assert picture(plan, {0: (6, "here")}, around=2) == (
        "rank 0  ... F4@0 F5@0 F6@0 F7@0 F8@0 ...\n                      ^ here"
    )
