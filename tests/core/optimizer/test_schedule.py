"""Schedules against tables worked out by hand from Megatron-LM's formulas."""

import json
import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.optimizer.schedule import (
    LR_STYLES,
    WSD_STYLES,
    LearningRate,
    Schedule,
    WeightDecay,
    problems,
    resume,
)

HALF = math.sqrt(0.5)

# peak 8, floor 2, warm-up of 4 samples from 4, horizon 12: {consumed: rate}
RATES = {
    "constant": {0: 4, 1: 5, 4: 8, 5: 8, 12: 8, 13: 8, 10**12: 8},
    "linear": {0: 4, 2: 6, 4: 8, 5: 7.25, 8: 5, 10: 3.5, 12: 2, 13: 2, 10**12: 2},
    "cosine": {0: 4, 4: 8, 6: 5 + 3 * HALF, 8: 5, 10: 5 - 3 * HALF, 12: 2, 13: 2},
    "inverse-square-root": {3: 7, 4: 8, 5: 8 * math.sqrt(4 / 5), 9: 16 / 3, 12: 8 / 3**0.5, 13: 2},
    # tail of 4 samples, so it starts at 8
    "WSD-exponential": {4: 8, 8: 8, 9: 12 * 0.5**0.25 - 4, 10: 12 * HALF - 4, 12: 2, 13: 2},
    "WSD-linear": {3: 7, 5: 8, 8: 8, 9: 6.5, 10: 5, 11: 3.5, 12: 2, 13: 2},
    "WSD-cosine": {8: 8, 9: 5 + 3 * HALF, 10: 5, 11: 5 - 3 * HALF, 12: 2, 13: 2},
    "WSD-minus_sqrt": {8: 8, 9: 5, 10: 8 - 6 * HALF, 12: 2, 13: 2},
}


@pytest.mark.parametrize("name", RATES)
def test_learning_rate_table(name):
    style, _, tail = name.partition("-") if name.startswith("WSD") else (name, "", "")
    rate = LearningRate(8.0, 12, style, floor=2.0, warmup_samples=4, warmup_init=4.0)
    if tail:
        rate = replace(rate, wsd_samples=4, wsd_style=tail)
    assert list(rate.problems()) == []
    assert {n: rate.at(n) for n in RATES[name]} == pytest.approx(RATES[name], rel=1e-14)


def test_inverse_square_root_without_warm_up_stops_at_the_floor():
    rate = LearningRate(6.0, 1000, "inverse-square-root", floor=0.5)
    assert [rate.at(n) for n in (0, 1, 4, 9, 144, 145, 999, 1001)] == pytest.approx(
        [6, 6, 3, 2, 0.5, 0.5, 0.5, 0.5], rel=1e-14
    )


@pytest.mark.parametrize(
    ("style", "table"),
    [
        ("linear", {0: 0.25, 2: 0.375, 4: 0.5, 8: 0.75, 9: 0.75}),
        ("cosine", {0: 0.25, 2: 0.5 - 0.25 * HALF, 4: 0.5, 6: 0.5 + 0.25 * HALF, 8: 0.75, 9: 0.75}),
    ],
)
def test_weight_decay_table(style, table):
    decay = WeightDecay(0.25, 0.75, 8, style)
    assert list(decay.problems()) == []
    assert {n: decay.at(n) for n in table} == pytest.approx(table, rel=1e-14)


def test_constant_weight_decay():
    assert [WeightDecay(0.1, 0.1, 0).at(n) for n in (0, 7)] == [0.1, 0.1]


@settings(deadline=None)
@given(
    style=st.sampled_from(LR_STYLES),
    tail=st.sampled_from(WSD_STYLES),
    lengths=st.lists(st.integers(0, 10**9), min_size=3, max_size=3),
    consumed=st.integers(0, 3 * 10**9),
)
def test_rate_stays_between_its_bounds_and_falls_after_warm_up(style, tail, lengths, consumed):
    warmup, wsd, more = lengths
    wsd_samples = wsd + 1 if style == "WSD" else None
    rate = LearningRate(
        1.0, warmup + wsd + more + 1, style, 0.25, warmup, 0.0, wsd_samples, tail
    )
    assert list(rate.problems()) == []
    now, later = rate.at(consumed), rate.at(consumed + 1)
    assert 0.0 <= now <= 1.0
    if consumed > warmup:
        assert 0.25 <= later <= now


@dataclass
class Flags:
    """The schedule fields of OptimizerConfig."""

    lr: float = 1e-3
    min_lr: float = 1e-4
    lr_decay_style: str = "cosine"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_fraction: float | None = None
    lr_warmup_iters: int = 0
    lr_warmup_samples: int = 0
    lr_warmup_init: float = 0.0
    lr_wsd_decay_style: str = "exponential"
    lr_wsd_decay_iters: int | None = None
    lr_wsd_decay_samples: int | None = None
    weight_decay: float = 0.01
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    weight_decay_incr_style: str = "constant"


SIZES = {"train_samples": 160, "global_batch_size": 16}


def test_iterations_become_samples():
    given = Schedule.of(Flags(lr_decay_iters=8, lr_warmup_iters=2), **SIZES)
    assert (given.learning_rate.decay_samples, given.learning_rate.warmup_samples) == (128, 32)
    given = Schedule.of(Flags(lr_decay_samples=100, lr_warmup_samples=3), **SIZES)
    assert (given.learning_rate.decay_samples, given.learning_rate.warmup_samples) == (100, 3)
    given = Schedule.of(Flags(lr_warmup_fraction=0.1), **SIZES)
    assert (given.learning_rate.decay_samples, given.learning_rate.warmup_samples) == (160, 16)


def test_wsd_by_iterations():
    """C108: 2 warm-up, 4 stable and 4 decay iterations; the column is the formula, resumed too."""
    flags = Flags(lr_decay_style="WSD", lr_warmup_iters=2, lr_wsd_decay_iters=4, min_lr=0.0)
    schedule = Schedule.of(flags, **SIZES)
    tail = [1e-3 * (2 * 0.5 ** (k / 4) - 1) for k in range(5)]
    column = [schedule.at(16 * k).learning_rate for k in range(11)]
    assert column == pytest.approx([0, 5e-4, *[1e-3] * 4, *tail], rel=1e-12)
    resumed = Schedule.from_json(json.loads(json.dumps(schedule.to_json())))
    assert resumed == schedule
    assert [resumed.at(16 * k).learning_rate for k in range(11)] == column


def test_weight_decay_flags():
    assert Schedule.of(Flags(), **SIZES).at(50).weight_decay == 0.01
    flags = Flags(weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=0.1)
    assert Schedule.of(flags, **SIZES).at(80).weight_decay == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (Flags(lr_decay_style="exp"), "exp is not known; use constant, linear, cosine,"),
        (Flags(min_lr=2e-3), "--min-lr 0.002 is outside 0 to --lr 0.001"),
        (Flags(lr_warmup_init=1.0), "--lr-warmup-init 1 is outside 0 to --lr 0.001"),
        (Flags(lr_warmup_iters=10), "warm-up of 160 samples does not end before the decay"),
        (Flags(lr_decay_style="WSD"), "needs the length of its tail"),
        (Flags(lr_wsd_decay_iters=4), "--lr-wsd-decay-iters needs --lr-decay-style WSD"),
        (
            Flags(lr_decay_style="WSD", lr_wsd_decay_iters=9, lr_warmup_iters=2),
            "a WSD tail of 144 samples (--lr-wsd-decay-iters) is outside 1 to 128",
        ),
        (
            Flags(lr_decay_style="WSD", lr_wsd_decay_iters=2, lr_wsd_decay_style="slow"),
            "slow is not known; use exponential, linear, cosine or minus_sqrt",
        ),
        (Flags(lr_decay_iters=3, lr_decay_samples=30), "--lr-decay-samples say the same thing"),
        (Flags(lr_warmup_fraction=0.1, lr_warmup_iters=1), "exclude each other"),
        (Flags(lr_warmup_fraction=1.0), "--lr-warmup-fraction 1 is not a share"),
        (Flags(start_weight_decay=0.1), "need --weight-decay-incr-style linear or cosine"),
        (Flags(weight_decay_incr_style="linear"), "linear needs both"),
        (
            Flags(weight_decay_incr_style="linear", start_weight_decay=0.2, end_weight_decay=0.1),
            "--start-weight-decay 0.2 is outside 0 to --end-weight-decay 0.1",
        ),
    ],
)
def test_bad_flags_are_named(flags, said):
    (sentence,) = problems(flags, **SIZES)
    assert said in sentence


def test_all_problems_are_told_at_once():
    assert len(list(problems(Flags(min_lr=1.0, lr_warmup_init=1.0), **SIZES))) == 2


def test_resume_takes_all_of_one_schedule():
    """C079 (Megatron-LM#1138): an override mixed old and new limits, so the rate hardly changed."""
    saved = Schedule.of(Flags(lr=6e-4, min_lr=0.0, lr_decay_style="constant"), **SIZES)
    given = Schedule.of(Flags(lr=1e-4, min_lr=1e-5), **SIZES)
    chosen, lines = resume(given, saved, override=True)
    assert chosen == given
    assert lines[1:] == [
        "learning rate peak: 0.0001, 0.0006",
        "learning rate style: 'cosine', 'constant'",
        "learning rate floor: 1e-05, 0.0",
    ]
    assert "the command line wins" in lines[0]
    chosen, lines = resume(given, saved, override=False)
    assert chosen == saved
    assert "the checkpoint wins; --override-opt-param-scheduler" in lines[0]
    assert resume(given, given, override=False) == (given, [])
