"""BERT as pipeline stages: an encoder that looks both ways, a language head and a binary head.

The language head runs on the masked positions only: their rows are picked before it, so that the
others cost no product. Sorted from simple to complex: `Dense`, the two heads, `BertStage`,
`build_stages`. Neighbours: models.stack (what GPT shares), data/bert.py (where batches come from).

Both losses are sums, so that no layout shows in them:

    loss = sum over masked tokens of ce + pair_weight * sum over samples of ce(second follows first)

It is divided by the number of masked tokens of the whole global batch. With pair_weight =
mask_prob s, about the masked tokens of a sample, the quotient is about mean + mean, which is what
Megatron adds (there per microbatch, so that the result depends on its size).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.pipeline_parallel.stage import Batch, Loss
from core.process_grid import ProcessGrid
from core.random import init_normal_
from core.shard import Shard
from core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from core.tensor_parallel.output_loss import vocab_parallel_linear_cross_entropy
from core.tensor_parallel.output_loss_memory import LossShape
from models.config import TOKEN_TYPES, BertConfig
from models.stack import Stack, build_stack
from models.transformer import Activation, Build, Norm, exact_gelu


class Dense(nn.Module):
    """A linear that every tp rank holds whole and applies to the same rows.

    x       [n, h]    the same on every rank
    weight  [m, h]    whole
    y       [n, m]    forward  x @ weight.T + bias
    dx, dw            whole and equal on every rank: nothing is added over tp
    """

    def __init__(self, columns: int, rows: int, build: Build, *, name: str, std: float) -> None:
        super().__init__()
        self.weight = build.replicated((rows, columns), 0.0)
        self.weight.shard = Shard((rows, columns))
        self.bias = build.replicated((rows,), 0.0)
        init_normal_(
            self.weight,
            seed=build.seed,
            name=f"{name}.weight",
            shard=self.weight.shard,
            std=std,
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class LanguageHead(nn.Module):
    """What masked rows go through before the word table: linear, GELU, norm.

    bias  [v/t]  of the output layer, cut as the word table is
    """

    def __init__(self, config: BertConfig, padded_size: int, build: Build) -> None:
        super().__init__()
        h = config.hidden_size
        self.dense = Dense(h, h, build, name="language_head.dense", std=config.init_method_std)
        self.norm = Norm(config.normalization, h, config.norm_epsilon, build)
        size = padded_size // build.tp.size
        self.bias = nn.Parameter(torch.zeros(size, dtype=build.dtype, device=build.device))
        padded = padded_size if padded_size != config.vocab_size else 0
        self.bias.shard = Shard((config.vocab_size,), dim=0, padded=padded, decay=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(exact_gelu(self.dense(rows), None))  # [n, h]


class BinaryHead(nn.Module):
    """Whether the second text follows the first, from a sample's first token: [b, h] -> [b, 2]."""

    def __init__(self, config: BertConfig, build: Build) -> None:
        super().__init__()
        h, std = config.hidden_size, config.init_method_std
        self.pooler = Dense(h, h, build, name="binary_head.pooler", std=std)
        self.classes = Dense(h, 2, build, name="binary_head.classes", std=std)

    def forward(self, first: Tensor) -> Tensor:
        return self.classes(torch.tanh(self.pooler(first)))


class BertStage(Stack):
    """One chunk of a BERT.

    batch   tokens, labels, token_types, padding_mask [b, s] int64 (1 on tokens, 0 on padding);
            loss_mask [b, s], 1 where the token is to be guessed; is_random [b] int64, 1 where the
            second text does not follow the first, -100 where the sample counts nowhere; sample
            [b] int64
    """

    reports = ("loss", "tokens", "lm", "sop", "samples")

    def __init__(self, config: BertConfig, grid: ProcessGrid, **place) -> None:
        super().__init__(
            config,
            grid,
            token_types=TOKEN_TYPES,
            norm_placement=config.norm_placement,
            causal=False,
            activation=Activation(exact_gelu),
            **place,
        )
        self.seq_length, self.loss_mode = config.seq_length, config.loss_mode
        self.pair_weight = config.pair_weight
        self.has_binary_head = config.binary_head
        self.language_head = self.binary_head = None
        if self.is_last:
            # the heads see whole rows on every rank, also under sequence parallelism
            build = dataclasses.replace(self.build, sequence_parallel=False)
            self.language_head = LanguageHead(config, self.padded_size, build)
            self.binary_head = BinaryHead(config, build) if config.binary_head else None

    def loss_shape(self, config: BertConfig, batch: int) -> LossShape:
        """The masked tokens alone, of which there may be a few more or less."""
        shape = super().loss_shape(config, batch)
        masked = math.ceil(config.mask_prob * shape.tokens)
        return dataclasses.replace(shape, tokens=masked, strips=1)

    @property
    def needs(self) -> set[str]:
        names = super().needs - {"position_ids"}
        if self.is_first:
            names.add("token_types")
        if self.layers:
            names.add("padding_mask")
        if self.is_last and self.has_binary_head:
            names.add("is_random")
        return names

    def mask(self, batch: Batch) -> Tensor | None:
        """[b, 1, 1, s] bool: no query looks at padding."""
        return batch["padding_mask"].bool()[:, None, None, :] if self.layers else None

    def hidden(self, batch: Batch, activation: Tensor | None) -> Tensor:
        """Through embedding, blocks and final norm, as far as this stage has them."""
        positions = torch.arange(self.seq_length, device=batch["sample"].device)
        positions = positions.expand(len(batch["sample"]), -1)  # [b, s]
        return super().hidden({**batch, "position_ids": positions}, activation)

    def compute(self, batch: Batch, activation: Tensor | None) -> Tensor | Loss:
        hidden = self.hidden(batch, activation)
        if not self.is_last:
            return hidden
        hidden = self.whole(hidden)
        lm = self._language_loss(hidden, batch)
        extra = {"lm": lm, "sop": torch.zeros_like(lm)}
        if self.binary_head is not None:
            logits = self.binary_head(hidden[0])
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            pairs = batch["is_random"]
            extra["sop"] = F.cross_entropy(logits, pairs, ignore_index=-100, reduction="sum")
        total = extra["lm"] + self.pair_weight * extra["sop"]
        sums = {name: value.detach() for name, value in extra.items()}
        count = torch.tensor(len(batch["sample"]), device=lm.device)
        sums["samples"] = count if self.binary_head is None else (pairs >= 0).sum()
        return Loss(total, batch["loss_mask"].sum(), sums)

    def whole(self, hidden: Tensor) -> Tensor:
        """[s or s/t, b, h] -> [s, b, h]. Every rank does the same with it, so its gradient is
        whole on each."""
        if not self.sequence_parallel:
            return hidden
        return gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=self.tp, tag="heads.hidden"
        )

    def _language_loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Sum over the masked positions, whose rows alone are worked on."""
        kept = batch["loss_mask"].t().reshape(-1)  # [s b]
        places = kept.nonzero().squeeze(1)  # [n]
        rows = hidden.reshape(len(kept), -1).index_select(0, places)
        rows = self.language_head(rows)
        labels = batch["labels"].t().reshape(-1)[places]
        with self.making_loss(rows):
            return self._loss_of(rows, labels, kept[places])

    def _loss_of(self, rows: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Sum over n tokens: rows [n, h], labels and weights [n]."""
        if self.loss_mode == "unfused":
            losses = vocab_parallel_cross_entropy(
                self.logits(rows), labels, 0.0, self.tp, vocab_size=self.vocab_size
            )
            return (losses * weights.to(losses.dtype)).sum()
        weight = self.embedding.word.weight
        may_wait = self.training and self.loss_mode in ("auto", "split")
        return vocab_parallel_linear_cross_entropy(
            rows,
            weight,
            labels,
            bias=self.language_head.bias,
            weights=weights,
            vocab_size=self.vocab_size,
            reduction="sum",
            mode=self.loss_mode,
            grad_scale=self.upstream if self.training else 1.0,
            accumulate=self.gradient_sum(weight),
            defer=self.defer if may_wait else None,
            tp_group=self.tp,
        )

    def logits(self, rows: Tensor) -> Tensor:
        """[n, h] behind the language head -> [n, v/t], padding columns at minus infinity."""
        rows = copy_to_tensor_model_parallel_region(rows, self.tp, tag="output")
        logits = F.linear(rows, self.embedding.word.weight, self.language_head.bias)
        return self.without_padding(logits)

    def report(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Means of the two losses over masked tokens and over samples; tokens worked on, padding
        included, and how many of them were to be guessed."""
        masked, samples = sums["tokens"], sums["samples"]
        found = {"lm_loss": sums["lm"] / masked if masked else 0.0}
        if self.has_binary_head:
            found["sop_loss"] = sums["sop"] / samples if samples else 0.0
        return {**found, "tokens": int(samples) * self.seq_length, "masked_tokens": int(masked)}


build_stages = functools.partial(build_stack, BertStage)  # (config, grid, …) -> my stages
