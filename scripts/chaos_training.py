"""pretrain_gpt.py, sending itself a signal at a chosen moment.

    PHALANX_PREEMPT="save SIGTERM one 1 1" python scripts/chaos_training.py --nproc 2 --mock-data …

The words are: the moment, the signal, "one" rank alone or "all" through the --nproc parent, the
rank that sends it, and the how manieth such moment it is. For scripts/chaos.py --preempt.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pretrain_gpt
from core.launch.signals import StopSignal

WORDS = "PHALANX_PREEMPT"
MOMENTS = {  # what is called then: module, class or "", function; and the first argument it needs
    "training": ("core.train", "Trainer", "train_step", {}),
    "evaluation": ("core.train", "Trainer", "executor", {"forward_only": True}),
    "data building": ("data.gpt", "", "draw_epoch", {}),
    "save": ("core.checkpoint.store", "", "_write_tensors", {}),
    "asynchronous save": ("core.checkpoint.store", "", "_write_tensors", {}),
}
IN_FLIGHT = 60.0  # seconds that a signal may take to make its way through the parent


def preempt_at(moment: str, name: str, target: str, call: int) -> None:
    """Before the `call`th call of what makes up the moment, the signal is sent."""
    module, owner, function, needed = MOMENTS[moment]
    holder = importlib.import_module(module)
    holder = getattr(holder, owner) if owner else holder
    original, calls = getattr(holder, function), 0
    heard, request = threading.Event(), StopSignal.request

    def hear(self: StopSignal, reason: str) -> None:
        request(self, reason)
        heard.set()

    StopSignal.request = hear

    @functools.wraps(original)
    def wrapped(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += all(kwargs.get(key) == value for key, value in needed.items())
        if calls == call:
            calls += 1
            os.kill(os.getppid() if target == "all" else os.getpid(), signal.Signals[name])
            heard.wait(IN_FLIGHT)
        return original(*args, **kwargs)

    setattr(holder, function, wrapped)


if __name__ == "__main__":
    *moment, name, target, rank, call = os.environ[WORDS].split()
    if os.environ.get("RANK") == rank:
        preempt_at(" ".join(moment), name, target, int(call))
    sys.exit(pretrain_gpt.main())
