"""`Executor`: runs this rank's row of a plan, action by action, and knows no schedule.

Each action maps to one short method. Receives are only posted; the forward or backward that needs
the tensor waits for it. Sends are waited for two sends later, so that few outputs are kept alive.
Every rank runs its whole row, in training and in evaluation, whatever it does with the result. With
one pipeline rank the row holds forwards and backwards only.

Neighbours: actions.py (the words), stage.py (the work), core.train (the caller).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.comm import P2P, Group, Pending, exchange
from core.comm.ledger import Ledger
from core.pipeline_parallel.actions import Action, Op, Plan
from core.pipeline_parallel.measured import PipelineLog
from core.pipeline_parallel.simulate import live_activations
from core.pipeline_parallel.stage import Batch, Loss, Stage

SENDS_UNDER_WAY = 2  # of activations, and of gradients; the next one waits for the oldest


@dataclass
class StepResult:
    """Sums over this rank's microbatches; empty on ranks without the last stage.

    sums           "loss": weighted token losses, "tokens": weights, and what else the model
                   reports; float64 scalars on the device
    by_microbatch  loss sums, to name the samples behind a NaN
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

    def __init__(self, batches: Iterator[Batch], uses: Counter[int], ledger: Ledger) -> None:
        self._batches, self._uses, self._ledger = batches, uses, ledger
        self._kept: dict[int, Batch] = {}
        self._next = 0

    def take(self, microbatch: int) -> Batch:
        while self._next <= microbatch:
            self._kept[self._next] = self._fetch()
            self._next += 1
        self._uses[microbatch] -= 1
        last_use = not self._uses[microbatch]
        return self._kept.pop(microbatch) if last_use else self._kept[microbatch]

    def _fetch(self) -> Batch:
        try:
            with self._ledger.timed("data"):
                return next(self._batches)
        except StopIteration:
            wanted = len(self._uses)
            raise ValueError(f"the data ends after {self._next} of {wanted} microbatches") from None


class Executor:
    """Runs a row over the stages this rank holds.

    row       this rank's actions
    stages    those of this rank
    pp        the pipeline group
    on_sync   called with (op, stage) at ARM and DRAIN: gradient reduction (core.data_parallel)
    log       is told when each forward and backward ran
    """

    def __init__(
        self,
        row: Sequence[Action],
        stages: Sequence[Stage],
        pp: Group,
        on_sync: Callable[[Op, Stage], None] | None = None,
        log: PipelineLog | None = None,
    ) -> None:
        self.row, self.pp, self.on_sync, self.log = tuple(row), pp, on_sync, log
        self.stages: Mapping[int, Stage] = {stage.index: stage for stage in stages}
        unknown = {a.stage for a in self.row} - set(self.stages)
        if unknown:
            raise ValueError(f"the row uses stages {sorted(unknown)}, built: {sorted(self.stages)}")
        for stage in {a.stage for a in self.row if a.op is Op.I}:
            self.stages[stage].split_backward()
        self.most_live = live_activations(Plan((self.row,), len(self.stages), 1))[0]
        self._do = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._input_gradient,
            Op.W: self._weight_gradient,
            Op.SEND_ACT: self._send_activation,
            Op.RECV_ACT: self._receive,
            Op.SEND_GRAD: self._send_gradient,
            Op.RECV_GRAD: self._receive,
            Op.ARM: self._sync,
            Op.DRAIN: self._sync,
        }

    def run(self, batches: Iterator[Batch]) -> StepResult:
        """One step: all actions of the row, in order. `batches` yields microbatches 0, 1, …"""
        uses = Counter(a.microbatch for a in self.row if a.op is Op.F)
        self._batches = _Batches(batches, uses, self.pp.ledger)
        self._result = StepResult()
        # what a stage has made, until it is sent or taken by another stage of this rank
        self._activations: dict[tuple[int, int], Tensor] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._arriving: dict[tuple[Op, int, int], Pending] = {}
        self._leaving: dict[Op, deque[Pending]] = {Op.SEND_ACT: deque(), Op.SEND_GRAD: deque()}
        for stage in self.stages.values():
            stage.forget()
        for action in self.row:
            with self.pp.ledger.at(str(action)):
                self._do[action.op](action)
        for sends in self._leaving.values():
            while sends:
                sends.popleft().wait()
        if self.log is not None:
            self.log.write(self.pp.ledger.step)
        return self._result

    def open_wires(self) -> None:
        """Send one number along every wire of the row, wire by wire in one order on all ranks.

        The first transfer between two ranks may set up a connection that both have to enter; in
        the middle of a schedule each could be waiting for a third.
        """
        wires = set()
        for action in self.row:
            if action.op is Op.SEND_ACT or action.op is Op.SEND_GRAD:
                wires.add((self.pp.rank, action.peer))
            elif action.peer is not None:
                wires.add((action.peer, self.pp.rank))
        device = next(iter(self.stages.values())).wire.device
        for source, target in sorted(wires):
            number = torch.zeros(1, device=device)
            sends = source == self.pp.rank
            end = P2P("send", number, target) if sends else P2P("recv", number, source)
            exchange([end], self.pp, tag="pipeline.open").wait()

    # -- compute -----------------------------------------------------------------------------------

    def _forward(self, a: Action) -> None:
        stage = self.stages[a.stage]
        activation = None
        if not stage.is_first:
            activation = self._take(Op.RECV_ACT, self._activations, a.stage - 1, a)
        batch = self._batches.take(a.microbatch)
        with self._timed(a, stage):
            out = stage.forward_step(a.microbatch, batch, activation)
        if isinstance(out, Loss):
            self._result.add(a.microbatch, out)
        else:
            self._activations[a.stage, a.microbatch] = out
        held = sum(stage.in_flight for stage in self.stages.values())
        assert held <= self.most_live, f"{a}: {held} activations held, planned {self.most_live}"

    def _backward(self, a: Action) -> None:
        self._backward_by(self.stages[a.stage].backward_step, a)

    def _input_gradient(self, a: Action) -> None:
        self._backward_by(self.stages[a.stage].input_grad_step, a)

    def _backward_by(
        self, step: Callable[[int, Tensor | None], Tensor | None], a: Action
    ) -> None:
        stage = self.stages[a.stage]
        gradient = None
        if not stage.is_last:
            gradient = self._take(Op.RECV_GRAD, self._gradients, a.stage + 1, a)
        with self._timed(a, stage):
            out = step(a.microbatch, gradient)
        if out is not None:
            self._gradients[a.stage, a.microbatch] = out

    def _weight_gradient(self, a: Action) -> None:
        stage = self.stages[a.stage]
        with self._timed(a, stage):
            stage.weight_grad_step(a.microbatch)

    def _take(
        self, op: Op, local: dict[tuple[int, int], Tensor], maker: int, a: Action
    ) -> Tensor:
        """What stage `maker` made for `a`: received, or left here by a stage of this rank."""
        pending = self._arriving.pop((op, a.stage, a.microbatch), None)
        return local.pop((maker, a.microbatch)) if pending is None else pending.wait()[0]

    @contextmanager
    def _timed(self, a: Action, stage: Stage) -> Iterator[None]:
        """Tells the log when `a` computed: not what it waited for before."""
        with self.pp.ledger.timed("forward" if a.op is Op.F else "backward"):
            if self.log is None:
                yield
                return
            start = self._now(stage)
            yield
            self.log.add(a, start, self._now(stage))

    def _now(self, stage: Stage) -> float:
        if torch.device(stage.wire.device).type != "cpu":
            torch.accelerator.synchronize()
        return self.log.now()

    # -- transfers ---------------------------------------------------------------------------------

    def _send_activation(self, a: Action) -> None:
        self._send(a, self._activations.pop((a.stage, a.microbatch)))

    def _send_gradient(self, a: Action) -> None:
        self._send(a, self._gradients.pop((a.stage, a.microbatch)))

    def _send(self, a: Action, tensor: Tensor) -> None:
        """Starts a send and lets go of the tensor: the pending send holds it until it is done.

        Waiting here for an older send cannot deadlock: the plan's check lets every send block.
        """
        sends = self._leaving[a.op]
        if len(sends) == SENDS_UNDER_WAY:
            sends.popleft().wait()
        send = P2P("send", tensor.contiguous(), a.peer)
        sends.append(exchange([send], self.pp, tag=_TAG[a.op]))

    def _receive(self, a: Action) -> None:
        receive = P2P("recv", self.stages[a.stage].wire.buffer(), a.peer)
        pending = exchange([receive], self.pp, tag=_TAG[a.op])
        self._arriving[a.op, a.stage, a.microbatch] = pending

    # -- gradients ---------------------------------------------------------------------------------

    def _sync(self, a: Action) -> None:
        if self.on_sync is not None:
            self.on_sync(a.op, self.stages[a.stage])


_TAG = {
    Op.SEND_ACT: "pipeline.activation",
    Op.RECV_ACT: "pipeline.activation",
    Op.SEND_GRAD: "pipeline.gradient",
    Op.RECV_GRAD: "pipeline.gradient",
}
