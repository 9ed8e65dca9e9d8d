"""Pretrain a GPT: argv -> config -> place -> grid -> stages -> run.

    python pretrain_gpt.py --mock-data                                       a tiny model, no files
    python pretrain_gpt.py --nproc 4 --tensor-model-parallel-size 2 --mock-data
    torchrun --nproc-per-node 8 pretrain_gpt.py <Megatron's flags>

This file is the recipe and is meant to be copied. Everything up to `train` runs without torch, so
that --help and every refusal come at once; all problems are reported together, before any process
group exists.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from core import start
from core.config import recipe
from core.data_parallel.config import DataParallelConfig
from core.grid import ParallelConfig
from core.optimizer.config import OptimizerConfig
from core.optimizer.precision import PrecisionConfig
from core.train_config import CheckpointConfig, LaunchConfig, LoggingConfig, TrainConfig
from data import flag_checks
from data.config import GPTDataConfig
from data.flag_checks import with_vocabulary
from models.config import GPTConfig
from models.flops import flops_per_token, parameters
from models.recompute import RecomputeConfig

if TYPE_CHECKING:
    from core.launch import World
    from core.process_grid import ProcessGrid
    from core.run import Data

INTEGERS, FLOATS = ("tokens", "labels", "position_ids", "sample"), ("loss_mask",)


@recipe
@dataclasses.dataclass(kw_only=True)
class RunConfig:
    model: GPTConfig
    recompute: RecomputeConfig
    parallel: ParallelConfig
    data_parallel: DataParallelConfig
    precision: PrecisionConfig
    data: GPTDataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    launch: LaunchConfig


def problems(config: RunConfig) -> Iterator[str]:
    """What the sections cannot see on their own: ranks, tokenizer, files."""
    model = with_vocabulary(config.model, config.data)
    vocab_size = model.vocab_size if (model.vocab_size or 0) > 0 else None
    at_intervals = config.train.eval_interval is not None and start.evaluates(config)
    yield from start.rank_problems(config)
    yield from flag_checks.tokenizer_problems(config.data, config.model.vocab_size)
    yield from flag_checks.data_problems(
        config.data, model.seq_length, vocab_size, evaluates=at_intervals
    )
    yield from start.checkpoint_problems(config, model, parameters)


def main(argv: Sequence[str] | None = None) -> int:
    return start.start(RunConfig, argv, problems, train)


def train(config: RunConfig, world: World) -> int:
    from core.assemble import carry_out
    from models.gpt import build_stages

    model = with_vocabulary(config.model, config.data)
    stopped = carry_out(
        config,
        model,
        world,
        build_stages,
        functools.partial(open_data, config, model),
        title="GPT",
        parameters=sum(parameters(model).values()),
        flops_per_token=flops_per_token(model),
    )
    return start.finish(world, stopped)


def open_data(
    config: RunConfig,
    model: GPTConfig,
    grid: ProcessGrid,
    needs: set[str],
    record: dict,
    consumed: int,
    poll: Callable[[], None],
) -> Data:
    """Training, validation and test samples, as far as this rank's stages look at them.

    record, consumed: of the checkpoint; poll: called while indices are built, ends that by raising
    """
    from core.assemble import Feeder, writes_first
    from core.run import Data
    from data.from_flags import Opening, gpt_sets
    from data.read_ahead import ReadAhead

    integers = [name for name in INTEGERS if name in needs]
    if config.data.reset_attention_mask or config.data.document_attention_mask:
        integers.append("document_ids")
    floats = [name for name in FLOATS if name in needs]
    feeder = Feeder(grid, ReadAhead, config.train.micro_batch_size, integers, floats)
    # positions are known without the samples unless they start anew within one
    reads = feeder.reads(() if config.data.reset_position_ids else ("position_ids",))
    given = Opening(
        seq_length=model.seq_length,
        vocab_size=model.vocab_size,
        seed=config.train.seed,
        evaluates=start.evaluates(config),
        record=record,
        consumed=consumed,
        reads=reads,
        poll=poll,
        writes_cache=writes_first(config.data.data_cache_path, reads, grid.world),
    )
    return Data.of(gpt_sets(config.data, given), feeder, config.train.samples(grid.shape.dp))


if __name__ == "__main__":
    sys.exit(main())
