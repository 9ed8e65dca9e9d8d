"""TransformerConfig, GPTConfig and BertConfig: a model's shape, with Megatron's flag names.

Pure: standard library only; nothing of ours is imported. models/transformer.py, models/gpt.py and
models/bert.py unpack it in their constructors. What follows from other fields is a property.
`problems` is about the shape alone; `layout_problems` about the shape cut over ranks
(core/layout_checks.py calls it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

FFN_MULTIPLE = 64  # a gated MLP's default width is a multiple of this
TOKEN_TYPES = 2  # of BERT: first text, second text


@dataclass(kw_only=True)
class TransformerConfig:
    """Shape of the blocks and of the embedding"""

    num_layers: int = field(metadata={"mock": 8})
    """Transformer blocks."""
    hidden_size: int = field(metadata={"mock": 64})
    """Width of the residual stream."""
    num_attention_heads: int = field(metadata={"mock": 8})
    """Query heads; divides by the tensor parallel size."""
    ffn_hidden_size: int | None = None
    """Inner width of the MLP; by default 4 x hidden, with --swiglu 8/3 x hidden in whole 64s."""
    kv_channels: int | None = None
    """Width of one head; by default hidden / heads."""
    group_query_attention: bool = False
    """Share keys and values between query heads."""
    num_query_groups: int | None = None
    """Key/value heads under --group-query-attention; by default 1."""
    seq_length: int = field(metadata={"mock": 64})
    """Tokens of a training sample."""
    max_position_embeddings: int | None = None
    """Longest sequence the model accepts; by default --seq-length."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """A learned table, rotated queries and keys, or nothing."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: float = 1.0
    """Share of each head that is rotated."""
    rotary_interleaved: bool = False
    """Rotate neighbouring channels instead of the two halves of a head."""
    rotary_seq_len_interpolation_factor: float | None = None
    """Divide all rotary frequencies by this."""
    use_rope_scaling: bool = False
    """Llama 3.1's stretching of the low rotary frequencies."""
    rope_scaling_factor: float = 8.0
    """How far --use-rope-scaling stretches."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Norm of every block."""
    norm_epsilon: float = 1e-5
    """Added to the variance in the norms."""
    qk_layernorm: bool = False
    """Normalise the queries and keys of each head."""
    swiglu: bool = False
    """MLP gated by SiLU instead of GELU."""
    squared_relu: bool = False
    """Squared ReLU in the MLP instead of GELU."""
    disable_bias_linear: bool = False
    """No bias in the linear layers."""
    add_qkv_bias: bool = False
    """Bias on queries, keys and values even under --disable-bias-linear."""
    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times the tensor parallel size."""
    vocab_size: int | None = field(default=None, metadata={"mock": 256})
    """Vocabulary before padding; by default the tokenizer's."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    attention_dropout: float = 0.1
    """Dropout on attention weights."""
    hidden_dropout: float = 0.1
    """Dropout on what each block adds to the residual stream."""
    attention_softmax_in_fp32: bool = False
    """Softmax of attention in float32 under a shorter type; wider types are never narrowed."""
    fp32_residual_connection: bool = False
    """Under --bf16 and --fp16, what the blocks add to, and what stages send, in float32."""
    fp64: bool = False
    """Run everything in float64, for checks."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key/value heads: all heads without grouped queries."""
        if not self.group_query_attention:
            return self.num_attention_heads
        return 1 if self.num_query_groups is None else self.num_query_groups

    @property
    def ffn_width(self) -> int:
        """Inner width of the MLP (of one half of it, when gated)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if not self.swiglu:
            return 4 * self.hidden_size
        # Two matrices in place of one: 2/3 of 4h keeps the parameter count (Megatron's rule).
        return max(8 * self.hidden_size // (3 * FFN_MULTIPLE), 1) * FFN_MULTIPLE

    @property
    def bytes_per_element(self) -> int:
        """Of a parameter."""
        return 8 if self.fp64 else 4

    @property
    def max_positions(self) -> int:
        return self.max_position_embeddings or self.seq_length

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.rotary_percent)

    def identity(self) -> dict[str, object]:
        """The settings a checkpoint must agree with, by flag name and with defaults worked out."""
        same = (
            *("num_layers", "hidden_size", "num_attention_heads", "position_embedding_type"),
            *("rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling"),
            *("rope_scaling_factor", "rotary_seq_len_interpolation_factor", "normalization"),
            *("norm_epsilon", "qk_layernorm", "swiglu", "squared_relu", "disable_bias_linear"),
            *("add_qkv_bias", "vocab_size"),
        )
        record = {name: getattr(self, name) for name in same}
        if self.position_embedding_type == "learned_absolute":
            record["max_position_embeddings"] = self.max_positions
        return record | {
            "kv_channels": self.head_dim,
            "num_query_groups": self.query_groups,
            "ffn_hidden_size": self.ffn_width,
        }

    def padded_vocab_size(self, tp: int = 1) -> int:
        """Rows of the embedding over all tp ranks; vocab_size must be known."""
        assert self.vocab_size is not None, "vocab_size is filled in from the tokenizer first"
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple

    # ------------------------------------------------------------------------------------ checks

    def problems(self) -> Iterator[str]:
        """What cannot be built at any layout."""
        bad_sizes = list(self._bad_sizes())
        yield from bad_sizes
        yield from self._bad_ranges()
        yield from self._contradictions()
        if not bad_sizes:
            yield from self._indivisible()

    def _bad_sizes(self) -> Iterator[str]:
        for name in (
            *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels"),
            *("num_query_groups", "seq_length", "max_position_embeddings", "vocab_size"),
            "make_vocab_size_divisible_by",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                sentence = f"--{name.replace('_', '-')} {value} must be 1 or more"
                if name == "num_query_groups":
                    sentence += f"; {self._groups_that_work()}"
                yield sentence

    def _groups_that_work(self) -> str:
        heads = self.num_attention_heads
        return f"--num-attention-heads {heads} allows {one_of(divisors(heads))}"

    def _bad_ranges(self) -> Iterator[str]:
        for flag, value in (
            ("attention-dropout", self.attention_dropout),
            ("hidden-dropout", self.hidden_dropout),
        ):
            if not 0.0 <= value < 1.0:
                yield f"--{flag} {value} must be at least 0 and below 1"
        if not 0.0 < self.rotary_percent <= 1.0:
            yield f"--rotary-percent {self.rotary_percent} must be above 0 and at most 1"
        for flag, value in (
            ("norm-epsilon", self.norm_epsilon),
            ("rotary-base", self.rotary_base),
            ("init-method-std", self.init_method_std),
        ):
            if value <= 0.0:
                yield f"--{flag} {value} must be above 0"
        factor = self.rotary_seq_len_interpolation_factor
        if factor is not None and factor <= 0.0:
            yield f"--rotary-seq-len-interpolation-factor {factor} must be above 0"
        if self.rope_scaling_factor < 1.0:
            yield f"--rope-scaling-factor {self.rope_scaling_factor} must be 1 or more"

    def _contradictions(self) -> Iterator[str]:
        if self.swiglu and self.squared_relu:
            yield "--swiglu and --squared-relu are two MLPs; choose one"
        if self.num_query_groups is not None and not self.group_query_attention:
            typed = f"--num-query-groups {self.num_query_groups}"
            yield f"{typed} does nothing without --group-query-attention; add it"
        if self.position_embedding_type != "rope":
            for flag, typed in (
                ("--use-rope-scaling", self.use_rope_scaling),
                ("--rotary-interleaved", self.rotary_interleaved),
                (
                    "--rotary-seq-len-interpolation-factor",
                    self.rotary_seq_len_interpolation_factor is not None,
                ),
                (f"--rotary-percent {self.rotary_percent}", self.rotary_percent != 1.0),
                (f"--rotary-base {self.rotary_base:g}", self.rotary_base != 10000.0),
            ):
                if typed:
                    yield f"{flag} does nothing without --position-embedding-type rope; add it"
        if self.seq_length > self.max_positions:
            yield (
                f"--seq-length {self.seq_length} is longer than --max-position-embeddings "
                f"{self.max_position_embeddings}; give positions of {self.seq_length} or more"
            )

    def _indivisible(self) -> Iterator[str]:
        heads, hidden = self.num_attention_heads, self.hidden_size
        if self.kv_channels is None and hidden % heads:
            near = one_of(multiples_around(hidden, heads))
            yield (
                f"--hidden-size {hidden} does not divide by --num-attention-heads {heads}; "
                f"use a hidden size of {near}, or {one_of(divisors_around(hidden, heads))} heads"
            )
        elif self.position_embedding_type == "rope" and self._odd_rotation():
            yield (
                f"--position-embedding-type rope turns pairs of channels: --rotary-percent "
                f"{self.rotary_percent} of {self._head_dim_origin()} is {self.rotary_dim}, "
                f"not an even number"
            )
        if self.num_query_groups is not None and heads % self.num_query_groups:
            yield (
                f"--num-attention-heads {heads} does not divide by --num-query-groups "
                f"{self.num_query_groups}; {self._groups_that_work()}"
            )

    def _odd_rotation(self) -> bool:
        return self.rotary_dim < 2 or self.rotary_dim % 2 == 1

    def _head_dim_origin(self) -> str:
        if self.kv_channels is not None:
            return f"--kv-channels {self.kv_channels}"
        heads = self.num_attention_heads
        return f"a head of --hidden-size {self.hidden_size} / --num-attention-heads {heads}"

    def layout_problems(self, tp: int, sequence_parallel: bool) -> Iterator[str]:
        """What cannot be cut over `tp` ranks: one sentence each, none when tp is 1."""
        if tp < 2 or any(True for _ in self._bad_sizes()):
            return
        ways = f"--tensor-model-parallel-size {tp}"
        if self.num_attention_heads % tp:
            yield (
                f"--num-attention-heads {self.num_attention_heads} does not divide by {ways}; "
                f"use {one_of(divisors(self.num_attention_heads))}"
            )
        elif self.group_query_attention and self.query_groups % tp:
            groups = [g for g in divisors(self.num_attention_heads) if g % tp == 0]
            yield (
                f"--num-query-groups {self.query_groups} does not divide by {ways}; use "
                f"{one_of(divisors(self.query_groups))}, or {one_of(groups)} query groups"
            )
        derived = "" if self.ffn_hidden_size else f" (from --hidden-size {self.hidden_size})"
        if self.ffn_width % tp:
            yield (
                f"--ffn-hidden-size {self.ffn_width}{derived} does not divide by {ways}; "
                f"use an inner width of {one_of(multiples_around(self.ffn_width, tp))}"
            )
        if sequence_parallel and self.seq_length % tp:
            yield (
                f"--seq-length {self.seq_length} does not divide by {ways}, which "
                f"--sequence-parallel needs; use {one_of(multiples_around(self.seq_length, tp))}"
            )


@dataclass(kw_only=True)
class GPTConfig(TransformerConfig):
    """Shape of the model"""

    untie_embeddings_and_output_weights: bool = False
    """An output matrix of its own."""
    loss_mode: Literal["auto", "pipelined", "one-shot", "split", "unfused"] = "auto"
    """How the output layer and its loss are computed; unfused keeps all logits in memory."""
    label_smoothing: float = 0.0
    """Share of the target's weight that is spread over the whole vocabulary."""
    z_loss: float = 0.0
    """Factor of the squared log of the softmax's normaliser, added to the loss."""

    def identity(self) -> dict[str, object]:
        name = "untie_embeddings_and_output_weights"
        return {**super().identity(), name: getattr(self, name)}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not 0.0 <= self.label_smoothing < 1.0:
            yield f"--label-smoothing {self.label_smoothing:g} must be at least 0 and below 1"
        if self.z_loss < 0.0:
            yield f"--z-loss {self.z_loss:g} must be 0 or more"
        if self.z_loss and self.loss_mode == "unfused":
            yield f"--z-loss {self.z_loss:g} is not known to --loss-mode unfused; use auto"


@dataclass(kw_only=True)
class BertConfig(TransformerConfig):
    """Shape of the model, and what it learns"""

    norm_placement: Literal["post", "pre"] = "post"
    """Norms behind each part and the embedding (the original BERT), or before (Megatron's)."""
    bert_no_binary_head: bool = False
    """Do not learn whether the second text follows the first."""
    mask_prob: float = 0.15
    """Share of the tokens that are to be guessed."""
    loss_mode: Literal["auto", "pipelined", "one-shot", "split", "unfused"] = "auto"
    """How the output layer and its loss are computed; unfused keeps their logits in memory."""

    @property
    def binary_head(self) -> bool:
        return not self.bert_no_binary_head

    @property
    def pair_weight(self) -> float:
        """What a sample's pair loss counts beside a token's: about the tokens to be guessed in a
        sample, so that the mean over tokens is about the sum of the two losses' own means."""
        return self.mask_prob * self.seq_length

    def identity(self) -> dict[str, object]:
        names = ("norm_placement", "bert_no_binary_head")
        return super().identity() | {name: getattr(self, name) for name in names}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not 0.0 < self.mask_prob < 1.0:
            yield f"--mask-prob {self.mask_prob:g} must be above 0 and below 1"
        if 0 < self.seq_length < 8:
            yield f"--seq-length {self.seq_length} has no room for two texts; use 8 or more"


def divisors(n: int) -> list[int]:
    """The divisors of n; of a number above 10**8, those with a small counterpart.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [d for d in range(1, min(math.isqrt(max(n, 0)), 10_000) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def divisors_around(n: int, value: int) -> list[int]:
    """The nearest divisors of n below and above a value that is none.

    >>> divisors_around(65, 8), divisors_around(6, 8)
    ([5, 13], [6])
    """
    below = [d for d in divisors(n) if d < value][-1:]
    return below + [d for d in divisors(n) if d > value][:1]


def multiples_around(n: int, step: int) -> list[int]:
    """The nearest multiples of `step` below and above n, without 0.

    >>> multiples_around(65, 4), multiples_around(3, 4)
    ([64, 68], [4])
    """
    below = n // step * step
    return [value for value in (below, below + step) if value > 0]


def one_of(values: list[int]) -> str:
    """
    >>> one_of([1, 2, 5])
    '1, 2 or 5'
    """
    words = [str(value) for value in values]
    if len(words) > 16:
        words = [*words[:12], f"another of {len(values)} values"]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
