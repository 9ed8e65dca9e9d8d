"""How many bytes a training step moves, before it has run: arithmetic on sizes, grid and plan.

Pure: standard library only. `step_traffic` predicts, call by call, what the ledger of one rank will
hold; a test asserts equality, so a collective added by accident fails it. Works for 16,384 ranks on
a laptop.

Per microbatch and layer, with S = s b h bytes, the tensor-parallel group of t ranks sees

    tensor parallel        forward 2 all-reduce                   backward 2 all-reduce
    + sequence parallel    forward 2 gather + 2 reduce-scatter    backward the same, and the inputs
                           of the two column-parallel linears gathered again for their gradients

that is 8 (t-1)/t S and 10 (t-1)/t S on the wire: sequence parallelism moves 25 % more. A layer that
is computed again in backward adds its forward once more, and one gather of S where its saved input
is cut over tp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from core.comm.ledger import Total, wire_bytes
from core.data_parallel.config import Strategy
from core.data_parallel.layout import Bucket
from core.data_parallel.memory import is_of_blocks
from core.grid import RankGrid
from core.pipeline_parallel.actions import RECEIVES, SENDS, Action


@dataclass(frozen=True)
class BucketSizes:
    """Parameters that travel together over dp. Counts of elements include padding.

    length             of all dp ranks' parts
    shared_over_tp     of those that this rank sums, the ones that are then added over tp
    shared_over_embed  likewise over the two stages that hold one table
    in_blocks          of a block, which is used in turn
    """

    length: int
    shared_over_tp: int = 0
    shared_over_embed: int = 0
    in_blocks: bool = True

    @classmethod
    def of(cls, bucket: Bucket, rank: int, ways: int) -> BucketSizes:
        """As dp rank `rank` sees it; ways: of how many parts it keeps one, 1 where it keeps all."""
        mine = bucket.part(rank, ways) if ways > 1 else None
        tp, embed = (sum(b - a for a, b in bucket.shared(x, mine)) for x in ("tp", "embed"))
        return cls(bucket.length, tp, embed, is_of_blocks(bucket))


@dataclass(frozen=True)
class StageSizes:
    """One stage.

    layers
    buckets      its parameters
    first, last  it has the embedding; it has the output layer and the loss
    again        attentions and MLPs whose forward runs once more: 2 for a recomputed layer
    cut_inputs   units of recomputed layers whose saved input is cut over tp
    """

    layers: int
    buckets: tuple[BucketSizes, ...]
    first: bool = True
    last: bool = True
    again: int = 0
    cut_inputs: int = 0


@dataclass(frozen=True)
class Sizes:
    """What the traffic of a step depends on. Counts are elements unless said.

    seq, micro_batch, hidden
    stages              those of this rank
    bytes_per_element   of activations
    bytes_between       of an element that stages send; None: the same
    bytes_per_loss      of the loss's messages
    loss_mode           how the output layer and its loss are computed (core.tensor_parallel)
    loss_chunk          most tokens that the fused modes work on at once, of one rank's rows under
                        sequence parallelism; None: all of them
    masked              for BERT, the tokens to be guessed in each microbatch of this rank, which
                        alone reach the output layer; None: all tokens do
    reports             sums that the model reports
    batch_integers      names of int64 arrays [b, s] in a batch
    batch_samples       names of int64 arrays [b]
    batch_floats        names of float32 arrays [b, s]
    sharding            --data-parallel-sharding-strategy
    bytes_per_gradient  between dp ranks, of all but those shared with other axes
    bytes_per_sum       of a gradient sum
    bytes_per_parameter between dp ranks
    """

    seq: int
    micro_batch: int
    hidden: int
    stages: tuple[StageSizes, ...]
    microbatches: int
    sequence_parallel: bool = False
    bytes_per_element: int = 4
    bytes_between: int | None = None
    bytes_per_loss: int = 4
    loss_mode: Literal["pipelined", "one-shot", "split", "unfused"] = "pipelined"
    loss_chunk: int | None = None
    masked: tuple[int, ...] | None = None
    reports: int = 2
    sharding: Strategy = "no_shard"
    bytes_per_gradient: int = 4
    bytes_per_sum: int = 4
    bytes_per_parameter: int = 4
    batch_integers: int = 3
    batch_samples: int = 1
    batch_floats: int = 1


def over_dp(
    buckets: Sequence[BucketSizes],
    ways: int,
    sharding: Strategy,
    microbatches: int,
    *,
    bytes_per_gradient: int,
    bytes_per_parameter: int,
) -> tuple[int, int]:
    """Bytes on the wire of one of `ways` ranks in a step: of gradients, of parameters."""
    sizes = Sizes(
        seq=0,
        micro_batch=0,
        hidden=0,
        stages=(StageSizes(0, tuple(buckets)),),
        microbatches=microbatches,
        sharding=sharding,
        bytes_per_gradient=bytes_per_gradient,
        bytes_per_parameter=bytes_per_parameter,
    )

    def wire(calls: Iterator[Call]) -> int:
        return sum(wire_bytes(op, ways, size) for group, op, size in calls if group == "dp_cp")

    return wire(_gradients(sizes)), wire(_parameters(sizes))


SIZES_ROW = 8 * 9  # bytes: the number of dimensions and eight sizes, int64
Call = tuple[str, str, int]  # group, operation, payload in bytes


def step_traffic(
    sizes: Sizes, grid: RankGrid, row: Sequence[Action] = ()
) -> dict[tuple[str, str], Total]:
    """(group, operation) -> calls and bytes of one training step on one rank.

    row: what this rank does in the pipeline's plan; none is needed where pp is 1.
    """
    widths = {"tp": grid.tp, "dp_cp": grid.dp * grid.cp, "pp": grid.pp, "world": grid.size}
    widths["embed"] = min(grid.pp, 2)
    totals: dict[tuple[str, str], Total] = {}
    for group, op, payload in (*_calls(sizes, grid.tp), *_transfers(sizes, grid.tp, row)):
        if widths[group] == 1:
            continue
        total = totals.setdefault((group, op), Total())
        total.calls += 1
        total.payload += payload
        total.wire += wire_bytes(op, widths[group], payload)
    return totals


def _calls(z: Sizes, tp: int) -> Iterator[Call]:
    for microbatch in range(z.microbatches):
        yield from _batch(z)
        for stage in z.stages:
            if stage.first:
                yield from _embedding(z)
            for _ in range(2 * stage.layers):  # attention, MLP
                yield from _sublayer_forward(z)
                yield from _sublayer_backward(z)
            for _ in range(stage.again):
                yield from _sublayer_forward(z)
            for _ in range(stage.cut_inputs):
                yield "tp", "all_gather", _activation(z)
            if stage.last:
                yield from _output(z, tp, microbatch)
    for group in ("dp_cp", "pp"):
        yield group, "all_reduce", z.reports * 8  # loss, tokens and what else there is, float64
    yield from _gradients(z)
    yield from _parameters(z)
    for group in ("tp", "pp", *(() if z.sharding == "no_shard" else ("dp_cp",))):
        yield group, "all_reduce", 8  # the squared norm, float64
    yield "world", "all_reduce", 8  # stop flag


def _gradients(z: Sizes) -> Iterator[Call]:
    """All over dp, once a step, or once a microbatch where gradients are not kept; then what other
    axes share, in one message each."""
    op = "all_reduce" if z.sharding == "no_shard" else "reduce_scatter"
    times = z.microbatches if z.sharding in ("optim_grads", "optim_grads_params") else 1
    buckets = [bucket for stage in z.stages for bucket in stage.buckets]
    for bucket in buckets * times:
        yield "dp_cp", op, bucket.length * z.bytes_per_gradient
    for group, count in (
        ("tp", sum(bucket.shared_over_tp for bucket in buckets)),
        ("embed", sum(bucket.shared_over_embed for bucket in buckets)),
    ):
        if count:
            yield group, "all_reduce", count * z.bytes_per_sum


def _parameters(z: Sizes) -> Iterator[Call]:
    """Updated parameters; where they are not kept, those of blocks before every forward and
    backward, the others once a step."""
    if z.sharding == "no_shard":
        return
    for bucket in (bucket for stage in z.stages for bucket in stage.buckets):
        comes_and_goes = z.sharding == "optim_grads_params" and bucket.in_blocks
        for _ in range(2 * z.microbatches if comes_and_goes else 1):
            yield "dp_cp", "all_gather", bucket.length * z.bytes_per_parameter


def _transfers(z: Sizes, tp: int, row: Sequence[Action]) -> Iterator[Call]:
    """One activation or its gradient, this rank's rows of it under sequence parallelism."""
    payload = _activation(replace(z, bytes_per_element=z.bytes_between or z.bytes_per_element))
    payload //= tp if z.sequence_parallel else 1
    for action in row:
        if action.op in SENDS + RECEIVES:
            yield "pp", "send" if action.op in SENDS else "recv", payload


def _activation(z: Sizes) -> int:
    return z.seq * z.micro_batch * z.hidden * z.bytes_per_element


def _batch(z: Sizes) -> Iterator[Call]:
    """broadcast_data: one row of sizes per array, then the arrays in one piece, per type."""
    rows = z.seq * z.micro_batch
    yield "tp", "broadcast", SIZES_ROW * (z.batch_integers + z.batch_samples)
    yield "tp", "broadcast", 8 * (z.batch_integers * rows + z.batch_samples * z.micro_batch)
    if z.batch_floats:
        yield "tp", "broadcast", SIZES_ROW * z.batch_floats
        yield "tp", "broadcast", 4 * z.batch_floats * rows


def _embedding(z: Sizes) -> Iterator[Call]:
    if z.sequence_parallel:
        yield "tp", "reduce_scatter", _activation(z)
        yield "tp", "all_gather", _activation(z)  # backward
    else:
        yield "tp", "all_reduce", _activation(z)


def _sublayer_forward(z: Sizes) -> Iterator[Call]:
    """A column-parallel linear, whose input is whole, and a row-parallel one: its output is summed.
    """
    if z.sequence_parallel:
        yield "tp", "all_gather", _activation(z)
        yield "tp", "reduce_scatter", _activation(z)
    else:
        yield "tp", "all_reduce", _activation(z)


def _sublayer_backward(z: Sizes) -> Iterator[Call]:
    if z.sequence_parallel:
        yield "tp", "all_gather", _activation(z)  # the row-parallel linear's gradient
    yield from _column_backward(z)


def _column_backward(z: Sizes) -> Iterator[Call]:
    """The input's gradient is summed."""
    if z.sequence_parallel:
        yield "tp", "all_gather", _activation(z)  # the input again, for the weight gradient
        yield "tp", "reduce_scatter", _activation(z)
    else:
        yield "tp", "all_reduce", _activation(z)


def _output(z: Sizes, tp: int, microbatch: int) -> Iterator[Call]:
    """Output layer and loss. Masked tokens are picked from the gathered sequence, whose gradient
    needs no sum, and go on as if there were no sequence parallelism."""
    tokens = z.seq * z.micro_batch
    if z.masked is not None:
        if z.sequence_parallel:
            yield "tp", "all_gather", _activation(z)
        z, tokens = replace(z, sequence_parallel=False), z.masked[microbatch]
    if z.loss_mode == "unfused":
        yield from _unfused_output(z, tokens)
    elif tokens:
        yield from _fused_output(z, tp, tokens)


def _unfused_output(z: Sizes, tokens: int) -> Iterator[Call]:
    """Output layer, then vocabulary-parallel cross entropy: the maxima, then two sums a token."""
    if z.masked is None:
        if z.sequence_parallel:
            yield "tp", "all_gather", _activation(z)
        yield from _column_backward(z)
    else:
        yield "tp", "all_reduce", tokens * z.hidden * z.bytes_per_element
    yield "tp", "all_reduce", tokens * z.bytes_per_loss
    yield "tp", "all_reduce", 2 * tokens * z.bytes_per_loss


def _fused_output(z: Sizes, tp: int, tokens: int) -> Iterator[Call]:
    """Output layer and loss in one, chunk by chunk of tokens.

    The hidden states travel as for a column-parallel linear: gathered in forward and once more in
    a mode that computes logits again, under sequence parallelism; their gradient is summed. The
    loss takes one number per token and rank and one more: with every chunk, or all at once.
    """
    strips = tp if z.sequence_parallel else 1
    mine = tokens // strips
    pieces = -(-mine // (z.loss_chunk or mine))
    step = -(-mine // pieces)  # of nearly one size
    chunks = [min(step, mine - start) * strips for start in range(0, mine, step)]
    row = z.hidden * z.bytes_per_element
    for count in chunks:
        if z.sequence_parallel:
            for _ in range(1 if z.loss_mode == "pipelined" else 2):
                yield "tp", "all_gather", count * row
        yield "tp", "reduce_scatter" if z.sequence_parallel else "all_reduce", count * row
    messages = [sum(chunks)] if z.loss_mode == "one-shot" else chunks
    for i, count in enumerate(messages, start=1):
        yield "tp", "all_gather", tp * (count + (i == len(messages))) * z.bytes_per_loss
