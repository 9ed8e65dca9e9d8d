"""scripts/inspect_checkpoint.py: the table, the diff and the verdict, as a user sees them."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from core.checkpoint.directory import size_text
from core.checkpoint.pieces import Piece
from core.checkpoint.slices import whole
from core.checkpoint.store import save
from core.comm import Group
from scripts.inspect_checkpoint import main


def store(directory, iteration, tensors, meta, cut=False):
    """Saves tensors whole, or every one that has rows in two pieces."""
    pieces = []
    for name, tensor in tensors.items():
        shape, box = tuple(tensor.shape), whole(tensor.shape)
        parts = [(box, tensor)]
        if cut and tensor.dim():
            half = shape[0] // 2
            cuts = [(0, half), (half, shape[0])]
            parts = [((rows, *box[1:]), tensor[slice(*rows)]) for rows in cuts]
        pieces += [Piece(name, shape, box, part) for box, part in parts]
    save(directory, iteration, pieces, meta, Group.single("world"))


@pytest.fixture
def folder(tmp_path):
    tensors = {
        "model/w": torch.arange(1024.0).view(16, 64),
        "model/b": torch.ones(4, dtype=torch.bfloat16),
        "optimizer/step": torch.tensor(7),
    }
    store(tmp_path / "a", 10, tensors, {"layout": {"tp": 2}, "arguments": {"seed": 1}}, cut=True)
    store(tmp_path / "a", 20, tensors, {"layout": {"tp": 2}, "arguments": {"seed": 1}}, cut=True)
    changed = {
        "model/w": tensors["model/w"].clone(),
        "model/b": torch.tensor([1, 1, math.nan, 3], dtype=torch.bfloat16),
        "extra": torch.ones(2),
    }
    changed["model/w"][3, 5] += 0.5
    store(tmp_path / "b", 20, changed, {"layout": {"tp": 4}, "arguments": {"seed": 1}})
    return tmp_path


def test_the_table(folder, capsys):
    assert main([str(folder / "a")]) == 0
    path = folder / "a" / "iter_0000020"
    size = size_text((path / "rank_00000.safetensors").stat().st_size)
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: iteration 20, written by 1 ranks",
        f"3 tensors, {size} in 1 files",
        f"checkpoints in {folder / 'a'}: 10, 20; latest is iter_0000020",
        "layout:",
        "  tp: 2",
        "arguments:",
        "  seed: 1",
        "",
        "tensor            shape     dtype     size  pieces",
        "model/b               4  bfloat16  8 bytes       2",
        "model/w         16 x 64   float32  4.0 KiB       2",
        "optimizer/step   scalar     int64  8 bytes       1",
    ]


def test_one_step_some_names_and_the_figures(folder, capsys):
    file = folder / "figures.json"
    assert main([str(folder / "a"), "--step", "10", "--match", "model/*", "--json", str(file)]) == 0
    assert "2 of 3 tensors match 'model/*'" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert figures["iteration"] == 10
    assert figures["tensors"]["model/w"] == {
        "shape": [16, 64],
        "dtype": "float32",
        "bytes": 4096,
        "boxes": [[[0, 8], [0, 64]], [[8, 16], [0, 64]]],
    }


def test_the_diff_has_the_largest_difference_first(folder, capsys):
    assert main([str(folder / "a"), "--diff", str(folder / "b")]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "--tp: 2 in a, 4 in b",
        "optimizer/step: only in a",
        "extra: only in b",
        "tensor   largest  relative    unequal",
        "model/b      inf       inf     2 of 4",
        "model/w      0.5  0.000489  1 of 1024",
        "0 of 4 tensors are equal",
    ]


def test_the_diff_of_equals_does_not_see_how_they_were_cut(folder, capsys):
    a = str(folder / "a")
    assert main([a, "--step", "10", "--diff", a, "--diff-step", "20"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == ["3 of 3 tensors are equal"]


def test_verify(folder, capsys):
    assert main([str(folder / "a"), "--verify"]) == 0
    assert "every byte as it was written" in capsys.readouterr().out
    file = folder / "a" / "iter_0000020" / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    assert main([str(folder / "a"), "--verify"]) == 1
    assert "block 0 of" in capsys.readouterr().out
    os.truncate(file, 5)
    assert main([str(folder / "a")]) == 1
    assert "has 5 bytes, it was written with" in capsys.readouterr().err


def test_nothing_to_inspect(tmp_path, capsys):
    assert main([str(tmp_path / "absent")]) == 2
    assert "has no checkpoint" in capsys.readouterr().err


def test_the_table_does_not_import_torch(folder):
    code = (
        "import sys; from scripts.inspect_checkpoint import main; "
        f"main([{str(folder / 'a')!r}]); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
