"""Three threads that keep a rank from outliving the run, or the run from outliving a rank.

The listener waits, on a store connection of its own, for the one key that ends a run: "done", or
the first `Failure`. Whoever fails writes it with compare-and-set, so all ranks leave within
milliseconds and agree on whom to name.

The pulse counts up this rank's entry in the store and answers when rank 0 asks where this rank is
(core/launch/hang.py); on rank 0 it asks when nothing moves, and looks for hosts whose entries all
stand still and where no process answers its bell (core/launch/bell.py), because the machine or the
network is gone.

The look-out never touches the store, whose calls do not return when its owner is frozen. It sees
that the pulse gets no answer, and it looks at a neighbour on the same host, in /proc: dead, or
stopped (SIGSTOP), is seen without the neighbour's help, while one that holds Python's global lock
for a minute is left alone.

Works on a torch store handed in by core/launch/world.py, which owns one Watch; imports no torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from core.launch.bell import Bell, rings
from core.launch.failure import Failure, Reporter
from core.launch.hang import (
    AwakeClock,
    Progress,
    account,
    account_file,
    judge,
    write_account,
    write_account_in_time,
)

BEAT = 1.0
BEATS_A_SECOND = 2000  # of all ranks together, for the store's sake
SILENCE = 10.0  # seconds without a sign of life
LONE_SILENCE = 60.0  # the same for the only rank of a host, which may just be busy
SILENT_BEATS = 3  # a silence is at least so many beats, which are slow where ranks are many
ANSWER_BEATS = 2.5  # for all ranks to say where they are
RUNG = 2  # processes of a silent host whose bells are tried
BUSY_SILENCE = 300.0  # for which a host is believed to be busy while its bell is answered
LINGER = 5.0  # how long a failed owner of the store waits for the others to have read why
# The same where one of them is dead or stopped; and for threads of this process to end.
LINGER_SHORTLY = 1.0
DONE = b"done"
GONE = ("", "Z", "X")  # states of a process that is dead
FOREVER = timedelta(days=30)


@dataclass(frozen=True)
class Process:
    """A rank's process as others need to know it.

    space  tells process-id namespaces apart
    bell   address and port of its Bell; ("", 0) where there is none
    """

    rank: int
    host: str
    pid: int
    space: str
    bell: tuple[str, int] = field(default=("", 0), compare=False)

    def shares_host_with(self, other: Process) -> bool:
        return (self.host, self.space) == (other.host, other.space)

    def state(self) -> str:
        """R, S, D, Z (dead), T (stopped) …; "" for none. To be asked on its own host.

        Without /proc every process counts as running.
        """
        if not Path("/proc/self/stat").exists():
            return "R"
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""


@dataclass(frozen=True)
class Circle:
    """Whom a rank watches.

    me         this rank
    neighbour  the next rank of my host, if there is another
    owner      rank 0 if it serves the store; None if torchrun's agent does
    everyone   on rank 0, all ranks in order
    """

    me: Process
    neighbour: Process | None
    owner: Process | None
    everyone: Sequence[Process]
    size: int


class Watch:
    """The three threads of one rank; `store` is a torch TCPStore, and each gets its own clone."""

    def __init__(
        self,
        store: Any,
        prefix: str,
        circle: Circle,
        reporter: Reporter,
        progress: Progress,
        *,
        silence: float = SILENCE,
        bell: Bell | None = None,
    ) -> None:
        self._store, self._prefix = store.clone(), prefix
        self._circle, self._reporter, self._bell = circle, reporter, bell
        self._beat = max(BEAT, circle.size / BEATS_A_SECOND)
        self._silence = max(silence, SILENT_BEATS * self._beat)
        self._progress = progress
        self._question, self._asked = 0, time.monotonic()
        self._owns_store = circle.owner == circle.me
        self._owner_states: deque[str] = deque(maxlen=2)  # as last seen alive
        self._ring_at: dict[str, float] = {}  # by host, on rank 0
        self._over = threading.Event()
        self._heard = False  # of another rank's failure
        self._answered = 0  # how often the store has answered the pulse
        self._writing_stacks, self._wrote_stacks = threading.Lock(), False
        self._threads: list[threading.Thread] = []

    def start(self) -> Watch:
        self._reporter.others = self
        self._threads = [
            threading.Thread(target=self._listen, args=(self._store.clone(),), daemon=True),
            threading.Thread(target=self._pulse, args=(self._store.clone(),), daemon=True),
            threading.Thread(target=self._look_out, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def finish(self, seconds: float) -> None:
        """Waits until every rank has got here; then nobody needs this rank any more.

        Without an answer for so long this rank goes all the same: all its work is done.
        """
        if self._store.add(self._key("finished"), 1) == self._circle.size:
            self._store.compare_set(self._key("end"), b"", DONE)
        self._over.wait(seconds)
        self._over.set()
        self._reporter.others = None
        for thread in self._threads:
            thread.join(LINGER_SHORTLY)
        if self._bell:
            self._bell.close()
        self._say_goodbye(seconds)

    def announce(self, failure: Failure) -> bool:
        """Writes the failure where all ranks see it; False if another one came first."""
        text = failure.to_json().encode()
        try:
            return self._store.compare_set(self._key("end"), b"", text) == text
        except RuntimeError:
            return not self._heard  # the store is gone, and that ends all others too

    def ask_around(self) -> None:
        """Makes every rank say where it is; rank 0 names one that does not."""
        with suppress(RuntimeError):  # the store is gone, and its owner is to blame
            self._store.add(self._key("question"), 1)

    def linger(self, seconds: float = LINGER) -> None:
        """Waits a moment for the others to have read, if this process serves the store."""
        with suppress(RuntimeError):
            self._say_goodbye(seconds)

    def _say_goodbye(self, seconds: float) -> None:
        """The owner of the store leaves last, the others at once."""
        gone = self._store.add(self._key("gone"), 1)
        clock = AwakeClock()
        while self._owns_store and gone < self._circle.size and clock.now(0.1) < seconds:
            time.sleep(0.01)
            gone = self._store.add(self._key("gone"), 0)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    # ---- the listener -----------------------------------------------------------------------

    def _listen(self, store: Any) -> None:
        try:
            store.wait([self._key("end")], FOREVER)
            end = store.get(self._key("end"))
        except RuntimeError:
            self._store_is_gone("closed its connections")
            return
        if end == DONE:
            self._over.set()
            return
        first, me = Failure.from_json(end), self._circle.me
        if (first.rank, first.pid) == (me.rank, me.pid) and self._reporter.is_leaving:
            return  # my own failure, and I am on my way out
        self._heard = True  # before the owner can close the store: who fails now is not the first
        self._write_stacks(first.stacks)
        self._put_down(first)
        store.add(self._key("gone"), 1)
        self._reporter.yield_to(first)

    def _store_is_gone(self, how: str) -> None:
        time.sleep(0.2)  # for the main thread, if it is about to end in good order
        if self._reporter.folders and not self._over.is_set():
            self._reporter.let_the_cause_speak()
        if self._over.is_set():
            return
        owner = self._circle.owner
        if owner is None:
            self._reporter.fail(Failure(self._circle.me.rank, f"torchrun's store {how}"))
        else:
            stopped = "stopped (SIGSTOP), " if "T" in self._owner_states else ""
            self._declare(owner, f"{stopped}its store {how}", guess=not stopped)

    def _put_down(self, failure: Failure) -> None:
        """Kills a neighbour that is stopped; its supervisor would wait long for it to end."""
        neighbour = self._circle.neighbour
        if neighbour and failure.pid == neighbour.pid and neighbour.state() == "T":
            os.kill(neighbour.pid, signal.SIGKILL)

    # ---- the pulse --------------------------------------------------------------------------

    def _pulse(self, store: Any) -> None:
        seen: dict[int, tuple[bytes, float]] = {}
        clock = AwakeClock()
        while not self._over.wait(self._beat):
            try:
                if self._bell:
                    self._bell.drain()
                store.add(self._key(f"beat/{self._circle.me.rank}"), 1)
                self._answered += 1
                asked = self._answer(store)
                if self._circle.everyone:
                    self._check_hosts(store, seen, clock.now(2 * self._beat))
                    self._check_answers(store, asked)
            except RuntimeError:
                self._store_is_gone("closed its connections")
                return

    def _check_hosts(self, store: Any, seen: dict[int, tuple[bytes, float]], now: float) -> None:
        """On rank 0: every host must have a rank whose count moves, or that can be rung."""
        keys = [self._key(f"beat/{rank}") for rank in range(self._circle.size)]
        if not store.check(keys):
            return  # not all have begun
        for rank, count in enumerate(store.multi_get(keys)):
            if rank not in seen or seen[rank][0] != count:
                seen[rank] = (count, now)
        hosts: dict[str, list[Process]] = defaultdict(list)
        for process in self._circle.everyone:
            hosts[process.host].append(process)
        for there in hosts.values():
            limit = self._silence if len(there) > 1 else max(LONE_SILENCE, self._silence)
            silence = min(now - seen[process.rank][1] for process in there)
            if silence > limit and not self._are_busy(there, silence, now):
                self._declare(there[0], f"no sign of life from its host for {silence:.0f} s")

    def _are_busy(self, there: list[Process], silence: float, now: float) -> bool:
        """Whether a silent host's ranks may all be deep in calls that hold the global lock."""
        host = there[0].host
        if silence > BUSY_SILENCE:
            return False
        if now >= self._ring_at.get(host, 0.0):  # not at every beat: a busy process drains nothing
            if not any(rings(process.bell) for process in there[:RUNG]):
                return False
            self._ring_at[host] = now + self._silence
        return True

    def _answer(self, store: Any) -> bool:
        """Says where this rank is if somebody has asked; all stacks go to a file."""
        question = store.add(self._key("question"), 0)
        still = self._progress.still()
        if question <= self._question:
            return False
        self._question, rank = question, self._circle.me.rank
        answer = {**self._progress.answer(), "still": still}
        store.set(self._key(f"answer/{question}/{rank}"), json.dumps(answer))
        for folder in self._reporter.folders:
            with suppress(OSError):
                write_account(folder, rank, account(answer))
        return True

    def _check_answers(self, store: Any, asked: bool) -> None:
        """On rank 0: judges the answers when a rank has asked, or when nothing moves for long."""
        limit, now = self._progress.limit(), time.monotonic()
        hung = self._progress.still() > limit and (asked or now - self._asked > limit / 2)
        if not (asked or hung):
            return
        self._asked = now
        if not asked:
            store.add(self._key("question"), 1)
            self._answer(store)
        answers = self._gather(store, self._question)
        everyone = self._circle.everyone
        silent = [process for process in everyone if process.rank not in answers]
        # a rank that asks has waited in vain: one that is busy has had all the time there is
        busy_patience = limit if asked else self._progress.busy_patience()
        patience = (self._progress.patience(), busy_patience)
        verdict = judge(answers, self._circle.size, limit, *patience) if hung else None
        if self._over.is_set():
            return
        if verdict is not None:
            culprit = everyone[verdict.culprit]
            stacks, where = self._where_stacks_go()
            report = f"{verdict.report}all threads of every rank{where}\n"
            self._declare(culprit, verdict.cause, report, verdict.step, stacks)
        elif silent and asked:
            dead = next((process for process in silent if not rings(process.bell)), silent[0])
            self._declare(dead, "died without a word, or is cut off", guess=True)

    def _where_stacks_go(self) -> tuple[str | None, str]:
        """What a Failure says of the stacks of a hung run, and the same in words."""
        if kept := self._reporter.lasting_folders:  # with every answer
            return None, f": {account_file(kept[-1], '*')}"
        if save := self._reporter.status_dir:
            folder = str(Path(save, time.strftime("hang-%Y%m%d-%H%M%S")))
            return folder, f": {account_file(folder, '*')}"
        return "", " are in this output; --save or --log-dir D would keep them in files"

    def _write_stacks(self, stacks: str | None) -> None:
        """This rank's own, once, now that the run is over because it hangs."""
        with self._writing_stacks:
            if stacks is None or self._wrote_stacks:
                return
            self._wrote_stacks = True
            rank, text = self._circle.me.rank, account(self._progress.answer())
            if not (stacks and write_account_in_time(stacks, rank, text)):
                print(f"all threads of rank {rank}:\n{text}", file=sys.stderr, flush=True)

    def _gather(self, store: Any, question: int) -> dict[int, dict]:
        """The answers by rank, of those ranks that answer in time."""
        keys = {r: self._key(f"answer/{question}/{r}") for r in range(self._circle.size)}
        clock = AwakeClock()  # a machine that stood still meanwhile has let nobody answer
        while not store.check(list(keys.values())):
            if clock.now(0.2 * self._beat) >= ANSWER_BEATS * self._beat:
                break
            time.sleep(0.05)
        return {r: json.loads(store.get(key)) for r, key in keys.items() if store.check([key])}

    # ---- the look-out -----------------------------------------------------------------------

    def _look_out(self) -> None:
        stopped_since: float | None = None
        clock, answered, since = AwakeClock(), self._answered, 0.0
        while not self._over.wait(BEAT):
            now = clock.now(2 * BEAT)
            self._look_at_owner()
            stopped_since = self._check_neighbour(stopped_since, now)
            if answered != self._answered:
                answered, since = self._answered, now
            if now - since > self._silence + 2 * self._beat:  # a stopped neighbour is named before
                self._store_is_gone(f"gave no answer for {now - since:.0f} s")
                return

    def _look_at_owner(self) -> None:
        """Remembers whether it was stopped when last seen alive: its neighbour kills it then.

        Two looks are kept: a process that is killed while it is stopped runs once more, to die.
        """
        owner, me = self._circle.owner, self._circle.me
        if owner is not None and owner.shares_host_with(me):
            state = owner.state()
            if state not in GONE:
                self._owner_states.append(state)

    def _check_neighbour(self, stopped_since: float | None, now: float) -> float | None:
        """Names the neighbour if it is dead, or stopped for too long; returns since when it is."""
        neighbour = self._circle.neighbour
        state = neighbour.state() if neighbour else "R"
        if state in GONE:
            time.sleep(BEAT)  # whoever started it knows more, and may say so
            if not self._over.is_set():
                self._declare(neighbour, "died without a word", guess=True)
        if state != "T":
            return None
        since = now if stopped_since is None else stopped_since
        if now - since >= self._silence:
            cause = f"stopped (SIGSTOP), no sign of life for {self._silence:g} s"
            self._declare(neighbour, cause)
        return since

    def _declare(
        self,
        culprit: Process,
        cause: str,
        report: str = "",
        step: int | None = None,
        stacks: str | None = None,
        *,
        guess: bool = False,
    ) -> None:
        """Names another rank as the cause and ends this one."""
        who = {"host": culprit.host, "pid": culprit.pid, "step": step, "stacks": stacks}
        failure = Failure(culprit.rank, cause, **who, traceback=report, guess=guess)
        self._reporter.record(failure)
        if report and not self._reporter.parent_tells:
            print(failure, file=sys.stderr, flush=True)
        # the owner's store is gone, or hangs, unless it is the owner that says so of itself
        if culprit != self._circle.owner or self._owns_store:
            self.announce(failure)
            self._write_stacks(stacks)
            self.linger(LINGER if report else LINGER_SHORTLY)
        self._put_down(failure)
        self._reporter.yield_to(failure)
