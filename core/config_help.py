"""The text of --help: every flag of a recipe by section, with the string under its field.

Pure: standard library only, and imported only when help is asked for. The strings are read from the
source with `ast`: nothing keeps them at run time.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Mapping
from itertools import pairwise

from core.flag_table import Leaf, flag_of

WIDTH = 100
COLUMN = 44  # where the descriptions start

_INTRO = (
    "Flags may be written with - or _. A switch --x is turned off with --no-x; a flag given twice "
    "counts the last time. With --mock-data alone a small model trains in seconds."
)


def help_text(cls: type, table: Mapping[str, Leaf], program: str) -> str:
    """The whole page."""
    lines = [f"python {program} [flags]", ""]
    lines += [title, ""] if (title := _title(cls)) else []
    lines += textwrap.wrap(_INTRO, WIDTH)
    sections: dict[type, list[Leaf]] = {}
    for leaf in table.values():
        sections.setdefault(leaf.section, []).append(leaf)
    for section, members in sections.items():
        lines += ["", f"{_title(section) or section.__name__}:"]
        docs = field_docs(section)
        for leaf in members:
            lines += _entry(leaf, docs.get(leaf.name, ""))
    return "\n".join(lines)


def _title(cls: type) -> str:
    """First line of the docstring; a dataclass without one has its signature there."""
    doc = cls.__doc__ or ""
    return "" if doc.startswith(f"{cls.__name__}(") else doc.strip().split("\n")[0].rstrip(".")


def field_docs(cls: type) -> dict[str, str]:
    """The string literal under each field of a dataclass and of its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
            body = tree.body[0].body
            for statement, below in pairwise(body):
                if isinstance(statement, ast.AnnAssign) and _is_string(below):
                    docs[statement.target.id] = " ".join(below.value.value.split())
    return docs


def _is_string(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _entry(leaf: Leaf, doc: str) -> list[str]:
    """A switch that is on by default is listed by the flag that clears it, and described so."""
    on = leaf.item is bool and leaf.field.default
    head = f"  {flag_of(f'no_{leaf.name}') if on else leaf.flag}{_values(leaf)}"
    body = f"{doc} {_default(leaf)}".strip()
    text = textwrap.wrap(body, WIDTH - COLUMN, break_on_hyphens=False) or [""]
    if len(head) < COLUMN - 1:
        head, text = head.ljust(COLUMN) + text[0], text[1:]
    return [head, *(" " * COLUMN + line for line in text)]


def _values(leaf: Leaf) -> str:
    if leaf.item is bool:
        return ""
    one = "|".join(map(str, leaf.choices)) or {int: "N", float: "X", str: "TEXT"}[leaf.item]
    if leaf.counts is None:
        return f" {one}"
    least, most = leaf.counts
    return f" {one}" * least + ("" if most else " ...")


def _default(leaf: Leaf) -> str:
    notes = []
    if leaf.required:
        notes.append("required")
    elif leaf.item is not bool and leaf.field.default is not None:
        notes.append(_number(leaf.field.default))
    if "mock" in leaf.field.metadata:
        notes.append(f"{_number(leaf.field.metadata['mock'])} with --mock-data")
    return f"[{'; '.join(notes)}]" if notes else ""


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
