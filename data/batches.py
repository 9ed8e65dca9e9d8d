"""Which samples make which microbatch: arithmetic on the running sample number.

A step takes samples consumed .. consumed + global_batch - 1. They are dealt out in microbatches,
data-parallel rank by rank, so that microbatch m of all ranks together is the next
dp_size * micro_batch samples. For global batch 8, micro batch 2, 2 ranks:

    sample        0 1 | 2 3 | 4 5 | 6 7
    rank           0     1     0     1
    microbatch     0     0     1     1

The number of consumed samples is the only progress there is: a resumed run passes it in and goes
on. Imports numpy only; a dataset is anything whose dataset[n] is a dict of arrays. One that knows
some of them without reading the sample has part(n, names) -> those, or None if it does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np


def microbatch_samples(
    consumed: int, global_batch: int, micro_batch: int, dp_rank: int = 0, dp_size: int = 1
) -> np.ndarray:
    """int64 [microbatches, micro_batch]: sample numbers of one step on one data-parallel rank.

    >>> microbatch_samples(8, 8, 2, dp_rank=1, dp_size=2).tolist()
    [[10, 11], [14, 15]]
    """
    if global_batch % (micro_batch * dp_size):
        raise ValueError(
            f"--global-batch-size {global_batch} does not divide by --micro-batch-size "
            f"{micro_batch} x {dp_size} data-parallel ranks"
        )
    order = np.arange(consumed, consumed + global_batch, dtype=np.int64)
    return order.reshape(-1, dp_size, micro_batch)[:, dp_rank]


def microbatches(
    dataset,
    consumed: int,
    global_batch: int,
    micro_batch: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    names: Collection[str] | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """One step's microbatches: dataset arrays stacked to [b, ...], and "sample" int64 [b], the
    running sample number.

    names  arrays that are looked at, None for all: others may be missing. Where none is, as in the
           middle of a pipeline, nothing is read
    """
    for samples in microbatch_samples(consumed, global_batch, micro_batch, dp_rank, dp_size):
        rows = [_arrays(dataset, n, names) for n in samples.tolist()]
        batch = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
        batch["sample"] = samples
        yield batch


def _arrays(dataset, n: int, names: Collection[str] | None) -> dict[str, np.ndarray]:
    if names is None:
        return dataset[n]
    if not names:
        return {}
    found = dataset.part(n, names) if hasattr(dataset, "part") else None
    return dataset[n] if found is None else found
