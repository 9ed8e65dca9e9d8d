"""Kill training with -9 at random moments around its saves; see that each is survived.

    python scripts/chaos_saves.py [--kills 50] [--nproc 2]

Every other run saves in the background (--async-save). A run saves after every step and keeps two
checkpoints; it is killed, all ranks at once, at a random moment after its first save. Survived: the
checkpoint that `latest` or what lies before it leads to is whole, every byte of it, not older than
the last one that was seen complete, and the next run loads it. At the end one more run saves once:
nothing may be left of any save that was cut off. scripts/chaos.py breaks runs in other ways.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from core.checkpoint.directory import candidates, iteration_of, latest
from core.checkpoint.errors import CheckpointError
from core.checkpoint.reader import open_checkpoint

RECIPE = str(Path(__file__).resolve().parent.parent / "pretrain_gpt.py")
START = 180.0  # seconds for a run to start and save once
LITTER = re.compile(r".*\.(tmp|old)")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--nproc", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args(argv)
    rng, survived = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        for n in range(args.kills):
            begin, wrong = kill_one(Path(folder), args.nproc, rng, behind=n % 2 == 1)
            survived += not wrong
            how = "async" if n % 2 else "sync"
            print(f"{how:6} from iteration {begin:4}  {wrong or 'survived'}", flush=True)
        left = litter_after_a_save(Path(folder), args.nproc)
    print(f"survived {survived} of {args.kills} tried; left over: {', '.join(left) or 'nothing'}")
    return 0 if survived == args.kills and not left else 1


def training(folder: Path, nproc: int, *flags: str) -> list[str]:
    """Steps of about the time of a save: 20 MB of state."""
    return [
        sys.executable, RECIPE, "--mock-data", "--nproc", str(nproc), "--num-layers", "2",
        "--hidden-size", "256", "--seq-length", "16", "--micro-batch-size", "1",
        "--global-batch-size", str(nproc), "--eval-iters", "0", "--train-iters", "100000",
        "--use-distributed-optimizer", "--save", str(folder), "--load", str(folder),
        "--save-interval", "1", "--keep-last", "2", "--no-progress-bar", *flags,
    ]  # fmt: skip


def kill_one(folder: Path, nproc: int, rng: random.Random, behind: bool) -> tuple[int, str]:
    """(iteration it began at, what is wrong or "")"""
    before = newest(folder)
    flags = ["--async-save"] if behind else []
    process = subprocess.Popen(
        training(folder, nproc, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    said: list[str] = []
    threading.Thread(target=lambda: said.extend(process.stdout), daemon=True).start()
    deadline = time.monotonic() + START
    while newest(folder) <= before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 1.0))
    seen = newest(folder)
    kill_all(process)
    if seen <= before:
        return before, f"saved nothing: {process.stderr.read().strip()[-300:]}"
    found = re.search(r"loaded \S*iter_(\d+)", "".join(said))
    begun = int(found[1]) if found else 0
    if begun < before:
        return begun, f"went on from iteration {begun}, {before} was complete"
    return begun, damage(folder, seen)


def kill_all(process: subprocess.Popen) -> None:
    """The ranks first: the parent would end them in an orderly way."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    ranks = children.read_text().split() if children.exists() else []
    if process.poll() is None:
        subprocess.run(["kill", "-9", *ranks, str(process.pid)], stderr=subprocess.DEVNULL)
    process.wait()


def newest(folder: Path) -> int:
    """The iteration of the newest complete checkpoint."""
    try:
        return max(iteration_of(path.name) or 0 for path in candidates(folder))
    except CheckpointError:
        return 0


def damage(folder: Path, seen: int) -> str:
    """What is wrong with what a kill has left; "" for a whole checkpoint, `seen` or newer."""
    warnings: list[str] = []
    try:
        checkpoint = open_checkpoint(folder, say=warnings.append)
        problems = [*warnings, *checkpoint.verify()]
    except CheckpointError as error:
        return str(error)
    if checkpoint.iteration < seen:
        problems.append(f"{latest(folder)} is older than iteration {seen}")
    return "; ".join(problems)


def litter_after_a_save(folder: Path, nproc: int) -> list[str]:
    """What does not belong into the folder after one more run."""
    stop = ("--exit-duration-in-mins", "1e-9")
    subprocess.run(training(folder, nproc, *stop), stdout=subprocess.DEVNULL, check=False)
    names = sorted(path.name for path in folder.iterdir())
    kept = [name for name in names if iteration_of(name) is not None]
    return [name for name in names if LITTER.fullmatch(name)] + kept[3:]


if __name__ == "__main__":
    sys.exit(main())
