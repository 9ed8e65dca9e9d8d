"""What a resumed run is told of its training sets, from what the checkpoint knows of them."""

import pytest

from data.known_sets import FEW, change_lines, few, joined, leak_line, moves


def known(documents=10, tokens=80, training=(0, 10), seen=None):
    return {
        "documents": documents,
        "tokens": tokens,
        "training": list(training),
        "seen": list(seen or training),
    }


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"/x/t": 5}, {"/x/t": 5}, {}),
        ({"/x/t": 5}, {"/y/t": 5}, {"/x/t": "/y/t"}),
        ({"/x/t": 5}, {"/y/t": 6}, {}),
        ({"/x/t": 5}, {"/y/u": 5}, {}),
        # two of one name: by the folder, or else by the size, or else not
        ({"/x/en/t": 5, "/x/fr/t": 5}, {"/y/fr/t": 5}, {"/x/fr/t": "/y/fr/t"}),
        ({"/x/1/t": 5, "/x/2/t": 6}, {"/y/t": 6, "/z/t": 5}, {"/x/1/t": "/z/t", "/x/2/t": "/y/t"}),
        ({"/x/1/t": 5, "/x/2/t": 5}, {"/y/t": 5}, {}),
        ({"/x/t": 5}, {"/y/t": 5, "/z/t": 5}, {}),
        # one that is still there has not moved
        ({"/x/t": 5}, {"/x/t": 5, "/y/t": 5}, {}),
    ],
)
def test_moves(before, now, expected):
    before, now = ({p: known(1, n) for p, n in each.items()} for each in (before, now))
    assert moves(before, before, now) == expected


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"a": known()}, {"a": known()}, []),
        ({"a": known()}, {"b": known()}, []),
        (
            {"a": known()},
            {"a": known(12, 9000)},
            ["a has 12 documents of 9,000 tokens, and had 10 documents of 80 tokens", "come again"],
        ),
        ({"a": known()}, {"a": known(10, 81)}, ["10 documents of 81 tokens, and had 10 "]),
        (
            {"a": known(training=(0, 8))},
            {"a": known(training=(0, 9))},
            ["a is trained on with its documents 0 to 8, and was with 0 to 7: ", "come again"],
        ),
        (
            {"/x/a": known()},
            {"/y/a": known(12, 90)},
            ["/y/a has 12 ", "and /x/a had 10 ", "it is another set, read from its first sample"],
        ),
        # a set that was left long ago, beside one of today by its name
        ({"/x/a": known(), "/y/a": known(12, 90)}, {"/y/a": known(12, 90)}, []),
    ],
)
def test_change_lines(before, now, words):
    lines = list(change_lines(before, now))
    assert len(lines) == bool(words)
    assert all(word in lines[0] for word in words)


def test_what_was_seen_is_kept_until_the_data_is_another():
    first = known(training=(2, 8))
    second = joined(first, known(training=(0, 4)))
    assert second == known(training=(0, 4), seen=(0, 8))
    assert joined(second, known(training=(5, 10))) == known(training=(5, 10), seen=(0, 10))
    assert joined(second, known(11, 90, (5, 10))) == known(11, 90, (5, 10))
    assert joined(None, first) == first


@pytest.mark.parametrize(
    ("before", "now", "held_out", "words"),
    [
        (known(training=(0, 8)), known(training=(0, 8)), (8, 10), ""),
        (known(training=(0, 8)), known(training=(0, 5)), (5, 9), "a: documents 5 to 7 were"),
        (
            known(training=(0, 5), seen=(0, 8)),
            known(training=(0, 5)),
            (7, 10),
            "a: documents 7 to 7",
        ),
        (known(training=(0, 8)), None, (0, 10), "a: documents 0 to 7 were trained on earlier"),
        # one set to train and to evaluate on is what was asked for
        (known(), known(), (0, 10), ""),
        (known(11, 81, (0, 8)), known(training=(0, 5)), (5, 9), ""),
    ],
)
def test_documents_trained_on_that_are_held_out_now(before, now, held_out, words):
    said = leak_line("a", before, now, known(training=held_out), "validation")
    assert words in said and bool(said) == bool(words)


def test_a_blend_of_hundreds_gets_few_lines():
    lines = [f"line {i}" for i in range(FEW + 2)]
    assert few(lines) == [*lines[:FEW], "and the same of 2 more sets"]
    assert few(lines[:FEW]) == lines[:FEW]
