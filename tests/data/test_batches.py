"""Microbatches: every sample once, whatever the layout."""

import numpy as np
import pytest

from data.batches import microbatch_samples, microbatches
from data.mock import MockGPTDataset


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_layout_changes_nothing(dp_size, micro_batch):
    consumed, global_batch = 24, 8
    ranks = [
        microbatch_samples(consumed, global_batch, micro_batch, rank, dp_size)
        for rank in range(dp_size)
    ]
    for m in range(global_batch // (micro_batch * dp_size)):
        joined = np.concatenate([rank[m] for rank in ranks])
        start = consumed + m * micro_batch * dp_size
        assert joined.tolist() == list(range(start, start + micro_batch * dp_size))


def test_arrays_are_stacked_and_numbered():
    data = MockGPTDataset(100, 16, seed=3)
    batches = list(microbatches(data, 40, 8, 2, dp_rank=1, dp_size=2))
    assert [batch["sample"].tolist() for batch in batches] == [[42, 43], [46, 47]]
    assert batches[0]["sample"].dtype == np.int64
    assert batches[1]["tokens"].shape == (2, 16)
    assert (batches[1]["tokens"][1] == data[47]["tokens"]).all()


def test_indivisible_batch_is_refused():
    with pytest.raises(ValueError, match="--global-batch-size 6 does not divide"):
        microbatch_samples(0, 6, 2, 0, 2)


def test_what_nobody_looks_at_is_not_read():
    """The middle of a GPT's pipeline needs the sample numbers only; a part is taken where the data
    set knows it, else the sample."""
    read = []

    class Data:
        def __getitem__(self, n: int) -> dict:
            read.append(n)
            return {"a": np.array(n), "b": np.array(-n)}

        def part(self, n: int, names) -> dict | None:
            return {"b": np.array(-n)} if set(names) == {"b"} else None

    def arrays(names) -> list[dict]:
        found = microbatches(Data(), 4, 2, 1, names=names)
        return [{k: v.tolist() for k, v in batch.items()} for batch in found]

    assert arrays(set()) == [{"sample": [4]}, {"sample": [5]}]
    assert arrays({"b"}) == [{"b": [-4], "sample": [4]}, {"b": [-5], "sample": [5]}]
    assert read == []
    assert arrays({"a"})[0] == {"a": [4], "b": [-4], "sample": [4]}
    assert arrays(None) == arrays({"a"}) and read == [4, 5] * 3
