"""Training on a device that is not the CPU: nothing is left behind on the host."""

from dataclasses import replace

import pytest
import torch

from scripts import gpu_check_training as training
from tests.stand_in_device import HostTensor, OnDevice, StandIn, put_in

LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
    "qk_layernorm": True,
    "attention_dropout": 0.1,
}
UNFUSED = {"loss_mode": "unfused"}
SMALL = {"num_layers": 2, "hidden_size": 32, "seq_length": 16, "vocab_size": 96}


@pytest.mark.parametrize(
    ("shape", "dtype", "nonzero"),
    [({}, "float32", 1), (LLAMA, "float32", 1), (UNFUSED, "float32", 2), ({}, "bfloat16", 1)],
    ids=["gpt2", "llama", "unfused", "bf16"],
)
def test_a_step_on_a_device_makes_the_cpus_numbers(monkeypatch, shape, dtype, nonzero) -> None:
    """Positions, masks, dropout keys, loss weights and optimizer state are where the weights are;
    a step waits for the device once for its loss and once for its norm, and a microbatch for the
    rows of the embedding (and those of the unfused loss), never for its sample numbers."""
    put_in(monkeypatch)
    dtype = getattr(torch, dtype)
    monkeypatch.setattr(training, "MODEL", replace(training.MODEL, **SMALL, **shape))
    exact = training.train_curve("cpu", dtype, steps=3)
    with StandIn():
        got = training.train_curve("meta", dtype, steps=3)
    limit = 1e-6 if dtype == torch.float32 else 1e-3
    good, errors = training.judged(got, exact, exact, training.Limits(limit, limit))
    assert good, errors
    microbatches = training.GLOBAL_BATCH // training.MICRO_BATCH
    assert OnDevice.waits == {"tolist": 3, "item": 3, "nonzero": 3 * microbatches * nonzero}


def test_the_stand_in_finds_what_is_left_on_the_host(monkeypatch) -> None:
    put_in(monkeypatch)
    with StandIn():
        x = torch.arange(3.0, device="meta")
        assert x.device.type == "meta" and (x * 2 + torch.ones(3, device="meta")).tolist() == [
            1, 3, 5
        ]  # fmt: skip
        with pytest.raises(HostTensor, match=r"aten::add on the device is given .* \[\(3,\)\]"):
            x + torch.ones(3)
