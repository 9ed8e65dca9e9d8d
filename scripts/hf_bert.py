"""How transformers lays out BERT (BertForPreTraining), beside how we do; see hf_layout.py.

The word table is the output layer's weight too, and the output layer's bias is stored once
(cls.predictions.bias). A folder without cls.seq_relationship (BertForMaskedLM) is a BERT without
binary head.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from models.config import TOKEN_TYPES, BertConfig
from scripts.hf_layout import (
    Family,
    Rule,
    norm,
    query_key_value,
    refuse,
    required,
    switched_off,
    unlike_first_transformers,
)

PAIR = "cls.seq_relationship.weight"


def bert_config(theirs: dict) -> BertConfig:
    side = "config.json of a bert"
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    required(theirs, side, *sizes, "max_position_embeddings", "vocab_size")
    reasons = switched_off(
        theirs,
        hidden_act="gelu",
        position_embedding_type="absolute",
        type_vocab_size=TOKEN_TYPES,
        is_decoder=False,
        add_cross_attention=False,
        tie_word_embeddings=True,
    )
    refuse(side, reasons)
    return BertConfig(
        num_layers=theirs["num_hidden_layers"],
        hidden_size=theirs["hidden_size"],
        num_attention_heads=theirs["num_attention_heads"],
        ffn_hidden_size=theirs["intermediate_size"],
        seq_length=theirs["max_position_embeddings"],
        vocab_size=theirs["vocab_size"],
        norm_epsilon=theirs.get("layer_norm_eps", 1e-12),
        attention_dropout=theirs.get("attention_probs_dropout_prob", 0.1),
        hidden_dropout=theirs.get("hidden_dropout_prob", 0.1),
        init_method_std=theirs.get("initializer_range", 0.02),
        norm_placement="post",
        bert_no_binary_head=theirs.get("architectures") == ["BertForMaskedLM"],
    )


def bert_fit(config: BertConfig, names: Collection[str]) -> BertConfig:
    """The published files name one class and hold the tensors of another: the tensors decide."""
    return replace(config, bert_no_binary_head=PAIR not in names)


def bert_describe(config: BertConfig) -> dict:
    refuse("bert", unlike_first_transformers(config, norm_placement="post"))
    return {
        "architectures": ["BertForPreTraining" if config.binary_head else "BertForMaskedLM"],
        "model_type": "bert",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_width,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": TOKEN_TYPES,
        "vocab_size": config.vocab_size,
        "hidden_act": "gelu",
        "layer_norm_eps": config.norm_epsilon,
        "attention_probs_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.hidden_dropout,
        "initializer_range": config.init_method_std,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
    }


def bert_rules(config: BertConfig) -> Iterator[Rule]:
    h, f, v = config.hidden_size, config.ffn_width, config.vocab_size
    table = "bert.embeddings."
    yield Rule("embedding.word.weight", (v, h), (f"{table}word_embeddings.weight",))
    positions = (config.max_positions, h)
    yield Rule("embedding.position.weight", positions, (f"{table}position_embeddings.weight",))
    types = (TOKEN_TYPES, h)
    yield Rule("embedding.token_type.weight", types, (f"{table}token_type_embeddings.weight",))
    yield from norm("embedding.norm", f"{table}LayerNorm", h, "weight", "bias")
    for n in range(config.num_layers):
        ours, theirs = f"layers.{n}.", f"bert.encoder.layer.{n}."
        attention = f"{theirs}attention.self."
        for kind, shape in (("weight", (3 * h, h)), ("bias", (3 * h,))):
            names = tuple(f"{attention}{part}.{kind}" for part in ("query", "key", "value"))
            rule = Rule(f"{ours}attention.qkv.{kind}", shape, names)
            yield query_key_value(rule, config, fused=False)
        yield from linear(f"{ours}attention.out", f"{theirs}attention.output.dense", h, h)
        yield from norm(
            f"{ours}attention_norm", f"{theirs}attention.output.LayerNorm", h, "weight", "bias"
        )
        yield from linear(f"{ours}mlp.up", f"{theirs}intermediate.dense", f, h)
        yield from linear(f"{ours}mlp.down", f"{theirs}output.dense", h, f)
        yield from norm(f"{ours}mlp_norm", f"{theirs}output.LayerNorm", h, "weight", "bias")
    head = "cls.predictions."
    yield from linear("language_head.dense", f"{head}transform.dense", h, h)
    yield from norm("language_head.norm", f"{head}transform.LayerNorm", h, "weight", "bias")
    yield Rule("language_head.bias", (v,), (f"{head}bias",))
    if config.binary_head:
        yield from linear("binary_head.pooler", "bert.pooler.dense", h, h)
        yield from linear("binary_head.classes", "cls.seq_relationship", 2, h)


def linear(ours: str, theirs: str, out: int, inner: int) -> Iterator[Rule]:
    yield Rule(f"{ours}.weight", (out, inner), (f"{theirs}.weight",))
    yield Rule(f"{ours}.bias", (out,), (f"{theirs}.bias",))


BERT = Family(
    "bert",
    BertConfig,
    bert_config,
    bert_describe,
    bert_rules,
    "bert.",
    ("cls.",),
    ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias", ".position_ids"),
    bert_fit,
)
