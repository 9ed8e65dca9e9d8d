"""Training-step benchmark: ours beside a plain PyTorch model, transformers' GPT-2 and the floor.

    python scripts/bench_step.py [--rounds 5] [--steps 3] [--threads 2] [--json FILE]

One GPT (12 layers x 256, 4 heads, sequence 256, microbatch 4, vocabulary 50,304, float32, dropout
0) is trained by every contestant, each in a process of its own that holds nothing else. The
processes take turns, so that a busy machine hurts all alike; a step is forward, backward, clipping
at norm 1 and AdamW.

floor   the matrix products of one step and nothing else: every linear and the output layer
        (forward, input gradient, weight gradient) and the attention products
ours    core.train's step, as pretrain_gpt.py runs it
plain   the same model in 60 lines of PyTorch with torch.optim.AdamW(fused=True)
hf      transformers' GPT2LMHeadModel with the same optimizer, if transformers is installed
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core.process_memory import keep_freed_memory, share_freed_memory

LAYERS, HIDDEN, HEADS, SEQ, BATCH, VOCAB = 12, 256, 4, 256, 4, 50304
CONTESTANTS = ("floor", "ours", "plain", "hf")


# ---- contestants: each returns a function that makes one step ---------------------------------


def floor() -> Callable[[], None]:
    import torch

    rows = SEQ * BATCH
    shapes = [(HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN)]
    matrices = [(n, k, torch.randn(k, n)) for _ in range(LAYERS) for n, k in shapes]
    matrices.append((HIDDEN, VOCAB, torch.randn(VOCAB, HIDDEN)))
    inputs = {n: torch.randn(rows, n) for n in {n for n, _, _ in matrices}}
    outputs = {k: torch.randn(rows, k) for k in {k for _, k, _ in matrices}}
    grads = {w.shape: torch.empty_like(w) for _, _, w in matrices}
    d = HIDDEN // HEADS
    q = torch.randn(BATCH * HEADS, SEQ, d)
    p = torch.randn(BATCH * HEADS, SEQ, SEQ)

    def step() -> None:
        for n, k, w in matrices:
            torch.mm(inputs[n], w.t(), out=outputs[k])
            torch.mm(outputs[k], w, out=inputs[n])
            torch.mm(outputs[k].t(), inputs[n], out=grads[w.shape])
        for _ in range(LAYERS):
            for _ in range(3):  # scores, and in backward the gradients of p and of the values
                torch.bmm(q, q.transpose(1, 2), out=p)
            for _ in range(3):  # context, and in backward the gradients of queries and keys
                torch.bmm(p, q)

    return step


def batch():
    import torch

    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def ours() -> Callable[[], None]:
    import torch

    from core.data_parallel.ddp import DataParallel
    from core.feed import Feed
    from core.optimizer.adam import Optimizer
    from core.optimizer.config import OptimizerConfig
    from core.optimizer.schedule import Schedule
    from core.pipeline_parallel.schedules import row_maker
    from core.process_grid import ProcessGrid
    from core.train import Trainer, TrainState
    from core.train_config import TrainConfig
    from models.config import GPTConfig
    from models.gpt import build_stages

    model = GPTConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        seq_length=SEQ,
        vocab_size=VOCAB,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    grid = ProcessGrid.single()
    stages = build_stages(
        model, grid, micro_batch_size=BATCH, sequence_parallel=False, seed=0
    )
    config = OptimizerConfig(lr=1e-4)
    replicas = DataParallel(stages, grid.dp_cp, grid.tp, grid.embed)
    optimizer = Optimizer(replicas, grid.tp, grid.pp, config)
    schedule = Schedule.of(config, train_samples=100_000, global_batch_size=BATCH)
    sizes = TrainConfig(micro_batch_size=BATCH).batch_schedule(1)
    trainer = Trainer(grid, stages, replicas, optimizer, schedule, sizes, row_maker(None, 1, 0))
    keep_freed_memory()
    tokens, labels = (t.numpy() for t in batch())
    row = {
        "tokens": tokens,
        "labels": labels,
        "position_ids": torch.arange(SEQ).expand(BATCH, SEQ).numpy(),
        "sample": torch.arange(BATCH).numpy(),
        "loss_mask": torch.ones(BATCH, SEQ).numpy(),
    }
    integers = ("tokens", "labels", "position_ids", "sample")
    feed = Feed(
        lambda consumed, size: iter([row]),
        grid.tp,
        grid.device,
        integers=integers,
        floats=("loss_mask",),
    )
    state = TrainState()
    return lambda: trainer.train_step(state, feed)


def plain_model():
    """GPT-2's shape as one would write it today: SDPA, tied embeddings, learned positions."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
            self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
            self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, x):
            b, s, h = x.shape
            qkv = self.qkv(self.norm_1(x)).view(b, s, 3, HEADS, h // HEADS)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
            return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word, self.position = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQ, HIDDEN)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(HIDDEN)

        def forward(self, tokens, labels):
            x = self.word(tokens) + self.position(torch.arange(SEQ))
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.norm(x), self.word.weight)
            return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))

    return GPT()


def stepper(model, loss_of: Callable) -> Callable[[], None]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def step() -> None:
        loss_of(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def plain() -> Callable[[], None]:
    tokens, labels = batch()
    return stepper(plain_model(), lambda model: model(tokens, labels))


def hf() -> Callable[[], None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    tokens, _ = batch()
    return stepper(GPT2LMHeadModel(config), lambda model: model(tokens, labels=tokens).loss)


# ---- processes that take turns ------------------------------------------------------------------


def contestant(name: str, threads: int) -> None:
    """A process of one contestant: for every number on stdin, that many steps; seconds per step."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step = {"floor": floor, "ours": ours, "plain": plain, "hf": hf}[name]()
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"times": times, "peak_mib": peak}), flush=True)


class Process:
    def __init__(self, name: str, threads: int) -> None:
        command = [sys.executable, __file__, "--contestant", name, "--threads", str(threads)]
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if name == "ours":
            share_freed_memory(environ)  # as a rank of --nproc is started
        self.name, self.times, self.peak = name, [], 0.0
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )

    def run(self, steps: int, keep: bool = True) -> None:
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with exit code {self.process.wait()}")
        answer = json.loads(line)
        self.peak = answer["peak_mib"]
        if keep:
            self.times += answer["times"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def installed(name: str) -> bool:
    from importlib.util import find_spec

    return name != "hf" or find_spec("transformers") is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contestant")
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        contestant(args.contestant, args.threads)
        return
    processes = [Process(name, args.threads) for name in args.only if installed(name)]
    for process in processes:
        process.run(1, keep=False)  # warm-up
    for turn in range(args.rounds):
        for process in processes:
            process.run(args.steps)
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
    for process in processes:
        process.close()
    report(processes, args)


def report(processes: list[Process], args: argparse.Namespace) -> None:
    floors = next((p.times for p in processes if p.name == "floor"), None)
    print(f"GPT {LAYERS} x {HIDDEN}, {HEADS} heads, sequence {SEQ}, microbatch {BATCH}, "
          f"vocabulary {VOCAB:,}, float32, {args.threads} threads")  # fmt: skip
    print(f"{'':8}{'median s':>10}{'min s':>10}{'x floor':>10}{'peak MiB':>10}")
    rows = []
    for p in processes:
        ratio = median(p.times) / median(floors) if floors else float("nan")
        rows.append({"name": p.name, "median_s": median(p.times), "min_s": min(p.times),
                     "over_floor": ratio, "peak_mib": p.peak})  # fmt: skip
        print(f"{p.name:8}{median(p.times):10.3f}{min(p.times):10.3f}{ratio:10.2f}{p.peak:10.0f}")
    if args.json:
        Path(args.json).write_text(json.dumps({"rows": rows, "threads": args.threads}, indent=1))


if __name__ == "__main__":
    main()
