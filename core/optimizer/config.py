"""OptimizerConfig: the optimizer and its schedules, with Megatron's flag names and defaults.

Pure: standard library only. core/optimizer/adam.py builds the optimizer; core/optimizer/schedule.py
turns the schedules into functions and checks them (core/layout_checks.py hands it the length).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from core import optional

# Names of each optimizer's state that has a parameter's shape: kept for every parameter, and saved.
ARRAYS = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "apex_adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}


@dataclass(kw_only=True)
class OptimizerConfig:
    """Optimizer and learning rate"""

    optimizer: Literal["adam", "sgd", "apex_adam"] = "adam"
    """adam is AdamW (the decay is not part of the gradient); apex_adam insists on NVIDIA apex's."""
    lr: float = field(metadata={"mock": 1e-3})
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay and after it."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """How the rate falls after the warm-up."""
    lr_decay_iters: int | None = None
    """Iterations until --min-lr; by default --train-iters."""
    lr_decay_samples: int | None = None
    """Samples until --min-lr; by default --train-samples."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a share of the decay's length."""
    lr_warmup_iters: int = 0
    """Iterations in which the rate rises linearly to --lr."""
    lr_warmup_samples: int = 0
    """Samples in which the rate rises linearly to --lr."""
    lr_warmup_init: float = 0.0
    """Rate at the start of the warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """How the last part of WSD falls."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of the last part of WSD."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the last part of WSD."""
    decoupled_lr: float | None = None
    """Peak learning rate of the word embedding and the output layer; by default --lr."""
    decoupled_min_lr: float | None = None
    """Their learning rate at the end of the decay; by default --min-lr."""
    weight_decay: float = 0.01
    """Decay of weight matrices and embeddings; norms and biases have none."""
    start_weight_decay: float | None = None
    """Decay at the start, with --weight-decay-incr-style linear or cosine."""
    end_weight_decay: float | None = None
    """Decay at the end of the run."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How the decay grows; constant is --weight-decay throughout."""
    adam_beta1: float = 0.9
    """Memory of the mean of the gradient."""
    adam_beta2: float = 0.999
    """Memory of the mean of its square; most recipes use 0.95."""
    adam_eps: float = 1e-8
    """Added to the root of the mean square."""
    sgd_momentum: float = 0.9
    """Momentum of --optimizer sgd."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    log_num_zeros_in_grad: bool = False
    """Count the gradient's zeros."""
    log_params_norm: bool = False
    """Norm of all parameters."""
    log_layer_grad_norms: bool = False
    """Gradient norm of every layer, in --metrics-file."""

    def of_vocabulary(self) -> OptimizerConfig | None:
        """The same with --decoupled-lr and --decoupled-min-lr as the rates; None without them."""
        if self.decoupled_lr is None:
            return None
        least = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        return replace(self, lr=self.decoupled_lr, min_lr=least)

    def problems(self) -> Iterator[str]:
        """What is out of range; how the schedule's flags fit is core/optimizer/schedule.py's."""
        if self.optimizer == "apex_adam" and optional.fused_adam() is None:
            yield (
                "--optimizer apex_adam needs NVIDIA apex with its CUDA extension and a GPU, which "
                "are not here; use adam, torch's fused form of the same"
            )
        if (other := self.of_vocabulary()) is not None:
            if not 0.0 <= other.min_lr <= other.lr:
                yield (
                    f"--decoupled-lr {other.lr:g} must be at least its lowest rate "
                    f"{other.min_lr:g} (--decoupled-min-lr, by default --min-lr), that 0 or more"
                )
            if self.lr_warmup_init > other.lr:
                yield (
                    f"--lr-warmup-init {self.lr_warmup_init:g} is above --decoupled-lr "
                    f"{other.lr:g}; the rate rises from the one to the other"
                )
        for name in ("lr", "min_lr", "lr_warmup_init", "weight_decay", "clip_grad"):
            if getattr(self, name) < 0.0:
                yield f"--{name.replace('_', '-')} {getattr(self, name):g} must be 0 or more"
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                flag = f"--{name.replace('_', '-')}"
                yield f"{flag} {getattr(self, name):g} must be at least 0 and below 1"
        if self.adam_eps <= 0.0:
            yield f"--adam-eps {self.adam_eps:g} must be above 0"
        for kind in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
            least = 0 if kind == "lr_warmup" else 1
            for name in (f"{kind}_iters", f"{kind}_samples"):
                value = getattr(self, name)
                if value is not None and value < least:
                    yield f"--{name.replace('_', '-')} {value} must be {least} or more"
