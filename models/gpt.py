"""GPT as pipeline stages: GPT-2's shape and Llama's, by configuration.

`build_stages` is what the recipe calls; `GPTStage` is one chunk: embedding on the first, final
norm, output layer and loss on the last, blocks on all. Parameter names are global
("layers.3.mlp.up.weight" wherever layer 3 lives): a checkpoint does not depend on the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from core.pipeline_parallel.stage import Batch, Loss, Stage, WireSpec
from core.process_grid import ProcessGrid
from core.random import DropoutKeys
from core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from core.tensor_parallel.output_loss import vocab_parallel_linear_cross_entropy
from models.config import GPTConfig
from models.embedding import Embedding
from models.transformer import Block, Build, Context, Norm, rotary_of


class GPTStage(Stage):
    """Layers `layers` of a GPT, with what comes before the first and after the last.

    batch   tokens, labels [b, s] int64; loss_mask [b, s]; position_ids [b, s]; sample [b] int64;
            document_ids [b, s] where attention must not cross documents. A stage looks only at
            what `needs` names
    """

    def __init__(
        self,
        config: GPTConfig,
        grid: ProcessGrid,
        *,
        index: int,
        count: int,
        layers: Sequence[int],
        micro_batch_size: int,
        sequence_parallel: bool,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        tp = grid.tp
        sequence_parallel = sequence_parallel and tp.size > 1
        rows = config.seq_length // (tp.size if sequence_parallel else 1)
        shape = (rows, micro_batch_size, config.hidden_size)
        super().__init__(index, count, WireSpec(shape, dtype, grid.device))
        build = Build(tp, dtype, grid.device, seed, sequence_parallel)
        self.tp, self.seed, self.sequence_parallel = tp, seed, sequence_parallel
        self.vocab_size = config.vocab_size
        self.padded_size = config.padded_vocab_size(tp.size)
        self.dropping = config.hidden_dropout > 0 or config.attention_dropout > 0
        self.tied = not config.untie_embeddings_and_output_weights
        self.loss_mode = config.loss_mode
        self.label_smoothing, self.z_loss = config.label_smoothing, config.z_loss

        def embedding() -> Embedding:
            learned = config.position_embedding_type == "learned_absolute"
            return Embedding(
                build,
                vocab_size=config.vocab_size,
                padded_size=self.padded_size,
                hidden_size=config.hidden_size,
                std=config.init_method_std,
                dropout=config.hidden_dropout,
                max_positions=config.max_positions if learned and self.is_first else 0,
            )

        # a tied last stage of several holds its own copy of the word table, under the same name
        needs_table = self.is_first or (self.is_last and self.tied)
        self.embedding = embedding() if needs_table else None
        if needs_table and self.tied and count > 1:
            table = self.embedding.word.weight
            table.shard = dataclasses.replace(table.shard, sum_over=("embed",))
        self.rotary = rotary_of(config)
        self.layers = nn.ModuleDict(
            {str(n): Block(config, n, build, rotary=self.rotary) for n in layers}
        )
        self.final_norm = self.output = None
        if self.is_last:
            self.final_norm = Norm(
                config.normalization, config.hidden_size, config.norm_epsilon, build
            )
            self.output = ColumnParallelLinear(
                config.hidden_size,
                self.padded_size,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=self.tied,
                logical_output_size=config.vocab_size,
                sequence_parallel=sequence_parallel,
                tp_group=tp,
                dtype=dtype,
                device=grid.device,
                name="output",
                seed=seed,
                init_std=config.init_method_std,
            )

    @property
    def needs(self) -> set[str]:
        """Names of the arrays of a batch that this stage looks at, document_ids apart."""
        names = {"sample"}
        if self.is_first:
            names |= {"tokens", "position_ids"}
        if self.rotary is not None and self.layers:
            names.add("position_ids")
        if self.is_last:
            names |= {"labels", "loss_mask"}
        return names

    # -- forward -----------------------------------------------------------------------------------

    def context(self, batch: Batch) -> Context:
        """Masks, positions and dropout keys of one microbatch, the same on every stage."""
        documents = batch.get("document_ids")
        mask = None if documents is None else causal_document_mask(documents)
        rotary = None
        if self.rotary is not None and self.layers:
            rotary = self.rotary.tables(batch["position_ids"].t(), self.wire.dtype)
        keys = None
        if self.training and self.dropping:
            keys = DropoutKeys(self.seed, batch["sample"])
        rows = self.wire.shape[0]
        first = self.tp.rank * rows if self.sequence_parallel else 0
        return Context(rotary, mask, keys, first)

    def hidden(self, batch: Batch, activation: Tensor | None) -> Tensor:
        """Through embedding (first stage), blocks and final norm (last stage): [s or s/t, b, h]."""
        context = self.context(batch)
        x = activation
        if self.is_first:
            x = self.embedding(batch["tokens"], batch["position_ids"], context)
        for block in self.layers.values():
            x = block(x, context)
        return self.final_norm(x) if self.is_last else x

    def logits(self, hidden: Tensor) -> Tensor:
        """[s or s/t, b, h] -> [s, b, v/t], padding columns at minus infinity."""
        weight = self.embedding.word.weight if self.tied else None
        logits, _ = self.output(hidden, weight=weight)
        per_rank = self.padded_size // self.tp.size
        real = min(max(self.vocab_size - self.tp.rank * per_rank, 0), per_rank)
        if real < per_rank:
            padding = torch.arange(per_rank, device=logits.device) >= real
            logits = logits.masked_fill(padding, -torch.inf)
        return logits

    def compute(self, batch: Batch, activation: Tensor | None) -> Tensor | Loss:
        hidden = self.hidden(batch, activation)
        if not self.is_last:
            return hidden
        labels, weights = batch["labels"].t(), batch["loss_mask"].t()  # [s, b]
        make = self._unfused_loss if self.loss_mode == "unfused" else self._fused_loss
        return Loss(make(hidden, labels, weights), weights.sum())

    def _fused_loss(self, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Output layer and loss in one; the logits never exist."""
        weight = self.embedding.word.weight if self.tied else self.output.weight
        may_wait = self.training and self.loss_mode in ("auto", "split")
        return vocab_parallel_linear_cross_entropy(
            hidden,
            weight,
            labels,
            weights=weights,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            sequence_parallel=self.sequence_parallel,
            vocab_size=self.vocab_size,
            reduction="sum",
            mode=self.loss_mode,
            accumulate=getattr(weight, "main_grad", None) if self.training else None,
            defer=self.defer if may_wait else None,
            tp_group=self.tp,
        )

    def _unfused_loss(self, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """The same from logits in memory: the reference."""
        # Megatron's smoothing spreads over the other classes only: alpha = eps (V - 1) / V
        alpha = self.label_smoothing * (self.vocab_size - 1) / self.vocab_size
        losses = vocab_parallel_cross_entropy(
            self.logits(hidden), labels.contiguous(), alpha, tp_group=self.tp
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
) -> list[GPTStage]:
    """This rank's stages, in order.

    placement: the layers of every stage of the whole model; stage c p + r lives on pipeline rank r.
    The layers built are checked against the layers asked for.
    """
    if placement is None:
        placement = [range(config.num_layers)]
    placed = [n for layers in placement for n in layers]
    if placed != list(range(config.num_layers)):
        raise ValueError(
            f"the stages hold layers {placed}; a model of --num-layers {config.num_layers} needs "
            f"each of 0 to {config.num_layers - 1} once, in order"
        )
    return [
        GPTStage(
            config,
            grid,
            index=index,
            count=len(placement),
            layers=placement[index],
            micro_batch_size=micro_batch_size,
            sequence_parallel=sequence_parallel,
            seed=seed,
            dtype=dtype,
        )
        for index in range(grid.pp.rank, len(placement), grid.pp.size)
    ]
