"""What a rank holds is what core.data_parallel.memory says: by strategy and type, between steps and
in the middle of one."""

from dataclasses import replace

import pytest
import torch

from core.comm import Group
from core.data_parallel.memory import StateBytes, state_bytes
from core.train import Trainer, TrainState
from tests.training import GPT2, LLAMA, Layout, make_trainer

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
BF16 = (("bf16", True),)
DEEP = replace(GPT2, num_layers=6, hidden_size=64)
UNTIED = replace(LLAMA, num_layers=6, hidden_size=64)


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Memory behind the tensors, each piece once."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held(trainer: Trainer) -> StateBytes:
    memories, parts = trainer.replicas.memories, trainer.optimizer.parts
    pairs = list(zip(memories, parts, strict=True))
    return StateBytes(
        parameters=sum(nbytes(m.params, m.kept) for m in memories),
        gradients=sum(nbytes(m.grads, m.reduced) for m in memories),
        masters=sum(nbytes(p.master) for m, p in pairs if p.master is not m.kept),
        moments=sum(nbytes(x) for p in parts for x in p.arrays.values()),
        passing=0,
    )


def between_and_within_steps(world: Group, model, layout: Layout) -> tuple:
    """(what is held after a step, the most of parameters and gradients within one, formula)"""
    trainer, feed = make_trainer(world, model, layout)
    state = TrainState()
    trainer.train_step(state, feed)
    most = [0]

    def look(*_: object) -> None:
        now = held(trainer)
        most[0] = max(most[0], now.parameters + now.gradients)

    def look_twice(module, args, out) -> None:
        look()
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.register_hook(look)

    for part in trainer.stages[0].modules():
        part.register_forward_hook(look_twice)
    for param in trainer.stages[0].parameters():
        param.register_post_accumulate_grad_hook(look)
    trainer.train_step(state, feed)
    formula = state_bytes(
        [memory.bucket for memory in trainer.replicas.memories],
        layout.sharding,
        world.size,
        parameter=trainer.replicas.memories[0].params.element_size(),
        overlaps=layout.overlap,
    )
    return held(trainer), most[0], formula


@pytest.mark.parametrize("precision", [(), BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sharding", STRATEGIES)
def test_a_rank_holds_what_the_formula_says(ranks, sharding, precision):
    base = Layout(sharding=sharding, precision=precision, micro_batch_size=1)
    for model, overlap, size in ((DEEP, False, 2), (UNTIED, True, 4)):
        layout = replace(base, overlap=overlap, global_batch_size=2 * size)
        for found, most, formula in ranks.run(
            between_and_within_steps, model, layout, size=size
        ):
            assert found == replace(formula, passing=0)
            assert most <= formula.parameters + formula.gradients + formula.passing


@pytest.mark.parametrize("precision", [(), BF16], ids=["float32", "bfloat16"])
def test_bytes_per_parameter(ranks, precision):
    """The table at the head of core/data_parallel/memory.py, to within the padding."""
    short, n = 2 if precision else 4, 4
    master = 0 if short == 4 else 4
    per_parameter = {
        "no_shard": short + 4 + master + 8,
        "optim": short + 4 + (master + 8) / n,
        "optim_grads": short + (4 + master + 8) / n,
        "optim_grads_params": (short + 4 + master + 8) / n,
    }
    wide = replace(GPT2, hidden_size=128, vocab_size=500)
    for sharding, wanted in per_parameter.items():
        layout = Layout(sharding=sharding, precision=precision, micro_batch_size=1)
        found, _, _ = ranks.run(between_and_within_steps, wide, layout, size=n)[0]
        assert found.kept == pytest.approx(wanted * parameters_of(wide), rel=0.02)


def parameters_of(model) -> int:
    from models.flops import parameters

    padded = model.padded_vocab_size() - model.vocab_size
    return sum(parameters(model).values()) + padded * model.hidden_size
