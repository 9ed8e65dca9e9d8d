"""Triton, if it is there: the one place that imports it, and what launchers ask about a device.

Kernels are decorated with `jit` from here and import `tl` from here, so that their files can be
imported, and their torch references run, where Triton is missing or broken. A torch without CUDA
launches no kernel, and Triton takes 70 MiB: it is left alone there, unless it is imported already
(by a test that interprets or compiles kernels). Imports torch only.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

try:
    if not torch.backends.cuda.is_built() and "triton" not in sys.modules:
        raise ImportError("no kernel will be launched")
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    jit = triton.jit
    INTERPRETED = bool(triton.knobs.runtime.interpret)
except Exception:  # missing, foreign, broken or not wanted: the torch path answers all four
    triton = TensorDescriptor = None
    INTERPRETED = False

    def jit(function):
        """Leaves the kernel as it is: never launched, since `use_triton` is False."""
        return function

    class tl:
        """What kernels' files use of the language at import."""

        @staticmethod
        def constexpr(value):
            return value


def launch(kernel, grid: tuple[int, ...], *arguments, **constants) -> None:
    """Runs a kernel on a grid of programs.

    Products and sums may be fused, as CUDA's own compiler does: said at every launch, since
    Triton's default is about to change, of which 3.9 warns.
    """
    kernel[grid](*arguments, enable_fp_fusion=True, **constants)


def use_triton(*tensors: Tensor | None) -> bool:
    """Whether these tensors are worked on by Triton kernels: a GPU of Ampere or later has them."""
    if triton is None:
        return False
    first = next(x for x in tensors if x is not None)
    return first.is_cuda and capability(first) >= (8, 0)


def capability(x: Tensor) -> tuple[int, int]:
    """(8, 0) for Ampere, (9, 0) for Hopper, (10, 0) for Blackwell."""
    return torch.cuda.get_device_capability(x.device)


def multiprocessors(x: Tensor) -> int:
    if not x.is_cuda:
        return 4  # the interpreter
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def next_power_of_two(n: int) -> int:
    """
    >>> [next_power_of_two(n) for n in (1, 2, 3, 1000)]
    [1, 2, 4, 1024]
    """
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def upcast(x: Tensor) -> bool:
    """Kernels' UPCAST: the interpreter computes on bf16's bits as on integers, so cast first."""
    return INTERPRETED and x.dtype == torch.bfloat16
