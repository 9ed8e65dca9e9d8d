"""`OPTIMIZERS`: what --optimizer can be. A new one is a function, a line, and one in config.py.

Each is given a few long flat tensors in place of hundreds of small ones. The implementations are
torch's, in their fused form, and NVIDIA apex's FusedAdam where the real one is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from core import optional
from core.optimizer.config import ARRAYS, OptimizerConfig

Groups = list[dict]


class Fused:
    """One of torch's fused updates on flat tensors, looking like a torch.optim.Optimizer.

    torch's own classes import its compiler when one is made, for nothing here: 70 MiB and more than
    a second in every rank.

    update  (params, grads, states, learning rate, weight decay, grad_scale)
    """

    def __init__(self, groups: Groups, update: Callable[..., None]) -> None:
        self.param_groups, self.update = groups, update
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self.grad_scale: Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                grads = [param.grad for param in params]
                states = [self.state[param] for param in params]
                settings = group["lr"], group["weight_decay"], self.grad_scale
                self.update(params, grads, states, *settings)


def adamw(groups: Groups, config: OptimizerConfig) -> Fused:
    """AdamW (Loshchilov, Hutter, 2019): the decay is not part of the gradient."""

    def update(params, grads, states, learning_rate, weight_decay, grad_scale) -> None:
        torch_adamw(
            params,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=grad_scale,
            amsgrad=False,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=config.adam_eps,
            maximize=False,
        )

    return Fused(groups, update)


def apex_adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The same by NVIDIA apex; raises RuntimeError where it is not installed."""
    fused_adam = optional.fused_adam()
    if fused_adam is None:
        raise RuntimeError("--optimizer apex_adam needs NVIDIA apex with its CUDA extension")
    betas = (config.adam_beta1, config.adam_beta2)
    return fused_adam(groups, lr=config.lr, betas=betas, eps=config.adam_eps, adam_w_mode=True)


def sgd(groups: Groups, config: OptimizerConfig) -> Fused:
    """SGD with momentum; the decay is added to the gradient."""

    def update(params, grads, states, learning_rate, weight_decay, grad_scale) -> None:
        torch_sgd(
            params,
            grads,
            [state["momentum_buffer"] for state in states],
            fused=True,
            grad_scale=grad_scale,
            weight_decay=weight_decay,
            momentum=config.sgd_momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    return Fused(groups, update)


@dataclass(frozen=True)
class Recipe:
    """make           from parameter groups
    arrays         names of its state that has a parameter's shape
    step_in_group  it counts its steps in each group, not beside each tensor
    takes_scale    it divides float32 gradients by an attribute `grad_scale` as it goes
    """

    make: Callable[[Groups, OptimizerConfig], Fused | torch.optim.Optimizer]
    arrays: tuple[str, ...]
    step_in_group: bool = False
    takes_scale: bool = True


_APEX = Recipe(apex_adamw, ARRAYS["apex_adam"], step_in_group=True, takes_scale=False)
OPTIMIZERS = {
    "adam": Recipe(adamw, ARRAYS["adam"]),
    "apex_adam": _APEX,
    "sgd": Recipe(sgd, ARRAYS["sgd"]),
}


def recipe(name: str, *, may_fuse: bool = False) -> Recipe:
    """The recipe by --optimizer's name; for adam, apex's where it is installed.

    may_fuse: the masters are what apex's takes, float32 on a GPU
    """
    if name == "adam" and may_fuse and optional.fused_adam() is not None:
        return _APEX
    return OPTIMIZERS[name]
