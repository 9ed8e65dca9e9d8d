"""What a loss allocates is counted while it is held, whoever made it and however it is shared."""

import torch

from core.loss_memory import LossMemory


def numbers(count: int) -> torch.Tensor:
    return torch.ones(count)  # 4 bytes each


def test_most_is_what_is_held_at_once():
    memory, hidden = LossMemory(), numbers(100)
    unseen = numbers(10**6)
    with memory.forward(hidden):
        first = numbers(1000)
        first[:500].add_(1)
        del first
        second, third = numbers(700), numbers(600)
        second.view(7, 100).sum().item()
        unseen.mul_(2)
    assert memory.most == 4 * (100 + 700 + 600 + 1)  # the sum is one number
    assert memory.holds(third[:10]) and memory.holds(hidden) and not memory.holds(unseen)
    del second, third
    with memory.forward(hidden):
        fourth = numbers(1500)
    assert memory.most == 4 * (100 + 1500)
    assert memory.holds(fourth)


def test_a_result_counts_beside_what_it_was_made_of():
    memory, hidden = LossMemory(), numbers(100)
    with memory.forward(hidden):
        x = numbers(1000)
        x = x + 1
        x = x[:10].clone()
    assert memory.most == 4 * (100 + 2 * 1000)


def test_backward_counts_until_the_hidden_states_have_their_gradient():
    """Before it, the exponential's gradient; behind it, the large one, which is not the loss's."""
    base = numbers(50).requires_grad_()
    hidden = base.expand(40, 50) * 1.0
    memory = LossMemory()
    with memory.forward(hidden):
        loss = hidden.exp().sum()
    forward = memory.most
    assert forward == 4 * (2 * 40 * 50 + 1)
    wide = []
    hidden.grad_fn.register_hook(lambda *_: wide.append(numbers(10**6)))
    with memory.backward():
        loss.backward()
    assert wide
    # exp's output goes with its node; the gradient that comes is one expanded number
    assert memory.most == forward + 4 * (40 * 50 + 1)


def test_others_memory_does_not_count():
    others = []
    memory, hidden = LossMemory(lambda: others), numbers(100)
    with memory.forward(hidden):
        others.append(numbers(10**5))
        numbers(20)
    assert memory.most == 4 * (100 + 20)


def test_work_left_for_later_counts_when_it_is_done():
    memory = LossMemory()
    later = memory.of(lambda: numbers(300).sum().item())
    numbers(10**5)
    assert memory.most == 0
    assert later() == 300
    assert memory.most == 4 * 301
