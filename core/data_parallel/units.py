"""Parameters that come when they are needed: hooks on the parts of a stage.

A unit is a part of a stage whose parameters are used together: each block, and each other direct
child (embedding, final norm, output layer). Blocks are visited one after the other; what a stage
has besides is used out of turn (a tied word table in the loss too), so it is fetched at the first
use and stays until the step is over.

`Arrivals` waits for parameters that an earlier gather is bringing (--overlap-param-gather).
`Visits` gathers a block's parameters before its forward and its backward, the next block's
meanwhile, and lets go of them afterwards (optim_grads_params). A block whose attribute `recomputed`
is true runs forward a second time as part of its backward, and keeps them from there on. Used by
ddp.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from core.data_parallel.buckets import BucketMemory


def units_of(stage: nn.Module) -> dict[str, nn.Module]:
    """name -> module; the entries of a ModuleDict or ModuleList are units of their own."""
    units: dict[str, nn.Module] = {}
    for name, child in stage.named_children():
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            units |= {f"{name}.{key}": part for key, part in child.named_children()}
        else:
            units[name] = child
    return units


def unit_of(units: Sequence[str], parameter: str) -> str:
    """The unit that a parameter belongs to; "" for a parameter of the stage itself."""
    return next((name for name in units if parameter.startswith(f"{name}.")), "")


def is_block(unit: str) -> bool:
    return "." in unit


class Unit:
    """A unit's buckets. is_block: visited in turn; otherwise its parameters stay for the step."""

    def __init__(self, name: str, module: nn.Module, memories: Sequence[BucketMemory]) -> None:
        self.name, self.module, self.memories = name, module, tuple(memories)
        self.in_backward = False

    @property
    def is_frozen_in_part(self) -> bool:
        """Its backward may need parameters after the last gradient that a bucket waits for."""
        return any(not p.requires_grad for memory in self.memories for p in memory.parameters)

    def fetch(self) -> None:
        """Start gathering what is not here."""
        for memory in self.memories:
            if not memory.is_here:
                memory.start_gather()

    def need(self) -> None:
        """Have all parameters in memory."""
        self.fetch()
        for memory in self.memories:
            memory.finish_gather()

    def release(self) -> None:
        for memory in self.memories:
            memory.release()


def units_with_memory(stage: nn.Module, memories: Sequence[BucketMemory]) -> Iterator[Unit]:
    """Every unit of a stage, and the stage itself as "", with the buckets that hold parameters."""
    for name, module in {**units_of(stage), "": stage}.items():
        held = [m for m in memories if any(slot.unit == name for slot in m.bucket.slots)]
        yield Unit(name, module, held)


class Arrivals:
    """Waits for a unit's parameters just before its forward; for all others at the first of them.

    What is used out of turn has no forward of its own to wait in.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.others = [unit for unit in units if not is_block(unit.name)]
        for unit in units:
            unit.module.register_forward_pre_hook(partial(self._before, unit))

    def _before(self, unit: Unit, *_: object) -> None:
        for needed in [unit] if is_block(unit.name) else self.others:
            needed.need()


class Visits:
    """Gathers a block's parameters around its forward and its backward.

    prefetch  gather the block that comes next meanwhile
    """

    def __init__(self, units: Sequence[Unit], prefetch: bool) -> None:
        self.prefetch = prefetch
        self.blocks = [unit for unit in units if is_block(unit.name)]
        self.others = [unit for unit in units if not is_block(unit.name)]
        for place, unit in enumerate(self.blocks):
            unit.module.register_forward_pre_hook(partial(self._before_forward, place))
            unit.module.register_forward_hook(partial(self._after_forward, place))
        for unit in self.others:
            unit.module.register_forward_pre_hook(self._others_needed)

    def _others_needed(self, *_: object) -> None:
        for unit in self.others:
            unit.fetch()
        for unit in self.others:
            unit.need()

    def _visit(self, place: int, following: int) -> None:
        if self.prefetch and 0 <= following < len(self.blocks):
            self.blocks[place].fetch()
            self.blocks[following].fetch()
        self.blocks[place].need()

    def _before_forward(self, place: int, module: nn.Module, *_: object) -> None:
        unit = self.blocks[place]
        if getattr(module, "recomputed", False) and torch.is_grad_enabled():
            unit.in_backward = True
        if unit.in_backward:
            unit.need()
        else:
            self._visit(place, place + 1)

    def _after_forward(self, place: int, module: nn.Module, args: tuple, out: Tensor) -> None:
        unit = self.blocks[place]
        if torch.is_grad_enabled() and out.requires_grad:
            out.register_hook(partial(self._before_backward, place))
        if not unit.in_backward:
            unit.release()

    def _before_backward(self, place: int, gradient: Tensor) -> None:
        for behind in self.blocks[place + 1 :]:
            if behind.in_backward:  # frozen in part: only now is it certain to be done
                behind.in_backward = False
                behind.release()
        self.blocks[place].in_backward = True
        self._visit(place, place - 1)

    def after_backward(self, memory: BucketMemory) -> None:
        """All gradients of a bucket are there: nobody needs its parameters any more."""
        for unit in self.blocks:
            if memory in unit.memories and not unit.is_frozen_in_part:
                unit.in_backward = False
                memory.release()

    def end_step(self) -> None:
        for unit in (*self.blocks, *self.others):
            unit.in_backward = False
            unit.release()
