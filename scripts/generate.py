"""Text from a checkpoint of pretrain_gpt.py, or how well it predicts a file.

    python scripts/generate.py --load D --prompt 'def ' --prompt 'import ' --max-new-tokens 100
    python scripts/generate.py --load D --prompt 'def ' --temperature 0          the likeliest token
    python scripts/generate.py --load D --perplexity FILE
    python scripts/generate.py --load D --nproc 2 --prompt 'def '               tensor parallel 2

Whatever layout wrote the checkpoint, it is read by one process, or by --nproc ranks that cut the
model between them. The model's shape and the tokenizer come from the settings that it keeps, of
a model from convert_hf.py the tokenizer that was imported with it; tokenizer flags given here win.
A model without a tokenizer reads and writes token numbers.
The same seed gives the same text for a prompt, alone or among others, on one rank or several.

In this order: `read_model`, `choose` (a token from logits), `generate`, `perplexity`. Keys and
values are kept from token to token. A text longer than the model's window is read through a window
that moves: there every token of it is computed again for each new one.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from core.checkpoint.errors import CheckpointError
from core.checkpoint.pieces import shard_pieces
from core.checkpoint.reader import Checkpoint, load
from core.comm import Group, all_gather
from core.config_record import from_json
from core.grid import RankGrid
from core.launch import LaunchError, find_here, launch, supervise
from core.process_grid import ProcessGrid
from core.shard import shard_of
from core.train_config import LaunchConfig
from data.index_format import DataError
from data.tokenizer import NullTokenizer
from models.cache import KeyValueCache
from models.config import GPTConfig
from models.gpt import GPTStage, build_stages
from scripts.tokenizer_flags import (
    add_tokenizer_flags,
    settings_of,
    tokenizer_for,
    tokenizer_of_checkpoint,
)

HANG = 3600.0  # seconds without a token: there are no steps to learn from


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse_args(argv)
    if args.nproc == 1:
        return answer(args, ProcessGrid.single())
    try:
        place = find_here(args.nproc)
    except LaunchError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    if place.children:
        return supervise(place, argv)
    # as one process does, on a CPU: tokens are made there
    settings = LaunchConfig(distributed_backend="gloo", hang_timeout_seconds=HANG)
    with launch(place, settings) as world:
        grid = ProcessGrid.build(RankGrid(tp=world.size), world.group, world.device)
        return answer(args, grid)


def answer(args: argparse.Namespace, grid: ProcessGrid) -> int:
    """On every rank; rank 0 prints."""
    speaks = grid.world.rank == 0
    try:
        check(args)
        read = functools.partial(read_all, args, grid)
        model, tokenizer, prompts, text = load(args.load, read, grid.world, step=args.ckpt_step)
        if text is not None:
            said = perplexity(model, tokenizer, text)
            if speaks:
                print(said)
            return 0
        eod = tokenizer.eod
    except (CheckpointError, DataError, ValueError, OSError) as error:
        if speaks:
            print(f"generate.py: {error}", file=sys.stderr)
        return 2
    how = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    results = generate(model, prompts, args.max_new_tokens, how, args.num_samples, eod)
    for n, tokens in enumerate(results if speaks else ()):
        if len(results) > 1:
            which = f"prompt {n // args.num_samples + 1}"
            which += f", sample {n % args.num_samples + 1}" if args.num_samples > 1 else ""
            print(f"---- {which}")
        print(tokenizer.decode(tokens[tokens[0] == eod :]))
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--load", required=True, help="the run's --save folder")
    add("--ckpt-step", type=int, help="this step instead of the latest")
    add("--prompt", action="append", help="text to go on from; may be repeated (default: none)")
    add("--max-new-tokens", type=int, default=100, help="tokens to add to each prompt")
    add("--num-samples", type=int, default=1, help="texts for each prompt")
    add("--temperature", type=float, default=1.0, help="0 takes the likeliest token every time")
    add("--top-k", type=int, default=0, help="choose among the k likeliest; 0: among all")
    add("--top-p", type=float, default=1.0, help="choose among the likeliest that make up p")
    add("--seed", type=int, default=1234, help="of the choices")
    add("--nproc", type=int, default=1, help="ranks that cut the model between them (tp)")
    add("--perplexity", metavar="FILE", help="measure a text file instead of writing text")
    add_tokenizer_flags(add, kind="another than the checkpoint's, with the flags that it needs")
    args = parser.parse_args(argv)
    args.prompt = args.prompt or [""]
    return args


def read_all(
    args: argparse.Namespace, grid: ProcessGrid, checkpoint: Checkpoint
) -> tuple[Model, Any, list[list[int]], str | None]:
    """Everything that comes from files: model, tokenizer, prompts, and the text to measure, if any.

    Called through `load`, so that all ranks read one checkpoint and a fault on one is everybody's.
    """
    model = read_model(checkpoint, grid)
    tokenizer = tokenizer_of(checkpoint, args)
    # rows that no token has belong to no text
    model = replace(model, vocab_size=min(model.vocab_size, tokenizer.vocab_size))
    if args.perplexity:
        return model, tokenizer, [], Path(args.perplexity).read_text(encoding="utf-8")
    return model, tokenizer, [encoded(model, tokenizer, prompt) for prompt in args.prompt], None


def check(args: argparse.Namespace) -> None:
    """ValueError with every value that is out of range."""
    lowest = {"temperature": 0, "top_k": 0, "max_new_tokens": 0, "num_samples": 1}
    wrong = [
        f"--{name.replace('_', '-')} {getattr(args, name)} must be {low} or more"
        for name, low in lowest.items()
        if getattr(args, name) < low
    ]
    if not 0 < args.top_p <= 1:
        wrong.append(f"--top-p {args.top_p} must be above 0 and at most 1")
    if wrong:
        raise ValueError("; ".join(wrong))


# ---- what the checkpoint holds -------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model in one stage, cut over `tp`, for evaluation; `window` is the longest text it can look
    at."""

    stage: GPTStage
    window: int
    vocab_size: int
    tp: Group


def read_model(checkpoint: Checkpoint, grid: ProcessGrid | None = None) -> Model:
    """Raises ValueError when it cannot be cut over the ranks, CheckpointError."""
    grid = grid or ProcessGrid.single()
    if "config" not in checkpoint.meta:
        raise CheckpointError(f"{checkpoint.path} keeps no settings; pretrain_gpt.py writes them")
    if "norm_placement" in checkpoint.meta["model"]:
        raise CheckpointError(
            f"{checkpoint.path} holds a BERT, which fills gaps and writes no text; give a "
            "checkpoint of pretrain_gpt.py or of an imported GPT-2 or Llama"
        )
    config: GPTConfig = from_json(GPTConfig, checkpoint.meta["config"]["model"])
    vocab_size = checkpoint.meta["model"]["vocab_size"]
    config = replace(config, vocab_size=vocab_size, label_smoothing=0.0, z_loss=0.0)
    if problems := list(config.layout_problems(grid.tp.size, False)):
        ways = f"--nproc {grid.tp.size}"
        flag = f"--tensor-model-parallel-size {grid.tp.size}"
        raise ValueError("; ".join(problems).replace(flag, ways))
    (stage,) = build_stages(
        config,
        grid,
        micro_batch_size=1,
        sequence_parallel=False,
        seed=0,
        dtype=torch.float64 if config.fp64 else torch.float32,
    )
    checkpoint.fill(
        piece
        for name, param in stage.named_parameters()
        for piece in shard_pieces(
            f"model/{name}", param.detach(), shard_of(param), grid.tp.rank, grid.tp.size
        )
    )
    return Model(stage.eval().requires_grad_(False), config.max_positions, vocab_size, grid.tp)


def tokenizer_of(checkpoint: Checkpoint, args: argparse.Namespace):
    """The one named here, else the checkpoint's; without any, token numbers are the text."""
    rows, given = checkpoint.meta["model"]["vocab_size"], settings_of(args)
    if args.tokenizer_type is not None:
        tokenizer = tokenizer_for(args.tokenizer_type, given, rows)
    elif given:
        raise ValueError("the tokenizer flags need --tokenizer-type")
    else:
        tokenizer = tokenizer_of_checkpoint(checkpoint)
    if tokenizer is None:
        return NullTokenizer(rows)
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model in {checkpoint.path} "
            f"{rows}; name the one it was trained with"
        )
    return tokenizer


def encoded(model: Model, tokenizer, prompt: str) -> list[int]:
    """A prompt's tokens; an empty one begins like a document, after the end of another."""
    tokens = tokenizer.encode(prompt) or [tokenizer.eod]
    if max(tokens) >= model.vocab_size:
        if not prompt:
            raise ValueError("a model without a tokenizer needs a --prompt of token numbers")
        raise ValueError(
            f"--prompt {prompt!r}: token {max(tokens)} is outside the vocabulary of "
            f"{model.vocab_size}"
        )
    return tokens


# ---- sampling ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen; see `choose`. Text n of a run draws from (seed, n)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234


def choose(logits: Tensor, how: Sampling, draw: float) -> int:
    """A token from logits [v] and one uniform number in [0, 1).

    p = softmax(logits / temperature), cut to the top_k likeliest, then to the fewest of these that
    together have top_p of what is left; the token is where the running sum of p passes the draw.
    """
    if how.temperature == 0:
        return int(logits.argmax())
    z, order = (logits.double() / how.temperature).sort(descending=True, stable=True)
    p = (z[: how.top_k] if how.top_k else z).softmax(dim=0)
    p = p[p.cumsum(0) - p < how.top_p]
    sums = p.cumsum(0)
    place = int(torch.searchsorted(sums, draw * sums[-1], right=True))
    return int(order[min(place, len(p) - 1)])


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    how: Sampling,
    num_samples: int = 1,
    eod: int | None = None,
    cached: bool = True,
) -> list[list[int]]:
    """Each prompt, `num_samples` times, with up to `new_tokens` more; a text ends before `eod`.

    cached: keep keys and values from token to token
    """
    texts = [list(prompt) for prompt in prompts for _ in range(num_samples)]
    draws = []
    for n in range(len(texts)):
        generator = torch.Generator().manual_seed(how.seed * 1_000_003 + n)
        draws.append(torch.rand(new_tokens, generator=generator, dtype=torch.float64).tolist())
    unfinished = list(range(len(texts)))
    capacity = min(model.window, max(map(len, texts)) + new_tokens)
    cache = KeyValueCache(len(texts), capacity) if cached else None
    for step in range(new_tokens):
        if max(len(texts[n]) for n in unfinished) > model.window:
            cache = None  # the window moves: every position changes
        logits = next_logits(model, [texts[n][-model.window :] for n in unfinished], cache)
        chosen = [
            (n, choose(row, how, draws[n][step]))
            for n, row in zip(unfinished, logits, strict=True)
        ]
        going = [row for row, (_, token) in enumerate(chosen) if token != eod]
        unfinished = [chosen[row][0] for row in going]
        for n, token in (chosen[row] for row in going):
            texts[n].append(token)
        if not unfinished:
            break
        if cache is not None and len(going) < len(chosen):
            cache.keep(going)
    return texts


def next_logits(
    model: Model, windows: Sequence[Sequence[int]], cache: KeyValueCache | None = None
) -> Tensor:
    """[number of windows, v]: what follows each; short ones are padded behind, out of sight.

    With a cache only the tokens that it has not seen are read.
    """
    seen = [0] * len(windows) if cache is None else cache.lengths
    fresh = [window[n:] for window, n in zip(windows, seen, strict=True)]
    tokens = torch.zeros(len(windows), max(map(len, fresh)), dtype=torch.int64)
    for row, new in zip(tokens, fresh, strict=True):
        row[: len(new)] = torch.tensor(new)
    positions = torch.tensor(seen).unsqueeze(1) + torch.arange(tokens.shape[1])
    hidden = hidden_of(model.stage, {"tokens": tokens, "position_ids": positions}, cache)
    ends = torch.tensor([len(new) - 1 for new in fresh])
    last = hidden[ends, torch.arange(len(windows))].unsqueeze(0)  # [1, b, h]
    logits = all_gather(model.stage.logits(last)[0], model.tp, dim=1, tag="generate.logits")
    if cache is not None:
        cache.lengths = [len(window) for window in windows]
    return logits[:, : model.vocab_size]


def hidden_of(
    stage: GPTStage, batch: dict[str, Tensor], cache: KeyValueCache | None
) -> Tensor:
    """[s, b, h] behind the final norm."""
    if cache is None:
        return stage.hidden(batch, None)
    cache.positions = batch["position_ids"]
    context = replace(stage.context(batch), mask=cache.mask(), cache=cache)
    x = stage.embedding(batch["tokens"], batch["position_ids"], context)
    for block in stage.layers.values():
        x = block(x, context)
    return stage.final_norm(x)


def batch_of(tokens: Tensor) -> dict[str, Tensor]:
    """tokens [b, s]"""
    return {"tokens": tokens, "position_ids": torch.arange(tokens.shape[1]).expand_as(tokens)}


# ---- measuring -----------------------------------------------------------------------------------


def perplexity(model: Model, tokenizer, text: str) -> str:
    """One line: loss per token, perplexity, bits per byte; the text is read window by window."""
    tokens = tokenizer.encode(text)
    if len(tokens) < 2:
        raise ValueError(f"{len(tokens)} tokens are too few to predict one from another")
    losses = (model.stage.compute(batch, None) for batch in windows_of(tokens, model.window))
    loss = sum(float(window.total) for window in losses)
    per_token = loss / (len(tokens) - 1)
    bits = loss / math.log(2) / len(text.encode())
    return (
        f"{len(tokens):,} tokens: loss {per_token:.4f}, perplexity {math.exp(per_token):.2f}, "
        f"{bits:.3f} bits per byte"
    )


def windows_of(tokens: Sequence[int], length: int) -> Iterator[dict[str, Tensor]]:
    """Every token but the first is a label once."""
    for start in range(0, len(tokens) - 1, length):
        piece = torch.tensor([tokens[start : start + length + 1]])
        batch = batch_of(piece[:, :-1])
        yield {
            **batch,
            "labels": piece[:, 1:],
            "loss_mask": torch.ones_like(piece[:, 1:], dtype=torch.float32),
        }


if __name__ == "__main__":
    sys.exit(main())
