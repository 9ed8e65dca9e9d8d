"""One bucket's memory: what is overwritten and what is added to, what comes and goes."""

import pytest
import torch
from torch import nn

from core.comm import Group
from core.data_parallel.buckets import BucketMemory, FlatParameter
from core.data_parallel.layout import lay_out
from core.shard import Shard

ALONE = Group.single("dp_cp")


class Two(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in (("a", (3, 4)), ("b", (5,))):
            values = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
            param = nn.Parameter(values.to(dtype))
            param.shard = Shard(shape)
            self.register_parameter(name, param)


def memory_of(module: nn.Module, dp: Group = ALONE, strategy: str = "no_shard", **options):
    params = dict(module.named_parameters())
    (bucket,) = lay_out([(n, tuple(p.shape), p.shard) for n, p in params.items()], ways=dp.size)
    return BucketMemory(bucket, params, dp, strategy, **options)


def test_parameters_keep_their_values_names_and_kind():
    two = Two()
    memory = memory_of(two)
    assert [name for name, _ in two.named_parameters()] == ["a", "b"]
    assert all(isinstance(p, nn.Parameter) and type(p) is FlatParameter for p in two.parameters())
    assert torch.equal(two.a, torch.arange(1.0, 13.0).view(3, 4))
    assert memory.params.sum() == two.a.sum() + two.b.sum()
    memory.params.mul_(2)
    assert torch.equal(two.b, 2 * torch.arange(1.0, 6.0))


def test_a_step_begins_with_zeros_that_nobody_has_written():
    two = Two()
    memory = memory_of(two)
    memory.grads.fill_(7.0)
    memory.begin_step()
    two.a.main_grad.add_(1.0)
    two.a.main_grad.add_(1.0)
    assert two.a.main_grad.eq(2.0).all()
    memory.start_reduction()  # b has had none
    memory.finish_reduction()
    assert two.b.main_grad.eq(0.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_autograd_are_added_in_a_wide_type(dtype):
    two = Two(dtype)
    memory = memory_of(two)
    memory.begin_step()
    for _ in range(300):
        (two.a.sum() + (two.b * 2).sum()).backward()
    assert two.a.grad is None
    assert two.a.main_grad.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert two.a.main_grad.eq(300).all()  # bfloat16 would have stopped at 256
    assert two.b.main_grad.eq(600).all()


def test_it_tells_when_the_last_gradient_has_come():
    two = Two()
    memory, told = memory_of(two), []
    memory.on_complete = told.append
    memory.begin_step()
    two.a.sum().backward()
    two.a.sum().backward()
    assert told == []
    two.b.sum().backward()
    assert told == [memory]
    two.a.sum().backward()
    assert len(told) == 1
    memory.expect()
    (two.a.sum() + two.b.sum()).backward()
    assert len(told) == 2


def transient_gradients(world: Group) -> None:
    two = Two()
    memory = memory_of(two, world, "optim_grads")
    memory.begin_step()
    for microbatch in range(3):
        assert memory.grads is None
        two.a.main_grad.add_(world.rank + 1 + microbatch)
        memory.start_reduction()
        memory.start_reduction()  # nothing has come since: nothing is sent
    memory.finish_reduction()
    total = sum(r + 1 + m for r in range(world.size) for m in range(3))
    found = {slot.name: values for slot, values in memory.my_slots(memory.reduced)}
    assert list(found) == ["ba"[world.rank]]
    assert all(values.eq(total if name == "a" else 0).all() for name, values in found.items())
    assert len(world.ledger.events(tag="gradients")) == 3


def test_gradients_that_are_not_kept_add_up(ranks):
    ranks.run(transient_gradients, size=2)


def parameters_that_go(world: Group) -> None:
    two = Two()
    memory = memory_of(two, world, "optim_grads_params")
    assert memory.params.untyped_storage().nbytes() == 0 and not memory.is_here
    memory.kept.mul_(3)
    memory.start_gather()
    memory.finish_gather()
    assert torch.equal(two.a, 3 * torch.arange(1.0, 13.0).view(3, 4))
    y = (two.a * two.a).sum() + two.b.sum()  # autograd keeps the parameter itself
    memory.release()
    assert memory.params.untyped_storage().nbytes() == 0
    memory.start_gather()
    memory.finish_gather()
    y.backward()
    memory.start_reduction()
    memory.finish_reduction()
    found = {slot.name: values for slot, values in memory.my_slots(memory.reduced)}
    if world.rank == 1:  # its part begins with a
        assert torch.equal(found["a"], world.size * 6 * torch.arange(1.0, 13.0))


def test_parameters_that_are_not_kept_come_back_for_backward(ranks):
    ranks.run(parameters_that_go, size=2)


def short_messages(world: Group, strategy: str, microbatches: list[tuple]) -> tuple[float, list]:
    """(a gradient's sum, messages) where rank r adds microbatches[i][r] to it."""
    two = Two()
    memory = memory_of(two, world, strategy, message=torch.bfloat16)
    memory.begin_step()
    for values in microbatches:
        two.b.main_grad.add_(values[world.rank])
        if memory.shards_grads:
            memory.start_reduction()
    memory.start_reduction()
    memory.finish_reduction()
    assert memory.reduced.dtype == torch.float32
    found = {slot.name: values for slot, values in memory.my_slots(memory.reduced)}
    value = found["b"].unique().item() if "b" in found else None
    return value, [(e.dtype, e.numel) for e in world.ledger.events()]


@pytest.mark.parametrize(
    ("microbatches", "wanted"),  # of strategies that send a step's sum, a microbatch's
    [
        ([(1 + 2**-10, 1 + 2**-10)], (2.0, 2.0)),  # each is rounded
        ([(256.0, 1.0)], (256.0, 256.0)),  # added between ranks in bfloat16: 257 is none
        ([(256.0, 0.0), (1.0, 0.0), (1.0, 0.0)], (258.0, 258.0)),  # over microbatches in float32
        ([(256.0, 0.0), (1.0, 0.0)], (256.0, 257.0)),  # rounded as it travels, not afterwards
    ],
)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_gradients_may_travel_in_bfloat16(ranks, strategy, microbatches, wanted):
    by_microbatch = strategy.startswith("optim_grads")
    messages = [("bfloat16", 512)] * (len(microbatches) if by_microbatch else 1)
    values = set()
    for value, sent in ranks.run(short_messages, strategy, microbatches, size=2):
        assert sent == messages
        values.add(value)
    assert values - {None} == {wanted[by_microbatch]}
