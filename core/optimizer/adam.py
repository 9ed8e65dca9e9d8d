"""The update: one factor on the gradient sums, then the optimizer on flat memory.

Gradient buffers hold sums over tokens. The factor 1/tokens x clip x 1/loss scale is applied once,
here. The optimizer itself is torch's (AdamW in its fused form, SGD), given a few long flat tensors
in place of hundreds of small ones: one for every stretch of neighbours with the same weight decay.

`OPTIMIZERS` is the registry: a new optimizer is one function and one line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from core.comm import Group
from core.data_parallel.buckets import DataParallel
from core.optimizer.clip import clip_factor, gradient_square_sum
from core.optimizer.config import OptimizerConfig


@dataclass(frozen=True)
class StepStats:
    """What one step did. grad_norm is that of the mean loss, before clipping."""

    grad_norm: float
    updated: bool


def adamw(groups: list[dict], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov, Hutter, 2019)."""
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )


def sgd(groups: list[dict], config: OptimizerConfig) -> torch.optim.Optimizer:
    """SGD with momentum; the decay is added to the gradient."""
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum, fused=True)


@dataclass(frozen=True)
class Recipe:
    """make: from parameter groups; arrays: names of its per-parameter state."""

    make: Callable[[list[dict], OptimizerConfig], torch.optim.Optimizer]
    arrays: tuple[str, ...]


OPTIMIZERS = {
    "adam": Recipe(adamw, ("exp_avg", "exp_avg_sq")),
    "sgd": Recipe(sgd, ("momentum_buffer",)),
}


class Optimizer:
    """Steps all stages of this rank.

    replicas  the stages' buffers
    tp, pp    the norm is summed over them
    """

    def __init__(
        self, replicas: DataParallel, tp: Group, pp: Group, config: OptimizerConfig
    ) -> None:
        self.replicas, self.tp, self.pp = replicas, tp, pp
        self.clip = config.clip_grad
        self.recipe = OPTIMIZERS[config.optimizer]
        self.steps = 0  # updates made, for Adam's bias correction
        self._state = [
            {name: torch.zeros_like(b.grads) for name in self.recipe.arrays}
            for b in replicas.buffers
        ]
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        states: list[tuple[nn.Parameter, dict[str, Tensor]]] = []
        for buffer, state in zip(replicas.buffers, self._state, strict=True):
            for decays, start, stop in buffer.layout.runs(lambda slot: slot.shard.decay):
                flat = nn.Parameter(buffer.params[start:stop])
                flat.grad = buffer.grads[start:stop]
                groups[decays].append(flat)
                states.append((flat, {k: v[start:stop] for k, v in state.items()}))
        if not states:  # the stages of this rank have no parameters
            groups[True].append(nn.Parameter(torch.empty(0)))
        self._groups = [
            {"params": params, "decays": decays, "weight_decay": 0.0}
            for decays, params in groups.items()
            if params
        ]
        self._optimizer = self.recipe.make(self._groups, config)
        for flat, arrays in states:
            count = torch.zeros((), dtype=torch.float32, device=flat.device)
            self._optimizer.state[flat] = {"step": count, **arrays}

    def step(self, learning_rate: float, weight_decay: float, tokens: float) -> StepStats:
        """Norm and clip, then update. With no kept token, or a gradient that is not finite,
        nothing changes."""
        # 1. the norm of the mean loss's gradient, over the whole grid
        squares = gradient_square_sum(
            self.replicas.buffers, self.tp, self.pp, self.replicas.axes["embed"]
        )
        norm = math.sqrt(squares.item()) / tokens if tokens else 0.0
        if not tokens or not math.isfinite(norm):
            return StepStats(norm, updated=False)
        # 2. one factor for everything that scales a gradient
        factor = clip_factor(norm, self.clip) / tokens
        for buffer in self.replicas.buffers:
            buffer.grads.mul_(factor)
        # 3. update
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        self._optimizer.step()
        self.steps += 1
        return StepStats(norm, updated=True)

    # -- checkpoint --------------------------------------------------------------------------------

    def state_arrays(self, buffer: int) -> dict[str, Tensor]:
        """Flat arrays of buffer number `buffer`, laid out as its parameters: {"exp_avg": …}."""
        return self._state[buffer]

    def set_steps(self, steps: int) -> None:
        """Continue from a checkpoint that was saved after `steps` updates."""
        self.steps = steps
        for state in self._optimizer.state.values():
            state["step"].fill_(steps)
