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
import sys
from collections.abc import Iterator, Sequence

from core import launch
from core.checkpoint import preflight
from core.config import parse, recipe
from core.config_record import fingerprint, to_json
from core.grid import ParallelConfig
from core.layout_checks import run_problems
from core.optimizer.config import OptimizerConfig
from core.train_config import CheckpointConfig, LaunchConfig, LoggingConfig, TrainConfig
from data.config import DataConfig
from models.config import GPTConfig
from models.flops import flops_per_token, parameters


@recipe
@dataclasses.dataclass(kw_only=True)
class RunConfig:
    model: GPTConfig
    parallel: ParallelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    launch: LaunchConfig


def problems(config: RunConfig) -> Iterator[str]:
    """What the sections cannot see on their own: ranks, tokenizer, files."""
    from data import checks, from_flags

    sections = (config.model, config.parallel, config.data, config.optimizer, config.train)
    try:
        place = launch.find_here(config.launch.nproc)
    except launch.LaunchError as error:
        yield str(error)
    else:
        yield from run_problems(*sections, max(place.children, place.size))
    yield from from_flags.tokenizer_problems(config.data, config.model.vocab_size)
    model = with_vocabulary(config)
    evaluates = config.train.eval_interval is not None and config.train.eval_iters > 0
    if config.data.data_path and len(config.data.data_path) == 1:
        yield from checks.problems(
            config.data.data_path[0],
            model.seq_length,
            model.vocab_size if (model.vocab_size or 0) > 0 else None,
            config.data.split,
            needed=("train", "valid") if evaluates else ("train",),
        )
    # what a broken shape has no answer to is left out; the rest is said in the same message
    sound = model.vocab_size is not None and not any(model.problems())
    size = 3 * model.bytes_per_element * sum(parameters(model).values()) if sound else 0
    yield from preflight.problems(config.checkpoint, model.identity() if sound else None, size)


def with_vocabulary(config: RunConfig) -> GPTConfig:
    """The model's config with its vocabulary, which may be the tokenizer's, filled in."""
    from data.from_flags import vocabulary_of

    size = vocabulary_of(config.data, config.model.vocab_size)
    return dataclasses.replace(config.model, vocab_size=size)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    config = parse(RunConfig, argv, checks=[problems], report=is_first_rank())
    place = launch.find_here(config.launch.nproc)
    if place.children:
        return launch.supervise(place, argv)
    model = with_vocabulary(config)
    save = config.checkpoint.save
    with launch.launch(place, config.launch, fingerprint(config), status_dir=save) as world:
        return train(config, model, world)


def is_first_rank() -> bool:
    try:
        return launch.find_here().rank == 0
    except launch.LaunchError:
        return True  # every rank has the same complaint, and none knows its number


def train(config: RunConfig, model: GPTConfig, world: launch.World) -> int:
    import torch

    from core.grid import RankGrid
    from core.process_grid import ProcessGrid
    from core.run import Inputs, run
    from models.gpt import build_stages

    parallel = config.parallel
    shape = RankGrid.fit(
        world.size,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        order=parallel.order,
    )
    grid = ProcessGrid.build(shape, world.group, world.device)
    placement = parallel.placement(model.num_layers)
    stages = build_stages(
        model,
        grid,
        placement=[placement.layers_of(stage) for stage in range(placement.stages)],
        micro_batch_size=config.train.micro_batch_size,
        sequence_parallel=parallel.sequence_parallel,
        seed=config.train.seed,
        dtype=torch.float64 if model.fp64 else torch.float32,
    )
    size = sum(parameters(model).values())
    stopped = run(
        config,
        grid,
        Inputs(
            stages=stages,
            feeds=feeds(config, model, grid, set().union(*(stage.needs for stage in stages))),
            record=to_json(config),
            model_record=model.identity(),
            flops_per_token=flops_per_token(model),
            facts=[
                *config.notices,
                f"{world.size} rank{'s' * (world.size > 1)} ({world.rule}): "
                f"tp {shape.tp} x dp {shape.dp} x pp {shape.pp} on {world.device.split(':')[0]}, "
                f"backend {world.backend}",
                f"GPT of {size:,} parameters, {model.num_layers} layers, vocabulary "
                f"{model.vocab_size:,} padded to {model.padded_vocab_size(shape.tp):,}",
                *(str(placement).splitlines() if shape.pp > 1 else ()),
            ],
            stop_requested=world.stop_requested,
            at_step=world.at_step,
            progress_bar=sys.stderr.isatty(),
        ),
    )
    resumable = stopped is not None and not stopped.planned
    world.report("stopped" if resumable else "complete", stopped.why if stopped else "")
    return launch.STOPPED if resumable else 0


def feeds(config: RunConfig, model: GPTConfig, grid, needs: set[str]):
    """What this rank's stages need of training, validation and test samples; tp rank 0 reads."""
    from core.feed import Feed
    from data.batches import microbatches
    from data.from_flags import gpt_sets

    integers = [n for n in ("tokens", "labels", "position_ids", "sample") if n in needs]
    floats = [n for n in ("loss_mask",) if n in needs]
    if config.data.reset_attention_mask:
        integers.append("document_ids")
    sets = gpt_sets(config.data, model.seq_length, model.vocab_size, config.train.seed)

    def feed(dataset) -> Feed:
        def source(consumed: int, global_batch: int):
            micro = config.train.micro_batch_size
            return microbatches(
                dataset, consumed, global_batch, micro, grid.dp_cp.rank, grid.dp_cp.size
            )

        reads = grid.tp.rank == 0
        return Feed(
            source if reads else None, grid.tp, grid.device, integers=integers, floats=floats
        )

    return {split: feed(dataset) for split, dataset in sets.items()}


if __name__ == "__main__":
    sys.exit(main())
