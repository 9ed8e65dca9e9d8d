"""GPT samples: splits, packing, end-of-document flags."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.gpt import GPTDataset, GPTPass, gpt_sample, split_documents
from data.index_format import pack_header
from data.indexed import DataError, IndexedBuilder, IndexedDataset

EOD = 0


@pytest.fixture
def prefix(tmp_path):
    """20 documents of 1..20 tokens, each closed by EOD; an empty one between."""
    with IndexedBuilder(tmp_path / "a", np.uint16) as builder:
        for d in range(20):
            builder.add(np.array([100 * (d + 1) + i for i in range(d)] + [EOD]))
        builder.add(np.array([], np.int64))
    return tmp_path / "a"


def test_split_is_megatrons():
    assert split_documents("969,30,1", 1000) == (range(969), range(969, 999), range(999, 1000))
    assert split_documents("1", 7) == (range(7), range(7, 7), range(7, 7))
    assert split_documents("0.5,0.5", 3) == (range(2), range(2, 3), range(3, 3))
    assert split_documents("9998,1,1", 10) == (range(10), range(10, 10), range(10, 10))  # C052


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3), st.integers(0, 10**12))
def test_split_covers_every_document_once(shares, documents):
    if sum(shares) == 0:
        return
    parts = split_documents(",".join(map(str, shares)), documents)
    assert parts[0].start == 0 and parts[2].stop == documents
    assert parts[0].stop == parts[1].start and parts[1].stop == parts[2].start
    for part, share in zip(parts, [*shares, 0, 0]):
        assert abs(len(part) - documents * share / sum(shares)) <= 1 + documents * 1e-15


@pytest.mark.parametrize("split", ["", "0,0,0", "a,b", "1,2,3,4", "-1,2", "1,,2", "1/0"])
def test_split_refused(split):
    with pytest.raises(DataError, match="--split"):
        split_documents(split, 10)


def test_labels_are_the_next_tokens(prefix):
    data = GPTDataset(prefix, None, 7, seed=1)
    for n in range(60):
        sample, window = data[n], data.window(n)
        assert len(window) == 8
        assert sample["tokens"].tolist() == window[:-1].tolist()
        assert sample["labels"].tolist() == window[1:].tolist()
        assert sample["loss_mask"].tolist() == [1] * 7 and sample["loss_mask"].dtype == np.float32
        assert sample["position_ids"].tolist() == list(range(7))
        assert all(sample[key].dtype == np.int64 for key in ("tokens", "labels", "position_ids"))
        assert "document_ids" not in sample


def test_a_split_reads_only_its_documents(prefix):
    parts = [GPTDataset(prefix, d, 5, seed=1) for d in split_documents("10,5,5", 20)]
    seen = [{int(t) // 100 for n in range(60) for t in part.window(n)} - {0} for part in parts]
    assert seen == [set(range(2, 11)), set(range(11, 16)), set(range(16, 21))]


def test_sample_depends_on_seed_and_n_alone(prefix):
    """C059: the same n is the same data for any order, count or restart; another seed is not."""
    data, again = (GPTDataset(prefix, None, 7, seed=1) for _ in range(2))
    forwards = [data.window(n).tolist() for n in range(100)]
    assert [again.window(n).tolist() for n in reversed(range(100))] == forwards[::-1]
    other = GPTDataset(prefix, None, 7, seed=2)
    assert [other.window(n).tolist() for n in range(100)] != forwards


def test_reading_piece_by_piece_is_the_same(prefix):
    mapped, read = (GPTDataset(prefix, None, 7, seed=1, mmap_bin_files=m) for m in (True, False))
    assert all((mapped.window(n) == read.window(n)).all() for n in range(60))


def test_documents_and_files_beyond_two_to_the_33(tmp_path):
    """A document longer than 2^31 tokens, in a file longer than 2^33, both mostly holes."""
    longest = 2**31 - 1
    lengths = [*[longest] * 5, 40, 7]
    with open(tmp_path / "a.idx", "wb") as file:
        file.write(pack_header(np.dtype("u1"), len(lengths), 3))
        file.write(np.array(lengths, "<i4").data)
        file.write(np.cumsum([0, *lengths[:-1]]).astype("<i8").data)
        file.write(np.array([0, 5, 6, 7], "<i8").data)
    total = sum(lengths)
    marks = [0, 2**31 - 1, 2**31, 2**32 + 5, 2**33 - 1, 2**33, total - 48, total - 1]
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(total)
        for i, place in enumerate(marks, 1):
            file.seek(place)
            file.write(bytes([i]))
    data = GPTDataset(tmp_path / "a", None, 1 << 20, seed=1)
    piecewise = GPTDataset(tmp_path / "a", None, 1 << 20, seed=1, mmap_bin_files=False)
    epoch = data.index.epoch(0)
    streams = {int(start): int(bound) for start, bound in zip(epoch.starts, epoch.bounds)}
    for i, place in enumerate(marks, 1):
        start = max(s for s in streams if s <= place)
        window, offset = divmod(streams[start] + place - start, 1 << 20)
        n = int(np.flatnonzero(epoch.samples == window)[0])
        assert data.window(n)[offset] == piecewise.window(n)[offset] == i


def test_end_of_document_flags():
    window = np.array([5, EOD, 6, 7, EOD, EOD, 8], np.uint16)
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    sample = gpt_sample(window, 6, eod=EOD, **flags)
    assert sample["tokens"].tolist() == [5, 0, 6, 7, 0, 0]
    assert sample["position_ids"].tolist() == [0, 1, 0, 1, 2, 0]
    assert sample["document_ids"].tolist() == [0, 0, 1, 1, 1, 2]
    assert sample["loss_mask"].tolist() == [1, 0, 1, 1, 0, 0]


def test_padding_is_known_by_position_not_by_value():
    """C058: padding has the value of the end of document, and a real one keeps its loss."""
    sample = gpt_sample(np.array([5, EOD, 6, EOD]), 6, eod=EOD)
    assert sample["tokens"].tolist() == [5, EOD, 6, 0, 0, 0]
    assert sample["labels"].tolist() == [EOD, 6, EOD, 0, 0, 0]
    assert sample["loss_mask"].tolist() == [1, 1, 1, 0, 0, 0]
    reset = gpt_sample(np.array([5, EOD, 6, EOD]), 6, eod=EOD, reset_attention_mask=True)
    assert reset["document_ids"].tolist() == [0, 0, 1, 1, 1, 1]


def test_refusals_name_the_way_out(prefix):
    with pytest.raises(DataError, match="21 documents: 210 tokens are fewer than the 501"):
        GPTDataset(prefix, None, 500, seed=1)
    with pytest.raises(DataError, match="0 documents: 0 tokens are fewer"):
        GPTDataset(prefix, range(0), 5, seed=1)
    with pytest.raises(DataError, match="--tokenizer-type"):
        GPTDataset(prefix, None, 5, seed=1, eod_mask_loss=True)


def test_documents_are_told_apart_by_place(prefix):
    """Whatever the tokens are; by the end token, the same here, where every document has one."""
    flags = {"eod": EOD, "reset_attention_mask": True}
    by_token = GPTDataset(prefix, None, 16, seed=1, **flags)
    by_place = GPTDataset(prefix, None, 16, seed=1, document_attention_mask=True)
    assert "document_ids" not in GPTDataset(prefix, None, 16, seed=1)[0]
    for n in range(40):
        assert (by_token[n]["document_ids"] == by_place[n]["document_ids"]).all()
        assert by_place[n]["document_ids"].dtype == np.int64


@pytest.mark.parametrize("documents", [None, range(3, 7), range(1), range(0), range(20, 21)])
def test_a_full_pass_has_every_label_once(prefix, documents):
    data = GPTPass(prefix, documents, 7, document_attention_mask=True)
    file = IndexedDataset(prefix)
    joined = [t for d in documents or range(21) for t in file.document(d).tolist()]
    if documents is not None and not documents:
        joined = []
    samples = [data[n] for n in range(len(data))]
    labels = [t for s in samples for t in s["labels"][s["loss_mask"] > 0].tolist()]
    assert labels == joined[1:]
    assert all(sample["loss_mask"].any() for sample in samples)
    beyond = data[len(data) + 3]
    assert beyond["tokens"].shape == (7,) and not beyond["loss_mask"].any()


def test_a_full_pass_tells_documents_apart(prefix):
    sample = GPTPass(prefix, range(1, 3), 6, document_attention_mask=True)[0]
    assert sample["tokens"].tolist() == [200, EOD, 300, 301, 0, 0]
    assert (np.diff(sample["document_ids"]) != 0).tolist() == [False, True, False, False, False]
