"""`Stage`: one chunk of the model, and the tensors of its microbatches in flight.

A model module derives from `Stage` and writes `compute`; the executor calls `forward_step` and
`backward_step` with microbatch numbers, and knows no schedule. Imports torch only.

Neighbours: core.pipeline_parallel.executor (the caller), models.gpt and models.bert (the stages).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class WireSpec:
    """Shape and type of what crosses a stage's borders for one microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype


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
    """One microbatch between its forward and its backward."""

    input: Tensor | None
    output: Tensor


class Stage(nn.Module):
    """Base of a model chunk: number `index` of `count`, first and last included.

    wire     what this stage receives and sends; all stages of a model share it
    reports  names of the sums that the last stage makes, the same on every stage
    """

    reports: tuple[str, ...] = ("loss", "tokens")

    def __init__(self, index: int, count: int, wire: WireSpec) -> None:
        super().__init__()
        self.index, self.count, self.wire = index, count, wire
        self._in_flight: dict[int, InFlight] = {}

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def compute(self, batch: Batch, activation: Tensor | None) -> Tensor | Loss:
        """The chunk itself: activation in (None on the first stage), activation or Loss out."""
        raise NotImplementedError

    @property
    def in_flight(self) -> int:
        """How many microbatches hold activations now."""
        return len(self._in_flight)

    def forward_step(
        self, microbatch: int, batch: Batch, activation: Tensor | None
    ) -> Tensor | Loss:
        """Run `compute`; in training, keep what the backward of `microbatch` needs.

        The activation sent on is detached; a Loss keeps only values.
        """
        if not self.training:
            with torch.no_grad():
                return self.compute(batch, activation)
        if microbatch in self._in_flight:
            raise RuntimeError(f"stage {self.index}: microbatch {microbatch} is already in flight")
        if activation is not None:
            activation = activation.detach().requires_grad_()
        out = self.compute(batch, activation)
        if isinstance(out, Loss):
            self._in_flight[microbatch] = InFlight(activation, out.total)
            return Loss(out.total.detach(), out.tokens, out.extra)
        if tuple(out.shape) != self.wire.shape:
            raise ValueError(
                f"stage {self.index} made an activation of shape {tuple(out.shape)}; the next "
                f"stage expects {self.wire.shape}"
            )
        self._in_flight[microbatch] = InFlight(activation, out)
        return out.detach()

    def backward_step(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Run autograd for `microbatch`; parameters' gradients go to their sinks.

        gradient: of the output, None on the last stage (d loss / d loss = 1).
        Returns the gradient of the input, None on the first stage.
        """
        kept = self._in_flight.pop(microbatch)
        torch.autograd.backward(kept.output, gradient)
        return None if kept.input is None else kept.input.grad
