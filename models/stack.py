"""`Stack`: embedding, blocks and final norm as one pipeline stage; what GPT and BERT share.

models.gpt and models.bert derive from it and add an output layer and a loss on the last stage.
Parameter names are global ("layers.3.mlp.up.weight" wherever layer 3 lives): a checkpoint does not
depend on the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from core.pipeline_parallel.stage import Batch, Stage, WireSpec
from core.process_grid import ProcessGrid
from core.random import DropoutKeys
from core.tensor_parallel import checkpoint
from core.tensor_parallel.output_loss_memory import LossShape, loss_bytes
from models.activations import Cut, end_bytes, kept_bytes
from models.config import TransformerConfig
from models.embedding import Embedding
from models.recompute import RecomputeConfig, Unit
from models.rotary import rotary_of
from models.transformer import GELU, Activation, Block, Build, Context, Norm


class Stack(Stage):
    """Layers `layers` of a model, with the embedding before the first and a norm after the last.

    batch  tokens, position_ids [b, s] int64, sample [b] int64, and what a subclass needs. A stage
           looks only at what `needs` names

    tied            the output layer uses the word table: the last stage then holds it too
    token_types     rows of the token-type table (0: none)
    norm_placement  see Block; "post" has a norm behind the embedding instead of the last block
    recompute       which activations are computed again in backward; by default none
    """

    def __init__(
        self,
        config: TransformerConfig,
        grid: ProcessGrid,
        *,
        index: int,
        count: int,
        layers: Sequence[int],
        micro_batch_size: int,
        sequence_parallel: bool,
        seed: int,
        dtype: torch.dtype,
        tied: bool = True,
        token_types: int = 0,
        norm_placement: Literal["pre", "post"] = "pre",
        causal: bool = True,
        activation: Activation = GELU,
        recompute: RecomputeConfig | None = None,
    ) -> None:
        tp = grid.tp
        recompute = recompute or RecomputeConfig()
        sequence_parallel = sequence_parallel and tp.size > 1
        rows = config.seq_length // (tp.size if sequence_parallel else 1)
        shape = (rows, micro_batch_size, config.hidden_size)
        wide = torch.float32 if config.fp32_residual_connection else None
        super().__init__(index, count, WireSpec(shape, wide or dtype, grid.device))
        self.build = build = Build(tp, dtype, grid.device, seed, sequence_parallel, wide)
        self.tp, self.seed, self.sequence_parallel = tp, seed, sequence_parallel
        self.vocab_size = config.vocab_size
        self.padded_size = config.padded_vocab_size(tp.size)
        self.dropping = config.hidden_dropout > 0 or config.attention_dropout > 0
        self.tied = tied
        norm = (config.normalization, config.hidden_size, config.norm_epsilon, build)
        embedding_norm = Norm(*norm) if self.is_first and norm_placement == "post" else None
        self.embedding = self._embedding(config, build, token_types, embedding_norm)
        self.rotary = rotary_of(config)
        options = {
            "rotary": self.rotary,
            "norm_placement": norm_placement,
            "causal": causal,
            "activation": activation,
            "again": recompute.modules,
        }
        self.layers = nn.ModuleDict({str(n): Block(config, n, build, **options) for n in layers})
        self.units = recompute.units(layers)
        self.cuts_inputs = recompute.distribute_saved_activations
        for unit in self.units:
            for block in self.blocks_of(unit):
                block.recomputed = unit.again
        last_norm = self.is_last and norm_placement == "pre"
        self.final_norm = Norm(*norm, result=wide and dtype) if last_norm else None
        self._predict_memory(config, recompute, layers, micro_batch_size)

    def _predict_memory(
        self,
        config: TransformerConfig,
        recompute: RecomputeConfig,
        layers: Sequence[int],
        batch: int,
    ) -> None:
        element, residual = self.build.dtype.itemsize, self.wire.dtype.itemsize
        cut = Cut(batch, self.tp.size, self.sequence_parallel, element, residual)
        blocks = kept_bytes(config, recompute, layers, cut)
        before, behind = end_bytes(config, cut)
        before, behind = before * self.is_first, behind * self.is_last
        kept = before + blocks.kept + behind
        # the blocks' backward begins when what is behind them has gone
        self.saved_bytes = (kept, max(kept, before + blocks.most))
        if self.is_last:
            weight = torch.empty(0, dtype=self.build.dtype, device=self.build.device)
            self.loss_bytes = loss_bytes(self.loss_shape(config, batch), config.loss_mode, weight)

    def loss_shape(self, config: TransformerConfig, batch: int) -> LossShape:
        """Of a microbatch of `batch` samples."""
        return LossShape(
            tokens=config.seq_length * batch,
            hidden=config.hidden_size,
            vocabulary=config.vocab_size,
            padded=self.padded_size,
            ranks=self.tp.size,
            strips=self.tp.size if self.sequence_parallel else 1,
        )

    def _embedding(
        self, config: TransformerConfig, build: Build, token_types: int, norm: Norm | None
    ) -> Embedding | None:
        """On the first stage; a tied last stage of several holds its own copy of the word table,
        under the same name."""
        if not (self.is_first or (self.is_last and self.tied)):
            return None
        learned = config.position_embedding_type == "learned_absolute"
        embedding = Embedding(
            build,
            vocab_size=config.vocab_size,
            padded_size=self.padded_size,
            hidden_size=config.hidden_size,
            std=config.init_method_std,
            dropout=config.hidden_dropout,
            max_positions=config.max_positions if learned and self.is_first else 0,
            token_types=token_types if self.is_first else 0,
            norm=norm,
        )
        table = embedding.word.weight
        table.shard = dataclasses.replace(table.shard, vocabulary=True)
        if self.tied and self.count > 1:
            table.shard = dataclasses.replace(table.shard, sum_over=("embed",))
        return embedding

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

    def mask(self, batch: Batch) -> Tensor | None:
        """[b, 1, s or 1, s] bool: which keys a query sees; None for the plain causal mask."""
        raise NotImplementedError

    def context(self, batch: Batch) -> Context:
        """Masks, positions and dropout keys of one microbatch, the same on every stage."""
        rotary = None
        if self.rotary is not None and self.layers:
            rotary = self.rotary.tables(batch["position_ids"].t(), self.build.dtype)
        keys = None
        if self.training and self.dropping:
            keys = DropoutKeys(self.seed, batch["sample"])
        rows = self.wire.shape[0]
        first = self.tp.rank * rows if self.sequence_parallel else 0
        return Context(rotary, self.mask(batch), keys, first)

    def hidden(self, batch: Batch, activation: Tensor | None) -> Tensor:
        """Through embedding (first stage), blocks and final norm (last stage): [s or s/t, b, h]."""
        context = self.context(batch)
        x = activation
        if self.is_first:
            x = self.embedding(
                batch["tokens"], batch["position_ids"], context, batch.get("token_types")
            )
        for unit in self.units:
            forward = partial(self._through, unit, context)
            if unit.again and torch.is_grad_enabled():
                x = checkpoint(
                    forward, self.cuts_inputs, x, tp_group=self.tp, preserve_rng_state=False
                )
            else:
                x = forward(x)
        if self.final_norm is not None:
            return self.final_norm(x)
        return x.to(self.build.dtype) if self.is_last else x

    def _through(self, unit: Unit, context: Context, x: Tensor) -> Tensor:
        for block in self.blocks_of(unit):
            x = block(x, context)
        return x

    def blocks_of(self, unit: Unit) -> Iterator[Block]:
        return (self.layers[str(n)] for n in unit.layers)

    def without_padding(self, logits: Tensor) -> Tensor:
        """[..., v/t] with the columns beyond the vocabulary at minus infinity."""
        per_rank = self.padded_size // self.tp.size
        real = min(max(self.vocab_size - self.tp.rank * per_rank, 0), per_rank)
        if real == per_rank:
            return logits
        padding = torch.arange(per_rank, device=logits.device) >= real
        return logits.masked_fill(padding, -torch.inf)


S = TypeVar("S", bound=Stack)


def build_stack(
    stage: type[S],
    config: TransformerConfig,
    grid: ProcessGrid,
    *,
    micro_batch_size: int,
    sequence_parallel: bool,
    seed: int,
    dtype: torch.dtype = torch.float32,
    placement: Sequence[Sequence[int]] | None = None,
    recompute: RecomputeConfig | None = None,
) -> list[S]:
    """This rank's stages of a model made of `stage`s, in order.

    recompute: which activations are computed again in backward; by default none
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
        stage(
            config,
            grid,
            index=index,
            count=len(placement),
            layers=placement[index],
            micro_batch_size=micro_batch_size,
            sequence_parallel=sequence_parallel,
            seed=seed,
            dtype=dtype,
            recompute=recompute,
        )
        for index in range(grid.pp.rank, len(placement), grid.pp.size)
    ]
