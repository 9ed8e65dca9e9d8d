"""What a run's memory goes to, by rank: predicted before the first step, measured in the second.

Parameters, gradients and optimizer state are arithmetic on buckets (core/data_parallel/memory.py);
what autograd keeps of a microbatch, and the buffer of the output layer and its loss, each stage
predicts itself, and the plan says how many microbatches are in flight. Measured are the tensors
themselves; what autograd keeps is counted while the second step runs, on a GPU without the graphs
that a recomputation makes there (its threads are not watched).

Read `predicted`, `measured`, then `MemoryReport`, which core/run.py tells of every step.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from core.comm import gather_objects
from core.data_parallel.memory import state_bytes
from core.saved_activations import SavedActivations
from core.train import Trainer

MEASURED_STEP = 2  # of this run: in the first one buffers are made
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
    return {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.masters + state.moments,
        "passing": state.passing,
        "activations": executor.most_live * kept + rises,
        "loss buffer": max(stage.loss_bytes for stage in stages),
    }


def measured(trainer: Trainer, saved: SavedActivations) -> Bytes:
    """The same of the tensors that are there; without what passes."""
    memories, parts = trainer.replicas.memories, trainer.optimizer.parts
    masters = [p.master for m, p in zip(memories, parts, strict=True) if p.master is not m.kept]
    return {
        "parameters": _behind(*(t for m in memories for t in (m.params, m.kept))),
        "gradients": _behind(*(t for m in memories for t in (m.grads, m.reduced))),
        "optimizer": _behind(*masters, *(x for p in parts for x in p.arrays.values())),
        "activations": saved.most,
    }


def _behind(*tensors: Tensor | None) -> int:
    """Memory behind the tensors, each piece once."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak(device: torch.device) -> tuple[str, int]:
    """What this process took at most: on its GPU, or in the machine's memory."""
    if device.type != "cpu":
        return "allocated on the device at most", torch.accelerator.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return "resident at most", unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def line(title: str, parts: Bytes) -> str:
    """
    >>> line("memory", {"parameters": 3 << 20, "gradients": 1 << 19})
    'memory (MiB): parameters 3.0 | gradients 0.5 | sum 3.5'
    """
    cells = [f"{name} {size / 2**20:,.1f}" for name, size in parts.items()]
    return f"{title} (MiB): {' | '.join([*cells, f'sum {sum(parts.values()) / 2**20:,.1f}'])}"


class MemoryReport:
    """Lines about rank 0 and, where another is predicted to need more, the rank that needs most.

    A context manager around the steps; entering it is collective. `at_step` is told of every step
    before it begins, and hands that on.
    """

    def __init__(
        self, trainer: Trainer, say: Callable[[str], None], at_step: Callable[[int], None]
    ) -> None:
        self._trainer, self._say, self._then = trainer, say, at_step
        self._is_writer = trainer.grid.world.rank == 0
        self._steps = 0
        self._saved: SavedActivations | None = None

    def __enter__(self) -> MemoryReport:
        world = self._trainer.grid.world
        ranks = gather_objects(predicted(self._trainer), world, tag="startup.memory")
        self._say(line("memory of rank 0, predicted", ranks[0]))
        most = max(range(len(ranks)), key=lambda rank: sum(ranks[rank].values()))
        if sum(ranks[most].values()) > sum(ranks[0].values()):
            self._say(line(f"memory of rank {most}, which needs most, predicted", ranks[most]))
        return self

    def __exit__(self, *error: object) -> None:
        self._end_watch(tells=error == (None, None, None))

    def at_step(self, step: int) -> None:
        self._then(step)
        if not self._is_writer:
            return
        self._end_watch()
        self._steps += 1
        if self._steps == MEASURED_STEP:
            held = [memory.params for memory in self._trainer.replicas.memories]
            self._saved = SavedActivations(held).__enter__()

    def _end_watch(self, tells: bool = True) -> None:
        """Ends the watch over a step, if it is under way, and tells what was seen."""
        if self._saved is None:
            return
        saved, self._saved = self._saved, None
        saved.__exit__(None, None, None)
        if not tells:
            return
        title = f"memory of rank 0, measured in step {MEASURED_STEP} of this run"
        what, size = peak(self._trainer.grid.device)
        found = line(title, measured(self._trainer, saved))
        self._say(f"{found}; {what} {size / 2**20:,.1f}")
