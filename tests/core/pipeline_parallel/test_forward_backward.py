"""A training loop written against Megatron's schedules: the same gradients as one chain."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from core import parallel_state
from core.comm import Group
from core.pipeline_parallel import get_forward_backward_func

SEQ, BATCH, HIDDEN, MICROBATCHES = 3, 2, 4, 6


class Chunk(nn.Module):
    """A part of a model as Megatron's are: told its input, first and last or not."""

    def __init__(self, index: int, count: int, config: SimpleNamespace) -> None:
        super().__init__()
        self.config, self.first, self.last = config, index == 0, index == count - 1
        generator = torch.Generator().manual_seed(index)
        weight = torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(weight / 2)
        self.input_tensor: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        (self.input_tensor,) = tensors

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first else self.input_tensor
        return (x @ self.weight).tanh()


class Wrapper(nn.Module):
    """Stands for a fork's DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def data(count: int = MICROBATCHES):
    for m in range(count):
        generator = torch.Generator().manual_seed(100 + m)
        x = torch.randn(SEQ, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
        yield x, (x[..., 0] > -1).double()


def mean_loss(mask: Tensor, output: Tensor, non_loss_data: bool = False):
    if non_loss_data:
        return output.shape
    loss = (output.square().sum(-1) * mask).sum() / mask.sum()
    return loss, {"lm loss": loss.item()}


def summed_loss(mask: Tensor, output: Tensor):
    loss = (output.square().sum(-1) * mask).sum()
    return loss, mask.sum().int(), {"lm loss": loss.item()}


def forward_step(loss, iterator, model):
    x, mask = next(iterator)
    return model(x), partial(loss, mask)


def config_of(**more) -> SimpleNamespace:
    return SimpleNamespace(hidden_size=HIDDEN, pipeline_dtype=torch.float64, **more)


def dense(count: int, loss) -> tuple[list[Tensor], list[float], int]:
    """Gradients by chunk, reported losses and tokens of one chain, every microbatch for itself."""
    chunks = [Chunk(i, count, config_of()) for i in range(count)]
    reports, tokens = [], 0
    for x, mask in data():
        for chunk in chunks:
            chunk.input_tensor = x
            x = chunk(x)
        value, *kept, report = loss(mask, x)
        (value if kept else value / MICROBATCHES).backward()
        tokens += int(kept[0]) if kept else 0
        reports.append(report["lm loss"])
    return [chunk.weight.grad for chunk in chunks], reports, tokens


def run_fork(world: Group, loss, chunks: int, forward_only: bool = False, **options) -> dict:
    vpp = chunks if chunks > 1 else None
    parallel_state.initialize_model_parallel(1, world.size, vpp)
    heard = {}

    def finalize(models, tokens):
        heard.update(models=len(models), tokens=None if tokens is None else int(tokens))

    per_token = loss is summed_loss
    config = config_of(
        calculate_per_token_loss=per_token,
        finalize_model_grads_func=finalize,
        grad_scale_func=lambda loss: 8 * loss,
    )
    count = world.size * chunks
    stages = range(world.rank, count, world.size)
    models = [Wrapper(Chunk(i, count, config)) for i in stages]
    reports = get_forward_backward_func()(
        forward_step_func=partial(forward_step, loss),
        data_iterator=[data() for _ in models] if chunks > 1 else data(),
        model=models if chunks > 1 else models[0],
        num_microbatches=MICROBATCHES,
        seq_length=SEQ,
        micro_batch_size=BATCH,
        forward_only=forward_only,
        **options,
    )
    grads = {i: m.module.weight.grad for i, m in zip(stages, models, strict=True)}
    return {"reports": reports, "grads": grads, **heard}


@pytest.mark.parametrize("loss", [mean_loss, summed_loss])
@pytest.mark.parametrize(("size", "chunks"), [(3, 1), (2, 2)])
def test_gradients_equal_those_of_one_chain(ranks, loss, size, chunks):
    wanted, reports, tokens = dense(size * chunks, loss)
    answers = ranks.run(run_fork, loss, chunks, size=size)
    for i, gradient in enumerate(wanted):
        found = answers[i % size]["grads"][i] / 8  # the loss scale
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=0)
    assert [r["lm loss"] for r in answers[-1]["reports"]] == pytest.approx(reports, rel=1e-12)
    assert [a["reports"] for a in answers[:-1]] == [[]] * (size - 1)
    assert [a["models"] for a in answers] == [chunks] * size
    told = [a["tokens"] for a in answers]
    per_token = [0] * (size - 1) + [tokens]
    assert told == (per_token if loss is summed_loss else [None] * size)


def test_forward_only_reports_and_leaves_no_gradient(ranks):
    _, reports, _ = dense(2, mean_loss)
    answers = ranks.run(run_fork, mean_loss, 1, forward_only=True, size=2)
    assert [r["lm loss"] for r in answers[-1]["reports"]] == pytest.approx(reports, rel=1e-12)
    assert all(grad is None for a in answers for grad in a["grads"].values())
    assert "models" not in answers[0]
    other = ranks.run(
        run_fork, mean_loss, 1, forward_only=True, collect_non_loss_data=True, size=2
    )
    assert other[-1]["reports"] == [(SEQ, BATCH, HIDDEN)] * MICROBATCHES


# ---- one process: when gradients may be reduced --------------------------------------------------


def step_alone(chunk: nn.Module, **options) -> list:
    defaults = {
        "forward_step_func": partial(forward_step, mean_loss),
        "data_iterator": data(),
        "model": chunk,
        "num_microbatches": MICROBATCHES,
        "seq_length": SEQ,
        "micro_batch_size": BATCH,
    }
    return get_forward_backward_func()(**{**defaults, **options})


def test_only_the_last_microbatch_is_outside_no_sync():
    inside, seen = [False], []

    @contextmanager
    def no_sync():
        inside[0] = True
        yield
        inside[0] = False

    chunk = Chunk(0, 1, config_of(no_sync_func=no_sync))
    chunk.weight.register_hook(lambda grad: seen.append(("B", inside[0])))

    def step(iterator, model):
        seen.append(("F", inside[0]))
        return forward_step(mean_loss, iterator, model)

    step_alone(chunk, forward_step_func=step)
    assert seen == [("F", True), ("B", True)] * (MICROBATCHES - 1) + [("F", False), ("B", False)]


def test_grad_sync_func_is_called_once_with_the_parameters():
    told = []
    chunk = Chunk(0, 1, config_of(grad_sync_func=lambda params: told.append(list(params))))
    step_alone(chunk)
    assert told == [[chunk.weight]]


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"adjust_tensor_shapes_fn": print}, NotImplementedError, "adjust_tensor_shapes_fn is not"),
        ({"collect_non_loss_data": True}, ValueError, "needs forward_only"),
        ({"data_iterator": [data(), data()]}, ValueError, "data_iterator has 2 parts"),
        ({"model": nn.Linear(2, 2)}, AttributeError, "Linear and what it wraps have no 'config'"),
    ],
)
def test_what_cannot_run_is_named(options, error, told):
    with pytest.raises(error, match=told):
        step_alone(Chunk(0, 1, config_of()), **options)


def test_a_schedule_that_splits_backwards_is_refused():
    step = get_forward_backward_func(schedule="zb_h1")
    with pytest.raises(NotImplementedError, match="schedule zb_h1 splits backwards; use 1f1b"):
        step(
            forward_step_func=print,
            data_iterator=data(),
            model=Chunk(0, 1, config_of()),
            num_microbatches=2,
            seq_length=SEQ,
            micro_batch_size=BATCH,
        )


def wrong_shape(world: Group) -> None:
    parallel_state.initialize_model_parallel(1, world.size)
    step_alone(Chunk(world.rank, 2, config_of()), seq_length=SEQ + 1)


def test_a_chunk_that_makes_another_shape_is_named(ranks):
    told = r"stage 0 of 2 \(Chunk\) made an activation of float64 \(3, 2, 4\); the next"
    with pytest.raises(ValueError, match=told):
        ranks.run(wrong_shape, size=2)


def test_importing_the_package_does_not_import_torch():
    import subprocess
    import sys

    code = "import core.pipeline_parallel, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
