"""`BucketMemory`: parameters and gradients of one bucket on this rank, and their two collectives.

Gradients hold sums over tokens and microbatches in float32 (float64 under --fp64), whatever the
parameter's type. `param.main_grad` is where to add them: linears, embeddings and the output loss do
so themselves, the rest arrives through autograd. A frozen parameter (requires_grad False) has its
place, for gathers and checkpoints, and a gradient of zeros. What is kept, and what travels:

    strategy            gradients kept   parameters kept    reduction               gather
    no_shard            all              all                all-reduce, a step      none
    optim               all              all                reduce-scatter, a step  a step
    optim_grads         my part          all                … a microbatch          a step
    optim_grads_params  my part          my part            … a microbatch          at each use

Imports core.comm. Read layout.py first; ddp.py decides when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from core.comm import (
    Group,
    Pending,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)
from core.data_parallel.config import Strategy
from core.data_parallel.layout import Bucket, Slot


class FlatParameter(nn.Parameter):
    """A parameter whose memory belongs to a bucket; `BucketMemory` makes parameters into these."""

    memory: BucketMemory
    place: int

    @property
    def main_grad(self) -> Tensor:
        """The gradient sum so far, to be added to; zeros before the first gradient of a step."""
        return self.memory.gradient(self.place)

    def gradient_target(self) -> tuple[Tensor, bool]:
        """(main_grad's memory, whether the gradient is to overwrite it, as the first of a step)."""
        return self.memory.target(self.place)


class BucketMemory:
    """One bucket of this rank.

    params       [n] flat parameters     grads    [n] flat gradients of this step or microbatch
    kept         my part of params       reduced  my part of the gradients' sums over dp
    mine         (start, stop) of my part; all of the bucket where nothing is sharded
    dtype        of gradient sums        message  of gradients between ranks
    on_complete  is told when autograd has been through every parameter since `expect`
    defer        takes what is to be done with gradients that a split backward leaves for later
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Mapping[str, nn.Parameter],
        dp: Group,
        strategy: Strategy = "no_shard",
        message: torch.dtype | None = None,
    ) -> None:
        self.bucket, self.dp = bucket, dp
        self.sharded = strategy != "no_shard"
        self.shards_grads = strategy in ("optim_grads", "optim_grads_params")
        self.shards_params = strategy == "optim_grads_params"
        self.mine = bucket.part(dp.rank, dp.size) if self.sharded else (0, bucket.length)
        first = params[bucket.slots[0].name]
        self.dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.message = message or self.dtype
        self.params = torch.zeros(bucket.length, dtype=first.dtype, device=first.device)
        self.parameters = [self._adopt(place, params) for place in range(len(bucket.slots))]
        start, stop = self.mine
        self.kept = self.params[start:stop]
        if self.shards_params:
            self.kept = self.kept.clone()
        self.grads: Tensor | None = None
        self.reduced: Tensor
        if self.shards_grads:
            self.reduced = torch.zeros(stop - start, dtype=self.dtype, device=first.device)
        else:
            self._allocate()
            self.reduced = self.grads[start:stop]
        self.on_complete: Callable[[BucketMemory], None] | None = None
        self.defer: Callable[[Callable[[], object]], object] = _at_once
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        self.release()
        self.begin_step()

    def _adopt(self, place: int, params: Mapping[str, nn.Parameter]) -> FlatParameter:
        slot = self.bucket.slots[place]
        param = params[slot.name]
        view = self.params[slot.start : slot.stop].view(slot.shape)
        view.copy_(param.data)
        param.data = view
        param.__class__ = FlatParameter
        param.memory, param.place = self, place
        trains = param.requires_grad
        param.requires_grad_()  # torch hooks no other
        param.register_post_accumulate_grad_hook(_arrived)
        return param.requires_grad_(trains)

    def my_slots(self, flat: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        """Every slot that my part overlaps, with its elements in `flat`, a tensor of my part."""
        first, last = self.mine
        for slot in self.bucket.slots:
            start, stop = max(slot.start, first), min(slot.stop, last)
            if start < stop:
                yield slot, flat[start - first : stop - first]

    @property
    def passing_bytes(self) -> int:
        """Of parameters and gradients that are here now and are not kept."""
        size = self.params.untyped_storage().nbytes() if self.shards_params else 0
        if self.shards_grads:
            size += 0 if self.grads is None else self.grads.nbytes
            size += 0 if self._reducing is None else self.bucket.length * self.message.itemsize
        return size

    # -- gradients ---------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """All gradients are zero from here on: no memory is touched until one arrives."""
        self._fresh = [True] * len(self.bucket.slots)
        self._nothing_reduced = True
        self.expect()

    def expect(self) -> None:
        """From here on, wait for one gradient of every parameter that is not frozen."""
        places = enumerate(self.parameters)
        self._missing = {place for place, param in places if param.requires_grad}

    def _allocate(self) -> None:
        self.grads = torch.empty(self.bucket.length, dtype=self.dtype, device=self.params.device)
        for start, stop in self.bucket.gaps():
            self.grads[start:stop].zero_()

    def gradient(self, place: int) -> Tensor:
        """Where to add the gradient of parameter number `place`."""
        view, fresh = self.target(place)
        return view.zero_() if fresh else view

    def target(self, place: int) -> tuple[Tensor, bool]:
        """(its place, whether that is to be overwritten instead of added to)."""
        if self.grads is None:
            self._allocate()
        slot, fresh = self.bucket.slots[place], self._fresh[place]
        self._fresh[place] = False
        return self.grads[slot.start : slot.stop].view(slot.shape), fresh

    def add(self, place: int, gradient: Tensor) -> None:
        view, fresh = self.target(place)
        view.copy_(gradient) if fresh else view.add_(gradient)

    def arrived(self, place: int) -> None:
        """Told of every parameter when autograd is done with its gradient."""
        if place in self._missing:
            self._missing.remove(place)
            if not self._missing and self.on_complete is not None:
                self.on_complete(self)

    @property
    def started(self) -> bool:
        """Whether a reduction is on its way, or was finished in this step."""
        return self._reducing is not None or not self._nothing_reduced

    def start_reduction(self) -> None:
        """Sum over dp what has been added since the last time, if anything has."""
        self.finish_reduction()
        if self.shards_grads and self.grads is None:
            return
        for place, fresh in enumerate(self._fresh):
            if fresh:
                self.gradient(place)
        message = self.grads
        if self.dp.size > 1 and self.message != self.dtype:
            message = message.to(self.message)
        in_place = message is self.grads and not self.shards_grads
        if self.sharded:
            out = self.reduced if in_place else None
            self._reducing = start_reduce_scatter(message, self.dp, out=out, tag="gradients")
        else:
            self._reducing = start_all_reduce_(message, self.dp, tag="gradients")
        if self.shards_grads:
            self.grads = None
            self._fresh = [True] * len(self._fresh)

    def finish_reduction(self) -> None:
        """Afterwards `reduced` holds the sums."""
        if self._reducing is None:
            return
        got, self._reducing = self._reducing.wait(), None
        if self.shards_grads and not self._nothing_reduced:
            self.reduced.add_(got)
        elif self.shards_grads or got.dtype != self.dtype:
            self.reduced.copy_(got)
        self._nothing_reduced = False

    # -- parameters --------------------------------------------------------------------------------

    @property
    def is_here(self) -> bool:
        """Whether all of `params` is in memory, or on its way."""
        return self.params.untyped_storage().size() > 0

    def start_gather(self) -> None:
        """Fetch all parts of `params` from the ranks that keep them."""
        if self._gathering is not None:
            return
        if not self.is_here:  # memory that numpy has looked at, for a save, cannot be resized
            self.params.untyped_storage().resize_(self.params.numel() * self.params.element_size())
        self._gathering = start_all_gather(self.kept, self.dp, out=self.params, tag="parameters")

    def finish_gather(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self) -> None:
        """Give up the memory of `params` where only my part is kept."""
        if self.shards_params:
            self.finish_gather()
            self.params.untyped_storage().resize_(0)


def _at_once(work: Callable[[], object]) -> None:
    work()


def _arrived(param: FlatParameter) -> None:
    """After autograd: what it has left in .grad goes to the bucket; of a split backward at W, where
    gradients are not kept, so that no bucket's memory is held from I to W.

    A hook that held the bucket would be a cycle that no garbage collector sees.
    """
    if param.grad is not None:  # None: a layer has added to main_grad already
        param.memory.defer(partial(param.memory.add, param.place, param.grad))
        param.grad = None
    param.memory.arrived(param.place)
