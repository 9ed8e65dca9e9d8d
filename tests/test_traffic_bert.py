"""BERT's bytes: they depend on how many tokens are to be guessed, and on nothing else of the data.

Predicted from those counts, call by call, they equal the ledger of a training step.
"""

from collections import Counter
from dataclasses import astuple, replace

import pytest

from core.data_parallel.layout import Bucket
from core.grid import RankGrid
from core.traffic import BucketSizes, Sizes, StageSizes, step_traffic
from data.mock import MockBertDataset
from models.bert import BertStage
from models.config import BertConfig
from models.flops import bert_parameters
from tests.test_traffic import CHUNK, second_step
from tests.training import Layout

BERT = BertConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    vocab_size=50,
    make_vocab_size_divisible_by=2,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    mask_prob=0.3,
)
TP2 = Layout(tp=2)
SP2 = Layout(tp=2, sequence_parallel=True)
CASES = {
    "tp2": (2, BERT, TP2),
    "tp2-sp": (2, BERT, SP2),
    "tp2-dp2-sp": (4, BERT, replace(SP2, micro_batch_size=4)),
    "pre": (2, replace(BERT, norm_placement="pre"), SP2),
    "one-head": (2, replace(BERT, bert_no_binary_head=True), SP2),
    **{mode: (2, replace(BERT, loss_mode=mode), SP2) for mode in ("one-shot", "split", "unfused")},
}


def masked_tokens(model: BertConfig, layout: Layout, dp: int, dp_rank: int) -> list[int]:
    """To be guessed in each microbatch of the second step, which takes samples 8 to 15."""
    data = MockBertDataset(model.vocab_size, model.seq_length, 1)
    size = layout.micro_batch_size
    starts = range(8 + dp_rank * size, 16, dp * size)
    return [
        sum(int(data[n]["loss_mask"].sum()) for n in range(start, start + size)) for start in starts
    ]


def sizes_of(
    model: BertConfig, layout: Layout, dp: int, buckets: list[Bucket], dp_rank: int
) -> Sizes:
    parts, h = bert_parameters(model), model.hidden_size
    outside = ("position_embeddings", "token_types", "norms")
    shared = sum(parts[name] for name in outside) + 2 * model.num_layers * h  # row linears' biases
    slots = [slot for bucket in buckets for slot in bucket.slots if slot.axis == "tp"]
    assert sum(slot.stop - slot.start for slot in slots) == shared * layout.sequence_parallel
    mine = tuple(BucketSizes.of(bucket, dp_rank, 1) for bucket in buckets)
    return Sizes(
        seq=model.seq_length,
        micro_batch=layout.micro_batch_size,
        hidden=h,
        stages=(StageSizes(model.num_layers, mine),),
        microbatches=8 // (layout.micro_batch_size * dp),
        sequence_parallel=layout.sequence_parallel,
        loss_mode={"auto": "pipelined"}.get(model.loss_mode, model.loss_mode),
        loss_chunk=CHUNK * layout.tp,
        masked=tuple(masked_tokens(model, layout, dp, dp_rank)),
        reports=len(BertStage.reports),
        batch_integers=4,
        batch_samples=1 + model.binary_head,
    )


@pytest.mark.parametrize("name", CASES)
def test_prediction_equals_the_ledger(ranks, name):
    size, model, layout = CASES[name]
    grid = RankGrid.fit(size, tp=layout.tp)
    for rank, (measured, _, seen, buckets) in enumerate(
        ranks.run(second_step, model, layout, size=size)
    ):
        dp_rank = grid.coord(rank).dp
        sizes = sizes_of(model, layout, grid.dp, buckets, dp_rank)
        assert len(set(sizes.masked)) > 1 or len(sizes.masked) == 1
        predicted = {key: astuple(total) for key, total in step_traffic(sizes, grid).items()}
        assert measured == predicted
        by_op: Counter = Counter()
        for (_, op), (calls, _, _) in measured.items():
            by_op[op] += calls
        assert by_op == seen
