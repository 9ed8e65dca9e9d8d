"""Whole runs with torch: a good one, a differing one, a stopped one, and one of each way to die.

Each costs two imports of torch, so there are few; scripts/chaos.py has the long table.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.comm import Ledger
from core.launch.failure import Reporter, read_failures
from core.launch.hang import Progress
from core.launch.place import LaunchError, Place
from core.launch.signals import StopSignal
from core.launch.status import read_status
from core.launch.tee import Tee
from core.launch.world import World, _device
from tests.core.launch.test_supervise import PROGRAM, clean_environ, start

# Seconds: for started processes to end; and for the end of a run after the moment that decides it,
# on a machine that may stand still for some. Else it would take a minute, or for ever.
LIMIT, SOON = 180, 45
PORT = str(20000 + os.getpid() % 10000)  # without one, all torchruns of a machine meet at 29500
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TORCHRUN += ["--master-port", PORT]


def run(*arguments: str, launcher=(), **environ: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    command = [*launcher, PROGRAM[-1]] if launcher else PROGRAM
    done = subprocess.run(
        [*command, *arguments], env=clean_environ(**environ), capture_output=True, text=True,
        timeout=LIMIT,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def seconds_since_ready(folder: Path) -> float:
    """Since the last rank was about to take the step in which one of them fails."""
    return time.time() - max(path.stat().st_mtime for path in folder.iterdir())


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1]


class GPUs:
    """torch.cuda, as far as the choice of a device asks it; `current` is what was made current."""

    def __init__(self, monkeypatch, count: int, works: bool = True) -> None:
        import torch

        self.current: list[str] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: works and count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", self.current.append)


@pytest.mark.parametrize(
    ("gpus", "local_rank", "local_size", "asked", "device"),
    [
        (0, 0, 1, None, "cpu"),
        (1, 0, 1, None, "cuda:0"),
        (4, 2, 4, None, "cuda:2"),
        (8, 2, 4, None, "cuda:2"),
        (2, 1, 4, None, "cpu"),  # not a GPU for every rank of this machine
        (4, 2, 4, "gloo", "cpu"),
        (4, 2, 4, "nccl", "cuda:2"),
        (2, 3, 4, "nccl", "cuda:1"),  # as asked; `meet` refuses two ranks on one GPU
    ],
)
def test_nccl_where_every_local_rank_has_a_gpu_else_gloo(
    monkeypatch, gpus, local_rank, local_size, asked, device
) -> None:
    found = GPUs(monkeypatch, gpus)
    place = Place("test", local_rank, 8, local_rank, local_size)
    assert _device(asked, place) == ("gloo" if device == "cpu" else "nccl", device)
    assert found.current == ([] if device == "cpu" else [device])


def test_a_task_of_srun_may_see_only_its_own_gpu(monkeypatch) -> None:
    found = GPUs(monkeypatch, 1)
    place = Place("test", 3, 4, 3, 4, nodes=(("a", 4),))
    assert _device(None, place) == ("nccl", "cuda:0") and found.current == ["cuda:0"]
    GPUs(monkeypatch, 0)
    assert _device(None, place) == ("gloo", "cpu")


@pytest.mark.parametrize(("gpus", "works"), [(0, True), (4, False)])
def test_nccl_without_a_gpu_is_refused(monkeypatch, gpus, works) -> None:
    """Among them GPUs that are there, and a driver that does not work."""
    found, place = GPUs(monkeypatch, gpus, works), Place()
    with pytest.raises(LaunchError, match="nccl needs a GPU and none is visible; use gloo"):
        _device("nccl", place)
    assert _device(None, place) == ("gloo", "cpu") and found.current == []


@pytest.mark.parametrize(
    ("rank", "environ", "answer"),
    [
        (0, {"TERM": "xterm"}, True),
        (1, {"TERM": "xterm"}, False),
        (0, {"TERM": "dumb"}, False),
        (0, {"TERM": "xterm", "SLURM_JOB_ID": "812"}, False),
    ],
)
def test_only_rank_0_on_a_screen_draws_a_bar(monkeypatch, rank, environ, answer) -> None:
    """Bars fill log files, and two ranks that draw on one screen draw over each other."""
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: True))
    for name in ("TERM", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    parts = dict.fromkeys(("group", "reporter", "signals", "progress"))
    world = World(rank, 2, rank, 2, "cpu", "test", "gloo", **parts)
    assert world.has_terminal() is answer


def test_the_time_limit_leaves_room_for_a_write_beside_the_steps() -> None:
    """Under --async-save the last step and the write before it may both have to end first."""
    stop, progress = StopSignal(end=time.time() + 10_000), Progress(Ledger(), None, 600.0)
    parts = {"group": None, "reporter": None, "signals": stop, "progress": progress}
    world = World(0, 1, 0, 1, "cpu", "test", "none", **parts)
    progress.longest = 2000.0
    world.at_write(2900.0)
    world.at_write(100.0)
    assert world.stop_requested() is None
    world.at_write(2995.0)
    assert world.stop_requested() == "the job's time limit is near"


def test_how_long_a_job_lets_a_run_go_on(monkeypatch) -> None:
    """Until its script's signal or until the limit is near, whichever is first."""
    stop, progress = StopSignal(), Progress(Ledger(), None, 600.0)
    parts = {"group": None, "reporter": None, "signals": stop, "progress": progress}
    world = World(0, 1, 0, 1, "cpu", "test", "none", **parts)
    for name in ("PHALANX_EARLY_SIGNAL", "PHALANX_AFTERWARDS"):
        monkeypatch.delenv(name, raising=False)
    assert (world.stops_at(), world.afterwards()) == (None, "")
    stop.end, progress.longest, progress.longest_write = 5000.0, 20.0, 10.0
    assert world.stops_at() == 5000 - 15 - 2 * 30
    monkeypatch.setenv("PHALANX_EARLY_SIGNAL", "300")
    monkeypatch.setenv("PHALANX_AFTERWARDS", "requeue")
    assert (world.stops_at(), world.afterwards()) == (4700.0, "the job is requeued")
    progress.longest = 200.0
    assert world.stops_at() == 5000 - 15 - 2 * 210


def test_a_status_that_cannot_be_written_is_a_warning(tmp_path, capsys) -> None:
    """The checkpoint is there: the run was stopped, and has not failed."""
    (tmp_path / "file").touch()
    parts = dict.fromkeys(("group", "signals", "progress"))
    world = World(0, 1, 0, 1, "cpu", "test", "none", reporter=Reporter(0), **parts)
    world.reporter.status_dir = tmp_path / "file"
    world.report("stopped", "SIGUSR1")
    assert "status.json does not say 'stopped': " in capsys.readouterr().err


def test_a_log_on_a_full_disk_ends_no_run(capsys) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        tee = Tee(sys.stdout, full)
        for _ in range(3):
            print("a line", file=tee, flush=True)
        out = capsys.readouterr().out
        assert out.count("a line") == 3
        assert out.count("WARNING: /dev/full is not written: No space left on device") == 1
        with suppress(OSError):
            full.close()


def test_ranks_of_nproc_meet_work_and_leave(tmp_path) -> None:
    code, out, err = run("--nproc", "2", "--log-dir", str(tmp_path))
    assert code == 0
    assert out == "rank 0 of 2 on cpu: --nproc 2\n"
    assert err == "[rank 1] rank 1 of 2 on cpu: --nproc 2\n"  # and no warning of any kind
    assert (tmp_path / "rank_0001.log").read_text() == "rank 1 of 2 on cpu: --nproc 2\n"
    status = read_status(tmp_path)
    assert (status.outcome, status.step, status.ranks) == ("complete", 4, 2)


def test_torchrun_gets_the_traceback_of_the_right_rank(tmp_path) -> None:
    options = ["--culprit", "1", "--how", "raise", "--ready", str(tmp_path)]
    code, _, err = run(*options, launcher=TORCHRUN)
    assert code == 1
    assert seconds_since_ready(tmp_path) < SOON
    assert re.search(r"rank 1 \(.+, step 2\) failed: ValueError: planted", err)
    cause = err[err.index("Root Cause") :]
    assert re.search(r"rank +: 1 ", cause) and "ValueError: planted" in cause


@pytest.mark.parametrize(
    ("culprit", "how", "cause"),
    [(1, "raise", "ValueError: planted"), (0, "kill", "killed by signal 9 (SIGKILL)")],
)
def test_a_dead_rank_ends_the_run_and_is_named_last(tmp_path, culprit, how, cause) -> None:
    options = ["--culprit", str(culprit), "--how", how, "--log-dir", str(tmp_path)]
    code, _, err = run("--nproc", "2", "--steps", "3000", *options)
    assert code == (1 if how == "raise" else 137)
    assert last_line(err).startswith(f"rank {culprit} (") and last_line(err).endswith(cause)
    if how == "raise":
        first, *others = read_failures(tmp_path)
        assert (first.rank, first.step, first.cause) == (1, 2, cause)
        assert [failure.rank for failure in others if not failure.victim] == []


@pytest.mark.slow
def test_a_stopped_rank_is_found_by_its_neighbour(tmp_path) -> None:
    options = ["--culprit", "0", "--how", "stop", "--ready", str(tmp_path)]
    code, _, err = run("--nproc", "2", "--steps", "3000", *options)
    assert code == 137
    assert re.match(r"rank 0 \(.+\) failed: stopped \(SIGSTOP\), no sign of life", last_line(err))
    assert seconds_since_ready(tmp_path) < SOON  # of which 10 are silence


@pytest.mark.parametrize("kept", [True, False])
def test_a_rank_that_hangs_is_told_from_those_that_wait_for_it(tmp_path, kept) -> None:
    """C090: one rank stalls and the rest hold the machines for hours."""
    (tmp_path / "ready").mkdir()
    options = ["--culprit", "1", "--how", "sleep", "--hang", "3"]
    options += ["--ready", str(tmp_path / "ready")]
    options += ["--log-dir", str(tmp_path)] if kept else []
    code, _, err = run("--nproc", "2", "--steps", "3000", *options)
    assert code == 1
    assert seconds_since_ready(tmp_path / "ready") < SOON
    assert re.match(r"rank 1 \(.+, step 2\) failed: hung: no progress for 3 s", last_line(err))
    assert "world call 3: rank 0 all_reduce stop float32 x 1; rank 1 has not entered it" in err
    assert "time.sleep(1000)" in err[err.index("rank 1 is here:") :]
    if not kept:  # the parent's own folder is gone
        assert "all threads of every rank are in this output" in err
        assert re.search(r"^all threads of rank 0:\n(.*\n)+?.* in all_reduce_", err, re.M)
        told = err[err.index("[rank 1] all threads of rank 1:") :]
        assert "[rank 1]     time.sleep(1000)" in told
        return
    assert f"all threads of every rank: {tmp_path}/hang.rank*.txt" in err
    account = (tmp_path / "hang.rank1.txt").read_text()
    assert "time.sleep(1000)" in account and account.count("thread ") > 2
    assert account.endswith("  world call 2: all_reduce stop float32 x 1\n")
    assert read_status(tmp_path).outcome == "failed"


def test_bad_input_found_by_one_rank_is_said_once() -> None:
    code, _, err = run("--nproc", "2", "--steps", "3000", "--culprit", "1", "--how", "refuse")
    assert code == 2
    assert err == "[rank 1] error: --data-path x.bin: no such file\n"


def test_a_log_folder_that_cannot_be_is_said_once(tmp_path) -> None:
    (tmp_path / "file").touch()
    code, _, err = run("--nproc", "2", "--log-dir", str(tmp_path / "file"))
    assert code == 2
    assert re.fullmatch(r"(\[rank 1\] )?error: --log-dir .*file cannot be written: .*\n", err)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path) -> None:
    process = start("--nproc", "2", "--steps", "100000", "--ready", str(tmp_path))
    deadline = time.monotonic() + LIMIT
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline, "the ranks do not make their second step"
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGUSR1)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 85
    steps = re.findall(r"rank (\d) stopped at (\d+) \((\w+)\)", out + err)
    assert [(rank, why) for rank, _, why in steps] == [("0", "None"), ("1", "SIGUSR1")]
    assert steps[0][1] == steps[1][1]


def said_by_two(commands: list[list[str]], **of_rank_1: str) -> list[str]:
    """What two ranks that must not meet print; both are to leave with exit code 2."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = []
    for rank, command in enumerate(commands):
        environ = clean_environ(RANK=str(rank), WORLD_SIZE="2", **there)
        environ.update(of_rank_1 if rank else {})
        ranks.append(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    return said


def test_ranks_with_different_versions_are_told_apart_at_once(tmp_path) -> None:
    """Rank 1's node has another numpy, and a checkout in which a digit was changed."""
    root = Path(PROGRAM[-1]).parents[1]
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for folder in ("core", "models", "kernels", "data", "scripts"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=ignored)
    changed = tmp_path / "models" / "config.py"
    changed.write_text(changed.read_text().replace("1", "2", 1))
    installed = tmp_path / "numpy-99.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 99.1\n")
    program = (  # torch first: its import may take as long on a busy machine
        "import runpy, sys, time, torch; sys.argv.pop(0); print(time.time(), file=sys.stderr);"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    there = [str(where / "scripts" / "chaos_program.py") for where in (root, tmp_path)]
    said = said_by_two(
        [[sys.executable, "-c", program, path] for path in there], PYTHONPATH=str(tmp_path)
    )
    (ready, *found), other = said[0].splitlines(), said[1].splitlines()
    assert time.time() - max(float(ready), float(other.pop(0))) < SOON
    assert len(found) == 3 and other == []
    who = r"rank 1 \(node .+\) has"
    code = r"\d+ \*\.py of digest \w{8}"
    assert re.fullmatch(rf"error: {who} in models/ {code}, rank 0 has {code}", found[0])
    assert re.fullmatch(rf"{who} numpy 99\.1, rank 0 has \d\S+", found[1])
    assert found[2] == "all nodes need the same packages and the same copy of the source files"


def test_versions_are_found_quickly_and_without_torch() -> None:
    code = (
        "import sys, time; from core.launch.versions import versions; spent = []\n"
        "while len(spent) < 20 and min(spent, default=1) >= 0.03:\n"
        "    began = time.thread_time(); found = versions()\n"
        "    spent.append(time.thread_time() - began)\n"
        "assert min(spent) < 0.03, spent\n"
        "assert 'torch' not in sys.modules; print(*found, sep=', ')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environ(), capture_output=True, text=True
    )
    folders = "in core/, in models/, in kernels/, in data/"
    assert done.stdout == f"Python, torch, numpy, phalanx, {folders}\n", done.stderr
