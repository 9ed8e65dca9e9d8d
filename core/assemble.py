"""From a recipe's config and the ranks to a run: grid, stages, feeds.

What pretrain_gpt.py and pretrain_bert.py do alike once torch is there. The model and the data sets
come from the recipe as functions. Read `carry_out` first. Neighbours: core/start.py (before),
core/run.py (after).
"""

from __future__ import annotations

import functools
import logging
import math
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from core.comm import Group, gather_objects
from core.config_record import to_json
from core.contradictions import NOTES, contradictions
from core.feed import Feed, Source
from core.grid import ParallelConfig, RankGrid
from core.pipeline_parallel.placement import Placement
from core.pipeline_parallel.stage import Stage
from core.process_grid import ProcessGrid
from core.run import Data, Inputs, run
from core.shard import shard_of
from core.train import Stopped

if TYPE_CHECKING:
    from core.launch import World


def carry_out(
    config: Any,
    model: Any,
    world: World,
    build_stages: Callable[..., Sequence[Stage]],
    open_data: Callable[[ProcessGrid, set[str], dict, int, Callable[[], None]], Data],
    *,
    title: str,
    parameters: int,
    flops_per_token: int,
) -> Stopped | None:
    """Build what the config of a recipe says and train it; returns as `run` does.

    model            its config, the vocabulary filled in
    build_stages     of the model, with build_stack's arguments
    open_data        (grid, names of the arrays that the stages look at, record of the data in the
                     checkpoint, samples consumed, poll) -> Data
    title            what is trained      parameters  how many it has
    """
    parallel = config.parallel
    grid = build_grid(parallel, world)
    world.knows_groups({group.name: group.ranks for group in grid.groups()})
    placement = parallel.placement(model.num_layers)
    stages = build_stages(
        model,
        grid,
        placement=[placement.layers_of(stage) for stage in range(placement.stages)],
        micro_batch_size=config.train.micro_batch_size,
        sequence_parallel=parallel.sequence_parallel,
        seed=config.train.seed,
        dtype=torch.float64 if model.fp64 else getattr(torch, config.precision.dtype),
        recompute=config.recompute,
    )
    needs = set().union(*(stage.needs for stage in stages))
    inputs = Inputs(
        stages=stages,
        open_data=functools.partial(open_data, grid, needs),
        record=to_json(config),
        model_record=model.identity(),
        tokens_per_sample=model.seq_length,
        flops_per_token=flops_per_token,
        facts=[
            *config.notices,
            *contradictions(config, NOTES),
            f"{title} of {parameters:,} parameters, {model.num_layers} layers, vocabulary "
            f"{model.vocab_size:,} padded to {model.padded_vocab_size(grid.tp.size):,}",
            *layout_facts(world, grid, placement),
            decay_fact(stages, grid),
        ],
        stop_requested=world.stop_requested,
        at_step=world.at_step,
        at_write=world.at_write,
        began=world.began,
        stops_at=world.stops_at,
        afterwards=world.afterwards(),
        progress_bar=world.has_terminal(),
    )
    return run(config, grid, inputs)


def build_grid(parallel: ParallelConfig, world: World) -> ProcessGrid:
    """The grid that the flags ask for: dp takes what tp and pp leave. Collective."""
    shape = RankGrid.fit(
        world.size,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        order=parallel.order,
    )
    return ProcessGrid.build(shape, world.group, world.device)


def layout_facts(world: World, grid: ProcessGrid, placement: Placement) -> list[str]:
    """Lines that say who takes part and, in a pipeline, which layers lie where."""
    shape = grid.shape
    return [
        f"{world.size} rank{'s' * (world.size > 1)} ({world.rule}): "
        f"tp {shape.tp} x dp {shape.dp} x pp {shape.pp} on {world.device.split(':')[0]}, "
        f"backend {world.backend}",
        *(str(placement).splitlines() if shape.pp > 1 else ()),
    ]


def decay_fact(stages: Sequence[Stage], grid: ProcessGrid) -> str:
    """What weight decay applies to, over the whole model. Collective over pp."""
    mine, frozen = {True: [0, 0], False: [0, 0]}, False  # parameters, tensors
    for stage in stages:
        for param in stage.parameters():
            shard = shard_of(param)
            if "embed" not in shard.sum_over or stage.is_first:  # a table that two stages hold
                decays = shard.decay and param.requires_grad
                mine[decays][0] += math.prod(shard.shape)
                mine[decays][1] += 1
                frozen |= not param.requires_grad
    ranks = gather_objects([mine[True], mine[False], frozen], grid.pp, tag="startup.decay")
    on, tensors = (sum(decaying[i] for decaying, _, _ in ranks) for i in (0, 1))
    off, others = (sum(rest[i] for _, rest, _ in ranks) for i in (0, 1))
    kinds = "biases and norms" + " and frozen ones" * any(frozen for *_, frozen in ranks)
    return (
        f"weight decay on {on:,} parameters in {tensors} matrices; "
        f"none on {off:,} in {others} {kinds}"
    )


def writes_first(folder: str | None, reads: bool, world: Group) -> bool:
    """Whether this rank is the first of those that read and see this very folder: it writes there
    what all of them lack. Collective; makes the folder. A folder that cannot be made is said once a
    node, and nobody writes there."""
    if folder is None:
        return False
    mine, problem = None, None
    if reads:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            found = os.stat(folder)
            mine = [socket.gethostname(), found.st_dev, found.st_ino]
        except OSError as error:
            problem = error.strerror
            mine = [socket.gethostname(), problem]
    seen = gather_objects(mine, world, tag="startup.cache")
    first = reads and seen.index(mine) == world.rank
    if first and problem:
        logging.getLogger(__name__).warning(
            "--data-cache-path %s cannot be made (%s): every start draws the order anew",
            folder,
            problem,
        )
    return first and problem is None


@dataclass(frozen=True)
class Feeder:
    """Makes a Feed of a data set: the arrays named, for this rank's samples; tp rank 0 reads.

    reader             (data set, micro batch, dp rank, dp size, microbatches to read ahead, names
                       of arrays besides the sample's number) -> a Feed's source
    integers, floats   names of int64 and float32 arrays
    """

    grid: ProcessGrid
    reader: Callable[[Any, int, int, int, int, set[str]], Source]
    micro_batch_size: int
    integers: Sequence[str]
    floats: Sequence[str]

    @property
    def names(self) -> set[str]:
        """Of the arrays that come out of samples; a sample's number comes by itself."""
        return {*self.integers, *self.floats} - {"sample"}

    def reads(self, known: Iterable[str] = ()) -> bool:
        """Whether this rank looks into samples for more than what is known without them; in the
        middle of a pipeline it may not."""
        return self.grid.tp.rank == 0 and bool(self.names.difference(known))

    def __call__(self, dataset: Any, ahead: int = 0) -> Feed:
        grid, source = self.grid, None
        if grid.tp.rank == 0:
            place = (grid.dp_cp.rank, grid.dp_cp.size)
            source = self.reader(dataset, self.micro_batch_size, *place, ahead, self.names)
        return Feed(source, grid.tp, grid.device, integers=self.integers, floats=self.floats)
