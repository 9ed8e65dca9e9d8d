"""Tokens to activations: word table cut over the vocabulary, position and token-type tables.

tokens [b, s] -> [s, b, h], or [s/t, b, h] under sequence parallelism (the word table's sum over tp
is then scattered along the sequence). Used by models.gpt and models.bert.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from core.random import init_normal_
from core.shard import Shard
from core.tensor_parallel import VocabParallelEmbedding
from models.transformer import Build, Context, Norm, dropout_add


class Table(nn.Module):
    """A small table that every rank holds whole: positions or token types.

    ids [n, b] -> [n, b, h]; under sequence parallelism a rank looks up its own rows of the sequence
    only, so the gradient is added over tp.
    """

    def __init__(self, rows: int, width: int, build: Build, *, name: str, std: float) -> None:
        super().__init__()
        self.weight = build.replicated((rows, width), 0.0)
        self.weight.shard = Shard((rows, width), sum_over=self.weight.shard.sum_over)
        shard = self.weight.shard
        init_normal_(self.weight, seed=build.seed, name=f"{name}.weight", shard=shard, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Embedding(nn.Module):
    """Sum of the tables, then a norm if there is one, then dropout.

    vocab_size       rows of the logical word table
    padded_size      rows stored by all tp ranks together
    max_positions    0: no position table (rotary or none)
    token_types      0: no token-type table
    norm             of the sum: the original BERT's
    """

    def __init__(
        self,
        build: Build,
        *,
        vocab_size: int,
        padded_size: int,
        hidden_size: int,
        std: float,
        dropout: float,
        max_positions: int = 0,
        token_types: int = 0,
        norm: Norm | None = None,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = build.tp, build.sequence_parallel
        self.dropout, self.residual_dtype = dropout, build.residual_dtype
        self.word = VocabParallelEmbedding(
            padded_size,
            hidden_size,
            vocab_size=vocab_size,
            reduce_scatter_embeddings=build.sequence_parallel,
            tp_group=build.tp,
            dtype=build.dtype,
            device=build.device,
            name="embedding.word",
            seed=build.seed,
            init_std=std,
        )
        self.norm = norm
        self.position = self.token_type = None
        if max_positions:
            self.position = Table(
                max_positions, hidden_size, build, name="embedding.position", std=std
            )
        if token_types:
            self.token_type = Table(
                token_types, hidden_size, build, name="embedding.token_type", std=std
            )

    def mine(self, ids: Tensor) -> Tensor:
        """[b, s] -> [s, b], cut to this rank's rows under sequence parallelism."""
        ids = ids.t()
        if not self.sequence_parallel:
            return ids
        rows = ids.shape[0] // self.tp.size
        return ids[self.tp.rank * rows : (self.tp.rank + 1) * rows]

    def forward(
        self, tokens: Tensor, positions: Tensor, context: Context, token_types: Tensor | None = None
    ) -> Tensor:
        x = self.word(tokens)
        if not self.sequence_parallel:
            x = x.transpose(0, 1).contiguous()  # [b, s, h] -> [s, b, h]
        if self.position is not None:
            x = x + self.position(self.mine(positions))
        if self.token_type is not None and token_types is not None:
            x = x + self.token_type(self.mine(token_types))
        if self.residual_dtype is not None:
            x = x.to(self.residual_dtype)
        if self.norm is not None:
            x = self.norm(x)
        if self.dropout > 0 and context.dropout is not None:
            nothing = x.new_zeros(()).expand_as(x)
            x = dropout_add(
                x, None, nothing, p=self.dropout, layer=-1, place="embedding", context=context
            )
        return x
