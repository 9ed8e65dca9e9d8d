"""What torch.distributed itself holds: its default group as a `Group`, and groups of one rank.

For `core.parallel_state`, which starts from a default group that somebody else initialised and
hands real ProcessGroups back. Imports core.comm.group and torch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from core.comm.group import Group


def is_initialized() -> bool:
    """Whether this process has a default group."""
    return dist.is_available() and dist.is_initialized()


def world_group() -> Group:
    """All ranks of the default group."""
    return Group.of(dist.group.WORLD, name="world")


def group_of_one() -> object:
    """A new ProcessGroup of this rank alone; no other rank takes part in its creation."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def is_process_group(thing: object) -> bool:
    return isinstance(thing, dist.ProcessGroup)


def communication_device(group: Group | None = None) -> torch.device:
    """Where a tensor must be to be sent: host memory for gloo and for a process on its own."""
    handle = group.handle if group is not None else None
    if not is_initialized() or dist.get_backend(handle) == "gloo":
        return torch.device("cpu")
    return torch.device(
        torch.accelerator.current_accelerator(), torch.accelerator.current_device_index()
    )
