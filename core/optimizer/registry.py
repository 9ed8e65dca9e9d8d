"""`OPTIMIZERS`: what --optimizer can be. A new one is a function and a line.

Each is given a few long flat tensors in place of hundreds of small ones. The implementations are
torch's, in their fused form, and NVIDIA apex's FusedAdam where the real one is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from core import optional
from core.optimizer.config import OptimizerConfig

Groups = list[dict]


def adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov, Hutter, 2019): the decay is not part of the gradient."""
    return torch.optim.AdamW(groups, **_adam_settings(config), fused=True)


def apex_adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The same by NVIDIA apex; raises RuntimeError where it is not installed."""
    fused_adam = optional.fused_adam()
    if fused_adam is None:
        raise RuntimeError("--optimizer apex_adam needs NVIDIA apex with its CUDA extension")
    return fused_adam(groups, **_adam_settings(config), adam_w_mode=True)


def sgd(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """SGD with momentum; the decay is added to the gradient."""
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum, fused=True)


def _adam_settings(config: OptimizerConfig) -> dict:
    betas = (config.adam_beta1, config.adam_beta2)
    return {"lr": config.lr, "betas": betas, "eps": config.adam_eps}


@dataclass(frozen=True)
class Recipe:
    """make           from parameter groups
    arrays         names of its state that has a parameter's shape
    step_in_group  it counts its steps in each group, not beside each tensor
    takes_scale    it divides float32 gradients by an attribute `grad_scale` as it goes
    """

    make: Callable[[Groups, OptimizerConfig], torch.optim.Optimizer]
    arrays: tuple[str, ...]
    step_in_group: bool = False
    takes_scale: bool = True


_APEX = Recipe(apex_adamw, ("exp_avg", "exp_avg_sq"), step_in_group=True, takes_scale=False)
OPTIMIZERS = {
    "adam": Recipe(adamw, ("exp_avg", "exp_avg_sq")),
    "apex_adam": _APEX,
    "sgd": Recipe(sgd, ("momentum_buffer",)),
}


def recipe(name: str) -> Recipe:
    """The recipe by --optimizer's name; for adam, apex's where it is installed."""
    return _APEX if name == "adam" and optional.fused_adam() is not None else OPTIMIZERS[name]
