"""From data flags to data sets."""

import json
import shutil
from fractions import Fraction

import numpy as np
import pytest

from data.gpt import GPTDataset
from data.indexed import DataError, IndexedBuilder
from data.sets import Mix, mixes, named_mixes, open_mix


@pytest.fixture
def pairs(tmp_path):
    """Two pairs: a of 10 documents of tokens 1.., b of 20 documents of tokens 1001.. ."""
    for name, documents, base in (("a", 10, 1), ("b", 20, 1001)):
        with IndexedBuilder(tmp_path / name, np.uint16) as builder:
            for d in range(documents):
                builder.add(np.full(8, base + d))
    return str(tmp_path / "a"), str(tmp_path / "b")


def make(prefix, documents):
    return GPTDataset(prefix, documents, 4, seed=1)


def origin(sample):
    return "b" if sample["tokens"][0] > 1000 else "a"


def test_a_blend_and_a_split(pairs):
    a, b = pairs
    found = mixes(data_path=["1", a, "3", b], split="8,2,0")
    assert set(found) == {"train", "valid", "test"}
    train, valid = (open_mix(found[name], make, threads=2) for name in ("train", "valid"))
    origins = [origin(train[n]) for n in range(100)]
    assert origins.count("a") == 25
    tokens = {int(t) for n in range(60) for t in valid[n]["tokens"]}
    assert tokens == {9, 10, 1017, 1018, 1019, 1020}


def test_own_data_for_each_split(pairs, tmp_path):
    a, b = pairs
    lists = tmp_path / "lists.json"
    lists.write_text(json.dumps({"train": [a], "valid": ["1", a, "1", b]}))
    for found in (
        mixes(train_data_path=[a], valid_data_path=["1", a, "1", b]),
        mixes(per_split_data_args_path=str(lists)),
    ):
        assert found == {"train": Mix((a,)), "valid": Mix((a, b), (Fraction(1), Fraction(1)))}
        assert (
            len({int(t) for n in range(40) for t in open_mix(found["train"], make)[n]["tokens"]})
            == 10
        )


def test_words_from_a_file(pairs, tmp_path):
    (tmp_path / "words").write_text(f"0.5 {pairs[0]}\n0.5 {pairs[1]}\n")
    by_file = mixes(data_args_path=str(tmp_path / "words"))
    assert by_file == mixes(data_path=["0.5", pairs[0], "0.5", pairs[1]])


def test_without_weights_all_sets_are_passed_through_equally(pairs):
    mix = Mix(pairs)
    data = open_mix(mix, make)
    assert [origin(data[n]) for n in range(30)].count("a") == 10
    assert data.history == [[0, {pairs[0]: "80", pairs[1]: "160"}]]


def test_how_often_a_run_passes_through_each_set(pairs):
    """C050: a blend says what it uses of each set, in samples and epochs."""
    data = open_mix(Mix(pairs, (Fraction(1), Fraction(3))), make)
    assert list(data.uses(80)) == [
        f"{pairs[0]}: 20 samples, 1 epochs",
        f"{pairs[1]}: 60 samples, 1.5 epochs",
    ]


def test_several_validation_sets_by_name(pairs, tmp_path):
    named = named_mixes(Mix(pairs, None, "8,1,1", 1))
    assert named == {"a": Mix(pairs[:1], None, "8,1,1", 1), "b": Mix(pairs[1:], None, "8,1,1", 1)}
    assert list(named_mixes(Mix(("x/t", "y/t")))) == ["x/t", "y/t"]


def test_resuming_with_another_blend_repeats_nothing(pairs):
    a, b = pairs
    first = open_mix(Mix((a,)), make)
    used = [tuple(first[n]["tokens"]) for n in range(7)]
    saved = json.loads(json.dumps(first.history))
    again = open_mix(Mix((a, b), (Fraction(1), Fraction(1))), make, earlier=saved, start=7)
    assert again.history == [[0, {a: "80"}], [7, {a: "1", b: "1"}]]
    later = [again[n] for n in range(7, 33)]
    from_a = [tuple(s["tokens"]) for s in later if origin(s) == "a"]
    plain = GPTDataset(a, None, 4, seed=1)
    assert used + from_a == [tuple(plain[n]["tokens"]) for n in range(7 + len(from_a))]
    assert len(from_a) == 13
    without = open_mix(Mix((b,)), make, earlier=again.history, start=33)
    assert without.locate(33) == (without.prefixes.index(b), 13)
    with pytest.raises(IndexError, match="before the change of blend at 33"):
        without[0]


def test_resuming_with_the_same_blend_is_no_change(pairs):
    mix = Mix(pairs, (Fraction(1), Fraction(2)))
    saved = open_mix(mix, make).history
    doubled = Mix(pairs, (Fraction(2), Fraction(4)))
    assert open_mix(doubled, make, earlier=saved, start=9).history == saved


def passed(mix, first, last, **resumed):
    """The (set, sample) of a part of a run, and what it passes on to the next."""
    data = open_mix(mix, make, start=first, **resumed)
    names = [prefix.rpartition("/")[2] for prefix in data.prefixes]
    found = [(names[which], k) for which, k in map(data.locate, range(first, last))]
    return found, {"earlier": data.history, "known": json.loads(json.dumps(data.known))}


@pytest.mark.parametrize("weights", [None, (Fraction(1), Fraction(1))])
@pytest.mark.parametrize("cut", [7, 8])
def test_resuming_with_the_sets_in_another_order(tmp_path, weights, cut):
    for name in "ab":
        with IndexedBuilder(tmp_path / name, np.uint16) as builder:
            for _ in range(10):
                builder.add(np.ones(8))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    whole, _ = passed(Mix((a, b), weights), 0, 20)
    first, kept = passed(Mix((a, b), weights), 0, cut)
    second, _ = passed(Mix((b, a), weights), cut, 20, **kept)
    assert first + second == whole


def test_resuming_without_the_first_of_three_sets(tmp_path):
    """The part before is counted in its own order, whatever is opened now."""
    a, b, c = (str(tmp_path / name) for name in "abc")
    for prefix in (a, b, c):
        with IndexedBuilder(prefix, np.uint16) as builder:
            for _ in range(10):
                builder.add(np.ones(8))
    for cut in range(2, 12):
        first, kept = passed(Mix((a, b, c)), 0, cut)
        second, _ = passed(Mix((c, b)), cut, 30, **kept)
        for name in "abc":
            of_it = [k for which, k in first + second if which == name]
            assert of_it == list(range(len(of_it)))


def test_a_moved_set_is_known_by_its_name_and_size(pairs, tmp_path):
    a, b = pairs
    _, kept = passed(Mix((a,)), 0, 7)
    here, other = tmp_path / "here", tmp_path / "other"
    for folder, source in ((here, a), (other, b)):
        folder.mkdir()
        for kind in ("bin", "idx"):
            shutil.copy(f"{source}.{kind}", folder / f"a.{kind}")
    same = open_mix(Mix((str(here / "a"),)), make, start=7, **kept)
    assert same.moved == {a: str(here / "a")}
    assert (same.history, same.locate(7)) == ([[0, {str(here / "a"): "80"}]], (0, 7))
    unlike = open_mix(Mix((str(other / "a"),)), make, start=7, **kept)
    assert unlike.moved == {} and len(unlike.history) == 2
    assert unlike.locate(7) == (unlike.prefixes.index(str(other / "a")), 0)
    # of an older checkpoint the size is not known
    old = open_mix(Mix((str(other / "a"),)), make, start=7, earlier=kept["earlier"])
    assert old.moved == {a: str(other / "a")}


def test_a_set_named_by_another_spelling_of_its_path(pairs, monkeypatch, tmp_path):
    _, kept = passed(Mix(pairs), 0, 7)
    monkeypatch.chdir(tmp_path)
    second = open_mix(Mix(("a", "./b")), make, start=7, **kept)
    assert second.moved == {pairs[0]: "a", pairs[1]: "./b"} and len(second.history) == 1


def test_a_set_without_share_is_not_opened(pairs):
    data = open_mix(Mix((pairs[0], "/nowhere"), (Fraction(1), Fraction(0))), make)
    assert {data.locate(n)[0] for n in range(20)} == {0}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "got none"),
        ({"data_path": ["a"], "train_data_path": ["a"]}, "got --data-path; --train"),
        ({"data_path": ["-1", "a"]}, "negative"),
        ({"data_args_path": "/nowhere"}, "--data-args-path /nowhere"),
        ({"per_split_data_args_path": "/nowhere"}, "--per-split-data-args-path /nowhere"),
    ],
)
def test_refusals(flags, message):
    with pytest.raises(DataError, match=message):
        mixes(**flags)


@pytest.mark.parametrize("content", ["[]", "{", '{"valid": []}', '{"trian": ["a"]}'])
def test_bad_lists_are_refused(tmp_path, content):
    (tmp_path / "lists.json").write_text(content)
    with pytest.raises(DataError, match=r"--per-split-data-args-path .*lists\.json: "):
        mixes(per_split_data_args_path=str(tmp_path / "lists.json"))
