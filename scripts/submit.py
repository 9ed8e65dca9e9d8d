"""Write a SLURM batch file for a training run, keep it beside the checkpoints, and submit it.

    python scripts/submit.py --nodes 2 --gpus-per-node 8 --time 4:00:00 -- \\
        pretrain_gpt.py --tensor-model-parallel-size 8 --save runs/a/checkpoints --load ...

What follows `--` is the script and its flags, untouched. The file is plain bash, made to be read
and edited: kill on bad exit, an early signal that makes the run save, requeue by what the run left
in status.json, the cause of a failure as the last lines of the log. `--dry-run` prints it only.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from core.launch.signals import AFTERWARDS, EARLY_SIGNAL
from core.launch.slurm import parse_time_limit
from core.process_memory import share_freed_memory

SCRIPTS = Path(__file__).resolve().parent
LONGEST_LEAD = 300  # seconds before the time limit at which the run is asked to save


@dataclass(frozen=True)
class Job:
    """Everything the batch file says.

    tasks     ranks on each node
    limit     SLURM's --time, and `lead` the seconds before it at which the signal comes
    program   script and its flags
    folder    for the batch file, the log and the failure records
    save      the program's --save, or None: without it there is nothing to go on from
    extra     further sbatch options, e.g. --partition=gpu
    requeue   this job goes on by itself; `chain`: in another one, submitted already
    """

    name: str
    nodes: int
    tasks: int
    gpus: int
    cpus: int
    limit: str
    lead: int
    launcher: str
    python: str
    program: tuple[str, ...]
    folder: str
    save: str | None
    extra: tuple[str, ...] = ()
    requeue: bool = True
    chain: bool = False


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    parser = make_parser()
    job, chain, dry_run = make_job(parser.parse_args(argv[:end]), argv[end + 1 :], parser)
    text = render(job)
    if dry_run:
        print(text, end="")
        return 0
    folder = Path(job.folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{job.name}.sbatch"
    path.write_text(text)
    print(f"wrote {path}", flush=True)
    if shutil.which("sbatch") is None:
        parser.error(f"sbatch is not on this machine; submit it where it is: sbatch {path}")
    command = ["sbatch", *(["--dependency=singleton"] if chain > 1 else []), str(path)]
    for _ in range(chain):
        done = subprocess.run(command)
        if done.returncode:
            return done.returncode
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--nodes", type=int, default=1)
    add("--ntasks-per-node", type=int, help="ranks on each node (default: one for each GPU, or 1)")
    add("--gpus-per-node", type=int, default=0)
    add("--cpus-per-task", type=int, default=0)
    add("--time", required=True, help="time limit as SLURM writes it: minutes, or [days-]h:m:s")
    add("--job-name", help="default: the script's name")
    early = f"save so long before the limit (default: {LONGEST_LEAD}, less for short jobs)"
    add("--signal-seconds", type=int, help=early)
    chain = (
        "submit N jobs that run one after the other instead of one that is requeued; it is\n"
        "jobs of one name that wait for each other: two chains need two --job-name"
    )
    add("--chain", type=int, default=1, metavar="N", help=chain)
    add("--launcher", choices=("srun", "torchrun"), default="srun")
    add("--python", default=sys.executable, help="the interpreter on the nodes")
    add("--folder", help="for batch file, log and failure records (default: SAVE/slurm, or slurm)")
    add("--sbatch", action="append", default=[], metavar="OPTION",
        help="one more option, e.g. --sbatch=--partition=gpu; repeatable")  # fmt: skip
    add("--dry-run", action="store_true", help="print the file; write and submit nothing")
    return parser


def make_job(
    args: argparse.Namespace, program: list[str], parser: argparse.ArgumentParser
) -> tuple[Job, int, bool]:
    """The job, how often to submit it, and whether just to show it; all problems at once."""
    seconds = parse_time_limit(args.time)
    problems = []
    if not program:
        problems.append("no program: put `-- pretrain_gpt.py …` at the end")
    elif not Path(program[0]).is_file():
        problems.append(f"{program[0]} is no file here")
    if seconds is None:
        problems.append(f"--time {args.time}: minutes, minutes:seconds, or [days-]hours[:m[:s]]")
    for name in ("nodes", "chain"):
        if getattr(args, name) < 1:
            problems.append(f"--{name} {getattr(args, name)} must be 1 or more")
    tasks = args.ntasks_per_node or max(1, args.gpus_per_node)
    if args.gpus_per_node and tasks > args.gpus_per_node:
        problems.append(f"--ntasks-per-node {tasks} is more than --gpus-per-node "
                        f"{args.gpus_per_node}: ranks would share GPUs")  # fmt: skip
    if any(flag.partition("=")[0] == "--nproc" for flag in program):
        problems.append("--nproc starts ranks on one machine; here srun does, leave it out")
    save = option(program, "--save")
    if save and (why := goes_back(program, save)):
        problems.append(why)
    if problems:
        parser.error("\n  ".join(["", *problems]))
    lead = args.signal_seconds or min(LONGEST_LEAD, max(1, int(seconds) // 4))
    job = Job(
        name=args.job_name or Path(program[0]).stem,
        nodes=args.nodes,
        tasks=tasks,
        gpus=args.gpus_per_node,
        cpus=args.cpus_per_task,
        limit=args.time,
        lead=lead,
        launcher=args.launcher,
        python=args.python,
        program=tuple(program),
        folder=args.folder or (f"{save}/slurm" if save else "slurm"),
        save=save,
        extra=tuple(args.sbatch),
        requeue=args.chain == 1 and save is not None,
        chain=args.chain > 1,
    )
    return job, args.chain, args.dry_run


def option(program: list[str], name: str) -> str | None:
    """The value of a flag among the program's, given as two words or with `=`; the last wins."""
    value = None
    for word, following in zip(program, [*program[1:], None]):
        if word == name:
            value = following
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def goes_back(program: list[str], save: str) -> str:
    """Why this command line, started again, would not go on from its own checkpoints, or ""."""
    load = option(program, "--load")
    if load is None or Path(load).resolve() != Path(save).resolve():
        return (
            f"--load is {load or 'absent'}: a requeued job would not go on from --save {save}; "
            f"give --load {save}. What it begins with is --pretrained-checkpoint DIR (weights), "
            "or a checkpoint copied there (all of it)"
        )
    for flag in ("--ckpt-step", "--finetune"):
        if any(word.partition("=")[0] == flag for word in program):
            return f"{flag}: a requeued job would go back each time; leave it out"
    return ""


# ---- the file -------------------------------------------------------------------------------


def render(job: Job) -> str:
    """The batch file."""
    parts = (_header(job), _environment(job), _start(job), _after(job))
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _header(job: Job) -> list[str]:
    # Under torchrun SLURM starts one task a node; it forwards TERM to its workers, USR1 kills it.
    by_srun = job.launcher == "srun"
    options = [
        f"--job-name={shlex.quote(job.name)}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.tasks if by_srun else 1}",
        *([f"--gpus-per-node={job.gpus}"] if job.gpus else []),
        *([f"--cpus-per-task={job.cpus}"] if job.cpus else []),
        f"--time={job.limit}",
        f"--signal={'USR1' if by_srun else 'TERM'}@{job.lead}",
        "--requeue" if job.requeue else "--no-requeue",
        "--open-mode=append",
        "--wait-all-nodes=1",
        f"--output={shlex.quote(f'{job.folder}/%x-%j.log')}",
        *job.extra,
    ]
    return ["#!/bin/bash", *(f"#SBATCH {option}" for option in options)]


def _environment(job: Job) -> list[str]:
    records = f"{shlex.quote(job.folder)}/failures-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"
    sharing: dict[str, str] = {}
    share_freed_memory(sharing)
    lines = [
        f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
        "# From SLURM 22.05 on, srun does not take --cpus-per-task over from sbatch by itself.",
        "export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}",
        "# The ranks' freed memory goes to whoever asks next (core/process_memory.py).",
        *(f"export {name}=${{{name}:-{value}}}" for name, value in sharing.items()),
        "# Every rank that fails leaves a record here.",
        f"export PHALANX_RECORDS={records}",
        'mkdir -p "$PHALANX_RECORDS"',
        *_outlook(job),
        "# How long this site lets a job live after TERM; the ranks say where they are before.",
        "export PHALANX_KILL_WAIT=$(scontrol show config | awk '/^KillWait/ {print $3}')",
        "# At the time limit this script outlives srun, to say why and to requeue the job.",
        "trap : TERM",
    ]
    if job.launcher == "torchrun":
        lines += [
            "# TERM is the early signal here: the ranks have until the limit to save.",
            f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.lead}",
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "port=$((20000 + SLURM_JOB_ID * 31 % 10000))",
        ]
    return lines


def _outlook(job: Job) -> list[str]:
    follows = "requeue" if job.requeue else "chain" if job.chain else ""
    return [
        "# For the line that says how far a run will get before the time limit.",
        f"export {EARLY_SIGNAL}={job.lead}",
        *([f"export {AFTERWARDS}={follows}"] if follows else []),
    ]


def _start(job: Job) -> list[str]:
    srun = "srun --kill-on-bad-exit=1 --export=ALL"
    program = " ".join(shlex.quote(word) for word in job.program)
    python = shlex.quote(job.python)
    if job.launcher == "srun":
        command = f"{srun} --label \\\n    {python} -u {program}"
    else:
        command = (
            f"{srun} \\\n"
            f"    {python} -m torch.distributed.run --nnodes={job.nodes} "
            f"--nproc-per-node={job.tasks} \\\n"
            f'    --rdzv-backend=c10d --rdzv-endpoint="$head:$port" '
            f'--rdzv-id="$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}" \\\n'
            f"    {program}"
        )
    return [command, "code=$?"]


def _after(job: Job) -> list[str]:
    python = shlex.quote(job.python)
    report, requeue = (shlex.quote(str(SCRIPTS / name)) for name in ("report.py", "requeue.py"))
    failures = f'{python} {report} --failures "$PHALANX_RECORDS"'
    if not job.requeue:
        return ["# The cause of a failure, if there is one, as the last lines of the log.",
                failures, "exit $code"]  # fmt: skip
    return [
        "# status.json decides, not the exit code: srun and torchrun change that on the way.",
        "again=no",
        f"{python} {requeue} --save {shlex.quote(job.save)} --exit-code $code && again=yes",
        failures,
        '[ $again = yes ] && scontrol requeue "$SLURM_JOB_ID"',
        "exit $code",
    ]


if __name__ == "__main__":
    sys.exit(main())
