"""Configs as records: argv, plain JSON, and what differs between two of them.

Pure: standard library only. A checkpoint stores `to_json`; ranks compare a digest of it at
rendezvous; the --nproc parent starts its children with `to_argv`. The fields and their flags are
core/flag_table.py's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, get_type_hints

from core.flag_table import MOCK_SWITCH, Leaf, flag_of, leaves, tokens

T = TypeVar("T")


def value_of(config: Any, leaf: Leaf) -> Any:
    return functools.reduce(getattr, leaf.path, config)


def fingerprint(config: Any) -> dict[str, str]:
    """Every flag and its value as text: what must be equal on all ranks."""
    return {leaf.flag: str(value_of(config, leaf)) for leaf in leaves(type(config)).values()}


def to_argv(config: Any) -> list[str]:
    """The shortest command line that `parse` turns into this config again."""
    table = leaves(type(config))
    mock = MOCK_SWITCH in table and value_of(config, table[MOCK_SWITCH])
    ordinary = {n for n, leaf in table.items() if value_of(config, leaf) != leaf.field.default}
    argv = []
    for leaf in table.values():
        value = value_of(config, leaf)
        if value is not None and value != leaf.supplied(mock, ordinary):
            argv += tokens(leaf, value)
    return argv


def to_json(config: Any) -> dict[str, Any]:
    """Plain dicts, lists and scalars: {"model": {"num_layers": 8, ...}, ...}."""
    return {
        field.name: to_json(value)
        if dataclasses.is_dataclass(value)
        else (list(value) if isinstance(value, tuple) else value)
        for field in dataclasses.fields(config)
        for value in (getattr(config, field.name),)
    }


def from_json(cls: type[T], record: Mapping[str, Any]) -> T:
    """The config behind `to_json`. A field the record lacks takes its default.

    Raises ValueError for a record with names this version does not know, or without a value that
    has no default.
    """
    hints, parts = get_type_hints(cls), {}
    names = [field.name for field in dataclasses.fields(cls)]
    if unknown := sorted(set(record) - set(names)):
        raise ValueError(f"{cls.__name__} has no {', '.join(unknown)}: written by another version")
    for field in dataclasses.fields(cls):
        value = record.get(field.name, field.default)
        if dataclasses.is_dataclass(hints[field.name]):
            value = from_json(hints[field.name], record.get(field.name, {}))
        elif value is dataclasses.MISSING:
            raise ValueError(f"the record of {cls.__name__} lacks {field.name}")
        parts[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**parts)


class Difference(NamedTuple):
    name: str
    saved: Any
    given: Any

    def __str__(self) -> str:
        return f"{flag_of(self.name)}: saved {self.saved}, given {self.given}"


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[Difference]:
    """Leaf by leaf between two records of `to_json` (or the same section of two), in order.

    A leaf that one side lacks counts as None there.
    """
    found = []
    for name in dict.fromkeys([*given, *saved]):
        old, new = saved.get(name), given.get(name)
        if isinstance(old, Mapping) or isinstance(new, Mapping):
            found += differences(old or {}, new or {})
        elif old != new:
            found.append(Difference(name, old, new))
    return found
