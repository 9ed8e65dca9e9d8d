"""scripts/preprocess_data.py from its command line."""

import errno
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.indexed import IndexedBuilder, IndexedDataset
from scripts import build_corpus, preprocess_data

ROOT = Path(__file__).resolve().parents[2]
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]


def jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def run(tmp_path, *flags, prefix="out"):
    return preprocess_data.main([*flags, *NULL, "--output-prefix", str(tmp_path / prefix)])


def test_empty_texts_first_middle_and_last(tmp_path, capsys):
    """C055: an empty text as the first record crashed a preprocessor that appends end tokens."""
    source = jsonl(tmp_path / "a.jsonl", ["", "1 2", " ", "3", ""])
    assert run(tmp_path, "--input", source, "--append-eod", "--workers", "1") == 0
    data = IndexedDataset(tmp_path / "out_text_document")
    assert [data[i].tolist() for i in range(len(data))] == [[1, 2, 1000], [3, 1000]]
    assert "3 empty texts and 0 bad lines skipped" in capsys.readouterr().out


def test_any_number_of_workers_writes_the_same_bytes(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    texts = [" ".join(map(str, rng.integers(0, 1000, n))) for n in rng.integers(0, 400, 1500)]
    source = jsonl(tmp_path / "a.jsonl", texts)
    files = []
    for workers in ("1", "2", "3"):
        flags = ("--input", source, "--workers", workers, "--append-eod")
        assert run(tmp_path, *flags, prefix=workers) == 0
        stem = tmp_path / f"{workers}_text_document"
        files.append([Path(f"{stem}{ending}").read_bytes() for ending in (".bin", ".idx")])
    assert files[0] == files[1] == files[2]
    data = IndexedDataset(tmp_path / "1_text_document")
    assert [data[i][:-1].tolist() for i in range(len(data))] == [
        list(map(int, text.split())) for text in texts if text
    ]


def test_keys_and_patterns(tmp_path):
    for name, value in (("b", 2), ("a", 1)):
        record = {"text": f"{value}", "title": f"{value}0"}
        (tmp_path / f"in_{name}.jsonl").write_text(json.dumps(record))
    pattern = str(tmp_path / "in_*.jsonl")
    assert run(tmp_path, "--input", pattern, "--json-keys", "text", "title", "--workers", "1") == 0
    for key, expected in (("text", [1, 2]), ("title", [10, 20])):
        assert IndexedDataset(tmp_path / f"out_{key}_document").read(0, 2).tolist() == expected


def test_bad_line_stops_and_leaves_nothing(tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "1"}\n{"txt": "2"}\n{"text": "3"}\n')
    assert run(tmp_path, "--input", str(source), "--workers", "2") == 2
    assert "a.jsonl line 2: no key 'text'" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    assert run(tmp_path, "--input", str(source), "--workers", "1", "--on-bad-line", "skip") == 0
    captured = capsys.readouterr()
    assert "skipped: " in captured.err and "1 bad lines skipped" in captured.out
    assert IndexedDataset(tmp_path / "out_text_document").read(0, 2).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "no text under key 'text' in 0 records"), ('{"text": ""}', "in 1 records")],
)
def test_nothing_to_write_is_an_error(tmp_path, capsys, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    assert run(tmp_path, "--input", str(tmp_path / "a.jsonl"), "--workers", "1") == 2
    assert message in capsys.readouterr().err


def test_missing_input(tmp_path, capsys):
    assert run(tmp_path, "--input", str(tmp_path / "none.jsonl")) == 2
    assert "none.jsonl does not exist" in capsys.readouterr().err


def test_a_folder_is_no_input(tmp_path, capsys):
    assert run(tmp_path, "--input", str(tmp_path)) == 2
    assert f"is a folder; name its files, such as {tmp_path}/*.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mark_seconds", "again"),
    [(1000, "starts anew"), (0, "goes on from the last mark")],
    ids=["unmarked", "marked"],
)
def test_a_full_disk_is_said_and_the_same_command_ends_well(
    tmp_path, capsys, monkeypatch, mark_seconds, again
):
    source = jsonl(tmp_path / "a.jsonl", [" ".join(["1"] * 400)] * 2000)
    argv = ("--input", source, "--workers", "1")
    assert run(tmp_path, *argv, prefix="whole") == 0
    written = IndexedBuilder.add_documents

    def full(self, tokens, *rest):
        if self.num_tokens:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(self, tokens, *rest)

    monkeypatch.setattr(IndexedBuilder, "add_documents", full)
    monkeypatch.setattr(preprocess_data, "MARK_SECONDS", mark_seconds)
    assert run(tmp_path, *argv) == 2
    said = f"{tmp_path / 'out'}: No space left on device; the same command {again}"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out_text_document.idx").exists()
    monkeypatch.undo()
    assert run(tmp_path, *argv) == 0
    for ending in (".bin", ".idx"):
        whole = (tmp_path / f"whole_text_document{ending}").read_bytes()
        assert (tmp_path / f"out_text_document{ending}").read_bytes() == whole


def test_a_vocabulary_has_a_token(tmp_path, capsys):
    source = jsonl(tmp_path / "a.jsonl", ["1"])
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "0", "--workers", "1"]
    argv = ["--input", source, "--output-prefix", str(tmp_path / "out"), *flags]
    assert preprocess_data.main(argv) == 2
    assert "--vocab-size 0 is less than 1" in capsys.readouterr().err


def test_progress_starts_at_once(tmp_path, capsys):
    """C100: users took a silent preprocessor for a hanging one."""
    source = jsonl(tmp_path / "a.jsonl", ["1 2"])
    assert run(tmp_path, "--input", source, "--workers", "1") == 0
    first, second = capsys.readouterr().err.splitlines()
    assert "MB to read with 1 worker" in first and "1 documents" in second and "s left" in second


def test_help_imports_nothing_heavy():
    """C095: tokenizing text took a GPU stack. No optional package may even be loaded."""
    code = (
        "import sys, scripts.preprocess_data\n"
        "print([m for m in ('torch', 'tokenizers', 'transformers', 'triton') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]", shown.stderr
    script = [sys.executable, str(ROOT / "scripts" / "preprocess_data.py"), "--help"]
    shown = subprocess.run(script, cwd="/", capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0 and "--append-eod" in shown.stdout


def test_the_quickstart_chain_on_a_small_corpus(tmp_path):
    """Corpus, tokenizer, tokens; the text comes back, document by document."""
    pytest.importorskip("tokenizers")
    from data.tokenizer import build_tokenizer
    from scripts import train_tokenizer

    sources = tmp_path / "lib" / "site-packages"
    sources.mkdir(parents=True)
    (sources / "left_out.py").write_text("x = 0\n")
    texts = {f"m{i}.py": f"def f{i}(x):\n    return x + {i}\n" * 3 for i in range(20)}
    for name, text in {**texts, "copy.py": texts["m3.py"], "empty.py": ""}.items():
        (tmp_path / "lib" / name).write_text(text)
    (tmp_path / "lib" / "latin.py").write_bytes(b"# \xe9\n")
    corpus, model = str(tmp_path / "c.jsonl"), str(tmp_path / "tokenizer.json")
    assert build_corpus.main(["--root", str(tmp_path / "lib"), "--output", corpus]) == 0
    assert train_tokenizer.main(["--input", corpus, "--output", model, "--vocab-size", "300"]) == 0
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model, "--append-eod"]
    prefix = str(tmp_path / "c")
    argv = ["--input", corpus, "--output-prefix", prefix, "--workers", "1", *flags]
    assert preprocess_data.main(argv) == 0
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=model)
    data = IndexedDataset(f"{prefix}_text_document")
    back = [tokenizer.decode(data[i][:-1]) for i in range(len(data))]
    lines = [json.loads(line)["text"] for line in Path(corpus).read_text().splitlines()]
    assert back == lines and sorted(back) == sorted(texts.values())
    assert {int(data[i][-1]) for i in range(len(data))} == {tokenizer.eod}


def test_sentences_are_sequences(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("1 2. 3 4 5.\n\n6\n")
    texts = {"1 2.": "1 2", "3 4 5.": "3 4 5", "6": "6"}
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"text": "\n\n".join(texts.values())}) + "\n" + json.dumps({"text": "7"})
    )
    flags = ("--split-sentences", "--append-eod", "--workers", "1")
    assert run(tmp_path, "--input", str(tmp_path / "b.jsonl"), *flags) == 0
    data = IndexedDataset(tmp_path / "out_text_sentence")
    assert [data[i].tolist() for i in range(len(data))] == [[1, 2], [3, 4, 5], [6, 1000], [7, 1000]]
    assert data.document_indices.tolist() == [0, 3, 4]


KILLED = """
import os, signal, sys
from scripts import preprocess_data
preprocess_data.MARK_SECONDS = 0
after = preprocess_data.Progress.after
def dying(self, block, encoded):
    after(self, block, encoded)
    if self._counts.records >= 900:
        os.kill(os.getpid(), signal.SIGKILL)
preprocess_data.Progress.after = dying
preprocess_data.main(sys.argv[1:])
"""


@pytest.mark.parametrize(("suffix", "workers"), [("", "2"), (".gz", "1")])
def test_goes_on_after_a_kill(tmp_path, capsys, suffix, workers):
    """The same bytes as an unbroken run, without reading what was done before the last mark."""
    rng = np.random.default_rng(0)
    lines = "".join(
        json.dumps({"text": " ".join(map(str, rng.integers(0, 1000, 400)))}) + "\n"
        for _ in range(1000)
    ).encode()
    paths = []
    for name, part in (("a", lines), ("b", lines[: len(lines) // 2].rsplit(b"\n", 1)[0])):
        path = tmp_path / f"{name}.jsonl{suffix}"
        path.write_bytes(gzip.compress(part) if suffix else part)
        paths.append(str(path))
    flags = ["--input", *paths, "--append-eod", "--workers", workers]
    assert run(tmp_path, *flags, prefix="whole") == 0
    argv = [*flags, *NULL, "--output-prefix", str(tmp_path / "out")]
    # communicate() ends only when the workers, who hold the other ends, are gone too
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *argv], cwd=ROOT, capture_output=True, timeout=120
    )
    assert killed.returncode == -9
    assert (tmp_path / "out_text_document.partial" / "mark.json").is_file()
    assert not (tmp_path / "out_text_document.idx").exists()
    capsys.readouterr()
    assert preprocess_data.main(argv) == 0
    assert "going on after" in capsys.readouterr().err
    for ending in (".bin", ".idx"):
        whole = (tmp_path / f"whole_text_document{ending}").read_bytes()
        assert (tmp_path / f"out_text_document{ending}").read_bytes() == whole
    assert not (tmp_path / "out_text_document.partial").exists()


def test_a_text_the_tokenizer_refuses_is_a_bad_line(tmp_path, capsys):
    source = jsonl(tmp_path / "a.jsonl", ["1", "2 x", "3"])
    flags = ("--input", source, "--workers", "1")
    assert run(tmp_path, *flags) == 2
    assert "a.jsonl line 2: NullTokenizer reads numbers" in capsys.readouterr().err
    assert run(tmp_path, *flags, "--on-bad-line", "skip") == 0
    assert IndexedDataset(tmp_path / "out_text_document").read(0, 2).tolist() == [1, 3]


def test_a_dead_worker_is_said_and_nothing_is_lost(tmp_path, capsys, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", ["1"] * 10)
    monkeypatch.setattr(preprocess_data, "start_worker", os.abort)
    assert run(tmp_path, "--input", source, "--workers", "2") == 1
    assert "a worker died" in capsys.readouterr().err
    monkeypatch.undo()
    assert run(tmp_path, "--input", source, "--workers", "1") == 0


def test_a_mark_of_other_inputs_is_not_used(tmp_path, capsys):
    source = jsonl(tmp_path / "a.jsonl", ["1 2"])
    folder = tmp_path / "out_text_document.partial"
    folder.mkdir()
    (folder / "mark.json").write_text(json.dumps({"fingerprint": "other"}))
    assert run(tmp_path, "--input", source, "--workers", "1") == 0
    assert "starting anew" in capsys.readouterr().err


def test_flags_without_effect_say_so(tmp_path, capsys):
    source = jsonl(tmp_path / "a.jsonl", ["1 2"])
    assert run(tmp_path, "--input", source, "--workers", "1", "--partitions", "4") == 0
    assert "--partitions has no effect" in capsys.readouterr().err


def test_plain_text_has_one_key(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("1")
    assert run(tmp_path, "--input", str(tmp_path / "a.txt"), "--json-keys", "a", "b") == 2
    assert "one text a document" in capsys.readouterr().err
