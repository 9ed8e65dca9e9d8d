"""From DataConfig to tokenizer and data sets: what the recipes call, and the checks before it.

Imports its neighbours in data/ only; takes the section of the command line and plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from data.config import DataConfig
from data.gpt import GPTDataset, split_documents
from data.index_format import DataError
from data.indexed import IndexedDataset
from data.mock import MockGPTDataset
from data.tokenizer import build_tokenizer

SPLITS = ("train", "valid", "test")


def tokenizer_of(config: DataConfig, vocab_size: int | None = None):
    """The tokenizer the flags name, or None. Raises DataError."""
    if config.tokenizer_type is None:
        return None
    return build_tokenizer(
        config.tokenizer_type,
        tokenizer_model=config.tokenizer_model,
        vocab_file=config.vocab_file,
        merge_file=config.merge_file,
        vocab_size=vocab_size,
    )


def vocabulary_of(config: DataConfig, vocab_size: int | None = None) -> int | None:
    """Tokens of the model: --vocab-size, by default the tokenizer's; None where neither is known.

    NullTokenizer, as in Megatron, has an end of document after the --vocab-size tokens.
    """
    if vocab_size is not None and not is_null(config):
        return vocab_size
    try:
        tokenizer = tokenizer_of(config, vocab_size)
    except DataError:
        return None
    return None if tokenizer is None else tokenizer.vocab_size


def tokenizer_problems(config: DataConfig, vocab_size: int | None) -> Iterator[str]:
    """A tokenizer that cannot be read, or that has more tokens than the embedding has rows."""
    if config.tokenizer_type is None or (vocab_size is None and is_null(config)):
        return  # nothing to read, or a missing size that is reported elsewhere
    try:
        tokenizer = tokenizer_of(config, vocab_size)
    except DataError as error:
        yield str(error)
        return
    smaller = vocab_size is not None and tokenizer.vocab_size > vocab_size
    if smaller and not is_null(config):
        yield (
            f"--vocab-size {vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} "
            f"tokens; use {tokenizer.vocab_size} or more, or leave it out"
        )


def is_null(config: DataConfig) -> bool:
    return config.tokenizer_type == "NullTokenizer"


def gpt_sets(config: DataConfig, seq_length: int, vocab_size: int, seed: int) -> dict:
    """The splits that hold at least one sample: {"train": …, "valid": …, "test": …}.

    vocab_size: of the model
    """
    if config.mock_data:
        return {
            name: MockGPTDataset(vocab_size, seq_length, seed, split=i)
            for i, name in enumerate(SPLITS)
        }
    prefix = config.data_path[0]
    tokenizer = tokenizer_of(config, vocab_size - is_null(config))
    parts = split_documents(config.split, IndexedDataset(prefix).num_documents)
    sets = {}
    for name, documents in zip(SPLITS, parts, strict=True):
        try:
            sets[name] = GPTDataset(
                prefix,
                documents,
                seq_length,
                seed,
                eod=None if tokenizer is None else tokenizer.eod,
                reset_position_ids=config.reset_position_ids,
                reset_attention_mask=config.reset_attention_mask,
                eod_mask_loss=config.eod_mask_loss,
                mmap_bin_files=config.mmap_bin_files,
            )
        except DataError:
            if name == "train":
                raise
    return sets
