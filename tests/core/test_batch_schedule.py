"""Batch sizes as a function of consumed samples, against a loop that takes one step at a time."""

import doctest

from hypothesis import given, settings
from hypothesis import strategies as st

from core import batch_schedule
from core.batch_schedule import BatchSchedule


@st.composite
def schedules(draw: st.DrawFn) -> BatchSchedule:
    micro, dp = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    step = micro * dp
    start, increment = step * draw(st.integers(1, 4)), step * draw(st.integers(1, 4))
    full = start + increment * draw(st.integers(0, 5))
    ramp = draw(st.none() | st.just((start, increment, draw(st.integers(0, 300)))))
    return BatchSchedule(micro, dp, full, ramp)


def megatron_size(schedule: BatchSchedule, consumed: int) -> int:
    """The rule in words: increments are spread evenly over the ramp's samples."""
    if schedule.ramp is None:
        return schedule.full
    start, increment, samples = schedule.ramp
    size = start
    while size < schedule.full and consumed * (schedule.full - start) >= samples * (
        size + increment - start
    ):
        size += increment
    return size


def stepped(schedule: BatchSchedule, iterations: int) -> list[int]:
    """Consumed samples after 0, 1, 2, ... steps."""
    consumed = [0]
    for _ in range(iterations):
        consumed.append(consumed[-1] + megatron_size(schedule, consumed[-1]))
    return consumed


@settings(deadline=None, max_examples=200)
@given(schedules(), st.integers(0, 60))
def test_closed_forms_equal_taking_every_step(schedule: BatchSchedule, iterations: int) -> None:
    consumed = stepped(schedule, iterations)
    assert [schedule.size(n) for n in consumed] == [megatron_size(schedule, n) for n in consumed]
    assert schedule.consumed_after(iterations) == consumed[-1]
    assert schedule.microbatches(consumed[-1]) * schedule.micro * schedule.dp == schedule.size(
        consumed[-1]
    )
    assert schedule.size(consumed[-1]) in set(schedule.sizes())


@settings(deadline=None, max_examples=200)
@given(schedules(), st.integers(0, 400))
def test_a_run_counted_in_samples_ends_with_the_last_whole_step(
    schedule: BatchSchedule, samples: int
) -> None:
    iterations = schedule.iterations_within(samples)
    assert schedule.consumed_after(iterations) <= samples < schedule.consumed_after(iterations + 1)
    # the same seen from any step of it, and nothing where all are consumed
    for done, consumed in enumerate(stepped(schedule, iterations)):
        assert schedule.iterations_within(samples, consumed) == iterations - done
    assert schedule.iterations_within(samples, samples + 1) == 0


def test_a_run_of_10_to_the_15_samples_is_arithmetic_not_a_loop() -> None:
    schedule = BatchSchedule(micro=4, dp=64, full=2048, ramp=(256, 256, 10**9))
    iterations = schedule.iterations_within(10**15)
    assert 10**15 - 2048 < schedule.consumed_after(iterations) <= 10**15


def test_examples() -> None:
    assert doctest.testmod(batch_schedule).failed == 0
