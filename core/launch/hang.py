"""Hung, not dead: is the run still moving, and if not, who holds it up?

Every rank keeps a `Progress`. When rank 0 has seen neither a step nor a collective for too long, it
asks all ranks where they are (core/launch/watch.py carries question and answers) and `judge`s the
answers: nobody is to be blamed while some rank reads data or writes a checkpoint, but for so long
only that a file system must have died. Otherwise the culprit is, in this order: a rank that does
not answer; the one that has read or written for longest; one that is not in a collective while
others wait in one; the one that is furthest behind.

Time in which this process could not look at all does not count: `AwakeClock`.

Pure but for looking at this process's own stacks, and writing them down.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Without a limit given: so many median steps, but at least so many seconds; and always before the
# collectives themselves time out, which names nobody.
MEDIANS, AT_LEAST, BEFORE_TIMEOUT = 10, 120.0, 0.9
KNOWN_STEPS = 3
# A rank that reads data or writes a checkpoint has so many limits, but at least so many seconds. A
# big job's save or index takes many minutes, none takes half an hour; and who gives steps more time
# has more to save as well.
BUSY_LIMITS, BUSY_AT_LEAST = 3, 1800.0
WAITING = ("core.comm",)
BUSY = {"core.checkpoint": "a checkpoint", "data": "data"}  # package -> what it reads or writes
ONE_SIDED = ("send", "recv")  # calls that the ranks of a group do not all make
LOOK = (
    "does its file system answer? if it is just slow, raise --hang-timeout-seconds, and "
    "--distributed-timeout-minutes where others wait for it in a collective"
)
EVENTS = 50  # of the ledger, that a rank answers with
FRAMES = 6  # of the main thread, that an answer and a report show
# Seconds for stacks to be written, and between looks: a dead file system may be why a run hangs.
WRITE_WAIT, WRITE_LOOK = 1.0, 0.05


class AwakeClock:
    """Seconds, of which no more than `most` pass between two looks at it.

    For a thread that looks regularly. When it could not, because the job was suspended or one call
    held Python's global lock for minutes, the silence it finds afterwards is its own.
    """

    def __init__(self) -> None:
        self._now, self._looked = 0.0, time.monotonic()

    def now(self, most: float) -> float:
        moment = time.monotonic()
        self._now += min(moment - self._looked, most)
        self._looked = moment
        return self._now


def done_in_looks(
    done: Callable[[], bool],
    seconds: float,
    look: float,
    pause: Callable[[float], object] = time.sleep,
) -> bool:
    """Whether it is done after so many seconds, counted in looks: after a clock's the machine may
    have stood still, and nobody has had the time.

    pause  passes the seconds between two looks, and may end sooner
    """
    for _ in range(round(seconds / look)):
        if done():
            return True
        pause(look)
    return done()


class Progress:
    """Steps and collectives of this rank, and since when there has been no new one."""

    def __init__(self, ledger: Any, hang_seconds: float | None, timeout_seconds: float) -> None:
        self._ledger = ledger
        self._given, self._timeout = hang_seconds, timeout_seconds
        self._gaps: deque[float] = deque(maxlen=100)
        self._step_began: float | None = None
        self._seen = (None, -1)
        self._clock, self._since = AwakeClock(), 0.0
        self._main = threading.main_thread().ident
        self.step: int | None = None
        self._polled: float | None = None
        self.longest = 0.0  # seconds from one moment to stop to the next: a step and its save
        self.longest_write = 0.0  # of a checkpoint, beside the steps
        self.members: Mapping[str, Sequence[int]] = {}

    def begin_step(self, step: int) -> None:
        now = time.monotonic()
        if self._step_began is not None:
            self._gaps.append(now - self._step_began)
        if self._polled is None:
            self._polled = now
        self.step, self._step_began = step, now

    def polled(self) -> None:
        """A stop would be obeyed now. An evaluation has many such moments, a save none."""
        now = time.monotonic()
        if self._polled is not None:
            self.longest, self._polled = max(self.longest, now - self._polled), now

    def limit(self) -> float:
        """Seconds without any progress that make a hang."""
        if self._given is not None:
            return self._given
        before_timeout = BEFORE_TIMEOUT * self._timeout
        if len(self._gaps) < KNOWN_STEPS:
            return before_timeout
        return min(before_timeout, max(AT_LEAST, MEDIANS * statistics.median(self._gaps)))

    def patience(self) -> float:
        """The same, where a rank does not answer: it may be deep in a call that holds Python's
        global lock. That its process is dead or stopped is seen in other ways, and sooner."""
        return BEFORE_TIMEOUT * self._timeout if self._given is None else self._given

    def busy_patience(self) -> float:
        """The same, where a rank reads or writes files."""
        return max(BUSY_AT_LEAST, BUSY_LIMITS * self.limit())

    def still(self) -> float:
        """Seconds since the last sign of progress; to be asked regularly."""
        now, seen = self._clock.now(self.limit() / 2), (self.step, self._ledger.count)
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since

    def answer(self) -> dict:
        """Where this rank is, for rank 0 to judge."""
        stack = traceback.StackSummary.extract(traceback.walk_stack(self._main_frame()))
        modules = [frame.f_globals.get("__name__", "") for frame in self._frames()]
        return {
            "step": self.step,
            "count": self._ledger.count,
            "still": self.still(),
            "waiting": _any_in(modules, WAITING),
            "busy": next((what for of, what in BUSY.items() if _any_in(modules, (of,))), ""),
            "stack": "".join(traceback.format_list(list(reversed(stack[:FRAMES])))),
            "events": self._numbered_events(),
        }

    def _main_frame(self) -> Any:
        return sys._current_frames().get(self._main)

    def _frames(self) -> Iterator[Any]:
        frame = self._main_frame()
        while frame is not None:
            yield frame
            frame = frame.f_back

    def _numbered_events(self) -> list[tuple[str, list[int], int, str]]:
        """(group, its ranks, number within the group, what) of the last events.

        The number counts the group's calls from the start, so that it means the same on all ranks.
        """
        numbers: dict[str, int] = defaultdict(int)
        for (group, op), total in self._ledger.grand_totals().items():
            numbers[group] += total.calls if op not in ONE_SIDED else 0
        kept = [event for event in self._ledger.events() if event.op not in ONE_SIDED]
        for event in kept:
            numbers[event.group] -= 1
        numbered = []
        for event in kept:
            numbers[event.group] += 1
            what = f"{event.op} {event.tag} {event.dtype} x {event.numel:,}"
            ranks = list(self.members.get(event.group, ()))
            numbered.append((event.group, ranks, numbers[event.group], what))
        return numbered[-EVENTS:]


def _any_in(modules: Sequence[str], packages: Sequence[str]) -> bool:
    return any(name == p or name.startswith(p + ".") for name in modules for p in packages)


def account(answer: Mapping[str, Any]) -> str:
    """What a rank writes down beside its answer: all its stacks, and its last calls."""
    calls = [f"  {group} call {number}: {what}" for group, _, number, what in answer["events"]]
    return "\n".join([all_stacks(), "last collectives, the newest at the end", *calls, ""])


def account_file(folder: str | Path, rank: int | str) -> Path:
    return Path(folder, f"hang.rank{rank}.txt")


def write_account(folder: str | Path, rank: int, text: str) -> None:
    """The folder is made: somebody may have cleaned up. Raises OSError."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    account_file(folder, rank).write_text(text)


def write_account_in_time(folder: str | Path, rank: int, text: str) -> bool:
    """Whether it is there within WRITE_WAIT."""
    written = threading.Event()

    def write() -> None:
        with suppress(OSError):
            write_account(folder, rank, text)
            written.set()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    done_in_looks(lambda: not thread.is_alive(), WRITE_WAIT, WRITE_LOOK, thread.join)
    return written.is_set()


def all_stacks() -> str:
    """Every thread of this process, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


# ---- rank 0's judgement ---------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Who holds the run up, why we think so, and what every rank was doing."""

    culprit: int
    step: int | None
    cause: str
    report: str


def judge(
    answers: Mapping[int, dict], size: int, limit: float, patience: float, busy_patience: float
) -> Verdict | None:
    """The verdict on a run in which rank 0 sees no progress; None while there is a good reason.

    `answers` may lack ranks. In seconds, `limit` is rank 0's, `patience` that for ranks that do not
    answer and `busy_patience` that for those that read or write; all count from the last step or
    collective.
    """
    if any(answer["still"] < limit / 2 for answer in answers.values()):
        return None
    if any(answer["busy"] and answer["still"] < busy_patience for answer in answers.values()):
        return None
    silent = [rank for rank in range(size) if rank not in answers]
    if silent and max(answer["still"] for answer in answers.values()) < patience:
        return None
    idle = [rank for rank, answer in answers.items() if not answer["waiting"]]
    waiting = [rank for rank, answer in answers.items() if answer["waiting"]]
    busy = [rank for rank in idle if answers[rank]["busy"]]  # a save has its collectives, too

    def progress(rank: int) -> tuple[int, int, int]:
        return (answers[rank]["step"] or 0, answers[rank]["count"], rank)

    if silent:
        culprit, why = silent[0], "it does not even answer"
    elif busy:
        culprit = max(busy, key=lambda rank: (answers[rank]["still"], -rank))
        limit, what = busy_patience, answers[culprit]["busy"]
        why = f"it is reading or writing {what}, for {answers[culprit]['still']:.0f} s now: {LOOK}"
    elif idle and waiting:
        culprit, why = min(idle, key=progress), "the others wait for it in a collective"
    else:
        culprit, why = min(answers, key=progress), "it is the furthest behind"
    cause = f"hung: no progress for {limit:g} s; {why}"
    step = answers[culprit]["step"] if culprit in answers else None
    return Verdict(culprit, step, cause, _report(answers, culprit))


def _report(answers: Mapping[int, dict], culprit: int) -> str:
    lines = [
        f"  rank {rank}: step {answer['step']}, "
        f"{'in' if answer['waiting'] else 'NOT in'} a collective, "
        f"last {answer['events'][-1][3] if answer['events'] else 'nothing communicated'}"
        for rank, answer in sorted(answers.items())
    ]
    lines += [f"  {line}" for line in disagreements(answers)]
    where = answers[culprit]["stack"] if culprit in answers else ""
    return "\n".join([*lines, *([f"rank {culprit} is here:", where.rstrip()] if where else []), ""])


def disagreements(answers: Mapping[int, dict]) -> list[str]:
    """For each group, the first call on which its ranks differ, or that some have not entered.

    >>> a = {"events": [("tp", [0, 1], 7, "all_reduce x")]}
    >>> b = {"events": [("tp", [0, 1], 7, "all_gather y")]}
    >>> disagreements({0: a, 1: b})
    ['tp call 7: rank 0 all_reduce x; rank 1 all_gather y']
    """
    calls: dict[tuple, dict[int, dict[int, str]]] = defaultdict(dict)
    for rank, answer in answers.items():
        for group, ranks, number, what in answer["events"]:
            if ranks:
                calls[group, tuple(ranks)].setdefault(rank, {})[number] = what
    found = []
    for (group, ranks), by_rank in calls.items():
        here = [rank for rank in ranks if rank in answers]
        first = max(min(numbers) for numbers in by_rank.values())
        last = max(max(numbers) for numbers in by_rank.values())
        for number in range(first, last + 1):
            whats = {r: by_rank.get(r, {}).get(number, "has not entered it") for r in here}
            if len(set(whats.values())) > 1:
                told = "; ".join(f"rank {rank} {what}" for rank, what in whats.items())
                found.append(f"{group} call {number}: {told}")
                break
    return found
