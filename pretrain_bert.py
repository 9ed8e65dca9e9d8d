"""Pretrain a BERT: argv -> config -> place -> grid -> stages -> run.

    python pretrain_bert.py --mock-data                                      a tiny model, no files
    python pretrain_bert.py --nproc 4 --tensor-model-parallel-size 2 --mock-data
    torchrun --nproc-per-node 8 pretrain_bert.py <Megatron's flags>

Documents are made by scripts/preprocess_data.py --split-sentences. This file is the recipe and is
meant to be copied; pretrain_gpt.py is its twin. Everything up to `train` runs without torch, and
all problems are reported together, before any process group exists.
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
from data.config import BertDataConfig
from data.flag_checks import with_vocabulary
from models.config import BertConfig
from models.flops import bert_flops_per_token, bert_parameters
from models.recompute import RecomputeConfig

if TYPE_CHECKING:
    from core.launch import World
    from core.process_grid import ProcessGrid
    from core.run import Data

INTEGERS = ("tokens", "labels", "token_types", "padding_mask", "is_random", "sample")
FLOATS = ("loss_mask",)


@recipe
@dataclasses.dataclass(kw_only=True)
class RunConfig:
    model: BertConfig
    recompute: RecomputeConfig
    parallel: ParallelConfig
    data_parallel: DataParallelConfig
    precision: PrecisionConfig
    data: BertDataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    launch: LaunchConfig


def problems(config: RunConfig) -> Iterator[str]:
    """What the sections cannot see on their own: ranks, tokenizer, files."""
    model = with_vocabulary(config.model, config.data)
    yield from start.rank_problems(config)
    yield from config.recompute.norm_problems(config.model.norm_placement)
    yield from flag_checks.tokenizer_problems(config.data, config.model.vocab_size)
    yield from flag_checks.data_problems(
        config.data,
        model.seq_length,
        model.vocab_size if (model.vocab_size or 0) > 0 else None,
        evaluates=config.train.eval_interval is not None and start.evaluates(config),
        pairs=model.binary_head,
    )
    yield from start.checkpoint_problems(config, model, bert_parameters)


def main(argv: Sequence[str] | None = None) -> int:
    return start.start(RunConfig, argv, problems, train)


def train(config: RunConfig, world: World) -> int:
    from core.assemble import carry_out
    from models.bert import build_stages

    model = with_vocabulary(config.model, config.data)
    stopped = carry_out(
        config,
        model,
        world,
        build_stages,
        functools.partial(open_data, config, model),
        title="BERT",
        parameters=sum(bert_parameters(model).values()),
        flops_per_token=bert_flops_per_token(model),
    )
    return start.finish(world, stopped)


def open_data(
    config: RunConfig,
    model: BertConfig,
    grid: ProcessGrid,
    needs: set[str],
    record: dict,
    consumed: int,
    poll: Callable[[], None],
) -> Data:
    """Training, validation and test samples, as far as this rank's stages look at them.

    record, consumed: of the checkpoint; poll: called while indices are built, ends that by raising
    """
    from core.assemble import Feeder
    from core.run import Data
    from data.from_flags import Opening, bert_sets
    from data.read_ahead import ReadAhead

    integers, floats = ([name for name in names if name in needs] for names in (INTEGERS, FLOATS))
    feeder = Feeder(grid, ReadAhead, config.train.micro_batch_size, integers, floats)
    given = Opening(
        seq_length=model.seq_length,
        vocab_size=model.vocab_size,
        seed=config.train.seed,
        evaluates=start.evaluates(config),
        record=record,
        consumed=consumed,
        reads=feeder.reads(),
        poll=poll,
    )
    sets = bert_sets(config.data, given, binary_head=model.binary_head, mask_prob=model.mask_prob)
    return Data.of(sets, feeder, config.train.samples(grid.shape.dp))


if __name__ == "__main__":
    sys.exit(main())
