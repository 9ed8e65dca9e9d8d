"""For all tests: `ranks`, the pool of gloo processes, and the skip of GPU tests without a GPU."""

import contextlib
import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

with contextlib.suppress(ImportError):
    import triton  # noqa: F401 - before kernels.gpu, which else leaves it alone without CUDA

from tests.ranks import RankPool

# Before torch is imported: what its stores have to say about connections that tests cut.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# An example may take as long as the machine makes it; and the examples are the same each time, so
# that what a change is judged by is the change.
settings.register_profile(
    "here", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("here")
# Tests multiply small matrices: two threads would spend three times the CPU waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks.run(fn, *args, size=2, **kwargs)`: see tests/ranks.py."""
    pool = RankPool()
    yield pool
    pool.close()


def pytest_collection_finish() -> None:
    """What was imported so far is never garbage: no collection looks at it any more."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end it is: libraries tell what of theirs is left."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
