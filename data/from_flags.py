"""From the data flags to data sets: what the recipes open once the ranks are there.

Imports its neighbours in data/ only; takes the section of the command line and plain numbers. Read
in this order: Sets, Opening, gpt_sets and bert_sets, _open_sets. Neighbour: data/flag_checks.py
(tokenizer, and the checks before any rank starts).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from data.bert import BertDataset, BertPass, PairSampler
from data.config import BertDataConfig, DataConfig, GPTDataConfig
from data.flag_checks import eod_of, is_null, mixes_of, single_sentences, tokenizer_of, used
from data.gpt import GPTDataset, GPTPass
from data.index_format import DataError
from data.indexed import IndexedDataset
from data.known_sets import Known, change_lines, few, leak_line, measured, move_lines
from data.mock import MockBertDataset, MockGPTDataset
from data.sample_index import Poll, no_poll
from data.sets import SPLITS, Mix, MixedDataset, named_mixes, open_mix

Make = Callable[[str, range], object]  # (prefix, documents) -> samples


@dataclass(frozen=True)
class Held:
    """A set to evaluate on.

    name     among several; empty for the only one
    weight   its share in the mean over several
    samples  all there are (--full-validation); None: endless
    """

    data: object
    name: str = ""
    weight: float = 1.0
    samples: int | None = None


@dataclass
class Sets:
    """What a run reads.

    held_out  "valid" and "test", where there are such samples and they are wanted
    facts     lines about what was found
    """

    train: object
    held_out: dict[str, list[Held]] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)

    @property
    def record(self) -> dict:
        """What a checkpoint keeps, for a resumed run to go on without repeats."""
        if not isinstance(self.train, MixedDataset):
            return {}
        return {"blend": self.train.history, "sets": self.train.known}

    def uses(self, samples: int) -> Iterator[str]:
        """Lines that say how often a run of so many samples passes through each training set."""
        if isinstance(self.train, MixedDataset):
            yield from (f"training on {line}" for line in self.train.uses(samples))


@dataclass(frozen=True)
class Opening:
    """What the data sets depend on besides the flags.

    seq_length, seed
    vocab_size         of the model
    evaluates          whether validation and testing samples will be read
    record, consumed   of the checkpoint: `Sets.record`, and the samples trained on
    writes_cache       this process writes what --data-cache-path lacks: one a node is enough
    reads              this process reads training samples: their first order is drawn at once
    poll               called while that is under way; what it raises ends it
    """

    seq_length: int
    vocab_size: int
    seed: int
    evaluates: bool = True
    record: dict = field(default_factory=dict)
    consumed: int = 0
    writes_cache: bool = True
    reads: bool = False
    poll: Poll = no_poll


def gpt_sets(config: GPTDataConfig, given: Opening) -> Sets:
    """Training samples, and what there is to evaluate on. Raises DataError."""
    sizes = (given.vocab_size, given.seq_length, given.seed)
    if config.mock_data:
        return _mock_sets(given, lambda split: MockGPTDataset(*sizes, split=split))
    tokenizer = tokenizer_of(config, given.vocab_size - is_null(config))
    options = {
        "eod": eod_of(tokenizer, config),
        "reset_position_ids": config.reset_position_ids,
        "reset_attention_mask": config.reset_attention_mask,
        "eod_mask_loss": config.eod_mask_loss,
        "document_attention_mask": config.document_attention_mask,
        "mmap_bin_files": config.mmap_bin_files,
    }

    def samples(prefix: str, documents: range) -> GPTDataset:
        given.poll()
        return GPTDataset(
            prefix,
            documents,
            given.seq_length,
            given.seed,
            cache_folder=config.data_cache_path,
            cache_write=given.writes_cache,
            **options,
        )

    def whole(prefix: str, documents: range) -> GPTPass:
        return GPTPass(prefix, documents, given.seq_length, **options)

    return _open_sets(config, given, samples, whole if config.full_validation else None)


def bert_sets(
    config: BertDataConfig, given: Opening, *, binary_head: bool, mask_prob: float
) -> Sets:
    """Training samples for BERT, and what there is to evaluate on. Raises DataError."""
    masking = {
        "prob": mask_prob,
        "max_ngram": config.mask_max_ngram,
        "geometric": config.mask_geometric,
    }
    sizes = (given.vocab_size, given.seq_length, given.seed)
    if config.mock_data:
        masking["binary_head"] = binary_head
        return _mock_sets(given, lambda split: MockBertDataset(*sizes, split=split, **masking))
    sampler = PairSampler.of(tokenizer_of(config), given.seq_length, **masking)
    if not config.mask_whole_words:
        sampler = replace(sampler, masking=replace(sampler.masking, word_starts=None))

    def samples(prefix: str, documents: range) -> BertDataset:
        return BertDataset(
            prefix,
            documents,
            given.seed,
            sampler,
            binary_head=binary_head,
            pairs=config.bert_pairs,
            short_prob=config.short_seq_prob,
            mmap_bin_files=config.mmap_bin_files,
            poll=given.poll,
        )

    def whole(prefix: str, documents: range) -> BertPass:
        return BertPass(samples(prefix, documents))

    sets = _open_sets(config, given, samples, whole if config.full_validation else None)
    if binary_head:
        sets.facts += _single_facts(mixes_of(config)["train"])
    return sets


def _mock_sets(given: Opening, make: Callable[[int], object]) -> Sets:
    """make: split number -> samples"""
    held_out = {name: [Held(make(i))] for i, name in enumerate(SPLITS) if i}
    return Sets(make(0), held_out if given.evaluates else {})


def _open_sets(config: DataConfig, given: Opening, make: Make, make_pass: Make | None) -> Sets:
    """make_pass: of a set that is read once, for --full-validation"""
    found, threads = mixes_of(config), config.num_dataset_builder_threads
    earlier, known = given.record.get("blend", ()), given.record.get("sets", {})
    resumed = {"earlier": earlier, "known": known, "start": given.consumed}
    train = open_mix(found["train"], make, threads=threads, **resumed)
    if given.reads:
        train.prepare(given.consumed, given.poll)
    sets = Sets(train, facts=_told(train, found, given))

    def held(mix: Mix) -> Held:
        counts = [IndexedDataset(prefix).num_documents for prefix in used(mix)]
        if mix.split is not None and not any(mix.documents(count) for count in counts):
            raise DataError(f"--split {mix.split} gives it none of {sum(counts)} documents")
        return _whole(mix, make_pass) if make_pass else Held(open_mix(mix, make, threads=threads))

    for split in SPLITS[1:] if given.evaluates else ():
        if split in found:
            several = config.multiple_validation_sets and split == "valid"
            parts = _shares(found[split]) if several else {"": found[split]}
            opened = _open_each(parts, held, f"no {split} samples", sets.facts)
            sets.held_out[split] = opened if len(opened) == 1 else _weighted(found[split], opened)
    sets.held_out = {split: opened for split, opened in sets.held_out.items() if opened}
    return sets


def _told(train: MixedDataset, found: dict[str, Mix], given: Opening) -> list[str]:
    """Lines about how this part of a run reads other data than those before it."""
    if not given.consumed:
        return []
    saved = given.record.get("sets", {})
    before = {train.moved.get(prefix, prefix): known for prefix, known in saved.items()}
    now = {prefix: train.known[prefix] for prefix in train.opened}
    changes = list(change_lines(before, now))
    facts = [*few(list(move_lines(train.moved))), *few(changes)]
    if len(train.history) > max(1, len(given.record.get("blend", ()))):
        blend = f"the blend changes at sample {given.consumed}"
        facts.append(blend if changes else f"{blend}; nothing is repeated")
    for split, name in zip(SPLITS[1:], ("validation", "testing")):
        if given.evaluates and split in found:
            lines = [
                leak_line(
                    prefix, before[prefix], now.get(prefix), _held_out(found[split], prefix), name
                )
                for prefix in used(found[split])
                if prefix in before
            ]
            facts += few([line for line in lines if line])
    return facts


def _held_out(mix: Mix, prefix: str) -> Known:
    file = IndexedDataset(prefix)
    return measured(file, mix.documents(file.num_documents))


def _open_each(
    parts: dict[str, Mix], held: Callable[[Mix], Held], complaint: str, facts: list[str]
) -> list[Held]:
    """Every set that has samples; of the others `facts` get a line."""
    opened = []
    for name, mix in parts.items():
        try:
            opened.append(replace(held(mix), name=name))
        except DataError as error:
            facts.append(f"{complaint}: {error}")
    return opened


def _shares(mix: Mix) -> dict[str, Mix]:
    """Each set that has a share, by its name."""
    return {name: one for name, one in named_mixes(mix).items() if one.prefixes[0] in used(mix)}


def _weighted(mix: Mix, opened: list[Held]) -> list[Held]:
    """With their shares in the mean: the weights in the flags, or their sizes."""
    if mix.weights is not None:
        shares = dict(zip(named_mixes(mix), map(float, mix.weights)))
    else:
        shares = {held.name: _size(held) for held in opened}
    return [replace(held, weight=shares[held.name]) for held in opened]


def _size(held: Held) -> float:
    if held.samples is not None:
        return float(held.samples)
    return float(sum(data.tokens_per_epoch for data in held.data.datasets))


class _Chain:
    """Sets one after another; what lies behind the last is the last one's padding."""

    def __init__(self, parts: Sequence) -> None:
        self._parts = list(parts)
        self._ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, n: int):
        which = min(bisect.bisect_right(self._ends, n), len(self._parts) - 1)
        return self._parts[which][n - self._ends[which] + len(self._parts[which])]


def _whole(mix: Mix, make: Make) -> Held:
    """All samples of every set that has a share. Raises DataError where there is none."""
    parts = [
        make(prefix, mix.documents(IndexedDataset(prefix).num_documents)) for prefix in used(mix)
    ]
    chain = _Chain(parts)
    if not len(chain):
        raise DataError(f"{', '.join(mix.prefixes)}: fewer than two tokens")
    return Held(chain, samples=len(chain))


def _single_facts(mix: Mix) -> Iterator[str]:
    for prefix in used(mix):
        documents, single = single_sentences(mix, prefix)
        if single:
            yield f"{prefix}: {single} of {documents} documents have one sentence: left out"
