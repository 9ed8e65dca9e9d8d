"""One short run on any layout, and all that must not depend on it.

`outcome` is sent to ranks by tests/test_parity_pipeline.py and scripts/check_layouts.py. It returns
plain values: losses, norms and a validation loss, a digest of every parameter before and after, and
the traffic of a step beside core.traffic's prediction.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from core.comm import Group
from core.pipeline_parallel.schedules import row_maker
from core.traffic import BucketSizes, Sizes, StageSizes, step_traffic
from core.train import Trainer, TrainState
from models.config import GPTConfig
from models.gpt import GPTStage
from tests.training import Layout, gathered, make_trainer


@dataclass
class Outcome:
    """What one rank saw.

    losses, norms   by step, the validation loss last among the losses
    initial, final  digests by parameter
    traffic         of the first step by (group, operation), as recorded and as predicted:
                    calls, payload, wire
    """

    losses: list[float]
    norms: list[float]
    initial: dict[str, str]
    final: dict[str, str]
    traffic: tuple[dict, dict]


def outcome(world: Group, model: GPTConfig, layout: Layout, steps: int) -> Outcome:
    trainer, feed = make_trainer(world, model, layout)
    trainer.open_wires()
    initial, state, losses, norms = digests(trainer), TrainState(), [], []
    for _ in range(steps):
        row = trainer.train_step(state, feed)
        losses.append(row["lm_loss"])
        norms.append(row["grad_norm"])
        if state.iteration == 1:
            traffic = recorded(trainer), predicted(trainer, model, layout)
    losses.append(trainer.evaluate(feed, 2)["lm_loss"])
    return Outcome(losses, norms, initial, digests(trainer), traffic)


def deviation(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative one; infinite where a number is missing or not finite."""
    if len(found) != len(wanted) or not all(map(math.isfinite, found)):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def digests(trainer: Trainer) -> dict[str, str]:
    return {name: _digest(value) for name, value in gathered(trainer).items()}


def _digest(value: Tensor) -> str:
    numbers = value.contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(numbers.tobytes(), digest_size=16).hexdigest()


def recorded(trainer: Trainer) -> dict[tuple[str, str], tuple[int, int, int]]:
    """What the ledger holds of training step 1; opening wires came before it."""
    found: dict[tuple[str, str], Counter] = {}
    for event in trainer.grid.ledger.events(step=1):
        sums = found.setdefault((event.group, event.op), Counter())
        sums.update(calls=1, payload=event.payload, wire=event.wire)
    return {key: (sums["calls"], sums["payload"], sums["wire"]) for key, sums in found.items()}


def predicted(
    trainer: Trainer, model: GPTConfig, layout: Layout
) -> dict[tuple[str, str], tuple[int, int, int]]:
    """core.traffic's prediction, without the stop flag: that is the loop's, not the step's."""
    grid, microbatches = trainer.grid, trainer.batch_schedule.microbatches(0)
    split = layout.schedule == "zb_h1"
    stage = trainer.stages[0]
    element = stage.build.dtype.itemsize
    sizes = Sizes(
        seq=model.seq_length,
        micro_batch=layout.micro_batch_size,
        hidden=model.hidden_size,
        microbatches=microbatches,
        stages=tuple(stage_sizes(trainer, stage, layout) for stage in trainer.stages),
        sequence_parallel=layout.sequence_parallel,
        bytes_per_element=element,
        bytes_between=stage.wire.dtype.itemsize,
        bytes_per_loss=model.bytes_per_element,
        sharding=layout.sharding,
        bytes_per_gradient=model.bytes_per_element,
        bytes_per_sum=model.bytes_per_element,
        bytes_per_parameter=element,
        loss_mode={"auto": "split" if split else "pipelined"}.get(model.loss_mode, model.loss_mode),
    )
    chunks = len(trainer.stages)
    row = row_maker(layout.schedule, grid.pp.size, grid.pp.rank, chunks)(microbatches, False)
    totals = step_traffic(sizes, grid.shape, row)
    return {key: astuple(total) for key, total in totals.items() if key[0] != "world"}


def stage_sizes(trainer: Trainer, stage: GPTStage, layout: Layout) -> StageSizes:
    dp = trainer.grid.dp_cp
    ways = 1 if layout.sharding == "no_shard" else dp.size
    buckets = [memory.bucket for memory in trainer.replicas.memories_of(stage)]
    return StageSizes(
        layers=len(stage.layers),
        buckets=tuple(BucketSizes.of(bucket, dp.rank, ways) for bucket in buckets),
        first=stage.is_first,
        last=stage.is_last,
        **recomputed(layout, stage.layers),
    )


def recomputed(layout: Layout, layers: Iterable[object]) -> dict[str, int]:
    """What of StageSizes is about recomputation, for a stage of these layers."""
    config = layout.recomputation()
    units = [unit for unit in config.units([*layers]) if unit.again]
    again = 2 * sum(len(unit.layers) for unit in units)
    if "mlp" in config.modules:
        again += len([*layers])
    cut = len(units) if config.distribute_saved_activations else 0
    return {"again": again, "cut_inputs": cut}
