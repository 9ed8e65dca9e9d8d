"""What a command line is told before any rank starts."""

import pytest

from core import start
from core.checkpoint import preflight
from core.comm import Group
from core.config import parse
from models.flops import parameters
from pretrain_gpt import RunConfig
from tests.recipe import TINY, contents, run_recipe


@pytest.mark.parametrize(
    "flags", [(), ("--no-save-optim",), ("--optimizer", "sgd", "--bf16"), ("--fp64",)]
)
def test_the_disk_is_asked_for_what_a_save_takes(tmp_path, monkeypatch, flags):
    asked = []

    def problems(config, model, bytes_needed):
        asked.append(bytes_needed)
        return iter(())

    monkeypatch.setattr(preflight, "problems", problems)
    config = parse(RunConfig, [*TINY, "--save", str(tmp_path), *flags])
    assert not list(start.checkpoint_problems(config, config.model, parameters))
    run_recipe(Group.single("world"), "--train-iters", 1, "--save", tmp_path, *flags)
    assert asked == [sum(x.numel() * x.element_size() for x in contents(tmp_path).values())]
