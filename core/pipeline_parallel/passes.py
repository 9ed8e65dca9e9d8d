"""What turns a compute order into a plan that runs: transfers, gradient sums, and the check.

Pure: standard library, `actions` and `simulate`. Each pass is a function Plan -> Plan;
`schedules.build_plan` is their usual order.
"""

from __future__ import annotations

from collections import defaultdict
from operator import itemgetter

from core.pipeline_parallel.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    TWIN,
    Action,
    Op,
    Plan,
    ScheduleError,
    picture,
)
from core.pipeline_parallel.simulate import run_blocking, simulate


def forward_only(plan: Plan) -> Plan:
    """The forwards of `plan` and their transfers, in the same order: what an evaluation runs."""
    return plan.only(Op.F, Op.SEND_ACT, Op.RECV_ACT)


def with_comms(plan: Plan) -> Plan:
    """Add the sends and receives that the compute order implies.

    The plan is replayed once with unit costs. At the instant a result exists that another rank
    needs, its SEND is appended to the maker's row and its RECV to the user's. So the rows are cuts
    of one total order in which each SEND stands next to its RECV, and no set of ranks can wait for
    each other, even if every send blocks until it is received. (A receive just before its use and
    a send just after its production, rank by rank, deadlocks for every schedule but gpipe.)

    >>> print(with_comms(Plan.parse("F0@0 B0@0\\nF0@1 B0@1")))
    F0@0 SA0@0~1 RG0@0~1 B0@0
    RA0@1~0 F0@1 B0@1 SG0@1~0
    """
    assert not plan.has_comms, "the plan has its transfers already"
    owner, stages = plan.owner, plan.stages
    route = {Op.F: (Op.SEND_ACT, Op.RECV_ACT, 1)}
    route[Op.B] = route[Op.I] = (Op.SEND_GRAD, Op.RECV_GRAD, -1)
    rows: list[list[Action]] = [[] for _ in plan.rows]
    for _, _, rank, action in simulate(plan).events:
        rows[rank].append(action)
        if action.op is Op.W:
            continue
        send, receive, step = route[action.op]
        user = action.stage + step
        if 0 <= user < stages and owner[user] != rank:
            other = owner[user]
            rows[rank].append(Action(send, action.stage, action.microbatch, other))
            rows[other].append(Action(receive, user, action.microbatch, rank))
    return Plan(tuple(map(tuple, rows)), stages, plan.microbatches)


def with_grad_sync(plan: Plan) -> Plan:
    """Mark where each stage's gradients are complete, anew if they are marked already.

    ARM(stage) stands just before the last B (or W) of the stage, so that buckets filled by it may
    start their reduction; DRAIN(stage) stands at the end of the row. Nothing is marked in a plan
    without backwards. A split backward adds some gradients (norms, biases) in I, before ARM: DRAIN
    has to start whatever bucket is not on its way by then.

    >>> print(with_grad_sync(Plan.parse("F0@0 F1@0 B0@0 B1@0")))
    F0@0 F1@0 B0@0 ARM@0 B1@0 DRAIN@0
    """
    if any(row and row[-1].op is Op.DRAIN for row in plan.rows):
        plan = plan.only(*COMPUTE, *SENDS, *RECEIVES)
    rows = []
    for row in plan.rows:
        last: dict[int, int] = {}  # stage -> where its last backward stands
        for position, (op, stage, _, _) in enumerate(row):
            if op is Op.B or op is Op.W:
                last[stage] = position
        marked, done = [], 0
        for stage, position in sorted(last.items(), key=itemgetter(1)):
            marked += [*row[done:position], Action(Op.ARM, stage)]
            done = position
        drains = [Action(Op.DRAIN, stage) for stage in sorted(last)]
        rows.append((*marked, *row[done:], *drains))
    return Plan(tuple(rows), plan.stages, plan.microbatches)


# ---- the check ----------------------------------------------------------------------------------


def check(plan: Plan) -> Plan:
    """`plan` itself if it is whole and finishes, else ScheduleError with the place drawn.

    It is whole when every stage has one rank, every stage and microbatch one F and one B (or one I
    and one W, or no backward anywhere), every send one receive on the right rank, and each row uses
    nothing that it has not made or received. Then it is run with sends and receives that block
    until the other side is there. Without transfers in the rows, they are taken as implied.
    """
    _Check(plan).run()
    return plan


class _Check:
    """`place[op][stage * microbatches + microbatch]` is where an action stands in its row."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        size = plan.stages * plan.microbatches
        self.place: dict[Op, list[int | None]] = {op: [None] * size for op in Op}
        self.owner: list[int | None] = [None] * plan.stages
        self.sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.received: defaultdict[tuple[int, int], list[int]] = defaultdict(list)

    def run(self) -> None:
        if not (self.plan.rows and self.plan.stages and self.plan.microbatches):
            raise ScheduleError("the plan is empty")
        self._once()
        self._complete()
        if self.plan.has_comms:
            self._pairs()
        self._before()
        if self.plan.has_comms:
            self._wires()
        run_blocking(self.plan)

    def _fail(self, rank: int, position: int, headline: str, remark: str) -> None:
        marks = {rank: (position, remark)}
        raise ScheduleError(f"{headline}\n{picture(self.plan, marks)}")

    def _once(self) -> None:
        """Nothing is outside the plan, on two ranks, or there twice. Fills `owner` and `place`."""
        stages, m, owner, place = self.plan.stages, self.plan.microbatches, self.owner, self.place
        for rank, row in enumerate(self.plan.rows):
            for position, (op, stage, microbatch, _) in enumerate(row):
                if not (0 <= stage < stages and 0 <= microbatch < m):
                    self._fail(
                        rank,
                        position,
                        f"{row[position]} is outside the plan",
                        f"the plan has {stages} stages and {m} microbatches, counted from 0",
                    )
                if owner[stage] is None:
                    owner[stage] = rank
                elif owner[stage] != rank:
                    self._fail(
                        rank,
                        position,
                        f"stage {stage} is on rank {owner[stage]} and on rank {rank}",
                        "a stage belongs to one rank",
                    )
                places, index = place[op], stage * m + microbatch
                if places[index] is not None:
                    self._fail(
                        rank,
                        position,
                        f"{row[position]} comes twice",
                        f"already action {places[index]} of this row, counted from 0",
                    )
                places[index] = position

    def _complete(self) -> None:
        """Every stage and microbatch has one of the three sets of compute actions."""
        done = [self.place[op] for op in COMPUTE]
        backwards = any(at is not None for places in done[1:] for at in places)
        allowed = ("FB", "FIW") if backwards else ("F",)
        for index, places in enumerate(zip(*done, strict=True)):
            found = "".join(op.value for op, at in zip(COMPUTE, places) if at is not None)
            if found not in allowed:
                stage, microbatch = divmod(index, self.plan.microbatches)
                rank = self.owner[stage]
                raise ScheduleError(
                    f"microbatch {microbatch} on stage {stage}"
                    + (f" (rank {rank})" if rank is not None else ", which no rank holds,")
                    + f" has {' and '.join(found) or 'no action'}; "
                    f"it needs F{microbatch}@{stage} once"
                    + (", and B once or I and W once" if backwards else "")
                )

    def _pairs(self) -> None:
        """Every transfer goes to the rank of the next (or last) stage and has its other end.

        On the way, notes what goes over each wire, as seen from either end: `index` of the product
        at its maker, gradients counted after activations.
        """
        m, stages, owner = self.plan.microbatches, self.plan.stages, self.owner
        ends = {}  # op -> (places of the other end, its stage, the maker's stage, what to add, log)
        for kind, (send, (receive, step)) in enumerate(TWIN.items()):
            ends[send] = self.place[receive], step, 0, kind * stages * m, self.sent
            ends[receive] = self.place[send], -step, -step, kind * stages * m, self.received
        for rank, row in enumerate(self.plan.rows):
            for position, (op, stage, microbatch, peer) in enumerate(row):
                if peer is None:
                    continue
                places, step, maker, added, log = ends[op]
                there = stage + step
                if not 0 <= there < stages or owner[there] != peer or peer == rank:
                    self._wrong_peer(rank, position, there)
                if places[there * m + microbatch] is None:
                    self._no_other_end(rank, position, there)
                log[rank, peer].append(added + (stage + maker) * m + microbatch)

    def _wrong_peer(self, rank: int, position: int, there: int) -> None:
        place = "not in the plan"
        if 0 <= there < self.plan.stages:
            place = f"on rank {self.owner[there]}"
        self._fail(
            rank,
            position,
            f"pairing: {self.plan.rows[rank][position]} names the wrong rank",
            f"its other end is on stage {there}, which is {place}",
        )

    def _no_other_end(self, rank: int, position: int, there: int) -> None:
        action = self.plan.rows[rank][position]
        twin = TWIN | {receive: (send, -step) for send, (receive, step) in TWIN.items()}
        lost = Action(twin[action.op][0], there, action.microbatch, rank)
        self._fail(
            rank,
            position,
            f"pairing: {action} has no other end",
            f"rank {action.peer} has no {lost}",
        )

    def _before(self) -> None:
        """Whatever an action uses on its own rank stands before it in the row."""
        owner, comms = self.owner, self.plan.has_comms

        def crosses(stage: int, step: int) -> bool:
            there = stage + step
            return comms and 0 <= there < self.plan.stages and owner[there] != owner[stage]

        each = range(self.plan.stages)
        act = [(Op.RECV_ACT,) if crosses(s, -1) else () for s in each]
        grad = [(Op.F, Op.RECV_GRAD) if crosses(s, 1) else (Op.F,) for s in each]
        uses = {Op.F: act, Op.B: grad, Op.I: grad}
        uses[Op.W] = [(Op.I,) for _ in each]
        uses[Op.SEND_ACT] = [(Op.F,) for _ in each]
        uses[Op.SEND_GRAD] = [(Op.B, Op.I) for _ in each]
        m, place = self.plan.microbatches, self.place
        for rank, row in enumerate(self.plan.rows):
            for position, (op, stage, microbatch, _) in enumerate(row):
                if op not in uses:
                    continue
                for needed in uses[op][stage]:
                    at = place[needed][stage * m + microbatch]
                    if at is None and op is Op.SEND_GRAD:
                        continue  # one of B and I is there; `_complete` has seen to it
                    if at is None or at > position:
                        from_stage = {Op.RECV_ACT: stage - 1, Op.RECV_GRAD: stage + 1}.get(needed)
                        peer = None if from_stage is None else owner[from_stage]
                        what = Action(needed, stage, microbatch, peer)
                        lack = "which its row lacks" if at is None else "which comes after it"
                        headline = f"order: {row[position]} needs {what}, {lack}"
                        self._fail(rank, position, headline, f"{what} has to come first")

    def _wires(self) -> None:
        """From one rank to another, tensors are received in the order in which they are sent."""
        m, stages = self.plan.microbatches, self.plan.stages
        for (source, target), sent in self.sent.items():
            received = self.received[target, source]
            if sent == received:
                continue
            number = next(i for i, pair in enumerate(zip(sent, received)) if pair[0] != pair[1])
            ends = []
            for index in (sent[number], received[number]):
                kind, (stage, microbatch) = index // (stages * m), divmod(index % (stages * m), m)
                op, step = TWIN[SENDS[kind]]
                ends.append(Action(op, stage + step, microbatch, source))
            sends, expects = ends
            place = self.place[expects.op][expects.stage * m + expects.microbatch]
            self._fail(
                target,
                place,
                f"order: rank {source} and rank {target} disagree on tensor {number} between them",
                f"rank {source} sends what {sends} receives",
            )
