"""Who am I, who are the others, and how do we all end: starting and stopping a run.

    place = find_here(config.launch.nproc)
    if place.children:
        sys.exit(supervise(place, argv))         # the parent of --nproc starts the ranks
    with launch(place, config.launch, fingerprint=flags) as world:
        world.rank, world.size, world.device, world.group, world.stop_requested()

Read place.py and here.py, then supervise.py (the --nproc parent), world.py (start and stop) with
rendezvous.py, failure.py and watch.py (how a run ends when something breaks), signals.py (asked to
stop). None of them imports torch before `start`, so that --help and the parent stay light. No other
part of core but core/optional.py reads environment variables.
"""

from core.launch.failure import Failure, read_failures, refuse
from core.launch.here import find_here
from core.launch.place import LaunchError, Place, find_place
from core.launch.signals import StopSignal
from core.launch.supervise import STOPPED, supervise
from core.launch.world import World, launch, start, stop

__all__ = [
    "STOPPED",
    "Failure",
    "LaunchError",
    "Place",
    "StopSignal",
    "World",
    "find_here",
    "find_place",
    "launch",
    "read_failures",
    "refuse",
    "start",
    "stop",
    "supervise",
]
