"""PrecisionConfig: the types of a run, and `LossScale`, which keeps float16 gradients in range.

Pure: standard library only. --fp64 is a flag of the model (models/config.py).

Masters, moments and gradient sums are float32 under --bf16 and --fp16. The loss of a microbatch is
a sum over tokens, whose gradients would overflow float16 at Megatron's loss scales. So backward
starts from

    upstream = scale / 2^k,     2^k near the tokens of a global batch

and the one factor on the gradient sums is  clip / (tokens * upstream): powers of two, exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

PATIENCE = 10
# scale / 2^k is a float32 that is not denormal for any batch of 1 to 2^62 tokens
SMALLEST, LARGEST = 2.0**-64, 2.0**127

Dtype = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(kw_only=True)
class PrecisionConfig:
    """Precision"""

    bf16: bool = False
    """Weights and activations in bfloat16; masters and gradient sums in float32."""
    fp16: bool = False
    """The same in float16, with loss scaling."""
    loss_scale: float | None = None
    """A constant loss scale for --fp16; by default it adapts."""
    initial_loss_scale: float = 2.0**32
    """First value of the loss scale that adapts."""
    min_loss_scale: float = 1.0
    """Its floor; a run that cannot make a step there ends."""
    loss_scale_window: int = 1000
    """Steps without an overflow until it doubles."""
    hysteresis: int = 2
    """Overflows until it is halved."""
    grad_reduce_in_bf16: bool = False
    """Gradients travel between data parallel ranks, and are summed there, in bfloat16; over
    microbatches they are summed in float32."""

    @property
    def dtype(self) -> Dtype:
        """Of weights and activations, unless --fp64."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    def problems(self) -> Iterator[str]:
        for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
            value = getattr(self, name)
            if value is not None and not SMALLEST <= value <= LARGEST:
                yield (
                    f"--{name.replace('_', '-')} {value:g} is outside {SMALLEST:.3g} to "
                    f"{LARGEST:.3g}: gradients are multiplied by it in float32"
                )
        for name in ("loss_scale_window", "hysteresis"):
            if getattr(self, name) < 1:
                yield f"--{name.replace('_', '-')} {getattr(self, name)} must be 1 or more"
        if self.initial_loss_scale < self.min_loss_scale:
            yield (
                f"--initial-loss-scale {self.initial_loss_scale:g} is below --min-loss-scale "
                f"{self.min_loss_scale:g}"
            )


def exponent_near(tokens: int) -> int:
    """k with 2^k nearest to `tokens` on a logarithmic scale.

    >>> exponent_near(1), exponent_near(4096), exponent_near(3000)
    (0, 12, 12)
    """
    return round(math.log2(max(tokens, 1)))


@dataclass
class LossScale:
    """What the loss is multiplied by. After every step: `update`.

    Halved at the `hysteresis`-th overflow and every one after it, doubled after `window` steps
    without one, never below `floor` (Megatron's rule) nor above LARGEST. A constant scale has
    window 0. Without --fp16 the scale is 1 and the first overflow is one too many.

    >>> scale = LossScale(8.0, floor=2.0, window=2, hysteresis=2)
    >>> for overflow in (True, True, True, True, False, False): scale.update(overflow)
    >>> scale.scale
    4.0
    """

    scale: float = 1.0
    floor: float = 1.0
    window: int = 0
    hysteresis: int = 1
    exponent: int = 0  # k above
    patience: int = 0  # overflows in a row, where the scale cannot fall, that are borne
    good_steps: int = 0
    overflows: int = 0
    in_vain: int = 0

    @classmethod
    def of(cls, config: PrecisionConfig, tokens: int) -> LossScale:
        """tokens: of a global batch."""
        if not config.fp16:
            return cls()
        constant = config.loss_scale
        return cls(
            config.initial_loss_scale if constant is None else constant,
            config.min_loss_scale if constant is None else constant,
            config.loss_scale_window if constant is None else 0,
            config.hysteresis,
            exponent_near(tokens),
            PATIENCE,
        )

    @property
    def upstream(self) -> float:
        """The gradient that backward starts from."""
        return math.ldexp(self.scale, -self.exponent)

    @property
    def is_hopeless(self) -> bool:
        """Whether steps overflow where the scale cannot fall any more."""
        return self.in_vain > self.patience

    def story(self) -> str:
        """For the message that ends a run without hope."""
        if not self.patience:
            return ""
        return f", {self.in_vain} times in a row at the lowest loss scale {self.scale:g},"

    def row(self) -> dict[str, float]:
        """For the log."""
        return {"loss_scale": self.scale} if self.patience else {}

    def update(self, overflow: bool) -> None:
        self.in_vain = self.in_vain + 1 if overflow and self.scale <= self.floor else 0
        if not self.window:
            return
        if overflow:
            self.good_steps = 0
            self.overflows += 1
            if self.overflows >= self.hysteresis:
                self.scale = max(self.scale / 2, self.floor)
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.scale = min(self.scale * 2, LARGEST)
            self.good_steps = self.overflows = 0

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    def restore(self, saved: dict[str, float]) -> None:
        """Go on from a checkpoint; floor, window, hysteresis and a constant are the command line's.

        Of a scale that adapts where this one is constant, or the reverse, nothing is taken.
        """
        if not saved or bool(self.window) != bool(saved["window"]):
            return
        if self.window:
            self.scale = max(saved["scale"], self.floor)
            self.good_steps, self.overflows = saved["good_steps"], saved["overflows"]
        if self.scale == saved["scale"]:  # at another one nothing has been in vain yet
            self.in_vain = saved["in_vain"]
