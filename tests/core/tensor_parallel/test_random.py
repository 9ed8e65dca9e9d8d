"""Megatron's tracker and checkpoints, on the CPU."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from core import parallel_state
from core.saved_activations import SavedActivations
from core.tensor_parallel import (
    CheckpointWithoutOutput,
    ColumnParallelLinear,
    RowParallelLinear,
    checkpoint,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from core.tensor_parallel.random import CudaRNGStatesTracker
from tests.core.tensor_parallel.cuts import gradients, leaf, whole
from tests.ranks import RankPool


@pytest.fixture(autouse=True)
def fresh_tracker():
    get_cuda_rng_tracker().reset()
    yield
    get_cuda_rng_tracker().reset()


# ---- tracker ------------------------------------------------------------------------------------


def test_states_and_seeds_are_added_once() -> None:
    tracker = CudaRNGStatesTracker()
    assert not tracker.is_initialized() and tracker.get_states() == {}
    tracker.set_states({"a": 1234})
    assert tracker.get_states()["a"] == 1234 and tracker.is_initialized()
    tracker.reset()
    tracker.add("b", 1111)
    with pytest.raises(ValueError, match="seed 1111 of 'c' is taken"):
        tracker.add("c", 1111)
    with pytest.raises(ValueError, match="'b' exists already"):
        tracker.add("b", 5)
    torch.manual_seed(1111)
    assert torch.equal(tracker.get_states()["b"], torch.get_rng_state())
    with pytest.raises(ValueError, match="no random state 'z'; call model_parallel_cuda"):
        with tracker.fork("z"):
            pass


def test_a_fork_draws_from_its_own_state_and_moves_it_on() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("b", 3)
    torch.manual_seed(0)
    outside = torch.rand(4)
    torch.manual_seed(0)
    first = torch.rand(2)
    with tracker.fork("b"):
        inside = torch.rand(2)
    second = torch.rand(2)
    with tracker.fork("b"):
        inside = torch.cat((inside, torch.rand(2)))
    assert torch.equal(torch.cat((first, second)), outside)
    torch.manual_seed(3)
    assert torch.equal(torch.cat((torch.rand(2), torch.rand(2))), inside)


@pytest.mark.parametrize("inner", ["b", "c"])
def test_a_fork_inside_a_fork(inner: str) -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("b", 3)
    tracker.add("c", 4)
    with tracker.fork("b"):
        drawn = {"b": [torch.rand(2)], "c": []}
        with tracker.fork(inner):
            drawn[inner].append(torch.rand(2))
        drawn["b"].append(torch.rand(2))
    for name, seed in (("b", 3), ("c", 4)):
        torch.manual_seed(seed)
        assert all(torch.equal(torch.rand(2), x) for x in drawn[name])


def test_an_error_inside_a_fork_leaves_the_generator_as_before() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("b", 3)
    before = torch.get_rng_state()
    with pytest.raises(KeyError), tracker.fork("b"):
        torch.rand(1)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


def masks(world):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(123)
    shared = F.dropout(torch.ones(64), 0.5)
    with get_cuda_rng_tracker().fork():
        own = F.dropout(torch.ones(64), 0.5)
    return shared, own


def test_tp_ranks_share_the_default_stream_and_fork_their_own(ranks: RankPool) -> None:
    (shared_0, own_0), (shared_1, own_1), (shared_2, own_2), _ = ranks.run(masks, size=4)
    assert torch.equal(shared_0, shared_1) and torch.equal(shared_0, shared_2)
    assert not torch.equal(own_0, own_1) and torch.equal(own_0, own_2)


def test_other_kinds_of_tracker_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="use_te_rng_tracker=True"):
        model_parallel_cuda_manual_seed(1, te_rng_tracker=True)
    with pytest.raises(NotImplementedError, match="use_cudagraphable_rng=True"):
        get_cuda_rng_tracker(use_cudagraphable_rng=True)


# ---- checkpoint ---------------------------------------------------------------------------------


def noisy(x, weight, scale=1.0):
    """Draws from the default stream and from the tracker's."""
    y = F.dropout(x @ weight, 0.5)
    with get_cuda_rng_tracker().fork():
        y = F.dropout(F.gelu(y), 0.5)
    return scale * y


def run_noisy(how):
    model_parallel_cuda_manual_seed(5)
    x, weight = leaf(whole(4, 4)), leaf(whole(4, 4, seed=1))
    y = how(x, weight)
    y = F.dropout(y, 0.5)  # what comes later must draw as without a checkpoint
    grads = gradients(y, whole(4, 4, seed=2), x, weight)
    return y.detach(), *grads, torch.rand(3)


def test_c008_recomputation_is_invisible() -> None:
    """allenai/OLMo-core#828: recomputation drew another dropout mask than the forward had. Every
    stream is restored, also the tensor-parallel one, and moves on as without a checkpoint."""
    plain = run_noisy(lambda x, w: noisy(x, w, 2.0))
    again = run_noisy(lambda x, w: checkpoint(noisy, False, x, w, 2.0))
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


def test_checkpoint_keeps_autocast() -> None:
    x, weight = leaf(whole(4, 4, dtype=torch.float32)), leaf(whole(4, 4, dtype=torch.float32))
    seen = []

    def multiply(x):
        y = x @ weight
        seen.append(y.dtype)
        return y

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpoint(multiply, False, x)
    y.float().sum().backward()
    assert seen == [torch.bfloat16] * 2


def test_checkpoint_with_several_outputs_one_of_them_unused() -> None:
    x = leaf(whole(3))
    y, _, number = checkpoint(lambda x: (2 * x, 3 * x, 7), False, x)
    y.sum().backward()
    assert number == 7 and torch.equal(x.grad, torch.full((3,), 2.0).double())


def test_checkpoint_refuses_autograd_grad() -> None:
    x = leaf(whole(3))
    with pytest.raises(RuntimeError, match=r"works with \.backward\(\)"):
        torch.autograd.grad(checkpoint(torch.exp, False, x).sum(), x)


@pytest.mark.parametrize("without_output", [False, True])
def test_parameters_learn_though_the_input_needs_no_gradient(without_output: bool) -> None:
    """The first layer behind a frozen embedding: what the function closes over needs gradients."""
    weight, x = leaf(whole(3, 3)), whole(3)
    if without_output:
        part = CheckpointWithoutOutput()
        y = part.checkpoint(lambda x: x @ weight, x)
        z = 2 * y
        part.discard_output_and_register_recompute(z)
    else:
        z = 2 * checkpoint(lambda x: x @ weight, False, x)
    z.sum().backward()
    torch.testing.assert_close(weight.grad, 2 * x[:, None].expand(3, 3))
    assert x.grad is None


@pytest.mark.parametrize("around", ["forward", "backward", "both"])
def test_the_same_mask_in_a_fork_within_a_fork(around: str) -> None:
    tracker = get_cuda_rng_tracker()
    model_parallel_cuda_manual_seed(7)

    def drop(x):
        with tracker.fork():
            return F.dropout(x, 0.5)

    def in_fork(wanted: str):
        return tracker.fork() if around in (wanted, "both") else contextlib.nullcontext()

    x = leaf(torch.ones(64, dtype=torch.float64))
    with in_fork("forward"):
        torch.rand(5)
        y = checkpoint(drop, False, x)
    with in_fork("backward"):
        torch.rand(3)
        y.sum().backward()
    assert torch.equal(y > 0, x.grad > 0) and 0 < int((y > 0).sum()) < 64


def test_without_gradients_the_callers_tensor_stays_whole() -> None:
    x = whole(4, 4)
    with torch.no_grad():
        checkpoint(torch.exp, True, x)
    assert x.shape == (4, 4)


def distributed(world):
    x = leaf(whole(4, 4))
    hidden = 1 * x
    y = checkpoint(lambda h: h**3, True, hidden, tp_group=world)
    kept = hidden.data.shape
    y.sum().backward()
    torch.testing.assert_close(x.grad, 3 * whole(4, 4) ** 2)
    return tuple(kept)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_saved_activations_can_be_cut_over_tp(ranks: RankPool, size: int) -> None:
    assert ranks.run(distributed, size=size) == [(16 // size,)] * size


def distributed_leaf(world):
    """The received activation of a pipeline's chunk, while saved tensors are counted."""
    x = leaf(whole(4, 4))
    with SavedActivations():
        y = checkpoint(lambda h: h**3, True, x, tp_group=world)
        y.sum().backward()
    torch.testing.assert_close(x.grad, 3 * whole(4, 4) ** 2)
    return torch.equal(x.detach(), whole(4, 4))


def test_a_cut_leaf_is_whole_again_under_hooks_on_saved_tensors(ranks: RankPool) -> None:
    assert ranks.run(distributed_leaf, size=2) == [True, True]


def recomputed_layers(world, sequence_parallel):
    """Column and row linears inside a checkpoint: collectives run in the recomputation too."""
    options = {
        "tp_group": world,
        "seed": 1,
        "dtype": torch.float64,
        "sequence_parallel": sequence_parallel,
    }
    up = ColumnParallelLinear(6, 8, name="up", **options)
    down = RowParallelLinear(8, 6, name="down", **options)
    params = [*up.parameters(), *down.parameters()]

    def block(x):
        return down(F.gelu(up(x)[0]))[0]

    results = []
    for run in (block, lambda x: checkpoint(block, False, x)):
        for param in params:
            param.grad = None
        x = leaf(whole(4, 2, 6))
        y = run(x)
        results.append((y.detach(), *gradients(y, whole(4, 2, 6, seed=1), x, *params)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputed_parallel_layers(ranks: RankPool, sequence_parallel: bool) -> None:
    ranks.run(recomputed_layers, sequence_parallel)


# ---- checkpoint without output ------------------------------------------------------------------


def test_output_memory_is_given_up_and_comes_back() -> None:
    def run(discard):
        model_parallel_cuda_manual_seed(5)
        x, w, v = leaf(whole(4, 4)), leaf(whole(4, 4, seed=1)), leaf(whole(4, 4, seed=3))
        if discard:
            block = CheckpointWithoutOutput()
            y = block.checkpoint(noisy, x, w)
            z = torch.exp(y @ v)
            block.discard_output_and_register_recompute(z)
            assert y.untyped_storage().size() == 0
        else:
            y = noisy(x, w)
            z = torch.exp(y @ v)
        return z.detach().clone(), *gradients(z, whole(4, 4, seed=2), x, w, v)

    for one, other in zip(run(False), run(True), strict=True):
        assert torch.equal(one, other)


def test_fp8_and_managers_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="fp8=True"):
        CheckpointWithoutOutput(fp8=True)
