"""The transformer block: attention and MLP between norms, built from tensor-parallel layers.

Sorted from simple to complex: `Norm`, `Attention`, `MLP`, `Block`. A layer takes the one
group it uses (`tp`) and plain values; nothing here knows a pipeline, a loss or a command line.
Activations are [s, b, h]; under sequence parallelism [s/t, b, h] between the column-parallel layers
(which gather) and the row-parallel ones (which scatter).

Neighbours: core.tensor_parallel (the linears), kernels (pointwise functions), models.embedding,
models.gpt and models.bert (which stack blocks).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.random import DropoutKeys
from core.shard import Shard
from core.tensor_parallel import (
    CheckpointWithoutOutput,
    ColumnParallelLinear,
    RowParallelLinear,
    checkpoint,
)
from core.tensor_parallel.linear import Activation
from kernels import bias_gelu
from kernels.dropout_add import bias_dropout_add
from kernels.layer_norm import layer_norm
from kernels.masked_softmax import scaled_masked_softmax
from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu
from models.rotary import Rotary

if TYPE_CHECKING:
    from models.cache import KeyValueCache
    from models.config import GPTConfig


@dataclass(frozen=True)
class Context:
    """What a microbatch carries through the blocks besides its activations.

    rotary      cos and sin of this microbatch's positions (`Rotary.tables`), or None
    mask        None, or [b, 1, s, s] bool: True where a query (row) may look at a key (column)
    dropout     keys of this microbatch's masks, None when nothing is dropped (evaluation)
    first_row   number of my first sequence position: nonzero under sequence parallelism
    cache       keys and values of tokens read before, when text is generated
    """

    rotary: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None
    dropout: DropoutKeys | None = None
    first_row: int = 0
    cache: KeyValueCache | None = None


@dataclass(frozen=True)
class Build:
    """What every layer of a model is built with: the group, the type, the seed.

    tp                 the tensor-parallel group
    dtype, device      of parameters
    seed               initial values are a function of it, the parameter's name and the index
    sequence_parallel  activations between the linears are cut along the sequence
    residual_dtype     of what the blocks add to; None: `dtype`
    """

    tp: object
    dtype: torch.dtype
    device: torch.device
    seed: int
    sequence_parallel: bool = False
    residual_dtype: torch.dtype | None = None

    def replicated(self, shape: tuple[int, ...], value: float, *, per_token: bool = True):
        """A parameter every tp rank holds whole: a norm's gain or a bias; no weight decay.

        per_token: it sees only this rank's tokens under sequence parallelism, so that its gradient
        must be added over tp.
        """
        param = nn.Parameter(torch.full(shape, value, dtype=self.dtype, device=self.device))
        shared = ("tp",) if self.sequence_parallel and per_token else ()
        param.shard = Shard(shape, sum_over=shared, decay=False)
        param.sequence_parallel = bool(shared)
        return param


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension.

    LayerNorm  y = (x - mean) / sqrt(var + eps) * weight + bias
    RMSNorm    y = x / sqrt(mean(x^2) + eps) * weight          (Zhang, Sennrich, 2019)

    per_head: the norm of queries or keys, applied to this rank's heads of every token. Each tp rank
    then sees other heads, so the gradient is always added over tp.
    result: the type of y, where it is not that of x.
    """

    def __init__(
        self,
        kind: Literal["LayerNorm", "RMSNorm"],
        width: int,
        eps: float,
        build: Build,
        *,
        per_head: bool = False,
        result: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.eps, self.width, self.result = kind, eps, width, result
        self.weight = build.replicated((width,), 1.0)
        self.bias = build.replicated((width,), 0.0) if kind == "LayerNorm" else None
        if per_head:
            for param in self.parameters():
                param.shard = Shard((width,), sum_over=("tp",), decay=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "LayerNorm":
            y = layer_norm(x, self.weight, self.bias, self.eps)
        else:
            y = rms_norm(x, self.weight, self.eps)
        return y if self.result is None else y.to(self.result)

    def extra_repr(self) -> str:
        return f"{self.kind}({self.width}, eps={self.eps})"


# ---- attention ----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head attention with grouped queries; heads are cut over tp.

    x        [s, b, h]                        (or [s/t, b, h] under sequence parallelism)
    qkv      [s, b, g/t, (a/g + 2) d]         per query group: its a/g queries, one key, one value
    context  [s, b, a/t d]
    out      [s, b, h]                        without the output bias, which is returned beside it

    causal: a token sees itself and what came before; otherwise every token (BERT).
    core_again: what is between the linears is computed again in backward.
    """

    def __init__(
        self,
        config: GPTConfig,
        layer: int,
        build: Build,
        *,
        causal: bool,
        std_out: float,
        rotary: Rotary | None,
        core_again: bool = False,
    ) -> None:
        super().__init__()
        name = f"layers.{layer}.attention"
        self.core_again = core_again
        self.layer, self.tp, self.causal = layer, build.tp, causal
        self.head_dim = d = config.head_dim
        self.heads = config.num_attention_heads // build.tp.size
        self.groups = config.query_groups // build.tp.size
        self.dropout = config.attention_dropout
        self.softmax_in_fp32 = config.attention_softmax_in_fp32
        bias = not config.disable_bias_linear
        per_group = config.num_attention_heads // config.query_groups + 2
        common = {
            "tp_group": build.tp,
            "sequence_parallel": build.sequence_parallel,
            "dtype": build.dtype,
            "device": build.device,
            "seed": build.seed,
        }
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            config.query_groups * per_group * d,
            bias=bias or config.add_qkv_bias,
            gather_output=False,
            name=f"{name}.qkv",
            init_std=config.init_method_std,
            **common,
        )
        self.out = RowParallelLinear(
            config.num_attention_heads * d,
            config.hidden_size,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=True,
            name=f"{name}.out",
            init_std=std_out,
            **common,
        )
        self.query_norm = self.key_norm = None
        if config.qk_layernorm:
            norm = (config.normalization, d, config.norm_epsilon, build)
            self.query_norm, self.key_norm = Norm(*norm, per_head=True), Norm(*norm, per_head=True)
        self.rotary = rotary

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        qkv, _ = self.qkv(x)
        s, b, _ = qkv.shape
        d, per_group = self.head_dim, self.heads // self.groups
        qkv = qkv.view(s, b, self.groups, (per_group + 2) * d)
        q, k, v = qkv.split((per_group * d, d, d), dim=-1)
        q = q.reshape(s, b, self.heads, d)  # [s, b, a/t, d]; k, v [s, b, g/t, d]
        if self.query_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, context.rotary), self.rotary(k, context.rotary)
        q, k, v = (y.permute(1, 2, 0, 3) for y in (q, k, v))  # [b, a/t or g/t, s, d]
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)
        if self.core_again and torch.is_grad_enabled():
            y = checkpoint(self._core, False, q, k, v, context, preserve_rng_state=False)
        else:
            y = self._core(q, k, v, context)
        return self.out(y.permute(2, 0, 1, 3).reshape(s, b, self.heads * d))

    def _core(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        if self.dropout > 0 and context.dropout is not None:
            return self._explicit(q, k, v, context)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=context.mask,
            is_causal=self.causal and context.mask is None,
            enable_gqa=self.groups != self.heads,
        )

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """softmax(q k' / sqrt d) with dropout by the stateless mask, every matrix in memory.

        The mask of (head, query) row i counts heads over all of tp, so a rank draws its own part.
        """
        b, heads, s, d = q.shape
        if self.groups != heads:
            k, v = (y.repeat_interleave(heads // self.groups, dim=1) for y in (k, v))
        scores = q @ k.transpose(2, 3)  # [b, a/t, s, s]
        dtype, scale = scores.dtype, 1 / math.sqrt(d)
        if self.softmax_in_fp32 and scores.element_size() < 4:
            scores = scores.float()
        causal = self.causal and context.mask is None
        weights = scaled_masked_softmax(scores, context.mask, scale, causal).to(dtype)
        first = self.tp.rank * heads * s
        rows = torch.arange(first, first + heads * s, device=q.device)
        keep = context.dropout.keep(self.layer, "attention", rows, s, self.dropout)
        keep = keep.view(heads, s, b, s).permute(2, 0, 1, 3)
        return (weights * keep / (1 - self.dropout)) @ v


# ---- MLP -----------------------------------------------------------------------------------------


GELU = Activation(bias_gelu.value, bias_gelu.again)


def exact_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """x Phi(x), BERT's form."""
    return F.gelu(x if bias is None else x + bias)


def squared_relu(x: Tensor, bias: Tensor | None) -> Tensor:
    return F.relu(x if bias is None else x + bias).square()


def squared_relu_again(dh: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    r = F.relu(x if bias is None else x + bias)
    return dh * r * 2, r.square()


def gated_silu(x: Tensor, bias: Tensor | None) -> Tensor:
    return swiglu(x if bias is None else x + bias)


class MLP(nn.Module):
    """Two linears around an activation; the inner width f is cut over tp.

    inner  [s, b, f/t]    (twice that, gate and value, for the gated form); kept for backward, while
                          what the activation makes of it is not
    out    [s, b, h]      without the output bias, which is returned beside it
    """

    def __init__(
        self,
        config: GPTConfig,
        layer: int,
        build: Build,
        *,
        activation: Activation,
        std_out: float,
    ) -> None:
        super().__init__()
        name = f"layers.{layer}.mlp"
        bias = not config.disable_bias_linear
        gated = config.swiglu
        common = {
            "bias": bias,
            "tp_group": build.tp,
            "sequence_parallel": build.sequence_parallel,
            "dtype": build.dtype,
            "device": build.device,
            "seed": build.seed,
        }
        ffn = config.ffn_width
        self.up = ColumnParallelLinear(
            config.hidden_size,
            2 * ffn if gated else ffn,
            gather_output=False,
            stride=2 if gated else 1,
            skip_bias_add=build.device.type != "cpu",  # there a kernel adds it on the way
            name=f"{name}.up",
            init_std=config.init_method_std,
            **common,
        )
        self.activation = Activation(gated_silu) if gated else activation
        self.down = RowParallelLinear(
            ffn,
            config.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            name=f"{name}.down",
            init_std=std_out,
            **common,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        inner, bias = self.up(x)
        return self.down(inner, activation=self.activation, activation_bias=bias)


# ---- block ---------------------------------------------------------------------------------------


def dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    p: float,
    layer: int,
    place: str,
    context: Context,
) -> Tensor:
    """residual + dropout(x + bias), x and residual [rows, b, h]; uses up x."""
    keys = None
    if p > 0 and context.dropout is not None:
        rows = torch.arange(x.shape[0], device=x.device) + context.first_row
        keys = context.dropout.rows(layer, place, rows)
    return bias_dropout_add(x, bias, residual, keys, p, overwrite=True)


class Block(nn.Module):
    """One layer of the transformer.

    pre   x += dropout(attention(norm(x)));  x += dropout(mlp(norm(x)))      (GPT)
    post  x = norm(x + dropout(attention(x)));  x = norm(x + dropout(mlp(x)))  (the original BERT)

    x is of build.residual_dtype, what goes into attention and MLP of build.dtype.
    again      parts that are computed again in backward: core_attn, mlp, layernorm (of pre only)
    recomputed the whole block is, by whoever calls it: Stack says so
    """

    recomputed = False

    def __init__(
        self,
        config: GPTConfig,
        layer: int,
        build: Build,
        *,
        norm_placement: Literal["pre", "post"] = "pre",
        causal: bool = True,
        activation: Activation = GELU,
        rotary: Rotary | None = None,
        again: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.again = again
        self.layer, self.hidden_dropout = layer, config.hidden_dropout
        self.norm_first = norm_placement == "pre"
        # the two matrices that write to the residual stream: std / sqrt(2 l), as GPT-2
        std_out = config.init_method_std / math.sqrt(2 * config.num_layers)
        norm = (config.normalization, config.hidden_size, config.norm_epsilon, build)
        self.dtype = build.dtype
        result = build.dtype if build.residual_dtype and self.norm_first else None
        self.attention_norm = Norm(*norm, result=result)
        self.attention = Attention(
            config,
            layer,
            build,
            causal=causal,
            std_out=std_out,
            rotary=rotary,
            core_again="core_attn" in again,
        )
        self.mlp_norm = Norm(*norm, result=result)
        if config.squared_relu:
            activation = Activation(squared_relu, squared_relu_again)
        self.mlp = MLP(config, layer, build, activation=activation, std_out=std_out)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        where = {"p": self.hidden_dropout, "layer": self.layer, "context": context}
        if self.norm_first:
            y, bias = self._behind(self.attention_norm, self.attention, x, context)
            x = dropout_add(y, bias, x, place="attention_out", **where)
            y, bias = self._behind(self.mlp_norm, self._mlp, x)
            return dropout_add(y, bias, x, place="mlp_out", **where)
        y, bias = self.attention(x.to(self.dtype), context)
        x = self.attention_norm(dropout_add(y, bias, x, place="attention_out", **where))
        y, bias = self._mlp(x.to(self.dtype))
        return self.mlp_norm(dropout_add(y, bias, x, place="mlp_out", **where))

    def _behind(self, norm: Norm, part: Callable, x: Tensor, *context: Context):
        """part(norm(x)); the norm's output is freed in between, if asked."""
        if "layernorm" not in self.again or not torch.is_grad_enabled():
            return part(norm(x), *context)
        passing = CheckpointWithoutOutput(preserve_rng_state=False)
        y, bias = part(passing.checkpoint(norm, x), *context)
        passing.discard_output_and_register_recompute(y)
        return y, bias

    def _mlp(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if "mlp" not in self.again or not torch.is_grad_enabled():
            return self.mlp(x)
        y = checkpoint(lambda x: self.mlp(x)[0], False, x, preserve_rng_state=False)
        return y, self.mlp.down.bias
