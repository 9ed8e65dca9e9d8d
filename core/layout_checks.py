"""What does not fit between sections: the model, the run and the data against a number of ranks.

Pure: standard library only. Each function yields one sentence per problem; a recipe hands them to
`core.config.parse(checks=...)`, so that they are printed with everything else before any process
group exists. The sections come as arguments: core knows no model and no data set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from core.grid import ParallelConfig
from core.optimizer import schedule
from core.optimizer.config import OptimizerConfig
from core.pipeline_parallel.schedules import ORDERS, build_plan
from core.pipeline_parallel.schedules import schedule_problems as plan_problems
from core.train_config import TrainConfig


class Model(Protocol):
    """A model's config: its layers, vocabulary, and what of it cannot be cut over tp ranks."""

    num_layers: int
    vocab_size: int | None

    def layout_problems(self, tp: int, sequence_parallel: bool) -> Iterator[str]: ...


def run_problems(
    model: Model,
    parallel: ParallelConfig,
    data: Tokens,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    world_size: int,
) -> Iterator[str]:
    """All of the checks below, for a world of `world_size` ranks."""
    yield from layout_problems(model, parallel, train, world_size)
    yield from schedule_problems(optimizer, train, _data_parallel_size(parallel, world_size) or 1)
    yield from data.vocabulary_problems(model.vocab_size)


def _data_parallel_size(parallel: ParallelConfig, world_size: int) -> int | None:
    """What the world leaves, or None when it does not divide."""
    ways = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    return world_size // ways if ways > 0 and world_size % ways == 0 else None


def layout_problems(
    model: Model, parallel: ParallelConfig, train: TrainConfig, world_size: int
) -> Iterator[str]:
    """Model, batch and world against tp x pp; dp is what the world leaves."""
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if tp < 1 or pp < 1:
        return  # ParallelConfig.problems says so
    yield from model.layout_problems(tp, parallel.sequence_parallel)
    dp = _data_parallel_size(parallel, world_size)
    if dp is None:
        yield _world_problem(tp, pp, world_size)
    batch_problems = list(train.batch_problems(dp or 1))  # 1: what no number of ranks would mend
    yield from batch_problems
    chunks = 1
    try:
        chunks = parallel.placement(model.num_layers).chunks
    except ValueError as error:
        if model.num_layers > 0:  # else the model's own checks say so
            yield str(error)
        return
    if dp is not None and not (batch_problems or list(train.problems())):
        yield from pipeline_problems(parallel, train, dp, chunks)


def pipeline_problems(
    parallel: ParallelConfig, train: TrainConfig, dp: int, chunks: int
) -> Iterator[str]:
    """The schedule against every number of microbatches that the run will have.

    A user's schedule file is read and checked, since it may not finish; ours are known to.
    """
    asked, pp = parallel.pipeline_schedule, parallel.pipeline_model_parallel_size
    batches = train.batch_schedule(dp)
    counts = {size // (batches.micro * dp) for size in batches.sizes()}
    found: dict[str, None] = {}
    for microbatches in sorted(counts):
        sentences = list(plan_problems(asked, pp, microbatches, chunks))
        if not sentences and asked not in (None, *ORDERS):
            try:
                build_plan(asked, pp, microbatches, chunks)
            except ValueError as error:
                sentences = [str(error)]
        found |= dict.fromkeys(sentences)
    yield from found


def _world_problem(tp: int, pp: int, world_size: int) -> str:
    size, product = f"--tensor-model-parallel-size {tp}", tp
    if pp > 1:
        size += f" x --pipeline-model-parallel-size {pp} = {tp * pp}"
        product *= pp
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return (
        f"{ranks} do{'es' if world_size == 1 else ''} not divide by {size}; "
        f"start {product} ranks or a multiple (--nproc {product}, or torchrun)"
    )


def schedule_problems(optimizer: OptimizerConfig, train: TrainConfig, dp: int = 1) -> Iterator[str]:
    """The schedules' lengths against the run's, both in samples.

    `dp` matters only where lengths in iterations meet lengths in samples.
    """
    sections = (*optimizer.problems(), *train.problems(), *train.batch_problems(dp))
    if not sections:
        batches = train.batch_schedule(dp)
        length = train.train_samples or batches.consumed_after(train.train_iters)
        yield from schedule.problems(
            optimizer, train_samples=length, global_batch_size=batches.full
        )


class Tokens(Protocol):
    """A data set's config: what of its vocabulary is not known."""

    def vocabulary_problems(self, vocab_size: int | None) -> Iterator[str]: ...
