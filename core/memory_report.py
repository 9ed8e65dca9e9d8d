"""What a run's memory goes to, by rank: predicted before the first step, measured in the second.

Parameters, gradients and optimizer state are arithmetic on buckets (core/data_parallel/memory.py);
what autograd keeps of a microbatch, and what the output layer and its loss hold, each stage
predicts itself, and the plan says how many microbatches are in flight. Measured are the tensors
themselves: what is there after the second step, and what is there at most while it runs, each part
at its own worst moment (SavedActivations, LossMemory); on a GPU without the graphs that a
recomputation makes there (its threads are not watched). Of a split backward, what waits for W is
predicted as all that its microbatch kept: up to a fifth more, or a tenth less, than it is.
Every rank measures itself, and they gather once what they have found.

Read `predicted`, `Watch`, then `MemoryReport`, which core/run.py tells of every step.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.comm import gather_objects
from core.data_parallel.memory import state_bytes
from core.loss_memory import LossMemory
from core.pipeline_parallel.actions import Plan
from core.pipeline_parallel.simulate import live_activations
from core.saved_activations import SavedActivations
from core.train import Trainer

MEASURED_STEP = 2  # of this run: in the first one buffers are made
PLACE = "memory report"  # in the ledger: what is sent for it is no part of a step
LOSS, PROCESS = "loss buffer", "process, at most"
Bytes = dict[str, int]  # by part


def predicted(trainer: Trainer) -> Bytes:
    """Of this rank. passing: gradients and parameters that are not kept, at most (ZeRO 2 and 3)."""
    replicas, stages = trainer.replicas, trainer.stages
    memories = replicas.memories
    state = state_bytes(
        [memory.bucket for memory in memories],
        replicas.strategy,
        replicas.dp.size,
        parameter=memories[0].params.element_size() if memories else 4,
        total=memories[0].dtype.itemsize if memories else 4,
        moments=len(trainer.optimizer.recipe.arrays),
        overlaps=replicas.overlaps or replicas.gathers_late,
    )
    executor = trainer.executor(trainer.batch_schedule.microbatches(0))
    kept = sum(stage.saved_bytes[0] for stage in stages) // len(stages)
    rises = max(most - kept for kept, most in (stage.saved_bytes for stage in stages))
    loss_kept, loss_most = stages[-1].loss_bytes
    of_last = tuple(a for a in executor.row if a.stage == stages[-1].index)
    live = live_activations(Plan((of_last,), 1, 1))[0]
    return {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.masters + state.moments,
        "passing": state.passing,
        "activations": executor.most_live * kept + rises,
        LOSS: max(live - 1, 0) * loss_kept + loss_most,
    }


class Watch:
    """A context manager around a step: `found` is what it took of this rank's memory."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._memories = trainer.replicas.memories
        self._passing = 0
        self._loss = LossMemory(self._sums)
        held = [memory.params for memory in self._memories]
        self._passes = [m for m in self._memories if m.shards_params or m.shards_grads]
        self._saved = SavedActivations(held, self._loss.holds, self._look)

    def __enter__(self) -> Watch:
        for stage in self._trainer.stages:
            stage.watch_memory(self._loss, self._saved.keep)
        self._saved.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._saved.__exit__(None, None, None)
        for stage in self._trainer.stages:
            stage.watch_memory(None, None)

    def _sums(self) -> list[Tensor]:
        """Where gradients add up now."""
        return [memory.grads for memory in self._memories if memory.grads is not None]

    def _look(self) -> None:
        if self._passes:
            self._passing = max(self._passing, sum(m.passing_bytes for m in self._passes))

    def found(self) -> Bytes:
        """The parts of `predicted`, and the process's own worst moment."""
        memories, parts = self._memories, self._trainer.optimizer.parts
        masters = [p.master for m, p in zip(memories, parts, strict=True) if p.master is not m.kept]
        return {
            "parameters": _behind(*(t for m in memories for t in (m.params, m.kept))),
            "gradients": _behind(*(t for m in memories for t in (m.grads, m.reduced))),
            "optimizer": _behind(*masters, *(x for p in parts for x in p.arrays.values())),
            "passing": self._passing,
            "activations": self._saved.most,
            LOSS: self._loss.most,
            PROCESS: peak(self._trainer.grid.device),
        }


def _behind(*tensors: Tensor | None) -> int:
    """Memory behind the tensors, each piece once."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak(device: torch.device) -> int:
    """What this process took at most: on its GPU, or in the machine's memory."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def total(parts: Bytes) -> int:
    return sum(size for part, size in parts.items() if part != PROCESS)


def shown(ranks: Sequence[Bytes]) -> dict[int, str]:
    """rank -> why it is shown: the first that needs most, least, most for its loss, to 1 %; each if
    it is none of those before.

    >>> shown([{"parameters": 4, "loss buffer": 0}, {"parameters": 3, "loss buffer": 9}])
    {1: 'most', 0: 'least'}
    >>> shown([{"parameters": 400, "loss buffer": 0}] * 7 + [{"parameters": 401}])
    {0: 'each'}
    """
    sums = [total(parts) for parts in ranks]
    losses = [parts.get(LOSS, 0) for parts in ranks]
    if max(sums) <= 1.01 * min(sums):
        return {0: "each"}
    found = {_first_of_most(sums): "most"}
    found[next(rank for rank, size in enumerate(sums) if size <= 1.01 * min(sums))] = "least"
    if max(losses) > 1.01 * max(losses[rank] for rank in found):
        found[_first_of_most(losses)] = "loss"
    return found


def _first_of_most(sizes: Sequence[int]) -> int:
    return next(rank for rank, size in enumerate(sizes) if size >= 0.99 * max(sizes))


def table(columns: Sequence[tuple[str, dict[str, Bytes]]]) -> list[str]:
    """Lines of a table in MiB. A column is a heading and its parts by a second heading; parts that
    are zero everywhere have no line.

    >>> print(*table([("rank 0", {"predicted": {"parameters": 3 << 20, "passing": 0}})]), sep="\\n")
                             rank 0
                          predicted
      parameters               3.00
      sum                      3.00
    """
    every = [parts for _, kinds in columns for parts in kinds.values()]
    named = {part: None for parts in every for part in parts}
    rows = [part for part in named if any(parts.get(part) for parts in every)]
    digits = 2 if max(map(total, every)) < 100 << 20 else 1

    widths = [max(13, -(-(len(name) + 3) // len(kinds))) for name, kinds in columns]
    each = [width for width, (_, kinds) in zip(widths, columns, strict=True) for _ in kinds]

    def line(name: str, cells: Sequence[str], widths: Sequence[int] = each) -> str:
        found = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        return f"  {name:<16}" + "".join(found)

    def sizes(name: str, found: Sequence[int | None]) -> str:
        return line(name, ["" if n is None else f"{n / 2**20:,.{digits}f}" for n in found])

    heads = [width * len(kinds) for width, (_, kinds) in zip(widths, columns, strict=True)]
    lines = [
        line("", [name for name, _ in columns], heads),
        line("", [kind for _, kinds in columns for kind in kinds]),
    ]
    parts_of = [part for part in rows if part != PROCESS]
    lines += [sizes(part, [parts.get(part) for parts in every]) for part in parts_of]
    lines.append(sizes("sum", [total(parts) for parts in every]))
    if PROCESS in rows:
        lines.append(sizes(PROCESS, [parts.get(PROCESS) for parts in every]))
    return lines


class MemoryReport:
    """Two tables: before the steps what is predicted, after the second what was measured beside it.

    They show the rank that needs most and, where ranks differ, the one that needs least and the one
    with the loss, so that they are as long for a thousand ranks as for three. A context manager
    around the steps; entering it is collective, and so is the end of the second step, of which it
    hears at the next one's beginning or when it is left. `at_step` is told of every step before it
    begins, and hands that on.
    """

    def __init__(
        self, trainer: Trainer, say: Callable[[str], None], at_step: Callable[[int], None]
    ) -> None:
        self._trainer, self._say, self._then = trainer, say, at_step
        self._steps = 0
        self._watch: Watch | None = None

    def __enter__(self) -> MemoryReport:
        self._predicted = self._gathered(predicted(self._trainer), "startup.memory")
        self._tell("predicted", {"predicted": self._predicted})
        return self

    def __exit__(self, *error: object) -> None:
        self._end_watch(tells=error == (None, None, None))

    def at_step(self, step: int) -> None:
        self._then(step)
        self._end_watch()
        self._steps += 1
        if self._steps == MEASURED_STEP:
            self._watch = Watch(self._trainer).__enter__()

    def _end_watch(self, tells: bool = True) -> None:
        """Ends the watch over a step, if it is under way, and tells what was seen."""
        if self._watch is None:
            return
        watch, self._watch = self._watch, None
        watch.__exit__(None, None, None)
        if tells:
            found = self._gathered(watch.found(), "memory.measured")
            title = f"measured in step {MEASURED_STEP} of this run"
            self._tell(title, {"predicted": self._predicted, "measured": found})

    def _gathered(self, mine: Bytes, tag: str) -> list[Bytes]:
        world = self._trainer.grid.world
        with world.ledger.at(PLACE):
            return gather_objects(mine, world, tag=tag)

    def _tell(self, title: str, kinds: dict[str, list[Bytes]]) -> None:
        """kinds: heading -> every rank's parts; the last one says which ranks are shown."""
        grid = self._trainer.grid
        *_, decides = kinds.values()
        columns = []
        for rank, why in shown(decides).items():
            name = f"rank {rank}"
            if why == "each":
                name = name if grid.world.size == 1 else f"each of {grid.world.size} ranks"
            else:
                where = f" (pp {grid.shape.coord(rank).pp})" if grid.pp.size > 1 else ""
                name = f"{name}{where}, {why}"
            columns.append((name, {kind: every[rank] for kind, every in kinds.items()}))
        self._say("\n".join([f"memory in MiB, {title}", *table(columns)]))
