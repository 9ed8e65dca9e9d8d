"""scripts/tokenizer_flags.py: each setting reaches the tokenizer, from flags or a checkpoint."""

import base64
import json
import sys
from types import SimpleNamespace

import pytest

from core.checkpoint.reader import open_checkpoint
from core.comm import Group
from data.config import TOKENIZER_FLAGS
from data.tokenizer import TIKTOKEN_PATTERNS
from scripts import check_data, generate, preprocess_data
from scripts.tokenizer_flags import SETTINGS, tokenizer_in, tokenizer_of_checkpoint
from tests.recipe import run_recipe


class Encoding:
    """Stands in for tiktoken's, on a vocabulary of single bytes."""

    def __init__(self, name, *, pat_str, mergeable_ranks, special_tokens):
        self.pattern, self.special = pat_str, special_tokens
        self._ids = mergeable_ranks
        self._bytes = {n: token for token, n in mergeable_ranks.items()}
        self._bytes |= {n: name.encode() for name, n in special_tokens.items()}

    def encode_ordinary(self, text):
        return [self._ids[bytes([byte])] for byte in text.encode()]

    def encode_ordinary_batch(self, texts, num_threads):
        return [self.encode_ordinary(text) for text in texts]

    def decode(self, ids):
        return b"".join(self._bytes[n] for n in ids).decode("utf-8", "replace")


@pytest.fixture
def tiktoken(tmp_path, monkeypatch):
    """Flags of a TikTokenizer that differs from the defaults in everything: ids are 5 + the byte,
    and "</s>" is 1."""
    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(Encoding=Encoding))
    rows = [{"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode()} for n in range(256)]
    (tmp_path / "v.json").write_text(json.dumps(rows))
    flags = ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(tmp_path / "v.json")]
    flags += ["--tiktoken-num-special-tokens", "5", "--tiktoken-pattern", "v1"]
    return [*flags, "--tiktoken-special-tokens", "<unk>", "</s>"]


def test_the_list_has_all_that_any_tokenizer_reads():
    read = {name for needed, optional in TOKENIZER_FLAGS.values() for name in needed + optional}
    assert set(SETTINGS) == read | {"vocab_size"}


def test_a_checkpoint_keeps_all_of_a_tiktokenizer(tiktoken, tmp_path, capsys):
    flags = (*tiktoken, "--vocab-size", 261, "--train-iters", 1, "--save", tmp_path / "run")
    assert run_recipe(Group.single("world"), *flags)[0] == 0
    tokenizer = tokenizer_of_checkpoint(open_checkpoint(tmp_path / "run"))
    assert tokenizer.encode("a") == [5 + ord("a")] and tokenizer.eod == 1
    assert tokenizer._inner.pattern == TIKTOKEN_PATTERNS["v1"]
    assert list(tokenizer._inner.special)[:3] == ["<unk>", "</s>", "<SPECIAL_2>"]
    how = ["--load", str(tmp_path / "run"), "--max-new-tokens", "0", "--prompt", "né"]
    capsys.readouterr()
    assert generate.main(how) == 0
    assert capsys.readouterr().out == "né\n"
    assert generate.main([*how, *tiktoken[:4]]) == 2  # 1000 special tokens by default
    assert "--tiktoken-num-special-tokens 1000 must be" in capsys.readouterr().err


def test_data_is_checked_with_what_made_it(tiktoken, tmp_path, capsys):
    (tmp_path / "c.jsonl").write_text('{"text": "né"}\n')
    out = str(tmp_path / "c")
    argv = ["--input", str(tmp_path / "c.jsonl"), "--output-prefix", out, "--append-eod"]
    assert preprocess_data.main([*argv, *tiktoken, "--workers", "1"]) == 0
    assert check_data.main(["--data-path", f"{out}_text_document", *tiktoken]) == 0
    said = capsys.readouterr().out
    assert "document 0 begins: 115 200 174 1\n" in said and "decoded: 'né</s>'" in said


def test_a_folder_without_tokenizer(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")  # merges.txt is missing
    assert tokenizer_in(tmp_path) is None and tokenizer_in(tmp_path / "none") is None
