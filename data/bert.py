"""Samples for a masked language model, from documents cut into sentences (preprocess_data.py
--split-sentences).

Chain: sentence_pieces cuts documents into runs of sentences that fill a sample (token_pieces,
without the binary head, into runs of tokens), BertDataset shuffles the pieces by epoch, PairSampler
makes a sample of two texts:

    [CLS] first part [SEP] second part [SEP] padding

Sample n is a function of (data, seed, n) alone, masks included. Imports numpy and its neighbours in
data/ only.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from data.draws import permutation, uniform
from data.index_format import DataError
from data.indexed import IndexedDataset
from data.masking import Masking
from data.sample_index import Poll, no_poll

# The streams a sample or an epoch draws from.
ORDER, TEXTS, MASKS, SHORT = 0, 1, 2, 3
BLOCK_DOCUMENTS = 1 << 18
NO_PAIR = -100  # is_random of a sample that only fills up a batch; models/bert.py counts it nowhere


@dataclass(frozen=True)
class PairSampler:
    """Makes a sample of one or two texts.

    seq_length           s
    cls, sep, pad        ids
    masking              what is to be guessed
    """

    seq_length: int
    cls: int
    sep: int
    pad: int
    masking: Masking

    @classmethod
    def of(cls, tokenizer, seq_length: int, **masking) -> PairSampler:
        """With the special tokens and words of a tokenizer; raises DataError where it has none."""
        words = tokenizer.word_starts()
        how = Masking(tokenizer.mask, tokenizer.vocab_size, words, **masking)
        return cls(seq_length, tokenizer.cls, tokenizer.sep, tokenizer.pad, how)

    def room(self, parts: int) -> int:
        """Tokens of text that fit beside the special tokens."""
        return self.seq_length - 1 - parts

    def sample(
        self, texts: list[np.ndarray], seed: int, n: int, is_random: int = 0
    ) -> dict[str, np.ndarray]:
        """A sample of texts that fit `room`; masks are drawn for sample n.

        tokens        int64 [s]    what the model sees
        labels        int64 [s]    the true token where it is to be guessed, else 0
        loss_mask     float32 [s]  1 where it is to be guessed
        padding_mask  int64 [s]    1 on tokens, 0 on padding
        token_types   int64 [s]    0 up to the first [SEP], 1 up to the second, 0 behind
        is_random     int64 []     1 if the second text does not follow the first
        """
        parts = [np.array([self.cls])]
        for text in texts:
            parts += [text.astype(np.int64), np.array([self.sep])]
        true = np.concatenate(parts)
        special = np.zeros(len(true), bool)
        special[0] = True
        special[np.cumsum([len(text) + 1 for text in texts])] = True
        draws = uniform(self.masking.draws(len(true)), seed, n << 8 | MASKS)
        seen, chosen = self.masking.apply(true, special, draws)
        types = np.zeros(self.seq_length, np.int64)
        types[len(texts[0]) + 2 : len(true)] = 1
        return {
            "tokens": self._padded(seen, self.pad),
            "labels": self._padded(np.where(chosen, true, 0), 0),
            "loss_mask": self._padded(chosen.astype(np.float32), 0),
            "padding_mask": self._padded(np.ones(len(true), np.int64), 0),
            "token_types": types,
            "is_random": np.array(is_random, np.int64),
        }

    def _padded(self, values: np.ndarray, fill: int) -> np.ndarray:
        padded = np.full(self.seq_length, fill, values.dtype)
        padded[: len(values)] = values
        return padded


def shorten(first: np.ndarray, second: np.ndarray, room: int, draws: np.ndarray):
    """Cut two texts to `room` tokens together, the longer one first, at front and back at random.

    draws  float64 [2], one for each text
    """
    excess = max(0, len(first) + len(second) - room)
    difference = len(first) - len(second)
    uneven = min(excess, abs(difference))
    even = excess - uneven
    losses = [
        even // 2 + (uneven if difference > 0 else 0),
        (even + 1) // 2 + (uneven if difference <= 0 else 0),
    ]
    cut = []
    for text, loss, draw in zip((first, second), losses, draws):
        front = int(draw * (loss + 1))
        cut.append(text[front : len(text) - (loss - front)])
    return cut


def token_pieces(
    starts: np.ndarray, stops: np.ndarray, room: int, short_prob: float, seed: int, block: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """int64 begins and ends, in tokens: every document cut each `room` tokens, some pieces once
    more.

    starts, stops  int64 [documents]  each document's tokens
    short_prob     share of the pieces that are cut in two at a random place (--short-seq-prob)
    """
    counts = -(-(stops - starts) // room)
    document = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = starts[document] + within * room
    ends = np.minimum(begins + room, stops[document])
    cuts = _short_cuts(len(begins), room, short_prob, seed, block) + begins
    inner = cuts < ends
    order = np.argsort(np.concatenate((begins, cuts[inner])), kind="stable")
    return (
        np.concatenate((begins, cuts[inner]))[order],
        np.concatenate((np.where(inner, cuts, ends), ends[inner]))[order],
    )


def sentence_pieces(
    lengths: np.ndarray,
    documents: np.ndarray,
    room: int,
    short_prob: float,
    seed: int,
    block: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """int64 begins and ends, in sentences: runs of two sentences or more that fill about `room`
    tokens.

    A document's windows are `room` tokens each, some cut once more at a random place; a piece is
    the sentences that begin in one. A single one takes in its right neighbour, or its left; a
    document of one sentence gives nothing.

    lengths    [sentences], none empty
    documents  int64 [documents + 1], the first sentence of each, and the end
    """
    document = np.repeat(np.arange(len(documents) - 1), np.diff(documents))
    bounds = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    offset = bounds[:-1] - bounds[documents[document]]
    windows = -(-(bounds[documents[1:]] - bounds[documents[:-1]]) // room)
    window = (np.cumsum(windows) - windows)[document] + offset // room
    cut = _short_cuts(int(windows.sum()), room, short_prob, seed, block)[window]
    piece = 2 * window + (offset % room >= cut)
    begins = np.flatnonzero(np.diff(piece, prepend=-1))
    ends = np.append(begins[1:], len(lengths))[: len(begins)]
    first, stop = documents[document[begins]], documents[document[begins] + 1]
    single = ends - begins == 1
    ends = np.where(single & (ends < stop), ends + 1, ends)
    begins = np.where((ends - begins == 1) & (begins > first), begins - 1, begins)
    whole = ends - begins > 1
    whole[1:] &= (begins[1:] != begins[:-1]) | (ends[1:] != ends[:-1])
    return begins[whole], ends[whole]


def _short_cuts(count: int, room: int, short_prob: float, seed: int, block: int) -> np.ndarray:
    """int64 [count]: where each window is cut in two, 1 .. room - 1; `room` for those that are
    not."""
    short, place = uniform(2 * count, seed, block << 8 | SHORT).reshape(2, count)
    return np.where(short < short_prob, 1 + (place * (room - 1)).astype(np.int64), room)


class BertDataset:
    """Endless samples: dataset[n] is a function of (data, seed, n) alone, keys as in
    PairSampler.sample.

    prefix       .bin/.idx pair, one sequence a sentence
    documents    which documents, as split_documents gives them; None for all
    seed         of the shuffles, pairs and masks
    sampler      sequence length, special tokens, masking
    binary_head  make pairs; without it (--bert-no-binary-head) a sample is one text and sentences
                 do not matter
    pairs        "order": half of the pairs are swapped, as in Megatron; "next": half have a second
                 part from another document, as in the paper
    short_prob   share of shorter samples (--short-seq-prob)
    poll         called while documents are cut into samples

    Raises DataError for unusable files, and when no document gives a sample.
    """

    def __init__(
        self,
        prefix: str | os.PathLike,
        documents: range | None,
        seed: int,
        sampler: PairSampler,
        *,
        binary_head: bool = True,
        pairs: str = "order",
        short_prob: float = 0.1,
        mmap_bin_files: bool = True,
        poll: Poll = no_poll,
    ):
        if pairs not in ("order", "next"):
            raise DataError(f"pairs {pairs} are not known; use order or next")
        self.file = IndexedDataset(prefix, mmap_bin_files=mmap_bin_files)
        self.file.verify()
        documents = range(self.file.num_documents) if documents is None else documents
        self.sampler, self.seed, self.pairs = sampler, seed, pairs if binary_head else None
        self._room = sampler.room(2 if binary_head else 1)
        if self._room < 2:
            raise DataError(
                f"--seq-length {sampler.seq_length} has no room for text; use 8 or more"
            )
        # an aligned copy: searching the map itself copies all of it each time
        boundaries = self.file.document_indices[documents.start : documents.stop + 1].copy()
        self._boundaries = boundaries
        blocks = []
        for at in range(0, len(documents), BLOCK_DOCUMENTS):
            poll()
            some = boundaries[at : at + BLOCK_DOCUMENTS + 1]
            blocks.append(self._cut(some, short_prob, at // BLOCK_DOCUMENTS))
        empty = (np.empty(0, np.int64), np.empty(0, np.int64))
        self._begins, self._ends = map(np.concatenate, zip(empty, *blocks))
        if not len(self._begins):
            need = "two sentences or more" if binary_head else "a token"
            raise DataError(
                f"{os.fspath(prefix)}: none of {len(documents)} documents has {need}; use "
                "preprocess_data.py "
                "--split-sentences, longer documents, or --bert-no-binary-head"
            )
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    @property
    def samples_per_epoch(self) -> int:
        return len(self._begins)

    @property
    def tokens_per_epoch(self) -> int:
        spans = self._begins, self._ends
        begins, ends = spans if self.pairs is None else map(self._token, spans)
        return int((ends - begins).sum())

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        draws = uniform(6, self.seed, n << 8 | TEXTS)
        is_random = int(self.pairs is not None and draws[1] < 0.5)
        texts = [self.file.read(*span) for span in self._spans(n, draws, is_random)]
        if self.pairs is not None:
            texts = shorten(*texts, self._room, draws[4:])
        return self.sampler.sample(texts, self.seed, n, is_random)

    def part(self, n: int, names: Collection[str]) -> dict[str, np.ndarray] | None:
        """Where padding begins, which lengths alone tell."""
        if set(names) != {"padding_mask"}:
            return None
        draws = uniform(6, self.seed, n << 8 | TEXTS)
        spans = self._spans(n, draws, int(self.pairs is not None and draws[1] < 0.5))
        text = min(self._room, sum(stop - start for start, stop in spans))
        mask = np.zeros(self.sampler.seq_length, np.int64)
        mask[: text + 1 + len(spans)] = 1
        return {"padding_mask": mask}

    def _spans(self, n: int, draws: np.ndarray, is_random: int) -> list[tuple[int, int]]:
        """The tokens of the file that are sample n's texts, before they are shortened."""
        if n < 0:
            raise IndexError(f"sample {n}: samples count from 0")
        epoch, place = divmod(n, len(self._begins))
        piece = int(self._order_of(epoch)[place])
        if self.pairs is None:
            return [(int(self._begins[piece]), int(self._ends[piece]))]
        first, second = self._halves(piece, draws[0])
        if is_random and self.pairs == "order":
            return [second, first]
        if is_random:
            second = self._halves(self._other(piece, draws[2]), draws[3])[1]
        return [first, second]

    def prepare(self, n: int, poll: Poll) -> None:
        """Draw the order that sample n lies in now, and not when it is read."""
        poll()
        self._order_of(n // len(self._begins))

    def _order_of(self, epoch: int) -> np.ndarray:
        number, order = self._order
        if number != epoch:
            order = permutation(len(self._begins), self.seed, epoch << 8 | ORDER)
            self._order = (epoch, order)
        return order

    def _cut(
        self, boundaries: np.ndarray, short_prob: float, block: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Begins and ends of the pieces of consecutive documents, which are given by their first
        sentences and the end: in sentences for pairs, else in tokens."""
        options = (self._room, short_prob, self.seed, block)
        if self.pairs is None:
            offsets = self._token(boundaries)
            return token_pieces(offsets[:-1], offsets[1:], *options)
        lengths = self.file.sequence_lengths[boundaries[0] : boundaries[-1]]
        filled = np.flatnonzero(lengths)
        documents = np.searchsorted(filled, boundaries - boundaries[0])
        begins, ends = sentence_pieces(lengths[filled], documents, *options)
        return boundaries[0] + filled[begins], boundaries[0] + filled[ends - 1] + 1

    def _token(self, sequences: np.ndarray) -> np.ndarray:
        """int64: the token at which each sequence starts; past the last one, the end of the
        file."""
        pointers, size = self.file.sequence_pointers, self.file.dtype.itemsize
        inside = sequences < len(pointers)
        starts = np.full(len(sequences), self.file.num_tokens, np.int64)
        starts[inside] = pointers[sequences[inside]] // size
        return starts

    def _halves(self, piece: int, draw: float) -> tuple[tuple[int, int], tuple[int, int]]:
        """A piece's tokens, cut at one of its inner sentence bounds."""
        sentences = np.arange(self._begins[piece], self._ends[piece] + 1)
        bounds = np.unique(self._token(sentences)).tolist()
        middle = bounds[1 + int(draw * (len(bounds) - 2))]
        return (bounds[0], middle), (middle, bounds[-1])

    def _other(self, piece: int, draw: float) -> int:
        """A piece of another document; of the same where there is no other."""
        document = int(np.searchsorted(self._boundaries, self._begins[piece], "right")) - 1
        span = self._boundaries[document : document + 2]
        low, high = np.searchsorted(self._begins, span).tolist()
        others = len(self._begins) - (high - low)
        if not others:
            return int(draw * len(self._begins))
        return (high + int(draw * others)) % len(self._begins)


class BertPass:
    """The samples of a BertDataset's first epoch, each once: for `--full-validation`.

    Those from len(self) on, which fill up a global batch, have no token to be guessed and no pair.
    """

    def __init__(self, samples: BertDataset):
        self._samples = samples

    def __len__(self) -> int:
        return self._samples.samples_per_epoch

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        if n < len(self):
            return self._samples[n]
        sample = self._samples[0]  # of padding alone a layer would make no numbers
        nothing = {name: np.zeros_like(sample[name]) for name in ("labels", "loss_mask")}
        return {**sample, **nothing, "is_random": np.array(NO_PAIR, np.int64)}
