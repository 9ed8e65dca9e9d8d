"""pretrain_gpt.py, sending itself a signal at a chosen moment, or taking its time.

    PHALANX_PREEMPT="save SIGTERM one 1 1" python scripts/chaos_training.py --nproc 2 --mock-data …
    python scripts/chaos_training.py --pause 1 --mock-data …

The words are: the moment, the signal, "one" rank alone or "all" through the launcher, the rank that
sends it, and the how manieth such moment it is. --pause, the first flag, are seconds before each
step. For scripts/chaos.py --preempt and --requeue.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pretrain_gpt
from core.launch.signals import StopSignal, listen_early

WORDS = "PHALANX_PREEMPT"
MOMENTS = {  # what is called then: module, class or "", function; and the first argument it needs
    "training": ("core.train", "Trainer", "train_step", {}),
    "evaluation": ("core.train", "Trainer", "executor", {"forward_only": True}),
    "data building": ("data.gpt", "", "draw_epoch", {}),
    "save": ("core.checkpoint.store", "", "_write_tensors", {}),
    "asynchronous save": ("core.checkpoint.store", "", "_write_tensors", {}),
}
IN_FLIGHT = 60.0  # seconds that a signal may take to make its way through the launcher


def before_calls(moment: str, act: Callable[[int], None]) -> None:
    """Before each call of what makes up the moment, `act` is told its number, from 1 on."""
    module, owner, function, needed = MOMENTS[moment]
    holder = importlib.import_module(module)
    holder = getattr(holder, owner) if owner else holder
    original, calls = getattr(holder, function), 0

    @functools.wraps(original)
    def wrapped(*args: object, **kwargs: object) -> object:
        nonlocal calls
        if all(kwargs.get(key) == value for key, value in needed.items()):
            calls += 1
            act(calls)
        return original(*args, **kwargs)

    setattr(holder, function, wrapped)


def send(name: str, target: str) -> None:
    """To this rank alone, or to all as the launcher does it."""
    if target == "one":
        os.kill(os.getpid(), signal.Signals[name])
    elif "SLURM_STEP_ID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
        done = subprocess.run(["scancel", f"--signal={name.removeprefix('SIG')}", step])
        if done.returncode > 0:  # below 0: it belongs to the step and was hit as well
            done.check_returncode()
    else:
        os.kill(os.getppid(), signal.Signals[name])


def preempt_at(moment: str, name: str, target: str, call: int) -> None:
    """Before the `call`th call of what makes up the moment the signal is sent, and awaited."""
    heard, request = threading.Event(), StopSignal.request

    def hear(self: StopSignal, reason: str) -> None:
        request(self, reason)
        heard.set()

    def act(number: int) -> None:
        if number == call:
            send(name, target)
            heard.wait(IN_FLIGHT)

    StopSignal.request = hear
    before_calls(moment, act)


def main(argv: list[str]) -> int:
    listen_early()  # what follows imports torch
    if argv[:1] == ["--pause"]:
        seconds, argv = float(argv[1]), argv[2:]
        before_calls("training", lambda number: time.sleep(seconds))
    if WORDS in os.environ:
        *moment, name, target, rank, call = os.environ[WORDS].split()
        if own_rank() == rank:
            preempt_at(" ".join(moment), name, target, int(call))
    return pretrain_gpt.main(argv)


def own_rank() -> str | None:
    """None in the --nproc parent."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
