"""GPT against a second one, written plainly below, in float64: the loss and every gradient, for
every option of the shape; and what must not matter to it: padding, company in a batch, the path
that attention takes.

What transformers has too is compared with it in test_hf_parity.py.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core.data_parallel.ddp import DataParallel
from core.process_grid import ProcessGrid
from core.shard import shard_of
from models.config import GPTConfig
from models.flops import parameters
from models.gpt import GPTStage, build_stages

GPT2 = GPTConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    ffn_hidden_size=40,
    seq_length=12,
    vocab_size=29,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    fp64=True,
)
ROPE = replace(GPT2, position_embedding_type="rope", kv_channels=8)
LLAMA = replace(
    ROPE,
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    group_query_attention=True,
    num_query_groups=2,
    untie_embeddings_and_output_weights=True,
)
SHAPES = {
    "gpt2": GPT2,
    "untied": replace(GPT2, untie_embeddings_and_output_weights=True),
    "no-positions": replace(GPT2, position_embedding_type="none"),
    "squared-relu": replace(GPT2, squared_relu=True),
    "qk-layernorm": replace(GPT2, qk_layernorm=True),
    "wide-heads": replace(GPT2, kv_channels=10),
    "groups": replace(GPT2, group_query_attention=True, num_query_groups=2),
    "one-group": replace(GPT2, group_query_attention=True),
    "rope": ROPE,
    "rope-base": replace(ROPE, rotary_base=50.0),
    "rope-half": replace(ROPE, rotary_percent=0.5),
    "rope-interleaved": replace(ROPE, rotary_interleaved=True),
    "rope-interleaved-half": replace(ROPE, rotary_interleaved=True, rotary_percent=0.5),
    "rope-slower": replace(ROPE, rotary_seq_len_interpolation_factor=4.0),
    "llama": LLAMA,
    "llama-qk-norm": replace(LLAMA, qk_layernorm=True, norm_epsilon=1e-2),
    "llama-qkv-bias": replace(LLAMA, add_qkv_bias=True),
    "smoothed": replace(GPT2, label_smoothing=0.2),
    "z-loss": replace(GPT2, z_loss=0.1),
    "one-shot": replace(GPT2, loss_mode="one-shot", label_smoothing=0.2, z_loss=0.1),
    "split": replace(GPT2, loss_mode="split", label_smoothing=0.2, z_loss=0.1),
    "unfused": replace(GPT2, loss_mode="unfused", label_smoothing=0.2),
}
BATCH = 3


def built(config: GPTConfig) -> GPTStage:
    """With every parameter random: no bias is 0, no gain is 1."""
    dtype = torch.float64 if config.fp64 else torch.float32
    (stage,) = build_stages(
        config,
        ProcessGrid.single(),
        micro_batch_size=BATCH,
        sequence_parallel=False,
        seed=3,
        dtype=dtype,
    )
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, param in stage.named_parameters():
            rows = shard_of(param).shape[0] if "word" in name or "output" in name else len(param)
            noise = torch.randn(param[:rows].shape, generator=generator, dtype=torch.float64)
            param[:rows] += 0.2 * noise.to(dtype)
    grid = ProcessGrid.single()
    DataParallel([stage], grid.dp_cp, grid.tp, grid.embed)
    return stage


def batch(config: GPTConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(config.vocab_size, (BATCH, config.seq_length + 1), generator=generator)
    positions = torch.arange(config.seq_length)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": (torch.rand(BATCH, config.seq_length, generator=generator) < 0.7).float(),
        "position_ids": torch.stack([positions, positions.flip(0), positions // 2]),
        "sample": torch.arange(BATCH),
    }


# ---- the second one ------------------------------------------------------------------------------


class Plain:
    """A GPT on one sequence at a time, one head at a time. w: logical parameters by name."""

    def __init__(self, config: GPTConfig, w: dict[str, Tensor]) -> None:
        self.c, self.w = config, w

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.w[f"{name}.weight"].flatten(0, -2).T
        return y + self.w[f"{name}.bias"].flatten() if f"{name}.bias" in self.w else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        gain, eps = self.w[f"{name}.weight"], self.c.norm_epsilon
        if self.c.normalization == "RMSNorm":
            return gain * x / ((x**2).mean(-1, keepdim=True) + eps).sqrt()
        x = x - x.mean(-1, keepdim=True)
        return gain * x / ((x**2).mean(-1, keepdim=True) + eps).sqrt() + self.w[f"{name}.bias"]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [s, d]: channel pairs as complex numbers, turned by position x frequency."""
        c = self.c
        if c.position_embedding_type != "rope":
            return x
        n = round(c.head_dim * c.rotary_percent) // 2
        pairs = [(2 * i, 2 * i + 1) if c.rotary_interleaved else (i, i + n) for i in range(n)]
        out = [x[:, j] for j in range(x.shape[1])]
        for i, (a, b) in enumerate(pairs):
            slower = c.rotary_seq_len_interpolation_factor or 1.0
            angle = positions.double() / slower * c.rotary_base ** (-i / n)
            out[a] = x[:, a] * angle.cos() - x[:, b] * angle.sin()
            out[b] = x[:, a] * angle.sin() + x[:, b] * angle.cos()
        return torch.stack(out, dim=1)

    def attention(self, x: Tensor, name: str, positions: Tensor) -> Tensor:
        c, s, d = self.c, len(x), self.c.head_dim
        share = c.num_attention_heads // c.query_groups
        heads = []
        for rows in self.linear(x, f"{name}.qkv").split((share + 2) * d, dim=1):
            *queries, key, value = rows.split(d, dim=1)
            if c.qk_layernorm:
                queries = [self.norm(q, f"{name}.query_norm") for q in queries]
                key = self.norm(key, f"{name}.key_norm")
            key = self.rotate(key, positions)
            for query in queries:
                scores = self.rotate(query, positions) @ key.T / math.sqrt(d)
                future = torch.ones(s, s, dtype=torch.bool).triu(1)
                heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value)
        return self.linear(torch.cat(heads, dim=1), f"{name}.out")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        y = self.linear(x, f"{name}.up")
        if self.c.swiglu:
            gate, up = y.chunk(2, dim=1)
            y = gate / (1 + (-gate).exp()) * up
        elif self.c.squared_relu:
            y = y.clamp(min=0) ** 2
        else:
            y = y / 2 * (1 + (math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)).tanh())
        return self.linear(y, f"{name}.down")

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        table = self.w["embedding.word.weight"]
        x = table[tokens]
        if self.c.position_embedding_type == "learned_absolute":
            x = x + self.w["embedding.position.weight"][positions]
        for n in range(self.c.num_layers):
            block = f"layers.{n}"
            y = self.norm(x, f"{block}.attention_norm")
            x = x + self.attention(y, f"{block}.attention", positions)
            x = x + self.mlp(self.norm(x, f"{block}.mlp_norm"), f"{block}.mlp")
        return self.norm(x, "final_norm") @ self.w.get("output.weight", table).T

    def loss(self, data: dict[str, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i in range(BATCH):
            z = self.logits(data["tokens"][i], data["position_ids"][i])
            smoothing = self.c.label_smoothing
            losses = F.cross_entropy(
                z, data["labels"][i], reduction="none", label_smoothing=smoothing
            )
            losses = losses + self.c.z_loss * z.logsumexp(-1) ** 2
            total = total + (losses * data["loss_mask"][i]).sum()
        return total


def logical(stage: GPTStage) -> dict[str, Tensor]:
    """The parameters in their logical shapes, without padding, as new leaves."""
    out = {}
    for name, param in stage.named_parameters():
        shape = shard_of(param).shape
        value = param.detach().view(-1, *shape[1:])[: shape[0]]
        out[name] = value.clone().requires_grad_()
    return out


@pytest.mark.parametrize("name", SHAPES)
def test_loss_and_gradients_equal_the_plain_model(name):
    config = SHAPES[name]
    stage, data = built(config), batch(config)
    weights = logical(stage)
    expected = Plain(config, weights).loss(data)
    expected.backward()
    loss = stage.forward_step(0, data, None)
    stage.backward_step(0, None)
    torch.testing.assert_close(loss.total, expected.detach(), rtol=1e-12, atol=0)
    assert float(loss.tokens) == float(data["loss_mask"].sum())
    for name, param in stage.named_parameters():
        grad, wanted = param.main_grad.view(-1, *weights[name].shape[1:]), weights[name].grad
        error = (grad[: len(wanted)] - wanted).abs().max()
        assert error <= 1e-11 * wanted.abs().max() + 1e-14, name
        assert not grad[len(wanted) :].any(), f"padding of {name}"


# ---- size and initial values ---------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_the_model_built_has_the_parameters_asked_for(name):
    sizes = [math.prod(shard_of(p).shape) for p in built(SHAPES[name]).parameters()]
    assert sum(sizes) == sum(parameters(SHAPES[name]).values())


def test_matrices_into_the_residual_stream_start_smaller():
    config = replace(GPT2, num_layers=8, hidden_size=64, ffn_hidden_size=256)
    (stage,) = build_stages(
        config, ProcessGrid.single(), micro_batch_size=1, sequence_parallel=False, seed=1
    )
    spread = {name: float(param.detach().std()) for name, param in stage.named_parameters()}
    for n in range(8):
        for matrix in ("attention.qkv", "mlp.up"):
            assert spread[f"layers.{n}.{matrix}.weight"] == pytest.approx(0.02, rel=0.05)
        for matrix in ("attention.out", "mlp.down"):
            assert spread[f"layers.{n}.{matrix}.weight"] == pytest.approx(0.02 / 4, rel=0.05)


@pytest.mark.parametrize(
    "placement", [[[0]], [[0, 1], [1]], [[1, 0]], [[0, 1, 2]], []], ids=str
)
def test_layers_are_each_built_once_or_not_at_all(placement):
    """A model with other layers than asked for is refused, never built."""
    with pytest.raises(ValueError, match="--num-layers 2"):
        build_stages(
            GPT2,
            ProcessGrid.single(),
            placement=placement,
            micro_batch_size=1,
            sequence_parallel=False,
            seed=1,
        )


# ---- what must not matter ------------------------------------------------------------------------


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["tied", "untied"])
def test_padding_of_the_vocabulary_does_not_matter(config):
    results = []
    for multiple in (1, 128):
        stage = built(replace(config, make_vocab_size_divisible_by=multiple))
        loss = stage.forward_step(0, batch(config), None)
        stage.backward_step(0, None)
        word = stage.embedding.word.weight.main_grad
        results.append((loss.total, word[:29].clone(), word[29:].abs().sum()))
        with torch.no_grad():
            logits = stage.logits(stage.hidden(batch(config), None))
        assert torch.isneginf(logits[..., 29:]).all() and logits[..., :29].isfinite().all()
    (loss, grad, _), (padded_loss, padded_grad, in_padding) = results
    torch.testing.assert_close(padded_loss, loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(padded_grad, grad, rtol=1e-12, atol=1e-13)
    assert in_padding == 0


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_later_tokens_do_not_matter(config):
    stage, data = built(config).eval(), batch(config)
    with torch.no_grad():
        before = stage.hidden(data, None)
        data["tokens"] = data["tokens"].clone()
        data["tokens"][:, 7] += 1
        data["tokens"] %= config.vocab_size
        after = stage.hidden(data, None)
    assert torch.equal(before[:7], after[:7])
    assert (before[7:] != after[7:]).any(dim=-1).all()


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_packed_documents_do_not_matter_to_each_other(config):
    """With positions and attention reset at document ends, each is as if it were alone."""
    stage, data = built(config).eval(), batch(config)
    lengths = (5, 3, 4)
    starts = [0, 5, 8]
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    data["document_ids"] = ids.expand(BATCH, -1)
    data["position_ids"] = positions.expand(BATCH, -1)
    with torch.no_grad():
        packed = stage.hidden(data, None)
        for start, length in zip(starts, lengths, strict=True):
            alone = {
                "tokens": data["tokens"][:, start : start + length],
                "position_ids": torch.arange(length).expand(BATCH, -1),
            }
            torch.testing.assert_close(
                packed[start : start + length], stage.hidden(alone, None), rtol=1e-11, atol=1e-12
            )


def test_the_path_of_attention_does_not_matter():
    """Explicit, as dropout needs it, and torch's: equal when hardly anything is dropped."""
    hidden = []
    for dropout in (1e-13, 0.0):
        stage = built(replace(LLAMA, attention_dropout=dropout))
        with torch.no_grad():
            hidden.append(stage.hidden(batch(LLAMA), None))
    torch.testing.assert_close(hidden[0], hidden[1], rtol=1e-11, atol=1e-11)


def test_company_in_a_batch_does_not_matter_to_dropout():
    """Masks belong to samples: another order of the same samples gives the same rows."""
    config = replace(GPT2, attention_dropout=0.3, hidden_dropout=0.3)
    stage, data = built(config), batch(config)
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        rows = stage.hidden(data, None)
        moved = stage.hidden({key: value[order] for key, value in data.items()}, None)
        other = stage.hidden({**data, "sample": data["sample"] + 1}, None)
        plain = stage.eval().hidden(data, None)
    torch.testing.assert_close(moved, rows[:, order], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(other, rows) and not torch.allclose(plain, rows)


class NothingShorter(TorchDispatchMode):
    """Fails on a floating-point result of fewer than 64 bits."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                assert tensor.dtype == torch.float64, f"{func} made {tensor.dtype}"
        return out


@pytest.mark.parametrize("name", ["gpt2", "llama-qk-norm", "unfused", "rope-half"])
def test_under_fp64_nothing_is_computed_in_less(name):
    config = replace(SHAPES[name], attention_dropout=0.1, hidden_dropout=0.1)
    stage, data = built(config), batch(config)
    data["loss_mask"] = data["loss_mask"].double()
    with NothingShorter():
        stage.forward_step(0, data, None)
        stage.backward_step(0, None)


def test_printing_a_model_explains_it():
    text = str(built(LLAMA))
    for part in ("attention_norm", "RMSNorm(24", "qkv", "embedding", "output"):
        assert part in text
