"""The schedules: for each, what every rank computes and in which order.

Pure: standard library, `actions` and `passes`. A schedule is its compute order and nothing else;
`build_plan` adds transfers and gradient sums by passes over it and checks the result. The drawings
(`draw`) show time to the right, digits for forwards, letters for backwards, a dot for idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from core.pipeline_parallel import passes
from core.pipeline_parallel.actions import Action, Op, Plan, Row, ScheduleError
from core.pipeline_parallel.schedule_file import read_schedule


def weave(forwards: Row, backwards: Row, ahead: int) -> list[Action]:
    """`ahead` forwards, then forward and backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    turns = [a for pair in zip(forwards[ahead:], backwards) for a in pair]
    return [*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :]]


def gpipe(pp: int, microbatches: int) -> Plan:
    """All forwards, then all backwards: simple, and every microbatch is held at once.

    >>> from core.pipeline_parallel.draw import draw
    >>> print(draw(gpipe(4, 3)))
    0 012.........aabbcc
    1 .012......aabbcc..
    2 ..012...aabbcc....
    3 ...012aabbcc......
    """
    order = [(op, m) for op in (Op.F, Op.B) for m in range(microbatches)]
    rows = tuple(tuple(Action(op, rank, m) for op, m in order) for rank in range(pp))
    return Plan(rows, pp, microbatches)


def one_f_one_b(pp: int, microbatches: int) -> Plan:
    """Rank r runs pp-1-r forwards ahead, then forward and backward in turn, then drains.

    As fast as gpipe, and rank r holds no more than pp-r microbatches.

    >>> from core.pipeline_parallel.draw import draw
    >>> print(draw(one_f_one_b(4, 6)))
    0 0123......aa4bb5cc.dd.ee.ff
    1 .012....aa3bb4cc5dd.ee.ff..
    2 ..01..aa2bb3cc4dd5ee.ff....
    3 ...0aa1bb2cc3dd4ee5ff......
    """
    rows = []
    for rank in range(pp):
        forwards = [Action(Op.F, rank, m) for m in range(microbatches)]
        backwards = [Action(Op.B, rank, m) for m in range(microbatches)]
        rows.append(tuple(weave(forwards, backwards, ahead=pp - 1 - rank)))
    return Plan(tuple(rows), pp, microbatches)


def interleaved(pp: int, microbatches: int, chunks: int) -> Plan:
    """1F1B over pp * chunks stages, `chunks` of them on each rank: a bubble `chunks` times smaller.

    Microbatches visit the chunks in groups: a group goes through chunk 0 on all ranks, then through
    chunk 1, and so on. A group smaller than pp would come back before its rank is done with the
    rest (and may deadlock), so what is left over when pp does not divide the microbatches is spread
    over the groups: each has pp microbatches or a few more, and any number of microbatches gives
    the bubble of the closed form. The second line of a rank is the chunk at work.

    >>> from core.pipeline_parallel.draw import draw
    >>> print(draw(interleaved(2, 4, 2)))
    0 01012.aa3bb2aa3bb.cc.ddccdd
      00110 11011100100 11 110000
    1 .010aa1bb2aa3bb2cc3ddccdd..
       001111110000001111110000
    """
    groups = max(1, microbatches // pp)
    size, larger = divmod(microbatches, groups)
    sizes = [size + 1] * larger + [size] * (groups - larger)
    visits, first = [], 0  # (microbatch, chunk) in forward order; the backward counts chunks down
    for length in sizes:
        visits += [(first + i, chunk) for chunk in range(chunks) for i in range(length)]
        first += length
    rows = []
    for rank in range(pp):
        forwards = [Action(Op.F, c * pp + rank, m) for m, c in visits]
        backwards = [Action(Op.B, (chunks - 1 - c) * pp + rank, m) for m, c in visits]
        ahead = 2 * (pp - 1 - rank) + (chunks - 1) * sizes[0]
        rows.append(tuple(weave(forwards, backwards, ahead)))
    return Plan(tuple(rows), pp * chunks, microbatches)


def zb_h1(pp: int, microbatches: int) -> Plan:
    """1F1B with each backward split in I and W; rank r keeps r weight gradients for its bubbles.

    Nobody downstream waits for a W, so the pipeline fills and drains faster than 1F1B's and the
    late ranks do their waiting weight gradients where 1F1B idles. Every rank holds up to pp
    microbatches. Capital letters are weight gradients. Source: Qi et al., Zero Bubble Pipeline
    Parallelism (2023), schedule ZB-H1.

    >>> from core.pipeline_parallel.draw import draw
    >>> print(draw(zb_h1(4, 6)))
    0 0123...aA4bB5cCdDeEfF
    1 .012..a3bA4cB5dCeDfEF
    2 ..01.a2b3cA4dB5eCfDEF
    3 ...0a1b2c3dA4eB5fCDEF
    """
    rows = []
    for rank, order in enumerate(one_f_one_b(pp, microbatches).rows):
        row: list[Action] = []
        waiting: list[Action] = []
        for action in order:
            if action.op is Op.F:
                row.append(action)
                continue
            row.append(action._replace(op=Op.I))
            waiting.append(action._replace(op=Op.W))
            if len(waiting) > rank:
                row.append(waiting.pop(0))
        rows.append((*row, *waiting))
    return Plan(tuple(rows), pp, microbatches)


ORDERS: dict[str, Callable[..., Plan]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
}


def default_schedule(chunks: int) -> str:
    return "interleaved" if chunks > 1 else "1f1b"


def schedule_problems(
    schedule: str | None, pp: int, microbatches: int, chunks: int = 1
) -> Iterator[str]:
    """One sentence for each reason why `build_plan` would refuse these; files are not opened."""
    schedule = schedule or default_schedule(chunks)
    if pp < 1 or microbatches < 1 or chunks < 1:
        yield (
            f"a pipeline of {pp} ranks, {microbatches} microbatches and {chunks} virtual stages "
            f"per rank: each must be 1 or more"
        )
        return
    if schedule not in ORDERS and not Path(schedule).is_file():
        yield (
            f"--pipeline-schedule {schedule} is neither a schedule nor a file; "
            f"use {', '.join(ORDERS)} or the path of a schedule file"
        )
    if chunks > 1 and pp == 1:
        yield (
            f"--num-virtual-stages-per-pipeline-rank {chunks} needs --pipeline-model-parallel-size "
            f"2 or more, which is 1; leave it out, or use more pipeline ranks"
        )
    elif chunks > 1 and schedule in ORDERS and schedule != "interleaved":
        yield (
            f"--pipeline-schedule {schedule} runs one stage per rank, not "
            f"--num-virtual-stages-per-pipeline-rank {chunks}; use --pipeline-schedule interleaved"
        )
    if chunks == 1 and schedule == "interleaved" and pp > 1:
        yield (
            "--pipeline-schedule interleaved needs --num-virtual-stages-per-pipeline-rank 2 or "
            "more, which is 1; use --pipeline-schedule 1f1b"
        )


def build_plan(
    schedule: str | None,
    pp: int,
    microbatches: int,
    chunks: int = 1,
    *,
    forward_only: bool = False,
) -> Plan:
    """The checked plan that an executor runs: compute, transfers and gradient sums.

    `schedule` is a name of ORDERS, the path of a schedule file, or None for interleaved with
    several chunks and 1f1b with one. `forward_only` keeps the forwards, for evaluation. Raises
    ScheduleError.
    """
    problems = list(schedule_problems(schedule, pp, microbatches, chunks))
    if problems:
        raise ScheduleError("\n".join(problems))
    schedule = schedule or default_schedule(chunks)
    if schedule not in ORDERS:
        plan = read_schedule(schedule, pp, microbatches, chunks)
    elif schedule == "interleaved":
        plan = interleaved(pp, microbatches, chunks)
    else:
        plan = ORDERS[schedule](pp, microbatches)
    if forward_only:
        plan = passes.forward_only(plan)
    if not plan.has_comms:
        plan = passes.with_comms(plan)
    return passes.check(passes.with_grad_sync(plan))


def row_maker(
    schedule: str | None, pp: int, rank: int, chunks: int = 1
) -> Callable[[int, bool], Row]:
    """(microbatches, forward_only) -> what `rank` does then: its row of `build_plan`'s plan."""

    def row(microbatches: int, forward_only: bool) -> Row:
        plan = build_plan(schedule, pp, microbatches, chunks, forward_only=forward_only)
        return plan.row(rank)

    return row
