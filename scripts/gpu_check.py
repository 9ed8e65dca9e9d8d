"""On a GPU: kernels beside formulas, training beside the CPU's, and the output loss's cost.

    python scripts/gpu_check.py [--quick] [--json FILE]

Without a GPU it says what it would have done and ends with code 0; the same kernels are then
tested by values in Triton's interpreter (tests/kernels/test_triton_values.py) and compiled for
Ampere, Hopper and Blackwell (tests/kernels/test_compiled.py). Runs with torch 2.9 to 2.14 and
Triton 3.6 to 3.9.

Times are of forward and backward, best of five, over the floor: three bare matrix products of the
same size measured on the same card. Peers (Liger, cut-cross-entropy) are measured where they can
be imported. Goals: 1.10 at tp 1, extra memory at most 256 MiB.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

DEVICE, SCALE = "cuda", 64.0
CHECKS = (
    "output loss, three modes, bf16 and fp16, with and without bias, smoothing, z-loss",
    "log probabilities, entropy, accuracy",
    "LayerNorm, RMSNorm, GELU, SwiGLU, rotary, softmax, dropout-add",
    "repeatability: two runs bitwise equal",
    "training: 20 steps of a small GPT, fp32 and bf16, beside the CPU's in fp32",
)
# tokens, hidden, vocabulary rows: a whole Llama 3 head, and a rank's part of it at tp 8
SIZES = {"4096 tokens, tp 1": (4096, 4096, 128256), "8192 tokens, tp 1": (8192, 4096, 128256),
         "8192 tokens, a rank of tp 8": (8192, 4096, 16032)}  # fmt: skip
QUICK = {"1024 tokens": (1024, 1024, 16032)}


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((got.double() - exact).norm() / exact.norm()).detach())


# ---- correctness ---------------------------------------------------------------------------------


def dense(hidden, weight, bias, target, eps, z_loss) -> list[torch.Tensor]:
    """Loss and gradients of the sum, in float64 from the operands as they are."""
    operands = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    logits = operands[0] @ operands[1].T + operands[2]
    log_p = torch.log_softmax(logits, -1)
    keep = target >= 0
    chosen = log_p.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
    token = -(1 - eps) * chosen - eps * log_p.mean(1) + z_loss * torch.logsumexp(logits, 1) ** 2
    loss = (token * keep).sum()
    return [loss.detach(), *torch.autograd.grad(loss, operands)]


def check_loss(dtype: torch.dtype, eps: float, z_loss: float, odd: bool) -> list[str]:
    """Lines on every mode. Gradients come for a loss scale, which fp16 needs, and may err by one
    unit in the last place and a tenth: two roundings."""
    from core.tensor_parallel.output_loss import vocab_parallel_linear_cross_entropy

    n, h, v = (1001, 520 + 2 * odd, 5003) if odd else (1024, 512, 5120)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(k, h, device=DEVICE, dtype=dtype) for k in (n, v))
    bias = torch.randn(v, device=DEVICE, dtype=dtype)
    hidden, weight, bias = ((x * s).requires_grad_() for x, s in
                            ((hidden, 1), (weight, 0.1), (bias, 1)))  # fmt: skip
    target = torch.randint(v, (n,), device=DEVICE)
    target[::5] = -100
    exact = dense(hidden, weight, bias, target, eps, z_loss)
    rounding = torch.finfo(dtype).eps
    lines = []
    for mode in ("pipelined", "one-shot", "split"):
        def run(mode=mode):
            loss = vocab_parallel_linear_cross_entropy(
                hidden, weight, target, bias=bias, label_smoothing=eps, z_loss=z_loss,
                reduction="sum", mode=mode, check_target=True, grad_scale=SCALE,
            )  # fmt: skip
            above = torch.full_like(loss, SCALE)
            return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias), above)]

        got, again = run(), run()
        errors = [relative(got[0], exact[0])]
        errors += [relative(g.double() / SCALE, e) for g, e in zip(got[1:], exact[1:], strict=True)]
        good = errors[0] < 1e-5 and max(errors[1:]) < 1.1 * rounding
        good = good and all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
        name = f"output loss {mode} {str(dtype)[6:]} eps={eps} z={z_loss} odd={odd}"
        lines.append(verdict(name, good, errors))
    return lines


def check_probabilities() -> list[str]:
    from core.tensor_parallel.output_loss import vocab_parallel_accuracy, vocab_parallel_log_probs

    torch.manual_seed(1)
    hidden = torch.randn(300, 256, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(3000, 256, device=DEVICE, dtype=torch.bfloat16) * 0.1).requires_grad_()
    target = torch.randint(3000, (300,), device=DEVICE)
    log_p, entropy = vocab_parallel_log_probs(hidden, weight, target, entropy=True)
    got = torch.autograd.grad((log_p + 0.5 * entropy).sum(), (hidden, weight))
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    full = torch.log_softmax(h @ w.T, -1)
    exact_log_p = full.gather(1, target.unsqueeze(1)).squeeze(1)
    exact_entropy = -(full.exp() * full).sum(1)
    exact = torch.autograd.grad((exact_log_p + 0.5 * exact_entropy).sum(), (h, w))
    errors = [relative(log_p, exact_log_p), relative(entropy, exact_entropy)]
    slack = [relative(g, e) for g, e in zip(got, exact, strict=True)]
    accuracy = vocab_parallel_accuracy(hidden, weight, target)
    right = (full.argmax(1) == target).double().mean()
    good = max(errors) < 1e-5 and max(slack) < 8e-3 and abs(float(accuracy - right)) < 4e-3
    return [verdict("log probabilities, entropy, accuracy", good, errors + slack)]


def check_pointwise() -> list[str]:
    """The cases of the tests, which run the torch paths on a CPU and the kernels here."""
    from tests.kernels import formulas, test_pointwise

    lines = []
    for name, (function, formula, operands) in test_pointwise.CASES.items():
        for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1.2e-2)):
            typed = [moved(x, dtype) for x in operands]
            exact = formulas.gradients(formula, *formulas.double(typed))
            got = formulas.gradients(function, *typed)
            errors = [float(e) for e in formulas.errors(got, exact)]
            lines.append(verdict(f"{name} {str(dtype)[6:]}", max(errors) < limit, errors))
    return lines


def check_training() -> list[str]:
    """The curves of a GPU beside the CPU's: initial weights that differ, distances of losses and
    gradient norms. What fails to run at all is BAD too, and keeps no other check from running."""
    from scripts import gpu_check_training as training

    exact, lines = training.train_curve("cpu", torch.float32), []
    for dtype, limits in training.LIMITS.items():
        name = (f"training {training.STEPS} steps {str(dtype)[6:]}, limits 0 {limits.loss:.0e} "
                f"{limits.norm:.0e}")  # fmt: skip
        start = training.train_curve("cpu", dtype, steps=0)
        try:
            got = training.train_curve(DEVICE, dtype)
        except Exception as reason:
            lines.append(f"BAD  {name}: {reason!r}")
            continue
        lines.append(verdict(name, *training.judged(got, start, exact, limits)))
    return lines


def moved(x, dtype: torch.dtype):
    if not torch.is_tensor(x):
        return x
    return x.to(DEVICE, dtype) if x.is_floating_point() else x.to(DEVICE)


def verdict(name: str, good: bool, errors: list[float]) -> str:
    return f"{'ok  ' if good else 'BAD '} {name}: " + " ".join(f"{e:.1e}" for e in errors)


def correctness() -> list[str]:
    lines = []
    for dtype in (torch.bfloat16, torch.float16):
        for eps, z_loss in ((0.0, 0.0), (0.1, 1e-4)):
            for odd in (False, True):
                lines += check_loss(dtype, eps, z_loss, odd)
    return lines + check_probabilities() + check_pointwise() + check_training()


# ---- time and memory -----------------------------------------------------------------------------


def milliseconds(step: Callable[[], None], repeats: int = 5) -> float:
    step()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return min(times)


def floor(hidden, weight, chunk: int = 2048) -> float:
    """Three bare products, in chunks of tokens whose logits are in memory once."""
    logits = torch.empty(chunk, len(weight), device=DEVICE, dtype=weight.dtype)
    dweight = torch.empty_like(weight)

    def step() -> None:
        for part in hidden.split(chunk):
            here = logits[: len(part)]
            torch.mm(part, weight.t(), out=here)
            torch.mm(here, weight)
            torch.mm(here.t(), part, out=dweight)

    return milliseconds(step)


def forms(weight) -> dict[str, Callable]:
    import torch.nn.functional as F

    from core.tensor_parallel.output_loss import vocab_parallel_linear_cross_entropy

    gradient = torch.zeros(weight.shape, device=DEVICE)

    def ours(mode: str):
        return lambda h, w, t: vocab_parallel_linear_cross_entropy(
            h, w, t, mode=mode, accumulate=gradient
        )

    found = {
        "pipelined": ours("pipelined"),
        "one-shot": ours("one-shot"),
        "naive": lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t),
    }
    if hasattr(F, "linear_cross_entropy"):
        found["torch linear_cross_entropy"] = F.linear_cross_entropy
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        found["Liger"] = lambda h, w, t: liger(w, h, t)
    except Exception as reason:
        print(f"     Liger is left out: {reason}")
    try:
        from cut_cross_entropy import linear_cross_entropy

        found["cut-cross-entropy"] = linear_cross_entropy
    except Exception as reason:
        print(f"     cut-cross-entropy is left out: {reason}")
    return found


def times(name: str, size: tuple[int, int, int]) -> dict[str, dict]:
    n, h, v = size
    hidden = torch.randn(n, h, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(v, h, device=DEVICE) * 0.02).bfloat16().requires_grad_()
    target = torch.randint(v, (n,), device=DEVICE)
    with torch.no_grad():
        bottom = floor(hidden, weight)
    print(f"{name}: {n} x {h} x {v} bf16; floor, three products: {bottom:.2f} ms")
    results = {"floor": {"ms": bottom}}
    for form, loss in forms(weight).items():
        def step(loss=loss) -> None:
            hidden.grad = weight.grad = None
            loss(hidden, weight, target).backward()

        try:
            ms = milliseconds(step)
            hidden.grad = weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            made = sum(x.grad.nbytes for x in (hidden, weight) if x.grad is not None)
            extra = (torch.cuda.max_memory_allocated() - before - made) / (1 << 20)
        except Exception as reason:
            print(f"     {form:<28} failed: {str(reason).splitlines()[0]}")
            continue
        results[form] = {"ms": ms, "over_floor": ms / bottom, "extra_mib": extra}
        print(f"     {form:<28}{ms:9.2f} ms {ms / bottom:6.2f} x floor {extra:9.0f} MiB extra")
    return results


def one_kernel(name: str, logits, hidden, target, slot) -> None:
    """A GEMM kernel of the loss; dlogits with the product for dhidden behind it."""
    from kernels.linear_cross_entropy import TokenGradient

    if name == "statistics":
        logits.statistics(hidden, target)
    elif name == "exponentials":
        logits.exponentials(hidden, target, slot)
    else:
        ones = torch.ones(len(hidden), device=DEVICE)
        logits.recomputed_gradient(
            hidden, target, TokenGradient(ones, ones),
            dhidden=torch.empty_like(hidden), dweight=None, dbias=None,
        )  # fmt: skip


def tilings() -> None:
    """Times of the three GEMM kernels under neighbouring cuts: a hint, nothing is changed."""
    from kernels import linear_cross_entropy_triton as loss
    from kernels.linear_cross_entropy import LossTerms

    n, h, v = 4096, 4096, 32064
    hidden = torch.randn(n, h, device=DEVICE, dtype=torch.bfloat16)
    weight = (torch.randn(v, h, device=DEVICE) * 0.02).bfloat16()
    target = torch.randint(v, (n,), device=DEVICE)
    flops = 2 * n * h * v
    for name, here in loss.tilings(weight).items():
        for change in ({}, {"stages": here.stages - 1}, {"bn": here.bn // 2}, {"warps": 4}):
            logits = loss.TritonLogits(weight, None, LossTerms(v))
            logits.tilings = {**logits.tilings, name: replace(here, **change)}
            step = partial(one_kernel, name, logits, hidden, target, logits.slot(n))
            try:
                ms = milliseconds(step)
            except Exception as reason:
                print(f"     {name} {change}: {str(reason).splitlines()[0]}")
                continue
            work = flops * (2 if name == "dlogits" else 1)
            print(f"     {name:<14}{change!s:<16}{ms:8.2f} ms {work / ms / 1e9:8.0f} TFLOP/s")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one small size only")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This machine has no GPU that torch can use. Skipped:")
        for check in CHECKS:
            print(f"  correctness of {check}")
        for name in SIZES:
            print(f"  time and memory of the output loss: {name}")
        print("On a CPU: python -m pytest tests/kernels, and python scripts/bench_loss.py")
        return 0
    from kernels.gpu import triton

    properties = torch.cuda.get_device_properties(0)
    version = "missing: torch paths only" if triton is None else triton.__version__
    print(f"{properties.name}, torch {torch.__version__}, triton {version}")
    lines = correctness()
    print("\n".join(lines))
    wrong = [line for line in lines if line.startswith("BAD")]
    results = {name: times(name, size) for name, size in (QUICK if args.quick else SIZES).items()}
    if triton is not None:
        tilings()
    if args.json:
        args.json.write_text(json.dumps({"checks": lines, "times": results}, indent=1))
    print(f"{len(lines) - len(wrong)} checks passed, {len(wrong)} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
