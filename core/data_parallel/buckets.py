"""`GradBuffer`: the flat parameters and gradients of one stage.

`param.data` and `param.main_grad` are views of two flat arrays; gradients hold sums over tokens and
microbatches in float32 (float64 under --fp64), whatever the parameter's type. Linears and
embeddings add their weight gradients straight into main_grad; everything else arrives through
autograd and is added by a hook. See layout.py for what lies where.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from core.comm import Group, all_reduce_
from core.data_parallel.layout import Layout, lay_out
from core.shard import shard_of
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


def add_weight_grad(param: nn.Parameter, grad: Tensor, x: Tensor) -> None:
    """main_grad += grad' x; grad [n, rows], x [n, columns] of a linear's weight [rows, columns]."""
    main = param.main_grad.view(grad.shape[1], x.shape[1])
    if main.dtype == grad.dtype == x.dtype:
        main.addmm_(grad.t(), x)
    else:
        main.add_(grad.t().to(main.dtype) @ x.to(main.dtype))


def add_bias_grad(param: nn.Parameter, grad: Tensor) -> None:
    """main_grad += sum of the rows of grad [n, rows]."""
    param.main_grad.add_(grad.sum(dim=0, dtype=param.main_grad.dtype))


def add_embedding_grad(param: nn.Parameter, grad: Tensor, ids: Tensor) -> None:
    """main_grad[ids] += grad; grad [n, h], ids [n] local rows."""
    param.main_grad.index_add_(0, ids, grad.to(param.main_grad.dtype))


class GradBuffer:
    """Flat parameters and gradients of a module whose parameters all have a Shard.

    params  [total] flat parameters      grads  [total] flat gradients
    """

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        """device: of a module without parameters, such as a stage that only passes on."""
        named = list(module.named_parameters())
        first = named[0][1] if named else torch.empty(0, device=device)
        self.layout: Layout = lay_out([(n, tuple(p.shape), shard_of(p)) for n, p in named])
        self.by_name: dict[str, nn.Parameter] = dict(named)
        accumulate = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.params = torch.empty(self.layout.total, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(self.layout.total, dtype=accumulate, device=first.device)
        for slot in self.layout.slots:
            param = self.by_name[slot.name]
            view = self.params[slot.start : slot.stop].view(slot.shape)
            view.copy_(param.data)
            param.data = view
            param.main_grad = self.grads[slot.start : slot.stop].view(slot.shape)
        self._connect(module)

    def _connect(self, module: nn.Module) -> None:
        """Weight gradients go straight into main_grad; the rest through a hook."""
        for part in module.modules():
            if isinstance(part, ColumnParallelLinear | RowParallelLinear):
                part.weight_grad, part.bias_grad = add_weight_grad, add_bias_grad
            elif isinstance(part, VocabParallelEmbedding):
                part.weight_grad = add_embedding_grad
        for param in self.by_name.values():
            param.register_post_accumulate_grad_hook(_move_to_main_grad)

    def zero_(self) -> None:
        self.grads.zero_()

    def region(self, axis: str) -> Tensor:
        """The gradients that are summed over `axis` besides dp."""
        start, stop = self.layout.regions[axis]
        return self.grads[start:stop]

    def parts(self) -> list[Tensor]:
        """All gradients, in the pieces in which they are summed over dp: a table that two stages
        hold is one of its own, so that both add up its elements in the same order."""
        start, _ = self.layout.regions["embed"]
        return [part for part in (self.grads[:start], self.grads[start:]) if part.numel()]


def _move_to_main_grad(param: Tensor) -> None:
    if param.grad is None:  # a linear or embedding has added to main_grad already
        return
    param.main_grad.add_(param.grad)
    param.grad = None


class DataParallel:
    """The stages of this rank, each with its buffer, replicated over `dp`.

    dp     ranks that hold the same parameters: gradients are summed over them
    tp     for gradients of parameters that see part of the tokens or heads
    embed  for a word table that two stages hold
    """

    def __init__(self, stages: list, dp: Group, tp: Group, embed: Group) -> None:
        self.stages = list(stages)
        self.buffers = [GradBuffer(stage, stage.wire.device) for stage in stages]
        self.dp, self.axes = dp, {"tp": tp, "embed": embed}

    def zero_grad(self) -> None:
        for buffer in self.buffers:
            buffer.zero_()

    def sum_gradients(self) -> None:
        """Sum what other axes share, then everything over dp.

        In this order: two stages that share a table would otherwise add parts that differ.
        """
        for buffer in self.buffers:
            for axis, group in self.axes.items():
                part = buffer.region(axis)
                if part.numel():
                    all_reduce_(part, group, tag=f"gradients.{axis}")
        for buffer in self.buffers:
            for part in buffer.parts():
                all_reduce_(part, self.dp, tag="gradients")
