"""What the tests of this folder share: whole tensors, alike on every rank, and cutting them."""

import torch
from torch import Tensor

from core.comm import Group


def whole(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same normal values on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def cut(x: Tensor, group: Group, dim: int) -> Tensor:
    """A rank's part of x, with a memory of its own."""
    return x.chunk(group.size, dim=dim)[group.rank].clone()


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def gradients(y: Tensor, dy: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
    """d (y . dy) / d input, by .backward() as a training step does it."""
    for x in inputs:
        x.grad = None
    (y * dy).sum().backward()
    return tuple(x.grad for x in inputs)
