"""Break runs on purpose and see that they end as they should: prints tried and survived.

    python scripts/chaos.py                    every fault, on the first and the last of 3 ranks
    python scripts/chaos.py --launchers srun   on a cluster, from a login node
    python scripts/chaos.py --preempt          USR1 and TERM to one rank and to all: in training, in
                                               evaluation, while data is built, while a checkpoint
                                               is written, also behind the training's back
    python scripts/chaos.py --requeue          a batch job of 2 x 2 ranks with a limit of a minute,
                                               which SLURM requeues until it is done: ten minutes

A fault is survived if the whole run is over within 15 s of it (a hang: of its limit), the exit code
is not 0, the right rank is named last, and no process is left. A preemption is survived if the run
leaves a checkpoint, says "stopped" in status.json and by its exit code (torchrun and srun change
that), and the run that goes on from there has an unbroken run's losses and norms, bit for bit. So
has a job that is requeued twice and more by the batch file that scripts/submit.py writes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from core.checkpoint.directory import latest
from core.launch import STOPPED
from core.launch.status import read_status
from scripts import chaos_requeue
from scripts.chaos_runs import (
    LAUNCHERS,
    RECIPE,
    SCRIPTS,
    TRAINING,
    Trial,
    command,
    deviation,
    flags,
    write_corpus,
)
from scripts.chaos_training import MOMENTS, WORDS

PROGRAM = str(SCRIPTS / "chaos_program.py")
WAYS = 4 * len(MOMENTS)  # two signals, to one rank or to all
LIMIT, HANG = 15.0, 5.0
FAULTS = {  # --how -> what the last words must say; a launcher may only know that it is gone
    "raise": "ValueError: planted",
    "exit": "left with exit code 3",
    "_exit": "left with exit code 7|died without a word|its store closed",
    "kill": r"killed by signal 9|died without a word|its store closed",
    "stop": r"stopped \(SIGSTOP\)",
    "sleep": "hung: no progress",
}


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if problem := what_is_missing(args):
        parser.error(problem)
    by_slurm = args.requeue or "srun" in launchers_of(args)
    where = Path(args.folder or ("." if by_slurm else tempfile.gettempdir())).resolve()
    where.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=where))
    trials, survived = [], 0
    try:
        for trial in run_trials(args, folder):
            print(trial, flush=True)
            trials.append(trial)
            survived += not trial.wrong
    except chaos_requeue.NotAccepted as error:
        parser.error(str(error))
    finally:
        if survived == len(trials):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"what the runs left is in {folder}")
    print(f"survived {survived} of {len(trials)} tried")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(trial) for trial in trials], indent=1))
    return 0 if survived == len(trials) else 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--launchers", "--launcher", nargs="+", choices=LAUNCHERS, metavar="NAME",
        help="nproc, torchrun, srun (default for faults: the first two, and srun where it is;\n"
        "for --preempt: nproc; for --requeue: srun)")  # fmt: skip
    add("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME",
        help=f"of {', '.join(FAULTS)} (default: all)")  # fmt: skip
    add("--nproc", type=int, default=3, help="ranks (default 3; --requeue has 2 nodes x 2)")
    add("--preempt", type=int, nargs="?", const=WAYS, default=0, metavar="N",
        help=f"N preemptions (default {WAYS}: each way once) instead of faults")  # fmt: skip
    add("--requeue", type=int, nargs="?", const=1, default=0, metavar="MINUTES",
        help="a job with this limit (default 1; more for torchrun, and where starting takes\n"
        "half a minute) instead of faults; where to: SBATCH_PARTITION, SBATCH_ACCOUNT and\n"
        "the like")  # fmt: skip
    add("--folder", metavar="DIR",
        help="for what the runs read and write, on a file system that all nodes see; it is\n"
        "taken away if all is well (default: this one under SLURM, else the system's for\n"
        "temporary files)")  # fmt: skip
    add("--json", metavar="FILE", help="write the table there as well")
    return parser


def launchers_of(args: argparse.Namespace) -> list[str]:
    if args.launchers or args.requeue:
        return args.launchers or ["srun"]
    here = [name for name in LAUNCHERS if name != "srun" or shutil.which("srun")]
    return ["nproc"] if args.preempt else here


def what_is_missing(args: argparse.Namespace) -> str:
    """Why these trials cannot be made here; "" if they can."""
    launchers = launchers_of(args)
    if args.requeue and "nproc" in launchers:
        return "--requeue is a batch job: its launcher is srun or torchrun, not nproc"
    slurm = chaos_requeue.PROGRAMS if args.requeue else ("srun", "scancel")
    needed = slurm if args.requeue or "srun" in launchers else ()
    missing = [name for name in needed if shutil.which(name) is None]
    if not missing:
        return ""
    return (
        f"{'--requeue' if args.requeue else '--launchers srun'} needs a working SLURM, and "
        f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not on PATH; run it on a "
        "cluster's login node"
    )


def run_trials(args: argparse.Namespace, folder: Path) -> Iterator[Trial]:
    """Every one as soon as it has ended."""
    for launcher in launchers_of(args):
        if args.requeue or args.preempt:
            here = folder / launcher
            here.mkdir()
            if args.requeue:
                yield chaos_requeue.requeued(here, launcher, args.requeue)
            else:
                yield from preemptions(here, launcher, args.preempt, args.nproc)
        else:
            for fault in args.faults:
                for rank in sorted({0, args.nproc - 1}):
                    yield break_one(launcher, fault, rank, args.nproc, folder)


# ---- faults ---------------------------------------------------------------------------------


def break_one(launcher: str, fault: str, rank: int, nproc: int, folder: Path) -> Trial:
    with tempfile.TemporaryDirectory(dir=folder) as ready:
        options = [
            "--steps", "100000", "--culprit", str(rank), "--how", fault, "--ready", ready,
            *(["--hang", str(HANG)] if fault == "sleep" else []),
        ]  # fmt: skip
        started = [*command(launcher, nproc, PROGRAM), *options]
        done = subprocess.run(started, capture_output=True, text=True, timeout=300)
        ended = time.time()
        marks = list(Path(ready).iterdir())
        seconds = ended - max((path.stat().st_mtime for path in marks), default=ended)
        pids = [int(path.read_text()) for path in marks]
    limit = LIMIT + (HANG if fault == "sleep" else 0)
    named = is_named(done.stderr, launcher, fault, rank)
    left = [pid for pid in pids if is_alive(pid)]
    wrong = [
        f"{len(marks)} of {nproc} ranks began" if len(marks) < nproc else "",
        "exit code 0" if done.returncode == 0 else "",
        f"took more than {limit:g} s" if seconds > limit else "",
        "" if named else "the rank or the cause is not named",
        f"processes left: {left}" if left else "",
    ]
    return Trial(launcher, fault, rank, seconds, "; ".join(filter(None, wrong)))


def is_named(output: str, launcher: str, fault: str, rank: int) -> bool:
    """Whether the last of our lines, and torchrun's own summary, name the rank and the cause."""
    if launcher == "torchrun" and fault in ("_exit", "kill"):
        # It ends the others at once; its own summary is all there is.
        return bool(re.search(rf"Root Cause(.|\n)*rank +: {rank} ", output))
    ours = [line for line in output.splitlines() if re.search(r"rank \d+ \(.*\) failed: ", line)]
    last = rf"rank {rank} \(.*\) failed: .*({FAULTS[fault]})"
    return bool(ours and re.search(last, ours[-1]))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# ---- preemptions ----------------------------------------------------------------------------


def preemptions(folder: Path, launcher: str, count: int, nproc: int) -> Iterator[Trial]:
    """Trains once unbroken; then each time a signal comes in another way, and a second run ends
    what the first has begun."""
    write_corpus(folder)
    whole = folder / "whole"
    subprocess.run(training(whole, launcher, nproc), check=True, capture_output=True)
    for number in range(count):
        yield preempt(folder / f"run{number}", whole, launcher, nproc, number)


def training(
    folder: Path, launcher: str, nproc: int, *more: str, program: str = RECIPE
) -> list[str]:
    return [*command(launcher, nproc, program), *flags(folder, nproc), *more]


def preempt(folder: Path, whole: Path, launcher: str, nproc: int, number: int) -> Trial:
    """One run that is asked to stop and one that goes on; by the number all ways take turns."""
    moment = list(MOMENTS)[number % len(MOMENTS)]
    turn = number // len(MOMENTS)
    name, target = ("SIGUSR1", "SIGTERM")[turn % 2], ("one", "all")[turn // 2 % 2]
    rank, call = turn % nproc, 2 if moment == "evaluation" else 1 + turn // 4
    more = ["--async-save"] if moment == "asynchronous save" else []
    if moment == "data building":  # of a run that has something to go on from
        call = 1
        first = training(folder, launcher, nproc, "--exit-interval", "4")
        subprocess.run(first, check=True, capture_output=True)
    words = f"{moment} {name} {target} {rank} {call}"
    began = time.monotonic()
    done = subprocess.run(
        training(folder, launcher, nproc, *more, program=TRAINING),
        env={**os.environ, WORDS: words}, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    seconds, status = time.monotonic() - began, read_status(folder)
    tidy = launcher == "nproc"  # the others make what they like of exit codes, but not success
    wrong = [
        "" if (done.returncode == STOPPED if tidy else done.returncode != 0)
        else f"exit code {done.returncode}: {done.stderr[-300:]}",
        "" if status and status.outcome == "stopped" else f"status.json says {status}",
        "" if latest(folder) else "nothing was saved",
    ]  # fmt: skip
    again = training(folder, launcher, nproc, *more)
    ended = subprocess.run(again, capture_output=True, text=True)
    if ended.returncode:
        wrong.append(f"it does not go on: {ended.stderr[-300:]}")
    else:
        wrong.append(deviation(folder, whole))
    fault = f"{name} in {moment}, {target}"
    return Trial(launcher, fault, rank, seconds, "; ".join(filter(None, wrong)))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
