"""How Hugging Face transformers lays out GPT-2 and Llama, beside how we do: configs and tensors.

Read by convert_hf.py. A `Family` turns a config.json into our config and back, and lists one `Rule`
per logical tensor of ours: the tensors of theirs it is made of, and the two ways between them.
Formulas, names and shapes are those of transformers' GPT2LMHeadModel and LlamaForCausalLM.
Neighbours: hf_bert.py (the same for BERT), hf_families.py (all of them by name).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.config import BertConfig, GPTConfig, TransformerConfig

GELU = ("gelu_new", "gelu_pytorch_tanh")  # x/2 (1 + tanh …), the form we have
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Unsupported(Exception):
    """A model that cannot be expressed on the other side; every reason in one message."""


@dataclass(frozen=True)
class Rule:
    """One logical tensor of ours.

    ours    its name, without "model/"
    shape   of ours
    theirs  the names it is made of, in the order that `join` takes and `split` gives
    """

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    join: Callable[..., Tensor] = lambda tensor: tensor
    split: Callable[[Tensor], tuple[Tensor, ...]] = lambda tensor: (tensor,)

    def their_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(t.shape) for t in self.split(torch.empty(self.shape, device="meta"))]


# ---- the ways between the two ------------------------------------------------------------------


def transposed(rule: Rule) -> Rule:
    """GPT-2 keeps a linear's weight as [in, out]."""
    return replace(
        rule,
        join=lambda *parts: rule.join(*(part.t() for part in parts)),
        split=lambda ours: tuple(part.t() for part in rule.split(ours)),
    )


def query_key_value(rule: Rule, config: TransformerConfig, fused: bool) -> Rule:
    """Theirs: all queries, all keys, all values. Ours per group: its queries, its key, its value.

    ours [g (a/g + 2) d, …]; theirs [a d, …], [g d, …], [g d, …], in one tensor when `fused`.
    """
    d, groups = config.head_dim, config.query_groups
    heads = config.num_attention_heads
    sizes = (heads * d, groups * d, groups * d)
    per_group = (heads // groups * d, d, d)

    def join(*parts: Tensor) -> Tensor:
        parts = parts[0].split(sizes) if fused else parts
        grouped = [p.unflatten(0, (groups, n)) for p, n in zip(parts, per_group, strict=True)]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(ours: Tensor) -> tuple[Tensor, ...]:
        grouped = ours.unflatten(0, (groups, sum(per_group))).split(per_group, dim=1)
        parts = tuple(part.flatten(0, 1) for part in grouped)
        return (torch.cat(parts),) if fused else parts

    return replace(rule, join=join, split=split)


def gate_and_up(rule: Rule) -> Rule:
    """Theirs two matrices [f, …]; ours one [2, f, …]."""
    return replace(rule, join=lambda gate, up: torch.stack((gate, up)), split=lambda x: x.unbind(0))


# ---- families ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """One model type of transformers.

    kind      GPTConfig or BertConfig
    config    config.json -> ours; Unsupported with all reasons
    describe  ours -> config.json; Unsupported with all reasons
    rules     ours -> one Rule per logical tensor
    prefix    what some files leave out in front of their names
    outside   beginnings of names that never have it
    buffers   endings of names that are no parameters, or copies of one
    fit       (ours, names of the tensors there are) -> ours: what config.json does not say
    """

    model_type: str
    kind: type[TransformerConfig]
    config: Callable[[dict], GPTConfig | BertConfig]
    describe: Callable[[GPTConfig | BertConfig], dict]
    rules: Callable[[GPTConfig | BertConfig], Iterator[Rule]]
    prefix: str
    outside: tuple[str, ...]
    buffers: tuple[str, ...]
    fit: Callable[[GPTConfig, Collection[str]], GPTConfig] = lambda config, names: config


def refuse(side: str, reasons: list[str]) -> None:
    if reasons:
        raise Unsupported(f"{side}: " + "; ".join(reasons))


def required(theirs: dict, side: str, *names: str) -> None:
    missing = [name for name in names if not isinstance(theirs.get(name), int)]
    refuse(side, [f"{', '.join(missing)} missing or no number"] if missing else [])


def switched_off(theirs: dict, **usual: object) -> list[str]:
    """The settings that are not what the model here always does."""
    found = {name: theirs.get(name, value) for name, value in usual.items()}
    return [
        f"{name} {value} (only {usual[name]} is supported)"
        for name, value in found.items()
        if value != usual[name]
    ]


def unlike_first_transformers(config: GPTConfig | BertConfig, **more: object) -> list[str]:
    """`unlike` for the shape that GPT-2 and BERT share, and what one of them has besides."""
    return unlike(
        config,
        **more,
        position_embedding_type="learned_absolute",
        normalization="LayerNorm",
        swiglu=False,
        squared_relu=False,
        disable_bias_linear=False,
        qk_layernorm=False,
        query_groups=config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
    )


def gpt2_config(theirs: dict) -> GPTConfig:
    side = "config.json of a gpt2"
    required(theirs, side, "n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
    reasons = switched_off(
        theirs,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    if (form := theirs.get("activation_function", GELU[0])) not in GELU:
        reasons.append(f"activation_function {form} (only {' and '.join(GELU)})")
    refuse(side, reasons)
    return GPTConfig(
        num_layers=theirs["n_layer"],
        hidden_size=theirs["n_embd"],
        num_attention_heads=theirs["n_head"],
        seq_length=theirs["n_positions"],
        ffn_hidden_size=theirs.get("n_inner"),
        norm_epsilon=theirs.get("layer_norm_epsilon", 1e-5),
        vocab_size=theirs["vocab_size"],
        attention_dropout=theirs.get("attn_pdrop", 0.1),
        hidden_dropout=theirs.get("resid_pdrop", 0.1),
        init_method_std=theirs.get("initializer_range", 0.02),
        untie_embeddings_and_output_weights=not theirs.get("tie_word_embeddings", True),
    )


def gpt2_describe(config: GPTConfig) -> dict:
    refuse("gpt2", unlike_first_transformers(config))
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_width,
        "n_positions": config.max_positions,
        "vocab_size": config.vocab_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_epsilon,
        "attn_pdrop": config.attention_dropout,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }


def gpt2_rules(config: GPTConfig) -> Iterator[Rule]:
    h, f, v = config.hidden_size, config.ffn_width, config.vocab_size
    yield Rule("embedding.word.weight", (v, h), ("transformer.wte.weight",))
    positions = (config.max_positions, h)
    yield Rule("embedding.position.weight", positions, ("transformer.wpe.weight",))
    for n in range(config.num_layers):
        ours, theirs = f"layers.{n}.", f"transformer.h.{n}."
        for part, name, out, inner in (
            ("attention.qkv", "attn.c_attn", 3 * h, h),
            ("attention.out", "attn.c_proj", h, h),
            ("mlp.up", "mlp.c_fc", f, h),
            ("mlp.down", "mlp.c_proj", h, f),
        ):
            for kind, shape in (("weight", (out, inner)), ("bias", (out,))):
                rule = Rule(f"{ours}{part}.{kind}", shape, (f"{theirs}{name}.{kind}",))
                if part == "attention.qkv":
                    rule = query_key_value(rule, config, fused=True)
                yield transposed(rule) if kind == "weight" else rule
        yield from norm(f"{ours}attention_norm", f"{theirs}ln_1", h, "weight", "bias")
        yield from norm(f"{ours}mlp_norm", f"{theirs}ln_2", h, "weight", "bias")
    yield from norm("final_norm", "transformer.ln_f", h, "weight", "bias")
    if config.untie_embeddings_and_output_weights:
        yield Rule("output.weight", (v, h), ("lm_head.weight",))


def norm(ours: str, theirs: str, width: int, *kinds: str) -> Iterator[Rule]:
    for kind in kinds:
        yield Rule(f"{ours}.{kind}", (width,), (f"{theirs}.{kind}",))


def llama_config(theirs: dict) -> GPTConfig:
    side = "config.json of a llama"
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    required(theirs, side, *sizes, "max_position_embeddings", "vocab_size")
    reasons = switched_off(theirs, hidden_act="silu")
    biased = theirs.get("attention_bias", False)
    if theirs.get("mlp_bias", False) != biased:
        reasons.append(f"attention_bias {biased} without the same mlp_bias")
    rope, wrong = llama_rope(theirs)
    refuse(side, reasons + wrong)
    heads = theirs["num_attention_heads"]
    groups = theirs.get("num_key_value_heads") or heads
    return GPTConfig(
        num_layers=theirs["num_hidden_layers"],
        hidden_size=theirs["hidden_size"],
        num_attention_heads=heads,
        kv_channels=theirs.get("head_dim"),
        group_query_attention=groups != heads,
        num_query_groups=groups if groups != heads else None,
        ffn_hidden_size=theirs["intermediate_size"],
        seq_length=theirs["max_position_embeddings"],
        vocab_size=theirs["vocab_size"],
        position_embedding_type="rope",
        normalization="RMSNorm",
        norm_epsilon=theirs.get("rms_norm_eps", 1e-6),
        swiglu=True,
        disable_bias_linear=not biased,
        attention_dropout=theirs.get("attention_dropout", 0.0),
        hidden_dropout=0.0,
        init_method_std=theirs.get("initializer_range", 0.02),
        untie_embeddings_and_output_weights=not theirs.get("tie_word_embeddings", False),
        **rope,
    )


def llama_rope(theirs: dict) -> tuple[dict, list[str]]:
    """(our rotary settings, what we do not have); both of transformers' spellings."""
    scaling = {**(theirs.get("rope_scaling") or {}), **(theirs.get("rope_parameters") or {})}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    base = scaling.get("rope_theta") or theirs.get("rope_theta") or 10000.0
    ours, wrong = {"rotary_base": float(base)}, []
    if kind == "llama3":
        wrong = switched_off(scaling, **LLAMA3)
        ours |= {"use_rope_scaling": True, "rope_scaling_factor": float(scaling.get("factor", 8.0))}
    elif kind == "linear":
        ours["rotary_seq_len_interpolation_factor"] = float(scaling.get("factor", 1.0))
    elif kind != "default":
        wrong = [f"rope_type {kind} (only default, linear and llama3)"]
    return ours, wrong


def llama_describe(config: GPTConfig) -> dict:
    reasons = unlike(
        config,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_interleaved=False,
        normalization="RMSNorm",
        swiglu=True,
        squared_relu=False,
        qk_layernorm=False,
    )
    biased = not config.disable_bias_linear
    if config.add_qkv_bias and not biased:
        reasons.append("--add-qkv-bias with --disable-bias-linear")
    stretched = config.rotary_seq_len_interpolation_factor
    if stretched is not None and config.use_rope_scaling:
        reasons.append("--use-rope-scaling with --rotary-seq-len-interpolation-factor")
    refuse("llama", reasons)
    scaling = None
    if config.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": config.rope_scaling_factor, **LLAMA3}
    elif stretched is not None:
        scaling = {"rope_type": "linear", "factor": stretched}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_width,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "rope_scaling": scaling,
        "attention_bias": biased,
        "mlp_bias": biased,
        "attention_dropout": config.attention_dropout,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }


def llama_rules(config: GPTConfig) -> Iterator[Rule]:
    h, f, v, d = config.hidden_size, config.ffn_width, config.vocab_size, config.head_dim
    heads, groups = config.num_attention_heads, config.query_groups
    kinds = ["weight"] if config.disable_bias_linear else ["weight", "bias"]
    yield Rule("embedding.word.weight", (v, h), ("model.embed_tokens.weight",))
    for n in range(config.num_layers):
        ours, theirs = f"layers.{n}.", f"model.layers.{n}."
        attention, mlp = f"{theirs}self_attn.", f"{theirs}mlp."
        for kind in kinds:
            width = {"weight": lambda n: (n,), "bias": lambda n: ()}[kind]  # of the input
            names = tuple(f"{attention}{part}_proj.{kind}" for part in "qkv")
            shape = ((heads + 2 * groups) * d, *width(h))
            rule = Rule(f"{ours}attention.qkv.{kind}", shape, names)
            yield query_key_value(rule, config, fused=False)
            shape = (h, *width(heads * d))
            yield Rule(f"{ours}attention.out.{kind}", shape, (f"{attention}o_proj.{kind}",))
            names = (f"{mlp}gate_proj.{kind}", f"{mlp}up_proj.{kind}")
            yield gate_and_up(Rule(f"{ours}mlp.up.{kind}", (2, f, *width(h)), names))
            yield Rule(f"{ours}mlp.down.{kind}", (h, *width(f)), (f"{mlp}down_proj.{kind}",))
        yield from norm(f"{ours}attention_norm", f"{theirs}input_layernorm", h, "weight")
        yield from norm(f"{ours}mlp_norm", f"{theirs}post_attention_layernorm", h, "weight")
    yield from norm("final_norm", "model.norm", h, "weight")
    if config.untie_embeddings_and_output_weights:
        yield Rule("output.weight", (v, h), ("lm_head.weight",))


def unlike(config: TransformerConfig, **wanted: object) -> list[str]:
    """The settings in which a model of ours differs from a family, by flag."""
    return [
        f"--{name.replace('_', '-')} {getattr(config, name)} (it has {value})"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]


GPT2 = Family(
    "gpt2",
    GPTConfig,
    gpt2_config,
    gpt2_describe,
    gpt2_rules,
    "transformer.",
    ("lm_head.",),
    (".attn.bias", ".attn.masked_bias"),
)
LLAMA = Family(
    "llama",
    GPTConfig,
    llama_config,
    llama_describe,
    llama_rules,
    "model.",
    ("lm_head.",),
    (".rotary_emb.inv_freq",),
)
