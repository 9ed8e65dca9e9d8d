"""The sets of the run that is resumed: found again where they lie now, and told where they differ.

A checkpoint keeps what `measured` says of every training set, by its prefix. Imports the standard
library and its neighbours in data/ only; opens no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from data.indexed import IndexedDataset

Known = dict[str, int | list[int]]  # of one set, see `measured`
AGAIN = "its samples come in another order, and some of those trained on come again"
FEW = 3  # sets that get a line each; a blend may have hundreds


def measured(file: IndexedDataset, training: range) -> Known:
    """What the order of a set's samples depends on, and what of it was trained on.

    documents, tokens  of the whole file
    training           [first, end) of the documents that are trained on
    seen               the same over all parts of the run
    """
    span = [training.start, training.stop]
    return {
        "documents": int(file.num_documents),
        "tokens": int(file.num_tokens),
        "training": span,
        "seen": span,
    }


def joined(before: Known | None, now: Known) -> Known:
    """A set's record after a part of the run that trained on `before` and one that does on `now`"""
    if before is None or not _same_size(before, now):
        return now
    spans = before["seen"], now["seen"]
    return {**now, "seen": [min(s[0] for s in spans), max(s[1] for s in spans)]}


def moves(
    earlier: Iterable[str], known: Mapping[str, Known], now: Mapping[str, Known]
) -> dict[str, str]:
    """Old prefix -> new one, of sets that have another path: staged to a node's disk, say.

    It is the same set if its name, the last part, is and no other set has that; else if the last
    two parts are, and so on. Where the checkpoint knows its size, that must be the same too.

    >>> moves(["/big/en/text", "/big/fr/text"], {}, {"/tmp/fr/text": {}, "/tmp/en/text": {}})
    {'/big/en/text': '/tmp/en/text', '/big/fr/text': '/tmp/fr/text'}
    """
    earlier = list(dict.fromkeys(earlier))
    gone = {old: Path(old).parts for old in earlier if old not in now}
    new = {prefix: Path(prefix).parts for prefix in now if prefix not in earlier}
    found: dict[str, str] = {}
    for depth in range(1, 1 + max(map(len, gone.values()), default=0)):
        pairs = [
            (old, prefix)
            for old in gone.keys() - found.keys()
            for prefix in new.keys() - found.values()
            if gone[old][-depth:] == new[prefix][-depth:]
            and (old not in known or _same_size(known[old], now[prefix]))
        ]
        olds, news = ([pair[i] for pair in pairs] for i in (0, 1))
        found |= {o: p for o, p in pairs if olds.count(o) == news.count(p) == 1}
    return {old: found[old] for old in gone if old in found}


def move_lines(moved: Mapping[str, str]) -> Iterator[str]:
    for old, prefix in moved.items():
        yield f"--data-path: {old} is now at {prefix}; training goes on where it was in it"


def change_lines(before: Mapping[str, Known], now: Mapping[str, Known]) -> Iterator[str]:
    """What makes samples come again.

    before  what the checkpoint knows, by today's prefixes
    now     the sets that are trained on
    """
    for prefix in (prefix for prefix in now if prefix in before):
        was, has = before[prefix], now[prefix]
        if not _same_size(was, has):
            yield (
                f"WARNING: {prefix} has {_size(has)}, and had {_size(was)} when the checkpoint was "
                f"saved: {AGAIN}"
            )
        elif was["training"] != has["training"]:
            yield (
                f"WARNING: {prefix} is trained on with its documents {_span(*has['training'])}, "
                f"and was with {_span(*was['training'])}: {AGAIN}"
            )
    gone = [old for old in before if old not in now]
    for prefix in (prefix for prefix in now if prefix not in before):
        for old in (old for old in gone if Path(old).name == Path(prefix).name):
            if not _same_size(before[old], now[prefix]):
                yield (
                    f"WARNING: {prefix} has {_size(now[prefix])}, and {old} had "
                    f"{_size(before[old])}: it is another set, read from its first sample on"
                )


def leak_line(
    prefix: str, before: Known, now: Known | None, held_out: Known, split: str
) -> str:
    """That documents were trained on which are part of a split, or "".

    before    of the set in the checkpoint      now  as it is trained on now, if it is
    held_out  as it is evaluated on

    What is trained on and held out at once was asked for, and gets no line.
    """
    (first, end), (seen, seen_end) = held_out["training"], before["seen"]
    both = now and max(first, now["training"][0]) < min(end, now["training"][1])
    first, end = max(first, seen), min(end, seen_end)
    if both or first >= end or not _same_size(before, held_out):
        return ""
    return (
        f"WARNING: {prefix}: documents {_span(first, end)} were trained on earlier in this run, "
        f"and are part of {split} now"
    )


def few(lines: Sequence[str]) -> list[str]:
    """The first of many lines, and how many more sets there are like them."""
    more = len(lines) - FEW
    return [*lines[:FEW], *([f"and the same of {more} more sets"] if more > 0 else ())]


def _same_size(one: Known, other: Known) -> bool:
    return all(one[name] == other[name] for name in ("documents", "tokens"))


def _size(known: Known) -> str:
    return f"{known['documents']:,} documents of {known['tokens']:,} tokens"


def _span(first: int, end: int) -> str:
    return f"{first} to {end - 1}"
