"""After a run under SLURM: shall the job go on? Called by the batch scripts.

    python scripts/requeue.py --save checkpoints --exit-code $code && scontrol requeue $SLURM_JOB_ID

Exit code 0: yes. It reads what the run left in `--save` (status.json, the newest checkpoint) and
keeps a list of the runs so far in requeue.json there. A run that was stopped, or that failed, goes
on from its checkpoint; bad input and a job that was cancelled (scancel) never do, and three
restarts in a row without a new checkpoint end it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from core.checkpoint.directory import iteration_of, latest
from core.launch import STOPPED
from core.launch.status import Status, read_status

HISTORY = "requeue.json"
PATIENCE = 3  # restarts in a row without a new checkpoint
BAD_INPUT = 2
WORDS = {0: "complete", STOPPED: "stopped"}  # of exit codes


@dataclass(frozen=True)
class Run:
    """One run of a job, as requeue.json lists it. `step` is the newest checkpoint's after it."""

    job: str
    restart: int
    outcome: str
    reason: str
    step: int


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--save", required=True, type=Path, help="the run's --save folder")
    parser.add_argument("--exit-code", required=True, type=int, help="what srun returned")
    args = parser.parse_args(argv)
    history = read_history(args.save)
    run = this_run(args.save, args.exit_code)
    again, why = decide(run, history)
    if again and was_cancelled(run.job):
        again = False
        why = f"the job was cancelled; submitted again it goes on from step {run.step}"
    try:
        write_history(args.save, [*history, run])
    except OSError as error:
        # without it a crash at the start would go round for ever
        again, why = False, f"{run.outcome}, but {HISTORY} cannot be written: {error}"
    print(f"{'requeue' if again else 'no requeue'}: {why}")
    return 0 if again else 1


def decide(run: Run, history: list[Run]) -> tuple[bool, str]:
    """Whether to start again, and why."""
    if run.outcome == "complete":
        return False, f"complete at step {run.step}"
    if run.outcome == "bad input":
        return False, "the input was refused, and will be again"
    idle = 0  # restarts in a row that ended at the checkpoint they had begun with
    for earlier in reversed(history):
        if earlier.step != run.step:
            break
        idle += 1
    if idle >= PATIENCE:
        return False, (
            f"{run.outcome} ({run.reason}); no new checkpoint after {idle} restarts, giving up"
        )
    return True, f"{run.outcome} ({run.reason}), goes on from step {run.step}"


def was_cancelled(job: str) -> bool:
    """Whether somebody does not want this job any more.

    SLURM signals the run as it does at a time limit, and lets the batch script go on; it would even
    requeue. A job that is over for another reason has that reason, or the time of its preemption.
    """
    try:
        asked = ["scontrol", "--oneliner", "show", "job", job]
        told = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    over = re.search(r"\bJobState=(COMPLETING|CANCELLED) Reason=None\b", told)
    return over is not None and re.search(r"\bPreemptTime=\d", told) is None


def this_run(save: Path, exit_code: int) -> Run:
    """The run that has just ended; what it could not write itself is concluded."""
    job = os.environ.get("SLURM_JOB_ID", "")
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    status = read_status(save)
    stale = status is None or (status.job, status.restart) != (job, restart)
    if exit_code in WORDS and (stale or status.outcome == "running"):
        # it could not write: all its ranks have said so by their exit codes
        status = Status(WORDS[exit_code], f"exit code {exit_code}, no word in status.json")
    elif stale:
        status = Status("failed", f"ended before all ranks had met, exit code {exit_code}")
    elif status.outcome == "running":
        status = Status("failed", f"killed, exit code {exit_code}")
    outcome = "bad input" if exit_code == BAD_INPUT else status.outcome
    return Run(job, restart, outcome, status.reason, newest_step(save))


def newest_step(save: Path) -> int:
    """The iteration of the checkpoint that the next run will load; 0 if there is none."""
    name = latest(save)
    return (iteration_of(name) or 0) if name else 0


def write_history(save: Path, runs: list[Run]) -> None:
    """Whole or not at all."""
    save.mkdir(parents=True, exist_ok=True)
    temporary = save / f"{HISTORY}.tmp"
    temporary.write_text(json.dumps([asdict(run) for run in runs], indent=1))
    os.replace(temporary, save / HISTORY)


def read_history(save: Path) -> list[Run]:
    try:
        return [Run(**entry) for entry in json.loads((save / HISTORY).read_text())]
    except (OSError, ValueError, TypeError):
        return []


if __name__ == "__main__":
    sys.exit(main())
