"""scripts/train_tokenizer.py from its command line."""

import json
import sys

import pytest

from data.tokenizer import build_tokenizer
from scripts import train_tokenizer

pytest.importorskip("tokenizers")


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "c.jsonl"
    lines = [json.dumps({"text": "The cat sat on the mat, unsat."})] * 30
    path.write_text("\n".join(lines))
    return str(path)


def test_byte_pairs_are_the_same_each_time(corpus, tmp_path, capsys):
    written = []
    for name in ("a.json", "b.json"):
        argv = ["--input", corpus, "--output", str(tmp_path / name), "--vocab-size", "270"]
        assert train_tokenizer.main(argv) == 0
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1] and "270 tokens in" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json", "c.jsonl"]
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "a.json"))
    assert (tokenizer.vocab_size, tokenizer.eod) == (270, 0)


@pytest.mark.parametrize("cased", [False, True])
def test_word_pieces(corpus, tmp_path, cased):
    output = str(tmp_path / "vocab.txt")
    argv = ["--kind", "wordpiece", "--input", corpus, "--output", output, "--vocab-size", "60"]
    assert train_tokenizer.main([*argv, *["--cased"] * cased]) == 0
    kind = "BertWordPieceCase" if cased else "BertWordPieceLowerCase"
    tokenizer = build_tokenizer(kind, vocab_file=output)
    assert [tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask] == [0, 2, 3, 4]
    ids = tokenizer.encode("The cat")
    assert 1 not in ids and (ids == tokenizer.encode("the cat")) == (not cased)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vocab-size", "256"], "--vocab-size 256 has no room"),
        (["--kind", "wordpiece", "--vocab-size", "5"], "--vocab-size 5 has no room"),
        (["--input", "/nowhere"], "/nowhere does not exist"),
        (["--json-keys", "txt"], "line 1: no key 'txt'"),
    ],
)
def test_refusals(corpus, tmp_path, capsys, flags, message):
    output = tmp_path / "out.json"
    assert train_tokenizer.main(["--input", corpus, "--output", str(output), *flags]) == 2
    assert message in capsys.readouterr().err and not output.exists()


def test_a_missing_package_is_named(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert train_tokenizer.main(["--input", corpus, "--output", str(tmp_path / "x")]) == 2
    assert "pip install tokenizers" in capsys.readouterr().err
