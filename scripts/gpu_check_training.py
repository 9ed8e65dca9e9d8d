"""The training that scripts/gpu_check.py compares: one small GPT, on any device, in any type.

Dataset, initial values and dropout masks are functions of the seed, so that a device changes
nothing but the order of sums. The CPU's float32 curve is what others are held against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.data_parallel.ddp import DataParallel
from core.feed import Feed
from core.optimizer.adam import Optimizer
from core.optimizer.config import OptimizerConfig
from core.optimizer.schedule import Schedule
from core.pipeline_parallel.schedules import row_maker
from core.process_grid import ProcessGrid
from core.train import Trainer, TrainState
from core.train_config import TrainConfig
from data.batches import microbatches
from data.mock import MockGPTDataset
from models.config import GPTConfig
from models.gpt import build_stages

STEPS, SEED, MICRO_BATCH, GLOBAL_BATCH = 20, 1, 4, 8
MODEL = GPTConfig(
    num_layers=4,
    hidden_size=128,
    num_attention_heads=4,
    seq_length=64,
    vocab_size=512,
    attention_dropout=0.0,
    hidden_dropout=0.1,
)
INTEGERS, FLOATS = ("tokens", "labels", "position_ids", "sample"), ("loss_mask",)


@dataclass(frozen=True)
class Limits:
    """The largest relative distance, over all steps, from the CPU's float32 curve."""

    loss: float
    norm: float


# float32: the CPU's own float64 is 2e-7 and 1e-5 away. bfloat16: three times what it is away on the
# CPU, with the worst of four seeds. Another dropout mask makes 3e-3 and 2e-1.
LIMITS = {torch.float32: Limits(1e-4, 1e-3), torch.bfloat16: Limits(2e-3, 3e-2)}


@dataclass(frozen=True)
class Curve:
    """losses and gradient norms by step; the initial weights of each bucket, in host memory."""

    losses: list[float]
    norms: list[float]
    initial: list[Tensor]


def train_curve(device: str, dtype: torch.dtype, steps: int = STEPS) -> Curve:
    """Trains `steps` steps on `device`, weights and activations in `dtype`."""
    trainer, feed = make_trainer(device, dtype)
    initial = [memory.params.detach().cpu().clone() for memory in trainer.replicas.memories]
    state = TrainState()
    rows = [trainer.train_step(state, feed) for _ in range(steps)]
    return Curve([row["lm_loss"] for row in rows], [row["grad_norm"] for row in rows], initial)


def make_trainer(device: str, dtype: torch.dtype) -> tuple[Trainer, Feed]:
    """A trainer as the recipe makes it for one process, and what it reads."""
    grid = ProcessGrid.single(device)
    stages = build_stages(
        MODEL, grid, micro_batch_size=MICRO_BATCH, sequence_parallel=False, seed=SEED, dtype=dtype
    )
    config = OptimizerConfig(lr=4e-4, lr_decay_style="constant")
    replicas = DataParallel(stages, grid.dp_cp, grid.tp, grid.embed)
    optimizer = Optimizer(replicas, grid.tp, grid.pp, config)
    schedule = Schedule.of(config, train_samples=8000, global_batch_size=GLOBAL_BATCH)
    train = TrainConfig(micro_batch_size=MICRO_BATCH, global_batch_size=GLOBAL_BATCH)
    sizes = train.batch_schedule(1)
    trainer = Trainer(grid, stages, replicas, optimizer, schedule, sizes, row_maker(None, 1, 0))
    dataset = MockGPTDataset(MODEL.vocab_size, MODEL.seq_length, SEED)
    feed = Feed(
        lambda consumed, size: microbatches(dataset, consumed, size, MICRO_BATCH),
        grid.tp,
        grid.device,
        integers=INTEGERS,
        floats=FLOATS,
    )
    return trainer, feed


def judged(got: Curve, start: Curve, exact: Curve, limits: Limits) -> tuple[bool, list[float]]:
    """Whether a curve passes, and [initial weights that differ, distance of losses, of norms].

    start  has the CPU's initial weights in the curve's own type: none may differ by one bit
    exact  the CPU's float32 curve
    """
    pairs = zip(got.initial, start.initial, strict=True)
    other = sum(int((a != b).sum()) for a, b in pairs)
    loss, norm = distance(got.losses, exact.losses), distance(got.norms, exact.norms)
    return other == 0 and loss <= limits.loss and norm <= limits.norm, [other, loss, norm]


def distance(got: list[float], exact: list[float]) -> float:
    """The largest relative difference of two curves; not a number if a value is none."""
    apart = [abs(a - b) / abs(b) for a, b in zip(got, exact, strict=True)]
    return float("nan") if any(x != x for x in apart) else max(apart)
