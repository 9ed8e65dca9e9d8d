"""From the data flags to a tokenizer, and what is wrong with either before a run starts.

Imports its neighbours in data/ where they are needed, so that a refusal which no file has a part in
does not wait for numpy. Neighbour: data/from_flags.py (the data sets).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from data.config import TOKENIZER_FLAGS, BertDataConfig, DataConfig, GPTDataConfig

if TYPE_CHECKING:
    from data.sets import Mix

Model = TypeVar("Model")  # a model's config: a dataclass with a vocab_size


def tokenizer_of(config: DataConfig, vocab_size: int | None = None):
    """The tokenizer the flags name, or None. Raises DataError."""
    if config.tokenizer_type is None:
        return None
    from data.tokenizer import build_tokenizer

    names = itertools.chain(*TOKENIZER_FLAGS[config.tokenizer_type])
    flags = {name: getattr(config, name) for name in names}
    return build_tokenizer(config.tokenizer_type, vocab_size=vocab_size, **flags)


def vocabulary_of(config: DataConfig, vocab_size: int | None = None) -> int | None:
    """Tokens of the model: --vocab-size, by default the tokenizer's; None where neither is known.

    NullTokenizer, as in Megatron, has an end of document after the --vocab-size tokens.
    """
    if vocab_size is not None and not is_null(config):
        return vocab_size
    if config.tokenizer_type is None:
        return None
    from data.index_format import DataError

    try:
        tokenizer = tokenizer_of(config, vocab_size)
    except DataError:
        return None
    return tokenizer.vocab_size


def with_vocabulary(model: Model, config: DataConfig) -> Model:
    """The model's config with its vocabulary filled in, where it is known."""
    return dataclasses.replace(model, vocab_size=vocabulary_of(config, model.vocab_size))


def is_null(config: DataConfig) -> bool:
    return config.tokenizer_type == "NullTokenizer"


def tokenizer_problems(config: DataConfig, vocab_size: int | None) -> Iterator[str]:
    """A tokenizer that cannot be read, or that has more tokens than the embedding has rows."""
    if config.tokenizer_type is None or (vocab_size is None and is_null(config)):
        return  # nothing to read, or a missing size that is reported elsewhere
    from data.bert import PairSampler
    from data.index_format import DataError

    try:
        tokenizer = tokenizer_of(config, vocab_size)
        if isinstance(config, BertDataConfig) and not is_null(config):
            PairSampler.of(tokenizer, 8)
        elif isinstance(config, GPTDataConfig):
            eod_of(tokenizer, config)
    except DataError as error:
        yield str(error)
        return
    smaller = vocab_size is not None and tokenizer.vocab_size > vocab_size
    if smaller and not is_null(config):
        yield (
            f"--vocab-size {vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} "
            f"tokens; use {tokenizer.vocab_size} or more, or leave it out"
        )


def eod_of(tokenizer, config: GPTDataConfig) -> int | None:
    """Id of the end of document, where a flag needs it. Raises DataError if there is none."""
    needed = config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss
    return tokenizer.eod if needed and tokenizer is not None else None


def data_problems(
    config: DataConfig,
    seq_length: int,
    vocab_size: int | None,
    *,
    evaluates: bool,
    pairs: bool = False,
) -> Iterator[str]:
    """What keeps the files from serving a run.

    vocab_size  of the model, None where it is not known
    evaluates   the run reads validation samples at intervals
    pairs       BERT with its binary head: documents need two sentences
    """
    if not config.has_files or config.mock_data or not config.split_is_usable:
        return  # nothing to look at, or a problem that is reported elsewhere
    from data.checks import mix_problems
    from data.index_format import DataError

    is_bert = isinstance(config, BertDataConfig)
    needed = ("train", "valid") if evaluates else ("train",)
    try:
        found = mixes_of(config)
    except DataError as error:
        yield str(error)
        return
    # BERT's samples are padded: any token will do
    yield from mix_problems(found, None if is_bert else seq_length, vocab_size, needed)
    if pairs:
        for name in needed:
            yield from _pair_problems(found.get(name))


def mixes_of(config: DataConfig) -> dict[str, Mix]:
    """What each split is made of. Raises DataError."""
    from data.sets import mixes

    return mixes(
        data_path=config.data_path,
        split=config.split,
        train_data_path=config.train_data_path,
        valid_data_path=config.valid_data_path,
        test_data_path=config.test_data_path,
        per_split_data_args_path=config.per_split_data_args_path,
        data_args_path=config.data_args_path,
    )


def used(mix: Mix) -> list[str]:
    """The prefixes that have a share."""
    weights = mix.weights or [1] * len(mix.prefixes)
    return [prefix for prefix, weight in zip(mix.prefixes, weights) if weight]


def single_sentences(mix: Mix, prefix: str) -> tuple[int, int]:
    """(documents, those of them with one sentence or none). Raises DataError."""
    from data.indexed import IndexedDataset

    bounds = IndexedDataset(prefix).document_indices
    documents = mix.documents(len(bounds) - 1)
    bounds = bounds[documents.start : documents.stop + 1]
    sentences = bounds[1:] - bounds[:-1]
    return len(documents), int((sentences < 2).sum())


def _pair_problems(mix: Mix | None) -> Iterator[str]:
    from data.index_format import DataError

    for prefix in () if mix is None else used(mix):
        try:
            documents, single = single_sentences(mix, prefix)
        except DataError:
            continue  # said already
        if documents == single > 0:
            yield (
                f"{prefix}: each of {documents} documents has one sentence, and the binary head "
                "needs two; use preprocess_data.py --split-sentences, longer documents, or "
                "--bert-no-binary-head"
            )
