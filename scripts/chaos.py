"""Break runs on purpose and see that they end as they should: prints tried and survived.

    python scripts/chaos.py                    every fault, on the first and the last of 3 ranks
    python scripts/chaos.py --launchers srun   on a cluster, from a login node
    python scripts/chaos.py --preempt          USR1 and TERM to one rank and to all: in training, in
                                               evaluation, while data is built, while a checkpoint
                                               is written, also behind the training's back

A fault is survived if the whole run is over within 15 s of it (a hang: of its limit), the exit code
is not 0, the right rank is named last, and no process is left. A preemption is survived if the run
leaves a checkpoint, says "stopped" in status.json and by its exit code, and the run that goes on
from there has an unbroken run's losses, bit for bit.
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
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from core.checkpoint.directory import latest
from core.launch import STOPPED
from core.launch.status import read_status
from scripts.chaos_training import MOMENTS, WORDS

SCRIPTS = Path(__file__).resolve().parent
PROGRAM = str(SCRIPTS / "chaos_program.py")
RECIPE = str(SCRIPTS.parent / "pretrain_gpt.py")
TRAINING = str(SCRIPTS / "chaos_training.py")
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


@dataclass
class Trial:
    """One run that was broken, and what is wrong with how it ended ("" for nothing)."""

    launcher: str
    fault: str
    rank: int
    seconds: float
    wrong: str


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--launchers", nargs="+", choices=("nproc", "torchrun", "srun"), metavar="NAME",
        help="nproc, torchrun, srun (default: the first two, and srun where it is)")  # fmt: skip
    add("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME",
        help=f"of {', '.join(FAULTS)} (default: all)")  # fmt: skip
    add("--nproc", type=int, default=3, help="ranks (default 3)")
    add("--preempt", type=int, nargs="?", const=WAYS, default=0, metavar="N",
        help=f"N preemptions (default {WAYS}: each way once) instead of faults")  # fmt: skip
    add("--json", metavar="FILE", help="write the table there as well")
    args = parser.parse_args(argv)
    if args.preempt:
        trials = preemptions(args.preempt, args.nproc)
    else:
        found = ["nproc", "torchrun", *(["srun"] if shutil.which("srun") else [])]
        trials = [
            break_one(launcher, fault, rank, args.nproc)
            for launcher in args.launchers or found
            for fault in args.faults
            for rank in sorted({0, args.nproc - 1})
        ]
    survived = sum(not trial.wrong for trial in trials)
    print(f"survived {survived} of {len(trials)} tried")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(trial) for trial in trials], indent=1))
    return 0 if survived == len(trials) else 1


def show(trial: Trial) -> Trial:
    print(
        f"{trial.launcher:<9}{trial.fault:<39}rank {trial.rank}  {trial.seconds:5.1f} s  "
        f"{trial.wrong or 'survived'}",
        flush=True,
    )
    return trial


# ---- faults ---------------------------------------------------------------------------------


def break_one(launcher: str, fault: str, rank: int, nproc: int) -> Trial:
    with tempfile.TemporaryDirectory(prefix="chaos-") as ready:
        options = [
            "--steps", "100000", "--culprit", str(rank), "--how", fault, "--ready", ready,
            *(["--hang", str(HANG)] if fault == "sleep" else []),
        ]  # fmt: skip
        done = subprocess.run(
            [*command(launcher, nproc), *options], capture_output=True, text=True, timeout=300
        )
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
    return show(Trial(launcher, fault, rank, seconds, "; ".join(filter(None, wrong))))


def command(launcher: str, nproc: int) -> list[str]:
    if launcher == "nproc":
        return [sys.executable, PROGRAM, "--nproc", str(nproc)]
    if launcher == "torchrun":
        run = ["-m", "torch.distributed.run", "--nproc-per-node", str(nproc)]
        return [sys.executable, *run, PROGRAM]
    srun = ["srun", f"--ntasks={nproc}", "--kill-on-bad-exit=1", "--export=ALL"]
    return [*srun, sys.executable, PROGRAM]


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


def preemptions(count: int, nproc: int) -> list[Trial]:
    """Trains once unbroken; then each time a signal comes in another way, and a second run ends
    what the first has begun."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        write_corpus(Path(folder))
        whole = Path(folder, "whole")
        subprocess.run(training(whole, nproc), check=True, capture_output=True)
        return [preempt(Path(folder, f"run{i}"), whole, nproc, i) for i in range(count)]


def write_corpus(folder: Path) -> None:
    from data.indexed import IndexedBuilder

    with IndexedBuilder(folder / "text", np.uint16) as builder:
        for document in range(30):
            builder.add(np.arange(40 + document) * (1 + document) % 50)


def training(folder: Path, nproc: int, *more: str, program: str = RECIPE) -> list[str]:
    """Twelve steps of a tiny model with evaluations and saves in between."""
    size = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-3"
    patient = "--rendezvous-timeout-seconds 600 --heartbeat-seconds 120"  # on a busy machine
    limits = "--train-iters 12 --eval-interval 4 --eval-iters 4 --save-interval 3"
    batch = f"--vocab-size 50 --micro-batch-size 1 --global-batch-size {2 * nproc}"
    return [
        sys.executable, program, "--nproc", str(nproc),
        *f"{size} {limits} {batch} {patient}".split(),
        "--data-path", str(folder.parent / "text"), "--split", "8,1,1",
        "--save", str(folder), "--load", str(folder),
        "--metrics-file", str(folder.with_suffix(".jsonl")), *more,
    ]  # fmt: skip


def preempt(folder: Path, whole: Path, nproc: int, number: int) -> Trial:
    """One run that is asked to stop and one that goes on; by the number all ways take turns."""
    moment = list(MOMENTS)[number % len(MOMENTS)]
    turn = number // len(MOMENTS)
    name, target = ("SIGUSR1", "SIGTERM")[turn % 2], ("one", "all")[turn // 2 % 2]
    rank, call = turn % nproc, 2 if moment == "evaluation" else 1 + turn // 4
    more = ["--async-save"] if moment == "asynchronous save" else []
    if moment == "data building":  # of a run that has something to go on from
        call = 1
        first = training(folder, nproc, "--exit-interval", "4")
        subprocess.run(first, check=True, capture_output=True)
    words = f"{moment} {name} {target} {rank} {call}"
    began = time.monotonic()
    done = subprocess.run(
        training(folder, nproc, *more, program=TRAINING),
        env={**os.environ, WORDS: words}, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    seconds, status = time.monotonic() - began, read_status(folder)
    wrong = [
        "" if done.returncode == STOPPED else f"exit code {done.returncode}: {done.stderr[-300:]}",
        "" if status and status.outcome == "stopped" else f"status.json says {status}",
        "" if latest(folder) else "nothing was saved",
    ]
    again = subprocess.run(training(folder, nproc, *more), capture_output=True, text=True)
    if again.returncode:
        wrong.append(f"it does not go on: {again.stderr[-300:]}")
    elif losses(folder) != losses(whole):
        wrong.append("losses differ from the unbroken run's")
    fault = f"{name} in {moment}, {target}"
    return show(Trial("nproc", fault, rank, seconds, "; ".join(filter(None, wrong))))


def losses(folder: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in folder.with_suffix(".jsonl").read_text().splitlines()]
    return [(row["iteration"], row["lm_loss"]) for row in rows if row["kind"] == "train"]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
