"""scripts/check_data.py from its command line."""

import numpy as np
import pytest

from data.gpt import GPTDataset
from data.indexed import IndexedBuilder
from scripts import check_data


@pytest.fixture
def prefix(tmp_path):
    with IndexedBuilder(tmp_path / "a", np.uint16) as builder:
        for document in ([1, 2, 3, 9], [], [5, 9]):
            builder.add(np.array(document, np.int64))
    return str(tmp_path / "a")


def test_a_good_pair(prefix, capsys):
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    assert check_data.main(["--data-path", prefix, *flags]) == 0
    shown = capsys.readouterr().out
    assert "3 documents, 3 sequences, 6 tokens of uint16" in shown
    assert "tokens a document: 0 to 4, median 2; 1 documents are empty" in shown
    assert "token ids 1 to 9" in shown and "decoded: '1 2 3 9'" in shown and "no problems" in shown


def test_tokens_outside_the_vocabulary_are_counted(prefix, capsys):
    assert check_data.main(["--data-path", prefix, "--vocab-size", "9"]) == 2
    assert "2 of 6 tokens are not in 0 .. 8, the first is token 3" in capsys.readouterr().err


@pytest.mark.parametrize("block", [1, 2, 100])
def test_the_smallest_and_the_largest_id_are_those_seen(tmp_path, capsys, monkeypatch, block):
    """In whatever pieces they are read."""
    monkeypatch.setattr(check_data, "COPIED_TOKENS", block)
    with IndexedBuilder(tmp_path / "a", np.int32) as builder:
        builder.add(np.array([7, 5, 9, 6]))
    assert check_data.main(["--data-path", str(tmp_path / "a")]) == 0
    assert "token ids 5 to 9\n" in capsys.readouterr().out


def test_no_token_is_there(tmp_path, capsys):
    with IndexedBuilder(tmp_path / "a", np.int32) as builder:
        builder.add(np.array([], np.int64))
    assert check_data.main(["--data-path", str(tmp_path / "a")]) == 0
    assert "no tokens\n" in capsys.readouterr().out


def test_a_negative_id_is_counted_and_not_decoded(tmp_path, capsys):
    """Tokenizers raise on it: `tokenizers` an OverflowError."""
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "c": 2}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(tmp_path / "vocab.json")]
    flags += ["--merge-file", str(tmp_path / "merges.txt"), "--data-path", str(tmp_path / "a")]
    with IndexedBuilder(tmp_path / "a", np.int32) as builder:
        for document in ([1, -1, 2], [0, 2]):
            builder.add(np.array(document))
    assert check_data.main(flags) == 2
    out, err = capsys.readouterr()
    assert "token ids -1 to 2\n" in out and "decoded" not in out
    assert "1 of 5 tokens are not in 0 .. 2, the first is token 1" in err
    assert check_data.main([*flags, "--document", "1"]) == 2
    assert "decoded: 'ac'" in capsys.readouterr().out


def test_every_problem_of_several_pairs(prefix, tmp_path, capsys):
    with open(prefix + ".bin", "ab") as file:
        file.write(b"\0")
    with IndexedBuilder(tmp_path / "f", np.float32) as builder:
        builder.add(np.array([0.5]))
    argv = ["--data-path", str(tmp_path / "none"), prefix, str(tmp_path / "f")]
    assert check_data.main(argv) == 2
    captured = capsys.readouterr()
    for words in ("none.idx does not exist", "not the file this index", "float32 values"):
        assert words in captured.err
    assert "3 problems" in captured.out


def test_a_document_that_is_not_there(prefix, capsys):
    assert check_data.main(["--data-path", prefix, "--document", "3"]) == 2
    assert "--document 3 is not in 0 .. 2" in capsys.readouterr().err


def test_cached_orders_are_verified(prefix, tmp_path, capsys):
    folder = tmp_path / "cache"
    GPTDataset(prefix, None, 2, 1, cache_folder=folder)[0]
    argv = ["--data-path", prefix, "--data-cache-path", str(folder)]
    assert check_data.main(argv) == 0
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes().replace(b"\1", b"\2", 1))
    assert check_data.main(argv) == 2
    assert "not what was written" in capsys.readouterr().err


def test_a_cache_that_is_not_there(prefix, tmp_path, capsys):
    argv = ["--data-path", prefix, "--data-cache-path", str(tmp_path / "none")]
    assert check_data.main(argv) == 2
    assert f"--data-cache-path {tmp_path / 'none'} is no folder" in capsys.readouterr().err
