"""Who am I? Rank, size and address from the command line and the environment. Pure.

`find_place` asks five questions in a fixed order, and the first yes decides:

1. RANK and WORLD_SIZE are set          torchrun, our own --nproc parent, or the user's launcher
2. this is a task of an srun step       SLURM_PROCID of SLURM_STEP_NUM_TASKS
3. a batch script that forgot srun      an error that says so
4. --nproc N                            this process is the parent that starts N ranks
5. otherwise                            one process

Whatever contradicts the answer is an error that names both sides. Nothing is imported, connected
or written here; core/launch/world.py does that with the `Place`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from core.launch.slurm import default_port, expand_nodelist, expand_tasks

# Set by our --nproc parent for its ranks: its process id.
PARENT = "PHALANX_PARENT"
# SLURM numbers the batch script, the interactive shell and the like as steps from here on.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


class LaunchError(ValueError):
    """A run that cannot start, in words for its user. `mine`: this rank is the one to print it."""

    mine = True


@dataclass(frozen=True)
class Place:
    """One process among all those of a run, before anything is connected.

    rule         which question decided, for the log
    children     > 0 in the parent of --nproc: how many ranks it must start; -1: one for each GPU
    nodes        under srun: the step's (host name, tasks), in order; empty where unknown
    run          tells runs apart that meet by mistake at one port; "" where there is no id
    """

    rule: str = "one process"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    children: int = 0
    nodes: tuple[tuple[str, int], ...] = ()
    run: str = ""

    def node_of(self, rank: int) -> str:
        """The host that runs `rank` under SLURM's block distribution; "" where that is unknown."""
        for name, tasks in self.nodes:
            if rank < tasks:
                return name
            rank -= tasks
        return ""


def find_place(nproc: str | int | None, environ: Mapping[str, str]) -> Place:
    """The place of this process, from --nproc (a number, "gpu" or None) and the environment.

    >>> find_place(None, {}).rule
    'one process'
    >>> find_place(4, {}).children
    4

    Raises LaunchError for contradictions.
    """
    children = _children(nproc)
    step = _step(environ)
    if "RANK" in environ or environ.get("WORLD_SIZE", "1") != "1":
        both = "RANK" in environ and "WORLD_SIZE" in environ
        if both and nproc is not None and PARENT not in environ:
            raise LaunchError(
                f"--nproc {nproc} starts ranks of its own, but RANK={environ['RANK']} and "
                f"WORLD_SIZE={environ['WORLD_SIZE']} say that torchrun or another launcher has "
                f"done so already; leave out one of the two"
            )
        return _from_launcher(environ, step)
    if step is not None and step.tasks > 1:
        if nproc is not None:
            raise LaunchError(
                f"--nproc {nproc} starts ranks of its own, but srun has started {step.tasks} tasks "
                f"already; leave out --nproc, or use srun --ntasks=1"
            )
        return _from_step(environ, step)
    if step is None:
        _refuse_forgotten_srun(nproc, environ)
    if int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        raise LaunchError(
            f"mpirun started this as one of {environ['OMPI_COMM_WORLD_SIZE']} processes, but RANK "
            f"and WORLD_SIZE are not set, so that each would train alone; use torchrun, srun or "
            f"--nproc, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    return Place(rule=f"--nproc {nproc}", children=children) if children else Place()


def _children(nproc: str | int | None) -> int:
    if nproc is None:
        return 0
    if nproc == "gpu":
        return -1
    if str(nproc).isdecimal() and int(nproc) > 0:
        return int(nproc)
    raise LaunchError(f"--nproc {nproc}: must be a number of processes from 1, or gpu")


# ---- rule 1: torchrun and others ------------------------------------------------------------


def _from_launcher(environ: Mapping[str, str], step: "_Step | None") -> Place:
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in environ:
            raise LaunchError(
                f"{other}={environ[other]} is set but {name} is not; a launcher sets both, "
                f"and a single process needs neither"
            )
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE", least=1)
    if rank >= size:
        raise LaunchError(f"RANK={rank} is not below WORLD_SIZE={size}")
    local_size = _number(environ, "LOCAL_WORLD_SIZE", default=size, least=1)
    local_rank = _number(environ, "LOCAL_RANK", default=rank % local_size)
    if local_rank >= local_size or local_size > size:
        raise LaunchError(
            f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size} and WORLD_SIZE={size} do not "
            f"fit together; each must be below or equal to the next"
        )
    if PARENT in environ:
        rule = f"--nproc {size}"
    elif "TORCHELASTIC_RUN_ID" in environ:
        rule = "torchrun"
    else:
        rule = "RANK and WORLD_SIZE"
    place = Place(rule, rank, size, local_rank, local_size)
    if PARENT not in environ:
        _check_slurm_agrees(environ, step, place)
    if size == 1:
        return place
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise LaunchError(
                f"RANK={rank} and WORLD_SIZE={size} are set but {name} is not: rank 0's host name "
                f"in MASTER_ADDR and a port that is free there in MASTER_PORT"
            )
    return replace(
        place,
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT"),
        run=environ.get("TORCHELASTIC_RUN_ID", ""),
    )


def _check_slurm_agrees(environ: Mapping[str, str], step: "_Step | None", place: Place) -> None:
    """srun must start one task per rank, or one torchrun per node."""
    tasks = step.tasks if step else _number(environ, "SLURM_NTASKS", default=1)
    if tasks <= 1:
        return
    size, local_size = place.size, place.local_size
    torchrun = "TORCHELASTIC_RUN_ID" in environ
    if step and torchrun and tasks != size // local_size and tasks >= local_size > 1:
        raise LaunchError(
            f"torchrun runs inside each of srun's {tasks} tasks and each starts {local_size} ranks "
            f"(WORLD_SIZE={size}); use srun --ntasks-per-node=1 with torchrun, or srun with "
            f"{tasks} tasks and no torchrun"
        )
    if tasks not in (size, size // local_size):
        name = "SLURM_STEP_NUM_TASKS" if step else "SLURM_NTASKS"
        raise LaunchError(
            f"WORLD_SIZE={size} (LOCAL_WORLD_SIZE={local_size}) contradicts {name}={tasks}: SLURM "
            f"must start one task for each rank ({size}), or one torchrun for each node "
            f"({size // local_size}); if RANK is left over from another launcher, unset it"
        )


# ---- rules 2 and 3: SLURM -------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """A step that srun started, or what somebody imitates one with."""

    name: str
    number: int
    tasks: int


def _step(environ: Mapping[str, str]) -> _Step | None:
    """The srun step this process is a task of.

    A batch script has SLURM_PROCID=0 and SLURM_NTASKS too, but no SLURM_STEP_ID; an interactive
    shell has a special one. Without a job id the variables are hand-made and taken at their word.
    """
    if "SLURM_PROCID" not in environ:
        return None
    job, number = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID", "")
    if number.isdecimal() and int(number) < FIRST_SPECIAL_STEP:
        name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        tasks = _number(environ, name, default=1, least=1)
        return _Step(f"srun, step {job or '?'}.{number}", int(number), tasks)
    if not number and (job is None or environ["SLURM_PROCID"] != "0"):
        tasks = _number(environ, "SLURM_NTASKS", default=1, least=1)
        return _Step("SLURM_PROCID and SLURM_NTASKS", 0, tasks)
    return None


def _from_step(environ: Mapping[str, str], step: _Step) -> Place:
    rank = _number(environ, "SLURM_PROCID")
    if rank >= step.tasks:
        raise LaunchError(f"SLURM_PROCID={rank} is not below the step's {step.tasks} tasks")
    nodes = _nodes(environ)
    tasks_here = dict(enumerate(tasks for _, tasks in nodes))
    node = _number(environ, "SLURM_NODEID", default=0)
    local_rank = _number(environ, "SLURM_LOCALID", default=rank)
    local_size = tasks_here.get(node, step.tasks if len(nodes) <= 1 else local_rank + 1)
    if not nodes and "MASTER_ADDR" not in environ:
        raise LaunchError(
            "started by srun, but neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST says where "
            "rank 0 runs; set MASTER_ADDR to its host name"
        )
    job = _number(environ, "SLURM_JOB_ID", default=0)
    block = environ.get("SLURM_DISTRIBUTION", "block").startswith("block")
    return Place(
        rule=step.name,
        rank=rank,
        size=step.tasks,
        local_rank=local_rank,
        local_size=max(local_size, local_rank + 1),
        master_addr=environ.get("MASTER_ADDR") or nodes[0][0],
        master_port=_number(environ, "MASTER_PORT", default=default_port(job, step.number)),
        nodes=nodes if block else (),
        run=f"{job}.{step.number}",
    )


def _nodes(environ: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """(host name, tasks) of every node of the step; without a task count, all tasks are on one."""
    names = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not names:
        return ()
    try:
        hosts = expand_nodelist(names)
        counts = expand_tasks(tasks) if tasks else []
    except ValueError as error:
        raise LaunchError(f"SLURM's description of the step cannot be read: {error}") from None
    if len(counts) != len(hosts):
        counts = [_number(environ, "SLURM_NTASKS", default=1)] if len(hosts) == 1 else []
    return tuple(zip(hosts, counts or [0] * len(hosts), strict=True))


def _refuse_forgotten_srun(nproc: str | int | None, environ: Mapping[str, str]) -> None:
    tasks = _number(environ, "SLURM_NTASKS", default=1)
    if "SLURM_JOB_ID" not in environ or tasks <= 1:
        return
    one_node = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", "1")) == "1"
    if nproc is None:
        raise LaunchError(
            f"SLURM_NTASKS={tasks}, but this process was not started by srun and would wait for "
            f"the others for ever; start it with srun, e.g. srun --kill-on-bad-exit=1 python -u …"
        )
    if not (one_node and str(nproc) in (str(tasks), "gpu")):
        raise LaunchError(
            f"--nproc {nproc} starts ranks on this node only, but the job has SLURM_NTASKS={tasks}"
            f"{'' if one_node else ' on several nodes'}; start with srun and without --nproc"
        )


def _number(
    environ: Mapping[str, str], name: str, *, default: int | None = None, least: int = 0
) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or int(text) < least:
        raise LaunchError(f"{name}={text} must be a whole number from {least}")
    return int(text)
