"""`get_forward_backward_func`: Megatron's way to run a step, for training loops written against it.

A fork gives a function that runs one microbatch through one chunk of its model. It is wrapped in
stages (`ForkStage`), and the same plans and executor run it as run ours: 1F1B, or interleaved when
there are virtual stages. What the fork's config says of loss scale, gradient synchronisation and
the end of a step is done as Megatron does it.

Read `forward_backward` first, then `ForkStage`. Imports core.parallel_state for the default groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from core import parallel_state
from core.comm import Group
from core.pipeline_parallel.actions import Op, Plan
from core.pipeline_parallel.executor import Executor
from core.pipeline_parallel.schedules import build_plan
from core.pipeline_parallel.stage import Batch, Loss, Stage, WireSpec

# (data iterator, model chunk) -> (output, loss function)
ForwardStep = Callable[[Iterator, nn.Module], tuple[Tensor, Callable | None]]
_plan = lru_cache(maxsize=16)(build_plan)
_open: dict[int, object] = {}  # process groups whose wires are open, by id; an entry holds it


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, *, schedule: str | None = None
) -> Callable[..., list]:
    """The function that runs a step's forwards and backwards, with Megatron's arguments.

    pp_size, vp_size  pipeline ranks and chunks of the model on each; if neither is given,
                      parallel_state's
    schedule          a name or file for core.pipeline_parallel.schedules, by default 1f1b, or
                      interleaved with several chunks. Its backwards must be whole: a fork's weight
                      gradients are autograd's, so there is nothing to put off
    """
    if pp_size is None and vp_size is None:
        vp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return partial(forward_backward, pp_size=pp_size, chunks=vp_size or 1, schedule=schedule)


def forward_backward(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator | Sequence[Iterator],
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable | None = None,
    p2p_communicator: object | None = None,
    pg_collection: object | None = None,
    force_all_reduce: bool | None = False,
    pp_size: int | None = None,
    chunks: int = 1,
    schedule: str | None = None,
) -> list:
    """One step. Returns what the loss function reported for each microbatch, on the rank with the
    last stage; an empty list elsewhere.

    `model` and `data_iterator` are lists where a rank has several chunks. An activation between
    stages is [seq_length (over tp under sequence parallelism), micro_batch_size, hidden_size], for
    every microbatch. `first_val_step` has no effect. Raises NotImplementedError for
    adjust_tensor_shapes_fn, p2p_communicator and a config with variable_seq_lengths.
    """
    refused = {
        "adjust_tensor_shapes_fn": adjust_tensor_shapes_fn,
        "p2p_communicator": p2p_communicator,
    }
    for name, value in refused.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not supported; leave it at None")
    if collect_non_loss_data and not forward_only:
        raise ValueError("collect_non_loss_data needs forward_only: no loss, so nothing goes back")
    models = _listed(model, chunks, "model")
    iterators = _listed(data_iterator, chunks, "data_iterator")
    pp, tp, cp = (_group(axis, pg_collection) for axis in ("pp", "tp", "cp"))
    if pp_size not in (None, pp.size):
        raise ValueError(f"pp_size {pp_size} differs from the {pp.size} ranks of the pipeline")
    step = ForkStep(
        forward_step_func,
        _attribute(models[0], "config"),
        num_microbatches,
        forward_only,
        collect_non_loss_data,
        cp.size,
    )
    wire = _wire(models, step.config, decoder_seq_length or seq_length, micro_batch_size, tp, pp)
    count = pp.size * chunks
    stages = [
        ForkStage(number, pp, count, wire, step, chunk, data)
        for number, (chunk, data) in enumerate(zip(models, iterators, strict=True))
    ]
    plan = _plan(schedule, pp.size, num_microbatches, chunks, forward_only=forward_only)
    if any(action.op is Op.I for action in plan.row(pp.rank)):
        raise NotImplementedError(f"schedule {schedule} splits backwards; use 1f1b or interleaved")
    result = _run(plan, stages, pp, step)
    if not forward_only:
        _finalize(models, step.config, result.sums.get("tokens"), pg_collection, force_all_reduce)
    return step.reports


def _run(plan: Plan, stages: list[ForkStage], pp: Group, step: ForkStep):
    executor = Executor(plan.row(pp.rank), stages, pp, on_sync=step.on_sync)
    if pp.handle is not None and _open.get(id(pp.handle)) is not pp.handle:
        executor.open_wires()
        _open[id(pp.handle)] = pp.handle
    return executor.run(itertools.repeat({}))


@dataclass
class ForkStep:
    """What all chunks of one step share.

    reports   what the loss function gave back beside the loss, by microbatch
    """

    forward_step: ForwardStep
    config: object
    microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    cp_size: int
    reports: list = field(default_factory=list)

    def asked(self, name: str, default: object = None) -> object:
        return getattr(self.config, name, default)

    def no_sync(self) -> ExitStack:
        """Inside, backward does not start a reduction of gradients."""
        stack = ExitStack()
        contexts = self.asked("no_sync_func") or ()
        for context in contexts if isinstance(contexts, list | tuple) else (contexts,):
            stack.enter_context(context())
        return stack

    def on_sync(self, op: Op, stage: ForkStage) -> None:
        """ARM: the next backward of `stage` is its last. DRAIN: its gradients are complete."""
        sync = self.asked("grad_sync_func")
        if op is Op.ARM:
            stage.armed = sync is None
        elif sync is not None:
            sync = sync[stage.number] if isinstance(sync, list | tuple) else sync
            sync(stage.chunk.parameters())

    def loss(self, output: Tensor, loss_func: Callable | None) -> Loss:
        """The last stage's output through the fork's loss function, averaged as Megatron does:
        over microbatches, and over tokens where the function counts them."""
        zero = torch.zeros((), device=output.device)
        if loss_func is None:
            self.reports.append(output)
            return Loss(zero, zero)
        if self.collect_non_loss_data:
            self.reports.append(loss_func(output, non_loss_data=True))
            return Loss(zero, zero)
        loss, *tokens, report = loss_func(output)
        self.reports.append(report)
        if not tokens:
            loss, tokens = loss * self.cp_size / self.microbatches, [zero]
        elif not self.asked("calculate_per_token_loss", False):
            loss = loss / torch.clamp(torch.as_tensor(tokens[0]), min=1) / self.microbatches
        scale = self.asked("grad_scale_func")
        if scale is not None and not self.forward_only:
            loss = scale(loss)
        return Loss(loss, torch.as_tensor(tokens[0]))


class ForkStage(Stage):
    """Chunk `number` of a fork's model on this rank, driven by the fork's forward step.

    The chunk is no submodule: its training mode and its parameters are the fork's affair.
    """

    def __init__(
        self,
        number: int,
        pp: Group,
        count: int,
        wire: WireSpec,
        step: ForkStep,
        chunk: nn.Module,
        data: Iterator,
    ) -> None:
        super().__init__(number * pp.size + pp.rank, count, wire)
        self.number, self._held = number, (chunk,)
        self.step, self.data = step, data
        self.armed = False
        self.train(not step.forward_only)

    @property
    def chunk(self) -> nn.Module:
        return self._held[0]

    @property
    def label(self) -> str:
        return type(self.chunk).__name__

    def compute(self, batch: Batch, activation: Tensor | None) -> Tensor | Loss:
        take_input = _attribute(self.chunk, "set_input_tensor", None)
        if take_input is not None:
            take_input([activation])
        elif activation is not None:
            raise TypeError(f"{self.label} has no set_input_tensor, which a later stage needs")
        with self._autocast(), self._as_virtual_rank():
            output, loss_func = self.step.forward_step(self.data, self.chunk)
            if isinstance(output, list | tuple) and len(output) == 1:
                (output,) = output
            return self.step.loss(output, loss_func) if self.is_last else output

    def forward_step(
        self, microbatch: int, batch: Batch, activation: Tensor | None
    ) -> Tensor | Loss:
        # without a pipeline the last forward stands outside, as torch's DDP wants it
        last = self.count == 1 and microbatch == self.step.microbatches - 1
        with nullcontext() if last else self.step.no_sync():
            return super().forward_step(microbatch, batch, activation)

    def backward_step(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        with nullcontext() if self.armed else self.step.no_sync():
            return super().backward_step(microbatch, gradient)

    def _autocast(self):
        if not self.step.asked("enable_autocast", False):
            return nullcontext()
        kind = torch.device(self.wire.device).type
        return torch.autocast(kind, dtype=self.step.asked("autocast_dtype"))

    def _as_virtual_rank(self) -> ExitStack:
        """Inside, parallel_state answers for this chunk."""
        stack = ExitStack()
        before = parallel_state.get_virtual_pipeline_model_parallel_rank()
        if before is not None:
            tell = parallel_state.set_virtual_pipeline_model_parallel_rank
            tell(self.number)
            stack.callback(tell, before)
        return stack


_REQUIRED = object()


def _attribute(model: nn.Module, name: str, default: object = _REQUIRED) -> object:
    """`model.name`, looked for through wrappers such as DDP (`.module`)."""
    inner: object | None = model
    while inner is not None:
        if hasattr(inner, name):
            return getattr(inner, name)
        inner = getattr(inner, "module", None)
    if default is _REQUIRED:
        raise AttributeError(f"{type(model).__name__} and what it wraps have no {name!r}")
    return default


def _listed(given: object, chunks: int, name: str) -> list:
    found = list(given) if isinstance(given, list | tuple) else [given]
    if len(found) != chunks:
        raise ValueError(f"{name} has {len(found)} parts; there are {chunks} chunks on each rank")
    return found


def _group(axis: str, collection: object | None) -> Group:
    """The group along an axis: the caller's, or the default grid's; alone where neither is."""
    given = getattr(collection, axis, None)
    if given is not None:
        return parallel_state.resolve(given)
    if not parallel_state.model_parallel_is_initialized():
        return Group.single(axis)
    return getattr(parallel_state.get_default_grid(), axis)


def _wire(
    models: list[nn.Module], config: object, seq: int, micro_batch: int, tp: Group, pp: Group
) -> WireSpec:
    """What crosses between stages; where there is one stage, nothing does."""
    like = next((p for model in models for p in model.parameters()), torch.empty(0))
    if pp.size == 1:
        return WireSpec((), like.dtype, like.device)
    if getattr(config, "variable_seq_lengths", False):
        raise NotImplementedError(
            "config.variable_seq_lengths is not supported: every microbatch has one shape; pad "
            "the sequences"
        )
    rows = seq // tp.size if getattr(config, "sequence_parallel", False) else seq
    dtype = getattr(config, "pipeline_dtype", None) or like.dtype
    return WireSpec((rows, micro_batch, config.hidden_size), dtype, like.device)


def _finalize(
    models: list[nn.Module],
    config: object,
    tokens: Tensor | None,
    collection: object | None,
    force_all_reduce: bool | None,
) -> None:
    """Tell the fork's function that all gradients of the step are there. As Megatron's, it hears
    the number of tokens on the last stage, 0 elsewhere, if the loss is per token."""
    finalize = getattr(config, "finalize_model_grads_func", None)
    if finalize is None:
        return
    if not getattr(config, "calculate_per_token_loss", False):
        tokens = None
    elif tokens is None:
        tokens = torch.zeros((), dtype=torch.int64)
    else:
        tokens = tokens.to(torch.int64)
    more = {"pg_collection": collection, "force_all_reduce": force_all_reduce}
    finalize(models, tokens, **{name: value for name, value in more.items() if value})
