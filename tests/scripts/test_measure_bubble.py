"""The verdict on measured bubbles, and one schedule on real ranks that sleep. That an executor's
order has its plan's bubble exactly is in tests/core/pipeline_parallel/test_executed_bubble.py."""

import math

import pytest

from scripts import measure_bubble
from scripts.measure_bubble import Row, best_of, bubbles, main, verdict


def rows(*ratios: float, schedule: str = "1f1b", chunks: int = 1) -> list[Row]:
    return [Row(schedule, chunks, 0.3, 0.2 * ratio, 0.2) for ratio in ratios]


BUSY, QUIET = rows(1.4, 1.2), rows(1.4, 1.2, 1.04)
FOUR = rows(1.06, schedule="interleaved", chunks=4)


@pytest.mark.parametrize(
    ("measured", "code"),
    [
        (rows(1.0), 0),
        (rows(1.049), 0),
        (rows(1.051), 1),
        (rows(0.951), 0),
        (rows(0.949), 1),  # less than the plan allows: something was not measured
        (rows(math.nan), 1),
        (BUSY, 1),
        (QUIET, 0),  # the best round counts
        (QUIET + FOUR, 1),  # each schedule by itself, and by its chunks
        (FOUR + rows(1.0, schedule="interleaved", chunks=2), 1),
        (FOUR + rows(1.0, schedule="interleaved", chunks=4), 0),
        ([], 1),
    ],
)
def test_the_verdict(measured, code):
    assert verdict(measured) == code


def test_the_best_round_of_each_schedule():
    assert best_of([*BUSY, *FOUR, *QUIET]) == [QUIET[-1], *FOUR]


@pytest.mark.parametrize(
    ("found", "rounds", "code", "said"),
    [
        ([0.28], 1, 0, "best of up to 3 rounds; 1 of 1 schedules hold"),
        ([0.5, 0.28], 2, 0, "1 of 1 schedules hold"),
        ([0.5, 0.4, 0.45], 3, 1, "0 of 1 schedules hold, missed by 1f1b x 1"),
    ],
)
def test_a_schedule_that_misses_is_measured_again_with_longer_sleeps(
    monkeypatch, capsys, found, rounds, code, said
):
    told, units = iter(found), []

    def bubbles(pool, schedule, pp, microbatches, chunks, unit):
        units.append(unit)
        return next(told), 3 / 11

    monkeypatch.setattr(measure_bubble, "bubbles", bubbles)
    assert main(["--schedule", "1f1b"]) == code
    out = capsys.readouterr().out
    assert out.count("\n1f1b ") == rounds
    assert "bar: a bubble within 5% of the plan's" in out and said in out
    assert out.count("MISSES") == rounds - 1 + code
    assert ("a longer --unit than 0.3 or more --rounds than 3" in out) == (code == 1)
    assert units == pytest.approx([0.3, 0.6, 0.9][:rounds])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--pp", "1"), "--pp 1: one rank has no bubble; use 2 or more"),
        (("--microbatches", "0"), "--microbatches 0: use 1 or more"),
        (("--rounds", "0"), "--rounds 0: use 1 or more"),
        (("--unit", "0"), "--unit 0: use seconds above 0, such as 0.3"),
        (("--unit", "nan"), "--unit nan: use seconds above 0, such as 0.3"),
    ],
)
def test_bad_input(capsys, arguments, said):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_measured_bubble_is_near_the_plans(ranks):
    """Loosely, and again with longer sleeps while the machine is too busy for shorter ones."""
    for unit in (0.02, 0.06, 0.2, 0.2):
        found, planned = bubbles(ranks, "interleaved", 4, 8, 4, unit)
        if planned / 2 < found < planned + 0.1:
            return
    raise AssertionError(f"{found:.3f} measured, {planned:.3f} planned")
