"""A program that starts like a training run, steps, and fails as it is told.

    python scripts/chaos_program.py --nproc 2 --culprit 1 --how raise

For scripts/chaos.py and the launch tests; runs under python, --nproc, torchrun and srun. Every step
is one collective. `--light` leaves torch and the other ranks out, so that it starts in a moment.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from core.launch import STOPPED, LaunchError, Place, find_here, launch, refuse, supervise
from core.train_config import LaunchConfig

FAILING_STEP = 2
HOWS = ("raise", "refuse", "exit", "_exit", "kill", "segv", "stop", "sleep")


def misbehave(how: str) -> None:
    if how == "raise":
        raise ValueError("planted")
    if how == "refuse":
        raise LaunchError("--data-path x.bin: no such file")
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segv":
        ctypes.string_at(0)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "sleep":
        time.sleep(1000)


def run_light(place: Place, args: argparse.Namespace) -> int:
    """Steps of 10 ms that nobody waits for."""
    print(f"pid {os.getpid()} of rank {place.rank}", flush=True)
    for step in range(args.steps):
        if step == FAILING_STEP and place.rank == args.culprit:
            misbehave(args.how)
        time.sleep(0.01)
    return args.code


def run(place: Place, args: argparse.Namespace) -> int:
    """Steps until done or asked to stop; --ready gets a file with each rank's process id."""
    settings = LaunchConfig(
        rendezvous_timeout_seconds=args.rendezvous,
        log_dir=args.log_dir,
        hang_timeout_seconds=args.hang,
        exit_signal="SIGUSR2",
    )
    with launch(place, settings, {"--steps": str(args.steps)}, args.log_dir) as world:
        import torch

        from core.comm import all_reduce_

        for step in range(args.steps):
            world.at_step(step)
            if args.ready and step == 1:
                Path(args.ready, str(world.rank)).write_text(str(os.getpid()))
            if step == FAILING_STEP and world.rank == args.culprit:
                misbehave(args.how)
            stop = torch.tensor([float(world.stop_requested() is not None)])
            if all_reduce_(stop, world.group, op="max", tag="stop").item():
                print(f"rank {world.rank} stopped at {step} ({world.stop_requested()})", flush=True)
                world.report("stopped", world.stop_requested() or "another rank")
                return STOPPED
            time.sleep(0.02)
        print(f"rank {world.rank} of {world.size} on {world.device}: {world.rule}", flush=True)
        world.report("complete")
    return args.code


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nproc")
    parser.add_argument("--light", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--culprit", type=int, default=-1)
    parser.add_argument("--how", choices=HOWS)
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--rendezvous", type=float, default=60)
    parser.add_argument("--hang", type=float)
    parser.add_argument("--log-dir")
    parser.add_argument("--ready")
    args = parser.parse_args()
    try:
        place = find_here(args.nproc)
    except LaunchError as error:
        refuse(error)
    if place.children:
        return supervise(place, sys.argv[1:])
    return run_light(place, args) if args.light else run(place, args)


if __name__ == "__main__":
    sys.exit(main())
