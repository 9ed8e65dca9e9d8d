"""What was sent, by whom, and why: the record of every collective and transfer of this process.

Pure: standard library only. `core.comm.collectives` is the only writer; the readers are
`--log-communication`, the launcher's hang report, the tests and `core.traffic`'s predictions.

Read in this order: `wire_bytes` (the convention), `CommEvent` (one line), `Ledger` (all of them).
Recording never touches a device and never waits.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, fields

from core.step_clock import AXES, StepClock

NOT_TIMED: AbstractContextManager = nullcontext()
KEEP_STEPS = 4  # steps whose events are kept one by one; running totals are kept for ever


def wire_bytes(op: str, size: int, payload: int) -> int:
    """Bytes one rank sends under the ring model, a convention: NCCL may choose trees.

    n = size, S = payload, the bytes of the logical (whole) tensor:

        all_reduce                                       2 (n-1)/n S
        all_gather, reduce_scatter, all_to_all, broadcast  (n-1)/n S
        send S          recv 0          barrier 0

    >>> wire_bytes("all_reduce", 4, 1000)
    1500
    """
    if op == "all_reduce":
        return 2 * (size - 1) * payload // size
    if op in ("all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        return (size - 1) * payload // size
    if op == "send":
        return payload
    if op in ("recv", "barrier"):
        return 0
    raise ValueError(f"no wire model for the operation {op!r}")


@dataclass(frozen=True, slots=True)
class CommEvent:
    """One call: `payload` is exact, `wire` follows the ring model of `wire_bytes`."""

    seq: int
    step: int
    at: str  # "F3@stage1", "optimizer", "startup"
    op: str
    group: str
    size: int
    dtype: str
    numel: int  # elements of the logical tensor
    payload: int  # its bytes
    wire: int  # bytes this rank sends
    tag: str  # "layers.3.attention.out", its backward "layers.3.attention.out.grad"

    def __str__(self) -> str:
        return (
            f"#{self.seq} step {self.step} {self.at}: {self.op} {self.tag} on {self.group}"
            f"[{self.size}] {self.dtype} x {self.numel:,}"
        )


@dataclass(slots=True)
class Total:
    """Calls and bytes of one (group, op), or of whatever key a table was asked for."""

    calls: int = 0
    payload: int = 0
    wire: int = 0

    def add(self, event: CommEvent) -> None:
        self.calls += 1
        self.payload += event.payload
        self.wire += event.wire


class Ledger:
    """Every communication of one process, newest last.

    The events of the last `keep_steps` steps are kept in full, totals per (group, op) for ever.
    clock: where the time of a step goes, while somebody asks for it.
    """

    def __init__(self, keep_steps: int = KEEP_STEPS) -> None:
        self.keep_steps = keep_steps
        self.step = 0
        self.place = "startup"
        self.count = 0
        self.clock: StepClock | None = None
        self._events: deque[CommEvent] = deque()
        self._totals: dict[tuple[str, str], Total] = {}

    # -- writing ---------------------------------------------------------------------------------

    def record(
        self, *, op: str, group: str, size: int, dtype: str, numel: int, payload: int, tag: str
    ) -> None:
        wire = wire_bytes(op, size, payload)
        event = CommEvent(
            self.count, self.step, self.place, op, group, size, dtype, numel, payload, wire, tag
        )
        self.count += 1
        self._events.append(event)
        self._totals.setdefault((group, op), Total()).add(event)

    def begin_step(self, step: int) -> None:
        """All that follows belongs to training step `step`; events too old to keep are dropped."""
        self.step = step
        while self._events and self._events[0].step <= step - self.keep_steps:
            self._events.popleft()

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Events inside carry `place`, e.g. the action being run."""
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    def timed(self, part: str) -> AbstractContextManager:
        """The time inside is spent on `part`."""
        return NOT_TIMED if self.clock is None else self.clock.during(part)

    def waiting(self, group: str) -> AbstractContextManager:
        """The time inside is spent waiting for ranks of `group`."""
        return NOT_TIMED if self.clock is None else self.clock.during(AXES.get(group, group))

    # -- reading ---------------------------------------------------------------------------------

    def events(self, **where: object) -> list[CommEvent]:
        """Kept events whose fields equal `where`: `ledger.events(group="tp", step=5)`."""
        known = {f.name for f in fields(CommEvent)}
        if unknown := set(where) - known:
            raise ValueError(f"a ledger event has no {sorted(unknown)}; it has {sorted(known)}")
        # a copy first: the watch reads while the main thread goes on recording
        kept = list(self._events)
        return [e for e in kept if all(getattr(e, k) == v for k, v in where.items())]

    def total(self, what: str = "wire", **where: object) -> int:
        """Sum of a field ("wire", "payload", "numel") over the kept events that match `where`."""
        return sum(getattr(e, what) for e in self.events(**where))

    def grand_totals(self) -> dict[tuple[str, str], Total]:
        """(group, op) -> Total since the process started."""
        return dict(self._totals)

    def table(self, by: Iterable[str] = ("group", "op"), **where: object) -> str:
        """Kept events that match `where`, added up by the named fields, as a text table."""
        by = tuple(by)
        rows: dict[tuple, Total] = {}
        for event in self.events(**where):
            rows.setdefault(tuple(getattr(event, k) for k in by), Total()).add(event)
        return format_table(by, rows)

    def tail(self, n: int = 20) -> str:
        """The last n events, one a line: what a hung rank did last."""
        return "\n".join(str(e) for e in list(self._events)[-n:]) or "(nothing was communicated)"

    def digest(self, group: str, step: int) -> int:
        """63-bit hash of what this rank did on `group` in `step`; ranks that agree are equal."""
        h = hashlib.blake2b(digest_size=8)
        for e in self.events(group=group, step=step):
            h.update(repr((e.op, e.dtype, e.numel, e.tag)).encode())
        return int.from_bytes(h.digest(), "big") >> 1

    def clear(self) -> None:
        """Forget everything; the counter goes on, so that `seq` stays unique."""
        self._events.clear()
        self._totals.clear()


def format_table(by: tuple[str, ...], rows: dict[tuple, Total]) -> str:
    """Rows of (key, Total) with headings, columns aligned and a last line of sums."""
    heads = (*by, "calls", "payload bytes", "wire bytes")
    lines = [
        (*map(str, key), f"{t.calls:,}", f"{t.payload:,}", f"{t.wire:,}")
        for key, t in sorted(rows.items(), key=lambda item: tuple(map(str, item[0])))
    ]
    sums = [f"{sum(astuple(t)[i] for t in rows.values()):,}" for i in range(3)]
    lines.append(("total", *[""] * (len(by) - 1), *sums))
    widths = [max(len(row[i]) for row in (heads, *lines)) for i in range(len(heads))]
    text = [
        "  ".join(
            cell.ljust(w) if i < len(by) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (heads, *lines)
    ]
    return "\n".join(text)
