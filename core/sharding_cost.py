"""What a sharding stage sends beyond the cheapest one, in a line before the first step.

Gradients that no rank keeps whole are reduced with every microbatch, and parameters that no rank
keeps are gathered for every forward and backward: more bytes with every microbatch, so with every
stage of a pipeline that is to be kept busy. Imports core.traffic (the arithmetic); core/run.py
prints it.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.traffic import BucketSizes, over_dp
from core.train import Trainer

CHEAPEST_SHARDED = "optim"


def sharding_cost(trainer: Trainer, consumed: int) -> Iterator[str]:
    """A line about this rank's dp group, or none where `optim` would send as much.

    consumed: samples, from which follows the number of microbatches
    """
    replicas, dp = trainer.replicas, trainer.grid.dp_cp
    nothing = dp.size == 1 or not replicas.memories  # a stage may have no parameters
    if nothing or replicas.strategy in ("no_shard", CHEAPEST_SHARDED):
        return
    microbatches = trainer.batch_schedule.microbatches(consumed)
    memories = replicas.memories
    buckets = [BucketSizes.of(memory.bucket, dp.rank, dp.size) for memory in memories]
    element = {
        "bytes_per_gradient": memories[0].message.itemsize,
        "bytes_per_parameter": memories[0].params.dtype.itemsize,
    }
    gradients, parameters = over_dp(buckets, dp.size, replicas.strategy, microbatches, **element)
    cheapest = sum(over_dp(buckets, dp.size, CHEAPEST_SHARDED, microbatches, **element))
    total = gradients + parameters
    if total > cheapest:
        yield (
            f"--data-parallel-sharding-strategy {replicas.strategy} sends {_mib(total)} MiB a step "
            f"over dp {dp.size} (gradients {_mib(gradients)}, parameters {_mib(parameters)}; "
            f"{microbatches} microbatches); {CHEAPEST_SHARDED} would send {_mib(cheapest)}"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"
