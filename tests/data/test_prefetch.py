"""Reading ahead: same items, same errors, bounded, and it ends."""

import threading
import time

import pytest

from data.prefetch import prefetch


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_same_items_in_order(depth):
    assert list(prefetch(iter(range(50)), depth)) == list(range(50))


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_comes_after_the_items_before_it(depth):
    def items():
        yield 1
        raise KeyError("lost")

    reader = prefetch(items(), depth)
    assert next(reader) == 1
    with pytest.raises(KeyError, match="lost"):
        next(reader)


def wait_for(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.01)


def threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name == "prefetch"}


def test_it_reads_ahead_but_only_so_far():
    made, before = [], threads()

    def items():
        for i in range(100):
            made.append(i)
            yield i

    reader = prefetch(items(), depth=3)
    assert next(reader) == 0
    wait_for(lambda: len(made) == 5, "one taken, three ready, one waiting for room")
    time.sleep(0.25)
    assert len(made) == 5
    reader.close()
    assert threads() <= before


def test_leaving_early_does_not_hang():
    before = threads()
    for i in prefetch(iter(range(1000)), depth=1):
        if i == 3:
            break
    wait_for(lambda: threads() <= before, "the thread's end")
