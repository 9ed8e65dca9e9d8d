"""Which tokens make training sample n: packing and shuffling as 64-bit arithmetic in numpy.

One epoch is the documents in an order drawn from (seed, epoch), joined to one stream of T tokens;
the epochs follow each other without a gap. Window k of this endless stream is the seq_length + 1
tokens from k * seq_length on, so that neighbours share one token: every token is a label exactly
once per epoch. The windows that start in one epoch are shuffled among each other, again from (seed,
epoch), except the last one, which reaches into the next epoch and stays last, so that nothing is
seen twice before all has been seen. With 2 documents of 3 and 4 tokens and seq_length 2:

    documents        a0 a1 a2  b0 b1 b2 b3
    epoch 0 (b, a)   b0 b1 b2 b3 a0 a1 a2        epoch 1 (a, b)   a0 a1 a2 b0 ...
    windows          [b0 b1 b2]  [b2 b3 a0]  [a0 a1 a2]  [a2 | a0 a1]      [a1 a2 b0] ...

Sample n therefore depends on (seed, documents, n) alone, not on how many samples a run asks for,
and is found without replaying any other. Imports numpy only. data/gpt.py reads the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data.draws import permutation
from data.index_format import DataError

DOCUMENTS, SAMPLES = 0, 1  # the two shuffles of an epoch draw from different streams


@dataclass(frozen=True)
class Epoch:
    """The order of one epoch.

    starts   int64 [documents]      where each document starts in the file, in shuffled order
    bounds   int64 [documents + 1]  where each starts in the epoch's stream, and the stream's end
    samples  int64 [windows]        the window each sample takes, counted from the epoch's first
    """

    starts: np.ndarray
    bounds: np.ndarray
    samples: np.ndarray


Poll = Callable[[], object]  # called now and then by long work; may raise, which ends the work


def no_poll() -> None:
    """For work that nobody ends."""


def draw_epoch(
    document_offsets: np.ndarray, seq_length: int, seed: int, number: int, poll: Poll = no_poll
) -> Epoch:
    """Shuffle epoch `number` of the documents that start at tokens `document_offsets[:-1]`.

    document_offsets  int64 [documents + 1]; empty documents take no part
    """
    poll()
    lengths = np.diff(document_offsets)
    filled = np.flatnonzero(lengths)
    if len(filled) < len(lengths):
        lengths = lengths[filled]
        document_offsets = document_offsets[:-1][filled]
    poll()
    order = permutation(len(lengths), seed, number << 8 | DOCUMENTS)
    poll()
    bounds = np.zeros(len(order) + 1, np.int64)
    np.cumsum(lengths[order], out=bounds[1:])
    first, stop = (first_sample(int(bounds[-1]), seq_length, e) for e in (number, number + 1))
    poll()
    samples = permutation(stop - first, seed, number << 8 | SAMPLES, last_stays=True)
    return Epoch(document_offsets[order], bounds, samples)


def first_sample(tokens_per_epoch: int, seq_length: int, epoch: int) -> int:
    """The first sample of an epoch: the smallest n with n * seq_length >= epoch *
    tokens_per_epoch."""
    return -(-epoch * tokens_per_epoch // seq_length)


class SampleIndex:
    """Finds the tokens of any sample.

    tokens_per_epoch  T
    seq_length        s; a sample has s + 1 tokens
    draw              (epoch number, poll) -> Epoch: draw_epoch, or a cache of what it returned

    Raises DataError when an epoch is shorter than one sample.
    """

    def __init__(self, tokens_per_epoch: int, seq_length: int, draw: Callable[[int, Poll], Epoch]):
        if tokens_per_epoch < seq_length + 1:
            raise DataError(
                f"{tokens_per_epoch} tokens are fewer than the {seq_length + 1} of one sample at "
                f"--seq-length {seq_length}; use more data or a shorter sequence"
            )
        self.tokens_per_epoch = tokens_per_epoch
        self.seq_length = seq_length
        self._draw = draw
        self._epochs: dict[int, Epoch] = {}

    def epoch_of(self, n: int) -> int:
        """The epoch that sample n belongs to."""
        return n * self.seq_length // self.tokens_per_epoch

    def first_sample(self, epoch: int) -> int:
        return first_sample(self.tokens_per_epoch, self.seq_length, epoch)

    def pieces(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 starts and stops: the token ranges of the file that joined make sample n. Each
        lies in one document."""
        if n < 0:
            raise IndexError(f"sample {n}: samples count from 0")
        epoch = self.epoch_of(n)
        first = self.first_sample(epoch)
        window = first + int(self.epoch(epoch).samples[n - first])
        start = window * self.seq_length - epoch * self.tokens_per_epoch
        stop = start + self.seq_length + 1
        starts, stops = _cut(self.epoch(epoch), start, min(stop, self.tokens_per_epoch))
        if stop > self.tokens_per_epoch:
            more = _cut(self.epoch(epoch + 1), 0, stop - self.tokens_per_epoch)
            starts, stops = np.append(starts, more[0]), np.append(stops, more[1])
        return starts, stops

    def epoch(self, number: int, poll: Poll = no_poll) -> Epoch:
        """The order of epoch `number`; the two drawn last are kept."""
        found = self._epochs.get(number)
        if found is None:
            found = self._draw(number, poll)
            kept = list(self._epochs.items())[-1:]
            self._epochs = dict([*kept, (number, found)])
        return found


def _cut(epoch: Epoch, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """File ranges of tokens start .. stop - 1 of an epoch's stream."""
    first = int(epoch.bounds.searchsorted(start, "right")) - 1
    last = int(epoch.bounds.searchsorted(stop, "left"))
    bounds = epoch.bounds[first : last + 1]
    shift = epoch.starts[first:last] - bounds[:-1]  # from the stream to the file
    return np.maximum(bounds[:-1], start) + shift, np.minimum(bounds[1:], stop) + shift
