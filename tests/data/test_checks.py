"""Every bad input of a start gets its sentence."""

import numpy as np
import pytest

from data.checks import mix_problems, problems, token_range
from data.config import GPTDataConfig
from data.flag_checks import data_problems
from data.indexed import IndexedBuilder, IndexedDataset
from data.sets import Mix, mixes


@pytest.fixture
def prefix(tmp_path):
    with IndexedBuilder(tmp_path / "a", np.uint16) as builder:
        for d in range(10):
            builder.add(np.arange(d, d + 10))
    return tmp_path / "a"


def test_good_data_has_no_problem(prefix):
    assert list(problems(prefix, 9, 19, "8,1,1", ("train", "valid", "test"))) == []


def test_missing(tmp_path):
    (sentence,) = problems(tmp_path / "none", 8)
    assert "none.idx does not exist" in sentence


def test_vocabulary_smaller_than_the_data(prefix):
    (sentence,) = problems(prefix, 9, 18)
    assert "token id 18, outside the vocabulary of 18 tokens" in sentence


def test_negative_and_float_tokens(tmp_path):
    with IndexedBuilder(tmp_path / "n", np.int32) as builder:
        builder.add(np.array([-1, 2, 3]))
    (sentence,) = problems(tmp_path / "n", 2, 18, "1")
    assert "token id -1" in sentence
    with IndexedBuilder(tmp_path / "f", np.float32) as builder:
        builder.add(np.array([1.0, 2, 3]))
    (sentence,) = problems(tmp_path / "f", 2, 18, "1")
    assert "float32 values" in sentence


def test_empty_split_that_is_asked_for(prefix):
    """C052: a split without tokens is refused when evaluation needs it, else it is nobody's
    matter."""
    assert list(problems(prefix, 9, split="9998,1,1")) == []
    sentences = list(problems(prefix, 9, split="9998,1,1", needed=("train", "valid", "test")))
    assert len(sentences) == 2
    assert "gives valid 0 of 10 documents with 0 tokens" in sentences[0]


def test_all_problems_at_once(prefix):
    sentences = list(problems(prefix, 1000, 5, "8,1,1", ("train", "valid")))
    assert len(sentences) == 3 and "80 tokens" in sentences[1] and "takes 1001" in sentences[1]


def test_bad_split_is_a_sentence(prefix):
    assert any("--split x" in sentence for sentence in problems(prefix, 9, split="x"))


@pytest.mark.parametrize(("place", "budget"), [(0, 32_768), (99_999, 32_768), (50_000, 1 << 22)])
def test_a_large_file_is_sampled_at_both_ends_and_a_small_one_read(tmp_path, place, budget):
    tokens = np.zeros(100_000, np.uint16)
    tokens[place] = 7
    with IndexedBuilder(tmp_path / "a", np.uint16) as builder:
        builder.add(tokens)
    assert token_range(IndexedDataset(tmp_path / "a"), budget) == (0, 7)


def test_own_data_for_each_split_and_a_blend(prefix, tmp_path):
    a, none = str(prefix), str(tmp_path / "none")
    found = mixes(train_data_path=["1", a, "0", none], valid_data_path=["1", a, "1", none])
    assert list(mix_problems(found, 99, 19)) == []
    (sentence,) = mix_problems(found, 99, 19, ("train", "valid"))
    assert "none.idx does not exist" in sentence
    first, second = mix_problems({"train": Mix((a,))}, 100, 19, ("train", "test"))
    assert "train has 10 of 10 documents with 100 tokens" in first
    assert "no data for test; give --test-data-path" in second


def test_a_split_that_is_none_is_reported_once(tmp_path):
    """By the config's own problems; the files are not looked at then."""
    config = GPTDataConfig(data_path=[str(tmp_path / "none")], split="a,b")
    assert sum("--split a,b" in sentence for sentence in config.problems()) == 1
    assert list(data_problems(config, 8, 100, evaluates=True)) == []
    config = GPTDataConfig(data_path=[str(tmp_path / "none")])
    assert len(list(data_problems(config, 8, 100, evaluates=True))) == 1
