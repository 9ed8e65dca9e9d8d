"""scripts/plot_loss.py and scripts/quickstart_report.py from their command lines."""

import gzip
import json
import math
import re

import numpy as np
import pytest

from data.indexed import IndexedBuilder
from scripts import plot_loss, quickstart_report


def metrics(path, losses, evaluations=()):
    rows = [
        {"kind": "train", "iteration": i, "consumed_samples": 4 * i, "lm_loss": loss}
        | {"tokens_per_s": 100.0 * i}
        for i, loss in enumerate(losses, 1)
    ]
    rows += [
        {"kind": "eval", "iteration": i, "consumed_samples": 4 * i, "lm_loss": loss}
        for i, loss in evaluations
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_plot(tmp_path, capsys):
    first = metrics(tmp_path / "a" / "metrics.jsonl", [3.0, None, 2.0], [(3, 2.5)])
    second = metrics(tmp_path / "b" / "metrics.jsonl", [3.0])
    output = tmp_path / "new" / "loss.png"
    assert plot_loss.main([first, second, "--output", str(output), "--x", "consumed_samples"]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{output}: a, b\n"


@pytest.mark.parametrize(
    ("losses", "flags", "said"),
    [
        ([None], [], "has no row with a loss"),
        ([1.0], ["--labels", "a", "b"], "2 --labels for 1 metrics files"),
    ],
)
def test_plot_refuses(tmp_path, capsys, losses, flags, said):
    name = metrics(tmp_path / "a" / "metrics.jsonl", losses)
    with pytest.raises(SystemExit) as stopped:
        plot_loss.main([name, "--output", str(tmp_path / "loss.png"), *flags])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "loss.png").exists()


def test_running_mean_forgets():
    assert plot_loss.running_mean([5.0, 3.0, 7.0], 1) == [5.0, 3.0, 7.0]
    means = plot_loss.running_mean([4.0] + [2.0] * 60, 2)
    assert means[1] == pytest.approx((2.0 + 0.5 * 4.0) / 1.5)
    assert means[-1] == pytest.approx(2.0)


class Letters:
    """A tokenizer whose ids are letters."""

    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


def test_bits_per_byte(tmp_path, capsys, monkeypatch):
    """Held-out files are the last ones; ln 2 nats a token is one bit a token."""
    documents = [[0, 9], [1, 9], [2, 2, 2, 2, 2, 2, 9], [3, 3, 3, 3, 9]]
    with IndexedBuilder(tmp_path / "corpus", np.uint16) as builder:
        for document in documents:
            builder.add(np.array(document, np.uint16), [len(document)])
    monkeypatch.setattr(quickstart_report, "build_tokenizer", lambda *_, **__: Letters())
    held_out = tmp_path / "held_out.json"
    flags = ["--data-path", str(tmp_path / "corpus"), "--tokenizer-model", "x", "--split", "1,1,0"]
    flags += ["--seq-length", "2", "--global-batch-size", "2", "--output", str(held_out)]
    assert quickstart_report.main(["measure", *flags]) == 0
    assert json.loads(held_out.read_text()) == {
        "documents": 2,
        "tokens": 12,
        "bytes": 10,
        "gzip_bytes": len(gzip.compress(b"cccccc", 9)) + len(gzip.compress(b"dddd", 9)),
        "batches": 2,
    }
    metrics(tmp_path / "metrics.jsonl", [2.0, 1.5, 1.0], [(1, 9.0), (3, math.log(2))])
    assert quickstart_report.main(["report", "--run", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "0.6931 nats per token, after 3 iterations" in text
    assert re.search(r"bits per byte +1\.200 on 2 files", text)
    assert re.search(r"gzip -9 +\d+\.\d{3} on", text)
    assert re.search(r"speed +200 tokens/s", text)


def test_missing_files_are_said_in_a_sentence(tmp_path, capsys):
    assert quickstart_report.main(["report", "--run", str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err
