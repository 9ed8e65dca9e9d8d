"""Flags that contradict each other, or do nothing without another: one table over all sections.

Pure: standard library only. A flag's own range is checked in its section (`problems`), shapes
against ranks in core/layout_checks.py. core/start.py prints what `contradictions` finds with the
rest, before any process group exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from core.optimizer.config import OptimizerConfig
from core.optimizer.precision import PrecisionConfig

Values = Any  # every flag of the recipe by its field's name, and `given`: the names that were typed


class Rule(NamedTuple):
    """text: what is wrong and the way out; {name} is a flag's value"""

    breaks: Callable[[Values], object]
    text: str


def _typed(v: Values, name: str, section: type = PrecisionConfig) -> bool:
    return getattr(v, name) != getattr(section, name)


def _sharding(v: Values) -> str:
    given = v.data_parallel_sharding_strategy
    return given or ("optim" if v.use_distributed_optimizer else "no_shard")


def _recomputes(v: Values) -> str | None:
    return v.recompute_granularity or ("selective" if v.recompute_activations else None)


_SCALES = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_ADAPTS = _SCALES[1:]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


RULES: tuple[Rule, ...] = (
    # -- precision ---------------------------------------------------------------------------------
    Rule(lambda v: v.bf16 and v.fp16, "--bf16 and --fp16 are two precisions; give one"),
    Rule(lambda v: v.bf16 and v.fp64, "--bf16 and --fp64 are two precisions; give one"),
    Rule(lambda v: v.fp16 and v.fp64, "--fp16 and --fp64 are two precisions; give one"),
    *(
        Rule(
            lambda v, name=name: _typed(v, name) and not v.fp16,
            f"{_flag(name)} {{{name}:g}} does nothing without --fp16: only float16 needs a scale",
        )
        for name in _SCALES
    ),
    *(
        Rule(
            lambda v, name=name: v.fp16 and v.loss_scale is not None and _typed(v, name),
            f"--loss-scale {{loss_scale:g}} is constant, {_flag(name)} {{{name}:g}} belongs to one "
            "that adapts; give one of them",
        )
        for name in _ADAPTS
    ),
    Rule(
        lambda v: v.grad_reduce_in_bf16 and v.fp64,
        "--grad-reduce-in-bf16 would shorten the gradients of --fp64; leave one out",
    ),
    Rule(
        lambda v: v.grad_reduce_in_bf16 and v.fp16,
        "--grad-reduce-in-bf16 goes with --bf16 or float32, not with --fp16; leave one out",
    ),
    Rule(
        lambda v: v.grad_reduce_in_bf16 and "accumulate_allreduce_grads_in_fp32" in v.given,
        "--grad-reduce-in-bf16 sends gradients in bfloat16, --accumulate-allreduce-grads-in-fp32 "
        "in float32; give one (a rank's own sums are float32 with either)",
    ),
    Rule(
        lambda v: v.fp32_residual_connection and not (v.bf16 or v.fp16),
        "--fp32-residual-connection does nothing without --bf16 or --fp16; leave it out",
    ),
    # -- data parallelism --------------------------------------------------------------------------
    Rule(
        lambda v: v.use_distributed_optimizer and _sharding(v) == "no_shard",
        "--use-distributed-optimizer and --data-parallel-sharding-strategy no_shard contradict "
        "each other; give optim, or leave one out",
    ),
    Rule(
        lambda v: v.overlap_param_gather and _sharding(v) == "no_shard",
        "--overlap-param-gather does nothing without --use-distributed-optimizer (or another "
        "--data-parallel-sharding-strategy than no_shard): no parameters are gathered",
    ),
    Rule(
        lambda v: v.ddp_bucket_size is not None and _sharding(v) == "optim_grads_params",
        "--ddp-bucket-size {ddp_bucket_size} has no say under --data-parallel-sharding-strategy "
        "optim_grads_params, where a bucket is a layer; leave it out",
    ),
    # -- recomputation -----------------------------------------------------------------------------
    Rule(
        lambda v: v.recompute_activations and v.recompute_granularity == "full",
        "--recompute-activations is short for --recompute-granularity selective and contradicts "
        "--recompute-granularity full; give one",
    ),
    *(
        Rule(
            lambda v, name=name: getattr(v, name) and _recomputes(v) != "full",
            f"{_flag(name)}{shown} does nothing without --recompute-granularity full",
        )
        for name, shown in (
            ("recompute_method", " {recompute_method}"),
            ("recompute_num_layers", " {recompute_num_layers}"),
            ("distribute_saved_activations", ""),
        )
    ),
    Rule(
        lambda v: v.recompute_modules and _recomputes(v) != "selective",
        "--recompute-modules does nothing without --recompute-granularity selective (or its short "
        "form, --recompute-activations)",
    ),
    Rule(
        lambda v: v.recompute_method == "block" and v.recompute_num_layers is None,
        "--recompute-method block needs --recompute-num-layers N: how many layers of each stage",
    ),
    Rule(
        lambda v: (v.recompute_num_layers or 0) > v.num_layers,
        "--recompute-num-layers {recompute_num_layers} is more than --num-layers {num_layers}",
    ),
    Rule(
        lambda v: v.distribute_saved_activations and v.sequence_parallel,
        "--distribute-saved-activations and --sequence-parallel: each rank keeps its part of an "
        "activation already; leave the first out",
    ),
    Rule(
        lambda v: v.distribute_saved_activations and v.tensor_model_parallel_size == 1,
        "--distribute-saved-activations does nothing with --tensor-model-parallel-size 1",
    ),
    Rule(
        lambda v: v.distribute_saved_activations
        and v.tensor_model_parallel_size > 1
        and v.seq_length * v.micro_batch_size * v.hidden_size % v.tensor_model_parallel_size,
        "--distribute-saved-activations: an activation of --seq-length {seq_length} x "
        "--micro-batch-size {micro_batch_size} x --hidden-size {hidden_size} elements does not "
        "divide by --tensor-model-parallel-size {tensor_model_parallel_size}; leave it out",
    ),
    # -- optimizer ---------------------------------------------------------------------------------
    Rule(
        lambda v: _typed(v, "weight_decay", OptimizerConfig)
        and v.weight_decay_incr_style != "constant",
        "--weight-decay {weight_decay:g} does nothing with --weight-decay-incr-style "
        "{weight_decay_incr_style}, which reads --start-weight-decay and --end-weight-decay; "
        "leave it out",
    ),
    Rule(
        lambda v: _typed(v, "lr_wsd_decay_style", OptimizerConfig) and v.lr_decay_style != "WSD",
        "--lr-wsd-decay-style {lr_wsd_decay_style} does nothing without --lr-decay-style WSD",
    ),
    Rule(
        lambda v: v.lr_warmup_init
        and not (v.lr_warmup_iters or v.lr_warmup_samples or v.lr_warmup_fraction),
        "--lr-warmup-init {lr_warmup_init:g} does nothing without a warm-up; give one with "
        "--lr-warmup-iters (or -samples, -fraction), or leave it out",
    ),
    Rule(
        lambda v: v.decoupled_min_lr is not None
        and v.decoupled_lr is not None
        and v.lr_decay_style == "constant",
        "--decoupled-min-lr {decoupled_min_lr:g} does nothing with --lr-decay-style constant, "
        "where the rate stays at --decoupled-lr; leave it out",
    ),
    Rule(
        lambda v: v.decoupled_min_lr is not None and v.decoupled_lr is None,
        "--decoupled-min-lr {decoupled_min_lr:g} does nothing without --decoupled-lr",
    ),
    Rule(
        lambda v: v.optimizer == "apex_adam" and v.fp64,
        "--optimizer apex_adam has no float64; use --optimizer adam with --fp64",
    ),
    *(
        Rule(
            lambda v, name=name: _typed(v, name, OptimizerConfig) and v.optimizer == "sgd",
            f"{_flag(name)} {{{name}:g}} does nothing with --optimizer sgd, which reads "
            "--sgd-momentum; leave it out, or use --optimizer adam",
        )
        for name in ("adam_beta1", "adam_beta2", "adam_eps")
    ),
    Rule(
        lambda v: _typed(v, "sgd_momentum", OptimizerConfig) and v.optimizer != "sgd",
        "--sgd-momentum {sgd_momentum:g} does nothing without --optimizer sgd; --adam-beta1 is "
        "the momentum of --optimizer {optimizer}",
    ),
    Rule(
        lambda v: v.log_layer_grad_norms and v.metrics_file is None,
        "--log-layer-grad-norms does nothing without --metrics-file FILE, which gets them",
    ),
)

# Said at the start and no more, since scripts carry them from one run to the next.
NOTES: tuple[Rule, ...] = (
    Rule(
        lambda v: v.min_lr and v.lr_decay_style == "constant",
        "--min-lr {min_lr:g} has no effect: --lr-decay-style constant stays at --lr",
    ),
)


def contradictions(config: Any, rules: tuple[Rule, ...] = RULES) -> Iterator[str]:
    """One sentence for every rule that the recipe's config breaks."""
    values = SimpleNamespace(**dict(_leaves(config)), given=config.given)
    for rule in rules:
        if rule.breaks(values):
            yield rule.text.format_map(vars(values))


def _leaves(config: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _leaves(value)
        else:
            yield field.name, value
