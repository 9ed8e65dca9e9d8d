"""The sets of the run that is resumed: found again where they lie now, and told where they differ.

A checkpoint keeps what `measured` says of every training set, by its prefix. Imports the standard
library and its neighbours in data/ only; opens no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from data.indexed import IndexedDataset

Known = dict[str, int | list[int]]  # of one set, see `measured`


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


def _same_size(one: Known, other: Known) -> bool:
    return all(one[name] == other[name] for name in ("documents", "tokens"))
