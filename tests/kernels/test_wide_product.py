"""Weight gradients are summed without being rounded to their operands' type."""

from types import SimpleNamespace

import pytest
import torch

from core.data_parallel import ddp
from core.tensor_parallel import linear
from kernels.wide_product import add_product

GENERATOR = torch.Generator().manual_seed(5)
DY, X = (torch.randn(64, n, generator=GENERATOR).bfloat16() for n in (24, 40))
EXACT = DY.double().t() @ X.double()
START = torch.randn(24, 40, generator=GENERATOR)


def by_product(fresh):
    out = START.clone()
    add_product(out, DY.t(), X, fresh)
    return out


def by_data_parallel(fresh):
    out = START.clone()
    ddp.add_weight_grad(SimpleNamespace(gradient_target=lambda: (out, fresh)), DY, X)
    return out


def by_fork(fresh):
    out = torch.zeros_like(START) if fresh else START.clone()
    linear.add_weight_grad(out, DY, X)
    return out


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("way", [by_product, by_data_parallel, by_fork])
def test_a_short_types_product_is_not_rounded(way, fresh):
    wanted = EXACT if fresh else START.double() + EXACT
    assert (way(fresh).double() - wanted).abs().max() < 1e-5
    rounded = (DY.t() @ X).double() if fresh else START.double() + (DY.t() @ X).double()
    assert (rounded - wanted).abs().max() > 1e-3  # the test would see it
