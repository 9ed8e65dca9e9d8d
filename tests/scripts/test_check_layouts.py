"""The matrix of scripts/check_layouts.py, and that its comparison bites."""

from collections import Counter
from dataclasses import replace

import pytest

from scripts.check_layouts import MICROBATCHES, cases, compare, deviation, layouts, main, parse
from tests.layouts import Outcome

ONE = Outcome([4.0, 3.0, 3.5], [1.0, 2.0], {"a": "x", "b": "y"}, {"a": "z"}, ({1: 2}, {1: 2}))


def test_the_matrix():
    every = list(layouts())
    assert Counter(layout.pp for _, layout in every) == {1: 6, 2: 24, 4: 16}
    assert len({layout for _, layout in every}) == len(every) == 46
    for size, layout in every:
        dp = size // (layout.tp * layout.pp)
        assert layout.global_batch_size == layout.micro_batch_size * dp * MICROBATCHES
        assert layout.placement(8).chunks == layout.chunks
    assert len(cases(parse([]))) == 184
    assert all(layout.pp == 4 for *_, layout in cases(parse(["--only", "pp=4"])))


def test_every_value_of_every_axis_is_in_the_quick_sample():
    sample = cases(parse(["--quick"]))
    for field in ("tp", "sequence_parallel", "pp", "chunks", "schedule"):
        whole = {getattr(layout, field) for _, layout in layouts()}
        assert {getattr(layout, field) for *_, layout in sample} == whole
    assert len({(name, kind) for name, kind, *_ in sample}) == 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, []),
        ({"losses": [4.0, 3.0, 3.5000001]}, ["deviation above 1e-12"]),
        ({"norms": [1.0, float("nan")]}, ["deviation above 1e-12"]),
        ({"norms": [1.0]}, ["deviation above 1e-12"]),
        ({"initial": {"a": "x", "b": "other"}}, ["initial weights"]),
        ({"initial": {"a": "x", "b": "y", "c": ""}}, ["parameters", "initial weights"]),
        ({"final": {"a": "other"}}, ["copies of a"]),
        ({"traffic": ({1: 2}, {1: 3})}, ["traffic"]),
    ],
)
def test_what_differs_is_told(change, told):
    _, _, wrong = compare([ONE, replace(ONE, **change)], ONE, 1e-12)
    assert wrong == told


def test_deviation_is_relative():
    assert deviation([2.0, 4.4], [2.0, 4.0]) == pytest.approx(0.1)
    assert deviation([], [1.0]) == float("inf")


def test_no_layout_is_bad_input(capsys):
    assert main(["--only", "pp=3"]) == 2
    assert "no layout holds 'pp=3'" in capsys.readouterr().err
