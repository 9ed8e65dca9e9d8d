"""Predicted bytes equal measured bytes: core.traffic against the ledger of a training step.

Call by call and byte by byte, for every group and operation, with and without sequence parallelism,
over data parallel ranks and microbatches, for every way to compute the loss. torch's dispatcher,
which sees every collective whoever issued it, is the witness that the ledger misses none.
"""

from collections import Counter
from dataclasses import astuple, replace
from typing import ClassVar

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from core.comm import Group
from core.comm.ledger import Ledger
from core.data_parallel.layout import Bucket
from core.grid import RankGrid
from core.tensor_parallel import output_loss_operands
from core.traffic import BucketSizes, Sizes, StageSizes, step_traffic
from core.train import Limits, TrainState, train
from models.config import GPTConfig
from models.flops import parameters
from tests.layouts import recomputed
from tests.training import GPT2, LLAMA, Layout, make_trainer

CHUNK = 5  # tokens: no divisor of the 32 of a microbatch of 2


class Silent:
    """A reporter that tells nobody."""

    def begin_step(self) -> None: ...
    def train(self, row: dict) -> None: ...
    def evaluation(self, row: dict) -> None: ...
    def message(self, text: str) -> None: ...


class Witness(TorchDispatchMode):
    """Counts the collectives that reach torch, under the ledger's names."""

    NAMES: ClassVar = {
        "allreduce_": "all_reduce",
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "broadcast_": "broadcast",
    }

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.name().removeprefix("c10d::")
            self.calls[self.NAMES.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


def second_step(world: Group, model: GPTConfig, layout: Layout) -> tuple[dict, dict, dict, list]:
    """Of the second training step: totals by (group, op), the same by tag, torch's count by op;
    and the buckets of the parameters."""
    usual = output_loss_operands.default_chunk
    output_loss_operands.default_chunk = lambda *_: CHUNK * layout.tp
    try:
        trainer, feed = make_trainer(world, model, layout)
        state = TrainState()
        with_limit = {"reporter": Silent(), "valid": None}
        train(trainer, state, feed, limits=Limits(last_iteration=1), **with_limit)
        with Witness() as witness:
            train(trainer, state, feed, limits=Limits(last_iteration=2), **with_limit)
    finally:
        output_loss_operands.default_chunk = usual
    ledger = trainer.grid.ledger
    buckets = [memory.bucket for memory in trainer.replicas.memories]
    return added_up(ledger, "group", "op"), added_up(ledger, "op", "tag"), witness.calls, buckets


def added_up(ledger: Ledger, *by: str) -> dict[tuple, tuple[int, int, int]]:
    """(calls, payload, wire) of step 2."""
    sums: dict[tuple, Counter] = {}
    for event in ledger.events(step=2):
        row = sums.setdefault(tuple(getattr(event, k) for k in by), Counter())
        row.update(calls=1, payload=event.payload, wire=event.wire)
    return {key: (row["calls"], row["payload"], row["wire"]) for key, row in sums.items()}


def sizes_of(
    model: GPTConfig, layout: Layout, dp: int, buckets: list[Bucket], dp_rank: int
) -> Sizes:
    """What core.traffic asks for, from the model's shape and, for the padding, its buckets."""
    tp, layers, h = layout.tp, model.num_layers, model.hidden_size
    parts = parameters(model)
    biases = 0 if model.disable_bias_linear else 2 * layers * h  # of the row-parallel linears
    tables = model.padded_vocab_size(tp) * h * (1 + model.untie_embeddings_and_output_weights)
    whole = biases + parts["norms"] + parts["position_embeddings"]
    cut = tables + parts["attention"] + parts["mlp"] - biases
    shared = whole if layout.sequence_parallel else 0
    if model.qk_layernorm and not layout.sequence_parallel:  # other heads on every rank
        shared = 2 * layers * model.head_dim
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert sum(slot.stop - slot.start for slot in slots) == whole + cut // tp
    assert sum(slot.stop - slot.start for slot in slots if slot.axis == "tp") == shared
    ways = 1 if layout.sharding == "no_shard" else dp
    mine = tuple(BucketSizes.of(bucket, dp_rank, ways) for bucket in buckets)
    return Sizes(
        seq=model.seq_length,
        micro_batch=layout.micro_batch_size,
        hidden=h,
        stages=(StageSizes(layers, mine, **recomputed(layout, range(layers))),),
        microbatches=8 // (layout.micro_batch_size * dp),
        sequence_parallel=layout.sequence_parallel,
        bytes_per_element=model.bytes_per_element,
        bytes_per_loss=model.bytes_per_element,
        sharding=layout.sharding,
        bytes_per_gradient=model.bytes_per_element,
        bytes_per_sum=model.bytes_per_element,
        bytes_per_parameter=model.bytes_per_element,
        loss_mode={"auto": "pipelined"}.get(model.loss_mode, model.loss_mode),
        loss_chunk=even_chunk(model.seq_length * layout.micro_batch_size, layout),
    )


def even_chunk(tokens: int, layout: Layout) -> int:
    """Chunks of nearly one size, CHUNK at most (CHUNK t where every rank holds all tokens)."""
    most = CHUNK
    if layout.sequence_parallel:
        tokens //= layout.tp
    else:
        most *= layout.tp
    return -(-tokens // -(-tokens // most))


SP = Layout(tp=2, sequence_parallel=True, micro_batch_size=2)
FULL = (("recompute_granularity", "full"),)
CUT = (*FULL, ("distribute_saved_activations", True))
FIRST = (*FULL, ("recompute_method", "block"), ("recompute_num_layers", 1))
PARTS = (("recompute_activations", True), ("recompute_modules", ("core_attn", "mlp", "layernorm")))
MODES = ("pipelined", "one-shot", "split", "unfused")
CASES = {
    "tp2": (2, GPT2, Layout(tp=2, micro_batch_size=4)),
    "tp2-sp": (2, GPT2, replace(SP, micro_batch_size=4)),
    "tp2-accumulation": (2, GPT2, Layout(tp=2, micro_batch_size=2)),
    "tp2-sp-accumulation": (2, GPT2, replace(SP, micro_batch_size=1)),
    "tp2-float64": (2, replace(GPT2, fp64=True), Layout(tp=2)),
    "dp2": (2, GPT2, Layout(micro_batch_size=2)),
    "tp2-dp2": (4, GPT2, Layout(tp=2, micro_batch_size=2)),
    "tp2-dp2-sp": (4, LLAMA, replace(SP, micro_batch_size=2)),
    "tp2-llama": (2, LLAMA, Layout(tp=2)),
    "dp2-optim": (2, GPT2, Layout(sharding="optim")),
    "dp4-optim-buckets": (4, GPT2, Layout(sharding="optim", bucket=4000, overlap=True)),
    "dp2-optim-grads": (2, GPT2, Layout(sharding="optim_grads", micro_batch_size=1)),
    "dp2-all-sharded": (2, LLAMA, Layout(sharding="optim_grads_params", overlap=True)),
    "tp2-dp2-sp-all-sharded": (4, GPT2, replace(SP, sharding="optim_grads_params")),
    "tp2-full": (2, GPT2, Layout(tp=2, recompute=FULL)),
    "tp2-sp-full": (2, LLAMA, replace(SP, recompute=FULL)),
    "tp2-cut": (2, GPT2, Layout(tp=2, recompute=CUT)),
    "tp2-units": (2, GPT2, Layout(tp=2, recompute=(*CUT, ("recompute_num_layers", 2)))),
    "tp2-first": (2, GPT2, Layout(tp=2, recompute=FIRST)),
    "tp2-sp-parts": (2, GPT2, replace(SP, recompute=PARTS)),
    "tp2-dp2-all-sharded-full": (
        4,
        replace(GPT2, num_layers=3),
        replace(SP, sharding="optim_grads_params", recompute=FULL),
    ),
    "dp2-all-sharded-units": (
        2,
        replace(GPT2, num_layers=5),
        Layout(
            sharding="optim_grads_params",
            overlap=True,
            recompute=(*FULL, ("recompute_num_layers", 2)),
        ),
    ),
    **{f"tp2-{mode}": (2, replace(GPT2, loss_mode=mode), Layout(tp=2)) for mode in MODES},
    **{f"tp2-sp-{mode}": (2, replace(GPT2, loss_mode=mode), SP) for mode in MODES},
}


@pytest.mark.parametrize("name", CASES)
def test_prediction_equals_the_ledger(ranks, name):
    size, model, layout = CASES[name]
    grid = RankGrid.fit(size, tp=layout.tp)
    results = ranks.run(second_step, model, layout, size=size)
    for rank, (measured, _, seen, buckets) in enumerate(results):
        sizes = sizes_of(model, layout, grid.dp, buckets, grid.coord(rank).dp)
        predicted = {key: astuple(total) for key, total in step_traffic(sizes, grid).items()}
        assert measured == predicted
        by_op: Counter = Counter()
        for (_, op), (calls, _, _) in measured.items():
            by_op[op] += calls
        assert by_op == seen


@pytest.mark.parametrize(
    ("layout", "forward", "backward"),
    [
        (Layout(tp=2, micro_batch_size=4), {"all_reduce": 2}, {"all_reduce": 2}),
        (
            replace(SP, micro_batch_size=4),
            {"all_gather": 2, "reduce_scatter": 2},
            {"all_gather": 4, "reduce_scatter": 2},  # two of the gathers make an input once more
        ),
    ],
    ids=["tp2", "tp2-sp"],
)
def test_collectives_of_a_layer(ranks, layout, forward, backward):
    """A layer costs Megatron's count, all of one size, in every layer."""
    microbatches = 2
    activation = GPT2.seq_length * layout.micro_batch_size * GPT2.hidden_size * 4
    for _, by_tag, _, _ in ranks.run(second_step, GPT2, layout, size=2):
        for layer in range(GPT2.num_layers):
            counts = {"forward": Counter(), "backward": Counter()}
            for (op, tag), (calls, payload, _) in by_tag.items():
                if tag.startswith(f"layers.{layer}."):
                    when = "backward" if tag.endswith((".grad", ".regather")) else "forward"
                    counts[when][op] += calls // microbatches
                    assert payload == calls * activation
            assert counts == {"forward": forward, "backward": backward}


def test_a_large_run_on_a_laptop():
    """16,384 ranks: arithmetic, no table. By hand: 2 layers, one microbatch, pure tp traffic."""
    sizes = Sizes(
        seq=8192,
        micro_batch=1,
        hidden=16384,
        stages=(StageSizes(layers=2, buckets=(BucketSizes(10**9),)),),
        microbatches=1,
        bytes_per_element=2,
    )
    totals = step_traffic(sizes, RankGrid.fit(16384, tp=8))
    activation = 8192 * 16384 * 2
    reductions = totals["tp", "all_reduce"]
    assert reductions.calls == 1 + 4 * 2 + 1 + 1
    assert reductions.payload == (1 + 4 * 2 + 1) * activation + 8
    assert totals["dp_cp", "all_reduce"].payload == 16 + 4 * 10**9
    assert totals["world", "all_reduce"].payload == 8
