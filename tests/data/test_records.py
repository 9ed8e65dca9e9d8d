"""Blocks of lines: every byte once, lines whole, places named."""

import gzip
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.indexed import DataError
from data.records import Block, Place, parse_block, read_blocks


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200), st.integers(1, 50), st.sampled_from(["", ".gz"]))
def test_blocks_join_to_the_file_from_any_place(tmp_path_factory, content, size, suffix):
    path = tmp_path_factory.mktemp("r") / f"a.jsonl{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    blocks = list(read_blocks(str(path), size=size))
    assert b"".join(block.data for block in blocks) == content
    start = Place()
    for i, block in enumerate(blocks):
        assert block.line == start.line and block.data
        start = Place(start.offset + len(block.data), start.line + block.data.count(b"\n"))
        assert block.end == start or i == len(blocks) - 1
        rest = list(read_blocks(str(path), size=size, start=block.end))
        assert b"".join(b.data for b in rest) == content[block.end.offset :]
        assert [b.line for b in rest[:1]] == [b.line for b in blocks[i + 1 : i + 2]]
    assert all(block.data.endswith(b"\n") for block in blocks[:-1])
    if blocks:
        assert blocks[-1].read == path.stat().st_size


def parsed(data, keys=("text",)):
    return [row for _, row in parse_block(Block("f.jsonl", "json", data, 1, Place(), 0), keys)]


def test_line_ends_blank_lines_and_byte_order_mark():
    data = b'\xef\xbb\xbf{"text": "a"}\r\n\n \r\n{"text": "b\\u2028c\\u0000"}'
    assert parsed(data) == [["a"], ["b\u2028c\x00"]]


def test_several_keys_in_the_order_asked_for():
    assert parsed(b'{"a": "1", "b": "2"}\n', ("b", "a")) == [["2", "1"]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "f.jsonl line 2: not JSON: .* at column 2"),
        (b'"text"', "a JSON str where an object is needed"),
        (b'{"txt": "a"}', "no key 'text' .--json-keys.; it has 'txt'"),
        (b'{"text": null}', "holds NoneType, not text"),
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff at column 11"),
        (b'{"text": "\\ud800"}', r"holds .ud800, half of a surrogate pair"),
    ],
)
def test_bad_lines_name_file_and_line(line, message):
    good, bad, after = parsed(b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    assert (good, after) == (["a"], ["b"])
    with pytest.raises(DataError, match=message):
        raise bad


def test_damaged_gzip_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"text": "a" * 1000}).encode())[:-12])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be decompressed"):
        list(read_blocks(str(path)))


def texts(path, **options):
    blocks = read_blocks(str(path), **options)
    return [row for block in blocks for _, row in parse_block(block, ("text",))]


def test_plain_text_by_line_and_by_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n two\nthree")
    assert texts(tmp_path / "a.txt") == [["one"], [" two"], ["three"]]
    assert texts(tmp_path / "a.txt", text_documents="file") == [["one\r\n\n two\nthree"]]
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"x\ny"))
    assert texts(tmp_path / "b.txt.gz", text_documents="file", size=2) == [["x\ny"]]
    (tmp_path / "c.txt").write_bytes(b"fine\n\xff\n")
    good, bad = texts(tmp_path / "c.txt")
    assert good == ["fine"] and "c.txt line 2: " in str(bad)


def test_deep_json_is_a_bad_line():
    (bad,) = parsed(b"[" * 100_000)
    assert "f.jsonl line 1: not JSON that can be read: it nests too deeply" in str(bad)


def zstandard_of(content):
    try:
        from compression import zstd

        return zstd.compress(content)
    except ImportError:
        return pytest.importorskip("zstandard").compress(content)


def test_zstandard(tmp_path):
    first, second = zstandard_of(b'{"text": "a"}\n'), zstandard_of(b'{"text": "b"}\n')
    (tmp_path / "a.jsonl.zst").write_bytes(first + second)
    assert texts(tmp_path / "a.jsonl.zst") == [["a"], ["b"]]
    (tmp_path / "b.jsonl.zst").write_bytes(b"no such thing")
    with pytest.raises(DataError, match=r"b\.jsonl\.zst cannot be decompressed"):
        texts(tmp_path / "b.jsonl.zst")


def test_zstandard_cut_short(tmp_path):
    """The package's own reader gave what was there and said nothing: the rest of a corpus lost."""
    path = tmp_path / "a.jsonl.zst"
    content = zstandard_of(b'{"text": "a"}\n') * 2
    for missing in (1, 5, len(content) // 2 - 2):
        path.write_bytes(content[:-missing])
        with pytest.raises(DataError, match=r"a\.jsonl\.zst cannot be decompressed"):
            texts(path)
    path.write_bytes(content + b"no frame")
    with pytest.raises(DataError, match=r"a\.jsonl\.zst cannot be decompressed"):
        texts(path)


def test_zstandard_of_a_large_corpus(tmp_path):
    """Blocks of any size, from any place; `zstd --long=31` says that it looks 2 GiB back."""
    zstandard = pytest.importorskip("zstandard")
    settings = zstandard.ZstdCompressionParameters(window_log=31)
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    lines = b"".join(b'{"text": "%d"}\n' % i for i in range(40_000))
    (tmp_path / "a.jsonl.zst").write_bytes(stream.compress(lines) + stream.flush())
    blocks = list(read_blocks(str(tmp_path / "a.jsonl.zst"), size=1 << 16))
    assert len(blocks) > 5 and b"".join(block.data for block in blocks) == lines
    again = read_blocks(str(tmp_path / "a.jsonl.zst"), size=1 << 16, start=blocks[2].end)
    assert b"".join(block.data for block in again) == lines[blocks[2].end.offset :]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [f"row {i}" for i in range(600)]
    table = pyarrow.table({"text": [*rows, None], "other": [1] * 601})
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path)
    *good, bad = texts(path)
    assert good == [[row] for row in rows] and "line 601: key 'text' holds NoneType" in str(bad)
    blocks = list(read_blocks(str(path)))
    assert blocks[-1].read == path.stat().st_size
    again = list(read_blocks(str(path), start=blocks[0].end))
    assert again == blocks[1:]
    with pytest.raises(DataError, match=r"no column 'txt' .--json-keys.; it has text, other"):
        list(read_blocks(str(path), ("txt",)))
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="is not a Parquet file"):
        texts(path)


def test_parquet_whose_column_is_not_said_to_be_text(tmp_path):
    """Old writers store text as bytes; what is no UTF-8 is a bad row and not the end, as either."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = pyarrow.array(["é".encode(), b"ok\xff", b"b"], pyarrow.binary())
    said = pyarrow.Array.from_buffers(pyarrow.string(), 3, column.buffers())
    for values in (column, said):
        parquet.write_table(pyarrow.table({"text": values, "n": [1, 2, 3]}), tmp_path / "a.parquet")
        one, bad, three = texts(tmp_path / "a.parquet")
        assert (one, three) == (["é"], ["b"])
        assert "a.parquet line 2: not UTF-8: byte 0xff at column 3" in str(bad)


def test_parquet_is_read_in_little_memory(tmp_path):
    """One row group was held whole, whatever its size."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, text = tmp_path / "a.parquet", "word " * 200
    table = pyarrow.table({"text": [f"{i} {text}" for i in range(16_000)]})
    parquet.write_table(table, path, compression="NONE", use_dictionary=False)
    del table
    assert parquet.read_metadata(path).num_row_groups == 1 and path.stat().st_size > 16e6
    before = pyarrow.total_allocated_bytes()
    most = max(pyarrow.total_allocated_bytes() - before for _ in read_blocks(str(path)))
    assert most < 8e6


def test_damaged_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [f"row {i}" for i in range(600)]}), path)
    content = bytearray(path.read_bytes())
    content[4:40] = bytes(byte ^ 0xFF for byte in content[4:40])
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet cannot be read to its end, it is damaged: \w"):
        texts(path)


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.zst", "zstandard")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"x")
    for module in ("pyarrow", "pyarrow.parquet", "zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=f"pip install {package}"):
        texts(tmp_path / name)
