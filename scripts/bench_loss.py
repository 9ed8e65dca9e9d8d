"""Output layer and loss, forward and backward, on a CPU: time and memory of several forms.

    python scripts/bench_loss.py [--tokens 4096] [--hidden 512] [--vocab 50304] [--dtype float32]
                                 [--threads 2] [--rounds 3] [--only NAMES] [--json FILE]
                                 [--plot FILE]

Every measurement is a process of its own, and the forms take turns, so that a busy machine hurts
all alike; the best round counts. Memory is the peak above the operands, and that above operands and
gradients (which any form must make).

floor      the three matrix products alone, chunked as `pipelined` chunks them
pipelined  ours, gradients in forward: three products
one-shot   ours, logits computed twice: four products, the least memory
naive      F.linear, then F.cross_entropy
compiled   torch.compile of naive
unfused    logits made whole, then a vocabulary-parallel loss in Megatron's manner, on one rank
torch      F.linear_cross_entropy, where this torch has it

--no-bf16-units hides the processor's bf16 units from the libraries, as on an older machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FORMS = ("floor", "pipelined", "one-shot", "naive", "compiled", "unfused", "torch")
OLD_PROCESSOR = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


# ---- the forms: each returns loss(hidden, weight, target), which is then differentiated ----------


def ours(mode: str):
    from core.tensor_parallel.output_loss import vocab_parallel_linear_cross_entropy

    return lambda *operands: vocab_parallel_linear_cross_entropy(*operands, mode=mode)


def naive(hidden, weight, target):
    import torch.nn.functional as F

    return F.cross_entropy(F.linear(hidden, weight), target)


def unfused(hidden, weight, target):
    import torch.nn.functional as F

    return unfused_loss().apply(F.linear(hidden, weight), target).mean()


def unfused_loss():
    """Megatron's algorithm on materialised logits; on one rank its three all-reduces do nothing."""
    import torch

    class Unfused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, target):
            p = logits.float() if logits.dtype != torch.float32 else logits.clone()
            p.sub_(p.amax(1, keepdim=True))
            chosen = p.gather(1, target.unsqueeze(1)).squeeze(1)
            total = p.exp_().sum(1)
            p.div_(total.unsqueeze(1))
            ctx.save_for_backward(p, target)
            ctx.dtype = logits.dtype
            return total.log() - chosen

        @staticmethod
        def backward(ctx, above):
            p, target = ctx.saved_tensors
            p[torch.arange(len(p)), target] -= 1
            return p.mul_(above.unsqueeze(1)).to(ctx.dtype), None

    return Unfused


def floor(hidden, weight, target):
    """Bare products in float32 (the type in which ours multiplies), gradients without meaning."""
    import torch

    from core.tensor_parallel.output_loss_operands import default_chunk

    class Floor(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight):
            most = default_chunk("pipelined", len(weight), weight, 1)
            chunk = -(-len(hidden) // -(-len(hidden) // most))
            logits = torch.empty(chunk, len(weight))
            dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(weight)
            for part, out in zip(hidden.split(chunk), dhidden.split(chunk), strict=True):
                here = logits[: len(part)]
                torch.mm(part, weight.t(), out=here)
                torch.mm(here, weight, out=out)
                dweight.addmm_(here.t(), part)
            ctx.gradients = dhidden, dweight
            return dhidden.new_zeros(())

        @staticmethod
        def backward(ctx, above):
            gradients, ctx.gradients = ctx.gradients, None
            return gradients

    return Floor.apply(hidden.float(), weight.float())


def form(name: str):
    import torch

    if name in ("pipelined", "one-shot"):
        return ours(name)
    if name == "compiled":
        return torch.compile(naive)
    if name == "torch":
        return getattr(torch.nn.functional, "linear_cross_entropy", None)
    return {"floor": floor, "naive": naive, "unfused": unfused}[name]


# ---- one measurement, in a process of its own ----------------------------------------------------


def peak_mib(reset: bool = False) -> float:
    """Highest resident memory so far, or since the last reset, which gives back what is free."""
    if reset:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(name: str, args: argparse.Namespace) -> dict:
    import torch

    torch.set_num_threads(args.threads)
    loss = form(name)
    if loss is None:
        return {"missing": f"torch {torch.__version__} has no such function"}
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.hidden).to(dtype).requires_grad_()
    weight = (torch.randn(args.vocab, args.hidden) * 0.05).to(dtype).requires_grad_()
    target = torch.randint(args.vocab, (args.tokens,))
    # so that the libraries have their own scratch memory, and the compiler its code
    warm = hidden.detach().requires_grad_()
    loss(warm, weight, target).backward()
    del warm
    hidden.grad = weight.grad = None
    before = peak_mib(reset=True)
    cpu, wall = cpu_seconds(), time.perf_counter()
    value = loss(hidden, weight, target)
    value.backward()
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    gradients = sum(x.grad.numel() * x.grad.element_size() for x in (hidden, weight)) / (1 << 20)
    peak = peak_mib() - before
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "peak_mib": peak,
        "above_gradients_mib": peak - gradients,
        "loss": float(value.detach()),
    }


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# ---- all of them, in turns -----------------------------------------------------------------------


def run(name: str, args: argparse.Namespace) -> dict:
    command = [sys.executable, __file__, "--measure", name]
    for option in ("tokens", "hidden", "vocab", "dtype", "threads"):
        command += [f"--{option}", str(getattr(args, option))]
    environment = {**os.environ, **(OLD_PROCESSOR if args.no_bf16_units else {})}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return {"missing": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def best(rounds: list[dict]) -> dict:
    """The least of every number over the rounds; memory and time are independent."""
    if "missing" in rounds[-1]:
        return rounds[-1]
    return {key: min(r[key] for r in rounds) for key in rounds[-1]}


def table(results: dict[str, dict]) -> str:
    bottom = results.get("floor", {}).get("wall_s")
    lines = ["form        wall s   / floor    CPU s   peak MiB   above gradients       loss"]
    for name, r in results.items():
        if "missing" in r:
            lines.append(f"{name:<10}  left out: {r['missing']}")
            continue
        ratio = f"{r['wall_s'] / bottom:8.2f}" if bottom else "       -"
        lines.append(
            f"{name:<10}{r['wall_s']:8.2f}  {ratio} {r['cpu_s']:8.2f} {r['peak_mib']:10.0f}"
            f" {r['above_gradients_mib']:17.0f} {r['loss']:10.4f}"
        )
    return "\n".join(lines)


def draw(results: dict[str, dict], title: str, path: Path) -> None:
    """Time and memory of every form as bars; needs the package matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {name: r for name, r in results.items() if "missing" not in r}
    colours = ["#1f77b4" if name in ("pipelined", "one-shot") else "#bbbbbb" for name in shown]
    figure, sides = pyplot.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
    for axis, key, label in zip(
        sides,
        ("wall_s", "above_gradients_mib"),
        ("seconds, forward and backward", "MiB beside operands and gradients"),
        strict=True,
    ):
        bars = axis.barh(list(shown), [r[key] for r in shown.values()], color=colours)
        axis.bar_label(bars, fmt="%.4g", padding=3)
        axis.set_xlabel(label)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    sides[0].invert_yaxis()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=FORMS, default=FORMS, metavar="NAME")
    parser.add_argument("--no-bf16-units", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the bars (matplotlib)")
    parser.add_argument("--measure", choices=FORMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return
    title = (
        f"{args.tokens} tokens x hidden {args.hidden} x vocabulary {args.vocab}, {args.dtype}, "
        f"{args.threads} threads, best of {args.rounds} rounds"
    )
    print(title)
    rounds: dict[str, list[dict]] = {name: [] for name in args.only}
    for _ in range(args.rounds):
        for name in args.only:
            rounds[name].append(run(name, args))
    results = {name: best(each) for name, each in rounds.items()}
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if args.plot:
        draw(results, title, args.plot)


if __name__ == "__main__":
    main()
