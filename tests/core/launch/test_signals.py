"""Asked to stop: by a signal, by the clock, and what happens to a rank that does not."""

import os
import signal
import subprocess
import sys
import time

import pytest

from core.launch.signals import StopSignal, grace_after_term, job_end, listen_early
from core.launch.status import Status, read_status
from tests.core.launch.test_supervise import clean_environ


@pytest.fixture
def stop():
    listening = StopSignal().install()
    yield listening
    listening.remove()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_the_first_signal_is_a_flag(stop, name) -> None:
    assert stop.poll() is None
    os.kill(os.getpid(), getattr(signal, name))
    assert stop.poll() == name


def test_ctrl_c_twice_is_immediate_but_one_press_heard_twice_is_not(stop, monkeypatch) -> None:
    """A terminal and the --nproc parent both pass one key press on."""
    now = [0.0]
    monkeypatch.setattr("core.launch.signals.time.monotonic", lambda: now[0])
    os.kill(os.getpid(), signal.SIGINT)
    now[0] = 0.9
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.poll() == "SIGINT"
    now[0] = 1.1
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_a_press_that_the_parent_passes_on_late_is_still_the_first(monkeypatch) -> None:
    """On a busy machine one Ctrl-C ended the ranks at once, and nothing was saved."""
    now, stop = [0.0], StopSignal(echoed=True).install()
    monkeypatch.setattr("core.launch.signals.time.monotonic", lambda: now[0])
    try:
        for now[0] in (0.0, 5.0):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.poll() == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    finally:
        stop.remove()


def test_usr1_before_the_ranks_have_met_is_not_lost() -> None:
    """Importing torch took longer than SLURM's early signal was late: four dead ranks."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        listen_early()
        os.kill(os.getpid(), signal.SIGUSR1)
        stop = StopSignal().install()
        assert stop.poll() == "SIGUSR1"
        stop.remove()
        again = StopSignal().install()
        again.remove()
        assert again.poll() is None  # it was heard once
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    StopSignal().install().remove()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_the_time_limit_leaves_room_for_two_longest_steps() -> None:
    stop = StopSignal(end=time.time() + 10_000)
    assert stop.poll(longest=4900.0) is None
    assert stop.poll(longest=4995.0) == "the job's time limit is near"


def test_a_rank_that_is_not_done_in_time_says_where_it_is() -> None:
    code = (
        "import os, signal, time\n"
        "from core.launch.signals import StopSignal\n"
        "StopSignal(grace=0.2).install()\n"
        "def deep_in_a_save():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
        "deep_in_a_save()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environ(), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "not done 0.2 s after SIGTERM" in done.stderr and "deep_in_a_save" in done.stderr


def test_grace_is_what_the_launcher_grants() -> None:
    assert grace_after_term({}) is None
    assert grace_after_term({"SLURM_JOB_ID": "1"}) == 25.0
    assert grace_after_term({"SLURM_JOB_ID": "1", "PHALANX_KILL_WAIT": "300"}) == 295.0
    assert grace_after_term({"SLURM_JOB_ID": "1", "PHALANX_KILL_WAIT": ""}) == 25.0
    torchrun = {"SLURM_JOB_ID": "1", "TORCHELASTIC_RUN_ID": "r"}
    assert grace_after_term(torchrun) == 25.0
    assert grace_after_term({**torchrun, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}) == 295.0
    assert grace_after_term({**torchrun, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}) == 2.5


def test_the_end_of_a_job(tmp_path) -> None:
    assert job_end({}, 0) is None
    told = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1800000000"}
    assert job_end(told, 0) == 1.8e9
    assert job_end(told, 1) is None  # rank 0 knows for all: of many clocks one is always fast


def test_an_older_slurm_is_asked(tmp_path, monkeypatch) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\n[ "$3" = 7 ] && echo 1:00:00\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert abs(job_end({"SLURM_JOB_ID": "7"}, 0) - time.time() - 3600) < 30
    squeue.write_text("#!/bin/sh\necho UNLIMITED\n")
    assert job_end({"SLURM_JOB_ID": "7"}, 0) is None


def test_a_status_is_whole_or_not_there(tmp_path) -> None:
    assert read_status(tmp_path) is None
    environ = {"SLURM_JOB_ID": "812", "SLURM_RESTART_COUNT": "2"}
    status = Status.here("stopped", environ, reason="SIGUSR1", step=40, ranks=8)
    status.write(tmp_path / "new")
    assert read_status(tmp_path / "new") == status
    assert (status.job, status.restart) == ("812", 2)
    (tmp_path / "new" / "status.json").write_text('{"outcome"')
    assert read_status(tmp_path / "new") is None
