"""Tokenizers by their Megatron names."""

import json
import sys

import pytest

from data.indexed import DataError
from data.tokenizer import build_tokenizer

TEXT = "naïve café — 日本語 🙂\n\tdef f(x):  return x\x00"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat with the hat"] * 5, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    return folder


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "GPT2BPETokenizer"])
def test_text_comes_back(model, kind):
    tokenizer = build_tokenizer(
        kind,
        tokenizer_model=str(model / "tokenizer.json"),
        vocab_file=str(model / "vocab.json"),
        merge_file=str(model / "merges.txt"),
    )
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode_batch([TEXT, "", "the cat"]) == [ids, [], tokenizer.encode("the cat")]
    assert max(ids) < tokenizer.vocab_size
    vocabulary = json.loads((model / "vocab.json").read_text())
    assert tokenizer.eod == vocabulary["<|endoftext|>"]
    assert tokenizer.vocab_size == max(vocabulary.values()) + 1


def test_a_folder_names_its_end_token(model, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    plain = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert plain.decode([plain.eod]) == "<|endoftext|>"
    for token in ("the", {"content": "the"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        named = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
        assert named.decode([named.eod]) == "the"


def test_end_of_text_in_a_gpt2_document_is_plain_text(model):
    tokenizer = build_tokenizer(
        "GPT2BPETokenizer",
        vocab_file=str(model / "vocab.json"),
        merge_file=str(model / "merges.txt"),
    )
    assert tokenizer.eod not in tokenizer.encode("a<|endoftext|>b")


def test_null_tokenizer():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.encode_batch(["1 2  99", ""]) == [[1, 2, 99], []]
    assert tokenizer.decode([3, 4]) == "3 4"
    for text, message in (("1 x", "numbers between spaces"), ("101", "not in 0"), ("-1", "id -1")):
        with pytest.raises(DataError, match=message):
            tokenizer.encode(text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tokenizer_type": "Nonsense"}, "Nonsense is not known; use HuggingFaceTokenizer"),
        ({"tokenizer_type": "GPT2BPETokenizer"}, "needs --vocab-file and --merge-file"),
        ({"tokenizer_type": "NullTokenizer"}, "needs --vocab-size"),
        (
            {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "/nowhere"},
            "/nowhere does not exist",
        ),
        (
            {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "/no", "merge_file": "/no"},
            "--vocab-file /no does not exist",
        ),
    ],
)
def test_refusals(flags, message):
    with pytest.raises(DataError, match=message):
        build_tokenizer(**flags)


def test_foreign_files_are_refused(tmp_path):
    pytest.importorskip("tokenizers")
    for content in ("", "{}", "not json"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
            build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))


def test_a_tokenizer_without_end_token_says_so(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    with pytest.raises(DataError, match="none of the end tokens"):
        _ = tokenizer.eod


def test_missing_package_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="pip install tokenizers"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(model))
