"""scripts/bench_checkpoint.py at a small size, and the verdict of scripts/chaos_saves.py."""

import os

import torch

from core.checkpoint.store import save
from core.comm import Group
from scripts import bench_checkpoint, chaos_saves
from tests.core.checkpoint.states import single

ALONE = Group.single("world")


def test_a_round_measures_every_way(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_checkpoint, "TABLE", (64, 8))
    monkeypatch.setattr(bench_checkpoint, "HIDDEN", 32)
    state = bench_checkpoint.state_of(1)
    assert {name.rpartition("/")[0] for name in state} == {
        "model", "optimizer/exp_avg", "optimizer/exp_avg_sq",
    }  # fmt: skip
    assert 1024**2 <= 4 * sum(tensor.numel() for tensor in state.values()) < 1.2 * 1024**2
    times = bench_checkpoint.run_rounds(state, 2, tmp_path)
    assert list(times) == [
        *("torch.save", "torch.save and fsync", "save", "torch.load", "load"),
        *(bench_checkpoint.STEP, bench_checkpoint.BEHIND, bench_checkpoint.BLOCKED),
    ]
    assert all(len(found) == 2 and min(found) > 0 for found in times.values())


def saved(folder, iteration):
    save(folder, iteration, [single("x", torch.full((9,), float(iteration)))], {}, ALONE)


def test_what_a_kill_has_left(tmp_path):
    assert chaos_saves.newest(tmp_path) == 0
    assert "no checkpoint" in chaos_saves.damage(tmp_path, 1)
    saved(tmp_path, 1)
    saved(tmp_path, 2)
    assert chaos_saves.newest(tmp_path) == 2
    assert chaos_saves.damage(tmp_path, 2) == ""
    assert "iter_0000002 is older than iteration 4" in chaos_saves.damage(tmp_path, 4)
    os.truncate(tmp_path / "iter_0000002" / "index.json", 20)
    assert "is damaged and will not be loaded" in chaos_saves.damage(tmp_path, 2)
