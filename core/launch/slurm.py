"""What SLURM says about a job, read without SLURM: node lists, tasks per node, a port. Pure.

Containers often lack `scontrol`, so node lists are expanded here. Used by core/launch/place.py.
"""

import itertools
import re

ITEM = r"(?:\[[^\[\]]+\]|[^\[\],\s])+"  # one name or pattern: n7, n[01-03,7], r[1-2]n[1-2]


def expand_nodelist(text: str) -> list[str]:
    """Host names of a SLURM node list, in order.

    >>> expand_nodelist("n[01-03,7],m5")
    ['n01', 'n02', 'n03', 'n7', 'm5']
    >>> expand_nodelist("r[1-2]n[1-2]")
    ['r1n1', 'r1n2', 'r2n1', 'r2n2']

    Raises ValueError for text that is not a node list.
    """
    if not re.fullmatch(f"{ITEM}(,{ITEM})*", text):
        raise ValueError(f"{text!r} is not a SLURM node list such as n[01-03,7],m5")
    names: list[str] = []
    for item in re.finditer(ITEM, text):
        parts = re.split(r"(\[[^\[\]]*\])", item[0])
        choices = [_expand_ranges(p[1:-1], text) if p[:1] == "[" else [p] for p in parts]
        names += ["".join(choice) for choice in itertools.product(*choices)]
    return names


def _expand_ranges(text: str, whole: str) -> list[str]:
    """'01-03,7' -> ['01', '02', '03', '7']; the width of the first number is kept."""
    numbers: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{whole!r} is not a SLURM node list: {part!r} is no number or range")
        last = last or first
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def expand_tasks(text: str) -> list[int]:
    """Tasks on each node.

    >>> expand_tasks("2(x3),1")
    [2, 2, 2, 1]
    """
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if not match:
            raise ValueError(f"{text!r} is not a SLURM list of tasks per node such as 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def default_port(job: int, step: int) -> int:
    """A port below the usual ephemeral range; jobs and steps that share a node get others.

    >>> default_port(812, 0), default_port(812, 1)
    (25172, 25173)
    """
    return 20000 + (job * 31 + step) % 10000


def parse_time_left(text: str) -> float | None:
    """Seconds in SLURM's [days-]hours:minutes:seconds; None for UNLIMITED, INVALID and the like.

    >>> parse_time_left("1-02:03:04"), parse_time_left("59:30"), parse_time_left("UNLIMITED")
    (93784.0, 3570.0, None)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_time_limit(text: str) -> float | None:
    """Seconds in what sbatch's --time takes; None if it takes no such thing.

    minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]

    >>> parse_time_limit("2"), parse_time_limit("4:00:00"), parse_time_limit("1-12")
    (120.0, 14400.0, 129600.0)
    """
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash or len(numbers) == 3:
        hours, minutes, seconds = (numbers + [0, 0])[:3]
    else:
        hours, minutes, seconds = 0, *(numbers + [0])[:2]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)
