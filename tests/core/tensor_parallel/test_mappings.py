"""Mappings: what each does to whole tensors, its backward against its dual, in float64."""

import pytest
import torch

from core.comm import Group, Ledger
from core.tensor_parallel import mappings as m
from tests.core.tensor_parallel.cuts import cut, leaf, whole
from tests.ranks import RankPool

SIZES = pytest.mark.parametrize("size", [1, 2, 4])
close = torch.testing.assert_close
N, H = 8, 12


def partial(group, *shape):
    """Values that differ by rank."""
    return whole(*shape, seed=10 + group.rank)


def summed(group, *shape):
    return sum(whole(*shape, seed=10 + rank) for rank in range(group.size))


# name -> (function, what each rank puts in, what it gets, gradient coming in -> gradient going out)
# A gradient that is the same on every rank is whole(...), one that differs is partial(...).
def cases(g):
    same, different = whole(N, H, seed=1), partial(g, N, H)
    part_rows, part_columns = partial(g, N // g.size, H), partial(g, N, H // g.size)
    all_rows = torch.cat([whole(N // g.size, H, seed=10 + r) for r in range(g.size)])
    all_columns = torch.cat([whole(N, H // g.size, seed=10 + r) for r in range(g.size)], dim=-1)
    total = summed(g, N, H)
    return {
        "copy": (m.copy_to_tensor_model_parallel_region, same, same, different, total),
        "reduce": (m.reduce_from_tensor_model_parallel_region, different, total, same, same),
        "scatter": (
            m.scatter_to_tensor_model_parallel_region,
            same,
            cut(same, g, -1),
            part_columns,
            all_columns,
        ),
        "gather": (
            m.gather_from_tensor_model_parallel_region,
            part_columns,
            all_columns,
            same,
            cut(same, g, -1),
        ),
        "scatter_sequence": (
            m.scatter_to_sequence_parallel_region,
            same,
            cut(same, g, 0),
            part_rows,
            all_rows,
        ),
        "gather_sequence": (
            m.gather_from_sequence_parallel_region,
            part_rows,
            all_rows,
            different,
            cut(total, g, 0),
        ),
        "gather_sequence_replicated": (
            lambda x, group: m.gather_from_sequence_parallel_region(x, False, group),
            part_rows,
            all_rows,
            same,
            cut(same, g, 0),
        ),
        "reduce_scatter_sequence": (
            m.reduce_scatter_to_sequence_parallel_region,
            different,
            cut(total, g, 0),
            part_rows,
            all_rows,
        ),
        "all_gather_last_dim": (
            m.all_gather_last_dim_from_tensor_parallel_region,
            part_columns,
            all_columns,
            different,
            cut(total, g, -1),
        ),
        "reduce_scatter_last_dim": (
            m.reduce_scatter_last_dim_to_tensor_parallel_region,
            different,
            cut(total, g, -1),
            part_columns,
            all_columns,
        ),
        "sp2hp": (
            m.all_to_all_sp2hp,
            part_rows,
            cut(all_rows, g, -1),
            part_columns,
            cut(all_columns, g, 0),
        ),
        "hp2sp": (
            m.all_to_all_hp2sp,
            part_columns,
            cut(all_columns, g, 0),
            part_rows,
            cut(all_rows, g, -1),
        ),
    }


NAMES = list(cases(Group.single()))


def check_case(world, name):
    function, x, y, dy, dx = cases(world)[name]
    x, kept, dy_kept = leaf(x), x.clone(), dy.clone()
    out = function(x, group=world)
    close(out.detach(), y)
    out.backward(dy)
    close(x.grad, dx)
    assert torch.equal(x.detach(), kept) and torch.equal(dy, dy_kept), "an argument was changed"


@SIZES
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward(ranks: RankPool, size: int, name: str) -> None:
    ranks.run(check_case, name, size=size)


def check_dual(world, name):
    """<f(x), dy> = <x, f'(dy)>, added over the ranks: backward is the transpose of forward.

    A tensor that is the same on every rank stands for one tensor, so it counts once.
    """
    function, x, _, dy, _ = cases(world)[name]
    same = whole(N, H, seed=1)
    x = leaf(x)
    y = function(x, group=world)
    y.backward(dy)

    def product(a, b, replicated):
        total = (a * b).sum().reshape(1)
        if replicated:
            return total
        return m._reduce(total, world)

    y_is_same = torch.equal(dy, same) or name in ("reduce", "gather")
    x_is_same = torch.equal(x.detach(), same)
    close(product(y.detach(), dy, y_is_same), product(x.detach(), x.grad, x_is_same))


@pytest.mark.parametrize("name", NAMES)
def test_backward_is_the_transpose(ranks: RankPool, name: str) -> None:
    ranks.run(check_dual, name, size=2)


def check_uneven(world):
    lengths = [1, 3, 0, 2][: world.size]
    rows = sum(lengths)
    every = whole(rows, H)
    parts = every.split(lengths)
    x = leaf(parts[world.rank])
    y = m.gather_from_sequence_parallel_region(x, group=world, output_split_sizes=lengths)
    close(y.detach(), every)
    y.backward(partial(world, rows, H))
    close(x.grad, summed(world, rows, H).split(lengths)[world.rank])

    x = leaf(partial(world, rows, H))
    y = m.reduce_scatter_to_sequence_parallel_region(x, world, lengths)
    close(y.detach(), summed(world, rows, H).split(lengths)[world.rank])
    y.backward(parts[world.rank])
    close(x.grad, every)


@pytest.mark.parametrize("size", [2, 4])
def test_uneven_parts(ranks: RankPool, size: int) -> None:
    ranks.run(check_uneven, size=size)


def check_all_to_all(world):
    """Rank r sends 1 + (2 r + j) % 3 rows to rank j."""
    r = world.rank
    sent = [1 + (2 * r + j) % 3 for j in range(world.size)]
    received = [1 + (2 * j + r) % 3 for j in range(world.size)]
    x = leaf(torch.full((sum(sent), 2), float(r), dtype=torch.float64))
    y = m.all_to_all(world, x, received, sent)
    wanted = torch.cat([torch.full((n, 2), float(j)) for j, n in enumerate(received)])
    close(y.detach(), wanted.double())
    y.backward(y.detach() + 10 * r)
    # what I sent to j comes back as my own number plus ten times j
    back = torch.cat([torch.full((n, 2), r + 10.0 * j) for j, n in enumerate(sent)])
    close(x.grad, back.double())


@SIZES
def test_all_to_all_with_lengths(ranks: RankPool, size: int) -> None:
    ranks.run(check_all_to_all, size=size)


def check_second_derivative(world):
    x = leaf(whole(N, H))
    y = m.copy_to_tensor_model_parallel_region(x, world)
    (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    close(ddx, 6 * world.size * x.detach())  # of the loss added over the ranks


def test_a_backward_can_be_differentiated(ranks: RankPool) -> None:
    ranks.run(check_second_derivative, size=2)


def check_contexts(world):
    """Backward on contexts that other code made: Megatron's attributes and nothing else."""

    class Context:
        group = world.handle
        tensor_parallel_output_grad = True
        output_split_sizes = None
        input_split_sizes = None
        use_global_buffer = False

    # The group comes from ctx; Megatron's tuples have one value for each of its arguments.
    lengths = {
        m._CopyToModelParallelRegion: 2,
        m._ReduceFromModelParallelRegion: 2,
        m._ScatterToModelParallelRegion: 2,
        m._GatherFromModelParallelRegion: 2,
        m._ScatterToSequenceParallelRegion: 2,
        m._GatherFromSequenceParallelRegion: 5,
        m._ReduceScatterToSequenceParallelRegion: 4,
        m._AllGatherFromTensorParallelRegion: 2,
        m._ReduceScatterToTensorParallelRegion: 2,
    }
    x = whole(N, H)
    for function, length in lengths.items():
        answer = function.backward(Context(), x)
        assert len(answer) == length and not any(answer[1:]), function
        assert function.symbolic(None, x, world.handle) is not None
    close(m._CopyToModelParallelRegion.backward(Context(), x)[0], world.size * x)
    close(m._ReduceFromModelParallelRegion.symbolic(None, x, world.handle), world.size * x)
    close(m._ScatterToSequenceParallelRegion.symbolic(None, x, world), cut(x, world, 0))
    close(m._GatherFromModelParallelRegion.backward(Context(), x)[0], cut(x, world, -1))
    close(
        m._GatherFromSequenceParallelRegion.backward(Context(), x)[0], world.size * cut(x, world, 0)
    )


@pytest.mark.parametrize("size", [1, 2])
def test_megatrons_static_form(ranks: RankPool, size: int) -> None:
    ranks.run(check_contexts, size=size)


def check_tags(world):
    group = Group("tp", world.ranks, world.rank, Ledger(), world.handle)
    x = leaf(whole(N, H))
    m.copy_to_tensor_model_parallel_region(x, group, tag="layers.3.in").sum().backward()
    m.gather_from_sequence_parallel_region(x, group=group).sum().backward()
    return [(e.op, e.tag) for e in group.ledger.events()]


def test_tags(ranks: RankPool) -> None:
    assert ranks.run(check_tags)[1] == [
        ("all_reduce", "layers.3.in.grad"),
        ("all_gather", "gather_sequence"),
        ("reduce_scatter", "gather_sequence.grad"),
    ]


def check_refusals(world):
    with pytest.raises(ValueError, match="first dimension of 3 does not divide by the 2 ranks"):
        m.scatter_to_sequence_parallel_region(torch.ones(3, 2), world)
    with pytest.raises(ValueError, match="5 does not divide by 2"):
        m.scatter_to_tensor_model_parallel_region(torch.ones(2, 5), world)
    with pytest.raises(ValueError, match=r"core\.tensor_parallel\.mappings"):
        m._gather_along_first_dim(torch.ones(2, 2, requires_grad=True), world)
    with pytest.raises(TypeError, match="a torch ProcessGroup or None"):
        m.copy_to_tensor_model_parallel_region(torch.ones(2), "tp")


def test_refusals(ranks: RankPool) -> None:
    ranks.run(check_refusals)
