"""`WeightGradQueue`: weight gradients that wait between the I and the W of a microbatch.

A split backward computes input gradients at once, since another rank waits for them, and weight
gradients when there is time. Our layers hand their weight gradients to callables (`weight_grad` and
`bias_grad`, see core.tensor_parallel.linear); `connect` puts the queue in front of those. Whatever
has no callable, norms for instance, is computed by autograd in I.

Imports torch only. A stage owns one queue (stage.py); nothing here is shared between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

SINKS = ("weight_grad", "bias_grad")


@dataclass(frozen=True)
class _Held:
    """Work, and what says how much memory it holds."""

    work: Callable[[], object]
    held: object

    def __call__(self) -> None:
        self.work()


class WeightGradQueue:
    """Work by microbatch, done in the order in which it came.

    keeps  is told what waits, for the memory report: what it returns is held as long
    """

    def __init__(self) -> None:
        self.keeps: Callable[[tuple[object, ...]], object] | None = None
        self._waiting: dict[int, list[Callable[[], object]]] = {}
        self._microbatch: int | None = None

    def connect(self, module: nn.Module) -> None:
        """From now on the gradients of `module`'s layers go through this queue. Called once, after
        core.data_parallel has given the layers their callables."""
        for part in module.modules():
            for name in SINKS:
                sink = getattr(part, name, None)
                if sink is not None:
                    setattr(part, name, self._deferring(sink))

    def _deferring(self, sink: Callable[..., object]) -> Callable[..., None]:
        def later(*gradient: object) -> None:
            if self.keeps is None or self._microbatch is None:
                self.put(partial(sink, *gradient))
            else:
                self.put(_Held(partial(sink, *gradient), self.keeps(gradient)))

        return later

    @contextmanager
    def holding(self, microbatch: int) -> Iterator[None]:
        """What is put inside waits until `run(microbatch)`."""
        self._waiting[microbatch] = []
        self._microbatch = microbatch
        try:
            yield
        finally:
            self._microbatch = None

    def put(self, work: Callable[[], object]) -> None:
        """Inside `holding`, keep `work` for later; elsewhere, a whole backward, do it at once."""
        if self._microbatch is None:
            work()
        else:
            self._waiting[self._microbatch].append(work)

    @torch.no_grad()
    def run(self, microbatch: int) -> None:
        """Do what waits for `microbatch`; each tensor is let go as soon as it is used."""
        waiting = self._waiting.pop(microbatch)
        waiting.reverse()
        while waiting:
            waiting.pop()()

    def clear(self) -> None:
        self._waiting.clear()
