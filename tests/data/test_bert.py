"""BERT samples: pieces of documents, pairs, padding, determinism."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.bert import (
    NO_PAIR,
    BertDataset,
    BertPass,
    PairSampler,
    sentence_pieces,
    shorten,
    token_pieces,
)
from data.gpt import split_documents
from data.indexed import DataError, IndexedBuilder
from data.masking import Masking
from data.mock import MockBertDataset
from data.tokenizer import build_tokenizer

PAD, CLS, SEP, MASK = range(4)


def sampler(seq_length=32, prob=0.15):
    return PairSampler(seq_length, CLS, SEP, PAD, Masking(MASK, 60_000, prob=prob))


def write(prefix, documents):
    """documents: a list of lists of sentence lengths. Token = 1000 * document + place."""
    with IndexedBuilder(prefix, np.uint16) as builder:
        for d, lengths in enumerate(documents, 1):
            builder.add(1000 * d + np.arange(sum(lengths)), lengths)
    return prefix


@pytest.fixture
def prefix(tmp_path):
    """20 documents of 3 to 8 sentences of 3 to 9 tokens, one of one sentence, one empty
    sentence."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(3, 10, rng.integers(3, 9)).tolist() for _ in range(20)]
    return write(tmp_path / "a", [*documents[:10], [5], [3, 0, 4], *documents[10:]])


def true_tokens(sample):
    """The text before masking, without padding."""
    tokens = np.where(sample["loss_mask"] > 0, sample["labels"], sample["tokens"])
    return tokens[sample["padding_mask"] > 0]


def parts(sample):
    """The one or two texts of a sample."""
    tokens = true_tokens(sample)
    ends = np.flatnonzero(tokens == SEP)
    return [tokens[a:b] for a, b in zip([1, *(ends[:-1] + 1)], ends)]


@pytest.mark.parametrize("pairs", [{}, {"pairs": "next"}, {"binary_head": False}])
def test_a_pass_has_every_piece_once(prefix, pairs):
    data = BertDataset(prefix, None, 1, sampler(), **pairs)
    once = BertPass(BertDataset(prefix, None, 1, sampler(), **pairs))
    assert len(once) == data.samples_per_epoch > 20
    for n in range(len(once)):
        assert all(np.array_equal(values, data[n][name]) for name, values in once[n].items())
    filler = once[len(once)]
    assert filler.keys() == data[0].keys() and filler["is_random"] == NO_PAIR
    assert not filler["loss_mask"].any() and filler["padding_mask"].any()


def test_layout_of_a_sample(prefix):
    data = BertDataset(prefix, None, 1, sampler())
    for n in range(100):
        sample = data[n]
        real = int(sample["padding_mask"].sum())
        first, second = parts(sample)
        assert real == len(first) + len(second) + 3 <= 32 and len(first) and len(second)
        types = [0] * (len(first) + 2) + [1] * (len(second) + 1) + [0] * (32 - real)
        assert sample["token_types"].tolist() == types
        assert sample["padding_mask"].tolist() == [1] * real + [0] * (32 - real)
        assert not sample["tokens"][real:].any() and not sample["loss_mask"][real:].any()
        assert not sample["labels"][sample["loss_mask"] == 0].any()
        assert {key: (v.dtype, v.shape) for key, v in sample.items()} == {
            "tokens": (np.int64, (32,)),
            "labels": (np.int64, (32,)),
            "loss_mask": (np.float32, (32,)),
            "padding_mask": (np.int64, (32,)),
            "token_types": (np.int64, (32,)),
            "is_random": (np.int64, ()),
        }


def test_pairs_are_swapped_half_the_time(prefix):
    data = BertDataset(prefix, None, 1, sampler())
    swapped = 0
    for n in range(1000):
        sample = data[n]
        first, second = parts(sample)
        assert first[0] // 1000 == second[0] // 1000
        assert (first[0] > second[0]) == bool(sample["is_random"])
        swapped += int(sample["is_random"])
    assert abs(swapped - 500) < 5 * np.sqrt(250)


def test_next_sentence_pairs_come_from_another_document(prefix):
    data = BertDataset(prefix, None, 1, sampler(), pairs="next")
    random = 0
    for n in range(1000):
        first, second = parts(data[n])
        assert (first[0] // 1000 != second[0] // 1000) == bool(data[n]["is_random"])
        assert data[n]["is_random"] or first[0] < second[0]
        random += int(data[n]["is_random"])
    assert abs(random - 500) < 5 * np.sqrt(250)


@pytest.mark.parametrize("options", [{}, {"pairs": "next"}, {"binary_head": False}], ids=str)
def test_padding_is_known_without_reading(prefix, monkeypatch, options):
    """The middle of a pipeline needs no more; here some samples are cut to fit, others padded."""
    data = BertDataset(prefix, None, 1, sampler(20), **options)
    whole = [data[n]["padding_mask"] for n in range(200)]
    assert len({int(mask.sum()) for mask in whole}) > 3
    monkeypatch.setattr(data.file, "read", None)
    for n, mask in enumerate(whole):
        np.testing.assert_array_equal(data.part(n, {"padding_mask"})["padding_mask"], mask)
    assert data.part(0, {"padding_mask", "tokens"}) is None


def test_a_sample_depends_on_data_seed_and_n_alone(prefix):
    """Masks too: not on the order samples are read in, so not on ranks, workers or a restart."""
    data, again = (BertDataset(prefix, None, 1, sampler()) for _ in range(2))
    forwards = [data[n] for n in range(200)]
    for n in reversed(range(200)):
        assert all((again[n][key] == forwards[n][key]).all() for key in forwards[n])
    other = BertDataset(prefix, None, 2, sampler())
    assert any((other[n]["tokens"] != forwards[n]["tokens"]).any() for n in range(5))
    size = data.samples_per_epoch
    assert (data[0]["tokens"] != data[size]["tokens"]).any()


def test_every_sample_has_masks_of_its_own():
    text = np.arange(100, 120)
    masks = {
        tuple(sampler().sample([text], seed, n)["loss_mask"]) for seed in (1, 2) for n in (0, 1)
    }
    assert len(masks) == 4


def test_an_epoch_uses_every_sentence(tmp_path):
    """Without truncation (sentences of 4 tokens, room of 29): all tokens of all documents."""
    prefix = write(tmp_path / "a", [[4] * k for k in range(2, 20)])
    data = BertDataset(prefix, None, 3, sampler())
    seen = {
        t for n in range(data.samples_per_epoch) for part in parts(data[n]) for t in part.tolist()
    }
    expected = {1000 * d + i for d in range(1, 19) for i in range(4 * (d + 1))}
    lost = expected - seen
    assert len(lost) < 0.1 * len(expected)  # what hangs over the room is cut at random ends
    assert seen <= expected


def test_without_binary_head_every_token_is_there_once(prefix):
    data = BertDataset(prefix, None, 1, sampler(), binary_head=False)
    seen = []
    for n in range(data.samples_per_epoch):
        (text,) = parts(data[n])
        assert len(text) <= 30 and not data[n]["token_types"].any()
        assert (np.diff(text) == 1).all()
        seen += text.tolist()
    assert sorted(seen) == sorted(data.file.read(0, data.file.num_tokens).tolist())


def test_a_split_reads_only_its_documents(prefix):
    for documents in split_documents("12,6,4", 22):
        data = BertDataset(prefix, documents, 1, sampler(), pairs="next")
        seen = {int(p[0]) // 1000 - 1 for n in range(300) for p in parts(data[n])}
        assert seen <= set(documents) and len(seen) >= len(documents) - 2


def test_documents_of_one_sentence_are_left_out_and_all_of_them_is_an_error(tmp_path):
    """C061: on one-sentence documents the index was never finished."""
    prefix = write(tmp_path / "a", [[5], [7]])
    with pytest.raises(DataError, match="none of 2 documents has two sentences"):
        BertDataset(prefix, None, 1, sampler())
    assert BertDataset(prefix, None, 1, sampler(), binary_head=False).samples_per_epoch >= 2
    mixed = write(tmp_path / "b", [[5], [3, 4], [7]])
    data = BertDataset(mixed, None, 1, sampler(), short_prob=0)
    assert data.samples_per_epoch == 1
    assert {int(p[0]) // 1000 for n in range(5) for p in parts(data[n])} == {2}


def test_no_documents(prefix):
    with pytest.raises(DataError, match="none of 0 documents"):
        BertDataset(prefix, range(0), 1, sampler())
    with pytest.raises(DataError, match="--seq-length 4 has no room"):
        BertDataset(prefix, None, 1, sampler(4))


def naive_pieces(lengths, documents, room):
    """Sentence runs of one document after another, with plain loops; no short ones."""
    pieces = []
    for start, stop in pairwise(documents):
        windows = {}
        for i in range(start, stop):
            windows.setdefault(sum(lengths[start:i]) // room, []).append(i)
        for window in windows.values():
            begin, end = window[0], window[-1] + 1
            if end - begin == 1 and end < stop:
                end += 1
            elif end - begin == 1 and begin > start:
                begin -= 1
            if end - begin > 1 and pieces[-1:] != [(begin, end)]:
                pieces.append((begin, end))
    return pieces


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 12), max_size=6), max_size=5), st.integers(2, 15))
def test_sentence_pieces_equal_the_naive_loop(documents, room):
    lengths = [length for document in documents for length in document]
    starts = np.cumsum([0, *map(len, documents)])
    begins, ends = sentence_pieces(np.array(lengths, np.int32), starts, room, 0.0, 1)
    found = list(zip(begins.tolist(), ends.tolist()))
    assert found == naive_pieces(lengths, starts.tolist(), room)


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=6), st.integers(2, 15), st.sampled_from([0, 0.5, 1]))
def test_token_pieces_cut_every_document_without_a_gap(lengths, room, short_prob):
    bounds = np.cumsum([0, *lengths])
    begins, ends = token_pieces(bounds[:-1], bounds[1:], room, short_prob, 1)
    assert begins[:1].tolist() == [0][: len(begins)] and (begins[1:] == ends[:-1]).all()
    assert (ends > begins).all() and (ends - begins <= room).all()
    assert set(bounds.tolist()) <= {0, *ends.tolist()}
    assert ends[-1:].tolist() == bounds[-1:].tolist()[: len(ends)]


def test_about_short_prob_of_the_windows_are_cut():
    starts = np.arange(2000) * 100
    begins, _ = token_pieces(starts, starts + 100, 100, 0.1, 1)
    assert abs(len(begins) - 2200) < 5 * np.sqrt(2000 * 0.09)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(2, 40), st.data())
def test_shorten_takes_from_the_longer_first(a, b, room, data):
    draws = data.draw(st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)))
    first, second = shorten(np.arange(a), np.arange(b), room, draws)
    lengths = [a, b]
    while sum(lengths) > room:
        lengths[0 if lengths[0] > lengths[1] else 1] -= 1
    assert [len(first), len(second)] == lengths
    assert (np.diff(first) == 1).all() and (np.diff(second) == 1).all()


def test_special_tokens_come_from_the_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = build_tokenizer("BertWordPieceCase", vocab_file=str(tmp_path / "vocab.txt"))
    made = PairSampler.of(tokenizer, 16, prob=0.2)
    assert (made.cls, made.sep, made.pad, made.masking.mask) == (2, 3, 0, 4)
    assert made.masking.word_starts.tolist() == [True] * 6 + [False]
    with pytest.raises(DataError, match="NullTokenizer has no mask token"):
        PairSampler.of(build_tokenizer("NullTokenizer", vocab_size=9), 16)


@pytest.mark.parametrize("binary_head", [True, False])
def test_mock_samples(binary_head):
    data = MockBertDataset(512, 32, seed=1, binary_head=binary_head)
    again = MockBertDataset(512, 32, seed=1, binary_head=binary_head)
    other = MockBertDataset(512, 32, seed=1, split=1, binary_head=binary_head)
    for n in range(50):
        sample = data[n]
        assert len(parts(sample)) == 1 + binary_head and sample["padding_mask"].all()
        assert true_tokens(sample).max() < 512
        assert all((again[n][key] == sample[key]).all() for key in sample)
        assert (other[n]["tokens"] != sample["tokens"]).any()
    assert 10 < sum(int(data[n]["is_random"]) for n in range(50)) < 40 or not binary_head
