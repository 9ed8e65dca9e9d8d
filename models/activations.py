"""What autograd keeps of one microbatch, in bytes, from the shape alone: `kept_bytes`.

Pure: standard library only; imports models/config.py and models/recompute.py. With R rows [s b],
cut over tp under sequence parallelism, T = s b, and what is cut over tp anyway written without its
1/t, a layer keeps (elements; "+" is what a flag adds)

    norms      2 R h inputs (float32 at least)                        + 2 R h bytes with dropout
    linears    2 R h before qkv and up, T a d before out
    attention  T (a + 2 g) d    + T (a + g) d rotated or normed    + T a d with grouped queries
               + b a s^2 twice, and as many bytes, with dropout (T a log-sums without)
    mlp        T f (gated: twice), before the activation, which is made again

tests/models/test_activations.py compares with what is kept on a CPU. Neighbours: flops.py (the
other arithmetic on shapes), core/memory_report.py (which prints it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.config import TransformerConfig
from models.recompute import RecomputeConfig


@dataclass(frozen=True)
class Cut:
    """A microbatch on a rank.

    batch              samples        tp   ranks that a layer is cut over
    sequence_parallel  activations between the linears are cut, too
    element            bytes
    residual           bytes of an element of what the blocks add to; 0: `element`
    """

    batch: int
    tp: int = 1
    sequence_parallel: bool = False
    element: int = 4
    residual: int = 0


def layer_parts(config: TransformerConfig, cut: Cut) -> dict[str, int]:
    """Bytes by part: norm_inputs, norm_outputs, core_attn, mlp, and the rest."""
    d, a, g = config.head_dim, config.num_attention_heads, config.query_groups
    s, h, e = config.seq_length, config.hidden_size, cut.element
    tokens = s * cut.batch
    rows = tokens // cut.tp if cut.sequence_parallel else tokens
    stats = 8 if config.normalization == "LayerNorm" else 4
    grouped, rotated = g != a, config.position_embedding_type == "rope"
    made = a + g if rotated or config.qk_layernorm else 0
    copied = a if grouped and (config.qk_layernorm or not rotated) else 0
    projections = tokens * (2 * a + 2 * g + made + copied) * d * e
    if rotated:
        projections += 2 * tokens * config.rotary_dim * e * cut.tp
    if config.attention_dropout:
        core = cut.batch * a * s * s * (2 * e + 1)
        core += tokens * (2 * a - (g if made else 0)) * d * e if grouped else 0
    else:
        core = tokens * a * 4
    ways = 2 if config.swiglu else 1
    dropped = 2 * rows * h if config.hidden_dropout else 0
    return {
        "norm_inputs": 2 * rows * (h * max(e, 4) + stats) + dropped,
        "norm_outputs": 2 * rows * h * e,
        "core_attn": core // cut.tp,
        "mlp": ways * tokens * config.ffn_width * e // cut.tp,
        "projections": projections // cut.tp,
    }


def end_bytes(config: TransformerConfig, cut: Cut) -> tuple[int, int]:
    """Before the blocks, the embedding's dropout; behind them, what the last norm is given. What
    the loss keeps is its own (core/tensor_parallel/output_loss_memory.py)."""
    width = config.seq_length * cut.batch * config.hidden_size
    width //= cut.tp if cut.sequence_parallel else 1
    return width if config.hidden_dropout else 0, width * max(cut.element, 4)


@dataclass(frozen=True)
class StageBytes:
    """kept  of each microbatch, from its forward to its backward
    most  of a microbatch while its backward runs, with what is computed again
    """

    kept: int
    most: int


def kept_bytes(
    config: TransformerConfig, recompute: RecomputeConfig, layers: Sequence[int], cut: Cut
) -> StageBytes:
    """Of the blocks of a stage."""
    parts = layer_parts(config, cut)
    whole = sum(parts.values())
    again = {name: parts[name] for name in ("core_attn", "mlp") if name in recompute.modules}
    selective = whole - sum(again.values())
    if "layernorm" in recompute.modules:
        selective -= parts["norm_outputs"]
    kept = inputs = largest = 0
    whole_input = config.seq_length * cut.batch * config.hidden_size
    wide = cut.residual or cut.element
    whole_input *= wide
    is_cut = cut.sequence_parallel or recompute.distribute_saved_activations
    # the first norm computed again keeps the unit's input itself, if that is wide enough and whole
    again_input = 0
    if wide >= 4 and not recompute.distribute_saved_activations:
        again_input = whole_input // cut.tp if cut.sequence_parallel else whole_input
    for unit in recompute.units(layers):
        if unit.again:
            inputs += whole_input // cut.tp if is_cut else whole_input
            largest = max(largest, whole * len(unit.layers) - again_input)
        else:
            kept += selective * len(unit.layers)
    # A stage's last layers go first: they are gone when its first ones are computed again. In the
    # last layer, the MLP and its norm are gone when attention's core is.
    norms = parts["norm_inputs"]
    norms += 0 if "layernorm" in recompute.modules else parts["norm_outputs"]
    gone = norms // 2 + (0 if "mlp" in again else parts["mlp"])
    passing = max(again.get("mlp", 0), again.get("core_attn", 0) - gone, 0) if kept else 0
    return StageBytes(kept + inputs, inputs + max(kept + passing, largest))
