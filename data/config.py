"""What a model is trained on: data sets, tokenizer, samples; Megatron's flag names and defaults.

Pure: standard library only; nothing of ours is imported. `DataConfig` is what GPT and BERT share.
data/from_flags.py makes tokenizer and data sets of it; files are looked at there, not here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

# What each tokenizer is read from, and what it can be told besides; see data/tokenizer.py.
TIKTOKEN = ("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens")
TOKENIZER_FLAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "HuggingFaceTokenizer": (("tokenizer_model",), ()),
    "GPT2BPETokenizer": (("vocab_file", "merge_file"), ()),
    "BertWordPieceLowerCase": (("vocab_file",), ()),
    "BertWordPieceCase": (("vocab_file",), ()),
    "GPTSentencePieceTokenizer": (("tokenizer_model",), ()),
    "Llama2Tokenizer": (("tokenizer_model",), ()),
    "TikTokenizer": (("tokenizer_model",), TIKTOKEN),
    "NullTokenizer": ((), ()),
}
# All of them; --tokenizer-type and the model's --vocab-size come on top.
TOKENIZER_FIELDS = ("tokenizer_model", "vocab_file", "merge_file", *TIKTOKEN)
TokenizerType = Literal[
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
]
BY_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")
FILES = ("data_path", "data_args_path", "per_split_data_args_path", *BY_SPLIT)


@dataclass(kw_only=True)
class DataConfig:
    """Data and tokenizer"""

    data_path: tuple[str, ...] | None = None
    """PREFIX of a .bin/.idx pair, or several: PREFIX PREFIX or WEIGHT PREFIX WEIGHT PREFIX."""
    split: str = "969,30,1"
    """Shares of the documents for training, validation and testing."""
    train_data_path: tuple[str, ...] | None = None
    """As --data-path, for training alone: all documents, instead of a --split."""
    valid_data_path: tuple[str, ...] | None = None
    """The same for validation."""
    test_data_path: tuple[str, ...] | None = None
    """The same for testing."""
    data_args_path: str | None = None
    """File that holds the words of --data-path."""
    per_split_data_args_path: str | None = None
    """JSON file {"train": [WORDS], "valid": [WORDS], "test": [WORDS]} of words as --data-path's."""
    multiple_validation_sets: bool = False
    """Evaluate each validation set on its own, beside their weighted mean."""
    full_validation: bool = False
    """Validate and test on everything there is once, whatever --eval-iters."""
    num_dataset_builder_threads: int = 1
    """Data sets that are opened at once."""
    mock_data: bool = False
    """Synthetic, learnable text; every required flag gets a small value."""
    tokenizer_type: TokenizerType | None = None
    """How text was made into tokens."""
    tokenizer_model: str | None = None
    """tokenizer.json or its folder, a SentencePiece model, or a tiktoken vocabulary."""
    vocab_file: str | None = None
    """vocab.json of GPT2BPETokenizer, vocab.txt of BertWordPieceLowerCase and -Case."""
    merge_file: str | None = None
    """merges.txt of GPT2BPETokenizer."""
    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """How TikTokenizer cuts words; by default v2."""
    tiktoken_num_special_tokens: int | None = None
    """Special tokens of TikTokenizer; by default 1000."""
    tiktoken_special_tokens: tuple[str, ...] | None = None
    """Names of the first of them; by default <unk> <s> </s>."""
    mmap_bin_files: bool = True
    """Read the .bin file piece by piece instead of mapping it into memory."""

    @property
    def has_files(self) -> bool:
        """Whether any flag names files to train on."""
        return any(getattr(self, name) for name in FILES)

    def problems(self) -> Iterator[str]:
        """What contradicts itself, before any file is opened."""
        yield from self._source_problems()
        if not self.split_is_usable:
            yield f"--split {self.split} is not one to three shares such as 969,30,1"
        if self.num_dataset_builder_threads < 1:
            yield (
                f"--num-dataset-builder-threads {self.num_dataset_builder_threads} must be 1 or "
                "more"
            )
        yield from self._tokenizer_problems()

    def _source_problems(self) -> Iterator[str]:
        if not self.mock_data and not self.has_files:
            yield "no data: give --data-path PREFIX, or --mock-data for synthetic text"
        if self.mock_data and self.full_validation:
            yield (
                "--full-validation reads a data set to its end, and that of --mock-data has none; "
                "leave one out (--eval-iters says how many batches)"
            )
        for name in FILES:
            value = getattr(self, name)
            if self.mock_data and value:
                typed = value if isinstance(value, str) else " ".join(value)
                yield f"--mock-data and {_flag(name)} {typed} exclude each other"

    @property
    def split_is_usable(self) -> bool:
        """Whether --split is one to three shares."""
        try:
            shares = [float(part) for part in self.split.split(",")]
        except ValueError:
            return False
        return len(shares) <= 3 and all(0 <= s < math.inf for s in shares) and sum(shares) > 0

    def _tokenizer_problems(self) -> Iterator[str]:
        needed, optional = TOKENIZER_FLAGS.get(self.tokenizer_type or "", ((), ()))
        for name in needed:
            if getattr(self, name) is None:
                yield f"--tokenizer-type {self.tokenizer_type} needs {_flag(name)}"
        for name in TOKENIZER_FIELDS:
            if getattr(self, name) is not None and name not in needed + optional:
                readers = [kind for kind, of in TOKENIZER_FLAGS.items() if name in sum(of, ())]
                yield f"{_flag(name)} is read only by --tokenizer-type {' or '.join(readers)}"

    def vocabulary_problems(self, vocab_size: int | None) -> Iterator[str]:
        """What is not known of the vocabulary.  vocab_size: of --vocab-size"""
        if self.tokenizer_type == "NullTokenizer" and vocab_size is None:
            yield "--tokenizer-type NullTokenizer needs --vocab-size"
        if self.has_files and self.tokenizer_type is None and vocab_size is None:
            yield (
                "--data-path needs --tokenizer-type, or --vocab-size N for data without a tokenizer"
            )


@dataclass(kw_only=True)
class GPTDataConfig(DataConfig):
    """Data and tokenizer"""

    data_cache_path: str | None = None
    """Folder for the shuffled orders, so that a restart maps them instead of drawing them."""
    reset_position_ids: bool = False
    """Positions start again after an end of document."""
    reset_attention_mask: bool = False
    """No attention across an end of document."""
    document_attention_mask: bool = False
    """No attention across the place where a document begins, whatever its tokens."""
    eod_mask_loss: bool = False
    """No loss on ends of documents."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.reset_attention_mask and self.document_attention_mask:
            yield "--reset-attention-mask and --document-attention-mask are two masks; choose one"

    def vocabulary_problems(self, vocab_size: int | None) -> Iterator[str]:
        yield from super().vocabulary_problems(vocab_size)
        if not self.has_files or self.tokenizer_type is not None:
            return
        for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
            if getattr(self, name):
                yield f"{_flag(name)} needs --tokenizer-type, which knows the end of a document"


@dataclass(kw_only=True)
class BertDataConfig(DataConfig):
    """Data and tokenizer"""

    short_seq_prob: float = 0.1
    """Share of the samples that are cut shorter."""
    mask_whole_words: bool = True
    """Guess single tokens instead of whole words."""
    mask_max_ngram: int = 3
    """Longest run of words to be guessed; 1 as in the paper, 10 for spans."""
    mask_geometric: bool = False
    """Lengths of runs by SpanBERT's geometric distribution instead of 1/n."""
    bert_pairs: Literal["order", "next"] = "order"
    """Half of the pairs are swapped (Megatron), or half have another document's text (paper)."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not 0.0 <= self.short_seq_prob <= 1.0:
            yield f"--short-seq-prob {self.short_seq_prob:g} must be from 0 to 1"
        if self.mask_max_ngram < 1:
            yield f"--mask-max-ngram {self.mask_max_ngram} must be 1 or more"

    def vocabulary_problems(self, vocab_size: int | None) -> Iterator[str]:
        if self.has_files and self.tokenizer_type in (None, "NullTokenizer"):
            yield (
                "BERT's samples need [CLS], [SEP], [MASK] and [PAD]; name the tokenizer that has "
                "them, such as --tokenizer-type BertWordPieceLowerCase with --vocab-file"
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
