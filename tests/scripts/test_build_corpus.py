"""scripts/build_corpus.py from its command line."""

import json

import pytest

from scripts import build_corpus


def built(tmp_path, *flags):
    output = tmp_path / "out" / "c.jsonl"
    argv = ["--root", str(tmp_path / "lib"), "--output", str(output), *flags]
    assert build_corpus.main(argv) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.fixture
def library(tmp_path):
    (tmp_path / "lib" / "deep").mkdir(parents=True)
    for i in range(30):
        (tmp_path / "lib" / f"m{i}.py").write_text(f"x = {i}\n")
    (tmp_path / "lib" / "deep" / "d.py").write_text(
        '"""One.\n\nTwo."""\nclass C:\n    "Three."\n    def f():\n        "Four."\n'
    )
    (tmp_path / "lib" / "broken.py").write_text("def (:\n")
    return tmp_path


def test_order_is_fixed_and_mixed(library):
    paths = [record["path"] for record in built(library)]
    assert len(paths) == 32 and paths == [record["path"] for record in built(library)]
    assert paths != sorted(paths)
    fewer = built(library, "--max-megabytes", "0.00005")
    assert [record["path"] for record in fewer] == paths[: len(fewer)] and 0 < len(fewer) < 32


def test_docstrings_are_prose(library):
    assert built(library, "--docstrings") == [
        {"text": "One.\n\nTwo.\n\nThree.\n\nFour.", "path": "deep/d.py"}
    ]


def test_a_missing_folder(tmp_path, capsys):
    argv = ["--root", str(tmp_path / "none"), "--output", str(tmp_path / "c")]
    assert build_corpus.main(argv) == 2
    assert "is not a folder" in capsys.readouterr().err
