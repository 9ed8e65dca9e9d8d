"""The words of a pipeline schedule: Op, Action, Plan, and their text form.

Pure: standard library only. Read next: `schedules` (who computes what, in which order), `simulate`
(what a row means), `passes` (transfers, gradient sums, the check), `draw`.

A *stage* is a chunk of the model, a *row* is what one pipeline rank does in order, and a *plan* is
one row per rank. Rank r of p holds stages r, r + p, r + 2p, ...

    >>> print(Plan.parse("F0@0 B0@0\\nF0@1 B0@1"))
    F0@0 B0@0
    F0@1 B0@1
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule that cannot be built, read or finished; the text says where and why."""


class Op(Enum):
    """What a rank can do. The value is the op's name in a schedule's text."""

    F = "F"  # forward of one stage and microbatch
    B = "B"  # backward: input gradient and weight gradient together
    I = "I"  # noqa: E741  input gradient alone
    W = "W"  # weight gradient alone, after its I
    SEND_ACT = "SA"
    RECV_ACT = "RA"
    SEND_GRAD = "SG"
    RECV_GRAD = "RG"
    ARM = "ARM"  # from here on a full gradient bucket of this stage starts its reduction
    DRAIN = "DRAIN"  # wait for all reductions of this stage

    # Members are singletons; Enum's own hash goes through the name and is ten times slower.
    __hash__ = object.__hash__


COMPUTE = (Op.F, Op.B, Op.I, Op.W)
SENDS = (Op.SEND_ACT, Op.SEND_GRAD)
RECEIVES = (Op.RECV_ACT, Op.RECV_GRAD)
GRAD_SYNC = (Op.ARM, Op.DRAIN)

# A send's receive, and the stage that receives relative to the one that sends.
TWIN = {Op.SEND_ACT: (Op.RECV_ACT, 1), Op.SEND_GRAD: (Op.RECV_GRAD, -1)}

_FORM = re.compile(
    r"(?:(?P<op>F|B|I|W|SA|RA|SG|RG)(?P<microbatch>\d+)|(?P<sync>ARM|DRAIN))"
    r"@(?P<stage>\d+)(?:~(?P<peer>\d+))?"
)


class Action(NamedTuple):
    """One step of one rank: `op` on a stage and microbatch; `peer` is the other rank of a transfer.

    >>> str(Action(Op.F, 2, 5)), str(Action(Op.SEND_ACT, 0, 3, 1)), str(Action(Op.ARM, 1))
    ('F5@2', 'SA3@0~1', 'ARM@1')
    >>> Action.parse("SA3@0~1") == Action(Op.SEND_ACT, stage=0, microbatch=3, peer=1)
    True
    """

    op: Op
    stage: int
    microbatch: int = 0
    peer: int | None = None

    def __str__(self) -> str:
        number = "" if self.op in GRAD_SYNC else self.microbatch
        peer = "" if self.peer is None else f"~{self.peer}"
        return f"{self.op.value}{number}@{self.stage}{peer}"

    @classmethod
    def parse(cls, word: str) -> Action:
        """The action that `word` spells; ValueError says what a word looks like."""
        found = _FORM.fullmatch(word)
        if not found:
            raise ValueError(
                f"{word!r} is not an action; write F, B, I or W, the microbatch, @ and the stage, "
                f"as in F0@1 (transfers end in the other rank: SA0@1~2)"
            )
        op = Op(found["op"] or found["sync"])
        if (found["peer"] is None) == (op in SENDS + RECEIVES):
            wanted = "needs ~ and the other rank" if found["peer"] is None else "takes no ~rank"
            raise ValueError(f"{word!r}: {op.value} {wanted}")
        peer = None if found["peer"] is None else int(found["peer"])
        return cls(op, int(found["stage"]), int(found["microbatch"] or 0), peer)


Row = Sequence[Action]


@dataclass(frozen=True)
class Plan:
    """A schedule: one row per pipeline rank, over so many stages and microbatches."""

    rows: tuple[tuple[Action, ...], ...]
    stages: int
    microbatches: int

    @classmethod
    def of(cls, rows: Iterable[Iterable[Action]]) -> Plan:
        """The plan of these rows; stages and microbatches are counted from them."""
        kept = tuple(tuple(row) for row in rows)
        stages = 1 + max((a.stage for row in kept for a in row), default=-1)
        microbatches = 1 + max((a.microbatch for row in kept for a in row), default=-1)
        return cls(kept, stages, microbatches)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that `str(plan)` printed. Files of users go through `schedule_file`."""
        return cls.of([Action.parse(w) for w in line.split()] for line in text.splitlines())

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    def row(self, pp_rank: int) -> tuple[Action, ...]:
        return self.rows[pp_rank]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return self.stages // self.ranks

    @cached_property
    def owner(self) -> tuple[int | None, ...]:
        """The rank that holds each stage; None for a stage without an action."""
        held: list[int | None] = [None] * self.stages
        for rank, row in enumerate(self.rows):
            for action in row:
                held[action.stage] = rank
        return tuple(held)

    @cached_property
    def has_comms(self) -> bool:
        """Whether transfers are in the rows (after `passes.with_comms`) or still implied."""
        return any(a.peer is not None for row in self.rows for a in row)

    def only(self, *ops: Op) -> Plan:
        """The same plan with these ops alone, in the same order."""
        rows = tuple(tuple(a for a in row if a.op in ops) for row in self.rows)
        return Plan(rows, self.stages, self.microbatches)


def picture(plan: Plan, marks: Mapping[int, tuple[int, str]], around: int = 4) -> str:
    """Rows with an arrow: for each rank in `marks`, the actions round a position and a remark.

    >>> print(picture(Plan.parse("F0@0 B0@0"), {0: (1, "comes too early")}))
    rank 0  F0@0 B0@0
                 ^ comes too early
    """
    lines = []
    for rank, (position, remark) in sorted(marks.items()):
        row = plan.rows[rank]
        first, last = max(0, position - around), min(len(row), position + around + 1)
        words = [str(action) for action in row[first:last]]
        head = f"rank {rank}  " + ("... " if first else "")
        tail = " ..." if last < len(row) else ""
        before = "".join(f"{word} " for word in words[: position - first])
        lines.append(head + " ".join(words) + tail)
        lines.append(" " * len(head + before) + f"^ {remark}")
    return "\n".join(lines)
