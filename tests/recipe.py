"""Whole runs of the recipes without starting processes: flags in, what they wrote out.

`run_recipe` is sent to ranks by the tests; it does everything that the command line does between
reading the flags and leaving, on the ranks' own world. The same function on `Group.single` is a run
of one process.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from core.checkpoint.reader import Checkpoint, open_checkpoint
from core.comm import Group
from core.config import parse
from data.indexed import IndexedBuilder

TINY = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 50
    --make-vocab-size-divisible-by 2 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3
    --eval-iters 0 --log-interval 1 --mock-data --no-progress-bar""".split()


@dataclass
class StandInWorld:
    """What launch.World is to the recipe."""

    group: Group
    device: str = "cpu"
    rule: str = "test"
    backend: str = "gloo"
    steps: list[int] = field(default_factory=list)
    reports: list[tuple[str, str]] = field(default_factory=list)
    members: dict[str, Sequence[int]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    def stop_requested(self) -> str | None:
        return None

    def stops_at(self) -> float | None:
        return None

    def afterwards(self) -> str:
        return ""

    def has_terminal(self) -> bool:
        return False

    def knows_groups(self, members: Mapping[str, Sequence[int]]) -> None:
        self.members.update(members)

    def at_step(self, step: int) -> None:
        self.steps.append(step)

    def at_write(self, seconds: float) -> None:
        pass

    def report(self, state: str, reason: str = "") -> None:
        self.reports.append((state, reason))


def run_recipe(
    world: Group, *flags: object, script: str = "pretrain_gpt"
) -> tuple[int, str]:
    """(exit code, what was printed) of a run with TINY's flags and these; later ones win."""
    recipe = importlib.import_module(script)
    config = parse(recipe.RunConfig, [*TINY, *map(str, flags)])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = recipe.train(config, StandInWorld(world))
    return code, out.getvalue()


def write_corpus(prefix: Path | str, documents: Iterable[Sequence[int]]) -> None:
    """A .bin/.idx pair."""
    with IndexedBuilder(prefix, np.uint16) as builder:
        for tokens in documents:
            builder.add(np.asarray(tokens, np.int64))


def rows(metrics: Path, kind: str = "train") -> list[dict]:
    """A metrics file's rows of one kind, without what a clock has measured."""
    timed = ("step_time_s", "tokens_per_s", "tflops_per_rank")
    found = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in timed} for row in found if row["kind"] == kind
    ]


def contents(folder: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole: weights and moments."""
    checkpoint: Checkpoint = open_checkpoint(folder, step)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different
