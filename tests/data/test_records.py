"""Blocks of lines: every byte once, lines whole, places named."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.indexed import DataError
from data.records import Block, parse_jsonl, read_blocks


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200), st.integers(1, 50), st.booleans())
def test_blocks_join_to_the_file(tmp_path_factory, content, size, compressed):
    path = tmp_path_factory.mktemp("r") / ("a.jsonl.gz" if compressed else "a.jsonl")
    path.write_bytes(gzip.compress(content) if compressed else content)
    blocks = list(read_blocks(str(path), size))
    assert b"".join(block.data for block in blocks) == content
    line = 1
    for block in blocks:
        assert block.line == line and block.data
        line += block.data.count(b"\n")
    assert all(block.data.endswith(b"\n") for block in blocks[:-1])
    if blocks:
        assert blocks[-1].read == path.stat().st_size


def parsed(data, keys=("text",)):
    return list(parse_jsonl(Block("f.jsonl", 1, data, 0), keys))


def test_line_ends_blank_lines_and_byte_order_mark():
    data = b'\xef\xbb\xbf{"text": "a"}\r\n\n \r\n{"text": "b\\u2028c\\u0000"}'
    assert parsed(data) == [["a"], ["b\u2028c\x00"]]


def test_several_keys_in_the_order_asked_for():
    assert parsed(b'{"a": "1", "b": "2"}\n', ("b", "a")) == [["2", "1"]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "f.jsonl line 2: "),
        (b'"text"', "a JSON str where an object is needed"),
        (b'{"txt": "a"}', "no key 'text' .--json-keys.; it has 'txt'"),
        (b'{"text": null}', "holds NoneType, not text"),
        (b'{"text": "\xff"}', "can't decode byte 0xff"),
        (b'{"text": "\\ud800"}', "surrogates not allowed"),
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
