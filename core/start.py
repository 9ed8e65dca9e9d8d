"""From a command line to ranks that train: what the recipes share before torch is imported.

    argv -> config -> place -> (the parent of --nproc starts ranks | this rank's world) -> train

Imports core's pure modules and core.launch; knows neither models nor data sets, which come as
sections of the config. Neighbours: core/run.py (what happens then), pretrain_gpt.py and
pretrain_bert.py (the recipes).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from core import launch
from core.checkpoint import preflight
from core.checkpoint_args import with_checkpoint_args
from core.config import parse
from core.config_record import fingerprint
from core.contradictions import contradictions
from core.layout_checks import run_problems
from core.optimizer.config import ARRAYS

Config = Any  # a recipe: sections model, parallel, data, optimizer, train, checkpoint, launch


def start(
    recipe: type,
    argv: Sequence[str] | None,
    problems: Callable[[Config], Iterator[str]],
    train: Callable[[Config, launch.World], int],
) -> int:
    """Run a recipe; returns the exit code. Everything wrong is said before any rank starts.

    problems  what the sections cannot see on their own
    train     makes grid and stages, and runs; called on every rank
    """
    report = is_first_rank()
    say = print if report else lambda line: None
    argv = with_checkpoint_args(recipe, sys.argv[1:] if argv is None else argv, say)
    config = parse(recipe, argv, checks=[problems], report=report)
    place = launch.find_here(config.launch.nproc)
    if place.children:
        return launch.supervise(place, argv)
    save = config.checkpoint.save
    with launch.launch(place, config.launch, fingerprint(config), status_dir=save) as world:
        return train(config, world)


def finish(world: launch.World, stopped: Any) -> int:
    """The exit code of a run that ended as core.run's `run` says, which status.json is told."""
    resumable = stopped is not None and not stopped.planned
    world.report("stopped" if resumable else "complete", stopped.why if stopped else "")
    return launch.STOPPED if resumable else 0


def is_first_rank() -> bool:
    try:
        return launch.find_here().rank == 0
    except launch.LaunchError:
        return True  # every rank has the same complaint, and none knows its number


def rank_problems(config: Config) -> Iterator[str]:
    """The sections against each other and against the ranks there will be."""
    sections = (config.model, config.parallel, config.data, config.optimizer, config.train)
    try:
        place = launch.find_here(config.launch.nproc)
    except launch.LaunchError as error:
        yield str(error)
    else:
        yield from run_problems(*sections, max(place.children, place.size))
    yield from contradictions(config)


def evaluates(config: Config) -> bool:
    """Whether an evaluation has anything to read."""
    return config.train.eval_iters > 0 or config.data.full_validation


def checkpoint_problems(
    config: Config, model: Any, parameters: Callable[[Any], dict[str, int]]
) -> Iterator[str]:
    """The folders to load from and save to. `model`: its config with the vocabulary filled in."""
    # what a broken shape has no answer to is left out; the rest is said in the same message
    sound = model.vocab_size is not None and not any(model.problems())
    arrays = 1 + len(ARRAYS[config.optimizer.optimizer]) * config.checkpoint.save_optim
    size = arrays * model.bytes_per_element * sum(parameters(model).values()) if sound else 0
    yield from preflight.problems(config.checkpoint, model.identity() if sound else None, size)
