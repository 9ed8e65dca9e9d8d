"""What a plan means in time: one replay for drawing, placing transfers and finding deadlocks.

Pure: standard library and `actions`. In order: what things cost, the timeline, the closed forms
that the schedules obey, and last the replay itself. Besides the executor this is the only place
that says when an action may run; `passes` and `draw` only ask it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from core.pipeline_parallel.actions import (
    COMPUTE,
    GRAD_SYNC,
    SENDS,
    Action,
    Op,
    Plan,
    ScheduleError,
    picture,
)

UNIT = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0}


@dataclass(frozen=True)
class Costs:
    """How long things take, in any one unit.

    An action costs `exact[op, stage]` if that is there, else `op[op] * stage[stage]` (a stage's
    factor, say its layers over the average; 1 where the sequence ends). `link` is the time from
    the moment both ends of a transfer are there until the tensor has arrived.
    """

    op: Mapping[Op, float] = field(default_factory=lambda: dict(UNIT))
    stage: Sequence[float] = ()
    exact: Mapping[tuple[Op, int], float] = field(default_factory=dict)
    link: float = 0.0

    def of(self, op: Op, stage: int) -> float | None:
        """The cost of `op` on `stage`, None if nothing is said about it."""
        if (op, stage) in self.exact:
            return self.exact[op, stage]
        factor = self.stage[stage] if stage < len(self.stage) else 1.0
        return self.op[op] * factor if op in self.op else None


class Timed(NamedTuple):
    start: float
    end: float
    rank: int
    action: Action


@dataclass(frozen=True)
class Timeline:
    """When each action that takes time ran, by end and then rank: simulated or measured."""

    ranks: int
    events: tuple[Timed, ...]

    @cached_property
    def start(self) -> float:
        return min((t.start for t in self.events), default=0.0)

    @cached_property
    def span(self) -> float:
        """First start to last end, over all ranks."""
        return max((t.end for t in self.events), default=0.0) - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time each rank spends computing."""
        spent = [0.0] * self.ranks
        for t in self.events:
            spent[t.rank] += t.end - t.start if t.action.op in COMPUTE else 0.0
        return tuple(spent)

    @property
    def bubble(self) -> float:
        """The share of ranks x span in which no rank computes: 0 is perfect."""
        return 1 - sum(self.busy) / (self.ranks * self.span) if self.span else 0.0


def simulate(plan: Plan, costs: Costs | None = None, *, blocking: bool = False) -> Timeline:
    """The timeline of `plan`; ScheduleError (a `Stuck`) when it cannot finish.

    Receives are posted where they stand and waited for where they are used, sends wait for
    nothing; with `blocking`, both ends of a transfer wait for each other.
    """
    return _Replay(plan, costs or Costs(), blocking).run()


def run_blocking(plan: Plan) -> None:
    """Raise `Stuck` unless the plan finishes when both ends of each transfer block."""
    _Replay(plan, Costs(), blocking=True, keep=False).run()


def live_activations(plan: Plan) -> tuple[int, ...]:
    """The most (stage, microbatch) pairs each rank holds at once, from its F to its B or W."""
    peaks = []
    for row in plan.rows:
        held = peak = 0
        for action in row:
            if action.op is Op.F:
                held += 1
                peak = max(peak, held)
            elif action.op in (Op.B, Op.W):
                held -= 1
        peaks.append(peak)
    return tuple(peaks)


# ---- closed forms: what the schedules are known to give under UNIT costs ------------------------


class ClosedForm(NamedTuple):
    span: int
    bubble: float
    live: tuple[int, ...]


def closed_form(schedule: str, pp: int, microbatches: int, chunks: int = 1) -> ClosedForm | None:
    """Span, bubble and live activations by formula; None for a schedule that has none here.

    With p ranks, m microbatches, v chunks, F = I = W = 1 and B = 2, time in units of one chunk:

        gpipe, 1f1b    span 3(m + p-1)                       bubble (p-1)/(m + p-1)
        interleaved    span 3(v max(m,p) + min(m,p) - 1)     bubble (p-1)/(v m + p-1) for m >= p
        zb_h1          span 3m + p-1 + max(0, p-m)           bubble (p-1)/(3m + p-1) for m >= p
    """
    p, m, v = pp, microbatches, chunks
    if schedule == "gpipe":
        span, live = 3 * (m + p - 1), [m] * p
    elif schedule == "1f1b":
        span, live = 3 * (m + p - 1), [min(p - r, m) for r in range(p)]
    elif schedule == "interleaved":
        group = -(-m // max(1, m // p))  # the largest group of microbatches that visits a chunk
        span = 3 * (v * max(m, p) + min(m, p) - 1)
        live = [min(2 * (p - 1 - r) + (v - 1) * group + 1, v * m) for r in range(p)]
    elif schedule == "zb_h1":
        span, live = 3 * m + p - 1 + max(0, p - m), [min(p, m)] * p
    else:
        return None
    return ClosedForm(span, 1 - 3 * m * v / span, tuple(live))


# ---- the replay ---------------------------------------------------------------------------------


class Stuck(ScheduleError):
    """No rank can go on: rank r has done `at[r]` actions and waits for `why[r]`."""

    def __init__(self, plan: Plan, at: Sequence[int], why: Mapping[int, str]) -> None:
        marks = {rank: (at[rank], f"waits for {what}") for rank, what in why.items()}
        super().__init__(
            f"deadlock: {len(why)} of {plan.ranks} ranks can never go on\n{picture(plan, marks)}"
        )
        self.at, self.why = tuple(at), dict(why)


class _Replay:
    """Runs each rank as far as it can; whoever lacks something is woken when it is there.

    `time` holds one number per fact, None until it is true. A fact's key is its zone plus the
    product it is about, a product being (activation or gradient, the stage that made it,
    microbatch):

        made       it exists on the rank that made it
        sent       its SEND is reached, before its RECV
        posted     its RECV is reached, before its SEND
        arrived    both are reached: it exists on the rank that needs it

    At most one rank waits for a fact, so the whole run is linear in the number of actions.
    """

    def __init__(self, plan: Plan, costs: Costs, blocking: bool, keep: bool = True) -> None:
        self.plan, self.link, self.blocking, self.keep = plan, costs.link, blocking, keep
        m, stages = plan.microbatches, plan.stages
        self.zone = zone = 2 * stages * m
        self.arrived = 3 * zone
        self.time: list[float | None] = [None] * (4 * zone)
        act = [s * m for s in range(stages)]
        grad = [(stages + s) * m for s in range(stages)]
        self.work = self._work(act, grad, costs)
        self.transfers = {  # op -> (the product of stage 0, my zone, the other end's zone)
            Op.SEND_ACT: (0, zone, 2 * zone),
            Op.RECV_ACT: (-m, 2 * zone, zone),
            Op.SEND_GRAD: (zone // 2, zone, 2 * zone),
            Op.RECV_GRAD: (zone // 2 + m, 2 * zone, zone),
        }
        self.clock, self.at = [0.0] * plan.ranks, [0] * plan.ranks
        self.waiting: dict[int, int] = {}
        self.awake: deque[int] = deque(range(plan.ranks))
        self.events: list[Timed] = []

    def _work(
        self, act: Sequence[int], grad: Sequence[int], costs: Costs
    ) -> dict[Op, list[tuple[tuple[int, ...], int | None, bool, float | None]]]:
        """Per op and stage: what it reads, what it makes, whether that leaves untold, its cost."""
        owner, stages, untold = self.plan.owner, self.plan.stages, not self.plan.has_comms

        def crosses(maker: int, user: int) -> bool:
            return 0 <= user < stages and owner[maker] != owner[user]

        def input_of(base: Sequence[int], maker: int, user: int) -> tuple[int, ...]:
            if not 0 <= maker < stages:
                return ()
            return (base[maker] + (self.arrived if crosses(maker, user) else 0),)

        work: dict[Op, list] = {op: [] for op in COMPUTE}
        for s in range(stages):
            forward = input_of(act, s - 1, s)
            backward = (act[s], *input_of(grad, s + 1, s))
            leaves = untold and crosses(s, s + 1)
            work[Op.F].append((forward, act[s], leaves, costs.of(Op.F, s)))
            for op in (Op.B, Op.I):
                leaves = untold and crosses(s, s - 1)
                work[op].append((backward, grad[s], leaves, costs.of(op, s)))
            work[Op.W].append(((grad[s],), None, False, costs.of(Op.W, s)))
        return work

    def run(self) -> Timeline:
        step = dict.fromkeys(COMPUTE, self._compute) | dict.fromkeys(self.transfers, self._transfer)
        step |= dict.fromkeys(GRAD_SYNC, self._nothing)
        rows, at = self.plan.rows, self.at
        while self.awake:
            rank = self.awake.popleft()
            row, position = rows[rank], at[rank]
            while position < len(row):
                action = row[position]
                missing = step[action.op](rank, action)
                if missing is not None:
                    self.waiting[missing] = rank
                    break
                position += 1
            at[rank] = position
        if any(position < len(row) for position, row in zip(at, rows, strict=True)):
            waiting = sorted(self.waiting.items(), key=itemgetter(1))
            raise Stuck(self.plan, at, {rank: self._name(key, rank) for key, rank in waiting})
        self.events.sort(key=itemgetter(1, 2))  # end, rank
        return Timeline(self.plan.ranks, tuple(self.events))

    # Each step returns None when the action is done, or the key of the fact it has to wait for.

    def _nothing(self, rank: int, action: Action) -> None:
        """ARM and DRAIN take no time here."""

    def _compute(self, rank: int, action: Action) -> int | None:
        op, stage, microbatch, _ = action
        reads, makes, leaves, cost = self.work[op][stage]
        time, start = self.time, self.clock[rank]
        for base in reads:
            ready = time[base + microbatch]
            if ready is None:
                return base + microbatch
            if ready > start:
                start = ready
        if cost is None:
            raise ValueError(f"the costs say nothing about {op.value} on stage {stage}")
        end = self.clock[rank] = start + cost
        if self.keep:
            self.events.append(Timed(start, end, rank, action))
        if makes is not None:
            time[makes + microbatch] = end
            if leaves:
                self._arrive(makes + microbatch, end)
        return None

    def _transfer(self, rank: int, action: Action) -> int | None:
        op, stage, microbatch, _ = action
        first, mine, theirs = self.transfers[op]
        key = first + stage * self.plan.microbatches + microbatch
        time, arrived = self.time, self.time[key + self.arrived]
        if arrived is None:  # else the other end came second, and woke this one
            if op in SENDS and time[key] is None:
                return key
            now, other = self.clock[rank], time[key + theirs]
            if other is None:
                time[key + mine] = now
                return key + self.arrived if self.blocking else None
            arrived = self._arrive(key, max(now, other))
        if self.blocking:
            self.clock[rank] = max(self.clock[rank], arrived)
        return None

    def _arrive(self, key: int, both_there: float) -> float:
        arrived = self.time[key + self.arrived] = both_there + self.link
        rank = self.waiting.pop(key + self.arrived, None)
        if rank is not None:
            self.awake.append(rank)
        return arrived

    def _name(self, key: int, rank: int) -> str:
        """What `rank` waits for, in the words of the plan, if it waits for the fact of `key`."""
        zone, product = divmod(key, self.zone)
        kind, rest = divmod(product, self.plan.stages * self.plan.microbatches)
        stage, microbatch = divmod(rest, self.plan.microbatches)
        owner, letter, user = self.plan.owner, "AG"[kind], stage + (1, -1)[kind]
        if zone and rank == owner[stage]:
            return f"rank {owner[user]} to reach R{letter}{microbatch}@{user}~{rank}"
        if zone and self.plan.has_comms:
            return f"rank {owner[stage]} to reach S{letter}{microbatch}@{stage}~{rank}"
        made = f"F{microbatch}@{stage}"
        if kind:
            made = f"the backward of microbatch {microbatch} on stage {stage}"
        return f"rank {owner[stage]} to finish {made}"
