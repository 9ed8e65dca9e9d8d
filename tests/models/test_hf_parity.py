"""Logits, loss and every gradient equal transformers' GPT2LMHeadModel and LlamaForCausalLM.

Their model is tiny and random; its weights are copied into ours. The copying is written out head
by head here, on purpose apart from scripts/convert_hf.py: what fused query-key-value order, gate
order or tied tables mean is then said twice. huggingface/transformers#12004 and
Lightning-AI/litgpt#1013 are what a mistake looks like.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from core.data_parallel.ddp import DataParallel
from core.process_grid import ProcessGrid
from models.config import GPTConfig
from models.gpt import GPTStage, build_stages

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCAB, SEQ, BATCH, HIDDEN, FFN, LAYERS, HEADS = 61, 24, 3, 48, 80, 2, 6
HEAD_DIM = HIDDEN // HEADS
TOLERANCE = 1e-5  # of the largest value in a tensor

SHAPE = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "ffn_hidden_size": FFN,
    "seq_length": SEQ,
    "vocab_size": VOCAB,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


# ---- their models --------------------------------------------------------------------------------


def random_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter from a normal distribution, gains around 1: no bias is 0, no gain is 1."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, param in model.named_parameters():
            gain = param.dim() == 1 and name.endswith("weight")
            param.normal_(mean=float(gain), std=0.2)
    return model.eval()


def their_gpt2(tied: bool) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=SEQ,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=FFN,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    return random_weights(transformers.GPT2LMHeadModel(config))


def their_llama(tied: bool, groups: int, bias: bool, scaled: bool) -> torch.nn.Module:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if scaled:
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=groups,
        max_position_embeddings=131072,
        attention_bias=bias,
        mlp_bias=bias,
        rope_parameters=rope,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    return random_weights(transformers.LlamaForCausalLM(config))


# ---- their tensors under our names: weights and gradients alike ---------------------------------


def by_group(query: Tensor, key: Tensor, value: Tensor, groups: int) -> Tensor:
    """Rows of the three projections -> for every group its queries, its key, its value."""
    per_group = HEADS // groups
    rows = []
    for g in range(groups):
        for head in range(g * per_group, (g + 1) * per_group):
            rows.append(query[head * HEAD_DIM : (head + 1) * HEAD_DIM])
        for one in (key, value):
            rows.append(one[g * HEAD_DIM : (g + 1) * HEAD_DIM])
    return torch.cat(rows)


def from_gpt2(theirs: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    ours = {
        "embedding.word.weight": theirs["transformer.wte.weight"],
        "embedding.position.weight": theirs["transformer.wpe.weight"],
        "final_norm.weight": theirs["transformer.ln_f.weight"],
        "final_norm.bias": theirs["transformer.ln_f.bias"],
    }
    if not tied:
        ours["output.weight"] = theirs["lm_head.weight"]
    for n in range(LAYERS):
        for kind in ("weight", "bias"):  # their linears keep [in, out]

            def get(name: str, n: int = n, kind: str = kind) -> Tensor:
                tensor = theirs[f"transformer.h.{n}.{name}.{kind}"]
                return tensor.t() if tensor.dim() == 2 else tensor

            ours[f"layers.{n}.attention_norm.{kind}"] = get("ln_1")
            ours[f"layers.{n}.mlp_norm.{kind}"] = get("ln_2")
            ours[f"layers.{n}.attention.qkv.{kind}"] = by_group(
                *get("attn.c_attn").split(HIDDEN), HEADS
            )
            ours[f"layers.{n}.attention.out.{kind}"] = get("attn.c_proj")
            ours[f"layers.{n}.mlp.up.{kind}"] = get("mlp.c_fc")
            ours[f"layers.{n}.mlp.down.{kind}"] = get("mlp.c_proj")
    return ours


def from_llama(theirs: dict[str, Tensor], tied: bool, groups: int, bias: bool) -> dict[str, Tensor]:
    ours = {
        "embedding.word.weight": theirs["model.embed_tokens.weight"],
        "final_norm.weight": theirs["model.norm.weight"],
    }
    if not tied:
        ours["output.weight"] = theirs["lm_head.weight"]
    for n in range(LAYERS):
        block, mine = f"model.layers.{n}", f"layers.{n}"
        ours[f"{mine}.attention_norm.weight"] = theirs[f"{block}.input_layernorm.weight"]
        ours[f"{mine}.mlp_norm.weight"] = theirs[f"{block}.post_attention_layernorm.weight"]
        for kind in ("weight", "bias")[: 1 + bias]:
            q, k, v, o = (theirs[f"{block}.self_attn.{x}_proj.{kind}"] for x in "qkvo")
            mlp = [theirs[f"{block}.mlp.{x}_proj.{kind}"] for x in ("gate", "up", "down")]
            ours[f"{mine}.attention.qkv.{kind}"] = by_group(q, k, v, groups)
            ours[f"{mine}.attention.out.{kind}"] = o
            ours[f"{mine}.mlp.up.{kind}"] = torch.cat(mlp[:2])
            ours[f"{mine}.mlp.down.{kind}"] = mlp[2]
    return ours


# ---- both, on one batch --------------------------------------------------------------------------


@dataclass
class Outcome:
    """logits [b, s, v]; loss, a sum over kept tokens; gradients under our names."""

    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


def batch(positions: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": (torch.rand(BATCH, SEQ, generator=generator) < 0.7).float(),
        "position_ids": positions.expand(BATCH, SEQ),
        "sample": torch.arange(BATCH),
    }


def run_theirs(model: torch.nn.Module, data: dict[str, Tensor], rename) -> Outcome:
    logits = model(
        data["tokens"],
        attention_mask=torch.ones_like(data["tokens"]),
        position_ids=data["position_ids"],
        use_cache=False,
    ).logits
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), data["labels"], reduction="none"
    )
    loss = (losses * data["loss_mask"]).sum()
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return Outcome(logits.detach(), loss.detach(), rename(grads))


def our_stage(config: GPTConfig, weights: dict[str, Tensor]) -> GPTStage:
    (stage,) = build_stages(
        config, ProcessGrid.single(), micro_batch_size=BATCH, sequence_parallel=False, seed=1
    )
    params = dict(stage.named_parameters())
    assert params.keys() == weights.keys()
    with torch.no_grad():
        for name, param in params.items():
            rows = weights[name].shape[0]  # the rest of a word table is padding
            param.zero_()[:rows].copy_(weights[name])
    return stage


def run_ours(stage: GPTStage, data: dict[str, Tensor], shapes: dict[str, Tensor]) -> Outcome:
    grid = ProcessGrid.single()
    DataParallel([stage], grid.dp_cp, grid.tp, grid.embed)
    with torch.no_grad():
        logits = stage.logits(stage.hidden(data, None)).transpose(0, 1)
    loss = stage.forward_step(0, data, None).total
    stage.backward_step(0, None)
    grads = {}
    for name, param in stage.named_parameters():
        rows = shapes[name].shape[0]
        grads[name] = param.main_grad[:rows]
        assert not param.main_grad[rows:].any(), f"padding of {name} has a gradient"
    assert torch.isneginf(logits[..., VOCAB:]).all()
    return Outcome(logits[..., :VOCAB], loss, grads)


def compare(ours: Outcome, theirs: Outcome) -> None:
    assert_close(ours.logits, theirs.logits, "logits")
    assert_close(ours.loss, theirs.loss, "loss")
    for name, grad in theirs.grads.items():
        assert_close(ours.grads[name], grad, f"gradient of {name}")


def assert_close(ours: Tensor, theirs: Tensor, what: str) -> None:
    allowed = TOLERANCE * theirs.abs().max()
    error = (ours - theirs).abs().max()
    assert error <= allowed, f"{what}: off by {error:.2e}, allowed {allowed:.2e}"


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gpt2(tied):
    model = their_gpt2(tied)
    weights = from_gpt2(weights_of(model), tied)
    config = GPTConfig(**SHAPE, untie_embeddings_and_output_weights=not tied)
    data = batch(torch.arange(SEQ))
    ours = run_ours(our_stage(config, weights), data, weights)
    compare(ours, run_theirs(model, data, lambda grads: from_gpt2(grads, tied)))


@pytest.mark.parametrize(
    ("tied", "groups", "bias", "scaled"),
    [
        pytest.param(False, 6, False, False, id="llama2"),
        pytest.param(False, 2, False, False, id="grouped-queries"),
        pytest.param(True, 3, False, True, id="llama3-scaling-tied"),
        pytest.param(False, 1, True, True, id="one-group-biases"),
    ],
)
def test_llama(tied, groups, bias, scaled):
    model = their_llama(tied, groups, bias, scaled)
    weights = from_llama(weights_of(model), tied, groups, bias)
    config = GPTConfig(
        **SHAPE,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=not bias,
        group_query_attention=True,
        num_query_groups=groups,
        rotary_base=500000.0 if scaled else 10000.0,
        use_rope_scaling=scaled,
        untie_embeddings_and_output_weights=not tied,
    )
    # 5 apart: the slow frequencies, which the scaling changes, must be felt
    data = batch(torch.arange(0, 5 * SEQ, 5))
    ours = run_ours(our_stage(config, weights), data, weights)
    compare(ours, run_theirs(model, data, lambda grads: from_llama(grads, tied, groups, bias)))
