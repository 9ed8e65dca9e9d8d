"""Break runs on purpose and see that they end as they should: prints tried and survived.

    python scripts/chaos.py                    every fault, on the first and the last of 3 ranks
    python scripts/chaos.py --launchers srun   on a cluster, from a login node
    python scripts/chaos.py --preempt 20       signals at random moments of a real training

A fault is survived if the whole run is over within 15 s of it (a hang: of its limit), the exit code
is not 0, the right rank is named last, and no process is left. A preemption is survived if the run
saves and says so, and the resumed run's losses equal an unbroken run's bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from core.launch import STOPPED
from core.launch.status import read_status

SCRIPTS = Path(__file__).resolve().parent
PROGRAM = str(SCRIPTS / "chaos_program.py")
RECIPE = str(SCRIPTS.parent / "pretrain_gpt.py")
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
    add("--preempt", type=int, default=0, metavar="N", help="N preemptions instead of faults")
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
        f"{trial.launcher:<9}{trial.fault:<16}rank {trial.rank}  {trial.seconds:5.1f} s  "
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
    """Trains once unbroken, then with a signal at a random moment of each run until complete."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        whole = Path(folder, "whole")
        start = time.monotonic()
        subprocess.run(training(whole, nproc), check=True, stdout=subprocess.DEVNULL)
        length = time.monotonic() - start
        trials: list[Trial] = []
        while len(trials) < count:
            broken = Path(folder, f"broken{len(trials)}")
            trials += preempt_until_done(broken, whole, nproc, length, rng, count - len(trials))
        return trials


def training(folder: Path, nproc: int) -> list[str]:
    """Twelve steps with evaluations and saves in between."""
    return [
        sys.executable, RECIPE, "--mock-data", "--nproc", str(nproc), "--global-batch-size",
        str(2 * nproc), "--train-iters", "12", "--eval-interval", "4", "--eval-iters", "8",
        "--save", str(folder), "--load", str(folder), "--save-interval", "3", "--metrics-file",
        str(folder.with_suffix(".jsonl")),
    ]  # fmt: skip


def preempt_until_done(
    broken: Path, whole: Path, nproc: int, length: float, rng: random.Random, most: int
) -> list[Trial]:
    trials: list[Trial] = []
    while True:
        name = rng.choice(["SIGUSR1", "SIGTERM"])
        process = subprocess.Popen(
            training(broken, nproc), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        wait_until_running(process, broken)
        time.sleep(rng.uniform(0, length / 2))
        began = time.monotonic()
        if len(trials) < most and process.poll() is None:
            process.send_signal(getattr(signal, name))
        _, err = process.communicate()
        status = read_status(broken)
        if process.returncode == 0:
            wrong = "" if losses(broken) == losses(whole) else "losses differ from the unbroken run"
            if trials and wrong:
                trials[-1].wrong = wrong
            return trials
        stopped = process.returncode == STOPPED and status and status.outcome == "stopped"
        wrong = "" if stopped else f"exit code {process.returncode}: {err.strip()[-200:]}"
        seconds = time.monotonic() - began
        trials.append(show(Trial("nproc", name, 0, seconds, wrong)))
        if wrong:
            return trials


def wait_until_running(process: subprocess.Popen, folder: Path) -> None:
    """Until all ranks of this very start have met."""
    begun = time.time()
    while process.poll() is None:
        status = read_status(folder)
        if status and status.outcome == "running" and status.time >= begun:
            return
        time.sleep(0.02)


def losses(folder: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in folder.with_suffix(".jsonl").read_text().splitlines()]
    return [(row["iteration"], row["lm_loss"]) for row in rows if row["kind"] == "train"]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
