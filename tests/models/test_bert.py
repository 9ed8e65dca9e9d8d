"""BERT against transformers' BertForPreTraining, and what its heads cost and share.

Their model is tiny and random; its weights are copied into ours. Logits of both heads, the loss and
every gradient agree.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.comm import Group
from core.data_parallel.ddp import DataParallel
from core.grid import RankGrid
from core.process_grid import ProcessGrid
from core.shard import Shard, shard_of
from models.bert import BertStage, build_stages
from models.config import BertConfig
from tests.models.test_hf_parity import (
    BATCH,
    FFN,
    HEADS,
    HIDDEN,
    LAYERS,
    SEQ,
    SHAPE,
    VOCAB,
    assert_close,
    by_group,
    random_weights,
    weights_of,
)

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
CONFIG = BertConfig(**SHAPE)
LENGTHS = (SEQ, 17, 9)  # of the samples, without padding


def batch() -> dict[str, Tensor]:
    """Three samples of two texts, two of them padded; about a third of the tokens masked."""
    generator = torch.Generator().manual_seed(3)
    real = torch.arange(SEQ) < torch.tensor(LENGTHS)[:, None]
    second = torch.arange(SEQ) >= torch.tensor([11, 8, 4])[:, None]
    masked = (torch.rand(BATCH, SEQ, generator=generator) < 0.3) & real
    return {
        "tokens": torch.randint(VOCAB, (BATCH, SEQ), generator=generator),
        "labels": torch.randint(VOCAB, (BATCH, SEQ), generator=generator) * masked,
        "loss_mask": masked.float(),
        "padding_mask": real.long(),
        "token_types": (second & real).long(),
        "is_random": torch.tensor([1, 0, 1]),
        "sample": torch.arange(BATCH),
    }


def their_model() -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FFN,
        max_position_embeddings=SEQ,
        layer_norm_eps=CONFIG.norm_epsilon,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    return random_weights(transformers.BertForPreTraining(config))


def renamed(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors, weights or gradients, under our names."""
    ours = {"language_head.bias": theirs["cls.predictions.bias"]}
    for name in ("word", "position", "token_type"):
        ours[f"embedding.{name}.weight"] = theirs[f"bert.embeddings.{name}_embeddings.weight"]
    for kind in ("weight", "bias"):
        for name, source in {
            "embedding.norm": "bert.embeddings.LayerNorm",
            "language_head.dense": "cls.predictions.transform.dense",
            "language_head.norm": "cls.predictions.transform.LayerNorm",
            "binary_head.pooler": "bert.pooler.dense",
            "binary_head.classes": "cls.seq_relationship",
        }.items():
            ours[f"{name}.{kind}"] = theirs[f"{source}.{kind}"]
        for n in range(LAYERS):
            block = f"bert.encoder.layer.{n}"
            three = [f"{block}.attention.self.{x}.{kind}" for x in ("query", "key", "value")]
            qkv = by_group(*(theirs[name] for name in three), HEADS)
            ours[f"layers.{n}.attention.qkv.{kind}"] = qkv
            for name, source in {
                "attention.out": "attention.output.dense",
                "attention_norm": "attention.output.LayerNorm",
                "mlp.up": "intermediate.dense",
                "mlp.down": "output.dense",
                "mlp_norm": "output.LayerNorm",
            }.items():
                ours[f"layers.{n}.{name}.{kind}"] = theirs[f"{block}.{source}.{kind}"]
    return ours


def stage_of(config: BertConfig) -> BertStage:
    grid = ProcessGrid.single()
    (stage,) = build_stages(
        config, grid, micro_batch_size=BATCH, sequence_parallel=False, seed=1
    )
    DataParallel([stage], grid.dp_cp, grid.tp, grid.embed)
    return stage


def gradients(stage: BertStage, data: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, its gradients by parameter)"""
    loss = stage.forward_step(0, data, None).total
    stage.backward_step(0, None)
    return loss, {name: param.main_grad.clone() for name, param in stage.named_parameters()}


@pytest.mark.parametrize("mode", ["auto", "one-shot", "split", "unfused"])
def test_equals_transformers(mode):
    model, data = their_model(), batch()
    weights = renamed(weights_of(model))
    stage = stage_of(replace(CONFIG, loss_mode=mode))
    params = dict(stage.named_parameters())
    assert params.keys() == weights.keys()
    with torch.no_grad():
        for name, param in params.items():
            param.zero_()[: weights[name].shape[0]].copy_(weights[name])

    out = model(data["tokens"], data["padding_mask"], data["token_types"])
    masked = data["loss_mask"] > 0
    labels = data["labels"].masked_fill(~masked, -100)
    lm = F.cross_entropy(out.prediction_logits.transpose(1, 2), labels, reduction="sum")
    sop = F.cross_entropy(out.seq_relationship_logits, data["is_random"], reduction="sum")
    theirs = lm + stage.pair_weight * sop
    theirs.backward()
    assert stage.pair_weight == pytest.approx(0.15 * SEQ)

    with torch.no_grad():
        hidden = stage.hidden(data, None)
        rows = stage.language_head(hidden.transpose(0, 1)[masked])
        assert_close(stage.logits(rows)[:, :VOCAB], out.prediction_logits[masked], "tokens")
        assert_close(stage.binary_head(hidden[0]), out.seq_relationship_logits, "pairs")
    loss, ours = gradients(stage, data)
    assert_close(loss, theirs.detach(), "loss")
    wanted = renamed({name: param.grad for name, param in model.named_parameters()})
    for name, grad in wanted.items():
        assert_close(ours[name][: len(grad)], grad, f"gradient of {name}")
        assert not ours[name][len(grad) :].any(), f"padding of {name} has a gradient"


def test_sums_of_both_losses():
    stage, data = stage_of(CONFIG), batch()
    out = stage.eval().forward_step(0, data, None)
    masked, samples = data["loss_mask"].sum(), BATCH
    assert (out.tokens, out.extra["samples"]) == (masked, samples)
    assert_close(out.total, out.extra["lm"] + stage.pair_weight * out.extra["sop"], "loss")
    sums = {"loss": out.total, "tokens": out.tokens, **out.extra}
    found = stage.report({name: float(value) for name, value in sums.items()})
    assert found["lm_loss"] == pytest.approx(float(out.extra["lm"] / masked))
    assert found["sop_loss"] == pytest.approx(float(out.extra["sop"] / samples))
    assert (found["tokens"], found["masked_tokens"]) == (BATCH * SEQ, int(masked))


def test_only_masked_rows_are_multiplied():
    """The head's products have as many rows as there are masked tokens."""
    stage, data = stage_of(CONFIG), batch()
    rows = []
    stage.language_head.dense.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    stage.eval().forward_step(0, data, None)
    assert rows == [int(data["loss_mask"].sum())]


def test_what_is_not_masked_does_not_matter():
    """Labels elsewhere, and whatever stands under padding."""
    stage, data = stage_of(CONFIG), batch()
    loss, grads = gradients(stage, data)
    other = dict(data)
    padding = data["padding_mask"] == 0
    other["tokens"] = data["tokens"].masked_fill(padding, 5)
    other["labels"] = data["labels"].masked_fill(data["loss_mask"] == 0, 7)
    again = stage_of(CONFIG)
    same, others = gradients(again, other)
    assert torch.equal(loss, same)
    for name, grad in grads.items():
        torch.testing.assert_close(others[name], grad, rtol=0, atol=1e-6, msg=name)


def test_a_batch_without_a_masked_token():
    """No rows for the language head: its loss is 0, the binary head still learns."""
    stage, data = stage_of(CONFIG), batch()
    data["loss_mask"] = torch.zeros_like(data["loss_mask"])
    _, grads = gradients(stage, data)
    assert not grads["language_head.dense.weight"].any()
    assert grads["binary_head.pooler.weight"].any()
    stage.eval()
    out = stage.forward_step(1, data, None)
    assert (out.extra["lm"], out.tokens) == (0, 0)
    assert stage.report({"tokens": 0, "lm": 0.0, "sop": 1.0, "samples": 3})["lm_loss"] == 0


def test_without_the_binary_head():
    stage, data = stage_of(replace(CONFIG, bert_no_binary_head=True)), batch()
    del data["is_random"]
    assert stage.needs == {"tokens", "labels", "loss_mask", "padding_mask", "token_types", "sample"}
    out = stage.forward_step(0, data, None)
    assert torch.equal(out.total, out.extra["lm"])
    assert "sop_loss" not in stage.report({"tokens": 1, "lm": 2.0, "sop": 0.0, "samples": 3})
    assert not [name for name, _ in stage.named_parameters() if name.startswith("binary_head")]


def test_where_the_norms_stand():
    names = {name for name, _ in stage_of(CONFIG).named_parameters()}
    other = {
        name for name, _ in stage_of(replace(CONFIG, norm_placement="pre")).named_parameters()
    }
    assert names - other == {"embedding.norm.weight", "embedding.norm.bias"}
    assert other - names == {"final_norm.weight", "final_norm.bias"}


# ---- over tensor-parallel ranks ------------------------------------------------------------------


def head_gradients(world: Group, sequence_parallel: bool) -> dict[str, tuple[Shard, Tensor]]:
    """Shard and gradient of the heads' parameters, after the sums over tp."""
    grid = ProcessGrid.build(RankGrid.fit(world.size, tp=world.size), world)
    config = replace(CONFIG, make_vocab_size_divisible_by=8, fp64=True)
    (stage,) = build_stages(
        config,
        grid,
        micro_batch_size=BATCH,
        sequence_parallel=sequence_parallel,
        seed=1,
        dtype=torch.float64,
    )
    replicas = DataParallel([stage], grid.dp_cp, grid.tp, grid.embed)
    stage.forward_step(0, batch(), None)
    stage.backward_step(0, None)
    replicas.sum_gradients()
    return {
        name: (shard_of(param), param.main_grad.clone())
        for name, param in stage.named_parameters()
        if "head" in name or name.startswith("embedding")
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_replicated_gradients_agree_on_all_ranks(ranks, sequence_parallel):
    """C004 (NVIDIA/Megatron-LM#1446): bit for bit, and equal to those of one rank."""
    one = head_gradients(Group.single("world"), False)
    both = ranks.run(head_gradients, sequence_parallel, size=2)
    for name, (shard, grad) in one.items():
        mine, yours = (run[name][1] for run in both)
        if shard.dim is None:
            assert torch.equal(mine, yours), name
        else:
            mine = torch.cat([mine, yours])[: len(grad)]
        torch.testing.assert_close(mine, grad, rtol=1e-10, atol=1e-12, msg=name)
