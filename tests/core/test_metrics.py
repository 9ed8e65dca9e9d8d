"""Log lines, metrics file, trackers and the bar, with a clock and streams of the test's own."""

import contextlib
import io
import json
import math
import re

import pytest

from core import metrics_sinks
from core.metrics import Metrics
from core.progress import ProgressBar


class Clock:
    """Moves only when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Run:
    """A Metrics object with its clock and its two streams, and steps of a given length."""

    def __init__(self, total=10, **settings):
        self.clock, self.out, self.err = Clock(), io.StringIO(), io.StringIO()
        self.metrics = Metrics(
            **{"is_writer": True, "total_iterations": total, "log_interval": 100, **settings},
            out=self.out,
            err=self.err,
            clock=self.clock,
        )

    def step(self, iteration, seconds=0.5, **row):
        self.metrics.begin_step()
        self.clock.now += seconds
        self.metrics.train(
            {
                "iteration": iteration,
                "consumed_samples": 16 * iteration,
                "lm_loss": 8.0 / iteration,
                "grad_norm": 1.5,
                "learning_rate": 1e-3,
                "global_batch_size": 16,
                "tokens": 1024,
                **row,
            }
        )

    def evaluate(self, iteration, loss=2.0, **row):
        row = {"iteration": iteration, "consumed_samples": 16 * iteration, "lm_loss": loss, **row}
        self.metrics.evaluation(row)

    @property
    def lines(self):
        return self.out.getvalue().splitlines()


@pytest.fixture
def start():
    """Makes runs, and closes them at the end of the test."""
    runs = []

    def make(*args, **settings):
        runs.append(Run(*args, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.metrics.close()


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def iterations_of(lines):
    return [int(found[1]) for line in lines if (found := re.search(r"iteration +(\d+)/", line))]


def test_the_line_has_megatrons_fields_in_megatrons_order(start):
    run = start()
    run.step(1, 0.25)
    (line,) = run.lines
    assert re.fullmatch(r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] .* \|", line)
    assert line.split("] ", 1)[1] == (
        "iteration        1/      10 | consumed samples:           16 | "
        "elapsed time per iteration (ms): 250.0 | learning rate: 1.000000E-03 | "
        "global batch size:    16 | lm loss: 8.000000E+00 | grad norm: 1.500 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_optional_fields_stand_where_megatron_has_them(start):
    run = start(log_throughput=True, flops_per_token=10**9, world_size=2)
    run.step(1, 0.5, loss_scale=1024.0, num_zeros=7, params_norm=12.25)
    names = [re.split(r":|\d", field.strip())[0] for field in run.lines[0].split("|")[2:-1]]
    assert names == [
        "elapsed time per iteration (ms)",
        "throughput per GPU (TFLOP/s/GPU)",
        "learning rate",
        "global batch size",
        "lm loss",
        "loss scale",
        "grad norm",
        "num zeros",
        "params norm",
        "number of skipped iterations",
        "number of nan iterations",
    ]
    assert "(TFLOP/s/GPU): 1.02 |" in run.lines[0]  # 1024 tokens x 1e9 / (0.5 s x 2 ranks)


def test_a_line_sums_up_its_interval(start):
    run = start(log_interval=4)
    run.step(1)
    run.step(2, 0.1, lm_loss=2.0)
    run.step(3, 0.2, lm_loss=4.0)
    run.step(4, 0.6, lm_loss=9.0)
    line = run.lines[-1]
    assert "iteration        4/" in line
    assert "lm loss: 5.000000E+00" in line
    assert "(ms): 300.0" in line


def test_nan_and_skipped_iterations_are_counted_and_stay_out_of_the_mean(start, tmp_path):
    """C074 (Megatron-LLM#33): NaN for many iterations while both counters stayed 0."""
    run = start(log_interval=5, metrics_file=str(tmp_path / "m.jsonl"))
    run.step(1)
    run.step(2, lm_loss=math.nan, grad_norm=math.inf, skipped=True)
    run.step(3, lm_loss=3.0)
    run.step(4, lm_loss=50.0, skipped=True)
    run.step(5, lm_loss=math.inf)
    assert "lm loss: 3.000000E+00" in run.lines[-1]
    assert run.lines[-1].endswith(
        "number of skipped iterations:   2 | number of nan iterations:   2 |"
    )
    run.step(10, lm_loss=math.nan)
    assert "lm loss: NAN" in run.lines[-1]
    assert run.lines[-1].endswith(
        "number of skipped iterations:   0 | number of nan iterations:   1 |"
    )
    run.metrics.close()
    written = rows(tmp_path / "m.jsonl")
    assert [row["lm_loss"] for row in written] == [8.0, None, 3.0, 50.0, None, None]
    assert written[1]["grad_norm"] is None


def test_steps_that_only_overflowed_have_a_loss(start):
    run = start(log_interval=3, total=9)
    run.step(4, lm_loss=4.0, skipped=True, tokens=8)
    run.step(5, lm_loss=0.0, skipped=True, tokens=0)
    run.step(6, lm_loss=6.0, skipped=True, tokens=8)
    assert "lm loss: 5.000000E+00" in run.lines[-1]
    assert "skipped iterations:   3" in run.lines[-1]


def test_first_and_last_step_and_a_line_a_minute(start):
    run = start(total=12)
    for iteration in range(1, 13):
        run.step(iteration, seconds=25.0)
    assert iterations_of(run.lines) == [1, 4, 7, 10, 12]
    resumed = start(total=30, first_iteration=20)
    for iteration in (21, 22, 23):
        resumed.step(iteration)
    assert iterations_of(resumed.lines) == [21]


def test_file_rows(start, tmp_path):
    path = tmp_path / "new" / "m.jsonl"
    run = start(metrics_file=str(path), flops_per_token=10**6, world_size=4)
    run.step(1, 0.5, lm_loss=1 / 3, learning_rate=0.1 + 0.2)
    run.evaluate(1, math.pi, bytes=5)
    assert rows(path) == [
        {
            "kind": "train",
            "iteration": 1,
            "consumed_samples": 16,
            "lm_loss": 1 / 3,
            "grad_norm": 1.5,
            "learning_rate": 0.1 + 0.2,
            "global_batch_size": 16,
            "tokens": 1024,
            "step_time_s": 0.5,
            "tokens_per_s": 2048.0,
            "tflops_per_rank": 1024e6 / (0.5 * 4 * 1e12),
        },
        {
            "kind": "eval",
            "split": "validation",
            "iteration": 1,
            "consumed_samples": 16,
            "lm_loss": math.pi,
            "bytes": 5,
        },
    ]


def test_one_row_per_iteration_whatever_the_log_interval(start, tmp_path):
    run = start(log_interval=3, total=7, metrics_file=str(tmp_path / "m.jsonl"))
    for iteration in range(1, 8):
        run.step(iteration)
    assert [row["iteration"] for row in rows(tmp_path / "m.jsonl")] == list(range(1, 8))
    assert iterations_of(run.lines) == [1, 3, 6, 7]


def test_a_resumed_run_appends_and_sets_aside_what_it_makes_again(start, tmp_path):
    """A run broke at iteration 6 in the middle of a line; its last checkpoint is of iteration 4."""
    path = tmp_path / "m.jsonl"
    broken = start(metrics_file=str(path))
    for iteration in range(1, 7):
        broken.step(iteration)
        if iteration % 2 == 0:
            broken.evaluate(iteration)
    broken.metrics.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "iter')
    resumed = start(metrics_file=str(path), first_iteration=4)
    for iteration in range(5, 8):
        resumed.step(iteration)
    resumed.metrics.close()
    assert [(row["kind"], row["iteration"]) for row in rows(path)] == [
        *(("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4), ("eval", 4)),
        *(("train", 5), ("train", 6), ("train", 7)),
    ]
    old = (tmp_path / "m.jsonl.old").read_text().splitlines()
    assert len(old) == 4
    assert old[-1] == '{"kind": "train", "iter'
    assert resumed.lines[0] == (
        f"metrics: 4 lines beyond iteration 4 moved from {path} to m.jsonl.old"
    )
    assert not (tmp_path / "m.jsonl.tmp").exists()


def test_what_was_set_aside_stays_when_a_run_breaks_twice(start, tmp_path):
    path = tmp_path / "m.jsonl"
    for _ in range(3):
        run = start(metrics_file=str(path))
        run.step(1)
        run.metrics.close()
    assert len(rows(path)) == 1
    assert len(rows(tmp_path / "m.jsonl.old")) == 2


def test_a_clean_resume_touches_nothing(start, tmp_path):
    path = tmp_path / "m.jsonl"
    first = start(metrics_file=str(path))
    first.step(1)
    first.metrics.close()
    before = path.read_text()
    start(metrics_file=str(path), first_iteration=1).metrics.close()
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_file_that_is_no_metrics_file_is_kept(start, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine\n7\n[1]\n")
    run = start(metrics_file=str(path))
    run.step(1)
    assert (tmp_path / "notes.txt.old").read_text() == "mine\n7\n[1]\n"
    assert len(rows(path)) == 1


def test_unwritable_metrics_file(start, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"--metrics-file .* cannot be written"):
        start(metrics_file=str(tmp_path / "file" / "m.jsonl"))
    with pytest.raises(OSError, match=r"--metrics-file .* cannot be written: Is a directory"):
        start(metrics_file=str(tmp_path))


def test_a_full_disk_ends_no_run(start, tmp_path, capsys):
    (tmp_path / "m.jsonl").symlink_to("/dev/full")
    run = start(metrics_file=str(tmp_path / "m.jsonl"))
    with open("/dev/full", "w") as full:
        run.metrics._out = full
        for iteration in (1, 2):
            run.step(iteration)
        with contextlib.suppress(OSError):
            full.close()
    run.metrics.close()
    assert capsys.readouterr().err.count("lacks rows: No space left on device") == 1


def test_other_ranks_write_nothing(start, tmp_path):
    path = tmp_path / "m.jsonl"
    run = start(is_writer=False, metrics_file=str(path), tensorboard_dir=str(tmp_path / "tb"))
    run.step(1)
    run.evaluate(1)
    run.metrics.message("hello")
    run.metrics.close()
    assert (run.out.getvalue(), run.err.getvalue()) == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_evaluation_is_framed_as_megatron_frames_it(start):
    run = start()
    run.evaluate(4, 2.0)
    run.evaluate(4, math.nan, split="test")
    rule, line, again = run.lines[:3]
    assert line == (
        " validation loss at iteration 4 | lm loss value: 2.000000E+00 | "
        "lm loss PPL: 7.389056E+00 | "
    )
    assert rule == again == "-" * (len(line) + 1)
    assert "test loss at iteration 4 | lm loss value: NAN | lm loss PPL: NAN" in run.lines[4]


class FakeWriter:
    """A tracker that takes one commit of a step and drops the rest, as some services do."""

    def __init__(self, folder, purge_step):
        self.folder, self.purge_step = folder, purge_step
        self.values, self.closed = {}, False

    def add_scalar(self, tag, value, step):
        assert (tag, step) not in self.values, "repeated"
        assert step >= max((s for _, s in self.values), default=0), "went back"
        self.values[tag, step] = value

    def close(self):
        self.closed = True


@pytest.fixture
def writers(monkeypatch):
    made = []

    def make(folder, purge_step):
        made.append(FakeWriter(folder, purge_step))
        return made[-1]

    monkeypatch.setattr(metrics_sinks.optional, "summary_writer", lambda: make)
    return made


def test_tracker_gets_training_and_validation_of_a_step_together(start, writers, tmp_path):
    """C098 (Megatron-LLM#9): validation values were sent after their step was committed."""
    run = start(tensorboard_dir=str(tmp_path))
    (writer,) = writers
    assert (writer.folder, writer.purge_step) == (str(tmp_path), 1)
    for iteration in (1, 2, 3):
        run.step(iteration)
        if iteration == 2:
            assert {step for _, step in writer.values} == {1}
            run.evaluate(2, 1.0)
            assert {step for _, step in writer.values} == {1}
    assert {step for _, step in writer.values} == {1, 2}
    assert writer.values["lm loss", 2] == 4.0
    assert writer.values["lm loss validation", 2] == 1.0
    assert writer.values["lm loss validation ppl", 2] == pytest.approx(math.e)
    run.metrics.close()
    assert writer.values["lm loss", 3] == 8 / 3
    assert writer.closed
    assert {tag for tag, step in writer.values if step == 1} == {
        *("lm loss", "learning-rate", "grad-norm", "batch-size"),
        *("iteration-time", "tokens-per-second"),
    }


def test_tracker_interval_and_resume(start, writers, tmp_path):
    run = start(tensorboard_dir=str(tmp_path), tensorboard_log_interval=2, first_iteration=4)
    assert writers[0].purge_step == 5
    for iteration in range(5, 9):
        run.step(iteration)
    run.metrics.close()
    assert sorted({step for _, step in writers[0].values}) == [6, 8]


def test_steps_never_go_back(start, writers, tmp_path):
    run = start(tensorboard_dir=str(tmp_path))
    run.step(2)
    with pytest.raises(AssertionError, match="iteration 1 after iteration 2"):
        run.step(1)


def test_without_tensorboard_the_run_goes_on(start, monkeypatch):
    monkeypatch.setattr(metrics_sinks.optional, "summary_writer", lambda: None)
    run = start(tensorboard_dir="runs/tb")
    run.step(1)
    assert run.lines[0] == "--tensorboard-dir runs/tb is ignored: tensorboard is not installed"
    assert len(run.lines) == 2


def test_the_bar_is_one_line_that_makes_room_for_others(start):
    run = start(total=4, progress_bar=True, log_interval=2, flops_per_token=10**8)
    run.step(1, 0.5)
    drawn = run.err.getvalue().split("\r\x1b[K")
    assert drawn[1] == (
        " 25% ███░░░░░░░░░ 1/4 | 0:02 left | loss 8.000 | lr 1.00e-03 | 2,048 tokens/s |"
    )
    assert drawn[2:] == ["", drawn[1]]  # cleared for the first log line, drawn again
    assert "\n" not in run.err.getvalue()
    assert iterations_of(run.lines) == [1]
    run.metrics.close()
    assert run.err.getvalue().endswith("\r\x1b[K")


def test_no_bar_means_plain_lines(start):
    run = start(total=2)
    run.step(1)
    run.step(2)
    assert run.err.getvalue() == ""
    assert "\r" not in run.out.getvalue() and "\x1b" not in run.out.getvalue()


def test_bar_redraws_ten_times_a_second_and_tells_the_time_left():
    clock, stream = Clock(), io.StringIO()
    bar = ProgressBar(100, 40, stream=stream, clock=clock)
    for done in range(41, 61):
        clock.now += 1 / 16
        bar.update(done, "x")
    drawn = stream.getvalue().split("\r\x1b[K")[1:]
    assert len(drawn) == 10  # in 1.25 s: each second update
    bar.update(100, "end")
    assert stream.getvalue().endswith("100/100 | 0:00 left | end")
    assert drawn[-1] == " 59% ███████░░░░░ 59/100 | 0:03 left | x"  # 41 more at 16 a second
