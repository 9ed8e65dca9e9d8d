"""A pool of gloo processes in which tests run functions: `ranks.run(fn, *args, size=2)`.

Importing torch and starting a process costs seconds, so the processes live as long as the test
session: a forkserver that has imported torch and our modules makes them, one pipe per rank carries
functions by qualified name, and every run gets a default process group of its own by a rendezvous
through a fresh file (no port, so nothing can clash). A run on 4 ranks costs about 60 ms.

Nothing hangs: a rank that fails, dies or is silent ends the run, ranks that are stuck are killed
and replaced, and the failure is raised in the test with its rank, traceback and ledger tail.
The fixture is in tests/conftest.py; tests/test_ranks.py shows what a failure looks like.
"""

import gc
import multiprocessing
import os
import pickle
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

# Seconds. GRACE: for the others to answer once a rank has failed. CLEANUP: to leave a run's groups.
# DYING: for the exit code of a process that has closed its pipe.
LIMIT, GRACE, CLEANUP, ASK, DYING = 180.0, 0.5, 5.0, 20.0, 60.0
SILENT = "gave no answer"


class RankFailed(AssertionError):
    """A rank raised, died or did not answer; the text holds its rank, traceback and ledger tail."""


@dataclass(frozen=True)
class Task:
    """What a rank is sent; the call is pickled apart, so that a failing import is its failure."""

    rank: int
    size: int
    rendezvous: str
    limit: float
    call: bytes


@dataclass(frozen=True)
class Answer:
    """What a rank sends back: its pickled result, or when, with what and how it failed."""

    time: float
    result: bytes | None = None
    error: bytes | None = None
    story: str = ""

    @property
    def failed(self) -> bool:
        return self.result is None


class RankPool:
    """Processes 0 … n-1, started when a run first needs them."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["numpy", "tests.ranks", "tests.training"])
        self._workers: list[_Worker] = []
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        self._runs = 0

    def run(
        self, fn: Callable, *args: Any, size: int = 2, limit: float = LIMIT, **kwargs: Any
    ) -> list[Any]:
        """Calls `fn(world, *args, **kwargs)` on ranks 0 … size-1 and returns the results by rank.

        `fn` is a module-level function of an importable module; `world` is the core.comm Group of
        all ranks. Generators are seeded alike on every rank, torch uses one thread, warnings are
        errors. Raises what the first failing rank raised, caused by a RankFailed that tells where;
        a rank that died or gave no answer for `limit` seconds is a RankFailed itself.
        """
        self._runs += 1
        rendezvous = os.path.join(self._folder, f"run{self._runs}")
        call = pickle.dumps((fn, args, kwargs))
        self._workers += [_Worker(self._context) for _ in range(len(self._workers), size)]
        workers = self._workers[:size]
        try:
            for rank, worker in enumerate(workers):
                worker.send(Task(rank, size, rendezvous, limit, call))
            answers = _collect(workers, limit)
            for worker in workers:
                worker.send("end")
            deadline = time.monotonic() + CLEANUP
            reusable = [worker.becomes_idle(deadline) for worker in workers]
        except BaseException:  # Ctrl-C, mostly: no rank is in a known state
            reusable = [False] * size
            raise
        finally:
            for worker, keep in zip(workers, reusable, strict=True):
                if not keep:
                    worker.kill()
                    self._workers.remove(worker)
            if os.path.exists(rendezvous):
                os.unlink(rendezvous)
        _raise_first(answers)
        return [pickle.loads(answer.result) for answer in answers]

    def close(self) -> None:
        """Ends every process."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        shutil.rmtree(self._folder, ignore_errors=True)


class _Worker:
    """The parent's end of one process.

    pipe   carries tasks there and answers back
    line   reaches it while it works, to ask where it is
    """

    def __init__(self, context: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.line, their_line = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, their_line), daemon=True)
        self.process.start()
        theirs.close()
        their_line.close()

    def send(self, message: Any) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            pass  # it died; reading its answer will tell

    def read(self) -> Answer:
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(DYING)
            # dated before all others: they heard of its end before this process did
            return Answer(0.0, story=f"died with exit code {self.process.exitcode}")

    def whereabouts(self) -> str:
        """The stacks and the ledger tail of a process that works, or hangs."""
        try:
            self.line.send("where are you?")
            return self.line.recv() if self.line.poll(ASK) else "(it does not even run Python)"
        except (EOFError, OSError):
            return "(and is gone)"

    def becomes_idle(self, deadline: float) -> bool:
        try:
            left = max(0.0, deadline - time.monotonic())
            return self.pipe.poll(left) and self.pipe.recv() == "idle"
        except (EOFError, OSError):
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.line.close()


def _collect(workers: list[_Worker], limit: float) -> list[Answer]:
    """All answers by rank; who is silent GRACE after a failure, or at the limit, is killed."""
    deadline = time.monotonic() + limit
    answers: dict[int, Answer] = {}
    pending = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            rank = pending.pop(pipe)
            answers[rank] = workers[rank].read()
            if answers[rank].failed:
                deadline = min(deadline, time.monotonic() + GRACE)
    hung = not any(answer.failed for answer in answers.values())
    for rank in pending.values():
        where = workers[rank].whereabouts() if hung else ""
        story = "was waiting"
        if hung:
            story = f"{SILENT} within {limit:g} s; it is here:\n{where}"
        answers[rank] = Answer(time.monotonic(), story=story)
        workers[rank].kill()
    return [answers[rank] for rank in range(len(workers))]


def _raise_first(answers: list[Answer]) -> None:
    """Raises the earliest failure; ranks that failed after it, likely its victims, are listed.

    When all that is wrong is silence, every silent rank tells where it is.
    """
    failures = sorted((a.time, rank) for rank, a in enumerate(answers) if a.failed)
    if not failures:
        return
    first = failures[0][1]
    size = len(answers)
    if answers[first].story.startswith(SILENT):
        told = [f"rank {rank} of {size} {answers[rank].story}" for _, rank in failures]
    else:
        others = ", ".join(str(rank) for _, rank in failures[1:]) or "none"
        told = [f"rank {first} of {size} {answers[first].story}", f"(failed after it: {others})"]
    failure = RankFailed("\n".join(told))
    if answers[first].error is None:
        raise failure
    raise pickle.loads(answers[first].error) from failure


# ---- the other side: what runs in a rank's process ------------------------------------------


def _serve(pipe: Connection, line: Connection) -> None:
    """Runs tasks until the parent closes the pipe or dies."""
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what was imported so far is never garbage: _forget has little to look at
    state: dict[str, Any] = {"main": threading.get_ident(), "world": None}
    threading.Thread(target=_answer_line, args=(line, state), daemon=True).start()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.send(_answer(task, state))
            pipe.recv()  # "end": nobody needs this rank's connections any more
            if state["world"] is None:
                return  # it did not join: its next default group would not have the others' name
            _forget(state)
        pipe.send("idle")


def _answer(task: Task, state: dict[str, Any]) -> Answer:
    try:
        state["world"] = world = _join(task)
        _seed()
        fn, args, kwargs = pickle.loads(task.call)
        return Answer(time.monotonic(), result=pickle.dumps(fn(world, *args, **kwargs)))
    except BaseException as error:
        now, world = time.monotonic(), state["world"]
        tail = world.ledger.tail(10) if world else "(it had not joined its process group)"
        story = f"failed:\n{traceback.format_exc()}last communication:\n{tail}"
        return Answer(now, error=_pickled(error), story=story)


def _join(task: Task) -> Any:
    """A fresh default process group of gloo, as the world Group."""
    import torch.distributed as dist

    from core.comm import Group, Ledger

    dist.init_process_group(
        "gloo",
        init_method=f"file://{task.rendezvous}",
        rank=task.rank,
        world_size=task.size,
        timeout=timedelta(seconds=task.limit + DYING),  # the pool's limit comes first, and says who
    )
    return Group("world", tuple(range(task.size)), task.rank, Ledger(), dist.group.WORLD)


MANY_THREADS = 64


def threads() -> int:
    """Of this process, those of its libraries included; 0 where nobody says."""
    return len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0


def _forget(state: dict[str, Any]) -> None:
    """Leaves nothing of a run behind: groups, wrappers of groups, the default grid."""
    import torch.distributed as dist

    from core.comm import group

    state["world"] = None
    group._WRAPPED.clear()
    if parallel_state := sys.modules.get("core.parallel_state"):
        parallel_state.destroy_model_parallel()
    if threads() > MANY_THREADS:  # what runs built may hold their groups, and threads, in cycles
        gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _seed() -> None:
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _pickled(error: BaseException) -> bytes | None:
    """The exception for the parent, if it is an ordinary one and survives the journey."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data if isinstance(error, Exception) else None


def _answer_line(line: Connection, state: dict[str, Any]) -> None:
    """Answers while the main thread works or hangs; ends the process when the parent is gone."""
    while True:
        try:
            line.recv()
        except EOFError:
            os._exit(1)
        stack = "".join(traceback.format_stack(sys._current_frames()[state["main"]]))
        world = state["world"]
        line.send(f"{stack}last communication:\n{world.ledger.tail(10) if world else '(none)'}")
