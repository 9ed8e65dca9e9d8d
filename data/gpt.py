"""Samples for a causal language model, packed from the documents of one .bin/.idx pair.

Chain: split_documents says which documents a split has, SampleIndex which tokens a sample has,
GPTDataset reads them, gpt_sample makes inputs, labels and masks of them. Imports numpy and its
neighbours in data/ only; takes plain values.
"""

from __future__ import annotations

import os
from fractions import Fraction

import numpy as np

from data.indexed import DataError, IndexedDataset
from data.sample_index import SampleIndex


def split_documents(split: str, documents: int) -> tuple[range, range, range]:
    """The documents for training, validation and testing, cut in file order as Megatron does.

    `--split` is one to three shares of any sum ("969,30,1", "0.9,0.1"); an absent share is 0 and
    gives an empty range.

    >>> split_documents("8,1,1", 20)
    (range(0, 16), range(16, 18), range(18, 20))
    """
    try:
        shares = [Fraction(share) for share in split.split(",")]
    except (ValueError, ZeroDivisionError):
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or sum(shares) == 0:
        raise DataError(
            f"--split {split} is not one to three shares such as 969,30,1, none negative and not "
            "all 0"
        )
    shares += [Fraction(0)] * (3 - len(shares))
    bounds = [round(sum(shares[:i]) * documents / sum(shares)) for i in range(4)]
    return range(bounds[0], bounds[1]), range(bounds[1], bounds[2]), range(bounds[2], bounds[3])


def gpt_sample(
    window: np.ndarray,
    seq_length: int,
    *,
    eod: int | None = None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> dict[str, np.ndarray]:
    """Inputs and targets from up to seq_length + 1 tokens; a shorter window is padded behind.

    tokens        int64 [s]    what the model reads
    labels        int64 [s]    the token that follows each
    loss_mask     float32 [s]  0 on padding, which is known by position, never by value: a real end
                               of document keeps its loss, unless eod_mask_loss takes it from
                               positions that read one (Megatron's rule)
    position_ids  int64 [s]    counts from 0; again after each end of document with
                               reset_position_ids
    document_ids  int64 [s]    only with reset_attention_mask: a position may attend to those of its
                               own number; an end of document counts to the document it ends
    """
    window = np.asarray(window).astype(np.int64)
    real = len(window) - 1
    padding = (0, seq_length - real)
    tokens, labels = (
        np.pad(part, padding) if real < seq_length else part for part in (window[:-1], window[1:])
    )
    loss_mask = np.zeros(seq_length, np.float32)
    loss_mask[:real] = 1
    position_ids = np.arange(seq_length, dtype=np.int64)
    sample = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
    }
    if not (reset_position_ids or reset_attention_mask or eod_mask_loss):
        return sample
    ends = (tokens == eod) & (position_ids < real)
    if eod_mask_loss:
        loss_mask[ends] = 0
    begins = np.concatenate(([False], ends[:-1]))
    if reset_position_ids:
        sample["position_ids"] = position_ids - np.maximum.accumulate(
            np.where(begins, position_ids, 0)
        )
    if reset_attention_mask:
        sample["document_ids"] = np.cumsum(begins, dtype=np.int64)
    return sample


class GPTDataset:
    """Endless samples: dataset[n] is a function of (data, seed, n) alone, for any n >= 0.

    prefix      .bin/.idx pair
    documents   which documents, as split_documents gives them; None for all
    seq_length  s, tokens per sample
    seed        of the two shuffles, see data/sample_index.py
    eod and the three flags: see gpt_sample; a flag without `eod` is refused

    Raises DataError for unusable files and when the documents hold no whole sample.
    """

    def __init__(
        self,
        prefix: str | os.PathLike,
        documents: range | None,
        seq_length: int,
        seed: int,
        *,
        eod: int | None = None,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
        mmap_bin_files: bool = True,
    ):
        if eod is None and (reset_position_ids or reset_attention_mask or eod_mask_loss):
            raise DataError(
                "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need the id of "
                "the end of document; name the tokenizer with --tokenizer-type"
            )
        self.file = IndexedDataset(prefix, mmap_bin_files=mmap_bin_files)
        self.documents = range(self.file.num_documents) if documents is None else documents
        offsets = self.file.document_offsets()[self.documents.start : self.documents.stop + 1]
        try:
            self.index = SampleIndex(offsets, seq_length, seed)
        except DataError as error:
            raise DataError(f"{os.fspath(prefix)}: {error}") from None
        self.seq_length = seq_length
        self._options = {
            "eod": eod,
            "reset_position_ids": reset_position_ids,
            "reset_attention_mask": reset_attention_mask,
            "eod_mask_loss": eod_mask_loss,
        }

    @property
    def tokens_per_epoch(self) -> int:
        return self.index.tokens_per_epoch

    def window(self, n: int) -> np.ndarray:
        """The seq_length + 1 tokens of sample n, in the file's dtype."""
        starts, stops = self.index.pieces(n)
        parts = [self.file.read(*piece) for piece in zip(starts.tolist(), stops.tolist())]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        """Sample n; the keys are those of gpt_sample."""
        return gpt_sample(self.window(n), self.seq_length, **self._options)
