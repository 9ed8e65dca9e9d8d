"""How far a run will get before its time is over: said when it is known, and when it changes."""

import re
import time
from unittest import mock

import pytest

from core.comm import Group
from core.forecast import Forecast
from tests import recipe
from tests.recipe import run_recipe


class Run:
    """Steps on a clock of its own; `said` is (step that was to begin, line)."""

    def __init__(self, last: int, seconds: float | None, done: int = 0) -> None:
        self.now, self.step, self.said = 1000.0, done, []
        end = None if seconds is None else (1000.0 + seconds, "the limit")
        self.told: list[int] = []
        self.forecast = Forecast(
            lambda line: self.said.append((self.step, line)),
            self.told.append,
            last=last,
            ends=lambda: end,
            then=lambda why: f"{why} it is",
            clock=lambda: self.now,
        )

    def make(self, steps: int, seconds: float) -> list[tuple[int, str]]:
        """What is said before and between so many more steps."""
        before = len(self.said)
        for _ in range(steps):
            self.step += 1
            self.forecast.at_step(self.step)
            self.now += seconds
        return self.said[before:]


def test_a_run_that_does_not_fit_is_told_how_far_it_gets() -> None:
    run = Run(last=5000, seconds=3557.0, done=100)
    run.make(1, 35.0)  # the first step is slow, and is not counted
    # ten steps of 3.2 s later 3,490 s are left, for 1,090 steps
    assert run.make(30, 3.2) == [
        (112, "at 3.2 s a step the limit ends this run at about iteration 1,201 of 5,000: "
         "the limit it is"),
    ]  # fmt: skip
    assert run.told == list(range(101, 132))


def test_a_run_that_fits_is_told_so_once() -> None:
    run = Run(last=1000, seconds=7200.0)
    assert run.make(1000, 2.0) == [
        (12, "at 2 s a step the remaining 989 iterations take 32:58; the limit leaves 1:59:38"),
    ]


@pytest.mark.parametrize("limit", [None, 1e9])
def test_a_short_run_and_one_without_a_limit_hear_nothing(limit) -> None:
    assert Run(last=11, seconds=limit).make(11, 1.0) == []
    assert Run(last=100, seconds=None).make(100, 1.0) == []


def test_steps_of_half_a_minute_are_not_waited_for() -> None:
    ((step, line),) = Run(last=100, seconds=1000.0).make(9, 30.0)
    assert step == 4 and line.startswith("at 30 s a step the limit ends this run at about iter")


def test_another_pace_is_told_and_a_little_noise_is_not() -> None:
    run = Run(last=10_000, seconds=10_000.0)
    (first,) = run.make(12, 2.0)
    assert re.search(r"iteration 5,000 of", first[1])
    assert run.make(12, 2.1) == []
    faster = run.make(100, 1.0)  # evaluations are over, or the batch is smaller
    assert [step for step, _ in faster] == [42, 82]
    assert re.search(r"at 1.3 s a step .* iteration 7,677 of", faster[1][1])
    last = run.make(2_000, 0.5)[-1]  # now it fits
    assert "the remaining" in last[1]
    assert len(run.said) < 8  # each after twice as many steps


# ---- from the flags ---------------------------------------------------------------------------


def line_of(*flags: object, stops_at: float | None = None, afterwards: str = "") -> list[str]:
    """The forecasts that a real run prints; its steps are too fast for the clock to matter."""
    world = recipe.StandInWorld
    with (
        mock.patch.object(world, "stops_at", lambda _: stops_at),
        mock.patch.object(world, "afterwards", lambda _: afterwards),
    ):
        code, out = run_recipe(Group.single("world"), *flags)
    assert code == 0
    return [line.partition(" s a step ")[2] for line in out.splitlines() if " s a step " in line]


def test_what_a_real_run_says(tmp_path) -> None:
    soon, late = time.time() - 5, time.time() + 86_400  # the stand-in world itself never stops
    steps = ("--train-iters", 13)
    save = ("--save", tmp_path / "run")
    ends = "the job's time limit ends this run at about iteration 11 of 13: "
    assert line_of(*steps, stops_at=soon) == [f"{ends}without --save nothing of it is kept"]
    assert line_of(*steps, *save, stops_at=soon, afterwards="the job is requeued") == [
        f"{ends}it saves and stops there, and the job is requeued"
    ]
    assert line_of(*steps, "--save", tmp_path / "other", stops_at=soon) == [
        f"{ends}it saves and stops there (scripts/submit.py would have it requeued)"
    ]
    (fits,) = line_of(*steps, stops_at=late)
    assert re.match(
        r"the remaining 2 iterations take 0:\d\d; the job's time limit leaves 23:", fits
    )
    (sooner,) = line_of(*steps, "--exit-duration-in-mins", 30, stops_at=late)
    assert re.search(r"--exit-duration-in-mins 30 leaves (29|30):", sooner)
    (planned,) = line_of("--train-iters", 30, "--exit-interval", 13, stops_at=late)
    assert planned.startswith("the remaining 2 iterations")
    assert line_of(*steps) == []
