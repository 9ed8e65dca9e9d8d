"""How many bytes a training step moves, before it has run: plain arithmetic on sizes and grid.

Pure: standard library only. `step_traffic` predicts, call by call, what the ledger of one rank will
hold; a test asserts equality, so a collective added by accident fails it. Works for 16,384 ranks on
a laptop.

Per microbatch and layer, with S = s b h bytes, the tensor-parallel group of t ranks sees

    tensor parallel        forward 2 all-reduce                   backward 2 all-reduce
    + sequence parallel    forward 2 gather + 2 reduce-scatter    backward the same, and the inputs
                           of the two column-parallel linears gathered again for their gradients

that is 8 (t-1)/t S and 10 (t-1)/t S on the wire: sequence parallelism moves 25 % more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from core.comm.ledger import Total, wire_bytes
from core.grid import RankGrid


@dataclass(frozen=True)
class Sizes:
    """What the traffic of a step depends on. Counts are elements unless said.

    seq, micro_batch, hidden, layers
    bytes_per_element   of activations
    bytes_per_loss      of the loss's reductions
    batch_integers      names of int64 arrays [b, s] in a batch
    batch_samples       names of int64 arrays [b]
    batch_floats        names of float32 arrays [b, s]
    parameters          of this rank, padding included
    shared_over_tp      of these, the ones whose gradients are added over tp
    bytes_per_gradient  of the gradient buffer
    """

    seq: int
    micro_batch: int
    hidden: int
    layers: int
    microbatches: int
    parameters: int
    shared_over_tp: int
    sequence_parallel: bool = False
    bytes_per_element: int = 4
    bytes_per_loss: int = 4
    bytes_per_gradient: int = 4
    batch_integers: int = 3
    batch_samples: int = 1
    batch_floats: int = 1


Call = tuple[str, str, int]  # group, operation, payload in bytes


def step_traffic(sizes: Sizes, grid: RankGrid) -> dict[tuple[str, str], Total]:
    """(group, operation) -> calls and bytes of one training step on one rank; pp must be 1."""
    widths = {"tp": grid.tp, "dp_cp": grid.dp * grid.cp, "world": grid.size}
    totals: dict[tuple[str, str], Total] = {}
    for group, op, payload in _calls(sizes):
        if widths[group] == 1:
            continue
        total = totals.setdefault((group, op), Total())
        total.calls += 1
        total.payload += payload
        total.wire += wire_bytes(op, widths[group], payload)
    return totals


def _calls(z: Sizes) -> Iterator[Call]:
    for _ in range(z.microbatches):
        yield from _batch(z)
        yield from _embedding(z)
        for _ in range(z.layers):
            yield from _layer(z)
        yield from _output(z)
    yield "dp_cp", "all_reduce", 2 * 8  # loss and token sums, float64
    if z.shared_over_tp:
        yield "tp", "all_reduce", z.shared_over_tp * z.bytes_per_gradient
    yield "dp_cp", "all_reduce", z.parameters * z.bytes_per_gradient
    yield "tp", "all_reduce", 8  # the squared norm, float64
    yield "world", "all_reduce", 8  # stop flag


def _activation(z: Sizes) -> int:
    return z.seq * z.micro_batch * z.hidden * z.bytes_per_element


def _batch(z: Sizes) -> Iterator[Call]:
    """broadcast_data: the sizes of the arrays, then the arrays in one piece, per element type."""
    rows = z.seq * z.micro_batch
    yield "tp", "broadcast", 0
    yield "tp", "broadcast", 8 * (z.batch_integers * rows + z.batch_samples * z.micro_batch)
    yield "tp", "broadcast", 0
    yield "tp", "broadcast", 4 * z.batch_floats * rows


def _embedding(z: Sizes) -> Iterator[Call]:
    if z.sequence_parallel:
        yield "tp", "reduce_scatter", _activation(z)
        yield "tp", "all_gather", _activation(z)  # backward
    else:
        yield "tp", "all_reduce", _activation(z)


def _layer(z: Sizes) -> Iterator[Call]:
    for _ in range(2):  # attention, MLP
        yield from _column(z)
        if z.sequence_parallel:
            yield "tp", "reduce_scatter", _activation(z)  # row-parallel output
            yield "tp", "all_gather", _activation(z)  # its backward
        else:
            yield "tp", "all_reduce", _activation(z)


def _column(z: Sizes) -> Iterator[Call]:
    """A column-parallel linear: its input's gradient is summed in backward."""
    if z.sequence_parallel:
        yield "tp", "all_gather", _activation(z)
        yield "tp", "all_gather", _activation(z)  # again for the weight gradient
        yield "tp", "reduce_scatter", _activation(z)
    else:
        yield "tp", "all_reduce", _activation(z)


def _output(z: Sizes) -> Iterator[Call]:
    """Output layer and vocabulary-parallel cross entropy: largest logit, target's, sum of exp."""
    yield from _column(z)
    for _ in range(3):
        yield "tp", "all_reduce", z.seq * z.micro_batch * z.bytes_per_loss
