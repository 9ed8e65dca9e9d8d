"""chaos.py's judgement on made-up ends of runs, and a sample of real ones: the whole tables are the
script's."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import chaos, chaos_requeue, chaos_runs, chaos_training
from scripts.requeue import Run

# ---- which rank is named --------------------------------------------------------------------

VICTIM = "rank 0 stopped: rank 1 (n1, pid 7, step 2) failed: ValueError: planted"
CAUSE = "rank 1 (n1, pid 7, step 2) failed: ValueError: planted"
SUMMARY = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_10:00:00
  host      : n1
  rank      : {rank} (local_rank: 1)
  exitcode  : -9 (pid: 7)
"""


@pytest.mark.parametrize(
    ("launcher", "fault", "said", "named"),
    [
        ("nproc", "raise", f"{CAUSE}\n[rank 0] {VICTIM}\n{CAUSE}\n", True),
        ("srun", "raise", f"1: {CAUSE}\n0: {VICTIM}\nsrun: error: n1: task 1: Exited\n", True),
        ("torchrun", "raise", f"{CAUSE}\n{VICTIM}\n{SUMMARY.format(rank=1)}", True),
        ("nproc", "raise", "", False),
        ("nproc", "raise", "ValueError: planted\n", False),
        ("nproc", "raise", CAUSE.replace("rank 1", "rank 11"), False),
        ("nproc", "raise", f"{CAUSE}\nrank 0 (n1, pid 6) failed: lost contact\n", False),
        ("nproc", "exit", CAUSE, False),
        ("nproc", "stop", "rank 1 (n1, pid 7) failed: stopped (SIGSTOP), no sign of life", True),
        ("srun", "kill", "rank 1 (n1, pid 7) failed: died without a word", True),
        ("torchrun", "kill", SUMMARY.format(rank=1), True),
        ("torchrun", "kill", SUMMARY.format(rank=0), False),
        ("torchrun", "_exit", SUMMARY.format(rank=11), False),
        ("torchrun", "kill", CAUSE, False),  # its own summary is what people read
        ("torchrun", "sleep", SUMMARY.format(rank=1), False),
    ],
)
def test_the_rank_and_the_cause_are_named_last(launcher, fault, said, named) -> None:
    assert chaos.is_named(said, launcher, fault, 1) is named


GONE = 2**22 + 1  # no process has this number


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, ""),
        ({"began": 1}, "1 of 2 ranks began"),
        ({"code": 0}, "exit code 0"),
        ({"seconds": 16.0}, "took more than 15 s"),
        ({"said": SUMMARY}, "the rank or the cause is not named"),
        ({"pid": os.getpid()}, f"processes left: [{os.getpid()}, {os.getpid()}]"),
        ({"code": 0, "seconds": 16.0}, "exit code 0; took more than 15 s"),
    ],
)
def test_what_a_broken_run_is_reproached_with(tmp_path, monkeypatch, changed, wrong) -> None:
    run = {"began": 2, "code": 1, "seconds": 3.0, "said": CAUSE, "pid": GONE, **changed}

    def ended(command, **_):
        ready = Path(command[command.index("--ready") + 1])
        for rank in range(run["began"]):
            (ready / str(rank)).write_text(str(run["pid"]))
            os.utime(ready / str(rank), (time.time() - run["seconds"],) * 2)
        return subprocess.CompletedProcess(command, run["code"], "", run["said"])

    monkeypatch.setattr(chaos.subprocess, "run", ended)
    trial = chaos.break_one("nproc", "raise", 1, 2, tmp_path)
    assert (trial.rank, trial.wrong) == (1, wrong)
    assert str(trial).endswith(wrong or "survived")


def test_a_hang_has_its_limit_on_top(tmp_path, monkeypatch) -> None:
    def ended(command, **_):
        assert command[-2:] == ["--hang", str(chaos.HANG)]
        path = Path(command[command.index("--ready") + 1], "0")
        path.write_text(str(GONE))
        os.utime(path, (time.time() - chaos.LIMIT - chaos.HANG + 1,) * 2)
        said = "rank 0 (n1, pid 7) failed: hung: no progress for 5 s"
        return subprocess.CompletedProcess(command, 1, "", said)

    monkeypatch.setattr(chaos.subprocess, "run", ended)
    assert chaos.break_one("srun", "sleep", 0, 1, tmp_path).wrong == ""


# ---- comparisons ----------------------------------------------------------------------------


def metrics(folder: Path, name: str, rows: list[tuple]) -> Path:
    keys = ("kind", "iteration", "lm_loss", "grad_norm")
    lines = [json.dumps(dict(zip(keys, row, strict=False))) for row in rows]
    (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder / name


def test_the_first_deviation_is_told(tmp_path) -> None:
    rows = [("train", 1, 4.5, 1.25), ("eval", 1, 4.0), ("train", 2, 4.25, 1.5)]
    whole = metrics(tmp_path, "whole", rows)

    def told(*mine: tuple) -> str:
        return chaos_runs.deviation(metrics(tmp_path, "mine", list(mine)), whole)

    assert told(*rows) == told(rows[0], rows[2]) == ""  # an evaluation may be abandoned
    assert told(*rows[:2]) == "iteration 2 has no lm_loss"
    assert told(rows[0], ("train", 2, 4.25, 1.5000000000000002)) == (
        "train grad_norm of iteration 2 is 1.5000000000000002, unbroken 1.5"
    )
    assert told(rows[0], ("eval", 1, 4.5)).startswith("eval lm_loss of iteration 1 is 4.5")
    assert told(*rows, ("train", 3, 4.0, 1.0)) == "iterations [3] are not in the unbroken run"


STOPS = [Run("8", number, "stopped", "SIGUSR1", 30 * (number + 1)) for number in range(2)]
DONE = Run("8", 2, "complete", "", 92)


@pytest.mark.parametrize(
    ("runs", "wrong"),
    [
        ([*STOPS, DONE], []),
        ([], ["no run has ended: see the log in slurm/"]),
        ([STOPS[0], DONE], ["requeued 1 times, not 2 or more"]),
        (STOPS + STOPS, ["the last run stopped (SIGUSR1) at step 60"]),
        (
            [STOPS[0], Run("8", 1, "failed", "killed, exit code 137", 30), DONE],
            ["restart 1 failed (killed, exit code 137), not stopped"],
        ),
        ([*STOPS, Run("8", 2, "complete", "", 80)], ["complete at step 80, not 92"]),
    ],
)
def test_a_requeued_job_stops_until_it_is_complete(runs, wrong) -> None:
    assert chaos_requeue.ended_wrong(runs, 92, 2) == wrong


# ---- SLURM, as far as it can be played ------------------------------------------------------


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """`slurm(name, script)` puts a program on a PATH that has no other one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(name: str, script: str = "exit 1") -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return put


def refused(capsys, *flags: str) -> str:
    with pytest.raises(SystemExit) as caught:
        chaos.main(list(flags))
    assert caught.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2].strip()


def test_what_a_machine_lacks_is_said(slurm, capsys, tmp_path) -> None:
    there = ("--folder", str(tmp_path / "runs"))
    assert refused(capsys, "--requeue").startswith(
        "--requeue needs a working SLURM, and sbatch, squeue, scontrol, srun, scancel are not on"
    )
    for name in chaos_requeue.PROGRAMS[:-1]:
        slurm(name)
    assert ", and scancel is not on PATH" in refused(capsys, "--requeue")
    lacks = refused(capsys, "--preempt", "--launcher", "srun")
    assert lacks.startswith("--launchers srun needs a working SLURM, and scancel is not")
    slurm("scancel")
    assert "not nproc" in refused(capsys, "--requeue", "--launchers", "nproc")
    slurm("sbatch", "echo sbatch: error: Unable to contact slurm controller >&2; exit 1")
    told = refused(capsys, "--requeue", *there)
    assert "sbatch does not take the job: sbatch: error: Unable to contact slurm" in told
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_job_is_watched_until_it_is_over(slurm, capsys, tmp_path, monkeypatch) -> None:
    states = tmp_path / "states"
    said = ["PENDING (BeginTime)", "PENDING (BeginTime)", "no answer", "RUNNING (None)", ""]
    states.write_text("\n".join(said) + "\n")
    # takes the first line away and prints it
    slurm(
        "squeue",
        f'[ "$3" = 8 ] || exit 1\nread -r state < {states}\n'
        f'{{ read -r first; while read -r line; do echo "$line"; done; }} < {states} > {states}2\n'
        f'while read -r line; do echo "$line"; done < {states}2 > {states}\n'
        '[ "$state" != "no answer" ] || exit 1\necho "$state"',
    )
    slurm("scancel", f"echo $1 > {tmp_path}/cancelled")
    monkeypatch.setattr(chaos_requeue, "POLL", 0.0)
    chaos_requeue.watch("8")
    assert capsys.readouterr().out == "  job 8: PENDING (BeginTime)\n  job 8: RUNNING\n"
    assert not (tmp_path / "cancelled").exists()

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(chaos_requeue.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        chaos_requeue.watch("8")
    assert (tmp_path / "cancelled").read_text() == "8\n"


def test_an_old_job_is_over(slurm) -> None:
    slurm("squeue", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    assert chaos_requeue.state_of("8") == ""
    slurm("squeue", "echo slurm_load_jobs error: Socket timed out >&2; exit 1")
    assert chaos_requeue.state_of("8") is None


def test_under_srun_all_ranks_get_a_signal_through_slurm(slurm, tmp_path, monkeypatch) -> None:
    """A rank's parent there is SLURM's own process."""
    slurm("scancel", f"echo $* > {tmp_path}/sent; kill -USR1 $$")  # a part of the step itself
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    chaos_training.send("SIGUSR1", "all")
    assert (tmp_path / "sent").read_text() == "--signal=USR1 8.3\n"
    slurm("scancel", "exit 1")
    with pytest.raises(subprocess.CalledProcessError):
        chaos_training.send("SIGTERM", "all")


def test_torchrun_is_told_to_pass_usr1_on() -> None:
    words = chaos_runs.command("torchrun", 2, "train.py")
    assert words[words.index("--signals-to-handle") + 1] == "SIGTERM,SIGINT,SIGUSR1"
    assert words[0] == sys.executable and words[-1] == "train.py"


# ---- real runs ------------------------------------------------------------------------------


def test_a_sample_of_the_faults_is_survived_under_torchrun(tmp_path, monkeypatch) -> None:
    """It ends the others at once, so that all there is to read is its own summary."""
    monkeypatch.setattr(chaos, "LIMIT", 60.0)  # the suite may share its machine
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    trial = chaos.break_one("torchrun", "kill", 1, 2, tmp_path)
    assert (trial.launcher, trial.wrong) == ("torchrun", "")


def test_a_sample_of_the_preemptions_is_survived(tmp_path, monkeypatch):
    """TERM to both of two ranks while a checkpoint is written."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ways = list(chaos.MOMENTS)
    number = ways.index("save") + 3 * len(ways)
    chaos.write_corpus(tmp_path)
    whole = tmp_path / "whole"
    chaos.subprocess.run(chaos.training(whole, "nproc", 2), check=True, capture_output=True)
    trial = chaos.preempt(tmp_path / "stopped", whole, "nproc", 2, number)
    assert (trial.fault, trial.wrong) == ("SIGTERM in save, all", "")
    assert len(chaos_runs.values(whole)) > 2 * 12  # there was something to compare
