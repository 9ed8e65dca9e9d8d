"""Command line <-> dataclasses: the flags, their help and their defaults are the fields.

Pure: standard library only, so that `python pretrain_gpt.py --help` costs milliseconds. Neighbours:
core/flag_table.py says what a field's flag looks like; core/config_help.py prints the help;
core/config_record.py turns configs into argv and JSON and compares them; core/known_flags.py knows
the Megatron flags that are no fields; core/layout_checks.py compares sections with each other.

A section, and the recipe itself, may define `problems(self) -> Iterator[str]`: one sentence per
setting that cannot work. A sentence spells every flag it is about; `parse` prints all of them
together with what could not be read, and leaves with exit code 2.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar, get_type_hints

from core import known_flags
from core.flag_table import MOCK_SWITCH, Leaf, flag_of, leaves, recipe, tokens

__all__ = ["parse", "recipe", "typed_values"]

T = TypeVar("T")
Check = Callable[[Any], Iterable[str]]

EXIT_BAD_INPUT = 2  # as argparse's


# -------------------------------------------------------------------------------- reading one line


class _Typed(NamedTuple):
    word: str  # as the user typed it
    values: list[str]
    value: Any = None  # of a switch


class _Line(NamedTuple):
    """What a command line says, before any value is converted."""

    typed: dict[str, _Typed]  # by leaf; the last one wins
    accepted: set[str]  # flags without effect
    problems: list[str]
    notices: list[str]
    wants_help: bool


def _split(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(flag as typed, its values); values before any flag come with an empty word."""
    word, values = "", []
    for token in argv:
        if token.startswith("--") or token == "-h":
            if word or values:
                yield word, values
            word, equals, attached = token.partition("=")
            values = [attached] if equals else []
        else:
            values.append(token)
    if word or values:
        yield word, values


def _read(table: Mapping[str, Leaf], argv: Sequence[str]) -> _Line:
    line = _Line({}, set(), [], [], any(token in ("-h", "--help") for token in argv))
    old: dict[str, _Typed] = {}
    for word, values in _split(argv):
        name = word.removeprefix("--").replace("-", "_")
        if not word:
            line.problems.append(f"{' '.join(values)} belongs to no flag")
        elif name in table:
            line.typed[name] = _Typed(word, values, True)
        elif name.startswith("no_") and (leaf := table.get(name[3:])) and leaf.item is bool:
            line.typed[leaf.name] = _Typed(word, values, False)
        elif name in known_flags.OLD_SPELLINGS:
            old[name] = _Typed(word, values)
        else:
            _read_foreign(line, table, word, name, values)
    for name in sorted(old, key=list(known_flags.OLD_SPELLINGS).index):
        _read_old_spelling(line, known_flags.OLD_SPELLINGS[name], old[name])
    return line


def _read_old_spelling(line: _Line, old: known_flags.OldSpelling, typed: _Typed) -> None:
    """As the flag it stands for, unless that was typed too: then they must agree."""
    today = f"{flag_of(old.name)} {old.value}"
    other = line.typed.get(old.name)
    if typed.values:
        line.problems.append(f"{typed.word} takes no value, got {' '.join(typed.values)}")
    elif other is None:
        line.typed[old.name] = _Typed(typed.word, [old.value])
        line.notices.append(f"{typed.word}: old spelling of {today}")
    elif other.values in ([old.value], *([value] for value in old.agrees)):
        line.notices.append(f"{typed.word} has no effect: {flag_of(old.name)} says it")
    else:
        theirs = " ".join([other.word, *other.values])
        line.problems.append(f"{typed.word} (old spelling of {today}) contradicts {theirs}")


def _read_foreign(line: _Line, table: Mapping[str, Leaf], word: str, name: str, values: list[str]):
    """A flag that is no field: without effect, refused by name, or unknown."""
    accepted = known_flags.accepted(name) or known_flags.GPT_ONLY_ACCEPTED.get(name)
    refusal = known_flags.refusal(name) or known_flags.GPT_ONLY.get(name)
    if accepted and (not accepted.only or values in [v.split() for v in accepted.only]):
        line.notices.append(f"{word} has no effect: {accepted.why}")
        line.accepted.add(name)
    elif accepted:
        given = " ".join([word, *values])
        line.problems.append(f"{given} is not supported ({accepted.why}); {accepted.otherwise}")
    elif refusal:
        line.problems.append(f"{word} is a known flag but refused: {refusal}")
    else:
        line.problems.append(f"{word} is not a flag{_nearest(table, name)}")


def typed_values(cls: type, argv: Sequence[str]) -> dict[str, str | bool]:
    """What a command line types for each leaf, unchecked: a switch's value, else its words."""
    typed = _read(leaves(cls), argv).typed
    return {name: " ".join(word.values) or word.value for name, word in typed.items()}


def _nearest(table: Mapping[str, Leaf], name: str) -> str:
    import difflib  # needed only here: keeps a good command line fast

    ours = [*table, *(f"no_{n}" for n, leaf in table.items() if leaf.item is bool)]
    for names, remark in ((ours, ""), (known_flags.all_names(), ", Megatron's")):
        if close := difflib.get_close_matches(name, names, n=1, cutoff=0.7):
            return f"; did you mean {flag_of(close[0])}{remark}?"
    return "; --help lists them all"


# ---------------------------------------------------------------------------------- text to values


def _convert(leaf: Leaf, typed: _Typed) -> Any:
    """The value of a typed leaf. Raises ValueError with the sentence to print."""
    word, values = typed.word, typed.values
    if leaf.item is bool:
        if values:
            off = flag_of(f"no_{leaf.name}")
            got = " ".join(values)
            raise ValueError(f"{word} takes no value, got {got}; {leaf.flag} is on, {off} is off")
        return typed.value
    if leaf.counts is None:
        if len(values) != 1:
            got = f"{len(values)}: {' '.join(values)}" if values else "none"
            raise ValueError(f"{word} takes one value, got {got}")
        return _item(leaf, word, values[0])
    least, most = leaf.counts
    if len(values) < least or (most is not None and len(values) > most):
        wanted = f"{least} values" if most else "one value or more"
        got = f"{len(values)}: {' '.join(values)}" if values else "none"
        raise ValueError(f"{word} takes {wanted}, got {got}")
    return tuple(_item(leaf, word, text) for text in values)


def _item(leaf: Leaf, word: str, text: str) -> Any:
    if leaf.choices:
        by_text = {str(choice): choice for choice in leaf.choices}
        if text not in by_text:
            raise ValueError(f"{word} {text} is not one of {', '.join(by_text)}")
        return by_text[text]
    if leaf.item is str:
        if not text:
            raise ValueError(f"{word} is empty")
        return text
    try:
        value = leaf.item(text)
    except ValueError:
        kind = "a number" if leaf.item is float else f"a whole number{_whole(text)}"
        raise ValueError(f"{word} {text} is not {kind}") from None
    if leaf.item is float and not math.isfinite(value):
        raise ValueError(f"{word} {text} is not a finite number")
    return value


def _whole(text: str) -> str:
    """How to write 1e3 or 2.0 where a whole number is due."""
    try:
        return f"; write {int(float(text))}" if float(text).is_integer() else ""
    except ValueError:
        return ""


# -------------------------------------------------------------------------------------- the parser


class _Result(NamedTuple):
    config: Any
    problems: list[str]
    notices: list[str]
    missing: list[Leaf]


def _assemble(cls: type, values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(cls)
    parts = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        is_section = dataclasses.is_dataclass(hint)
        parts[field.name] = _assemble(hint, values) if is_section else values[field.name]
    return cls(**parts)


def _sentences(config: Any, checks: Sequence[Check]) -> Iterator[str]:
    """What each section, the recipe, and the caller's checks object to."""
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(part := getattr(config, field.name)):
            yield from _sentences(part, ())
    if hasattr(config, "problems"):
        yield from config.problems()
    for check in checks:
        yield from check(config)


def _mentions(sentence: str, flag: str) -> bool:
    return re.search(re.escape(flag) + r"(?![\w-])", sentence) is not None


def _evaluate(cls: type, line: _Line, checks: Sequence[Check]) -> _Result:
    table = leaves(cls)
    problems, values, unusable = list(line.problems), {}, []
    for name, typed in line.typed.items():
        try:
            values[name] = _convert(table[name], typed)
        except ValueError as error:
            problems.append(str(error))
            unusable.append(table[name])
    mock = values.get(MOCK_SWITCH, False)
    missing, mocked = [], []
    for name, leaf in table.items():
        if name not in values:
            values[name] = leaf.supplied(mock, line.typed)
            if mock and "mock" in leaf.field.metadata:
                mocked.append(leaf)
            if values[name] is dataclasses.MISSING:
                values[name] = leaf.supplied(True, ())
                missing += [leaf] if leaf not in unusable else []
    # Required values that are missing or unreadable have a stand-in, so that the checks can go on
    # to find what else is wrong; what they say about a stand-in is dropped.
    config = _assemble(cls, values)
    object.__setattr__(config, "given", frozenset(line.typed) | line.accepted)
    object.__setattr__(config, "notices", tuple(line.notices))
    if missing:
        problems.append(f"missing: {', '.join(leaf.flag for leaf in missing)}")
    for sentence in _sentences(config, checks):
        if not any(_mentions(sentence, leaf.flag) for leaf in (*unusable, *missing)):
            problems.append(_as_typed(sentence, line, mocked))
    return _Result(config, list(dict.fromkeys(problems)), line.notices, missing)


def _as_typed(sentence: str, line: _Line, mocked: list[Leaf]) -> str:
    """The sentence with each flag spelled as the user spelled it (--hidden_size), and with a mark
    where the value is not the user's."""
    for leaf in mocked:
        setting = f"{leaf.flag} {leaf.field.metadata['mock']}"
        marked = f"{setting} (of --mock-data)"
        sentence = re.sub(re.escape(setting) + r"(?![\w.])", marked, sentence)
    for name, typed in line.typed.items():
        if typed.value is not False and typed.word.replace("_", "-") == flag_of(name):
            sentence = re.sub(re.escape(flag_of(name)) + r"(?![\w-])", typed.word, sentence)
    return sentence


def parse(
    cls: type[T],
    argv: Sequence[str] | None = None,
    *,
    checks: Sequence[Check] = (),
    report: bool = True,
    program: str | None = None,
) -> T:
    """The recipe that a command line (default: sys.argv) describes.

    checks   functions of the whole recipe that yield sentences, such as layout_problems
    report   False on all ranks but one: leave as the others do, but print nothing
    program  name to print, default the file name in sys.argv[0]

    The result, which the checks see too, has two attributes more than its fields: `given`, the
    names of the leaves and of the flags without effect that were typed, and `notices`, lines to
    print once about the latter. With any problem, all of them go to standard error and
    SystemExit(2) is raised; --help prints and raises SystemExit(0).
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    program = program or PurePath(sys.argv[0]).name
    line = _read(leaves(cls), argv)
    if line.wants_help:
        from core.config_help import help_text  # ast and textwrap, for this one occasion

        if report:
            _print_to_reader(help_text(cls, leaves(cls), program))
        raise SystemExit(0)
    result = _evaluate(cls, line, checks)
    if not result.problems:
        return result.config
    if report:
        print(_message(cls, argv, result, checks, program), file=sys.stderr)
    raise SystemExit(EXIT_BAD_INPUT)


def _print_to_reader(text: str) -> None:
    """Prints what may be read by `head` or a pager that closes early."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _message(
    cls: type, argv: list[str], result: _Result, checks: Sequence[Check], program: str
) -> str:
    count = len(result.problems)
    lines = [f"{program}: {count} problem{'s' if count > 1 else ''} with the command line"]
    lines += [f"  {problem}" for problem in result.problems]
    if result.missing:
        lines.append(_remedy(cls, argv, result.missing, checks, program))
    return "\n".join(lines)


def _remedy(
    cls: type, argv: list[str], missing: list[Leaf], checks: Sequence[Check], program: str
) -> str:
    """A line that works if there is one: the one typed with what is missing, or with mock data."""
    examples = [t for leaf in missing for t in tokens(leaf, leaf.field.metadata["mock"])]
    either = [leaf for leaf in leaves(cls).values() if "unless" in leaf.field.metadata]
    length = [t for leaf in either for t in tokens(leaf, leaf.field.metadata["mock"])]
    for addition in (examples, [*examples, *length], [flag_of(MOCK_SWITCH)]):
        if not _evaluate(cls, _read(leaves(cls), [*argv, *addition]), checks).problems:
            return f"For example: {shlex.join(['python', program, *argv, *addition])}"
    return f"Values to start from: {shlex.join(examples)}"
