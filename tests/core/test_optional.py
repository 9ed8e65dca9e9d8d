"""Optional packages: found by what they can do, and any failure means that they are not there."""

import subprocess
import sys
from pathlib import Path

import pytest

from core import optional

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "source", ["", "raise ImportError('not here')", "import sys; sys.exit(3)", "1 / 0", "def ("]
)
def test_a_package_that_is_called_apex_but_is_not_nvidias_is_not_there(strangers, source) -> None:
    """C094: the PyPI project "apex" was picked up by its bare name and the script died of it."""
    for name in ("apex", "apex.optimizers", "amp_C"):
        strangers(name, source)
    assert optional.fused_adam() is None


def test_nvidias_apex_is_recognised_by_its_extension(strangers, monkeypatch) -> None:
    strangers("amp_C", "multi_tensor_adam = 1")
    strangers("apex", "")
    strangers("apex.optimizers", "class FusedAdam: pass")
    assert optional.fused_adam() is None  # no GPU here
    monkeypatch.setattr(optional, "has_gpu", lambda: True)
    assert optional.fused_adam().__name__ == "FusedAdam"


def test_tensorboardx_serves_where_tensorboard_is_missing(strangers, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    strangers("tensorboardX", "class SummaryWriter: pass")
    assert optional.summary_writer().__module__ == "tensorboardX"


def test_asking_is_what_imports() -> None:
    """Importing the module imports no optional package, and no torch either."""
    code = (
        "import sys, core.optional; "
        "print([n for n in ('apex', 'triton', 'transformers', 'torch') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
