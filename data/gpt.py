"""Samples for a causal language model, packed from the documents of one .bin/.idx pair.

Chain: split_documents says which documents a split has, SampleIndex which tokens a sample has,
GPTDataset reads them, gpt_sample makes inputs, labels and masks of them. GPTPass reads everything
once, for validation. Imports numpy and its neighbours in data/ only; takes plain values.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from fractions import Fraction

import numpy as np

from data.index_cache import OrderCache, fingerprint
from data.indexed import DataError, IndexedDataset
from data.sample_index import Epoch, Poll, SampleIndex, draw_epoch


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
    real = max(len(window) - 1, 0)
    padding = (0, seq_length - real)
    tokens, labels = (
        np.pad(part, padding) if real < seq_length else part for part in (window[:real], window[1:])
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
    document_attention_mask  document_ids by where documents really begin, whatever their tokens are
    mmap_bin_files           see IndexedDataset
    cache_folder, cache_write  keep the shuffled orders in files, see data/index_cache.py

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
        document_attention_mask: bool = False,
        mmap_bin_files: bool = True,
        cache_folder: str | os.PathLike | None = None,
        cache_write: bool = True,
    ):
        if eod is None and (reset_position_ids or reset_attention_mask or eod_mask_loss):
            raise DataError(
                "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need the id of "
                "the end of document; name the tokenizer with --tokenizer-type"
            )
        self.file = IndexedDataset(prefix, mmap_bin_files=mmap_bin_files)
        self.documents = range(self.file.num_documents) if documents is None else documents
        self.seq_length = seq_length
        self.seed = seed
        self._options = {
            "eod": eod,
            "reset_position_ids": reset_position_ids,
            "reset_attention_mask": reset_attention_mask,
            "eod_mask_loss": eod_mask_loss,
        }
        self._by_document = document_attention_mask
        self._cache = None
        if cache_folder is not None:
            span = [self.documents.start, self.documents.stop]
            settings = {"documents": span, "seq_length": seq_length, "seed": seed, "format": 1}
            settings["data"] = fingerprint(prefix)
            self._cache = OrderCache(cache_folder, settings, write=cache_write)
        start, stop = map(self.file.document_offset, (self.documents.start, self.documents.stop))
        try:
            self.index = SampleIndex(stop - start, seq_length, self._epoch)
        except DataError as error:
            count = len(self.documents)
            raise DataError(f"{os.fspath(prefix)}, {count} documents: {error}") from None

    @property
    def tokens_per_epoch(self) -> int:
        return self.index.tokens_per_epoch

    @property
    def samples_per_epoch(self) -> float:
        return self.tokens_per_epoch / self.seq_length

    def prepare(self, n: int, poll: Poll) -> None:
        """Draw the order that sample n lies in now, and not when it is read."""
        self.index.epoch(self.index.epoch_of(n), poll)

    def window(self, n: int) -> np.ndarray:
        """The seq_length + 1 tokens of sample n, in the file's dtype."""
        return self._read(*self.index.pieces(n))

    def part(self, n: int, names: Collection[str]) -> dict[str, np.ndarray] | None:
        """Positions alone, which no text changes unless they are reset."""
        if set(names) != {"position_ids"} or self._options["reset_position_ids"]:
            return None
        return {"position_ids": np.arange(self.seq_length, dtype=np.int64)}

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        """Sample n; the keys are those of gpt_sample."""
        starts, stops = self.index.pieces(n)
        sample = gpt_sample(self._read(starts, stops), self.seq_length, **self._options)
        if self._by_document:
            ids = np.repeat(np.arange(len(starts)), stops - starts)
            sample["document_ids"] = ids[: self.seq_length]
        return sample

    def _read(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        parts = [self.file.read(*piece) for piece in zip(starts.tolist(), stops.tolist())]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _epoch(self, number: int, poll: Poll) -> Epoch:
        epoch = self._cache.load(number) if self._cache else None
        if epoch is None:
            offsets = self.file.document_offsets()
            offsets = offsets[self.documents.start : self.documents.stop + 1]
            epoch = draw_epoch(offsets, self.seq_length, self.seed, number, poll)
            if self._cache:
                self._cache.store(number, epoch)
        return epoch


class GPTPass:
    """The documents once, in file order, nothing left out: for `--full-validation`.

    Sample n is tokens n * seq_length .. (n + 1) * seq_length, the last one padded; every token but
    the first is a label once. Samples from len(self) on, which fill up a global batch, are padding
    alone. Arguments as for GPTDataset, of whose samples these have the keys.
    """

    def __init__(
        self,
        prefix: str | os.PathLike,
        documents: range | None,
        seq_length: int,
        *,
        document_attention_mask: bool = False,
        mmap_bin_files: bool = True,
        **options,
    ):
        self.file = IndexedDataset(prefix, mmap_bin_files=mmap_bin_files)
        documents = range(self.file.num_documents) if documents is None else documents
        offsets = self.file.document_offsets()[documents.start : documents.stop + 1]
        self._starts = offsets if document_attention_mask else None
        self._span = int(offsets[0]), int(offsets[-1])
        self.seq_length = seq_length
        self._options = options

    def __len__(self) -> int:
        labels = max(0, self._span[1] - self._span[0] - 1)
        return -(-labels // self.seq_length)

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        start = min(self._span[0] + n * self.seq_length, self._span[1])
        stop = min(start + self.seq_length + 1, self._span[1])
        sample = gpt_sample(self.file.read(start, stop), self.seq_length, **self._options)
        if self._starts is not None:
            place = np.minimum(np.arange(start, start + self.seq_length), max(start, stop - 1))
            sample["document_ids"] = np.searchsorted(self._starts, place, "right")
        return sample
