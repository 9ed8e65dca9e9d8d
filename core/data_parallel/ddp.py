"""`DataParallel`: the stages of this rank, replicated over dp, and when their buckets travel.

A step goes through `zero_grad`, forwards and backwards (`sync` at the plan's ARM and DRAIN),
`sum_gradients`, the optimizer's update, and `publish`, which brings what was updated to all ranks.
Everything between ranks is summed, nothing averaged: the optimizer divides by the tokens, once.

Imports core.comm; buckets.py has the memory, units.py the hooks, config.py the flags.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from core.comm import Group, all_reduce_
from core.data_parallel.buckets import BucketMemory
from core.data_parallel.config import DataParallelConfig
from core.data_parallel.layout import Bucket, lay_out
from core.data_parallel.memory import UNDER_WAY
from core.data_parallel.units import Arrivals, Unit, Visits, unit_of, units_of, units_with_memory
from core.pipeline_parallel.actions import Op
from core.pipeline_parallel.stage import Stage
from core.shard import Shard, shard_of
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from kernels.wide_product import add_product

OVERLAPPED_BUCKET = 40_000_000  # parameters, where reductions overlap and nothing else is asked for


# ---- where layers leave their gradients ----------------------------------------------------------


def add_weight_grad(param: nn.Parameter, grad: Tensor, x: Tensor) -> None:
    """main_grad += grad' x; grad [n, rows], x [n, columns] of a linear's weight [rows, columns]."""
    main, fresh = param.gradient_target()
    add_product(main.view(grad.shape[1], x.shape[1]), grad.t(), x, fresh)


def add_bias_grad(param: nn.Parameter, grad: Tensor) -> None:
    """main_grad += sum of the rows of grad [n, rows]."""
    param.main_grad.add_(grad.sum(dim=0, dtype=param.main_grad.dtype))


def add_embedding_grad(param: nn.Parameter, grad: Tensor, ids: Tensor) -> None:
    """main_grad[ids] += grad; grad [n, h], ids [n] local rows."""
    param.main_grad.index_add_(0, ids, grad.to(param.main_grad.dtype))


def _connect(stage: nn.Module) -> None:
    """Layers add their weight gradients to main_grad themselves."""
    for part in stage.modules():
        if isinstance(part, ColumnParallelLinear | RowParallelLinear):
            part.weight_grad, part.bias_grad = add_weight_grad, add_bias_grad
        elif isinstance(part, VocabParallelEmbedding):
            part.weight_grad = add_embedding_grad


def _treated(param: nn.Parameter) -> Shard:
    """Its Shard; what is frozen does not decay either."""
    shard = shard_of(param)
    return shard if param.requires_grad else replace(shard, decay=False)


def _with_weight_grads(stage: Stage, work: Callable[[], object]) -> None:
    """Do `work` after the weight gradients that this backward has made so far: now, or at W."""
    if stage.defer is None:
        work()
    else:
        stage.defer(work)


# ---- the replicas --------------------------------------------------------------------------------


class DataParallel:
    """The stages of this rank, each with its buckets.

    dp        ranks that hold the same parameters: gradients are summed over them
    axes      "tp": for gradients of parameters that see part of the tokens or heads; "embed": for
              a word table that two stages hold
    memories  all buckets, in the order in which gradients are complete
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        dp: Group,
        tp: Group,
        embed: Group,
        config: DataParallelConfig | None = None,
        *,
        message: torch.dtype | None = None,
    ) -> None:
        """message: the type in which gradients travel; by default that of their sums."""
        config = config or DataParallelConfig()
        self.stages, self.dp, self.axes = list(stages), dp, {"tp": tp, "embed": embed}
        self.strategy = config.strategy if dp.size > 1 else "no_shard"
        self.overlaps = config.overlap_grad_reduce and dp.size > 1
        self.gathers_late = config.overlap_param_gather and self.strategy != "no_shard"
        self._by_stage: dict[int, list[BucketMemory]] = {}
        self._visits: list[Visits] = []
        self._units: list[Unit] = []
        self._armed: set[int] = set()
        self._flying: deque[BucketMemory] = deque()
        for stage in self.stages:
            _connect(stage)
            params = dict(stage.named_parameters())
            memories = [
                BucketMemory(bucket, params, dp, self.strategy, message=message)
                for bucket in self.buckets_of(stage, config)
            ]
            self._by_stage[stage.index] = memories
            self._hook(stage, memories)
        self.memories = [m for memories in self._by_stage.values() for m in memories]
        self.device = torch.device(stages[0].wire.device)

    def buckets_of(self, stage: nn.Module, config: DataParallelConfig) -> list[Bucket]:
        """How a stage's parameters are cut: by --ddp-bucket-size, or by units where they, or their
        gradients, come and go."""
        units = list(units_of(stage))
        comes_and_goes = self.strategy in ("optim_grads", "optim_grads_params")
        largest = config.ddp_bucket_size
        if largest is None and self.overlaps and not comes_and_goes:
            largest = OVERLAPPED_BUCKET
        return lay_out(
            [(name, tuple(p.shape), _treated(p)) for name, p in stage.named_parameters()],
            ways=1 if self.strategy == "no_shard" else self.dp.size,
            largest=largest,
            unit_of=partial(unit_of, units),
            by_unit=comes_and_goes and config.ddp_bucket_size is None,
        )

    def memories_of(self, stage: Stage) -> list[BucketMemory]:
        return self._by_stage[stage.index]

    def _hook(self, stage: Stage, memories: list[BucketMemory]) -> None:
        units = list(units_with_memory(stage, memories))
        visits = None
        if self.strategy == "optim_grads_params":
            visits = Visits(units, prefetch=self.gathers_late)
            self._visits.append(visits)
        elif self.gathers_late:
            Arrivals(units)
        self._units += units
        for memory in memories:
            memory.on_complete = partial(self._complete, stage.index, visits)
            if memory.shards_grads:
                memory.defer = partial(_with_weight_grads, stage)

    # -- gradients ---------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """A step begins."""
        for memory in self.memories:
            memory.begin_step()

    def sync(self, op: Op, stage: Stage) -> None:
        """At ARM, buckets that fill from now on may travel; at DRAIN all that are left do."""
        memories = self._by_stage[stage.index]
        if op is Op.ARM and self.overlaps:
            self._armed.add(stage.index)
            for memory in memories:
                memory.expect()
        elif op is Op.DRAIN and self.overlaps:
            self._start_rest(memories)

    def _complete(self, stage: int, visits: Visits | None, memory: BucketMemory) -> None:
        """Autograd has been through every parameter of a bucket, for a microbatch or for the step.

        Where the backward is split, weight gradients are still to come: the bucket travels with W,
        once a microbatch as ever, but nobody needs its parameters any more.
        """
        if memory.shards_grads:
            memory.expect()
            memory.defer(partial(self._reduce, memory))
        elif stage in self._armed:
            memory.start_reduction()
        if visits is not None:
            visits.after_backward(memory)

    def _reduce(self, memory: BucketMemory) -> None:
        memory.start_reduction()
        self._flying.append(memory)
        while len(self._flying) > (UNDER_WAY if self.overlaps else 0):
            self._flying.popleft().finish_reduction()

    def _start_rest(self, memories: Sequence[BucketMemory]) -> None:
        for memory in memories:
            if memory.shards_grads or not memory.started:
                memory.start_reduction()

    def sum_gradients(self) -> None:
        """Afterwards every bucket's `reduced` holds sums over all ranks.

        First over dp, then what other axes share: both copies of a tied word table are then the
        sum of the same two numbers.
        """
        self._start_rest(self.memories)
        for memory in self.memories:
            memory.finish_reduction()
        self._flying.clear()
        self._armed.clear()
        self.release()
        for axis, group in self.axes.items():
            self._sum_over(axis, group)

    def _sum_over(self, axis: str, group: Group) -> None:
        """One message for all that is summed over `axis` besides dp."""
        if group.size == 1:
            return
        pieces = [
            memory.reduced[start - memory.mine[0] : stop - memory.mine[0]]
            for memory in self.memories
            for start, stop in memory.bucket.shared(axis, memory.mine)
        ]
        if len(pieces) == 1:
            all_reduce_(pieces[0], group, tag=f"gradients.{axis}")
        elif pieces:
            joined = all_reduce_(torch.cat(pieces), group, tag=f"gradients.{axis}")
            parts = joined.split([len(piece) for piece in pieces])
            torch._foreach_copy_(pieces, list(parts))

    # -- parameters --------------------------------------------------------------------------------

    def publish(self) -> None:
        """Bring my part of the updated parameters to all ranks, in the order of use."""
        if self.strategy not in ("optim", "optim_grads"):
            return
        blocks_last = sorted(self._units, key=lambda unit: "." in unit.name)
        for unit in blocks_last:
            for memory in unit.memories:
                memory.start_gather()
        if not self.gathers_late:
            self.settle()

    def settle(self) -> None:
        """Wait for all parameters that are on their way."""
        for memory in self.memories:
            memory.finish_gather()

    def release(self) -> None:
        """A step or an evaluation is over: what is gathered at each use need not be here."""
        for visits in self._visits:
            visits.end_step()

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """All parameters of my stages are in memory inside. Collective over dp."""
        self.settle()
        for memory in self.memories:
            if not memory.is_here:
                memory.start_gather()
        self.settle()
        yield
        self.release()

    def named_parts(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, values, gradient sums) of every parameter, the elements in my part."""
        for memory in self.memories:
            grads = memory.my_slots(memory.reduced)
            for (slot, values), (_, grad) in zip(memory.my_slots(memory.kept), grads, strict=True):
                yield slot.name, values, grad
