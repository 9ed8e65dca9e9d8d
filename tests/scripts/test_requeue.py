"""After a run: goes on from what was saved, never in circles."""

import json

import pytest

from core.launch.status import Status
from scripts import requeue
from scripts.requeue import Run, decide


def run(outcome: str, step: int) -> Run:
    return Run("812", 0, outcome, "SIGUSR1", step)


@pytest.mark.parametrize(
    ("steps", "outcome", "step", "again"),
    [
        ([], "stopped", 100, True),
        ([100, 200], "stopped", 300, True),
        ([], "complete", 100, False),
        ([100], "bad input", 100, False),
        ([], "failed", 0, True),  # a node may have been bad
        ([0, 0], "failed", 0, True),
        ([0, 0, 0], "failed", 0, False),  # a crash at the start must not loop
        ([100, 200, 200, 200], "stopped", 200, False),  # a limit too short for one save
        ([100, 100, 200], "failed", 300, True),
    ],
)
def test_decisions(steps, outcome, step, again) -> None:
    history = [run("stopped", earlier) for earlier in steps]
    assert decide(run(outcome, step), history)[0] is again


@pytest.fixture(autouse=True)
def scontrol(tmp_path_factory, monkeypatch):
    """`scontrol(facts)` is what SLURM says of job 812, which runs unless told otherwise."""
    folder = tmp_path_factory.mktemp("bin")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def says(facts: str) -> None:
        test = '[ "$*" = "--oneliner show job 812" ] || exit 1'
        (folder / "scontrol").write_text(f"#!/bin/sh\n{test}\necho 'JobId=812 {facts} Nice=0'\n")
        (folder / "scontrol").chmod(0o755)

    says("JobState=RUNNING Reason=None Requeue=1")
    return says


@pytest.fixture
def job(tmp_path, monkeypatch):
    """`job(status, exit_code)` is one run of job 812; returns what the script says and its code."""
    restarts = iter(range(100))

    def end(status: str | None, code: int, step: int = 0) -> int:
        restart = next(restarts)
        monkeypatch.setenv("SLURM_JOB_ID", "812")
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart))
        if status:
            Status(status, "why", job="812", restart=restart).write(tmp_path)
        if step:
            (tmp_path / "latest").write_text(f"iter_{step:07d}")
        return requeue.main(["--save", str(tmp_path), "--exit-code", str(code)])

    return end


def test_a_run_is_followed_through_its_restarts(job, tmp_path, capsys) -> None:
    assert job("stopped", 85, step=40) == 0
    assert "goes on from step 40" in capsys.readouterr().out
    assert job("running", 143) == 0  # killed
    assert "killed, exit code 143" in capsys.readouterr().out
    assert job("complete", 0, step=100) == 1
    listed = json.loads((tmp_path / "requeue.json").read_text())
    assert [(entry["outcome"], entry["step"]) for entry in listed] == [
        ("stopped", 40), ("failed", 40), ("complete", 100)
    ]  # fmt: skip


def test_three_restarts_without_a_checkpoint_are_the_end(job, capsys) -> None:
    """A crash at the start: the first run and three restarts; progress begins the count anew."""
    assert [job("failed", 1) for _ in range(4)] == [0, 0, 0, 1]
    assert "no new checkpoint after 3 restarts, giving up" in capsys.readouterr().out
    assert [job("failed", 1, step=50) for _ in range(4)] == [0, 0, 0, 1]


def test_a_run_that_never_met_is_not_taken_for_the_one_before(job, capsys) -> None:
    """Its status.json is still the previous restart's."""
    job("stopped", 85, step=40)
    capsys.readouterr()
    job(None, 1)
    assert "ended before all ranks had met" in capsys.readouterr().out


@pytest.mark.parametrize("status", [None, "running"])
def test_a_run_that_could_not_write_its_status_has_its_exit_code(job, capsys, status) -> None:
    assert job(status, 85, step=40) == 0
    assert "requeue: stopped (exit code 85" in capsys.readouterr().out
    assert job(status, 0, step=50) == 1
    assert "no requeue: complete at step 50" in capsys.readouterr().out


def test_no_history_no_requeue(job, tmp_path, capsys) -> None:
    (tmp_path / "requeue.json.tmp").mkdir()
    assert job("stopped", 85, step=40) == 1
    assert "requeue.json cannot be written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("facts", "again"),
    [
        ("JobState=COMPLETING Reason=None Dependency=(null)", False),  # so it is after scancel
        ("JobState=CANCELLED Reason=None", False),
        ("JobState=COMPLETING Reason=TimeLimit Dependency=(null)", True),
        ("JobState=COMPLETING Reason=None PreemptTime=2026-12-01T04:52:53", True),
        ("JobState=COMPLETING Reason=None PreemptTime=None", False),
        ("JobState=RUNNING Reason=None", True),
        ("", True),  # an answer that says nothing
    ],
)
def test_a_job_that_was_cancelled_does_not_come_back(job, scontrol, capsys, facts, again) -> None:
    """Measured on SLURM 22.05: it was saved, and was back after two minutes."""
    scontrol(facts)
    assert job("stopped", 85, step=40) == (0 if again else 1)
    said = "no requeue: the job was cancelled; submitted again it goes on from step 40"
    assert (said in capsys.readouterr().out) is not again


def test_a_slurm_that_does_not_answer_requeues(job, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert job("stopped", 85, step=40) == 0


def test_bad_input_is_not_tried_again(job) -> None:
    assert job("running", 2) == 1
