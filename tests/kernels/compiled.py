"""Compiles a Triton kernel for a GPU that is not here, and says what ptxas made of it."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes a block may use
MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


@dataclass(frozen=True)
class Report:
    registers: int
    spilled: int  # bytes of stack per thread
    shared: int
    ptx: str


def compile_for(arch: int, kernel, types: dict[str, str], constants: dict, warps=4, stages=3):
    """types: of the arguments that are not constants, as `*bf16`, `i32`, `fp32`, `tensordesc<…>`.

    Pointers and the integers named in SIXTEEN are taken to be divisible by 16, as a launch with
    ordinary tensors finds them to be. Triton caches the result, so a second run is quick.
    """
    signature = {
        name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
    }
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (kind == "i32" and name in SIXTEEN)
    }
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    return Report(
        int(numbers["REG"]), int(numbers["STACK"]), binary.metadata.shared, binary.asm["ptx"]
    )


SIXTEEN = {"h", "width", "hidden_row", "weight_row", "e_row", "out_row"}
