"""A step that is made once more with every layer looked at: where numbers stop being finite.

    with Checks(stages, ledger) as checks:
        …the step…
    verdict(what, value, findings of all ranks)

core.train does so under --rerun-mode validate_results when a loss or gradient norm is not finite.
The step is a function of weights and samples, so that a fault in either, or in the code, is there
again; one that is not was the machine's. Neighbour: core/not_finite.py (what is said without it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from core.comm.ledger import Ledger
from core.pipeline_parallel.actions import Action
from core.pipeline_parallel.stage import Loss, Stage

FORWARD, BACKWARD = 0, 1
Finding = tuple[list[int], str]  # when, so that those of all ranks can be sorted, and what


class Checks:
    """Looks at what every module of the stages is given and makes, and at gradients of the latter.

    first  the first of them on this rank that is not finite, or None
    """

    def __init__(self, stages: Sequence[Stage], ledger: Ledger) -> None:
        self.stages, self._ledger = stages, ledger
        self.first: Finding | None = None
        self._place, self._looks = "", 0
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Checks:
        self._handles = [
            module.register_forward_hook(partial(self._forward, name))
            for stage in self.stages
            for name, module in stage.named_modules()
            if name
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _forward(self, name: str, module: nn.Module, given: object, made: object) -> None:
        self._look(f"the input of {name}", given, FORWARD)
        self._look(f"the output of {name}", made, FORWARD)
        for tensor in _tensors(made):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._backward, name))

    def _backward(self, name: str, gradient: Tensor) -> None:
        self._look(f"the gradient of the output of {name}", gradient, BACKWARD)

    def _look(self, what: str, values: object, phase: int) -> None:
        if self._place != self._ledger.place:
            self._place, self._looks = self._ledger.place, 0
        self._looks += 1
        if self.first is not None:
            return
        for tensor in _tensors(values):
            bad = tensor.numel() - int(torch.isfinite(tensor).sum())
            if bad:
                action = Action.parse(self._place)
                way = action.stage if phase == FORWARD else -action.stage
                text = (
                    f"{what}, {bad} of {tensor.numel()} elements, in the "
                    f"{('forward', 'backward')[phase]} of microbatch {action.microbatch} on stage "
                    f"{action.stage}"
                )
                self.first = ([phase, action.microbatch, way, self._looks], text)
                return


def _tensors(values: object) -> Iterator[Tensor]:
    """The floating point tensors among a module's arguments or results."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, Loss):
        yield values.total


def verdict(what: str, value: float, findings: Sequence[Finding | None]) -> str:
    """Whether the fault repeats, and where it begins.

    what      "loss" or "gradient norm"      value  the second time
    findings  by rank

    >>> print(verdict("loss", 3.5, [None]))
    made once more, the loss is 3.5: the fault does not repeat, and weights and samples are sound;
      suspect the machines of the ranks named, or kernels that race
    """
    if math.isfinite(value):
        return (
            f"made once more, the {what} is {value:g}: the fault does not repeat, and weights and "
            "samples are sound;\n  suspect the machines of the ranks named, or kernels that race"
        )
    text = (
        f"made once more, the {what} is {value} again: the fault lies in the weights, the samples "
        "or the code, not in a machine"
    )
    found = [(*finding, rank) for rank, finding in enumerate(findings) if finding]
    if not found:
        return f"{text};\n  every layer's numbers are finite: look at the loss and the sums"
    _, where, rank = min(found, key=lambda one: (one[0], one[2]))
    return f"{text};\n  it begins on rank {rank}: {where}"
