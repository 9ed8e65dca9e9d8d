"""From fields to flags and back: core/config.py, its table, help and records, on a small recipe."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import pytest

from core.config import parse, recipe
from core.config_help import field_docs, help_text
from core.config_record import differences, from_json, to_argv, to_json
from core.flag_table import leaves


@dataclass(kw_only=True)
class Shape:
    """Shape of the thing"""

    num_layers: int = field(metadata={"mock": 8})
    """Layers in all."""
    width: int = field(metadata={"mock": 64})
    heads: int = 4
    """Divides
    the width."""
    style: Literal["plain", "fancy"] = "plain"
    use_bias: bool = True
    swiglu: bool = False

    def problems(self) -> Iterator[str]:
        if self.width % self.heads:
            yield f"--width {self.width} does not divide by --heads {self.heads}"


@dataclass(kw_only=True)
class Run:
    lr: float = field(metadata={"mock": 1e-3})
    steps: int | None = field(default=None, metadata={"mock": 10, "unless": "samples"})
    samples: int | None = None
    log_interval: int = field(default=100, metadata={"mock": 1})
    data_path: tuple[str, ...] | None = None
    ramp: tuple[int, int, int] | None = None
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    mock_data: bool = False

    def problems(self) -> Iterator[str]:
        if self.steps is not None and self.samples is not None:
            yield f"--steps {self.steps} and --samples {self.samples} exclude each other"


@recipe
@dataclass(kw_only=True)
class Recipe:
    """Trains a thing."""

    shape: Shape
    run: Run


NEEDED = "--num-layers 2 --width 8 --lr 0.1 "


def read(line: str, **options) -> Recipe:
    return parse(Recipe, shlex.split(line), program="train.py", **options)


def problems_of(line: str, capsys: pytest.CaptureFixture, **options) -> list[str]:
    """The sentences printed for a bad line, without heading and example."""
    with pytest.raises(SystemExit) as caught:
        read(line, **options)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    found = [text.strip() for text in lines if text.startswith("  ")]
    plural = "s" if len(found) > 1 else ""
    assert lines[0] == f"train.py: {len(found)} problem{plural} with the command line"
    return found


# ------------------------------------------------------------------------------------ good lines


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--heads 2", "heads", 2),
        ("--heads=2", "heads", 2),
        ("--heads 1 --heads 2", "heads", 2),
        ("--heads no --heads 2", "heads", 2),
        ("--style fancy", "style", "fancy"),
        ("--swiglu", "swiglu", True),
        ("--swiglu --no-swiglu", "swiglu", False),
        ("--no-use-bias", "use_bias", False),
        ("--no_use_bias", "use_bias", False),
        ("--log_interval 7", "log_interval", 7),
        ("--lr 3e-4", "lr", 3e-4),
        ("--lr -1", "lr", -1.0),
        ("--data-path a", "data_path", ("a",)),
        ("--data-path 1.0 a 2.0 b --swiglu", "data_path", ("1.0", "a", "2.0", "b")),
        ("--data-path a=b", "data_path", ("a=b",)),
        ("--data-path=a=b", "data_path", ("a=b",)),
        ("--ramp 1 2 3", "ramp", (1, 2, 3)),
        ("", "samples", None),
    ],
)
def test_values(line: str, name: str, value: object) -> None:
    config = read(NEEDED + line)
    section = config.shape if hasattr(config.shape, name) else config.run
    found = getattr(section, name)
    assert found == value and type(found) is type(value)


def test_given_names_the_flags_that_were_typed() -> None:
    assert read(NEEDED + "--no-use-bias").given == {"num_layers", "width", "lr", "use_bias"}
    with_one_more = read(NEEDED + "--no-use-bias --use-mcore-models")
    assert with_one_more.given == {"num_layers", "width", "lr", "use_bias", "use_mcore_models"}


def test_mock_data_supplies_what_is_not_typed() -> None:
    config = read("--mock-data --width 32")
    assert (config.shape.num_layers, config.shape.width) == (8, 32)
    assert (config.run.lr, config.run.steps, config.run.log_interval) == (1e-3, 10, 1)
    assert config.given == {"mock_data", "width"}


def test_mock_data_does_not_contradict_what_is_typed() -> None:
    run = read("--mock-data --samples 5").run
    assert (run.steps, run.samples) == (None, 5)


# ------------------------------------------------------------------------------------- bad lines


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--heads two", "--heads two is not a whole number"),
        ("--heads 2.0", "--heads 2.0 is not a whole number; write 2"),
        ("--heads 1e3", "--heads 1e3 is not a whole number; write 1000"),
        ("--heads 2.5", "--heads 2.5 is not a whole number"),
        ("--heads 1e999", "--heads 1e999 is not a whole number"),
        ("--heads", "--heads takes one value, got none"),
        ("--heads 1 2", "--heads takes one value, got 2: 1 2"),
        ("--lr x", "--lr x is not a number"),
        ("--lr nan", "--lr nan is not a finite number"),
        ("--lr inf", "--lr inf is not a finite number"),
        ("--style odd", "--style odd is not one of plain, fancy"),
        ("--ramp 1 2", "--ramp takes 3 values, got 2: 1 2"),
        ("--data-path", "--data-path takes one value or more, got none"),
        ("--data-path=", "--data-path is empty"),
        ("--swiglu true", "--swiglu takes no value, got true; --swiglu is on, --no-swiglu is off"),
        ("--swiglu=0", "--swiglu takes no value, got 0; --swiglu is on, --no-swiglu is off"),
        ("--num-layer 2", "--num-layer is not a flag; did you mean --num-layers?"),
        ("--no-use-bia", "--no-use-bia is not a flag; did you mean --no-use-bias?"),
        ("--zzz 1 2", "--zzz is not a flag; --help lists them all"),
        ("--num-expert 2", "--num-expert is not a flag; did you mean --num-experts, Megatron's?"),
        ("--no-heads", "--no-heads is not a flag; did you mean --heads?"),
        ("--", "-- is not a flag; --help lists them all"),
        ("--width 9", "--width 9 does not divide by --heads 4"),
    ],
)
def test_one_problem(line: str, sentence: str, capsys: pytest.CaptureFixture) -> None:
    assert problems_of(NEEDED + line, capsys) == [sentence]


def test_a_word_before_any_flag(capsys: pytest.CaptureFixture) -> None:
    assert problems_of("train " + NEEDED, capsys) == ["train belongs to no flag"]


def test_no_abbreviations(capsys: pytest.CaptureFixture) -> None:
    sentence = "--num-lay is not a flag; did you mean --num-layers?"
    assert problems_of(NEEDED + "--num-lay 3", capsys) == [sentence]


def test_all_problems_at_once_in_the_users_words(capsys: pytest.CaptureFixture) -> None:
    line = "--num_layers 2 --width 9 --foo --lr x --moe-grouped-gemm --steps 1 --samples 2"
    assert problems_of(line, capsys, checks=[lambda config: ["--num-layers 2 is too few"]]) == [
        "--foo is not a flag; --help lists them all",
        "--moe-grouped-gemm is a known flag but refused: only dense GPT is supported, without "
        "expert layers",
        "--lr x is not a number",
        "--width 9 does not divide by --heads 4",
        "--steps 1 and --samples 2 exclude each other",
        "--num_layers 2 is too few",
    ]


def test_a_stand_in_for_a_missing_value_is_not_complained_about(capsys) -> None:
    assert problems_of("--heads 7 --num-layers x", capsys) == [
        "--num-layers x is not a whole number",
        "missing: --width, --lr",
    ]


def test_values_of_mock_data_are_marked(capsys: pytest.CaptureFixture) -> None:
    sentence = "--width 64 (of --mock-data) does not divide by --heads 5"
    assert problems_of("--mock-data --heads 5", capsys) == [sentence]


@pytest.mark.parametrize(
    ("line", "example"),
    [
        ("", "python train.py --num-layers 8 --width 64 --lr 0.001"),
        ("--width 4", "python train.py --width 4 --num-layers 8 --lr 0.001"),
        ("--data-path 'a b'", "python train.py --data-path 'a b' --num-layers 8 --width 64 --lr"),
    ],
)
def test_missing_flags_come_with_a_line_that_works(line: str, example: str, capsys) -> None:
    problems_of(line, capsys)
    with pytest.raises(SystemExit):
        read(line)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"For example: {example}")
    assert read(" ".join(last.split(" ")[4:])).run.lr == 1e-3


def test_no_line_is_promised_when_none_works(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        read("--foo")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "Values to start from: --num-layers 8 --width 64 --lr 0.001"


def test_other_ranks_leave_in_silence(capsys: pytest.CaptureFixture) -> None:
    for line, code in (("--foo", 2), ("--help", 0)):
        with pytest.raises(SystemExit) as caught:
            read(line, report=False)
        assert caught.value.code == code
    assert capsys.readouterr() == ("", "")


# ------------------------------------------------------------------------------- other spellings


def test_old_spelling_stands_for_the_new_one() -> None:
    config = read(NEEDED + "--use-rotary-position-embeddings")
    assert config.run.position_embedding_type == "rope"
    note = "--use-rotary-position-embeddings: old spelling of --position-embedding-type rope"
    assert config.notices == (note,)
    assert read(NEEDED + "--no-position-embedding").run.position_embedding_type == "none"


def test_old_spellings_together() -> None:
    both = read(NEEDED + "--no-position-embedding --use-rotary-position-embeddings")
    assert both.run.position_embedding_type == "rope"
    new = read(NEEDED + "--no-position-embedding --position-embedding-type rope")
    assert new.run.position_embedding_type == "rope"
    note = "--no-position-embedding has no effect: --position-embedding-type says it"
    assert new.notices == (note,)


def test_old_spelling_that_contradicts_the_new_one(capsys: pytest.CaptureFixture) -> None:
    line = NEEDED + "--no-position-embedding --position-embedding-type learned_absolute"
    assert problems_of(line, capsys) == [
        "--no-position-embedding (old spelling of --position-embedding-type none) contradicts "
        "--position-embedding-type learned_absolute"
    ]


# -------------------------------------------------------------------------------------- the table


@dataclass(kw_only=True)
class Twice:
    lr: float = 0.0


@dataclass(kw_only=True)
class Negated:
    no_use_bias: bool = False


@dataclass(kw_only=True)
class Listed:
    names: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Mixed:
    pair: tuple[int, str] = (1, "a")


@dataclass(kw_only=True)
class Either:
    value: int | str = 1


@dataclass(kw_only=True)
class Bare:
    value: int


@dataclass(kw_only=True)
class TwoOfOneName:
    run: Run
    twice: Twice


@dataclass(kw_only=True)
class NegationTaken:
    shape: Shape
    negated: Negated


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (TwoOfOneName, "--lr is declared by Run and by Twice"),
        (NegationTaken, "--no-use-bias is a leaf and the negation of another"),
        (Listed, "default_factory"),
        (Mixed, "mixes types"),
        (Either, "no form on a command line"),
        (Bare, "required"),
    ],
)
def test_what_no_recipe_may_declare(cls: type, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        recipe(cls)


# -------------------------------------------------------------------------------- help and records


def test_help_is_the_fields() -> None:
    assert field_docs(Shape)["heads"] == "Divides the width."
    text = help_text(Recipe, leaves(Recipe), "train.py")
    for line in (
        "Trains a thing",
        "Shape of the thing:",
        "  --num-layers N                            Layers in all. [required; 8 with --mock-data]",
        "  --heads N                                 Divides the width. [4]",
        "  --style plain|fancy                       [plain]",
        "  --no-use-bias",
        "  --swiglu",
        "  --ramp N N N",
        "  --data-path TEXT ...",
    ):
        assert line in [text.rstrip() for text in text.splitlines()]
    assert max(map(len, text.splitlines())) <= 100


def test_help_wins_over_problems(capsys: pytest.CaptureFixture) -> None:
    for line in ("--help", "-h", "--foo --heads -h"):
        with pytest.raises(SystemExit) as caught:
            read(line)
        assert caught.value.code == 0
        assert capsys.readouterr().out.startswith("python train.py [flags]")


LINES = [
    NEEDED,
    NEEDED + "--swiglu --no-use-bias --heads 2 --ramp 1 2 3 --data-path a 'b c' --log-interval 1",
    "--mock-data",
    "--mock-data --samples 8 --width 16 --log-interval 100",
    NEEDED + "--lr 0.1000000000000000055511151231257827 --use-rotary-position-embeddings",
]


@pytest.mark.parametrize("line", LINES)
def test_round_trips(line: str) -> None:
    config = read(line)
    assert parse(Recipe, to_argv(config)) == config
    record = json.loads(json.dumps(to_json(config)))
    assert from_json(Recipe, record) == config
    assert differences(record, to_json(config)) == []


def test_argv_is_short() -> None:
    assert to_argv(read("--mock-data --samples 8 --heads 4")) == ["--samples", "8", "--mock-data"]


def test_differences_name_flag_saved_and_given() -> None:
    saved = to_json(read(NEEDED))
    given = to_json(read(NEEDED + "--width 16 --swiglu --ramp 1 2 3"))
    assert [str(difference) for difference in differences(saved, given)] == [
        "--width: saved 8, given 16",
        "--swiglu: saved False, given True",
        "--ramp: saved None, given [1, 2, 3]",
    ]
    assert differences(saved["run"], given["run"])[0].name == "ramp"


def test_a_record_of_another_version_is_refused_by_name() -> None:
    record = to_json(read(NEEDED))
    record["shape"]["depth"] = 1
    with pytest.raises(ValueError, match="Shape has no depth"):
        from_json(Recipe, record)
    del record["shape"]["depth"], record["shape"]["width"]
    with pytest.raises(ValueError, match="lacks width"):
        from_json(Recipe, record)
    del record["run"]["samples"]
    record["shape"]["width"] = 8
    assert from_json(Recipe, record) == read(NEEDED)
