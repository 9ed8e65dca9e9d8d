"""core/feed.py: how a microbatch gets to a device. "meta" stands in for a GPU."""

import numpy as np
import pytest
import torch

from core.comm import Group, Ledger
from core.feed import Feed

ROW = {
    "tokens": np.arange(6, dtype=np.int32).reshape(2, 3),
    "loss_mask": np.ones((2, 3), dtype=np.float64)[:, ::-1],
}
NAMES = {"integers": ["tokens"], "floats": ["loss_mask"]}


def feed(device: str) -> Feed:
    tp = Group.single("tp", Ledger())
    return Feed(lambda consumed, size: iter([ROW, ROW]), tp, torch.device(device), **NAMES)


@pytest.fixture
def moves(monkeypatch):
    """What is pinned, and what then goes to the device without waiting for it."""
    seen = {"pinned": [], "moved": []}
    to = torch.Tensor.to

    def pin_memory(tensor):
        pinned = tensor.clone()
        seen["pinned"].append(pinned)
        return pinned

    def recorded(tensor, *where, **how):
        if where and isinstance(where[0], torch.device):
            seen["moved"].append((tensor, where[0].type, how))
        return to(tensor, *where, **how)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", recorded)
    return seen


def test_to_a_gpu_from_pinned_memory_without_waiting(moves) -> None:
    batches = list(feed("meta").step(0, 4, 2))
    assert [{x.device.type for x in batch.values()} for batch in batches] == [{"meta"}, {"meta"}]
    assert [batches[1][name].dtype for name in ROW] == [torch.int64, torch.float32]
    assert len(moves["pinned"]) == len(moves["moved"]) == 4
    for pinned, (moved, device, how) in zip(moves["pinned"], moves["moved"], strict=True):
        assert moved is pinned and device == "meta" and how == {"non_blocking": True}
    tokens, mask = moves["pinned"][:2]  # in their last type: the device has nothing to convert
    assert tokens.dtype == torch.int64 and tokens.tolist() == ROW["tokens"].tolist()
    assert mask.dtype == torch.float32 and mask.is_contiguous()


def test_a_cpu_pins_nothing(moves) -> None:
    for batch in feed("cpu").step(0, 4, 2):
        assert batch["tokens"].tolist() == ROW["tokens"].tolist()
        assert batch["loss_mask"].dtype == torch.float32
    assert moves["pinned"] == []
