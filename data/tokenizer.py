"""Text to token ids and back, under Megatron's `--tokenizer-type` names.

Every tokenizer has

    vocab_size     largest id + 1
    eod            id of the end of a document
    encode         str -> [id]; adds no token of its own (Llama2Tokenizer: the beginning token, as
                   in Megatron)
    encode_batch   [str] -> [[id]], in Rust or C++ where the library can
    decode         ids -> str
    word_starts    bool [vocab_size]: whether a token begins a word
    cls, sep, mask, pad   ids that BERT needs, where the vocabulary has them

`build_tokenizer` picks one by name. Optional packages are imported when a tokenizer that needs one
is built, not before. Imports the standard library, numpy, data/bpe.py (then) and
data/index_format.py.
"""

from __future__ import annotations

import base64
import functools
import importlib
import json
import re
from pathlib import Path

import numpy as np

from data.index_format import DataError
from data.vocabulary import Vocabulary, must_exist, package, plain

# How Mistral's tokenizers cut words: the second version keeps apart a word's capitals.
TIKTOKEN_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


NO_NUMBERS = re.compile(r"[^0-9 \t\r\n]+")


def build_tokenizer(
    tokenizer_type: str,
    *,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    tiktoken_pattern: str | None = None,
    tiktoken_num_special_tokens: int | None = None,
    tiktoken_special_tokens: list[str] | None = None,
):
    """The tokenizer that the flags of the same names ask for. Raises DataError naming the flag at
    fault."""
    given = dict(locals())
    del given["tokenizer_type"]
    if tokenizer_type not in TOKENIZERS:
        raise DataError(
            f"--tokenizer-type {tokenizer_type} is not known; use {', '.join(TOKENIZERS)}"
        )
    kind, needed, optional = TOKENIZERS[tokenizer_type]
    missing = [f"--{name.replace('_', '-')}" for name in needed if given[name] is None]
    if missing:
        raise DataError(f"--tokenizer-type {tokenizer_type} needs {' and '.join(missing)}")
    options = {name: given[name] for name in optional if given[name] is not None}
    return kind(*(given[name] for name in needed), **options)


class HuggingFaceTokenizer(Vocabulary):
    """A tokenizer.json, or a folder that holds one (and perhaps a tokenizer_config.json, which
    names the end token)."""

    def __init__(self, path: str):
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise DataError(
                f"--tokenizer-model {path}: {file} does not exist; give a tokenizer.json or its "
                "folder"
            )
        library = package("tokenizers", "HuggingFaceTokenizer")
        try:
            self._inner = library.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust side raises plain Exception
            raise DataError(f"--tokenizer-model {file} is not a tokenizer.json: {error}") from None
        self._inner.no_truncation()
        self._inner.no_padding()
        self._source = file
        self._ids = self._inner.get_vocab(with_added_tokens=True)

    @functools.cached_property
    def eod(self) -> int:
        config = self._source.parent / "tokenizer_config.json"
        if config.is_file():
            token = json.loads(config.read_text("utf-8")).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token in self._ids:
                return self._ids[token]
        return self.special("eod")

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [e.ids for e in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids) -> str:
        return self._inner.decode(plain(ids), skip_special_tokens=False)


class GPT2BPETokenizer(Vocabulary):
    """GPT-2's byte-level BPE from vocab.json and merges.txt. The text "<|endoftext|>" in a document
    is plain text."""

    def __init__(self, vocab_file: str, merge_file: str):
        for flag, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
            must_exist(flag, path)
        self._source = Path(vocab_file)
        try:
            self._ids = json.loads(Path(vocab_file).read_text("utf-8"))
            self._inner = _byte_level(self._ids, vocab_file, merge_file)
        except Exception as error:  # json's errors, and the Rust side's plain Exception
            raise DataError(
                f"--vocab-file {vocab_file} with --merge-file {merge_file}: {error}"
            ) from None

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if hasattr(self._inner, "encode_batch_fast"):
            return [e.ids for e in self._inner.encode_batch_fast(texts)]
        return [self._inner.encode(text) for text in texts]

    def decode(self, ids) -> str:
        return self._inner.decode(plain(ids))


class BertWordPieceTokenizer(Vocabulary):
    """BERT's WordPiece from vocab.txt, one token a line."""

    def __init__(self, vocab_file: str, *, lower_case: bool):
        must_exist("--vocab-file", vocab_file)
        library = package("tokenizers", "BertWordPieceLowerCase")
        self._source = Path(vocab_file)
        lines = self._source.read_text("utf-8").splitlines()
        self._ids = {token.rstrip(): number for number, token in enumerate(lines)}
        if "[UNK]" not in self._ids:
            raise DataError(
                f"--vocab-file {vocab_file} has no [UNK]; give BERT's vocab.txt, one token a line"
            )
        self._inner = library.Tokenizer(
            library.models.WordPiece(self._ids, unk_token="[UNK]", max_input_chars_per_word=200)
        )
        self._inner.normalizer = library.normalizers.BertNormalizer(lowercase=lower_case)
        self._inner.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        self._inner.decoder = library.decoders.WordPiece()

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [e.ids for e in self._inner.encode_batch_fast(texts)]

    def decode(self, ids) -> str:
        return self._inner.decode(plain(ids), skip_special_tokens=False)


class SentencePieceTokenizer(Vocabulary):
    """A SentencePiece model file; `begin` puts its beginning token before each text, as
    Llama2Tokenizer does."""

    def __init__(self, path: str, *, begin: bool):
        must_exist("--tokenizer-model", path)
        library = package("sentencepiece", "GPTSentencePieceTokenizer and Llama2Tokenizer")
        try:
            self._inner = library.SentencePieceProcessor(model_file=path)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"--tokenizer-model {path} is not a SentencePiece model: {error}"
            ) from None
        if begin and self._inner.bos_id() < 0:
            raise DataError(
                f"--tokenizer-model {path} has no beginning token for Llama2Tokenizer to put "
                "before each text; use --tokenizer-type GPTSentencePieceTokenizer"
            )
        self._begin = begin
        self._source = Path(path)
        self._ids = {self._inner.id_to_piece(i): i for i in range(self._inner.get_piece_size())}

    @property
    def eod(self) -> int:
        end = self._inner.eos_id()
        return end if end >= 0 else self.special("eod")

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, out_type=int, add_bos=self._begin)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self._inner.encode(texts, out_type=int, add_bos=self._begin, num_threads=1)

    def decode(self, ids) -> str:
        return self._inner.decode(plain(ids))


class TikTokenizer(Vocabulary):
    """A tiktoken vocabulary in Megatron's JSON form: [{"rank", "token_bytes" (base64),
    "token_str"}, ...].

    Ids are num_special_tokens special ones (the given names, then fillers), then the ranks.
    """

    def __init__(
        self,
        path: str,
        *,
        tiktoken_pattern: str = "v2",
        tiktoken_num_special_tokens: int = 1000,
        tiktoken_special_tokens: list[str] | tuple[str, ...] = ("<unk>", "<s>", "</s>"),
        vocab_size: int = 1 << 17,
    ):
        must_exist("--tokenizer-model", path)
        if tiktoken_pattern not in TIKTOKEN_PATTERNS:
            raise DataError(
                f"--tiktoken-pattern {tiktoken_pattern} is not known; use "
                f"{' or '.join(TIKTOKEN_PATTERNS)}"
            )
        count, names = tiktoken_num_special_tokens, list(tiktoken_special_tokens)
        if not len(names) <= count < vocab_size:
            raise DataError(
                f"--tiktoken-num-special-tokens {count} must be at least the {len(names)} names of "
                f"--tiktoken-special-tokens and below --vocab-size {vocab_size}"
            )
        library = package("tiktoken", "TikTokenizer")
        try:
            table = json.loads(Path(path).read_text("utf-8"))[: vocab_size - count]
            ranks = {base64.b64decode(row["token_bytes"]): count + row["rank"] for row in table}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"--tokenizer-model {path} is not a tiktoken vocabulary: {error!r}"
            ) from None
        lost = 256 - len({bytes([i]) for i in range(256)} & ranks.keys())
        wrong = len(ranks) - len({rank for rank in ranks.values() if rank >= count})
        if lost or wrong:
            raise DataError(
                f"--tokenizer-model {path} with --vocab-size {vocab_size} cannot write every text: "
                f"{lost} of the 256 bytes have no token, {wrong} ranks are there twice or below 0"
            )
        names += [f"<SPECIAL_{i}>" for i in range(len(names), count)]
        special = {name: i for i, name in enumerate(names)}
        self._inner = library.Encoding(
            Path(path).stem,
            pat_str=TIKTOKEN_PATTERNS[tiktoken_pattern],
            mergeable_ranks=ranks,
            special_tokens=special,
        )
        self._source = Path(path)
        self._ids = {token.decode("utf-8", "replace"): i for token, i in ranks.items()} | special
        self.vocab_size = max(ranks.values()) + 1

    vocab_size: int = 0

    def encode(self, text: str) -> list[int]:
        try:
            return self._inner.encode_ordinary(text)
        except BaseException as error:  # what a panic in Rust becomes is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(f"tiktoken cannot cut the text into tokens: {error}") from None

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids) -> str:
        return self._inner.decode(plain(ids))


class NullTokenizer:
    """Documents that already are token ids, as numbers between spaces: 0 .. vocab_size - 1, and
    then one end token."""

    def __init__(self, vocab_size: int):
        if vocab_size < 1:
            raise DataError(f"--vocab-size {vocab_size} is less than 1")
        self.eod = int(vocab_size)
        self.vocab_size = self.eod + 1

    def encode(self, text: str) -> list[int]:
        wrong = NO_NUMBERS.search(text)
        if wrong:
            raise DataError(f"NullTokenizer reads numbers between spaces, not {wrong[0][:20]!r}")
        if not text or text.isspace():
            return []
        ids = np.fromstring(text, np.int64, sep=" ")
        if int(ids.max()) >= self.vocab_size:
            raise DataError(
                f"token id {int(ids.max())} is not in 0 .. {self.vocab_size - 1}; raise "
                "--vocab-size "
                f"{self.eod}"
            )
        return ids.tolist()

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids) -> str:
        return " ".join(map(str, plain(ids)))

    def word_starts(self) -> np.ndarray:
        return np.ones(self.vocab_size, bool)

    def special(self, role: str) -> int:
        raise DataError(f"NullTokenizer has no {role} token; use a tokenizer with a vocabulary")

    cls = property(lambda self: self.special("cls"))
    sep = property(lambda self: self.special("sep"))
    mask = property(lambda self: self.special("mask"))
    pad = property(lambda self: self.special("pad"))


# name -> class, flags it needs in order, flags it can take
TOKENIZERS = {
    "HuggingFaceTokenizer": (HuggingFaceTokenizer, ("tokenizer_model",), ()),
    "GPT2BPETokenizer": (GPT2BPETokenizer, ("vocab_file", "merge_file"), ()),
    "BertWordPieceLowerCase": (
        functools.partial(BertWordPieceTokenizer, lower_case=True),
        ("vocab_file",),
        (),
    ),
    "BertWordPieceCase": (
        functools.partial(BertWordPieceTokenizer, lower_case=False),
        ("vocab_file",),
        (),
    ),
    "GPTSentencePieceTokenizer": (
        functools.partial(SentencePieceTokenizer, begin=False),
        ("tokenizer_model",),
        (),
    ),
    "Llama2Tokenizer": (
        functools.partial(SentencePieceTokenizer, begin=True),
        ("tokenizer_model",),
        (),
    ),
    "TikTokenizer": (
        TikTokenizer,
        ("tokenizer_model",),
        (
            "tiktoken_pattern",
            "tiktoken_num_special_tokens",
            "tiktoken_special_tokens",
            "vocab_size",
        ),
    ),
    "NullTokenizer": (NullTokenizer, ("vocab_size",), ()),
}


def _byte_level(vocabulary: dict[str, int], vocab_file: str, merge_file: str):
    """A byte-level BPE: the Rust library's, or where it is not installed the one of data/bpe.py."""
    try:
        library = importlib.import_module("tokenizers")
    except ImportError:
        from data.bpe import BytePairs

        return BytePairs(vocabulary, Path(merge_file).read_text("utf-8").splitlines())
    inner = library.Tokenizer(library.models.BPE.from_file(vocab_file, merge_file))
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    return inner
