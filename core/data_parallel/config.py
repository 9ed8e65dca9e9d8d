"""DataParallelConfig: how gradients, optimizer state and parameters are spread over dp ranks.

Pure: standard library only. core/data_parallel/ddp.py does what it says; contradictions with other
sections are in core/contradictions.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(kw_only=True)
class DataParallelConfig:
    """Data parallelism"""

    use_distributed_optimizer: bool = False
    """Each data parallel rank holds and updates its part of the optimizer's state (ZeRO 1)."""
    data_parallel_sharding_strategy: Strategy | None = None
    """What each rank holds a part of; by default nothing, or the optimizer's state."""
    overlap_grad_reduce: bool = False
    """Sum gradients over the ranks while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward pass already runs."""
    ddp_bucket_size: int | None = None
    """Parameters whose gradients travel together; by default 40 million where that overlaps."""

    @property
    def strategy(self) -> Strategy:
        if self.data_parallel_sharding_strategy is not None:
            return self.data_parallel_sharding_strategy
        return "optim" if self.use_distributed_optimizer else "no_shard"

    def problems(self) -> Iterator[str]:
        size = self.ddp_bucket_size
        if size is not None and size < 1:
            yield f"--ddp-bucket-size {size} must be 1 or more; it counts parameters"
