"""Tokenizers by their Megatron names."""

import base64
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
    refused = {
        "1 x": "numbers between spaces",
        "101": "not in 0",
        "-1": "not '-'",
        "9" * 30: "not in 0",
    }
    for text, message in refused.items():
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
    with pytest.raises(DataError, match="has no eod token"):
        _ = tokenizer.eod


def test_missing_package_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="pip install tokenizers"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(model))


@pytest.mark.parametrize("kind", ["tokenizers", "python"])
def test_gpt2_in_rust_and_in_python(model, monkeypatch, kind):
    """Without the package tokenizers GPT-2's BPE runs in Python, with the same ids."""
    flags = {"vocab_file": str(model / "vocab.json"), "merge_file": str(model / "merges.txt")}
    rust = build_tokenizer("GPT2BPETokenizer", **flags)
    if kind == "python":
        monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokenizer = build_tokenizer("GPT2BPETokenizer", **flags)
    assert hasattr(tokenizer._inner, "encode_batch_fast") == (kind == "tokenizers")
    for text in (TEXT, "the  cats' hat, it's 12 o'clock   \n", "", " ", "thethethe mat\u0301"):
        assert tokenizer.encode(text) == rust.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


WORDPIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "un",
    "##aff",
    "##able",
    "cafe",
    ",",
    "Un",
]


@pytest.fixture
def vocab_txt(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(WORDPIECES) + "\n")
    return str(path)


def test_wordpiece(vocab_txt):
    pytest.importorskip("tokenizers")
    lower = build_tokenizer("BertWordPieceLowerCase", vocab_file=vocab_txt)
    cased = build_tokenizer("BertWordPieceCase", vocab_file=vocab_txt)
    assert lower.encode("Unaffable, CAFÉ xyz") == [5, 6, 7, 9, 8, 1]
    assert cased.encode("Unaffable") == [10, 6, 7]
    assert lower.encode_batch(["un", ""]) == [[5], []]
    assert (lower.cls, lower.sep, lower.mask, lower.pad, lower.vocab_size) == (2, 3, 4, 0, 11)
    assert lower.word_starts().tolist() == [token[:2] != "##" for token in WORDPIECES]
    assert lower.decode([5, 6, 7]) == "unaffable"


def test_wordpiece_equals_transformers(vocab_txt):
    pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    lower = build_tokenizer("BertWordPieceLowerCase", vocab_file=vocab_txt)
    theirs = transformers.BertTokenizer(vocab=vocab_txt, do_lower_case=True)
    for text in ("Unaffable, CAFÉ xyz", "un,un  \t un日本", "\u200bun\x00 aff"):
        assert lower.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_where_words_begin(model):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(model))
    starts = tokenizer.word_starts()
    ids = tokenizer.encode("the cat sat-on hath")
    words = [tokenizer.decode([i]) for i in ids]
    begun = [word for word, i in zip(words, ids) if starts[i]]
    assert "".join(words) == "the cat sat-on hath" and len(begun) == 4
    assert [word[:2] for word in begun] == [" c", " s", "-", " h"]


def test_a_foreign_vocab_txt(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"has no \[UNK\]"):
        build_tokenizer("BertWordPieceCase", vocab_file=str(tmp_path / "vocab.txt"))


@pytest.mark.parametrize(
    ("kind", "package"),
    [("GPTSentencePieceTokenizer", "sentencepiece"), ("TikTokenizer", "tiktoken")],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, kind, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "model").write_text("[]")
    with pytest.raises(DataError, match=f"pip install {package}"):
        build_tokenizer(kind, tokenizer_model=str(tmp_path / "model"))


def sentencepiece_model(folder, **options):
    sentencepiece = pytest.importorskip("sentencepiece")
    (folder / "text").write_text("the cat sat on the mat\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        vocab_size=20,
        model_type="bpe",
        **options,
    )
    return str(folder / "m.model")


def test_sentencepiece(tmp_path):
    model = sentencepiece_model(tmp_path)
    plain, llama = (
        build_tokenizer(kind, tokenizer_model=model)
        for kind in ("GPTSentencePieceTokenizer", "Llama2Tokenizer")
    )
    ids = plain.encode("the cat")
    assert plain.encode_batch(["the cat", ""]) == [ids, []]
    assert llama.encode("the cat") == [1, *ids] and llama.encode_batch(["the cat"]) == [[1, *ids]]
    assert (plain.eod, plain.vocab_size) == (2, 20)
    assert plain.decode(ids) == "the cat"
    assert plain.word_starts()[ids[0]]
    (tmp_path / "no.model").write_text("no")
    with pytest.raises(DataError, match="not a SentencePiece model"):
        build_tokenizer("Llama2Tokenizer", tokenizer_model=str(tmp_path / "no.model"))


def test_llama_needs_a_beginning_token(tmp_path):
    model = sentencepiece_model(tmp_path, bos_id=-1)
    with pytest.raises(DataError, match=r"no beginning token .* GPTSentencePieceTokenizer"):
        build_tokenizer("Llama2Tokenizer", tokenizer_model=model)
    plain = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=model)
    assert plain.decode(plain.encode("the cat")) == "the cat"


def tiktoken_rows(pieces=(b"th", b"the", b" the")):
    return [
        {"rank": i, "token_bytes": base64.b64encode(p).decode(), "token_str": repr(p)}
        for i, p in enumerate([*(bytes([i]) for i in range(256)), *pieces])
    ]


def test_tiktoken(tmp_path):
    pytest.importorskip("tiktoken")
    (tmp_path / "v.json").write_text(json.dumps(tiktoken_rows()))
    flags = {"tokenizer_model": str(tmp_path / "v.json"), "tiktoken_num_special_tokens": 10}
    tokenizer = build_tokenizer("TikTokenizer", **flags)
    assert tokenizer.encode("the the") == [10 + 257, 10 + 258]
    assert tokenizer.encode_batch([TEXT]) == [tokenizer.encode(TEXT)]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (tokenizer.eod, tokenizer.vocab_size) == (2, 10 + 259)
    assert 2 not in tokenizer.encode("</s>")
    with pytest.raises(DataError, match=r"--tiktoken-pattern v3"):
        build_tokenizer("TikTokenizer", **flags, tiktoken_pattern="v3")
    (tmp_path / "v.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match=r"not a tiktoken vocabulary"):
        build_tokenizer("TikTokenizer", **flags)


def test_a_tiktoken_vocabulary_that_cannot_write_every_text(tmp_path):
    """Each of these made the Rust side panic, which no `except Exception` sees."""
    pytest.importorskip("tiktoken")
    path, rows = tmp_path / "v.json", tiktoken_rows()
    flags = {"tokenizer_model": str(path), "tiktoken_num_special_tokens": 10}
    path.write_text(json.dumps(rows))
    with pytest.raises(DataError, match=r"--vocab-size 200 cannot .*: 66 of the 256 bytes have"):
        build_tokenizer("TikTokenizer", **flags, vocab_size=200)
    for rank in (7, -1):
        path.write_text(json.dumps([*rows[:-1], rows[-1] | {"rank": rank}]))
        with pytest.raises(DataError, match=r"0 of the 256 .* 1 ranks are there twice or below 0"):
            build_tokenizer("TikTokenizer", **flags)


def test_a_text_that_tiktoken_cannot_cut(tmp_path):
    """Its pattern needs a stack as deep as the spaces are many."""
    pytest.importorskip("tiktoken")
    (tmp_path / "v.json").write_text(json.dumps(tiktoken_rows()))
    tokenizer = build_tokenizer("TikTokenizer", tokenizer_model=str(tmp_path / "v.json"))
    with pytest.raises(DataError, match=r"tiktoken cannot cut the text into tokens: .*StackOver"):
        tokenizer.encode_batch(["fine", " " * 1_000_000])
    assert tokenizer.encode("fine")
