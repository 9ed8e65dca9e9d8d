"""For all tests: `ranks`, the pool of gloo processes, and the skip of GPU tests without a GPU."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks.run(fn, *args, size=2, **kwargs)`: see tests/ranks.py."""
    pool = RankPool()
    yield pool
    pool.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
