"""Megatron's random-number tracker and activation checkpointing, for forks.

Our own models need neither: their randomness has no state (core.random). The tracker keeps a named
generator state for each kind of region: tp ranks draw different numbers inside `fork()` and the
same ones outside. It works on the CUDA generator where CUDA is available, and on the CPU's
otherwise. `checkpoint` restores every generator before it computes a second time.

Read in this order: `CudaRNGStatesTracker`, the seeds, `checkpoint`, `CheckpointWithoutOutput`.
Imports core.parallel_state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.autograd import Function

from core import parallel_state
from core.tensor_parallel.utils import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_EXPERT_PARALLEL_RNG_TRACKER_NAME = "expert-parallel-rng"
_DATA_PARALLEL_RNG_TRACKER_NAME = "data-parallel-rng"
_DEFAULT = "default-rng"


# ---- the tracker --------------------------------------------------------------------------------


def _on_cuda() -> bool:
    """Whether the tracked generator is CUDA's: where the default grid's tensors are."""
    if parallel_state.model_parallel_is_initialized():
        return parallel_state.get_default_grid().device.type == "cuda"
    return torch.cuda.is_available()


def _get_state() -> Tensor:
    return torch.cuda.get_rng_state() if _on_cuda() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    (torch.cuda.set_rng_state if _on_cuda() else torch.set_rng_state)(state)


def _seed(seed: int) -> None:
    if _on_cuda():
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _refuse_kinds(transformer_engine: bool, inference: bool, cuda_graphs: bool) -> None:
    given = {
        "use_te_rng_tracker": transformer_engine,
        "inference_rng_tracker": inference,
        "use_cudagraphable_rng": cuda_graphs,
    }
    for name, value in given.items():
        if value:
            raise NotImplementedError(f"{name}=True is not supported; there is one kind of tracker")


class CudaRNGStatesTracker:
    """Named states of one generator; `fork(name)` draws from one of them."""

    def __init__(
        self, use_cudagraphable_rng: bool = False, is_inference_rng_tracker: bool = False
    ) -> None:
        _refuse_kinds(False, is_inference_rng_tracker, use_cudagraphable_rng)
        self.reset()

    def is_initialized(self) -> bool:
        return self._is_initialized

    def reset(self) -> None:
        self._is_initialized = False
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()
        self.inside = _DEFAULT

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self._is_initialized = True
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new state, as after seeding with `seed`. Names and seeds are used once."""
        if seed in self.seeds_:
            raise ValueError(f"the seed {seed} of {name!r} is taken by another random state")
        if name in self.states_:
            raise ValueError(f"a random state {name!r} exists already")
        before = _get_state()
        _seed(seed)
        self._is_initialized = True
        self.seeds_.add(seed)
        self.states_[name] = _get_state()
        _set_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Inside, the generator is at the state `name`, which moves on; outside it is as before.

        A fork may be inside another one, also of the same name.
        """
        if name not in self.states_:
            raise ValueError(
                f"there is no random state {name!r}; call model_parallel_cuda_manual_seed(seed) "
                f"or add({name!r}, seed)"
            )
        outer, before = self.inside, _get_state()
        if outer != _DEFAULT:
            self.states_[outer] = before
        _set_state(self.states_[name])
        self.inside = name
        try:
            yield
        finally:
            self.states_[name] = _get_state()
            _set_state(before if outer == _DEFAULT else self.states_[outer])
            self.inside = outer


_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
) -> CudaRNGStatesTracker:
    """The tracker of this process."""
    _refuse_kinds(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    return _TRACKER


def get_expert_parallel_rng_tracker_name() -> str:
    return _EXPERT_PARALLEL_RNG_TRACKER_NAME


def get_data_parallel_rng_tracker_name() -> str:
    return _DATA_PARALLEL_RNG_TRACKER_NAME


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
) -> None:
    """Seeds the generator and the tracker's three states anew.

    default and data-parallel   seed                             the same on all tp ranks
    model-parallel              seed + 2718 + tp rank            different on each
    expert-parallel             seed + 1024 + 100 ep rank + expert tp rank
    """
    _refuse_kinds(te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    tp = parallel_state.get_tensor_model_parallel_rank() if tp_rank is None else tp_rank
    etp = tp if etp_rank is None else etp_rank
    _TRACKER.reset()
    _seed(seed)
    _TRACKER.add(_DATA_PARALLEL_RNG_TRACKER_NAME, seed)
    _TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + 2718 + tp)
    _TRACKER.add(_EXPERT_PARALLEL_RNG_TRACKER_NAME, seed + 1024 + 100 * (ep_rank or 0) + etp)


# ---- checkpoint ---------------------------------------------------------------------------------


class _Surroundings:
    """What a function's result depends on besides its arguments: autocast, generators if asked."""

    def __init__(self, generators: bool) -> None:
        self.generators, cuda = generators, torch.cuda.is_initialized()
        if generators:
            self.cpu = torch.get_rng_state()
            self.cuda = torch.cuda.get_rng_state() if cuda else None
            self.tracker, self.inside = _TRACKER.get_states(), _TRACKER.inside
        devices = ("cpu", "cuda") if cuda else ("cpu",)
        self.autocast = {
            d: (torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices
        }

    def restore(self) -> None:
        if not self.generators:
            return
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        _TRACKER.set_states(self.tracker)
        _TRACKER.inside = self.inside

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, everything is as it was then, and gradients are recorded."""
        now = _Surroundings(self.generators)
        self.restore()
        try:
            with ExitStack() as stack:
                for device, (dtype, enabled) in self.autocast.items():
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
                stack.enter_context(torch.enable_grad())
                yield
        finally:
            now.restore()


def _detached(args: tuple) -> tuple:
    """New leaves over the same memory, for a graph of their own."""
    return tuple(
        a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args
    )


def _as_tuple(outputs: object) -> tuple:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _backward(outputs: tuple, gradients: tuple) -> None:
    pairs = [
        (o, g)
        for o, g in zip(outputs, gradients)
        if isinstance(o, Tensor) and o.requires_grad and g is not None
    ]
    if pairs:
        torch.autograd.backward(*(list(column) for column in zip(*pairs)))


def _check_valid() -> None:
    if not torch.autograd._is_checkpoint_valid():
        raise RuntimeError("checkpoint works with .backward(), not with torch.autograd.grad()")


def _alive(args: tuple) -> Tensor | None:
    """An argument that requires a gradient, where none of `args` does: what the function closes
    over, its parameters for one, may. Without it autograd would leave them out in silence."""
    if not torch.is_grad_enabled() or any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return None
    return torch.empty(0, requires_grad=True)


class _Args:
    """A function's arguments, kept on `ctx`: tensors where autograd watches over them."""

    @staticmethod
    def save(ctx, args: tuple) -> None:
        ctx.others = [None if isinstance(a, Tensor) else a for a in args]
        ctx.save_for_backward(*(a if isinstance(a, Tensor) else None for a in args))

    @staticmethod
    def saved(ctx) -> tuple:
        return tuple(
            other if tensor is None else tensor
            for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        )


class CheckpointFunction(Function):
    """Runs a function without keeping its activations; backward runs it again."""

    @staticmethod
    def forward(
        ctx, alive, run_function, distribute_saved_activations, tp_group, generators, *args
    ):
        ctx.run_function, ctx.group = run_function, tp_group
        ctx.distributed = bool(distribute_saved_activations)
        ctx.then = _Surroundings(generators)
        with torch.no_grad():
            outputs = run_function(*args)
        if ctx.distributed:
            # as in Megatron, the caller's tensor itself is left with this rank's part
            ctx.shape, ctx.callers = args[0].shape, args[0]
            args[0].data = split_tensor_into_1d_equal_chunks(args[0].data, True, tp_group)
        _Args.save(ctx, args)
        return outputs

    @staticmethod
    def backward(ctx, *gradients):
        _check_valid()
        args = _Args.saved(ctx)
        if ctx.distributed:
            args[0].data = gather_split_1d_tensor(args[0].data, ctx.group).view(ctx.shape)
            # the same tensor, unless saved_tensors_hooks made another of it
            ctx.callers.data, ctx.callers = args[0].data, None
        inputs = _detached(args)
        with ctx.then.again():
            outputs = _as_tuple(ctx.run_function(*inputs))
        _backward(outputs, gradients)
        return (None,) * 5 + tuple(i.grad if isinstance(i, Tensor) else None for i in inputs)


def checkpoint(
    function: Callable,
    distribute_saved_activations: bool,
    *args: object,
    tp_group: object | None = None,
    preserve_rng_state: bool = True,
):
    """function(*args), whose activations are computed again in backward instead of being kept.

    distribute_saved_activations  args[0] is kept cut over tp: its memory is this rank's part until
                                  backward gathers it
    preserve_rng_state            False for a function that draws from no generator
    """
    if not torch.is_grad_enabled():
        return function(*args)  # nothing is kept, and nothing would make args[0] whole again
    group = parallel_state.resolve(tp_group) if distribute_saved_activations else None
    return CheckpointFunction.apply(
        _alive(args), function, distribute_saved_activations, group, preserve_rng_state, *args
    )


class _CheckpointWithoutOutputFunction(Function):
    @staticmethod
    def forward(ctx, alive, run_function, owner, *args):
        with torch.no_grad():
            outputs = run_function(*args)
        _Args.save(ctx, _detached(args))
        owner.ctx = ctx
        return outputs

    @staticmethod
    def backward(ctx, *gradients):
        inputs, outputs = ctx.inputs, ctx.outputs
        ctx.inputs = ctx.outputs = None
        _backward(outputs, gradients)
        return None, None, None, *(i.grad if isinstance(i, Tensor) else None for i in inputs)


class CheckpointWithoutOutput:
    """A checkpoint that also gives up its output's memory until backward has computed it again.

    block = CheckpointWithoutOutput()
    y = block.checkpoint(norm, x)
    z = linear(y)                                   # keeps y for its backward
    block.discard_output_and_register_recompute(z)  # y's memory is free until z has a gradient
    """

    def __init__(
        self,
        fp8: bool = False,
        ckpt_manager: object | None = None,
        *,
        preserve_rng_state: bool = True,
    ) -> None:
        if fp8 or ckpt_manager is not None:
            raise NotImplementedError(
                f"fp8={fp8!r} and ckpt_manager={ckpt_manager!r} are not supported; leave them out"
            )
        self.preserve_rng_state = preserve_rng_state
        self.run_function: Callable | None = None
        self.ctx = None
        self.outputs: tuple | None = None

    def checkpoint(self, run_function: Callable, *args: object):
        self.run_function, self.then = run_function, _Surroundings(self.preserve_rng_state)
        outputs = _CheckpointWithoutOutputFunction.apply(_alive(args), run_function, self, *args)
        self.outputs = _as_tuple(outputs)
        return outputs

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Frees the outputs' memory; they come back when `hook_tensor` gets its gradient.

        That must happen before any backward reads them, and no forward may read them any more.
        """
        for output in self.outputs:
            output.untyped_storage().resize_(0)
        if hook_tensor.requires_grad:
            hook_tensor.register_hook(self._recompute)

    def _recompute(self, _: Tensor) -> None:
        if self.ctx is None:
            return
        _check_valid()
        inputs = _detached(_Args.saved(self.ctx))
        with self.then.again():
            outputs = _as_tuple(self.run_function(*inputs))
        with torch.no_grad():
            for kept, new in zip(self.outputs, outputs, strict=True):
                kept.untyped_storage().resize_(new.untyped_storage().size())
                kept.untyped_storage().copy_(new.untyped_storage())
        self.ctx.inputs, self.ctx.outputs = inputs, outputs
        self.run_function = self.then = self.outputs = self.ctx = None
