"""A device that is not the CPU, where there is no GPU: tensors that say "meta" and keep values.

Every operation runs on the CPU, but only if all its tensors are on one device, as a GPU demands: a
tensor made on the host and forgotten there raises HostTensor. What makes the host wait for the
device is counted. Kernels and streams stay untested: they need the real thing.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from core.data_parallel.buckets import BucketMemory, FlatParameter
from kernels import gpu

COPIES = ("aten::copy_", "aten::_to_copy")  # between devices, as asked
WAITS = {"aten::_local_scalar_dense": "item", "aten::nonzero": "nonzero", "aten::equal": "equal"}


class HostTensor(RuntimeError):
    """An operation was given tensors of both devices."""


class OnDevice(Tensor):
    """real_  the values, on the CPU"""

    waits: ClassVar[Counter[str]] = Counter()
    is_cuda = True  # the torch formulas have ways of their own for a GPU

    @staticmethod
    def __new__(cls, values: Tensor) -> OnDevice:
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        made = Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device="meta", **layout
        )
        made.real_ = values
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _carry_out(function, args, kwargs or {})

    def tolist(self) -> list:
        OnDevice.waits["tolist"] += 1
        return self.real_.tolist()


def _is_here(x: object) -> bool:
    """A parameter in a bucket is another class, and still on the device."""
    return isinstance(x, OnDevice) or "real_" in getattr(x, "__dict__", {})


def _carry_out(function, args: tuple, kwargs: dict):
    name = function._schema.name
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    mine = [x for x in tensors if _is_here(x)]
    hosts = [tuple(x.shape) for x in tensors if not _is_here(x) and x.dim()]
    if mine and hosts and name not in COPIES:
        raise HostTensor(f"{name} on the device is given host tensors of shapes {hosts}")
    if mine and name in WAITS:
        OnDevice.waits[WAITS[name]] += 1
    device = kwargs.get("device")
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(lambda x: x.real_ if _is_here(x) else x, (args, kwargs))
    if name == "aten::mm" and len(args) == 3:  # into a wider type: a CPU has no such product
        function, args = torch.mm, tuple(x.to(args[2]) for x in args[:2])
    out = function(*args, **kwargs)
    if not mine if device is None else torch.device(device).type == "cpu":
        return out
    known = {id(x.real_): x for x in mine}  # what was changed in place stays the same object

    def wrapped(x):
        if not isinstance(x, Tensor):
            return x
        return known[id(x)] if id(x) in known else OnDevice(x)

    return tree_map(wrapped, out)


class StandIn(TorchDispatchMode):
    """Inside, the device "meta" has values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _carry_out(function, args, kwargs or {})


def put_in(monkeypatch) -> None:
    """What torch does with a real device and would not with this one."""
    adopt = BucketMemory._adopt

    def _adopt(memory: BucketMemory, place: int, params) -> FlatParameter:
        param, slot = adopt(memory, place, params), memory.bucket.slots[place]
        if _is_here(memory.params):
            param.real_ = memory.params.real_[slot.start : slot.stop].view(slot.shape)
        return param

    monkeypatch.setattr(BucketMemory, "_adopt", _adopt)
    monkeypatch.setattr(FlatParameter, "is_cuda", property(_is_here), raising=False)
    monkeypatch.setattr(gpu, "capability", lambda tensor: (7, 0))  # too old for Triton kernels
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)
    monkeypatch.setattr(OnDevice, "waits", Counter())
