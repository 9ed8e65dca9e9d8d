"""Under a real SLURM, where there is one: two nodes, four tasks, no launcher in between."""

import re
import shutil
import subprocess

import pytest

from core.launch.status import read_status
from scripts import submit
from tests.core.launch.test_supervise import PROGRAM, clean_environ


def nodes() -> int:
    if shutil.which("sinfo") is None:
        return 0
    states = ["sinfo", "--noheader", "--states=idle,mixed", "--format=%D"]
    answer = subprocess.run(states, capture_output=True, text=True)
    return sum(int(count) for count in answer.stdout.split()) if not answer.returncode else 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(nodes() < 2, reason="needs a SLURM with two idle nodes"),
]


def srun(*arguments: str, per_node: int = 2) -> tuple[int, str, str]:
    options = ["-N2", f"--ntasks-per-node={per_node}", "--kill-on-bad-exit=1", "--export=ALL"]
    done = subprocess.run(
        ["srun", *options, *PROGRAM, *arguments], env=clean_environ(), capture_output=True,
        text=True, timeout=180,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_tasks_find_each_other() -> None:
    code, out, _ = srun()
    assert code == 0
    assert sorted(re.sub(r"\d+\.0", "N", line) for line in out.splitlines()) == [
        f"rank {rank} of 4 on cpu: srun, step N" for rank in range(4)
    ]


@pytest.mark.parametrize(
    ("how", "cause"), [("raise", "ValueError: planted"), ("kill", "died without a word")]
)
def test_a_dead_task_is_named(how, cause) -> None:
    options = ["--steps", "3000", "--culprit", "1", "--how", how]
    code, _, err = srun(*options, per_node=1)
    assert code != 0
    ours = [line for line in err.splitlines() if "failed: " in line]
    assert re.search(rf"rank 1 \(.*\) failed: {cause}", ours[-1])


def test_a_submitted_job_ends_with_the_cause(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(submit.SCRIPTS.parent)
    for name in [name for name in clean_environ() if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    program = ["scripts/chaos_program.py", "--log-dir", str(tmp_path), "--steps", "3000"]
    options = ["--nodes=2", "--ntasks-per-node=2", "--time=5", f"--folder={tmp_path}"]
    options += ["--sbatch=--wait", "--", *program, "--culprit", "1", "--how", "exit"]
    assert submit.main(options) != 0
    (log,) = tmp_path.glob("chaos_program-*.log")
    last = log.read_text().rstrip().splitlines()[-1]
    assert re.fullmatch(r"rank 1 \(.*, step 2\) failed: left with exit code 3", last)
    assert read_status(tmp_path).outcome == "failed"
