"""Sizes of published models, and the cost of a token against counted matrix products."""

from dataclasses import replace

import pytest

from models.config import GPTConfig
from models.flops import flops_per_token, parameters

GPT2 = GPTConfig(
    num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024, vocab_size=50257
)
LLAMA = GPTConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    group_query_attention=True,
    num_query_groups=8,
    ffn_hidden_size=14336,
    seq_length=8192,
    vocab_size=128256,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)


@pytest.mark.parametrize(("config", "published"), [(GPT2, 124_439_808), (LLAMA, 8_030_261_248)])
def test_published_sizes(config, published):
    assert sum(parameters(config).values()) == published


def test_parts():
    assert parameters(GPT2) == {
        "word_embeddings": 50257 * 768,
        "position_embeddings": 1024 * 768,
        "attention": 12 * (4 * 768 * 768 + 4 * 768),
        "mlp": 12 * (8 * 768 * 768 + 5 * 768),
        "norms": 25 * 2 * 768,
        "output": 0,
    }


def test_biases_and_query_norms():
    tiny = GPTConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=3,
        seq_length=5,
        vocab_size=7,
        disable_bias_linear=True,
    )
    plain = parameters(tiny)
    extra = parameters(replace(tiny, add_qkv_bias=True, qk_layernorm=True))
    assert extra["attention"] - plain["attention"] == 2 * 36
    assert extra["norms"] - plain["norms"] == 2 * 2 * (2 * 4)


def test_llama_token():
    """Megatron-LM's formula, written out for Llama 3 8B at 8192."""
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 8192 / 2 * 2 + 4096 * 4096 + 3 * 4096 * 14336
    assert flops_per_token(LLAMA) == 3 * 2 * (32 * layer + 4096 * 128256)


def test_gpt2_token_is_six_times_the_matrices_and_the_attention():
    sizes = parameters(GPT2)
    biases = 12 * (4 * 768 + 5 * 768)
    matrices = sizes["attention"] + sizes["mlp"] - biases + sizes["word_embeddings"]
    assert flops_per_token(GPT2) == 6 * matrices + 12 * 6 * 768 * 1024
    assert flops_per_token(GPT2, causal=False) == 6 * matrices + 12 * 12 * 768 * 1024
