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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from core import start
from core.config import recipe
from core.config_record import to_json
from core.grid import ParallelConfig
from core.optimizer.config import OptimizerConfig
from core.train_config import CheckpointConfig, LaunchConfig, LoggingConfig, TrainConfig
from data.config import GPTDataConfig
from models.config import GPTConfig
from models.flops import flops_per_token, parameters

if TYPE_CHECKING:
    from core.launch import World
    from core.process_grid import ProcessGrid
    from core.run import Data


@recipe
@dataclasses.dataclass(kw_only=True)
class RunConfig:
    model: GPTConfig
    parallel: ParallelConfig
    data: GPTDataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    launch: LaunchConfig


def problems(config: RunConfig) -> Iterator[str]:
    """What the sections cannot see on their own: ranks, tokenizer, files."""
    from data import flag_checks

    model = with_vocabulary(config)
    vocab_size = model.vocab_size if (model.vocab_size or 0) > 0 else None
    at_intervals = config.train.eval_interval is not None and evaluates(config)
    yield from start.rank_problems(config)
    yield from flag_checks.tokenizer_problems(config.data, config.model.vocab_size)
    yield from flag_checks.data_problems(
        config.data, model.seq_length, vocab_size, evaluates=at_intervals
    )
    yield from start.checkpoint_problems(config, model, parameters)


def evaluates(config: RunConfig) -> bool:
    return config.train.eval_iters > 0 or config.data.full_validation


def with_vocabulary(config: RunConfig) -> GPTConfig:
    """The model's config with its vocabulary, which may be the tokenizer's, filled in."""
    from data.flag_checks import vocabulary_of

    size = vocabulary_of(config.data, config.model.vocab_size)
    return dataclasses.replace(config.model, vocab_size=size)


def main(argv: Sequence[str] | None = None) -> int:
    return start.start(RunConfig, argv, problems, train)


def train(config: RunConfig, world: World) -> int:
    import torch

    from core.run import Inputs, build_grid, layout_facts, run
    from models.gpt import build_stages

    model = with_vocabulary(config)
    grid = build_grid(config.parallel, world)
    placement = config.parallel.placement(model.num_layers)
    stages = build_stages(
        model,
        grid,
        placement=[placement.layers_of(stage) for stage in range(placement.stages)],
        micro_batch_size=config.train.micro_batch_size,
        sequence_parallel=config.parallel.sequence_parallel,
        seed=config.train.seed,
        dtype=torch.float64 if model.fp64 else torch.float32,
    )
    needs = set().union(*(stage.needs for stage in stages))
    size = sum(parameters(model).values())
    inputs = Inputs(
        stages=stages,
        open_data=functools.partial(open_data, config, model, grid, needs),
        record=to_json(config),
        model_record=model.identity(),
        flops_per_token=flops_per_token(model),
        facts=[
            *config.notices,
            f"GPT of {size:,} parameters, {model.num_layers} layers, vocabulary "
            f"{model.vocab_size:,} padded to {model.padded_vocab_size(grid.tp.size):,}",
            *layout_facts(world, grid, placement),
        ],
        stop_requested=world.stop_requested,
        at_step=world.at_step,
        progress_bar=sys.stderr.isatty(),
    )
    return start.finish(world, run(config, grid, inputs))


def open_data(
    config: RunConfig, model: GPTConfig, grid: ProcessGrid, needs: set[str], record, consumed: int
) -> Data:
    """What this rank's stages need of training, validation and test samples; tp rank 0 reads.

    record, consumed: of the checkpoint
    """
    from core.run import Data, Feeder, writes_first
    from data.batches import microbatches
    from data.from_flags import Opening, gpt_sets

    given = Opening(
        seq_length=model.seq_length,
        vocab_size=model.vocab_size,
        seed=config.train.seed,
        evaluates=evaluates(config),
        record=record,
        consumed=consumed,
        writes_cache=writes_first(config.data.data_cache_path, grid.tp.rank == 0, grid.world),
    )
    integers = [n for n in ("tokens", "labels", "position_ids", "sample") if n in needs]
    floats = [n for n in ("loss_mask",) if n in needs]
    if config.data.reset_attention_mask or config.data.document_attention_mask:
        integers.append("document_ids")
    feeder = Feeder(grid, microbatches, config.train.micro_batch_size, integers, floats)
    return Data.of(gpt_sets(config.data, given), feeder, config.train.samples(grid.shape.dp))


if __name__ == "__main__":
    sys.exit(main())
