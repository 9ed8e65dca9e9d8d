"""Learning rate and weight decay as functions of consumed samples, and of nothing else.

There is no state and no `step()`: whoever knows how many samples the run has consumed knows the
rate, before or after a restart, at any batch size. The closed forms are those of Megatron-LM's
OptimizerParamScheduler, which counts samples too. Pure: standard library only.

Read in this order: LearningRate, WeightDecay, Schedule (both, as a checkpoint stores them), then
`problems` (are the flags sound?) and `resume` (whose schedule does a resumed run follow?).
core/optimizer/config.py holds the flags; core/train.py calls `Schedule.at`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

# What is left of (peak - floor) once a share r in [0, 1] of the decay is over.
_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda r: 1.0 - r,
    "cosine": lambda r: 0.5 * (math.cos(math.pi * r) + 1.0),
    "exponential": lambda r: 2.0 * 0.5**r - 1.0,
    "minus_sqrt": lambda r: 1.0 - math.sqrt(r),
}
LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")
WAY_OUT = "--override-opt-param-scheduler takes the command line's"  # where a checkpoint's wins


@dataclass(frozen=True)
class LearningRate:
    """Warm-up, then one of LR_STYLES. All lengths are samples.

        n          consumed samples         w  warm-up      d  decay_samples (the horizon)
        n <= w     warmup_init + (peak - warmup_init) n / w
        constant   peak, for ever
        n > d      floor
        linear     floor + (peak - floor) (1 - r)                       r = (n - w) / (d - w)
        cosine     floor + (peak - floor) (1 + cos(pi r)) / 2
        inverse-square-root    max(floor, peak sqrt(max(w, 1) / max(n, 1)))
        WSD        peak until d - t, then to the floor over a tail of t = wsd_samples:
                   floor + (peak - floor) c(q),  q = (n - d + t) / t,  c by wsd_style:
                   exponential 2 (1/2)^q - 1,  linear 1 - q,  cosine (1 + cos(pi q)) / 2,
                   minus_sqrt 1 - sqrt(q)
    """

    peak: float
    decay_samples: int
    style: str = "linear"
    floor: float = 0.0
    warmup_samples: float = 0
    warmup_init: float = 0.0
    wsd_samples: int | None = None
    wsd_style: str = "exponential"

    def at(self, consumed: int) -> float:
        """The rate of the step that starts when `consumed` samples have been consumed."""
        if 0 < self.warmup_samples and consumed <= self.warmup_samples:
            rise = (self.peak - self.warmup_init) * float(consumed)
            return self.warmup_init + rise / float(self.warmup_samples)
        if self.style == "constant":
            return self.peak
        if consumed > self.decay_samples:
            return self.floor
        if self.style == "inverse-square-root":
            rate = self.peak * max(self.warmup_samples, 1) ** 0.5 / max(consumed, 1) ** 0.5
            return max(self.floor, rate)
        return self.floor + self._left(consumed) * (self.peak - self.floor)

    def _left(self, consumed: int) -> float:
        if self.style == "WSD":
            start = self.decay_samples - self.wsd_samples
            if consumed <= start:
                return 1.0
            return _DECAYS[self.wsd_style]((consumed - start) / self.wsd_samples)
        past, length = consumed - self.warmup_samples, self.decay_samples - self.warmup_samples
        return _DECAYS[self.style](past / length)

    def problems(self) -> Iterator[str]:
        """What is wrong with the settings, in the words of the flags."""
        if self.style not in LR_STYLES:
            yield f"--lr-decay-style {self.style} is not known; use {_either(LR_STYLES)}"
        if not 0.0 <= self.floor <= self.peak:
            yield (
                f"--min-lr {self.floor:g} is outside 0 to --lr {self.peak:g}; "
                f"the rate decays from --lr to --min-lr"
            )
        if not 0.0 <= self.warmup_init <= self.peak:
            yield (
                f"--lr-warmup-init {self.warmup_init:g} is outside 0 to --lr {self.peak:g}; "
                f"the rate rises from --lr-warmup-init to --lr"
            )
        if self.decay_samples <= 0:
            yield f"the rate decays over {self.decay_samples} samples; raise --lr-decay-iters"
        elif not 0 <= self.warmup_samples < self.decay_samples:
            yield (
                f"a warm-up of {self.warmup_samples:g} samples does not end before the decay does, "
                f"at sample {self.decay_samples}; lower --lr-warmup-iters (or -samples, -fraction) "
                f"or raise --lr-decay-iters"
            )
        elif self.style == "WSD":
            yield from self._wsd_problems()
        elif self.wsd_samples is not None:
            yield f"--lr-wsd-decay-iters needs --lr-decay-style WSD, not {self.style}"

    def _wsd_problems(self) -> Iterator[str]:
        room = self.decay_samples - self.warmup_samples
        if self.wsd_style not in WSD_STYLES:
            yield f"--lr-wsd-decay-style {self.wsd_style} is not known; use {_either(WSD_STYLES)}"
        if self.wsd_samples is None:
            yield "--lr-decay-style WSD needs the length of its tail: --lr-wsd-decay-iters"
        elif not 0 < self.wsd_samples <= room:
            yield (
                f"a WSD tail of {self.wsd_samples} samples (--lr-wsd-decay-iters) is outside 1 to "
                f"{room:g}, what the warm-up leaves of {self.decay_samples} samples"
            )


@dataclass(frozen=True)
class WeightDecay:
    """Weight decay from `start` to `end` over `samples` consumed samples.

    constant   end, which equals start; `samples` does not matter
    n > samples            end
    linear     start + (end - start) r,                      r = n / samples
    cosine     start + (end - start) (1 + cos(pi (1 - r))) / 2
    """

    start: float
    end: float
    samples: int
    style: str = "constant"

    def at(self, consumed: int) -> float:
        """The decay of the step that starts when `consumed` samples have been consumed."""
        if self.style == "constant" or consumed > self.samples:
            return self.end
        share = consumed / self.samples
        grown = share if self.style == "linear" else _DECAYS["cosine"](1.0 - share)
        return self.start + grown * (self.end - self.start)

    def problems(self) -> Iterator[str]:
        """What is wrong with the settings, in the words of the flags."""
        if self.style not in WEIGHT_DECAY_STYLES:
            yield (
                f"--weight-decay-incr-style {self.style} is not known; "
                f"use {_either(WEIGHT_DECAY_STYLES)}"
            )
        elif self.style == "constant" and self.start != self.end:
            yield (
                f"--start-weight-decay {self.start:g} and --end-weight-decay {self.end:g} differ "
                f"under --weight-decay-incr-style constant; use linear or cosine"
            )
        if not 0.0 <= self.start <= self.end:
            yield (
                f"--start-weight-decay {self.start:g} is outside 0 to --end-weight-decay "
                f"{self.end:g}; the decay only grows"
            )
        if self.style != "constant" and self.samples <= 0:
            yield f"weight decay grows over {self.samples} samples; raise --train-iters"


class Values(NamedTuple):
    """What the optimizer needs from the schedule in one step."""

    learning_rate: float
    weight_decay: float


@dataclass(frozen=True)
class Schedule:
    """Both schedules of a run: what the optimizer asks and what a checkpoint stores."""

    learning_rate: LearningRate
    weight_decay: WeightDecay

    def at(self, consumed: int) -> Values:
        """Values for the step that starts when `consumed` samples have been consumed."""
        return Values(self.learning_rate.at(consumed), self.weight_decay.at(consumed))

    def problems(self) -> Iterator[str]:
        """What is wrong with the settings, in the words of the flags."""
        yield from self.learning_rate.problems()
        yield from self.weight_decay.problems()

    @classmethod
    def of(cls, flags: Any, *, train_samples: int, global_batch_size: int) -> Schedule:
        """The schedule that the flags ask for; `problems` says whether they can.

        `flags` has the fields of core.optimizer.config.OptimizerConfig, each named like its flag.
        Lengths in iterations become samples by the global batch size; without a decay length the
        horizon is the whole run. A warm-up fraction is a share of that horizon.
        """

        def samples(name: str) -> int | None:
            iterations = getattr(flags, f"{name}_iters")
            given = getattr(flags, f"{name}_samples")
            return iterations * global_batch_size if iterations else given

        horizon = samples("lr_decay") or train_samples
        warmup = samples("lr_warmup") or 0
        if flags.lr_warmup_fraction is not None:
            warmup = flags.lr_warmup_fraction * horizon
        rate = LearningRate(
            peak=flags.lr,
            floor=flags.min_lr,
            style=flags.lr_decay_style,
            decay_samples=horizon,
            warmup_samples=warmup,
            warmup_init=flags.lr_warmup_init,
            wsd_samples=samples("lr_wsd_decay"),
            wsd_style=flags.lr_wsd_decay_style,
        )
        style = flags.weight_decay_incr_style
        if style == "constant":
            return cls(rate, WeightDecay(flags.weight_decay, flags.weight_decay, 0))
        start, end = flags.start_weight_decay, flags.end_weight_decay
        return cls(rate, WeightDecay(start, end, train_samples, style))

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Mapping[str, Any]]) -> Schedule:
        """The schedule that `to_json` wrote."""
        return cls(LearningRate(**saved["learning_rate"]), WeightDecay(**saved["weight_decay"]))

    def differences(self, other: Schedule) -> list[str]:
        """One line for each setting in which two schedules differ: `name: mine, other's`."""
        return [
            f"{part.name.replace('_', ' ')} {field.name.replace('_', ' ')}: {mine!r}, {theirs!r}"
            for part in fields(self)
            for field in fields(getattr(self, part.name))
            if (mine := getattr(getattr(self, part.name), field.name))
            != (theirs := getattr(getattr(other, part.name), field.name))
        ]


def problems(flags: Any, *, train_samples: int, global_batch_size: int) -> Iterator[str]:
    """Everything wrong with the schedule flags, one sentence each; arguments of `Schedule.of`."""
    contradictions = list(_contradictions(flags))
    yield from contradictions
    if not contradictions:
        sizes = {"train_samples": train_samples, "global_batch_size": global_batch_size}
        yield from Schedule.of(flags, **sizes).problems()


def _contradictions(flags: Any) -> Iterator[str]:
    """Schedule flags that cannot stand together."""
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        flag = "--" + name.replace("_", "-")
        if getattr(flags, f"{name}_iters") and getattr(flags, f"{name}_samples"):
            yield f"{flag}-iters and {flag}-samples say the same thing twice; give one"
    fraction = flags.lr_warmup_fraction
    if fraction is not None:
        if flags.lr_warmup_iters or flags.lr_warmup_samples:
            yield "--lr-warmup-fraction and --lr-warmup-iters (or -samples) exclude each other"
        if not 0.0 <= fraction < 1.0:
            yield f"--lr-warmup-fraction {fraction:g} is not a share of the decay; use 0 to below 1"
    bounds = (flags.start_weight_decay, flags.end_weight_decay)
    if flags.weight_decay_incr_style == "constant" and bounds != (None, None):
        yield (
            "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or "
            "cosine; a constant decay is --weight-decay"
        )
    if flags.weight_decay_incr_style != "constant" and None in bounds:
        yield (
            f"--weight-decay-incr-style {flags.weight_decay_incr_style} needs both "
            f"--start-weight-decay and --end-weight-decay"
        )


def resume(given: Schedule, saved: Schedule, *, override: bool) -> tuple[Schedule, list[str]]:
    """Which schedule a resumed run follows, and lines that tell the user about differences.

    All of one or all of the other: the checkpoint's, or with --override-opt-param-scheduler the
    command line's. Mixing the two silently is a bug other frameworks had.
    """
    differences = given.differences(saved)
    if not differences:
        return given, []
    used = "the command line" if override else "the checkpoint"
    way_out = "" if override else f"; {WAY_OUT}"
    heading = f"schedule settings differ (command line, checkpoint); {used} wins{way_out}"
    return (given if override else saved), [heading, *differences]


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
