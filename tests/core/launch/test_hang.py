"""Who holds a run up: judged from what the ranks answer, and what a rank answers."""

import threading

import pytest

from core.comm.ledger import Ledger
from core.launch.hang import (
    AwakeClock,
    Progress,
    account,
    disagreements,
    done_in_looks,
    judge,
)


def answer(**changed):
    usual = {"step": 7, "count": 90, "still": 30.0, "waiting": True, "busy": "", "stack": "…"}
    return {**usual, "events": [], **changed}


def note(ledger: Ledger, tag: str, group: str = "tp", op: str = "all_reduce") -> None:
    ledger.record(op=op, group=group, size=2, dtype="float32", numel=8, payload=32, tag=tag)


@pytest.mark.parametrize(
    ("answers", "culprit", "why"),
    [
        ({0: answer(), 1: answer(waiting=False), 2: answer()}, 1, "others wait for it"),
        ({0: answer(), 2: answer()}, 1, "does not even answer"),
        ({0: answer(), 1: answer(), 2: answer(count=88)}, 2, "furthest behind"),
        ({0: answer(), 1: answer(step=6), 2: answer(count=88)}, 1, "furthest behind"),
        ({0: answer(waiting=False), 1: answer(waiting=False, step=6), 2: answer()}, 1, "wait"),
    ],
)
def test_the_culprit(answers, culprit, why) -> None:
    verdict = judge(answers, 3, 20.0, 25.0, 60.0)
    assert verdict.culprit == culprit and why in verdict.cause


def test_nobody_is_to_blame_while_one_works() -> None:
    """Ranks wait at a barrier while one builds an index or writes a checkpoint."""
    others = {0: answer(still=59.0)}
    busy = answer(waiting=False, busy="data", still=59.0)
    assert judge({**others, 1: busy}, 2, 20.0, 20.0, 60.0) is None
    assert judge({**others, 1: answer(waiting=False, still=1.0)}, 2, 20.0, 20.0, 60.0) is None


def test_a_file_system_that_never_answers_is_a_hang() -> None:
    """All ranks read from it, or all are inside a save and wait for the one that writes."""
    reads, longest = (answer(waiting=False, busy="data", still=s) for s in (61.0, 64.0))
    verdict = judge({0: reads, 1: longest, 2: reads}, 3, 20.0, 20.0, 60.0)
    assert verdict.culprit == 1
    assert verdict.cause.startswith("hung: no progress for 60 s; it is reading or writing data, ")
    assert "for 64 s now: does its file system answer?" in verdict.cause
    waits = answer(busy="a checkpoint", still=70.0)
    writes = answer(waiting=False, busy="a checkpoint", still=61.0)
    verdict = judge({0: waits, 1: waits, 2: writes}, 3, 20.0, 20.0, 60.0)
    assert verdict.culprit == 2 and "reading or writing a checkpoint" in verdict.cause
    assert "furthest behind" in judge({0: waits, 1: waits}, 2, 20.0, 20.0, 60.0).cause


@pytest.mark.parametrize(
    ("given", "timeout", "seconds"),
    [(None, 600.0, 1800.0), (None, 3600.0, 9720.0), (5.0, 600.0, 1800.0), (7200.0, 600.0, 21600.0)],
)
def test_who_reads_or_writes_has_longer(given, timeout, seconds) -> None:
    """Half an hour, or three times what is a hang; a timeout that is given scales it as well."""
    assert Progress(Ledger(), given, timeout).busy_patience() == seconds


def test_a_rank_that_cannot_answer_may_be_in_a_long_call() -> None:
    """Sorting an index, or compiling, for three minutes under Python's global lock."""
    answers = {0: answer(still=180.0), 2: answer(still=180.0)}
    assert judge(answers, 3, 120.0, Progress(Ledger(), None, 600.0).patience(), 0.0) is None
    assert judge(answers, 3, 120.0, Progress(Ledger(), 120.0, 600.0).patience(), 0.0).culprit == 1


def test_time_in_which_nobody_could_look_does_not_count(monkeypatch) -> None:
    """A job that was suspended for an hour, or whose threads waited for the global lock."""
    now = [0.0]
    monkeypatch.setattr("core.launch.hang.time.monotonic", lambda: now[0])
    clock, progress = AwakeClock(), Progress(Ledger(), 20.0, 600.0)
    progress.still()
    now[0] = 1.0
    assert (clock.now(2.0), progress.still()) == (1.0, 1.0)
    now[0] = 3601.0
    assert (clock.now(2.0), progress.still()) == (3.0, 11.0)


def test_a_rank_looks_busy_from_its_own_stack() -> None:
    """The module names on the main thread's stack decide."""
    scope = {"__name__": "core.checkpoint.store"}
    exec("def save(progress): return progress.answer()", scope)
    progress = Progress(Ledger(), None, 600.0)
    progress._main = threading.get_ident()
    assert scope["save"](progress)["busy"] == "a checkpoint"
    assert not progress.answer()["busy"]


def test_the_first_call_on_which_ranks_differ() -> None:
    mine, other, ahead = Ledger(), Ledger(), Ledger()
    for tag in ("a", "b", "c"):
        note(mine, tag)
        note(other, "x" if tag == "b" else tag)
        note(ahead, tag)
    note(ahead, "d")
    answers = {}
    for rank, ledger in enumerate((mine, other, ahead)):
        progress = Progress(ledger, None, 600.0)
        progress.members = {"tp": [0, 1] if rank < 2 else [2, 3]}
        answers[rank] = progress.answer()
    assert disagreements(answers) == [
        "tp call 2: rank 0 all_reduce b float32 x 8; rank 1 all_reduce x float32 x 8"
    ]


def test_calls_are_numbered_from_the_start_whatever_the_ledger_still_holds() -> None:
    """A ledger drops old steps, and one-sided transfers are not in step on all ranks."""
    ledger = Ledger(keep_steps=1)
    for step in range(3):
        ledger.begin_step(step)
        note(ledger, f"s{step}")
        for _ in range(step):
            note(ledger, "F", op="send")
    progress = Progress(ledger, None, 600.0)
    assert [(number, what.split()[1]) for _, _, number, what in progress.answer()["events"]] == [
        (3, "s2")
    ]


def test_the_limit_follows_the_steps_and_stays_below_the_collectives_timeout(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr("core.launch.hang.time.monotonic", lambda: now[0])
    progress = Progress(Ledger(), None, 600.0)
    assert progress.limit() == 540.0
    for step in range(5):
        progress.begin_step(step)
        now[0] += 1.0
    assert progress.limit() == 120.0
    for step in range(20):
        progress.begin_step(step)
        now[0] += 30.0
    assert progress.limit() == 300.0
    assert Progress(Ledger(), 5.0, 600.0).limit() == 5.0


def test_the_longest_wait_for_a_stop_is_a_step_and_its_save(monkeypatch) -> None:
    """An evaluation of an hour polls; counted whole, it would end each job two hours early."""
    now = [0.0]
    monkeypatch.setattr("core.launch.hang.time.monotonic", lambda: now[0])
    progress = Progress(Ledger(), None, 600.0)

    def after(seconds: float, then) -> None:
        now[0] += seconds
        then()

    after(500.0, progress.polled)  # the data was built
    after(70.0, lambda: progress.begin_step(1))
    for _ in range(60):  # a step, then batches of an evaluation
        after(60.0, progress.polled)
    after(90.0, progress.polled)  # a save
    after(0.0, lambda: progress.begin_step(2))
    after(60.0, progress.polled)
    assert progress.longest == 90.0


def test_progress_is_a_step_or_a_collective(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr("core.launch.hang.time.monotonic", lambda: now[0])
    ledger = Ledger()
    progress = Progress(ledger, None, 600.0)
    progress.still()
    now[0] = 9.0
    assert progress.still() == 9.0
    note(ledger, "a")
    assert progress.still() == 0.0
    now[0] = 11.0
    progress.begin_step(1)
    assert progress.still() == 0.0


def test_an_account_has_all_threads_and_the_last_calls() -> None:
    ledger = Ledger()
    for number in range(60):
        note(ledger, f"t{number}")
    thread = threading.Thread(target=(stay := threading.Event()).wait, name="loader-7")
    thread.start()
    text = account(Progress(ledger, None, 600.0).answer())
    stay.set()
    thread.join()
    assert "thread loader-7\n" in text and "in test_an_account_has_all_threads" in text
    calls = text.splitlines()[-50:]
    assert calls[0] == "  tp call 11: all_reduce t10 float32 x 8"
    assert calls[-1] == "  tp call 60: all_reduce t59 float32 x 8"


@pytest.mark.parametrize(("at", "done"), [(0, True), (3, True), (10, True), (11, False)])
def test_a_wait_is_so_many_looks_long_whatever_the_clock(at, done):
    pauses = []
    assert done_in_looks(lambda: len(pauses) == at, 1.0, 0.1, pauses.append) is done
    assert pauses == [0.1] * min(at, 10)
