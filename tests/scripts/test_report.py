"""What a run's folder says, in a terminal and as a page."""

import json

import pytest

from core.launch.failure import Failure
from core.launch.status import Status
from scripts import report


@pytest.fixture
def folder(tmp_path):
    rows = [
        {"kind": "train", "iteration": i, "lm_loss": 5.0 - i / 10, "tokens_per_s": 1000.0 + i,
         "step_time_s": 0.5}
        for i in range(1, 31)
    ]  # fmt: skip
    rows[9]["lm_loss"] = None
    rows.append({"kind": "eval", "iteration": 30, "lm_loss": 2.25})
    lines = [json.dumps(row) for row in rows] + ['{"kind": "tra']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (tmp_path / "ck" / "iter_0000030").mkdir(parents=True)
    Status("stopped", "SIGUSR1", step=30, ranks=4).write(tmp_path / "ck")
    entry = {"job": "8", "restart": 0, "outcome": "stopped", "reason": "SIGUSR1", "step": 30}
    (tmp_path / "ck" / "requeue.json").write_text(json.dumps([entry]))
    records = tmp_path / "ck" / "failures-8-0"
    records.mkdir()
    Failure(0, "stopped: …", victim=True, time=1.0).write(records)
    Failure(3, "ValueError: <planted>", traceback="Traceback …\n", time=2.0).write(records)
    return tmp_path


def test_the_terminal_shows_loss_speed_restarts_and_the_cause(folder, capsys) -> None:
    assert report.main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "stopped (SIGUSR1), step 30, 4 ranks" in said
    assert "4.9000 to 2.0000" in said
    assert "1,016 tokens/s (median; 1,001 to 1,030)" in said
    assert "no loss at    10" in said
    assert "2.2500 at step 30" in said
    assert "1, newest iter_0000030" in said
    assert "run 0         stopped at step 30 (SIGUSR1)" in said
    assert said.rstrip().endswith("failed: ValueError: <planted>")
    assert said.count("●") == 29


def test_the_page_stands_alone(folder, tmp_path) -> None:
    page = tmp_path / "report.html"
    report.main([str(folder), "--html", str(page)])
    text = page.read_text()
    assert "<polyline" in text and "<circle" in text
    assert "ValueError: &lt;planted&gt;" in text
    assert "http" not in text  # nothing is fetched


def test_the_cause_alone(folder, capsys) -> None:
    report.main(["--failures", str(folder / "ck" / "failures-8-0")])
    assert capsys.readouterr().err.splitlines()[-1].endswith("failed: ValueError: <planted>")
    report.main(["--failures", str(folder / "nothing")])
    assert capsys.readouterr().err == ""


def test_when_nobody_could_say_why(tmp_path, capsys) -> None:
    Failure(1, "lost contact with another rank", victim=True).write(tmp_path)
    report.main(["--failures", str(tmp_path)])
    assert "no rank has said why" in capsys.readouterr().err


def test_an_empty_folder_is_no_error(tmp_path, capsys) -> None:
    assert report.main([str(tmp_path)]) == 0
    assert "no status.json" in capsys.readouterr().out
