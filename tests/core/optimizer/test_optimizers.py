"""The optimizers: each is torch's own on copies of the weights, fed with our gradients."""

from collections.abc import Callable
from typing import get_args, get_type_hints

import pytest
import torch

from core import optional
from core.comm import Group
from core.optimizer.config import OptimizerConfig
from core.optimizer.registry import OPTIMIZERS, recipe
from core.train import Trainer, TrainState
from tests.recipe import contents, run_recipe
from tests.training import GPT2, Layout, make_trainer

ALONE = Group.single("world")
STEPS, CLIP, DECAY = 5, 0.5, 0.1
SETTINGS = {"clip_grad": CLIP, "weight_decay": DECAY, "adam_beta2": 0.95, "lr_warmup_iters": 3}
Reference = Callable[[list[dict]], torch.optim.Optimizer]


class FusedAdam(torch.optim.Optimizer):
    """Keeps its state as NVIDIA apex's does: "step" in the group, two moments per parameter that
    are only made where a parameter has no state yet."""

    def __init__(self, params, lr, betas, eps, adam_w_mode) -> None:
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), rate = group["betas"], group["lr"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                for name in ("exp_avg", "exp_avg_sq") if not state else ():
                    state[name] = torch.zeros_like(param)
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.mul_(beta1).add_(param.grad, alpha=1 - beta1)
                square.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                root = (square / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                param.mul_(1 - rate * group["weight_decay"])
                param.sub_(rate * mean / (1 - beta1 ** group["step"]) / root)


@pytest.fixture
def apex(strangers, monkeypatch):
    """Plants the class above as NVIDIA apex's, from when it is called."""

    def plant() -> None:
        monkeypatch.setattr(optional, "has_gpu", lambda: True)
        strangers("amp_C", "multi_tensor_adam = 1")
        strangers("apex", "")
        strangers("apex.optimizers", f"from {__name__} import FusedAdam")

    return plant


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.stages[0].named_parameters()}


def beside_torch(name: str, make: Reference) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """STEPS steps of ours, and the weights that torch's clipping and optimizer make of copies.

    The gradients are ours: the sums in main_grad, divided by the step's tokens.
    """
    trainer, feed = make_trainer(ALONE, GPT2, Layout(), optimizer=name, **SETTINGS)
    copies = {name: torch.nn.Parameter(value) for name, value in weights(trainer).items()}
    matrices = [p for p in copies.values() if p.dim() > 1]
    others = [p for p in copies.values() if p.dim() == 1]
    theirs = make([{"params": matrices, "weight_decay": DECAY}, {"params": others}])
    sums: dict[str, torch.Tensor] = {}

    def remember() -> None:
        for name, param in trainer.stages[0].named_parameters():
            sums[name] = param.main_grad.clone()

    trainer.before_update = remember
    state, rates = TrainState(), []
    for _ in range(STEPS):
        row = trainer.train_step(state, feed)
        for name, param in copies.items():
            param.grad = sums[name] / row["tokens"]
        norm = torch.nn.utils.clip_grad_norm_(copies.values(), CLIP)
        assert norm > CLIP  # or clipping would go unseen
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        for group in theirs.param_groups:
            group["lr"] = row["learning_rate"]
        theirs.step()
        rates.append(row["learning_rate"])
    assert len(set(rates)) > 2
    return trainer, {name: p.detach() for name, p in copies.items()}


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-6, msg=name)


def torch_adamw(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


def torch_sgd(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=0.9, weight_decay=0.0)


@pytest.mark.parametrize(("name", "make"), [("adam", torch_adamw), ("sgd", torch_sgd)])
def test_equals_torch_on_copies_of_the_weights(name, make):
    trainer, wanted = beside_torch(name, make)
    assert_close(weights(trainer), wanted)


def test_adam_is_apexs_where_it_is_and_can_be(apex):
    """Not for weights on a CPU, nor in float64."""
    apex()
    assert recipe("adam", may_fuse=True) is OPTIMIZERS["apex_adam"]
    trainer, _ = make_trainer(ALONE, GPT2, Layout(), optimizer="adam")
    assert trainer.optimizer.recipe is OPTIMIZERS["adam"]


def test_apexs_equals_torchs_too(apex):
    apex()
    trainer, wanted = beside_torch("apex_adam", torch_adamw)
    inner = trainer.optimizer._optimizer
    assert type(inner) is optional.fused_adam()
    assert {group["step"] for group in inner.param_groups} == {STEPS}
    assert all(state.keys() == {"exp_avg", "exp_avg_sq"} for state in inner.state.values())
    saved = [part.arrays["exp_avg_sq"] for part in trainer.optimizer.parts]
    assert all(array.any() for array in saved)
    assert_close(weights(trainer), wanted)


def test_a_checkpoint_of_torchs_adam_goes_on_with_apexs(apex, tmp_path):
    """The count of steps goes from beside the tensors into the groups: the bias correction of a
    third step is not that of a first one."""
    save = ("--save", tmp_path, "--save-interval", 2, "--train-iters")
    apexs = ("--optimizer", "apex_adam")
    assert run_recipe(ALONE, *save, 4)[0] == 0
    wanted = contents(tmp_path, 4)
    apex()
    assert run_recipe(ALONE, *save, 4, "--load", tmp_path, "--ckpt-step", 2, *apexs)[0] == 0
    assert_close(contents(tmp_path, 4), wanted)


def test_without_apex_its_optimizer_is_refused():
    (told,) = OptimizerConfig(optimizer="apex_adam", lr=1e-3).problems()
    assert told == (
        "--optimizer apex_adam needs NVIDIA apex with its CUDA extension and a GPU, which are not "
        "here; use adam, torch's fused form of the same"
    )
    assert list(OptimizerConfig(optimizer="adam", lr=1e-3).problems()) == []
    with pytest.raises(RuntimeError, match="--optimizer apex_adam needs NVIDIA apex"):
        make_trainer(ALONE, GPT2, Layout(), optimizer="apex_adam")
    assert recipe("adam") is OPTIMIZERS["adam"]


def test_what_is_registered_is_what_the_flag_offers():
    assert set(OPTIMIZERS) == set(get_args(get_type_hints(OptimizerConfig)["optimizer"]))
