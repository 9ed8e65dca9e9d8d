"""How large a model is and what a token costs: parameters and model FLOPs from the shape alone.

Pure: standard library only; imports models/config.py. core/metrics.py is given the cost of a token
and knows nothing else of the model. Tensor parallel size and vocabulary padding do not enter: these
are the numbers of the logical model.
"""

from __future__ import annotations

from models.config import TOKEN_TYPES, BertConfig, GPTConfig, TransformerConfig


def parameters(config: GPTConfig) -> dict[str, int]:
    """Number of parameters by part; `sum(parameters(config).values())` is the model's size.

        word_embeddings      v h              also the output matrix unless untied
        position_embeddings  positions h      learned positions only
        attention            l (h (a + 2 g) d + a d h)      with its biases
        mlp                  l (2 or, gated, 3) h f         with its biases
        norms                2 per layer, 1 at the end, and with --qk-layernorm 2 of width d
        output               v h              untied only
    """
    untied = config.untie_embeddings_and_output_weights
    output = _vocabulary(config) * config.hidden_size if untied else 0
    return {**_stack_parameters(config), "output": output}


def bert_parameters(config: BertConfig) -> dict[str, int]:
    """Number of parameters by part, as for GPT; with post-norm blocks the norm at the end stands
    behind the embedding instead.

        token_types    2 h
        language_head  h h, a norm, biases of h and v       the word table is its matrix
        binary_head    h h + h, 2 h + 2                     pooler, classes
    """
    h = config.hidden_size
    return {
        **_stack_parameters(config),
        "token_types": TOKEN_TYPES * h,
        "language_head": h * h + h + _norm_vectors(config) * h + _vocabulary(config),
        "binary_head": h * h + h + 2 * h + 2 if config.binary_head else 0,
    }


def flops_per_token(config: GPTConfig, *, causal: bool = True) -> int:
    """Floating-point operations of one token, forward and backward, in a sample of --seq-length.

    A multiply-add counts as two; the backward pass costs twice the forward pass; only matrix
    products count. Megatron-LM's convention for attention is kept: under a causal mask a token sees
    s/2 keys on average, so the two products q k' and p v cost 4 a d (s/2) forward. Recomputation
    does not count (model FLOPs, not hardware FLOPs), nor do padding rows of the vocabulary.

        forward = 2 (weights of the linears and of the output matrix) + 4 a d (s/2 or s) l
    """
    output = 2 * config.hidden_size * _vocabulary(config)
    return 3 * (_block_flops(config, causal) + output)


def bert_flops_per_token(config: BertConfig) -> int:
    """As for GPT, of any token of a sample, padding included. The language head sees the share
    --mask-prob of them, the binary head one in a sample.

        forward = 2 (linears) + 4 a d s l + mask_prob 2 (h h + h v) + 2 (h h + 2 h) / s
    """
    h, s = config.hidden_size, config.seq_length
    heads = config.mask_prob * 2 * h * (h + _vocabulary(config))
    if config.binary_head:
        heads += 2 * h * (h + 2) / s
    return round(3 * (_block_flops(config, causal=False) + heads))


def _stack_parameters(config: TransformerConfig) -> dict[str, int]:
    h, f, d, layers = config.hidden_size, config.ffn_width, config.head_dim, config.num_layers
    query, qkv = _projection_sizes(config)
    ways_in = 2 if config.swiglu else 1
    linear_bias = not config.disable_bias_linear
    qkv_bias = linear_bias or config.add_qkv_bias
    norm_widths = layers * (2 * h + (2 * d if config.qk_layernorm else 0)) + h
    learned = config.position_embedding_type == "learned_absolute"
    return {
        "word_embeddings": _vocabulary(config) * h,
        "position_embeddings": config.max_positions * h if learned else 0,
        "attention": layers * (h * (qkv + query) + qkv * qkv_bias + h * linear_bias),
        "mlp": layers * ((ways_in + 1) * h * f + (ways_in * f + h) * linear_bias),
        "norms": _norm_vectors(config) * norm_widths,
    }


def _norm_vectors(config: TransformerConfig) -> int:
    """Weight and bias, or weight."""
    return 2 if config.normalization == "LayerNorm" else 1


def _block_flops(config: TransformerConfig, causal: bool) -> int:
    """Of one token, forward, in all blocks."""
    h, f, s = config.hidden_size, config.ffn_width, config.seq_length
    query, qkv = _projection_sizes(config)
    linears = h * (qkv + query) + (3 if config.swiglu else 2) * h * f
    attention = 2 * query * s if causal else 4 * query * s
    return config.num_layers * (2 * linears + attention)


def _projection_sizes(config: TransformerConfig) -> tuple[int, int]:
    """(a d, (a + 2 g) d): rows of the query projection, and of query, key and value together."""
    query = config.num_attention_heads * config.head_dim
    return query, query + 2 * config.query_groups * config.head_dim


def _vocabulary(config: TransformerConfig) -> int:
    assert config.vocab_size is not None, "vocab_size is filled in from the tokenizer first"
    return config.vocab_size
