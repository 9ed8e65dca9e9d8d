"""`Stage`: one chunk of the model, and the tensors of its microbatches in flight.

A model module derives from `Stage` and writes `compute`; the executor calls `forward_step` and
`backward_step` (or `input_grad_step` and `weight_grad_step`) with microbatch numbers, and knows no
model.

Neighbours: core.pipeline_parallel.executor (the caller), weight_queue (what waits between the two
halves of a backward), models.gpt and models.bert (the stages).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from core.loss_memory import LossMemory
from core.pipeline_parallel.weight_queue import WeightGradQueue

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class WireSpec:
    """Shape, type and place of what crosses a stage's borders for one microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | str = "cpu"

    def buffer(self) -> Tensor:
        """Memory for one arriving tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


@dataclass
class Loss:
    """What the last stage makes of one microbatch.

    total   scalar: weighted sum of the token losses; differentiable
    tokens  scalar: the sum of the weights (kept tokens)
    extra   further sums to be reported, by name
    """

    total: Tensor
    tokens: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class InFlight:
    """One microbatch from its forward to the end of its backward.

    input   what came in, None on the first stage; autograd leaves its gradient here
    edge    where backward enters the graph. The output itself is not kept: once it has been sent,
            its memory is free. None when nothing asks for a gradient, and after I
    """

    input: Tensor | None
    edge: GradientEdge | None


class Stage(nn.Module):
    """Base of a model chunk: number `index` of `count`, first and last included.

    wire      what this stage receives and sends; all stages of a model share it
    upstream  the gradient that the loss's backward starts from: 1, or a loss scale
    reports   names of the sums that the last stage makes, the same on every stage

    For the memory report, where a model says so: bytes that autograd keeps of a microbatch and the
    most while its backward runs (saved_bytes), and likewise those of output layer and loss, which
    do not count there (loss_bytes). loss_memory sees the latter, while somebody looks.
    """

    saved_bytes: tuple[int, int] = (0, 0)
    loss_bytes: tuple[int, int] = (0, 0)
    loss_memory: LossMemory | None = None
    reports: tuple[str, ...] = ("loss", "tokens")

    def __init__(self, index: int, count: int, wire: WireSpec) -> None:
        super().__init__()
        self.index, self.count, self.wire = index, count, wire
        self.upstream = 1.0
        self._in_flight: dict[int, InFlight] = {}
        self._queue: WeightGradQueue | None = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def report(self, sums: Mapping[str, float]) -> dict[str, float]:
        """What the log says of the sums named by `reports`, of a step or an evaluation: "lm_loss",
        further names that end in _loss, and numbers for the metrics file."""
        return {"lm_loss": sums["loss"] / sums["tokens"] if sums["tokens"] else 0.0}

    @property
    def label(self) -> str:
        """What errors call the model."""
        return type(self).__name__

    def compute(self, batch: Batch, activation: Tensor | None) -> Tensor | Loss:
        """The chunk itself: activation in (None on the first stage), activation or Loss out."""
        raise NotImplementedError

    @property
    def in_flight(self) -> int:
        """How many microbatches hold activations now: from F to B, or to W."""
        return len(self._in_flight)

    @property
    def defer(self) -> Callable[[Callable[[], object]], None] | None:
        """Takes weight-gradient work that a backward makes: done at W where the backward is split.
        None where it is not. For layers that have no `weight_grad`, such as the output loss."""
        if self._queue is None or self.loss_memory is None:
            return None if self._queue is None else self._queue.put
        put, memory = self._queue.put, self.loss_memory
        return lambda work: put(memory.of(work))

    def making_loss(self, hidden: Tensor) -> AbstractContextManager:
        """To be around what makes a loss of the last hidden states, for the memory report."""
        if self.loss_memory is None or not self.training:
            return nullcontext()
        return self.loss_memory.forward(hidden)

    def gradient_sum(self, weight: nn.Parameter) -> Callable[[], tuple[Tensor, bool]] | None:
        """Gives the memory where gradients of `weight` add up, and whether this one is the first
        there and overwrites it: to be asked when there is a gradient, since the memory may come and
        go with every microbatch. None where autograd has to take the gradient."""
        if not self.training or not hasattr(type(weight), "gradient_target"):
            return None
        return weight.gradient_target

    def forward_step(
        self, microbatch: int, batch: Batch, activation: Tensor | None
    ) -> Tensor | Loss:
        """Run `compute`; in training, keep what the backward of `microbatch` needs.

        The activation sent on is detached; a Loss keeps only values.
        """
        if not self.training:
            with torch.no_grad():
                return self._checked(self.compute(batch, activation))
        if microbatch in self._in_flight:
            raise RuntimeError(f"stage {self.index}: microbatch {microbatch} is already in flight")
        if activation is not None:
            activation = activation.detach().requires_grad_()
        out = self._checked(self.compute(batch, activation))
        head = out.total if isinstance(out, Loss) else out
        if isinstance(out, Loss) and self.upstream != 1.0:
            head = head * self.upstream
        edge = get_gradient_edge(head) if head.requires_grad else None
        self._in_flight[microbatch] = InFlight(activation, edge)
        if isinstance(out, Loss):
            return Loss(out.total.detach(), out.tokens.detach(), out.extra)
        return out.detach()

    def _checked(self, out: Tensor | Loss) -> Tensor | Loss:
        """`out` if it is what the next stage, or the trainer, can take."""
        who = f"stage {self.index} of {self.count} ({self.label})"
        if isinstance(out, Loss) != self.is_last:
            wanted = "a Loss, since it is the last" if self.is_last else "an activation tensor"
            raise TypeError(f"{who} made {type(out).__name__}; it has to make {wanted}")
        if isinstance(out, Loss):
            return out
        made = WireSpec(tuple(out.shape), out.dtype)
        if (made.shape, made.dtype) != (self.wire.shape, self.wire.dtype):
            raise ValueError(
                f"{who} made an activation of {made}; the next stage expects {self.wire}. Every "
                "microbatch has one shape: pad the sequences"
            )
        return out

    def backward_step(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Run autograd for `microbatch`; parameters' gradients go to their sinks.

        gradient: of the output, None on the last stage (it is `upstream`).
        Returns the gradient of the input, None on the first stage.
        """
        return self._backward(self._in_flight.pop(microbatch), gradient)

    def _backward(self, kept: InFlight, gradient: Tensor | None) -> Tensor | None:
        with nullcontext() if self.loss_memory is None else self.loss_memory.backward():
            return _backward(kept, gradient)

    def split_backward(self) -> None:
        """From now on I may leave weight gradients for W; called before the first such step."""
        if self._queue is None:
            self._queue = WeightGradQueue()
            self._queue.connect(self)

    def input_grad_step(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """As `backward_step`, but weight gradients wait for `weight_grad_step`."""
        with self._queue.holding(microbatch):
            return self._backward(self._in_flight[microbatch], gradient)

    def weight_grad_step(self, microbatch: int) -> None:
        """The weight gradients that `input_grad_step` has left."""
        self._queue.run(microbatch)
        del self._in_flight[microbatch]

    def watch_memory(
        self,
        loss: LossMemory | None,
        keeps: Callable[[tuple[object, ...]], object] | None,
    ) -> None:
        """For the memory report: `loss` sees what the loss takes, `keeps` what waits for W. None
        and None: no longer."""
        self.loss_memory = loss if self.is_last else None
        if self._queue is not None:
            self._queue.keeps = keeps

    def forget(self) -> None:
        """Drop what a failed step has left behind."""
        self._in_flight.clear()
        if self._queue is not None:
            self._queue.clear()


def _backward(kept: InFlight, gradient: Tensor | None) -> Tensor | None:
    if kept.edge is not None:
        torch.autograd.backward(kept.edge, gradient)
    x, kept.input, kept.edge = kept.input, None, None
    if x is None:
        return None
    return torch.zeros_like(x) if x.grad is None else x.grad
