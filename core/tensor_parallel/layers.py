"""ColumnParallelLinear, RowParallelLinear and VocabParallelEmbedding.

Constructors and returns are Megatron's, so that forks run unchanged; what is ours is keyword-only:

    name, seed, init_std     ledger tags and stateless initial values (see parameters.Initial)
    sequence_parallel, dtype, device, perform_initialization    as `config` has them
    tp_group                 a Group, a torch ProcessGroup, or None for the default grid's

Every parameter carries `param.shard`. A module's attributes `weight_grad` and `bias_grad`, None at
first, may be set to callables that get the gradients instead of autograd (see linear.WeightGrad).

The arithmetic is in linear.py, cutting and initial values in parameters.py. Used by models and
forks; the functions that Megatron's layers.py has are importable from here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from core import parallel_state
from core.shard import Shard
from core.tensor_parallel.embedding import lookup
from core.tensor_parallel.linear import (
    Activation,
    BiasGrad,
    ColumnLinear,
    Linear,
    RowLinear,
    WeightGrad,
    apply_linear,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from core.tensor_parallel.parameters import (
    Initial,
    copy_tensor_model_parallel_attributes,
    cut_shard,
    initialize_,
    new_parameter,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from core.tensor_parallel.utils import VocabUtility, divide

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_tensor_model_parallel_attributes",
    "linear_with_frozen_weight",
    "linear_with_grad_accumulation_and_async_allreduce",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]


class _ParallelLayer(nn.Module):
    """What the three have in common: the group, the ledger tag, and settings out of `config`."""

    def __init__(
        self,
        tp_group: object | None,
        name: str | None,
        config: object | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        sequence_parallel: bool | None,
        perform_initialization: bool | None,
    ) -> None:
        super().__init__()

        def asked(field: str, default: object) -> object:
            return getattr(config, field, default)

        if asked("defer_embedding_wgrad_compute", False):
            raise NotImplementedError(
                "defer_embedding_wgrad_compute is not supported; set the layer's weight_grad"
            )
        self.group = parallel_state.resolve(tp_group)
        self.tag = name or type(self).__name__
        self.config = config  # for subclasses in forks; nothing here reads it again
        self.weight_grad: WeightGrad | None = None
        self.bias_grad: BiasGrad | None = None
        if sequence_parallel is None:
            sequence_parallel = asked("sequence_parallel", False)
        self.sequence_parallel = bool(sequence_parallel) and self.group.size > 1
        self.gradient_accumulation_fusion = bool(asked("gradient_accumulation_fusion", False))
        if perform_initialization is None:
            perform_initialization = asked("perform_initialization", True)
        self.perform_initialization = bool(perform_initialization)
        self._dtype = dtype or asked("params_dtype", None) or torch.get_default_dtype()
        if device is None and asked("use_cpu_initialization", False):
            device = "cpu"
        elif device is None and parallel_state.model_parallel_is_initialized():
            device = parallel_state.get_default_grid().device
        self._device = device

    @property
    def tp_group(self) -> object:
        """The torch ProcessGroup, as in Megatron; the Group itself in a process on its own."""
        return parallel_state.process_group(self.group)

    def _per_partition(self, argument: str, value: int) -> int:
        if value % self.group.size:
            raise ValueError(
                f"{self.tag}: {argument} {value} does not divide by the {self.group.size} ranks of "
                f"group {self.group.name!r}"
            )
        return value // self.group.size

    def _new_weight(
        self,
        shape: tuple[int, int],
        dim: int,
        stride: int,
        initial: Initial,
        *,
        logical: int = 0,
        keep: bool = False,
    ) -> None:
        """Makes `self.weight`, this rank's cut along `dim` of a matrix of `shape`, and fills it."""
        shard = cut_shard(shape, dim, stride=stride, logical=logical)
        local = tuple(divide(n, self.group.size) if i == dim else n for i, n in enumerate(shape))
        self.weight = new_parameter(local, shard, dtype=self._dtype, device=self._device)
        set_tensor_model_parallel_attributes(self.weight, True, dim, stride)
        self.master_weight = None
        if self.perform_initialization:
            real = tuple(logical if logical and i == dim else n for i, n in enumerate(shape))
            self.master_weight = initialize_(self.weight, initial, real, self.group, keep=keep)

    def _new_bias(self, length: int, shard: Shard) -> None:
        self.bias = new_parameter((length,), shard, dtype=self._dtype, device=self._device)
        if self.perform_initialization:
            nn.init.zeros_(self.bias)

    def _call(self, weight: Tensor, bias: Tensor | None, **options: object) -> Linear:
        return Linear(
            self.group,
            self.tag,
            sequence_parallel=self.sequence_parallel,
            weight=weight,
            bias=bias,
            weight_grad=self.weight_grad,
            bias_grad=self.bias_grad,
            fused=self.gradient_accumulation_fusion,
            **options,
        )

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        """Megatron's checkpoints have an empty extra state for each layer."""
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def sharded_state_dict(self, *args, **kwargs):
        raise NotImplementedError(
            "sharded_state_dict is not supported: core.checkpoint saves parameters by name, cut as "
            "their Shard says"
        )

    def _cut_text(self, dim: int) -> str:
        """Like ", mine 1024…2047 of tp 1/4", or nothing where nothing is cut."""
        t = self.group.size
        if t == 1:
            return ""
        length = divide(dim, t)
        first = self.group.rank * length
        return f", mine {first}…{first + length - 1} of tp {self.group.rank}/{t}"


def _refuse_experts(is_expert: bool) -> None:
    if is_expert:
        raise NotImplementedError("is_expert=True is not supported: every layer is dense")


def _refuse_buffers(*buffers: list[Tensor] | None) -> None:
    if any(buffer is not None for buffer in buffers):
        raise NotImplementedError(
            "embedding_activation_buffer and grad_output_buffer are not supported; set the layer's "
            "weight_grad to defer its weight gradient"
        )


class ColumnParallelLinear(_ParallelLayer):
    """Linear whose output columns are cut over tp: y_cut = x w_cut' + b_cut.

    x  [s, b, in], or [s/t, b, in] under sequence parallelism  ->  y_cut  [s, b, out/t]

    gather_output                 return all columns instead, [s, b, out]
    skip_bias_add                 return the bias, not yet added, as the second value
    stride                        the weight holds that many matrices one after the other, each cut
    keep_master_weight_for_test   keep the whole initial matrix as `master_weight`
    skip_weight_param_allocation  make no weight; forward is given one
    disable_grad_reduce           leave the input gradient unsummed: the caller adds it over tp
    logical_output_size           real outputs, the rest up to output_size being padding: zero rows
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: object | None = None,
        init_method: Callable[[Tensor], object] | None = None,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: object | None = None,
        name: str | None = None,
        seed: int | None = None,
        init_std: float = 0.02,
        sequence_parallel: bool | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        perform_initialization: bool | None = None,
        logical_output_size: int | None = None,
    ) -> None:
        super().__init__(
            tp_group, name, config, dtype, device, sequence_parallel, perform_initialization
        )
        _refuse_experts(is_expert)
        _refuse_buffers(embedding_activation_buffer, grad_output_buffer)
        self.input_size, self.output_size = input_size, output_size
        self.output_size_per_partition = self._per_partition("output_size", output_size)
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.disable_grad_reduce = disable_grad_reduce
        self.allreduce_dgrad = (
            self.group.size > 1 and not self.sequence_parallel and not disable_grad_reduce
        )
        self.logical_output_size = logical = logical_output_size or output_size
        if skip_weight_param_allocation:
            self.register_parameter("weight", None)
            self.master_weight = None
        else:
            self._new_weight(
                (output_size, input_size),
                0,
                stride,
                Initial(init_method, init_std, seed, f"{self.tag}.weight"),
                logical=logical,
                keep=keep_master_weight_for_test,
            )
        if bias:
            shard = cut_shard((output_size,), 0, stride=stride, logical=logical, decay=False)
            self._new_bias(self.output_size_per_partition, shard)
            set_tensor_model_parallel_attributes(self.bias, True, 0, stride)
        else:
            self.register_parameter("bias", None)

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, bias if skip_bias_add else None); `weight` stands in for the layer's own."""
        weight = self._own_or_given(weight)
        bias = None if self.skip_bias_add else self.bias
        call = self._call(weight, bias, reduce_dgrad=self.allreduce_dgrad)
        output = apply_linear(ColumnLinear, input_, weight, bias, call=call)
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather:
            output = gather_from_tensor_model_parallel_region(
                output, self.group, tag=f"{self.tag}.gather"
            )
        return output, self.bias if self.skip_bias_add else None

    def _own_or_given(self, weight: Tensor | None) -> Tensor:
        if weight is None:
            if self.weight is None:
                raise RuntimeError(
                    f"{self.tag} was made with skip_weight_param_allocation=True; pass weight="
                )
            return self.weight
        expected = (self.output_size_per_partition, self.input_size)
        if tuple(weight.shape) != expected:
            raise RuntimeError(
                f"{self.tag} was given a weight of shape {tuple(weight.shape)}, not {expected}"
            )
        return weight

    def extra_repr(self) -> str:
        bias = "" if self.bias is not None else ", no bias"
        cut = self._cut_text(self.output_size)
        padding = self.output_size - self.logical_output_size
        out = f"{self.logical_output_size}" + (f" (+ {padding} padding)" if padding else "")
        return f"{self.input_size} → {out}{cut}{bias}"


class RowParallelLinear(_ParallelLayer):
    """Linear whose input columns are cut over tp: y = sum over tp of x_cut w_cut', + b once.

    x_cut  [s, b, in/t]  ->  y  [s, b, out], or [s/t, b, out] under sequence parallelism

    input_is_parallel  x is cut already; otherwise forward cuts the whole x
    skip_bias_add      return the bias, not yet added, as the second value
    stride, keep_master_weight_for_test  as for ColumnParallelLinear
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: object | None = None,
        init_method: Callable[[Tensor], object] | None = None,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: object | None = None,
        name: str | None = None,
        seed: int | None = None,
        init_std: float = 0.02,
        sequence_parallel: bool | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        perform_initialization: bool | None = None,
    ) -> None:
        super().__init__(
            tp_group, name, config, dtype, device, sequence_parallel, perform_initialization
        )
        _refuse_experts(is_expert)
        if self.sequence_parallel and not input_is_parallel:
            raise RuntimeError(
                "sequence_parallel needs input_is_parallel=True: an input that is cut along the "
                "sequence cannot be cut along its columns"
            )
        self.input_size, self.output_size = input_size, output_size
        self.input_size_per_partition = self._per_partition("input_size", input_size)
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self._new_weight(
            (output_size, input_size),
            1,
            stride,
            Initial(init_method, init_std, seed, f"{self.tag}.weight"),
            keep=keep_master_weight_for_test,
        )
        if bias:
            shared = ("tp",) if self.sequence_parallel else ()
            self._new_bias(output_size, Shard((output_size,), sum_over=shared, decay=False))
            self.bias.sequence_parallel = self.sequence_parallel
        else:
            self.register_parameter("bias", None)

    def forward(
        self,
        input_: Tensor,
        *,
        activation: Activation | None = None,
        activation_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, bias if skip_bias_add else None).

        activation  is applied to the input (plus activation_bias) first; its value is not kept
                    but made again in backward
        """
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(
                input_, self.group, tag=f"{self.tag}.scatter"
            )
        bias = None if self.skip_bias_add else self.bias
        call = self._call(self.weight, bias, activation=activation)
        biases = bias, activation_bias
        output = apply_linear(RowLinear, input_, self.weight, *biases, call=call)
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        bias = "" if self.bias is not None else ", no bias"
        cut = self._cut_text(self.input_size)
        return f"{self.input_size} → {self.output_size}{cut}{bias}"


class VocabParallelEmbedding(_ParallelLayer):
    """Embedding table whose rows are cut over tp; each rank looks up its own, the rest is added.

    ids [b, s]  ->  [b, s, h]; with reduce_scatter_embeddings  [s/t, b, h]

    num_embeddings  rows of all ranks together; vocab_size of them are real (default: all), the
                    others are zero and stay so
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Callable[[Tensor], object] | None = None,
        reduce_scatter_embeddings: bool = False,
        config: object | None = None,
        tp_group: object | None = None,
        vocab_size: int | None = None,
        name: str | None = None,
        seed: int | None = None,
        init_std: float = 0.02,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        perform_initialization: bool | None = None,
    ) -> None:
        super().__init__(tp_group, name, config, dtype, device, False, perform_initialization)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.num_embeddings_per_partition = self._per_partition("num_embeddings", num_embeddings)
        self.vocab_start_index, self.vocab_end_index = (
            VocabUtility.vocab_range_from_global_vocab_size(
                num_embeddings, self.group.rank, self.group.size
            )
        )
        self._new_weight(
            (num_embeddings, embedding_dim),
            0,
            1,
            Initial(init_method, init_std, seed, f"{self.tag}.weight"),
            logical=vocab_size or num_embeddings,
        )
        self._shard = self.weight.shard  # copies of a parameter do not keep its attributes

    def forward(self, input_: Tensor) -> Tensor:
        return lookup(
            input_,
            self.weight,
            self._shard,
            self.group,
            self.tag,
            scatter=self.reduce_scatter_embeddings,
            weight_grad=self.weight_grad,
        )

    def extra_repr(self) -> str:
        real = self._shard.shape[0]
        padding = self.num_embeddings - real
        rows = f"{real} (+ {padding} padding)" if padding else f"{real}"
        return f"{rows} × {self.embedding_dim}{self._cut_text(self.num_embeddings)}"
