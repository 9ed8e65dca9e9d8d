"""The update: one factor on the gradient sums, then the optimizer on flat memory, then parameters.

Gradient buckets hold sums over tokens. The factor 1/tokens x clip x 1/loss scale is applied once,
here. Each dp rank updates the parts that it keeps (all, where nothing is sharded). Parameters of a
short type have masters in float32, of which they are rounded copies.

Neighbours: registry.py (the optimizers), clip.py (sums over the model), precision.py (loss scale),
core.data_parallel (the memory).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from core.comm import Group
from core.data_parallel.ddp import DataParallel
from core.data_parallel.layout import Slot
from core.optimizer.clip import ModelSums, clip_factor, nonzeros, sum_of_squares
from core.optimizer.config import OptimizerConfig
from core.optimizer.precision import LossScale
from core.optimizer.registry import Fused, recipe


@dataclass(frozen=True)
class StepStats:
    """What one step did.

    grad_norm  of the mean loss, before clipping
    extra      what the log was asked to show: num_zeros, params_norm, layer_grad_norms
    """

    grad_norm: float
    updated: bool
    extra: dict = field(default_factory=dict)


@dataclass
class PartState:
    """My part of one bucket in the optimizer.

    master  what is updated; the parameters' own memory where they are of its type
    arrays  exp_avg, exp_avg_sq, …
    """

    master: Tensor
    arrays: dict[str, Tensor]


def _treatment(slot: Slot) -> tuple[bool, bool]:
    """What is updated as one tensor."""
    return slot.shard.decay, slot.shard.vocabulary


class Optimizer:
    """Steps all stages of this rank.

    replicas  the stages' buckets
    tp, pp    sums over the model go over them
    scale     the loss scale under --fp16
    """

    def __init__(
        self,
        replicas: DataParallel,
        tp: Group,
        pp: Group,
        config: OptimizerConfig,
        scale: LossScale | None = None,
    ) -> None:
        self.replicas, self.clip = replicas, config.clip_grad
        self.scale = scale or LossScale()
        self.sums = ModelSums(replicas, pp)
        wide = {memory.dtype for memory in replicas.memories}
        on_gpu = replicas.device.type != "cpu"
        self.recipe = recipe(config.optimizer, may_fuse=on_gpu and wide <= {torch.float32})
        self.steps = 0  # updates made, for Adam's bias correction
        self.elements = self.sums.elements() if config.log_num_zeros_in_grad else 0
        self.shows_norm = config.log_params_norm
        self.layers = self.sums.units() if config.log_layer_grad_norms else []
        self.parts = [self._part(memory.kept, memory.dtype) for memory in replicas.memories]
        self._optimizer = self._make(config)
        self.set_steps(0)

    def _part(self, kept: Tensor, dtype: torch.dtype) -> PartState:
        master = kept if kept.dtype == dtype else kept.to(dtype)
        return PartState(master, {name: torch.zeros_like(master) for name in self.recipe.arrays})

    def _make(self, config: OptimizerConfig) -> Fused | torch.optim.Optimizer:
        """The optimizer over the runs of my parts, with state that lies in flat memory."""
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        states: list[tuple[nn.Parameter, dict[str, Tensor]]] = []
        for memory, part in zip(self.replicas.memories, self.parts, strict=True):
            first = memory.mine[0]
            for key, start, stop in memory.bucket.runs(_treatment, memory.mine):
                here = slice(start - first, stop - first)
                flat = nn.Parameter(part.master[here])
                flat.grad = memory.reduced[here]
                groups.setdefault(key, []).append(flat)
                states.append((flat, {name: x[here] for name, x in part.arrays.items()}))
        if not states:  # the stages of this rank have no parameters, or my part is padding
            groups[True, False] = [nn.Parameter(torch.empty(0))]
        made = self.recipe.make(
            [
                {"params": params, "decays": decays, "vocabulary": vocabulary, "weight_decay": 0.0}
                for (decays, vocabulary), params in groups.items()
            ],
            config,
        )
        for flat, arrays in states:
            made.state[flat] = arrays
        return made

    def step(
        self,
        learning_rate: float,
        weight_decay: float,
        tokens: float,
        vocabulary_rate: float | None = None,
    ) -> StepStats:
        """Norm and clip, then update. With no kept token, or a gradient that is not finite,
        nothing changes.

        vocabulary_rate: the learning rate of embedding and output layer, where it is another
        """
        # 1. the norm of the mean loss's gradient, over the whole grid
        reduced = [memory.reduced for memory in self.replicas.memories]
        divisor = tokens * self.scale.upstream
        squares = self.sums.over(reduced, sum_of_squares).item()
        norm = math.sqrt(squares) / divisor if tokens else 0.0
        shown = self._shown_gradients(reduced, divisor)
        if tokens:
            self.scale.update(overflow=not math.isfinite(norm))
        if not tokens or not math.isfinite(norm):
            return StepStats(norm, updated=False, extra={**shown, **self._shown_weights()})
        # 2. one factor for everything that scales a gradient
        self._multiply(reduced, clip_factor(norm, self.clip) / divisor)
        # 3. update
        for group in self._optimizer.param_groups:
            other = group["vocabulary"] and vocabulary_rate is not None
            group["lr"] = vocabulary_rate if other else learning_rate
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        self._optimizer.step()
        self.steps += 1
        # 4. parameters
        self.publish()
        return StepStats(norm, updated=True, extra={**shown, **self._shown_weights()})

    def _multiply(self, grads: list[Tensor], factor: float) -> None:
        """grads *= factor; where the optimizer divides float32 gradients itself, it is told to."""
        if self.recipe.takes_scale and all(grad.dtype == torch.float32 for grad in grads):
            scale = torch.full((), 1 / factor, dtype=torch.float32, device=self.replicas.device)
            self._optimizer.grad_scale = scale
        else:
            for grad in grads:
                grad.mul_(factor)

    def _shown_weights(self) -> dict:
        """What the log was asked to show of the weights as the step leaves them."""
        if not self.shows_norm:
            return {}
        masters = [part.master for part in self.parts]
        return {"params_norm": math.sqrt(self.sums.over(masters, sum_of_squares).item())}

    def _shown_gradients(self, reduced: list[Tensor], divisor: float) -> dict:
        """What the log was asked to show of the gradients, before they are clipped."""
        shown: dict = {}
        if self.elements:
            shown["num_zeros"] = self.elements - int(self.sums.over(reduced, nonzeros))
        if self.layers:
            squares = self.sums.over(reduced, sum_of_squares, self.layers).tolist()
            norms = [math.sqrt(square) / (divisor or 1) for square in squares]
            shown["layer_grad_norms"] = dict(zip(self.layers, norms, strict=True))
        return shown

    def publish(self) -> None:
        """Parameters become what the masters say, on all ranks."""
        for memory, part in zip(self.replicas.memories, self.parts, strict=True):
            if part.master is not memory.kept:
                memory.kept.copy_(part.master)
        self.replicas.publish()

    def set_steps(self, steps: int) -> None:
        """Continue from a checkpoint that was saved after `steps` updates."""
        self.steps = steps
        if self.recipe.step_in_group:
            for group in self._optimizer.param_groups:
                group["step"] = steps
            return
        for flat, state in self._optimizer.state.items():
            state["step"] = torch.full((), float(steps), device=flat.device)
