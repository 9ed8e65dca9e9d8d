"""scripts/merge_datasets.py from its command line."""

import numpy as np
import pytest

from data.indexed import DataError, IndexedBuilder, IndexedDataset
from scripts import merge_datasets


def write(prefix, documents, dtype=np.uint16):
    with IndexedBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add(np.array(document, np.int64))
    return str(prefix)


def documents_of(prefix):
    data = IndexedDataset(prefix)
    return [data.document(d).tolist() for d in range(data.num_documents)]


def test_documents_of_a_then_b(tmp_path, capsys):
    """C051's own trial: two sets of three documents, one of them empty."""
    a = write(tmp_path / "a", [[1, 2], [], [3]])
    b = write(tmp_path / "b", [[4], [5, 6], [7]])
    argv = ["--input", a, b, "--output-prefix", str(tmp_path / "m")]
    assert merge_datasets.main(argv) == 0
    assert documents_of(tmp_path / "m") == [[1, 2], [], [3], [4], [5, 6], [7]]
    assert "6 documents, 7 tokens, compared with the 2 inputs" in capsys.readouterr().out


def test_a_folder_and_mixed_types(tmp_path):
    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts" / "b", [[70_000]], np.int32)
    write(tmp_path / "parts" / "a", [[65_535]])
    argv = ["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "m")]
    assert merge_datasets.main(argv) == 0
    assert documents_of(tmp_path / "m") == [[65_535], [70_000]]
    assert IndexedDataset(tmp_path / "m").dtype == np.int32


@pytest.mark.parametrize(
    ("inputs", "output", "message"),
    [
        (["none"], "m", r"none.idx does not exist"),
        (["a", "f"], "m", "pairs of float32 and uint16 cannot be joined"),
        (["a", "f"], "a", "is one of the inputs"),
        (["."], "m", "folder without .idx"),
    ],
)
def test_refusals_leave_nothing(tmp_path, monkeypatch, capsys, inputs, output, message):
    if inputs != ["."]:
        write(tmp_path / "a", [[1]])
        write(tmp_path / "f", [[1]], np.float32)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert merge_datasets.main(["--input", *inputs, "--output-prefix", output]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_comparing_finds_every_difference(tmp_path):
    a = IndexedDataset(write(tmp_path / "a", [[1, 2], [3]]))
    for name, documents in (("t", [[1, 9], [3]]), ("d", [[1], [2, 3]]), ("m", [[1, 2], [3], []])):
        with pytest.raises(DataError):
            merge_datasets.compare([a], IndexedDataset(write(tmp_path / name, documents)))
    merge_datasets.compare([a], IndexedDataset(write(tmp_path / "same", [[1, 2], [3]])))
