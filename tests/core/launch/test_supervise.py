"""The --nproc parent, with ranks that need no torch and start in a moment."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.launch import find_here
from core.launch.failure import Failure, Reporter, describe_exit, read_failures
from core.launch.place import Place
from core.launch.supervise import Child, _conclude, _forward_signals

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = [sys.executable, "-W", "error", str(ROOT / "scripts" / "chaos_program.py")]
LIMIT = 120  # seconds in which started processes have ended, on whatever machine
LONG = "30000"  # steps of 10 ms: five minutes, which nothing here can wait for


def clean_environ(**more: str) -> dict[str, str]:
    """This process's environment without what a launcher around the tests may have set."""
    names = "RANK WORLD_SIZE LOCAL_ MASTER_ SLURM_ TORCHELASTIC PHALANX_ OMP_ PYTEST_ TORCH_CPP_"
    drop = re.compile("|".join(names.split()))
    kept = {key: value for key, value in os.environ.items() if not drop.match(key)}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def start(*arguments: str, **environ: str) -> subprocess.Popen:
    # A shell that runs the tests in the background has SIGINT ignored, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [*PROGRAM, *arguments],
            env=clean_environ(**environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def light(*arguments: str, **environ: str) -> tuple[int, str, str]:
    process = start("--light", *arguments, **environ)
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def started_two() -> tuple[subprocess.Popen, list[int]]:
    """A parent, and its two ranks' process ids once both are up."""
    process = start("--light", "--nproc", "2", "--steps", LONG)
    pids = [int(stream.readline().split("pid")[1].split()[0])
            for stream in (process.stdout, process.stderr)]  # fmt: skip
    return process, pids


def test_rank_0_has_stdout_and_the_others_are_told_apart_on_stderr() -> None:
    code, out, err = light("--nproc", "3")
    assert code == 0
    assert re.fullmatch(r"pid \d+ of rank 0\n", out)
    assert sorted(re.sub(r"\d{2,}", "N", line) for line in err.splitlines()) == [
        "[rank 1] pid N of rank 1",
        "[rank 2] pid N of rank 2",
    ]


@pytest.mark.parametrize(
    ("how", "code", "cause"),
    [
        ("raise", 1, "ValueError: planted"),
        ("exit", 3, "left with exit code 3"),
        ("_exit", 7, "left with exit code 7"),
        ("kill", 137, "killed by signal 9 (SIGKILL)"),
    ],
)
@pytest.mark.parametrize("culprit", [0, 2])
def test_the_first_failure_is_said_last_and_ends_all(how, code, cause, culprit) -> None:
    options = ["--culprit", str(culprit), "--how", how]
    found, _, err = light("--nproc", "3", "--steps", LONG, *options)
    assert found == code
    last = err.rstrip().splitlines()[-1]
    assert re.fullmatch(rf"rank {culprit} \(.+, pid \d+\) failed: {re.escape(cause)}", last)
    if how == "raise":  # the traceback itself is right above, and only there
        assert err.count("Traceback") == 1
        assert err.rstrip().splitlines()[-2] == "ValueError: planted"
    pids = [int(pid) for pid in re.findall(r"pid (\d+) of rank", err)]
    assert not any(alive(pid) for pid in pids)


def test_a_traceback_from_before_the_launcher_was_there_is_found(tmp_path) -> None:
    program = tmp_path / "broken.py"
    program.write_text(
        "import sys\n"
        "from core.launch import find_here, supervise\n"
        "import os\n"
        "if os.environ.get('RANK') == '1': raise ImportError('broken install')\n"
        "place = find_here(2)\n"
        "sys.exit(supervise(place, []) if place.children else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, program], env=clean_environ(), capture_output=True, text=True,
        timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 1
    lines = done.stderr.rstrip().splitlines()
    assert re.fullmatch(r"rank 1 \(.+\) failed: left with exit code 1", lines[-1])
    assert lines[-2] == "ImportError: broken install"


def test_a_segfault_says_where(tmp_path) -> None:
    found, _, err = light("--nproc", "2", "--steps", LONG, "--culprit", "1", "--how", "segv")
    assert found == 139
    assert err.rstrip().splitlines()[-1].endswith("failed: killed by signal 11 (SIGSEGV)")
    assert "in misbehave" in err[err.index("Fatal Python error", err.index("rank 1 (")) :]


def test_bad_input_is_said_once_and_nothing_failed() -> None:
    code, _, err = light("--nproc", "2", "--culprit", "0", "--how", "refuse")
    assert code == 2
    assert err.count("error: --data-path x.bin: no such file") == 1
    assert "failed" not in err.splitlines()[-1]


def test_stopped_is_no_failure() -> None:
    code, _, err = light("--nproc", "2", "--code", "85")
    assert code == 85 and "failed" not in err


def test_threads_are_divided_and_ports_never_clash(tmp_path) -> None:
    """C087: two runs at once on one host, with no port given."""
    program = tmp_path / "show.py"
    program.write_text(
        "import os, sys, time\n"
        "from core.launch import find_here, supervise\n"
        "place = find_here(2)\n"
        "if place.children: sys.exit(supervise(place, []))\n"
        "time.sleep(0.3)\n"
        "print(place.rank, place.master_port, os.environ['OMP_NUM_THREADS'])\n"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, program], env=clean_environ(), stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(3)
    ]  # fmt: skip
    said = [run.communicate(timeout=LIMIT)[0].split() for run in runs]
    assert len({port for _, port, _ in said}) == 3
    cores = len(os.sched_getaffinity(0))
    assert {threads for _, _, threads in said} == {str(max(1, cores // 2))}


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_signals_reach_the_ranks(name, code) -> None:
    process, pids = started_two()
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == code
    assert "failed" not in err
    assert not any(alive(pid) for pid in pids)


def test_a_signal_while_the_ranks_are_being_started_reaches_them_too(monkeypatch) -> None:
    """It ended the parent, and with it the ranks: starting many takes a while."""
    supervisor = importlib.import_module("core.launch.supervise")
    spawn = supervisor._spawn

    def interrupted(command, environ, rank, inherited):
        child = spawn(command, environ, rank, inherited)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
        return child

    monkeypatch.setattr(supervisor, "_spawn", interrupted)
    program = [sys.executable, "-c", "import time; time.sleep(300)"]
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # or this process would end
    try:
        assert supervisor.supervise(Place(children=2), [], program) == 128 + signal.SIGUSR2
    finally:
        signal.signal(signal.SIGUSR2, before)


class Forwarded:
    """A child that notes the signals it would have got."""

    code = None

    def __init__(self) -> None:
        self.process, self.got = self, []

    def send_signal(self, number: int) -> None:
        self.got.append(number)


def test_a_third_ctrl_c_kills_but_a_scheduler_may_repeat_itself() -> None:
    child = Forwarded()
    with _forward_signals([child], []):
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
            signal.raise_signal(number)
        assert child.got == [signal.SIGUSR1] * 3 + [signal.SIGTERM]
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
    assert child.got[4:] == [signal.SIGINT, signal.SIGINT, signal.SIGKILL]


def test_what_nohup_ignores_stays_ignored() -> None:
    child, before = Forwarded(), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _forward_signals([child], []) as received:
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (child.got, received) == ([], [])


def test_ranks_do_not_outlive_a_parent_that_is_killed() -> None:
    process, pids = started_two()
    process.kill()
    process.communicate(timeout=LIMIT)
    deadline = time.monotonic() + LIMIT
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"of the ranks {pids} some are still there"
        time.sleep(0.02)


def test_the_parent_is_light() -> None:
    """It starts the ranks before they could have imported torch themselves."""
    code = "import sys, core.launch; print([n for n in ('torch', 'numpy') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environ(), capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_records_put_causes_before_victims(tmp_path) -> None:
    Failure(0, "Connection closed by peer", time=1.0, victim=True).write(tmp_path)
    Failure(3, "ValueError: planted", time=2.0).write(tmp_path)
    Failure(3, "something later", time=0.5).write(tmp_path)  # a rank's first word counts
    assert [(f.rank, f.cause) for f in read_failures(tmp_path)] == [
        (3, "ValueError: planted"),
        (0, "Connection closed by peer"),
    ]


def test_an_exit_that_was_seen_says_more_than_a_neighbours_guess(capsys) -> None:
    """On a busy machine the neighbour may be faster than the parent."""
    children = [Child(rank, SimpleNamespace(pid=rank), code=code, ended=5.0)
                for rank, code in ((0, 1), (1, -9))]  # fmt: skip
    victim = Failure(0, "stopped: rank 1", time=1.0, victim=True)
    guess = Failure(1, "died without a word", time=2.0, guess=True)
    assert _conclude(children, set(), [victim, guess], []) == 137
    assert capsys.readouterr().err.endswith("failed: killed by signal 9 (SIGKILL)\n")
    assert _conclude(children, {1}, [victim, guess], []) == 137  # which the parent itself has sent
    assert capsys.readouterr().err.endswith("failed: died without a word\n")


def test_a_machine_that_stood_still_gives_the_cause_its_time(tmp_path, monkeypatch) -> None:
    """By the clock a victim's patience was over before anybody else could run."""
    now, looks = [0.0], []

    def sleep(seconds: float) -> None:
        now[0] += 3600.0
        looks.append(seconds)
        if len(looks) == 3:
            Failure(2, "ValueError: planted").write(tmp_path)

    monkeypatch.setattr("core.launch.failure.time.monotonic", lambda: now[0])
    monkeypatch.setattr("core.launch.failure.time.sleep", sleep)
    monkeypatch.setattr(Reporter, "yield_to", lambda self, first: looks.append(first.cause))
    Reporter(1, [tmp_path]).let_the_cause_speak()
    assert looks[3] == "ValueError: planted"


@pytest.mark.parametrize(
    "said",
    [
        "[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv "
        "operation to complete",
        "[../gloo/transport/tcp/unbound_buffer.cc:88] Timed out waiting 600ms for send operation "
        "to complete",
        "[../gloo/transport/tcp/pair.cc:543] Application timeout caused pair closure",
    ],
)
def test_who_waited_in_vain_for_a_peer_is_a_victim(tmp_path, monkeypatch, said) -> None:
    """gloo's own words for it."""
    monkeypatch.setattr("core.launch.failure.leave", lambda code: None)
    monkeypatch.setattr("core.launch.failure.BLAME_WAIT", 0.0)
    Reporter(1, [tmp_path]).on_exception(RuntimeError, RuntimeError(said), None)
    (found,) = read_failures(tmp_path)
    assert (found.rank, found.victim) == (1, True)
    assert re.fullmatch(r"lost contact with another rank \((Timed|Applic).+\)", found.cause)


def test_of_two_causes_the_store_says_which_was_first(tmp_path, monkeypatch) -> None:
    """Rank 5's clock is an hour slow, and a cleaner has taken the folder of a long run."""

    class Others:
        def announce(self, failure: Failure) -> bool:
            return failure.rank == 3

        def linger(self) -> None:
            pass

    monkeypatch.setattr("core.launch.failure.leave", lambda code: None)
    folder = tmp_path / "cleaned" / "away"
    for rank, clock in ((3, 5000.0), (5, 1400.0)):
        reporter = Reporter(rank, [folder])
        reporter.others = Others()
        reporter.fail(Failure(rank, "ValueError: planted", time=clock))
    assert [f.rank for f in read_failures(folder)] == [3, 5]


def test_exit_codes_in_words() -> None:
    assert describe_exit(-11) == "killed by signal 11 (SIGSEGV)"
    assert describe_exit(4) == "left with exit code 4"


def test_find_here_reads_the_environment(monkeypatch) -> None:
    for name in [name for name in os.environ if re.match(r"RANK|WORLD_SIZE|SLURM_", name)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    assert find_here("3").children == 3
