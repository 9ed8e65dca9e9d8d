"""A batch job whose time limit is much too short, requeued until done; see scripts/chaos.py.

The file that scripts/submit.py writes does it all: a signal before the limit, a save, status.json,
requeue. Here the job is submitted and watched, and compared with one that has all the time.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from core.launch.signals import END_MARGIN
from scripts.chaos_runs import SCRIPTS, TRAINING, Trial, deviation, flags, write_corpus
from scripts.requeue import Run, read_history

PROGRAMS = ("sbatch", "squeue", "scontrol", "srun", "scancel")
NODES, TASKS = 2, 2
PAUSE = 1.0  # seconds before each step
REQUEUES = 2
# Seconds before the limit, to which SLURM adds up to a minute: it looks every 30 s. torchrun kills
# its ranks after as many.
LEADS = {"srun": 5, "torchrun": 20}
POLL = 2.0


class NotAccepted(Exception):
    """SLURM does not take the job."""


def requeued(folder: Path, launcher: str, minutes: int) -> Trial:
    """The job with the limit and the one without; prints a line for each run of the first."""
    write_corpus(folder)
    whole, broken = folder / "whole", folder / "requeued"
    steps = steps_for(minutes)
    watch(submit(whole, launcher, steps, minutes=minutes + 30, pause=0.0))
    began = time.monotonic()
    watch(submit(broken, launcher, steps, minutes=minutes, pause=PAUSE))
    seconds = time.monotonic() - began
    runs = read_history(broken)
    for run in runs:
        why = f" ({run.reason})" if run.reason else ""
        print(f"  restart {run.restart}: {run.outcome} at step {run.step}{why}", flush=True)
    wrong = [f"unbroken: {what}" for what in ended_wrong(read_history(whole), steps, 0)]
    wrong += ended_wrong(runs, steps, REQUEUES)
    if not wrong and (differs := deviation(broken, whole)):
        wrong = [differs]
    fault = f"sbatch, {minutes}-minute limit, {max(0, len(runs) - 1)} requeues"
    return Trial(launcher, fault, None, seconds, "; ".join(wrong))


def steps_for(minutes: int) -> int:
    """More than REQUEUES runs can make.

    >>> steps_for(1)
    91
    """
    return int(REQUEUES * (60 * minutes - END_MARGIN) / PAUSE) + 1  # nearer to it none is made


def ended_wrong(runs: Sequence[Run], steps: int, requeues: int) -> list[str]:
    """What is wrong with the runs of a job that was to be requeued at least so often."""
    if not runs:
        return ["no run has ended: see the log in slurm/"]
    wrong = [
        f"restart {run.restart} {run.outcome} ({run.reason}), not stopped"
        for run in runs[:-1]
        if run.outcome != "stopped"
    ]
    last = runs[-1]
    if last.outcome != "complete":
        wrong.append(f"the last run {last.outcome} ({last.reason}) at step {last.step}")
    elif last.step != steps:
        wrong.append(f"complete at step {last.step}, not {steps}")
    if len(runs) - 1 < requeues:
        wrong.append(f"requeued {len(runs) - 1} times, not {requeues} or more")
    return wrong


def submit(save: Path, launcher: str, steps: int, *, minutes: int, pause: float) -> str:
    """The id of the job. Raises NotAccepted."""
    program = [TRAINING, "--pause", str(pause), *flags(save, NODES * TASKS, steps=steps)]
    options = ["--nodes", str(NODES), "--ntasks-per-node", str(TASKS), "--time", str(minutes)]
    options += ["--signal-seconds", str(LEADS[launcher])]
    options += ["--launcher", launcher, "--job-name", f"chaos-{save.name}"]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "submit.py"), *options, "--", *program,
         "--tensor-model-parallel-size", str(TASKS)],
        capture_output=True, text=True,
    )  # fmt: skip
    number = re.search(r"Submitted batch job (\d+)", done.stdout)
    if done.returncode or not number:
        said = (done.stderr or done.stdout).strip()
        raise NotAccepted(
            f"--requeue needs a working SLURM with {NODES} nodes, and sbatch does not take the "
            f"job: {said}"
        )
    return number[1]


def watch(job: str) -> None:
    """Waits until a job is over, and tells of its states; interrupted, it cancels the job."""
    told, over = "", False
    try:
        while not over:
            time.sleep(POLL)
            state = state_of(job)
            over = state == ""
            if state not in (None, "", told):
                told = state
                print(f"  job {job}: {state}", flush=True)
    finally:
        if not over:
            subprocess.run(["scancel", job])


def state_of(job: str) -> str | None:
    """Such as PENDING (BeginTime); "" for a job that is over; None if SLURM does not answer."""
    asked = ["squeue", "--noheader", "--jobs", job, "--format", "%T (%r)"]
    done = subprocess.run(asked, capture_output=True, text=True)
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    return done.stdout.strip().removesuffix(" (None)")
