"""Every Triton kernel compiled for GPUs that are not here: Ampere, Hopper and Blackwell, in bf16 at
hidden size 4096. Spills, shared memory and matrix instructions are checked; values are not (they
are in test_triton_values.py). Cold this is minutes of compiling, then Triton's cache answers.
"""

import pytest

pytest.importorskip("triton")

from kernels import (
    bias_gelu,
    dropout_add,
    layer_norm,
    masked_softmax,
    rms_norm,
    rotary,
    swiglu,
)
from kernels import linear_cross_entropy_kernels as loss_kernels
from kernels import linear_cross_entropy_triton as loss
from tests.kernels.compiled import (
    MATRIX_INSTRUCTION,
    SHARED_MEMORY,
    compile_for,
)

TILINGS = {80: loss.AMPERE, 90: loss.HOPPER, 100: loss.BLACKWELL}
MOST_SPILLED = {80: 32, 90: 0, 100: 32}  # bytes per thread


def check(arch: int, report, kernel: str) -> None:
    assert report.spilled <= MOST_SPILLED[arch], f"{kernel}: {report.spilled} bytes spilled"
    assert report.shared <= SHARED_MEMORY[arch], f"{kernel}: {report.shared} bytes shared"


@pytest.mark.parametrize("name", ["statistics", "exponentials", "dlogits"])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_products_with_the_loss(arch, name):
    tiling, tma = TILINGS[arch][name], arch >= 90
    types = dict.fromkeys(["bias", "e", "out"], "*bf16") | dict.fromkeys(
        ["n", "v", "h", "hidden_row", "weight_row", "e_row", "out_row", "first"], "i32"
    )
    types |= {"target": "*i64", "stats": "*fp32", "tokens": "*fp32", "tiles_per_split": "i32"}
    for operand, rows in (("hidden", tiling.bm), ("weight", tiling.bn)):
        types[operand] = f"tensordesc<bf16[{rows},{tiling.bk}]>" if tma else "*bf16"
    constants = {
        "BM": tiling.bm, "BN": tiling.bn, "BK": tiling.bk, "TMA": tma, "EVEN": True,
        "BIAS": False, "LINEAR": False, "SMOOTH": False, "UPCAST": False,
    }  # fmt: skip
    kernel = getattr(loss_kernels, f"{name}_kernel")
    constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
    report = compile_for(arch, kernel, types, constants, tiling.warps, tiling.stages)
    check(arch, report, name)
    assert MATRIX_INSTRUCTION[arch] in report.ptx


WIDE = {"BLOCK": 4096, "warps": layer_norm.warps(4096)}
FLAT = {"BLOCK": 1024, "warps": 4}
POINTWISE = [
    (loss_kernels.finish_kernel, {"SMOOTH": True, "TILE": 256, "BM": 16, "BN": 256, "warps": 4}),
    (layer_norm._forward, WIDE),
    (layer_norm._backward, WIDE),
    (rms_norm._forward, WIDE | {"ADD": True}),
    (rms_norm._backward, WIDE | {"ADD": True}),
    (bias_gelu._forward, FLAT),
    (bias_gelu._backward, FLAT),
    (swiglu._forward, FLAT),
    (swiglu._backward, FLAT),
    (rotary._turn, {"PAIR": 1, "HALF": 64, "WIDTH": 128, "warps": 1}),
    (masked_softmax._forward, WIDE | {"MASKED": True, "CAUSAL": True}),
    (masked_softmax._backward, WIDE),
    (dropout_add._forward, FLAT | {"BIAS": True}),
    (dropout_add._backward, FLAT),
]
TYPES = {
    **dict.fromkeys(["x", "residual", "total", "weight", "bias", "y", "dy", "dx"], "*bf16"),
    **dict.fromkeys(["dtotal", "cos", "sin", "e", "p", "dp", "scores"], "*bf16"),
    **dict.fromkeys(["mean", "rstd", "top", "found", "tokens"], "*fp32"),
    **dict.fromkeys(["width", "rows", "count", "heads", "half", "queries", "keys"], "i32"),
    **dict.fromkeys(["n", "v", "e_row", "x_token", "x_head", "partner", "lowest"], "i32"),
    **dict.fromkeys(["eps", "scale", "sign"], "fp32"),
    "target": "*i64",
    "mask": "*u8",
}
SUMS = {"dweight": "*fp32", "dbias": "*fp32"}


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    "kernel, constants",
    POINTWISE,
    ids=[f"{kernel.__module__.split('.')[-1]}{kernel.__name__}" for kernel, _ in POINTWISE],
)
def test_pointwise(arch, kernel, constants):
    constants = dict(constants)
    warps = constants.pop("warps")
    types = TYPES | SUMS
    if kernel.__module__ == "kernels.dropout_add":
        types = types | {"keys": "*i64"}
    report = compile_for(arch, kernel, types, constants, warps)
    check(arch, report, kernel.__name__)
    assert report.registers <= 128
