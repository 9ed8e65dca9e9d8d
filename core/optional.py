"""What is installed beside torch and may speed things up or show them. Nothing here is required.

One getter for each: `fused_adam()`, `triton()`, … It returns the thing or None, and whatever goes
wrong while looking means that it is not there: a package may be broken, may want a GPU that is
absent, or may be a stranger of the same name. The PyPI project "apex" is one (a web tool); NVIDIA's
is recognised by FusedAdam and the CUDA extension behind it.

Nothing is imported when this module is; each answer is looked for once, when first asked.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any


def fused_adam() -> type | None:
    """NVIDIA apex's FusedAdam, if its CUDA extension is built and there is a GPU for it."""
    if _module("amp_C", needs="multi_tensor_adam") is None or not has_gpu():
        return None
    optimizers = _module("apex.optimizers", needs="FusedAdam")
    return None if optimizers is None else optimizers.FusedAdam


@cache
def has_gpu() -> bool:
    """A CUDA device that torch can use."""
    import torch

    return torch.cuda.is_available()


def triton() -> Any | None:
    """The triton module; kernels/gpu.py decides for itself whether its kernels run."""
    return _module("triton", needs="jit")


def summary_writer() -> Callable[..., Any] | None:
    """A class that writes TensorBoard files: torch's, which needs the tensorboard package, or
    tensorboardX's.
    """
    for name in ("torch.utils.tensorboard", "tensorboardX"):
        module = _module(name, needs="SummaryWriter")
        if module is not None:
            return module.SummaryWriter
    return None


def transformers() -> Any | None:
    """Hugging Face's transformers, for conversion and comparison."""
    return _module("transformers", needs="PreTrainedModel")


@cache
def _module(name: str, needs: str) -> Any | None:
    """The module, if it imports and has the attribute that we need of it."""
    try:
        if importlib.util.find_spec(name) is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a package that nobody here has asked for
            module = importlib.import_module(name)
            return module if hasattr(module, needs) else None
    except BaseException as error:  # a stranger's module may even call sys.exit
        if isinstance(error, KeyboardInterrupt):
            raise
        return None
