"""Short training runs for parity tests: a few steps of a tiny GPT on any layout, on given ranks.

`short_run` is sent to ranks by the tests; it returns plain values, so that runs of different
layouts can be compared in the test process.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from core.comm import Group, all_gather
from core.data_parallel.config import DataParallelConfig
from core.data_parallel.ddp import DataParallel
from core.feed import Feed
from core.grid import RankGrid
from core.optimizer.adam import Optimizer
from core.optimizer.config import OptimizerConfig
from core.optimizer.precision import LossScale, PrecisionConfig
from core.optimizer.schedule import Schedule
from core.pipeline_parallel.placement import Placement, place_layers
from core.pipeline_parallel.schedules import row_maker
from core.process_grid import ProcessGrid
from core.shard import shard_of
from core.train import Trainer, TrainState
from core.train_config import TrainConfig
from data.batches import microbatches
from data.mock import MockBertDataset, MockGPTDataset
from models.bert import build_stages as build_bert_stages
from models.config import BertConfig, GPTConfig
from models.gpt import build_stages
from models.recompute import RecomputeConfig
from pretrain_bert import INTEGERS as BERT_INTEGERS
from pretrain_gpt import INTEGERS

GPT2 = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    vocab_size=50,
    make_vocab_size_divisible_by=2,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
LLAMA = replace(
    GPT2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    group_query_attention=True,
    num_query_groups=4,
    num_attention_heads=8,
    untie_embeddings_and_output_weights=True,
    qk_layernorm=True,
)
WITH_DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}


@dataclass(frozen=True)
class Layout:
    """dp is what the ranks leave.

    chunks    stages per pipeline rank     layers    of each stage; by default an even split
    sharding  over dp                      overlap   communication of gradients and parameters
    bucket    --ddp-bucket-size            global_batch_size    samples of a step
    precision settings of PrecisionConfig          recompute those of RecomputeConfig
    rampup    --rampup-batch-size          frozen    names of parameters that are not trained
    """

    tp: int = 1
    sequence_parallel: bool = False
    micro_batch_size: int = 2
    pp: int = 1
    chunks: int = 1
    schedule: str | None = None
    layers: tuple[int, ...] | None = None
    sharding: str = "no_shard"
    overlap: bool = False
    bucket: int | None = None
    precision: tuple[tuple[str, object], ...] = ()
    global_batch_size: int = 8
    recompute: tuple[tuple[str, object], ...] = ()
    rampup: tuple[int, int, int] | None = None
    frozen: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What differs from one process: pp=2,chunks=2"""
        values = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        own = [f"{name}={value}" for name, value, default in values if value != default]
        return ",".join(own) or "plain"

    def placement(self, num_layers: int) -> Placement:
        if self.layers is not None:
            return Placement(self.layers, self.pp)
        return place_layers(num_layers, self.pp, chunks=self.chunks)

    def recomputation(self) -> RecomputeConfig:
        return RecomputeConfig(**dict(self.recompute))

    def data_parallel(self) -> DataParallelConfig:
        return DataParallelConfig(
            data_parallel_sharding_strategy=self.sharding,
            overlap_grad_reduce=self.overlap,
            overlap_param_gather=self.overlap and self.sharding != "no_shard",
            ddp_bucket_size=self.bucket,
        )


@dataclass
class Run:
    """losses and norms by step; first and last weights, gathered, by name."""

    losses: list[float]
    norms: list[float]
    initial: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]


def make_trainer(
    world: Group, model: GPTConfig | BertConfig, layout: Layout, **optim
) -> tuple[Trainer, Feed]:
    grid = ProcessGrid.build(RankGrid.fit(world.size, tp=layout.tp, pp=layout.pp), world)
    precision = PrecisionConfig(**dict(layout.precision))
    dtype = torch.float64 if model.fp64 else getattr(torch, precision.dtype)
    train = TrainConfig(
        micro_batch_size=layout.micro_batch_size,
        global_batch_size=layout.global_batch_size,
        rampup_batch_size=layout.rampup,
        seed=1,
    )
    placement = layout.placement(model.num_layers)
    bert = isinstance(model, BertConfig)
    stages = (build_bert_stages if bert else build_stages)(
        model,
        grid,
        placement=[placement.layers_of(stage) for stage in range(placement.stages)],
        micro_batch_size=layout.micro_batch_size,
        sequence_parallel=layout.sequence_parallel,
        seed=1,
        dtype=dtype,
        recompute=layout.recomputation(),
    )
    for stage in stages:
        for name, param in stage.named_parameters():
            param.requires_grad_(name not in layout.frozen)
    config = OptimizerConfig(**{"lr": 1e-3, "lr_decay_style": "constant", **optim})
    replicas = DataParallel(
        stages,
        grid.dp_cp,
        grid.tp,
        grid.embed,
        layout.data_parallel(),
        message=torch.bfloat16 if precision.grad_reduce_in_bf16 else None,
    )
    scale = LossScale.of(precision, model.seq_length * layout.global_batch_size)
    optimizer = Optimizer(replicas, grid.tp, grid.pp, config, scale)
    schedule = Schedule.of(config, train_samples=8000, global_batch_size=8)
    sizes = train.batch_schedule(grid.shape.dp)
    make_row = row_maker(layout.schedule, grid.pp.size, grid.pp.rank, placement.chunks)
    trainer = Trainer(grid, stages, replicas, optimizer, schedule, sizes, make_row)
    dataset = (MockBertDataset if bert else MockGPTDataset)(model.vocab_size, model.seq_length, 1)
    needs = set().union(*(stage.needs for stage in stages))

    def source(consumed: int, global_batch: int):
        return microbatches(
            dataset, consumed, global_batch, layout.micro_batch_size, grid.dp.rank, grid.dp.size
        )

    feed = Feed(
        source if grid.tp.rank == 0 else None,
        grid.tp,
        grid.device,
        # a GPT's stages get all arrays here, as core.traffic's default sizes have them
        integers=[name for name in BERT_INTEGERS if name in needs] if bert else INTEGERS,
        floats=("loss_mask",),
    )
    return trainer, feed


def gathered(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Logical parameters by name, whole."""
    tp, out = trainer.grid.tp, {}
    with trainer.replicas.whole_parameters():
        for stage in trainer.stages:
            for name, param in stage.named_parameters():
                shard = shard_of(param)
                local = param.detach().clone().view(shard.local_shape(tp.size))
                if shard.dim is not None:
                    local = all_gather(local, tp, dim=shard.dim, tag="test.gather")
                    local = local.narrow(shard.dim, 0, shard.shape[shard.dim])
                out[name] = local
    return out


def short_run(world: Group, model: GPTConfig, layout: Layout, steps: int, **optim) -> Run:
    trainer, feed = make_trainer(world, model, layout, **optim)
    initial, state, rows = gathered(trainer), TrainState(), []
    for _ in range(steps):
        rows.append(trainer.train_step(state, feed))
    return Run(
        [row["lm_loss"] for row in rows],
        [row["grad_norm"] for row in rows],
        initial,
        gathered(trainer),
    )
