"""`Executor`: runs this rank's row of a plan, action by action, and knows no schedule.

Each action maps to one short method. Receives are only posted; the forward or backward that needs
the tensor waits for it. Every rank runs its whole row, in training and in evaluation, whatever it
does with the result. With one pipeline rank the row holds forwards and backwards only.

Neighbours: actions.py (the words), stage.py (the work), core.train (the caller).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.comm import P2P, Group, Pending, exchange
from core.pipeline_parallel.actions import Action, Op
from core.pipeline_parallel.stage import Batch, Loss, Stage


@dataclass
class StepResult:
    """Sums over this rank's microbatches; zero on ranks without the last stage.

    sums     "loss": weighted token losses, "tokens": weights, and what else the model reports;
             float64 scalars on the device
    worst    loss sums per microbatch, in order, to name the samples behind a NaN
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    by_microbatch: dict[int, Tensor] = field(default_factory=dict)

    def add(self, microbatch: int, loss: Loss) -> None:
        self.by_microbatch[microbatch] = loss.total
        for name, value in {"loss": loss.total, "tokens": loss.tokens, **loss.extra}.items():
            value = value.detach().to(torch.float64)
            self.sums[name] = self.sums[name] + value if name in self.sums else value


class _Batches:
    """Microbatches by number, fetched in order, dropped after their last use on this rank."""

    def __init__(self, batches: Iterator[Batch], uses: dict[int, int]) -> None:
        self._batches, self._uses = batches, uses
        self._kept: dict[int, Batch] = {}
        self._next = 0

    def take(self, microbatch: int) -> Batch:
        while self._next <= microbatch:
            self._kept[self._next] = next(self._batches)
            self._next += 1
        batch = self._kept[microbatch]
        self._uses[microbatch] -= 1
        if not self._uses[microbatch]:
            del self._kept[microbatch]
        return batch


class Executor:
    """Runs a row over the stages this rank holds.

    row       this rank's actions
    stages    by index
    pp        the pipeline group
    on_sync   called with (op, stage) at ARM and DRAIN: gradient reduction (core.data_parallel)
    """

    def __init__(
        self,
        row: Sequence[Action],
        stages: Sequence[Stage],
        pp: Group,
        on_sync: Callable[[Op, Stage], None] | None = None,
    ) -> None:
        self.row, self.pp, self.on_sync = tuple(row), pp, on_sync
        self.stages: Mapping[int, Stage] = {stage.index: stage for stage in stages}
        unknown = {a.stage for a in self.row} - set(self.stages)
        if unknown:
            raise ValueError(f"the row uses stages {sorted(unknown)}, built: {sorted(self.stages)}")
        self._do = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.SEND_ACT: self._send_activation,
            Op.RECV_ACT: self._receive_activation,
            Op.SEND_GRAD: self._send_gradient,
            Op.RECV_GRAD: self._receive_gradient,
            Op.ARM: self._sync,
            Op.DRAIN: self._sync,
        }

    def run(self, batches: Iterator[Batch]) -> StepResult:
        """One step: all actions of the row, in order. `batches` yields microbatches 0, 1, …"""
        uses: dict[int, int] = {}
        for action in self.row:
            if action.op is Op.F:
                uses[action.microbatch] = uses.get(action.microbatch, 0) + 1
        self._batches = _Batches(batches, uses)
        self._result = StepResult()
        self._activations: dict[tuple[int, int], Tensor] = {}  # outputs, then inputs of the next
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._arriving: dict[tuple[Op, int, int], Pending] = {}
        self._leaving: list[Pending] = []
        for action in self.row:
            with self.pp.ledger.at(str(action)):
                self._do[action.op](action)
        for pending in self._leaving:
            pending.wait()
        return self._result

    # -- compute -----------------------------------------------------------------------------------

    def _forward(self, a: Action) -> None:
        stage = self.stages[a.stage]
        activation = None
        if not stage.is_first:
            activation = self._take(Op.RECV_ACT, self._activations, (a.stage - 1, a.microbatch), a)
        out = stage.forward_step(a.microbatch, self._batches.take(a.microbatch), activation)
        if isinstance(out, Loss):
            self._result.add(a.microbatch, out)
        else:
            self._activations[a.stage, a.microbatch] = out

    def _backward(self, a: Action) -> None:
        stage = self.stages[a.stage]
        gradient = None
        if not stage.is_last:
            gradient = self._take(Op.RECV_GRAD, self._gradients, (a.stage + 1, a.microbatch), a)
        out = stage.backward_step(a.microbatch, gradient)
        if out is not None:
            self._gradients[a.stage, a.microbatch] = out

    def _take(
        self, op: Op, local: dict[tuple[int, int], Tensor], made: tuple[int, int], a: Action
    ) -> Tensor:
        """What the neighbouring stage made: received, or left here by a stage of this rank."""
        pending = self._arriving.pop((op, a.stage, a.microbatch), None)
        return local.pop(made) if pending is None else pending.wait()[0]

    # -- transfers ---------------------------------------------------------------------------------

    def _send_activation(self, a: Action) -> None:
        self._send(a, self._activations.pop((a.stage, a.microbatch)), "activation")

    def _send_gradient(self, a: Action) -> None:
        self._send(a, self._gradients.pop((a.stage, a.microbatch)), "gradient")

    def _send(self, a: Action, tensor: Tensor, what: str) -> None:
        send = P2P("send", tensor.contiguous(), a.peer)
        self._leaving.append(exchange([send], self.pp, tag=f"pipeline.{what}"))

    def _receive_activation(self, a: Action) -> None:
        self._receive(a, "activation")

    def _receive_gradient(self, a: Action) -> None:
        self._receive(a, "gradient")

    def _receive(self, a: Action, what: str) -> None:
        stage = self.stages[a.stage]
        device = next(stage.parameters()).device
        buffer = torch.empty(stage.wire.shape, dtype=stage.wire.dtype, device=device)
        receive = P2P("recv", buffer, a.peer)
        pending = exchange([receive], self.pp, tag=f"pipeline.{what}")
        self._arriving[a.op, a.stage, a.microbatch] = pending

    # -- gradients ---------------------------------------------------------------------------------

    def _sync(self, a: Action) -> None:
        if self.on_sync is not None:
            self.on_sync(a.op, self.stages[a.stage])
