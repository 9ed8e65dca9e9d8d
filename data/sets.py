"""From the data flags to the three data sets of a run: training, validation, testing.

Order: mixes (flags -> one Mix a split), named_mixes (a Mix -> one for each of its sets), open_mix
(a Mix -> samples). What a sample is, is the caller's: `make` builds it from a prefix and a range of
documents. Imports its neighbours in data/ and the standard library; opens no .bin file itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from data.blend import BlendedDataset, parse_blend
from data.gpt import split_documents
from data.index_format import DataError
from data.indexed import IndexedDataset
from data.known_sets import Known, joined, measured, moves
from data.sample_index import Poll

SPLITS = ("train", "valid", "test")
Phase = tuple[int, dict[str, str]]  # first sample, prefix -> weight as a fraction


@dataclass(frozen=True)
class Mix:
    """What one split is made of.

    prefixes  .bin/.idx pairs
    weights   their shares, of any sum; None: by size, so that all are passed through equally often
    split     the --split of which this takes `part` (0 train, 1 valid, 2 test); None: every
              document
    """

    prefixes: tuple[str, ...]
    weights: tuple[Fraction, ...] | None = None
    split: str | None = None
    part: int = 0

    def documents(self, count: int) -> range:
        """This split's documents of a pair that has `count`."""
        return range(count) if self.split is None else split_documents(self.split, count)[self.part]


def mixes(
    *,
    data_path: Sequence[str] | None = None,
    split: str = "969,30,1",
    train_data_path: Sequence[str] | None = None,
    valid_data_path: Sequence[str] | None = None,
    test_data_path: Sequence[str] | None = None,
    per_split_data_args_path: str | None = None,
    data_args_path: str | None = None,
) -> dict[str, Mix]:
    """The Mix of each split that has data, from the flags of the same names. Raises DataError.

    data_args_path            file holding the words of --data-path
    per_split_data_args_path  JSON file {"train": [words], "valid": [words], "test": [words]}
    """
    own = {"train": train_data_path, "valid": valid_data_path, "test": test_data_path}
    ways = {
        "--data-path": data_path,
        "--data-args-path": data_args_path,
        "--per-split-data-args-path": per_split_data_args_path,
        "--train-data-path, --valid-data-path, --test-data-path": any(own.values()),
    }
    used = [flag for flag, value in ways.items() if value]
    if len(used) != 1:
        raise DataError(f"give one of {'; '.join(ways)}: got {'; '.join(used) or 'none'}")
    if data_args_path:
        data_path = _text(data_args_path, "--data-args-path").split()
    if data_path:
        prefixes, weights = parse_blend(data_path)
        shares = None if weights is None else tuple(weights)
        return {name: Mix(tuple(prefixes), shares, split, i) for i, name in enumerate(SPLITS)}
    if per_split_data_args_path:
        own = _per_split(per_split_data_args_path)
    found = {}
    for name, words in own.items():
        if words:
            prefixes, weights = parse_blend(words)
            found[name] = Mix(tuple(prefixes), None if weights is None else tuple(weights))
    return found


def named_mixes(mix: Mix) -> dict[str, Mix]:
    """One Mix for each set of `mix`, to be evaluated on its own, by the last part of its prefix (or
    all of it)."""
    names = [Path(prefix).name for prefix in mix.prefixes]
    if len(set(names)) < len(names):
        names = list(mix.prefixes)
    return {
        name: Mix((prefix,), None, mix.split, mix.part) for name, prefix in zip(names, mix.prefixes)
    }


class MixedDataset(BlendedDataset):
    """The samples of a Mix. `history` and `known` are what a resumed run must pass to open_mix to
    go on without repeats; `moved` says which sets it found under another path."""

    def __init__(
        self,
        datasets: Sequence,
        prefixes: Sequence[str],
        phases: Sequence[Phase],
        known: Mapping[str, Known],
        moved: Mapping[str, str],
    ):
        self.prefixes = list(prefixes)
        self.known, self.moved = dict(known), dict(moved)
        self.history = [[start, dict(weights)] for start, weights in phases]
        super().__init__(
            datasets,
            [
                (start, [Fraction(weights.get(prefix, "0")) for prefix in prefixes])
                for start, weights in phases
            ],
        )

    @property
    def opened(self) -> list[str]:
        """The prefixes of the sets that can be read."""
        return [p for p, data in zip(self.prefixes, self.datasets) if data is not None]

    def uses(self, samples: int) -> Iterator[str]:
        """For each set, how often a run of so many samples passes through it."""
        for prefix, data, count in zip(self.prefixes, self.datasets, self.counts(samples)):
            if data is not None:
                epochs = count / data.samples_per_epoch
                yield f"{prefix}: {count:,} samples, {epochs:.3g} epochs"

    def part(self, n: int, names: Collection[str]) -> dict | None:
        """The arrays named, where the sample's own set knows them without reading it."""
        which, k = self.locate(n)
        data = self.datasets[which]
        return data.part(k, names) if hasattr(data, "part") else None

    def prepare(self, n: int, poll: Poll) -> None:
        """Draw the orders that the samples from n on lie in now, and not when they are read."""
        for data, count in zip(self.datasets, self.counts(n)):
            if data is not None:
                data.prepare(count, poll)

    def __getitem__(self, n: int):
        which, k = self.locate(n)
        if self.datasets[which] is None:
            raise IndexError(f"sample {n} lies before the change of blend at {self.history[-1][0]}")
        return self.datasets[which][k]


def open_mix(
    mix: Mix,
    make: Callable[[str, range], object],
    *,
    threads: int = 1,
    earlier: Sequence[Phase] = (),
    start: int = 0,
    known: Mapping[str, Known] | None = None,
) -> MixedDataset:
    """Open the sets of a Mix that have a share.

    make     (prefix, documents) -> data set; with weights None it must have tokens_per_epoch
    threads  how many to open at once (--num-dataset-builder-threads)
    earlier  `history` of the run that is resumed at sample `start`; other weights now begin a new
             phase there
    known    its `known`: by this a set is the same though it lies elsewhere now

    Raises DataError for files that cannot be used.
    """
    shares = mix.weights or [None] * len(mix.prefixes)
    opened = [prefix for prefix, share in zip(mix.prefixes, shares) if share is None or share > 0]

    def open_one(prefix: str) -> tuple[object, Known]:
        file = IndexedDataset(prefix)
        documents = mix.documents(file.num_documents)
        return make(prefix, documents), measured(file, documents)

    with ThreadPoolExecutor(max(1, threads)) as pool:
        found = dict(zip(opened, pool.map(open_one, opened)))
    sets, now = ({prefix: pair[i] for prefix, pair in found.items()} for i in (0, 1))
    if mix.weights is None:
        weights = {prefix: str(data.tokens_per_epoch) for prefix, data in sets.items()}
    else:
        weights = {p: str(w) for p, w in zip(mix.prefixes, mix.weights) if w > 0}
    phases = [(first, dict(shares)) for first, shares in earlier if first < start]
    moved = moves([p for _, shares in phases for p in shares], known or {}, now)
    phases = [(at, {moved.get(p, p): w for p, w in shares.items()}) for at, shares in phases]
    if not phases:
        phases = [(0, weights)]
    elif not _same(phases[-1][1], weights):
        phases.append((start, weights))
    # in the order of the earlier parts: it decides which of two equal weights is first served
    prefixes = list(dict.fromkeys([*(p for _, shares in phases for p in shares), *opened]))
    before = {moved.get(p, p): k for p, k in (known or {}).items() if moved.get(p, p) in prefixes}
    kept = before | {prefix: joined(before.get(prefix), k) for prefix, k in now.items()}
    return MixedDataset([sets.get(prefix) for prefix in prefixes], prefixes, phases, kept, moved)


def _same(one: dict[str, str], other: dict[str, str]) -> bool:
    """Whether two sets of weights are the same blend, that is, in proportion."""
    totals = [sum(map(Fraction, weights.values())) for weights in (one, other)]
    return one.keys() == other.keys() and all(
        Fraction(one[prefix]) * totals[1] == Fraction(other[prefix]) * totals[0] for prefix in one
    )


def _text(path: str, flag: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{flag} {os.fspath(path)}: {error}") from None


def _per_split(path: str) -> dict[str, list[str] | None]:
    flag = "--per-split-data-args-path"
    try:
        lists = json.loads(_text(path, flag))
        if not isinstance(lists, dict) or not set(lists) <= set(SPLITS) or not any(lists.values()):
            raise ValueError('needs an object with lists under "train", "valid" and "test"')
        return {name: [str(word) for word in lists.get(name) or ()] for name in SPLITS}
    except ValueError as error:
        raise (
            error if isinstance(error, DataError) else DataError(f"{flag} {path}: {error}")
        ) from None
