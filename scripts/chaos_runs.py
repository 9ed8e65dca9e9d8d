"""What scripts/chaos.py starts, and how it compares: a tiny training run under any launcher.

A `Trial` is one row of its table. Neighbours: chaos_requeue.py (as a batch job),
chaos_training.py (the run that sends itself a signal).
"""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SCRIPTS = Path(__file__).resolve().parent
RECIPE = str(SCRIPTS.parent / "pretrain_gpt.py")
TRAINING = str(SCRIPTS / "chaos_training.py")
LAUNCHERS = ("nproc", "torchrun", "srun")
COMPARED = {"train": ("lm_loss", "grad_norm"), "eval": ("lm_loss",)}  # by kind of row


@dataclass
class Trial:
    """One run that was broken, and what is wrong with how it ended ("" for nothing).

    rank    the one that was meant; None for the whole job
    """

    launcher: str
    fault: str
    rank: int | None
    seconds: float
    wrong: str

    def __str__(self) -> str:
        who = "the job" if self.rank is None else f"rank {self.rank}"
        head = f"{self.launcher:<9}{self.fault:<39}{who}  {self.seconds:5.1f} s"
        return f"{head}  {self.wrong or 'survived'}"


def command(launcher: str, nproc: int, program: str) -> list[str]:
    """Starts a program on this machine, under srun on one that SLURM chooses."""
    if launcher == "nproc":
        return [sys.executable, program, "--nproc", str(nproc)]
    if launcher == "torchrun":
        # USR1 would end torchrun and leave its workers; and another one may have its default port
        more = ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "--master-port", free_port()]
        run = ["-m", "torch.distributed.run", "--nproc-per-node", str(nproc)]
        return [sys.executable, *run, *more, program]
    srun = ["srun", f"--ntasks={nproc}", "--kill-on-bad-exit=1", "--export=ALL"]
    return [*srun, sys.executable, program]


def free_port() -> str:
    with socket.create_server(("", 0)) as server:
        return str(server.getsockname()[1])


def write_corpus(folder: Path) -> None:
    from data.indexed import IndexedBuilder

    with IndexedBuilder(folder / "text", np.uint16) as builder:
        for document in range(30):
            builder.add(np.arange(40 + document) * (1 + document) % 50)


def flags(folder: Path, ranks: int, *, steps: int = 12) -> list[str]:
    """A tiny model with evaluations and saves in between; it goes on from what `folder` has."""
    size = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-3"
    patient = "--rendezvous-timeout-seconds 600 --heartbeat-seconds 120"  # on a busy machine
    limits = f"--train-iters {steps} --eval-interval 4 --eval-iters 4 --save-interval 3"
    batch = f"--vocab-size 50 --micro-batch-size 1 --global-batch-size {2 * ranks}"
    return [
        *f"{size} {limits} {batch} {patient}".split(),
        "--data-path", str(folder.parent / "text"), "--split", "8,1,1",
        "--save", str(folder), "--load", str(folder),
        "--metrics-file", str(folder.with_suffix(".jsonl")),
    ]  # fmt: skip


def deviation(folder: Path, whole: Path) -> str:
    """Where a run's losses and norms first differ from those of one that was not broken, or "".

    An evaluation that was abandoned when the run was stopped may be missing.
    """
    mine, theirs = values(folder), values(whole)
    for key, expected in theirs.items():
        kind, iteration, name = key
        found = mine.get(key)
        if found is None and kind == "train":
            return f"iteration {iteration} has no {name}"
        if found not in (None, expected):
            return f"{kind} {name} of iteration {iteration} is {found!r}, unbroken {expected!r}"
    more = sorted({iteration for _, iteration, _ in mine.keys() - theirs.keys()})
    return f"iterations {more} are not in the unbroken run" if more else ""


def values(folder: Path) -> dict[tuple[str, int, str], float]:
    """What a run's metrics file says, by kind of row, iteration and name."""
    rows = [json.loads(line) for line in folder.with_suffix(".jsonl").read_text().splitlines()]
    return {
        (row["kind"], row["iteration"], name): row[name]
        for row in rows
        for name in COMPARED.get(row["kind"], ())
    }
