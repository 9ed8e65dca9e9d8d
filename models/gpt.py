"""GPT as pipeline stages: GPT-2's shape and Llama's, by configuration.

`build_stages` is what the recipe calls; `GPTStage` is a `Stack` with GPT's mask, and on the last
stage the output layer and the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from core.pipeline_parallel.stage import Batch, Loss
from core.process_grid import ProcessGrid
from core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from core.tensor_parallel.output_loss import vocab_parallel_linear_cross_entropy
from models.config import GPTConfig
from models.recompute import RecomputeConfig
from models.stack import Stack, build_stack


class GPTStage(Stack):
    """One chunk of a GPT.

    batch   tokens, labels [b, s] int64; loss_mask [b, s]; position_ids [b, s]; sample [b] int64;
            document_ids [b, s] where attention must not cross documents
    """

    def __init__(self, config: GPTConfig, grid: ProcessGrid, **place) -> None:
        super().__init__(
            config, grid, tied=not config.untie_embeddings_and_output_weights, **place
        )
        self.loss_mode = config.loss_mode
        self.label_smoothing, self.z_loss = config.label_smoothing, config.z_loss
        self.output = None
        if self.is_last:
            build = self.build
            self.output = ColumnParallelLinear(
                config.hidden_size,
                self.padded_size,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=self.tied,
                logical_output_size=config.vocab_size,
                sequence_parallel=build.sequence_parallel,
                tp_group=build.tp,
                dtype=build.dtype,
                device=build.device,
                name="output",
                seed=build.seed,
                init_std=config.init_method_std,
            )
            if not self.tied:
                table = self.output.weight
                table.shard = dataclasses.replace(table.shard, vocabulary=True)

    def mask(self, batch: Batch) -> Tensor | None:
        documents = batch.get("document_ids")
        return None if documents is None else causal_document_mask(documents)

    def logits(self, hidden: Tensor) -> Tensor:
        """[s or s/t, b, h] -> [s, b, v/t], padding columns at minus infinity."""
        weight = self.embedding.word.weight if self.tied else None
        logits, _ = self.output(hidden, weight=weight)
        return self.without_padding(logits)

    def compute(self, batch: Batch, activation: Tensor | None) -> Tensor | Loss:
        hidden = self.hidden(batch, activation)
        if not self.is_last:
            return hidden
        labels, weights = batch["labels"].t(), batch["loss_mask"].t()  # [s, b]
        make = self._unfused_loss if self.loss_mode == "unfused" else self._fused_loss
        with self.making_loss(hidden):
            loss = make(hidden, labels, weights)
        return Loss(loss, weights.sum())

    def _fused_loss(self, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Output layer and loss in one; the logits never exist."""
        weight = self.embedding.word.weight if self.tied else self.output.weight
        # what is reported of held-out text is the plain cross entropy
        smoothing, z_loss = (self.label_smoothing, self.z_loss) if self.training else (0.0, 0.0)
        may_wait = self.training and self.loss_mode in ("auto", "split")
        return vocab_parallel_linear_cross_entropy(
            hidden,
            weight,
            labels,
            weights=weights,
            label_smoothing=smoothing,
            z_loss=z_loss,
            sequence_parallel=self.sequence_parallel,
            vocab_size=self.vocab_size,
            reduction="sum",
            mode=self.loss_mode,
            grad_scale=self.upstream if self.training else 1.0,
            accumulate=self.gradient_sum(weight),
            defer=self.defer if may_wait else None,
            tp_group=self.tp,
        )

    def _unfused_loss(self, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """The same from logits in memory: the reference."""
        # Megatron's smoothing spreads over the other classes only: alpha = eps (V - 1) / V
        smoothing = self.label_smoothing if self.training else 0.0
        alpha = smoothing * (self.vocab_size - 1) / self.vocab_size
        losses = vocab_parallel_cross_entropy(
            self.logits(hidden), labels.contiguous(), alpha, self.tp, vocab_size=self.vocab_size
        )
        weights = weights.to(losses.dtype)
        # where, not a product: a masked token's loss may be infinite
        return torch.where(weights > 0, losses * weights, 0.0).sum()


def causal_document_mask(documents: Tensor) -> Tensor:
    """[b, s] document numbers -> [b, 1, s, s] bool: earlier tokens of the same document."""
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    return same.tril().unsqueeze(1)


def build_stages(
    config: GPTConfig,
    grid: ProcessGrid,
    *,
    micro_batch_size: int,
    sequence_parallel: bool,
    seed: int,
    dtype: torch.dtype = torch.float32,
    placement: Sequence[Sequence[int]] | None = None,
    recompute: RecomputeConfig | None = None,
) -> list[GPTStage]:
    """This rank's stages of a GPT; see `build_stack`."""
    return build_stack(
        GPTStage,
        config,
        grid,
        micro_batch_size=micro_batch_size,
        sequence_parallel=sequence_parallel,
        seed=seed,
        dtype=dtype,
        placement=placement,
        recompute=recompute,
    )
