"""Column- and row-parallel linears: sharded equals unsharded, forward and every gradient."""

import pytest
import torch
import torch.nn.functional as F

from core.comm import Group, Ledger, all_reduce_
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from core.tensor_parallel.linear import add_weight_grad
from tests.core.tensor_parallel.cuts import cut, gradients, leaf, whole
from tests.ranks import RankPool

S, B, IN, OUT = 8, 3, 12, 20
close = torch.testing.assert_close
SIZES = pytest.mark.parametrize("size", [1, 2, 4])
SEQUENCE_PARALLEL = pytest.mark.parametrize("sequence_parallel", [False, True])


def tensors():
    """x, weight, bias and the gradient of the output, whole."""
    return whole(S, B, IN), whole(OUT, IN, seed=1), whole(OUT, seed=2), whole(S, B, OUT, seed=3)


def dense():
    """(y, dx, dw, db) of a plain linear."""
    x, weight, bias, dy = tensors()
    x, weight, bias = leaf(x), leaf(weight), leaf(bias)
    y = F.linear(x, weight, bias)
    return y.detach(), *gradients(y, dy, x, weight, bias)


def fill(param, value):
    with torch.no_grad():
        param.copy_(value)


def column_layer(group, **options):
    _, weight, bias, _ = tensors()
    layer = ColumnParallelLinear(
        IN, OUT, tp_group=group, dtype=torch.float64, name="up", seed=1, **options
    )
    fill(layer.weight, cut(weight, group, 0))
    if layer.bias is not None:
        fill(layer.bias, cut(bias, group, 0))
    return layer


def row_layer(group, **options):
    _, weight, bias, _ = tensors()
    layer = RowParallelLinear(
        IN, OUT, tp_group=group, dtype=torch.float64, name="down", seed=1, **options
    )
    fill(layer.weight, cut(weight, group, 1))
    if layer.bias is not None:
        fill(layer.bias, bias)
    return layer


def check_column(world, sequence_parallel, gather_output):
    x, _, _, dy = tensors()
    y, dx, dw, db = dense()
    layer = column_layer(world, sequence_parallel=sequence_parallel, gather_output=gather_output)
    mine = leaf(cut(x, world, 0) if sequence_parallel else x)
    out, left_over = layer(mine)
    assert left_over is None
    close(out, y if gather_output else cut(y, world, 2))
    dy = dy if gather_output else cut(dy, world, 2)
    kept = dy.clone()
    grads = gradients(out, dy, mine, layer.weight, layer.bias)
    close(grads[0], cut(dx, world, 0) if sequence_parallel else dx)
    close(grads[1], cut(dw, world, 0))
    close(grads[2], cut(db, world, 0))
    assert torch.equal(dy, kept)


@SIZES
@SEQUENCE_PARALLEL
@pytest.mark.parametrize("gather_output", [False, True])
def test_column_equals_dense(
    ranks: RankPool, size: int, sequence_parallel: bool, gather_output: bool
) -> None:
    ranks.run(check_column, sequence_parallel, gather_output, size=size)


def check_row(world, sequence_parallel, input_is_parallel):
    x, _, _, dy = tensors()
    y, dx, dw, db = dense()
    layer = row_layer(
        world, sequence_parallel=sequence_parallel, input_is_parallel=input_is_parallel
    )
    mine = leaf(cut(x, world, 2) if input_is_parallel else x)
    out, left_over = layer(mine)
    assert left_over is None
    close(out, cut(y, world, 0) if sequence_parallel else y)
    dy = cut(dy, world, 0) if sequence_parallel else dy
    kept = dy.clone()
    grads = gradients(out, dy, mine, layer.weight, layer.bias)
    close(grads[0], cut(dx, world, 2) if input_is_parallel else dx)
    close(grads[1], cut(dw, world, 1))
    shared = sequence_parallel and world.size > 1
    assert layer.bias.shard.sum_over == (("tp",) if shared else ())
    assert layer.bias.sequence_parallel is shared
    close(all_reduce_(grads[2].clone(), world, tag="test") if shared else grads[2], db)
    assert torch.equal(dy, kept)


@SIZES
@pytest.mark.parametrize(
    ("sequence_parallel", "input_is_parallel"), [(False, True), (True, True), (False, False)]
)
def test_row_equals_dense(
    ranks: RankPool, size: int, sequence_parallel: bool, input_is_parallel: bool
) -> None:
    ranks.run(check_row, sequence_parallel, input_is_parallel, size=size)


def check_pair(world, sequence_parallel):
    """up, activation, down: what a transformer's MLP does, bias returned by the second."""
    group, alone = world, Group.single()

    def mlp(group, x):
        options = {"tp_group": group, "seed": 5, "dtype": torch.float64, "init_std": 0.3}
        up = ColumnParallelLinear(
            IN, OUT, name="up", sequence_parallel=sequence_parallel, **options
        )
        down = RowParallelLinear(
            OUT, IN, name="down", skip_bias_add=True, sequence_parallel=sequence_parallel, **options
        )
        y, bias = down(F.gelu(up(x)[0]))
        return y + bias, (up.weight, up.bias, down.weight, down.bias)

    x, dy = whole(S, B, IN), whole(S, B, IN, seed=7)
    x_whole, x_mine = leaf(x), leaf(cut(x, world, 0) if sequence_parallel else x)
    y, params = mlp(alone, x_whole)
    y_mine, params_mine = mlp(group, x_mine)
    dx, *grads = gradients(y, dy, x_whole, *params)
    rows = cut(dy, world, 0) if sequence_parallel else dy
    dx_mine, *grads_mine = gradients(y_mine, rows, x_mine, *params_mine)
    close(y_mine.detach(), cut(y.detach(), world, 0) if sequence_parallel else y.detach())
    close(dx_mine, cut(dx, world, 0) if sequence_parallel else dx)
    for grad_mine, grad, param in zip(grads_mine, grads, params_mine, strict=True):
        shard = param.shard
        if "tp" in shard.sum_over:
            all_reduce_(grad_mine, world, tag="test")
        close(grad_mine, grad[shard.local_slices(world.rank, world.size)[1]])
    return [p.shard.decay for p in params_mine]


@SIZES
@SEQUENCE_PARALLEL
def test_a_column_row_pair_with_its_own_initial_values_equals_one_rank(
    ranks: RankPool, size: int, sequence_parallel: bool
) -> None:
    decays = ranks.run(check_pair, sequence_parallel, size=size)
    assert decays[0] == [True, False, True, False]


# ---- named after bug reports --------------------------------------------------------------------


def check_row_bias(world):
    layer = RowParallelLinear(8, 4, tp_group=world)
    fill(layer.weight, 0.0)
    fill(layer.bias, 1.0)
    y, _ = layer(torch.randn(5, 2, 8 // world.size))
    assert torch.equal(y, torch.ones(5, 2, 4))
    y.sum().backward()
    return layer.bias.grad


def test_c015_row_bias_is_counted_once(ranks: RankPool) -> None:
    """huggingface/text-generation-inference#1036: the bias was added on every rank before the sum,
    so that it counted tp times. It is added after the reduction, and its gradient is tp 1's."""
    for grads in (ranks.run(check_row_bias, size=4), ranks.run(check_row_bias, size=1)):
        assert all(torch.equal(g, torch.full((4,), 10.0)) for g in grads)


def test_c004_replicated_parameters_of_cut_tokens_are_marked(ranks: RankPool) -> None:
    """NVIDIA/Megatron-LM#1446: under sequence parallelism a replicated parameter that sees a slice
    of the tokens kept a partial gradient. The Shard of a row-parallel bias says it must be added,
    and the sum is tp 1's."""
    ranks.run(check_row, True, True, size=2)


def check_no_warning(world, sequence_parallel):
    for layer, x in (
        (column_layer(world, sequence_parallel=sequence_parallel), whole(S, B, IN)),
        (row_layer(world, sequence_parallel=sequence_parallel), whole(S, B, IN // world.size)),
    ):
        y, _ = layer(leaf(x))
        y.sum().backward()


@SEQUENCE_PARALLEL
@pytest.mark.parametrize("size", [1, 2])
def test_c014_no_warning_reaches_a_user(
    ranks: RankPool, size: int, sequence_parallel: bool
) -> None:
    """pytorch/pytorch#122521: each step printed that autograd passes through a collective without
    backward. Here collectives run inside autograd functions; the pool turns warnings into errors,
    also those that other frameworks print for sequence parallelism on one rank."""
    ranks.run(check_no_warning, sequence_parallel, size=size)


# ---- the ledger ---------------------------------------------------------------------------------


def count_calls(world, sequence_parallel):
    group = Group("tp", world.ranks, world.rank, Ledger(), world.handle)
    up = column_layer(group, sequence_parallel=sequence_parallel)
    rows = S // world.size if sequence_parallel else S
    gradients(up(x := leaf(whole(rows, B, IN)))[0], torch.tensor(1.0), x)
    down = row_layer(group, sequence_parallel=sequence_parallel)
    gradients(down(x := leaf(whole(S, B, IN // world.size)))[0], torch.tensor(1.0), x)
    return [(e.op, e.tag, e.numel) for e in group.ledger.events()]


def test_ledger_of_tensor_parallelism(ranks: RankPool) -> None:
    for events in ranks.run(count_calls, False):
        assert events == [
            ("all_reduce", "up.grad", S * B * IN),
            ("all_reduce", "down", S * B * OUT),
        ]


def test_ledger_of_sequence_parallelism(ranks: RankPool) -> None:
    """Two gathers and two scatters, and the input gathered again for the weight gradient."""
    for events in ranks.run(count_calls, True):
        assert events == [
            ("all_gather", "up", S * B * IN),
            ("all_gather", "up.regather", S * B * IN),
            ("reduce_scatter", "up.grad", S * B * IN),
            ("reduce_scatter", "down", S * B * OUT),
            ("all_gather", "down.grad", S * B * OUT),
        ]


def test_nothing_is_recorded_on_one_rank(ranks: RankPool) -> None:
    assert ranks.run(count_calls, True, size=1) == [[]]


def frozen_calls(world):
    group = Group("tp", world.ranks, world.rank, Ledger(), world.handle)
    up = column_layer(group, sequence_parallel=True)
    up.weight.requires_grad_(False)
    x, _, _, dy = tensors()
    mine = leaf(cut(x, world, 0))
    dx, db = gradients(up(mine)[0], cut(dy, world, 2), mine, up.bias)
    close(dx, cut(dense()[1], world, 0))
    close(db, cut(dense()[3], world, 0))
    return [e.tag for e in group.ledger.events()]


def test_a_frozen_weight_needs_no_second_gather(ranks: RankPool) -> None:
    assert ranks.run(frozen_calls) == [["up", "up.grad"]] * 2


# ---- gradients that are handed on ----------------------------------------------------------------


def check_handed_on(world, sequence_parallel):
    """main_grad gets what autograd would have, accumulated over two microbatches."""
    _, _, dw, db = dense()
    x, _, _, dy = tensors()
    up = column_layer(world, sequence_parallel=sequence_parallel)
    down = row_layer(world, sequence_parallel=sequence_parallel)
    for layer in (up, down):
        for param in layer.parameters():
            param.main_grad = torch.zeros_like(param)
        layer.weight_grad = lambda p, dy, x: add_weight_grad(p.main_grad, dy, x)
        layer.bias_grad = lambda p, dy: p.main_grad.add_(dy.sum(0))
    for _ in range(2):
        inner = leaf(cut(x, world, 0) if sequence_parallel else x)
        (up(inner)[0] * cut(dy, world, 2)).sum().backward()
        rows = cut(dy, world, 0) if sequence_parallel else dy
        (down(leaf(cut(x, world, 2)))[0] * rows).sum().backward()
    if sequence_parallel:
        all_reduce_(down.bias.main_grad, world, tag="test")
    close(up.weight.main_grad, 2 * cut(dw, world, 0))
    close(up.bias.main_grad, 2 * cut(db, world, 0))
    close(down.weight.main_grad, 2 * cut(dw, world, 1))
    close(down.bias.main_grad, 2 * db)
    assert all(p.grad is None for layer in (up, down) for p in layer.parameters())


@SEQUENCE_PARALLEL
def test_weight_and_bias_gradients_go_where_the_layer_says(
    ranks: RankPool, sequence_parallel: bool
) -> None:
    ranks.run(check_handed_on, sequence_parallel)


def test_megatrons_fusion_adds_to_main_grad() -> None:
    x, weight, bias, dy = tensors()
    weight = torch.nn.Parameter(weight)
    weight.main_grad = torch.ones_like(weight)
    y = linear_with_grad_accumulation_and_async_allreduce(x, weight, bias, True, False, False)
    (y * dy).sum().backward()
    close(weight.main_grad, 1 + dense()[2])
    assert weight.grad is None

    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = True
    y = linear_with_grad_accumulation_and_async_allreduce(x, weight, bias, True, False, False)
    (y * dy).sum().backward()
    close(weight.main_grad, 1 + 2 * dense()[2])
    assert weight.grad_added_to_main_grad is True
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_c082_fusion_without_main_grad_or_an_extension_gives_the_same_numbers() -> None:
    """NVIDIA/Megatron-LM#1885: fusion is on by default and fails without a compiled extension. Here
    it needs none, and a parameter without main_grad gets its gradient from autograd."""

    class Config:
        gradient_accumulation_fusion = True
        params_dtype = torch.float64

    x, weight, bias, dy = tensors()
    layer = ColumnParallelLinear(IN, OUT, config=Config())
    fill(layer.weight, weight)
    fill(layer.bias, bias)
    (layer(x)[0] * dy).sum().backward()
    close(layer.weight.grad, dense()[2])


def test_fp32_main_grad_of_a_bf16_weight() -> None:
    x, dy = whole(S * B, IN, dtype=torch.bfloat16), whole(S * B, OUT, dtype=torch.bfloat16)
    main_grad = torch.zeros(OUT, IN)
    add_weight_grad(main_grad, dy, x)
    close(main_grad, dy.float().t() @ x.float())


# ---- types, shapes, refusals --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_are_those_of_the_input(dtype: torch.dtype) -> None:
    """Low precision is held to the error that plain torch makes against float64."""
    x, weight, bias, dy = (t.to(dtype) for t in tensors())
    layer = ColumnParallelLinear(IN, OUT, dtype=dtype)
    fill(layer.weight, weight)
    fill(layer.bias, bias)
    x = leaf(x)
    y, _ = layer(x)
    grads = gradients(y, dy, x, layer.weight, layer.bias)
    plain_x, plain_w, plain_b = leaf(x), leaf(weight), leaf(bias)
    plain = F.linear(plain_x, plain_w, plain_b)
    plain_grads = gradients(plain, dy, plain_x, plain_w, plain_b)
    x64, w64, b64 = (leaf(t.double()) for t in (x, weight, bias))
    exact = F.linear(x64, w64, b64)
    exact_grads = gradients(exact, dy.double(), x64, w64, b64)
    for ours, theirs, right in zip(
        (y, *grads), (plain, *plain_grads), (exact, *exact_grads), strict=True
    ):
        assert ours.dtype == dtype
        error, allowed = ((t.detach().double() - right).abs().max() for t in (ours, theirs))
        assert error <= 2 * allowed + 1e-14


def test_autocast_runs_in_its_type_and_gives_gradients_in_the_parameters() -> None:
    layer = ColumnParallelLinear(IN, OUT)
    x = leaf(whole(S, B, IN, dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = layer(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == x.grad.dtype == torch.float32


@pytest.mark.parametrize("shape", [(IN,), (0, IN), (5, IN), (2, 3, 4, IN)])
def test_any_number_of_leading_dimensions(shape: tuple[int, ...]) -> None:
    layer = column_layer(Group.single())
    x = leaf(whole(*shape))
    y, _ = layer(x)
    close(y, F.linear(x, layer.weight, layer.bias))
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_only_the_input_is_saved() -> None:
    x = leaf(whole(S, B, IN))
    layer = column_layer(Group.single())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), layer.weight.data_ptr()}
    saved.clear()
    layer.weight.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    assert {t.data_ptr() for t in saved} == {layer.weight.data_ptr()}


def shown(world):
    up = ColumnParallelLinear(1024, 4096, tp_group=world)
    down = RowParallelLinear(4096, 1024, bias=False, tp_group=world)
    out = ColumnParallelLinear(8, 12, logical_output_size=10, tp_group=world)
    return repr(up), repr(down), repr(out)


def test_repr_shows_the_cut(ranks: RankPool) -> None:
    assert ranks.run(shown)[1] == (
        "ColumnParallelLinear(1024 → 4096, mine 2048…4095 of tp 1/2)",
        "RowParallelLinear(4096 → 1024, mine 2048…4095 of tp 1/2, no bias)",
        "ColumnParallelLinear(8 → 10 (+ 2 padding), mine 6…11 of tp 1/2)",
    )


def refusals(world):
    messages = []
    for make in (
        lambda: ColumnParallelLinear(8, 9, tp_group=world, name="layers.0.up"),
        lambda: RowParallelLinear(9, 8, tp_group=world, name="layers.0.down"),
        lambda: RowParallelLinear(
            8, 8, tp_group=world, sequence_parallel=True, input_is_parallel=False
        ),
        lambda: ColumnParallelLinear(8, 8, tp_group=world, is_expert=True),
        lambda: ColumnParallelLinear(8, 8, tp_group=world, grad_output_buffer=[]),
        lambda: ColumnParallelLinear(8, 8, tp_group=world, skip_weight_param_allocation=True)(
            torch.ones(8)
        ),
        lambda: ColumnParallelLinear(8, 8, tp_group=world)(torch.ones(8), weight=torch.ones(8, 8)),
    ):
        with pytest.raises((ValueError, RuntimeError, NotImplementedError)) as caught:
            make()
        messages.append(str(caught.value))
    return messages


def test_refusals_say_what_does_not_fit(ranks: RankPool) -> None:
    messages = ranks.run(refusals)[0]
    for message, part in zip(
        messages,
        (
            "layers.0.up: output_size 9 does not divide by the 2 ranks",
            "layers.0.down: input_size 9 does not divide by the 2 ranks",
            "input_is_parallel=True",
            "is_expert=True",
            "grad_output_buffer",
            "pass weight=",
            "a weight of shape (8, 8), not (4, 8)",
        ),
        strict=True,
    ):
        assert part in message
