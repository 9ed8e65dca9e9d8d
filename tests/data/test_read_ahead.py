"""A run's microbatches read ahead: what batches.py yields, whatever is asked for next."""

import threading
import time

import numpy as np
import pytest

from data.batches import microbatches
from data.read_ahead import ReadAhead


class Numbers:
    """Sample n is the number n; remembers what was read, and fails at `broken`."""

    def __init__(self, broken: int | None = None) -> None:
        self.read: list[int] = []
        self.broken = broken

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        if n == self.broken:
            raise OSError(f"sample {n} cannot be read")
        self.read.append(n)
        return {"n": np.array(n)}


def take(reader: ReadAhead, consumed: int, size: int, count: int) -> list[list[int]]:
    """As core.feed does: exactly so many, the rest of the generator is never asked for."""
    rows = reader(consumed, size)
    return [next(rows)["n"].tolist() for _ in range(count)]


def wait_for_reads(data: Numbers, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(data.read) < count:
        assert time.monotonic() < deadline, f"only {data.read} were read"
        time.sleep(0.01)


def readers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "prefetch"}


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_steps_in_order_and_out_of_order(depth):
    reader = ReadAhead(Numbers(), 2, dp_rank=1, dp_size=2, depth=depth)
    # in order; a larger batch; back, as in an evaluation; from a place never expected
    for consumed, size in ((0, 8), (8, 8), (16, 12), (28, 12), (0, 12), (100, 4), (104, 4)):
        wanted = [b["n"].tolist() for b in microbatches(Numbers(), consumed, size, 2, 1, 2)]
        assert take(reader, consumed, size, len(wanted)) == wanted
    reader.close()


def test_the_next_step_is_read_meanwhile():
    data, before = Numbers(), readers()
    reader = ReadAhead(data, 2, depth=2)
    take(reader, 0, 4, 2)
    wait_for_reads(data, 8)
    assert data.read[:8] == list(range(8))
    (thread,) = readers() - before
    take(reader, 4, 4, 2)
    wait_for_reads(data, 12)
    assert readers() - before == {thread}
    assert data.read == sorted(set(data.read))  # nothing was read twice
    reader.close()
    assert readers() <= before


def test_a_step_that_was_not_taken_whole_is_read_afresh():
    reader = ReadAhead(Numbers(), 2, depth=2)
    assert take(reader, 0, 8, 2) == [[0, 1], [2, 3]]
    assert take(reader, 8, 8, 4) == [[8, 9], [10, 11], [12, 13], [14, 15]]
    reader.close()


def test_an_error_comes_with_its_own_microbatch():
    reader = ReadAhead(Numbers(broken=5), 2, depth=3)
    rows = reader(0, 8)
    assert [next(rows)["n"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="sample 5 cannot be read"):
        next(rows)
