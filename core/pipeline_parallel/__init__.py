"""Pipeline parallelism: schedules as data (actions, schedules, passes, simulate, draw, placement)
and what runs them (stage, executor).

`from core.pipeline_parallel import get_forward_backward_func` is for training loops written against
Megatron. It is found on first use: half of this package must load without torch.
"""

__all__ = ["get_forward_backward_func"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from core.pipeline_parallel.forward_backward import get_forward_backward_func

    return get_forward_backward_func
