"""The text of --pipeline-model-parallel-layout, read into what each stage holds.

Pure: standard library only; `placement` decides whether the stages fit the model. Two forms:

    Megatron's   E embedding, t layer, L output layer and loss, | between stages; x*n and (...)*n
                 repeat, commas and blanks are for the eye
    a list       layers per stage: 1,2,2,1

    >>> parse_layout("Et*2|(tt|)*2,L")
    ['Ett', 'tt', 'tt', 'L']
    >>> parse_layout("1,2,0")
    ['Et', 'tt', 'L']
"""

from __future__ import annotations

import re

_LIST = re.compile(r"\s*\d+\s*(,\s*\d+\s*)*")
_REPEAT = re.compile(r"\s*\*\s*(\d+)")
_LONGEST = 100_000  # symbols after repetition; no model comes near, a slip of the finger does


class LayoutError(ValueError):
    """A layout that cannot be read; the text shows the place."""


def parse_layout(text: str) -> list[str]:
    """What each stage holds, in stage order, as E, t and L symbols. Raises LayoutError."""
    if _LIST.fullmatch(text):
        counts = [int(count) for count in text.split(",")]
        if sum(counts) > _LONGEST:
            raise _error(text, 0, f"{sum(counts)} layers are too many")
        stages = ["t" * count for count in counts]
        stages[0] = "E" + stages[0]
        stages[-1] += "L"
        return stages
    symbols, end = _sequence(text, 0, depth=0)
    if end < len(text):
        raise _error(text, end, "this ) has no (")
    return "".join(symbols).split("|")


def _sequence(text: str, at: int, depth: int) -> tuple[list[str], int]:
    """Symbols from `at` up to an unmatched ) or the end, repetitions written out."""
    found: list[str] = []
    while at < len(text) and text[at] != ")":
        symbol, start = text[at], at
        if symbol in ", \t\n":
            at += 1
            continue
        if symbol in "EtL|":
            item, at = [symbol], at + 1
        elif symbol == "(" and depth < 10:
            item, at = _sequence(text, at + 1, depth + 1)
            if at == len(text):
                raise _error(text, start, "this ( is not closed")
            at += 1
        else:
            raise _error(text, at, _complaint(symbol))
        repeat = _REPEAT.match(text, at)
        if repeat:
            most = _LONGEST // max(1, len(item)) + 1  # enough to be refused below
            item, at = item * min(int(repeat[1]), most), repeat.end()
        found += item
        if len(found) > _LONGEST:
            raise _error(text, start, f"more than {_LONGEST} symbols from here")
    return found, at


def _complaint(symbol: str) -> str:
    if symbol == "m":
        return "m (multi-token prediction) layers are not built here; leave them out"
    if symbol == "(":
        return "parentheses are nested more than ten deep"
    if symbol == "*":
        return "* repeats the symbol or the (...) before it, as in t*3 or (tt|)*2"
    return f"{symbol!r} is no symbol; use E, t, L, |, *n and (...)*n, or a list such as 1,2,2,1"


def _error(text: str, at: int, complaint: str) -> LayoutError:
    shown = text.translate({ord("\t"): " ", ord("\n"): " "})
    return LayoutError(
        f"--pipeline-model-parallel-layout cannot be read at character {at + 1}: {complaint}\n"
        f"    {shown}\n    {' ' * at}^"
    )
