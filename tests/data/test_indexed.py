"""The .bin/.idx format, byte by byte, and what is refused."""

import struct
import subprocess
import sys
import tracemalloc
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.index_format import DTYPES
from data.indexed import DataError, IndexedBuilder, IndexedDataset, token_dtype


def write(prefix, documents, dtype=np.uint16):
    with IndexedBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add(np.array(document, np.int64))
    return IndexedDataset(prefix)


def test_bytes_are_those_of_the_format(tmp_path):
    with IndexedBuilder(tmp_path / "a", np.int32) as builder:
        builder.add(np.array([1, 2, 3]), lengths=[1, 2])
        builder.add(np.array([], np.int64))
        builder.add_documents(np.array([70000, 5]), np.array([1, 1]))
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<5i", 1, 2, 3, 70000, 5)
    assert (tmp_path / "a.idx").read_bytes() == b"".join(
        [
            b"MMIDIDX\x00\x00",
            struct.pack("<QBQQ", 1, 4, 5, 5),  # version, int32, sequences, documents + 1
            struct.pack("<5i", 1, 2, 0, 1, 1),
            struct.pack("<5q", 0, 4, 12, 12, 16),
            struct.pack("<5q", 0, 2, 3, 4, 5),
        ]
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_comes_back(tmp_path, dtype):
    data = write(tmp_path / "a", [[1, 2, 3], [], [4]], dtype)
    assert data.dtype == dtype and data.num_tokens == 4
    assert [data[i].tolist() for i in range(len(data))] == [[1, 2, 3], [], [4]]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=4), max_size=8))
def test_documents_of_sequences_come_back(tmp_path_factory, documents):
    prefix = tmp_path_factory.mktemp("d") / "a"
    with IndexedBuilder(prefix, np.uint16) as builder:
        for document in documents:
            builder.add(np.array(list(chain(*document)), np.int64), [len(s) for s in document])
    data = IndexedDataset(prefix)
    assert [data.document(d).tolist() for d in range(data.num_documents)] == [
        list(chain(*document)) for document in documents
    ]
    assert [data[i].tolist() for i in range(len(data))] == list(chain(*documents))
    offsets = data.document_offsets()
    assert offsets.dtype == np.int64
    assert np.diff(offsets).tolist() == [sum(map(len, document)) for document in documents]


def test_get_reads_part_of_a_sequence(tmp_path):
    data = write(tmp_path / "a", [[9, 9], [1, 2, 3, 4]])
    assert data.get(1, 1, 2).tolist() == [2, 3]
    assert data.get(1, 2).tolist() == [3, 4]
    assert data.get(0, 1, 5).tolist() == [9]


def test_read_without_a_map_is_the_same(tmp_path):
    write(tmp_path / "a", [[1, 2, 3], [], [4, 5]])
    data = IndexedDataset(tmp_path / "a", mmap_bin_files=False)
    assert data.read(1, 4).tolist() == [2, 3, 4] and data.document(2).tolist() == [4, 5]
    assert data.document(1).tolist() == []


def test_merging_keeps_every_document_and_sequence(tmp_path):
    """C051: merging misplaced document boundaries, and it showed at load or never."""
    write(tmp_path / "a", [[1, 2], [], [3]])
    with IndexedBuilder(tmp_path / "b", np.int32) as builder:
        builder.add(np.array([7, 8, 9]), lengths=[1, 2])
        builder.add(np.array([65535]))
        builder.add(np.array([], np.int64))
    with IndexedBuilder(tmp_path / "m", np.uint16) as builder:
        for name in "ab":
            builder.add_dataset(IndexedDataset(tmp_path / name))
    merged = IndexedDataset(tmp_path / "m")
    documents = [merged.document(d).tolist() for d in range(merged.num_documents)]
    assert documents == [[1, 2], [], [3], [7, 8, 9], [65535], []]
    assert merged.sequence_lengths.tolist() == [2, 0, 1, 1, 2, 1, 0]
    merged.verify()


def test_a_builder_goes_on_from_a_mark(tmp_path):
    """What a killed writer wrote after its last mark is dropped."""
    expected = write(tmp_path / "whole", [[1, 2], [3], [4, 5, 6]])
    builder = IndexedBuilder(tmp_path / "a", np.uint16)
    builder.add(np.array([1, 2]))
    mark = builder.mark()
    builder.add(np.array([9, 9, 9]))
    builder.mark()
    builder.close()
    with IndexedBuilder(tmp_path / "a", np.uint16, mark=mark) as builder:
        builder.add_documents(np.array([3, 4, 5, 6]), np.array([1, 3]))
    for ending in (".bin", ".idx"):
        whole = Path(f"{expected.prefix}{ending}").read_bytes()
        assert (tmp_path / f"a{ending}").read_bytes() == whole
    with pytest.raises(DataError, match="shorter than the 4 bytes"):
        IndexedBuilder(tmp_path / "a", np.uint16, mark=mark)


def test_two_writers_of_one_prefix(tmp_path):
    with IndexedBuilder(tmp_path / "a", np.uint16) as builder:
        builder.add(np.array([1]))
        with pytest.raises(DataError, match=f"another process is writing {tmp_path / 'a'}$"):
            IndexedBuilder(tmp_path / "a", np.uint16)
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [1]


def test_full_disk_leaves_nothing(tmp_path):
    """A write that fails, here by a limit on file size, as with a full disk: no pair, no part."""
    script = (
        "import resource, signal, sys, numpy as np\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "from data.indexed import IndexedBuilder\n"
        "with IndexedBuilder(sys.argv[1], np.int32) as builder:\n"
        "    for _ in range(100): builder.add(np.arange(100))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a")], capture_output=True, text=True
    )
    assert done.returncode == 1 and "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_dtype_follows_the_vocabulary():
    assert token_dtype(65499) == np.uint16 and token_dtype(65500) == np.int32


def test_tokens_that_do_not_fit_are_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(DataError, match="70000 do not fit uint16"):
        write(tmp_path / "a", [[1], [70000]])
    with pytest.raises(DataError, match="-1"):
        write(tmp_path / "a", [[-1]])
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rewrite_keeps_the_pair_that_was_there(tmp_path):
    write(tmp_path / "a", [[1, 2]])
    with pytest.raises(RuntimeError), IndexedBuilder(tmp_path / "a", np.uint16) as builder:
        builder.add(np.array([7]))
        raise RuntimeError
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [1, 2]


def test_missing_files(tmp_path):
    with pytest.raises(DataError, match=r"a\.idx does not exist"):
        IndexedDataset(tmp_path / "a")
    write(tmp_path / "a_text_document", [[1]])
    with pytest.raises(DataError, match=r"there is .*a_text_document"):
        IndexedDataset(tmp_path / "a")
    with pytest.raises(DataError, match=r"without the ending: .*a_text_document$"):
        IndexedDataset(tmp_path / "a_text_document.bin")
    (tmp_path / "a_text_document.bin").unlink()
    with pytest.raises(DataError, match=r"a_text_document\.bin does not exist"):
        IndexedDataset(tmp_path / "a_text_document")


def test_every_truncation_is_found(tmp_path):
    write(tmp_path / "a", [[1, 2, 3], [4]])
    for name in ("a.idx", "a.bin"):
        path = tmp_path / name
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(DataError):
                IndexedDataset(tmp_path / "a")
        path.write_bytes(whole + b"\0")
        with pytest.raises(DataError):
            IndexedDataset(tmp_path / "a")
        path.write_bytes(whole)
    IndexedDataset(tmp_path / "a")


def test_an_empty_index_is_called_empty(tmp_path):
    for ending in (".bin", ".idx"):
        (tmp_path / f"a{ending}").touch()
    with pytest.raises(DataError, match=r"a\.idx is empty; write the pair again"):
        IndexedDataset(tmp_path / "a")


def patched(path, at, value):
    whole = bytearray(path.read_bytes())
    whole[at : at + len(value)] = value
    path.write_bytes(whole)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"PK\x03\x04", "is not a Megatron index"),
        (9, struct.pack("<Q", 2), "format version 2"),
        (17, b"\x09", "dtype code 9"),
        (34 + 12 * 2 + 8 * 2, struct.pack("<q", 1), "do not span"),
    ],
)
def test_foreign_headers_are_named(tmp_path, at, value, message):
    write(tmp_path / "a", [[1, 2, 3], [4]])
    patched(tmp_path / "a.idx", at, value)
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "a")


def test_multimodal_data_is_refused_by_name(tmp_path):
    write(tmp_path / "a", [[1, 2, 3], [4]])
    with open(tmp_path / "a.idx", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(DataError, match="multimodal"):
        IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (34 + 12, struct.pack("<q", 2), "sequence 0 does not start"),
        (34 + 12 + 8, struct.pack("<q", 2), "sequence 1 does not start"),
        (34, struct.pack("<i", -3), "sequence 0 has -3 tokens"),
        (34 + 36 + 8, struct.pack("<q", 5), "document 1 ends before"),
    ],
)
def test_verify_reads_the_whole_index(tmp_path, at, value, message):
    data = write(tmp_path / "a", [[1, 2, 3], [4], [5]])
    data.verify()
    patched(tmp_path / "a.idx", at, value)
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "a").document_offsets()


def test_lengths_must_sum_to_the_tokens(tmp_path):
    with IndexedBuilder(tmp_path / "a", np.uint16) as builder:
        with pytest.raises(ValueError, match="sum to 3, not to 2"):
            builder.add(np.array([1, 2]), lengths=[3])


def peak_of_writing(prefix, documents):
    tracemalloc.start()
    with IndexedBuilder(prefix, np.uint16) as builder:
        block = np.zeros(10_000, np.int64)
        for _ in range(documents // len(block)):
            builder.add_documents(block, np.ones(len(block), np.int64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_writing_needs_no_more_memory_for_more_documents(tmp_path):
    """C047: an index kept as a list, or put together at the end, grows with the input."""
    few, many = (peak_of_writing(tmp_path / str(n), n) for n in (50_000, 400_000))
    assert many < 1.05 * few, f"{few / 2**20:.2f} and {many / 2**20:.2f} MiB"
