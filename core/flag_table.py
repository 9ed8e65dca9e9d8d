"""The flags of a recipe: one leaf field, one flag.

Pure: standard library only. core/config.py reads command lines by this table.

A recipe is a dataclass of sections, each a dataclass whose fields are leaves. The leaf
`num_layers: int` is the flag `--num-layers` (`--num_layers` is read too). A leaf may be

    int, float, str              one value
    Literal["a", "b"]            one of these
    bool                         --x sets it, --no-x clears it; no value
    X | None                     as X; None is a default that cannot be typed
    tuple[X, ...], tuple[X, X]   one value or more; exactly two

`field(metadata={"mock": 8})` is a leaf's value under `--mock-data` when it was not typed;
`"unless": "other"` withholds that where the leaf `other` was typed. A leaf without default is
required, and its "mock" value serves as the example in messages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

MOCK_SWITCH = "mock_data"  # the leaf that, when true, gives the others their "mock" value
_SCALARS = (int, float, str, bool)


class Leaf(NamedTuple):
    """One flag: where its value lives and how its text is read."""

    path: tuple[str, ...]
    section: type
    field: dataclasses.Field
    item: type  # of one value
    choices: tuple[Any, ...]  # empty: any value
    counts: tuple[int, int | None] | None  # least and most values of a tuple; None for one item

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def required(self) -> bool:
        return self.field.default is dataclasses.MISSING

    def supplied(self, mock: bool, given: Iterable[str]) -> Any:
        """The value when the flag is not typed; dataclasses.MISSING for a required one."""
        if mock and "mock" in self.field.metadata:
            if self.field.metadata.get("unless") not in given:
                return self.field.metadata["mock"]
        return self.field.default


def flag_of(name: str) -> str:
    """num_layers -> --num-layers"""
    return "--" + name.replace("_", "-")


def tokens(leaf: Leaf, value: Any) -> list[str]:
    """The words that type this value of a leaf."""
    if leaf.item is bool:
        return [leaf.flag if value else flag_of(f"no_{leaf.name}")]
    return [leaf.flag, *map(str, value if isinstance(value, tuple) else (value,))]


@functools.lru_cache
def leaves(cls: type) -> dict[str, Leaf]:
    """Every leaf of a recipe by name, in order of declaration.

    Raises TypeError for two leaves of one name, a leaf called as another's negation, and an
    annotation or default that no flag can express.
    """
    table: dict[str, Leaf] = {}
    for leaf in _walk(cls, ()):
        if leaf.name in table:
            other = table[leaf.name].section.__name__
            raise TypeError(f"{leaf.flag} is declared by {other} and by {leaf.section.__name__}")
        table[leaf.name] = leaf
    for name, leaf in table.items():
        if leaf.item is bool and f"no_{name}" in table:
            raise TypeError(f"--no-{name.replace('_', '-')} is a leaf and the negation of another")
    return table


def recipe(cls: type[T]) -> type[T]:
    """Class decorator: build the table now, so that a clash of names is an error at import."""
    leaves(cls)
    return cls


def _walk(cls: type, path: tuple[str, ...]) -> Iterator[Leaf]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _walk(hint, (*path, field.name))
        else:
            yield _leaf((*path, field.name), cls, field, hint)


def _leaf(path: tuple[str, ...], cls: type, field: dataclasses.Field, hint: Any) -> Leaf:
    where = f"{cls.__name__}.{field.name}: {hint}"
    if field.default_factory is not dataclasses.MISSING:
        raise TypeError(f"{where} has a default_factory; give an immutable default")
    if NoneType in get_args(hint):
        rest = [arg for arg in get_args(hint) if arg is not NoneType]
        if len(rest) != 1 or field.default not in (None, dataclasses.MISSING):
            raise TypeError(f"{where} must be one type or None, with None as its default")
        hint = rest[0]
    counts = None
    if get_origin(hint) is tuple:
        items = get_args(hint)
        counts = (1, None) if items[-1] is Ellipsis else (len(items), len(items))
        if len(set(items) - {Ellipsis}) != 1:
            raise TypeError(f"{where} mixes types in a tuple")
        hint = items[0]
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    item = type(choices[0]) if choices else hint
    if item not in _SCALARS or (item is bool and counts):
        raise TypeError(f"{where} has no form on a command line")
    if field.default is dataclasses.MISSING and "mock" not in field.metadata:
        raise TypeError(f"{where} is required: give it a value under --mock-data")
    return Leaf(path, cls, field, item, choices, counts)
