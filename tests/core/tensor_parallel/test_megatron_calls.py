"""Code written against megatron.core.tensor_parallel: its calls, returns and attributes."""

import inspect
import subprocess
import sys
import warnings
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state, tensor_parallel
from core.comm import Group
from core.tensor_parallel import mappings
from core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from core.tensor_parallel.utils import divide
from tests.core.tensor_parallel.cuts import cut, leaf, whole
from tests.ranks import RankPool

close = torch.testing.assert_close


@dataclass
class Config:
    """What a fork's ModelParallelConfig says, as far as it matters here."""

    tensor_model_parallel_size: int = 2
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False
    params_dtype: torch.dtype = torch.float32
    use_cpu_initialization: bool = True
    perform_initialization: bool = True
    gradient_accumulation_fusion: bool = False
    defer_embedding_wgrad_compute: bool = False
    deterministic_mode: bool = False


def a_fork(world, sequence_parallel):
    """Embedding, column, row, logits and loss, with default groups and Megatron's arguments."""
    parallel_state.initialize_model_parallel(2, 1)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    torch.manual_seed(7)
    config = Config(sequence_parallel=sequence_parallel)
    init = partial(nn.init.normal_, mean=0.0, std=0.02)
    word = VocabParallelEmbedding(
        num_embeddings=16,
        embedding_dim=8,
        init_method=init,
        reduce_scatter_embeddings=sequence_parallel,
        config=config,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    up = ColumnParallelLinear(
        8, 32, config=config, init_method=init, bias=True, gather_output=False, skip_bias_add=True
    )
    down = RowParallelLinear(
        32,
        8,
        config=config,
        init_method=init,
        bias=True,
        input_is_parallel=True,
        skip_bias_add=False,
        is_expert=False,
        tp_comm_buffer_name="fc2",
    )
    head = ColumnParallelLinear(
        8, 16, config=config, init_method=init, bias=False, skip_weight_param_allocation=True
    )
    tokens = torch.arange(12).view(2, 6)  # [b, s]
    x = word(tokens)
    if not sequence_parallel:
        x = x.transpose(0, 1).contiguous()
    y, bias = up(x)
    y, none = down(torch.nn.functional.gelu(y + bias))
    assert none is None and y.shape == (6 // tp if sequence_parallel else 6, 2, 8)
    logits, none = head(y, weight=word.weight)
    assert none is None and logits.shape == (6, 2, 8)
    loss = tensor_parallel.vocab_parallel_cross_entropy(logits, tokens.t().contiguous(), 0.1)
    assert loss.shape == (6, 2)
    loss.mean().backward()
    gathered, _ = head(y.detach(), weight=word.weight.detach(), runtime_gather_output=True)
    assert gathered.shape == (6, 2, 16)
    bias_grad = down.bias.grad
    if down.bias.sequence_parallel:
        dist.all_reduce(bias_grad, group=parallel_state.get_tensor_model_parallel_group())
    return loss.detach(), bias_grad, up.weight.grad.norm() ** 2


def test_a_fork_s_model_gives_one_loss(ranks: RankPool) -> None:
    plain = ranks.run(a_fork, False)
    cut_along_s = ranks.run(a_fork, True, size=4)  # two model replicas
    for loss, bias_grad, _ in (*plain, *cut_along_s):
        close(loss, plain[0][0])
        close(bias_grad, plain[0][1])
    close(plain[0][2] + plain[1][2], cut_along_s[0][2] + cut_along_s[1][2])


def test_without_anything_initialised_layers_are_plain() -> None:
    up = ColumnParallelLinear(6, 8, gather_output=False)
    x = torch.randn(3, 2, 6)
    y, bias = up(x)
    assert bias is None
    close(y, torch.nn.functional.linear(x, up.weight, up.bias))


def attributes(world):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for perform in (True, False):
        config = Config(perform_initialization=perform)
        init = nn.init.xavier_normal_
        up = ColumnParallelLinear(8, 8, config=config, init_method=init, stride=2)
        down = RowParallelLinear(
            8,
            8,
            config=config,
            init_method=init,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=True,
        )
        word = VocabParallelEmbedding(16, 8, config=config, init_method=init)
        marks = [
            (p.tensor_model_parallel, p.partition_dim, p.partition_stride)
            for p in (up.weight, up.bias, down.weight, word.weight)
        ]
        assert marks == [(True, 0, 2), (True, 0, 2), (True, 1, 1), (True, 0, 1)]
        assert not hasattr(down.bias, "tensor_model_parallel")
        assert down.bias.sequence_parallel is False
        assert all(p.allreduce for p in (*up.parameters(), *down.parameters()))
    assert (up.output_size_per_partition, down.input_size_per_partition) == (4, 4)
    assert (up.allreduce_dgrad, up.sequence_parallel, up.gather_output) == (True, False, False)
    assert up.tp_group is parallel_state.get_tensor_model_parallel_group()
    assert up.tp_group.size() == 2
    counts = tensor_parallel.param_is_not_tensor_parallel_duplicate
    assert counts(up.weight)
    tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(down.bias)
    assert counts(down.bias) == (world.rank == 0)
    tensor_parallel.copy_tensor_model_parallel_attributes(target := torch.zeros(1), up.weight)
    assert target.partition_stride == 2
    with pytest.raises(ValueError, match="has tensor_model_parallel"):
        tensor_parallel.set_tensor_model_parallel_attributes(target, True, 0, 1)


def test_attributes_of_parameters_and_layers(ranks: RankPool) -> None:
    ranks.run(attributes)


def functions(world, sequence_parallel):
    """The functional linears by keyword and by position, with a group of the fork's own."""
    group = dist.new_group([0, 1])
    x, weight, bias = whole(4, 2, 6), whole(8, 6, seed=1), whole(8, seed=2)
    mine = leaf(cut(x, world, 0) if sequence_parallel else x)
    w, b = leaf(cut(weight, world, 0)), leaf(cut(bias, world, 0))
    y = linear_with_grad_accumulation_and_async_allreduce(
        input=mine,
        weight=w,
        bias=b,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=not sequence_parallel,
        sequence_parallel=sequence_parallel,
        grad_output_buffer=None,
        wgrad_deferral_limit=None,
        tp_group=group,
    )
    y.sum().backward()
    trained, mine.grad = mine.grad, None
    frozen = linear_with_frozen_weight(
        mine, w, b, False, not sequence_parallel, sequence_parallel, group
    )
    assert w.grad is not None
    w.grad = None
    frozen.sum().backward()
    assert torch.equal(frozen, y) and torch.equal(mine.grad, trained) and w.grad is None
    whole_x = leaf(x)
    torch.nn.functional.linear(whole_x, weight, bias).sum().backward()
    close(trained, cut(whole_x.grad, world, 0) if sequence_parallel else whole_x.grad)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_functional_linears(ranks: RankPool, sequence_parallel: bool) -> None:
    ranks.run(functions, sequence_parallel)


def static_calls(world):
    """Megatron's own tests call the classes so, with and without a group."""
    parallel_state.initialize_model_parallel(2)
    pg = parallel_state.get_tensor_model_parallel_group()
    x = torch.full((1,), float(world.rank))
    total = torch.ones(1)
    assert torch.equal(mappings._ReduceFromModelParallelRegion.symbolic(None, x, pg), total)
    assert torch.equal(mappings._ReduceFromModelParallelRegion.symbolic(None, x), total)
    assert torch.equal(mappings._CopyToModelParallelRegion.backward(None, x)[0], total)
    assert torch.equal(x, torch.full((1,), float(world.rank)))
    y = mappings._GatherFromSequenceParallelRegion.apply(x, pg, True, None, False)
    assert torch.equal(y, torch.tensor([0.0, 1.0]))
    parts = tensor_parallel.split_tensor_into_1d_equal_chunks(torch.arange(8).view(2, 4))
    assert parts.tolist() == ([0, 1, 2, 3] if world.rank == 0 else [4, 5, 6, 7])
    assert tensor_parallel.gather_split_1d_tensor(parts).tolist() == list(range(8))


def test_static_calls(ranks: RankPool) -> None:
    ranks.run(static_calls)


def test_utilities() -> None:
    x = torch.arange(12).view(2, 6)
    parts = tensor_parallel.split_tensor_along_last_dim(x, 3)
    assert [p.tolist() for p in parts] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert not parts[0].is_contiguous()
    copies = tensor_parallel.split_tensor_along_last_dim(x, 3, contiguous_split_chunks=True)
    assert all(c.is_contiguous() for c in copies)
    utility = tensor_parallel.VocabUtility
    assert utility.vocab_range_from_global_vocab_size(12, 1, 4) == (3, 6)
    assert utility.vocab_range_from_per_partition_vocab_size(3, 2, 4) == (6, 9)
    with pytest.raises(ValueError, match="12 does not divide by 5"):
        divide(12, 5)
    view = tensor_parallel.split_tensor_into_1d_equal_chunks(x)
    assert view.data_ptr() == x.data_ptr()
    copy = tensor_parallel.split_tensor_into_1d_equal_chunks(x, new_buffer=True)
    assert copy.data_ptr() != x.data_ptr() and torch.equal(copy, view)


def test_checkpoints_with_empty_extra_states_load() -> None:
    layer = ColumnParallelLinear(4, 4)
    model = nn.Sequential(layer, RowParallelLinear(4, 4))
    state = model.state_dict() | {"0._extra_state": None, "1._extra_state": None}
    assert sorted(model.state_dict()) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    model.load_state_dict(state)
    layer.load_state_dict(layer.state_dict() | {"_extra_state": None})
    with pytest.raises(NotImplementedError, match=r"core\.checkpoint"):
        layer.sharded_state_dict()


# Positional order and names of Megatron's public functions.
SIGNATURES = {
    "copy_to_tensor_model_parallel_region": ["input_", "group"],
    "reduce_from_tensor_model_parallel_region": ["input_", "group"],
    "scatter_to_tensor_model_parallel_region": ["input_", "group"],
    "gather_from_tensor_model_parallel_region": ["input_", "group"],
    "scatter_to_sequence_parallel_region": ["input_", "group"],
    "gather_from_sequence_parallel_region": [
        "input_",
        "tensor_parallel_output_grad",
        "group",
        "output_split_sizes",
        "use_global_buffer",
    ],
    "reduce_scatter_to_sequence_parallel_region": [
        "input_",
        "group",
        "input_split_sizes",
        "use_global_buffer",
    ],
    "all_gather_last_dim_from_tensor_parallel_region": ["input_", "group"],
    "reduce_scatter_last_dim_to_tensor_parallel_region": ["input_", "group"],
    "all_to_all": ["group", "input_", "output_split_sizes_", "input_split_sizes"],
    "all_to_all_sp2hp": ["input_", "group"],
    "all_to_all_hp2sp": ["input_", "group"],
    "vocab_parallel_cross_entropy": [
        "vocab_parallel_logits",
        "target",
        "label_smoothing",
        "tp_group",
    ],
    "broadcast_data": ["keys", "data", "datatype", "tp_group"],
    "split_tensor_along_last_dim": ["tensor", "num_partitions", "contiguous_split_chunks"],
    "checkpoint": ["function", "distribute_saved_activations"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_positional_arguments(name: str) -> None:
    parameters = inspect.signature(getattr(tensor_parallel, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == SIGNATURES[name]
    assert name in tensor_parallel.__all__


def test_importing_costs_little_above_torch() -> None:
    """CPU seconds of the import after torch's, in a process of its own; the best of up to ten,
    since the first may compile the files and others may share the machine."""
    code = (
        "import time, torch; start = time.process_time(); import core.tensor_parallel; "
        "print(time.process_time() - start)"
    )
    seconds = []
    while len(seconds) < 10 and min(seconds, default=1.0) >= 0.3:
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        seconds.append(float(out.stdout))
    assert min(seconds) < 0.3


def test_one_rank_under_sequence_parallelism_is_silent() -> None:
    """Megatron warns that it switches sequence parallelism off; here there is nothing to say."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = Config(sequence_parallel=True)
        assert not ColumnParallelLinear(4, 4, config=config).sequence_parallel
        assert not RowParallelLinear(4, 4, config=config, tp_group=Group.single()).sequence_parallel


def test_deferred_embedding_gradients_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="defer_embedding_wgrad_compute"):
        ColumnParallelLinear(4, 4, config=Config(defer_embedding_wgrad_compute=True))
