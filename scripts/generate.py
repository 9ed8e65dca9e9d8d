"""Text from a checkpoint of pretrain_gpt.py, or how well it predicts a file.

    python scripts/generate.py --load D --prompt 'def ' --prompt 'import ' --max-new-tokens 100
    python scripts/generate.py --load D --prompt 'def ' --temperature 0          the likeliest token
    python scripts/generate.py --load D --perplexity FILE

One process, whatever layout wrote the checkpoint. The model's shape and the tokenizer come from the
settings that it keeps; tokenizer flags given here win. A model trained without a tokenizer reads
and writes token numbers. The same seed gives the same text for a prompt, alone or among others.

In this order: `read_model`, `choose` (a token from logits), `generate`, `perplexity`. All tokens of
the window are computed again for every new one.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from core.checkpoint.errors import CheckpointError
from core.checkpoint.pieces import shard_pieces
from core.checkpoint.reader import Checkpoint, open_checkpoint
from core.config_record import from_json
from core.process_grid import ProcessGrid
from core.shard import shard_of
from data.index_format import DataError
from data.tokenizer import NullTokenizer, build_tokenizer
from models.config import GPTConfig
from models.gpt import GPTStage, build_stages

TOKENIZER_FLAGS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        check(args)
        checkpoint = open_checkpoint(args.load, args.ckpt_step)
        model = read_model(checkpoint)
        tokenizer = tokenizer_of(checkpoint, args)
        # rows that no token has belong to no text
        model = replace(model, vocab_size=min(model.vocab_size, tokenizer.vocab_size))
        if args.perplexity:
            print(perplexity(model, tokenizer, Path(args.perplexity).read_text(encoding="utf-8")))
            return 0
        prompts = [encoded(model, tokenizer, prompt) for prompt in args.prompt]
    except (CheckpointError, DataError, ValueError, OSError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    how = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    results = generate(model, prompts, args.max_new_tokens, how, args.num_samples, tokenizer.eod)
    for n, tokens in enumerate(results):
        if len(results) > 1:
            which = f"prompt {n // args.num_samples + 1}"
            which += f", sample {n % args.num_samples + 1}" if args.num_samples > 1 else ""
            print(f"---- {which}")
        print(tokenizer.decode(tokens[tokens[0] == tokenizer.eod :]))
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
    add("--perplexity", metavar="FILE", help="measure a text file instead of writing text")
    for name in TOKENIZER_FLAGS:
        add(f"--{name.replace('_', '-')}", help="as for training (default: as trained)")
    args = parser.parse_args(argv)
    args.prompt = args.prompt or [""]
    return args


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
    """A whole model in one stage, for evaluation; `window` is the longest text it can look at."""

    stage: GPTStage
    window: int
    vocab_size: int


def read_model(checkpoint: Checkpoint) -> Model:
    if "config" not in checkpoint.meta:
        raise CheckpointError(f"{checkpoint.path} keeps no settings; pretrain_gpt.py writes them")
    config: GPTConfig = from_json(GPTConfig, checkpoint.meta["config"]["model"])
    vocab_size = checkpoint.meta["model"]["vocab_size"]
    config = replace(config, vocab_size=vocab_size, label_smoothing=0.0, z_loss=0.0)
    (stage,) = build_stages(
        config,
        ProcessGrid.single(),
        micro_batch_size=1,
        sequence_parallel=False,
        seed=0,
        dtype=torch.float64 if config.fp64 else torch.float32,
    )
    checkpoint.fill(
        piece
        for name, param in stage.named_parameters()
        for piece in shard_pieces(f"model/{name}", param.detach(), shard_of(param), 0, 1)
    )
    return Model(stage.eval().requires_grad_(False), config.max_positions, vocab_size)


def tokenizer_of(checkpoint: Checkpoint, args: argparse.Namespace):
    """The one named here, else the one trained with; without any, token numbers are the text."""
    given = {name: getattr(args, name) for name in TOKENIZER_FLAGS}
    flags = given if any(given.values()) else dict(checkpoint.meta["config"]["data"])
    kind = flags.pop("tokenizer_type", None)
    rows = checkpoint.meta["model"]["vocab_size"]
    if kind is None and any(given.values()):
        raise ValueError("the tokenizer flags need --tokenizer-type")
    if kind is None or kind == "NullTokenizer":
        # trained with NullTokenizer, the last of the model's tokens ends a document
        return NullTokenizer(rows - (kind is not None))
    usable = {name: flags.get(name) for name in TOKENIZER_FLAGS[1:]}
    tokenizer = build_tokenizer(kind, **usable)
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
) -> list[list[int]]:
    """Each prompt, `num_samples` times, with up to `new_tokens` more; a text ends before `eod`."""
    texts = [list(prompt) for prompt in prompts for _ in range(num_samples)]
    draws = []
    for n in range(len(texts)):
        generator = torch.Generator().manual_seed(how.seed * 1_000_003 + n)
        draws.append(torch.rand(new_tokens, generator=generator, dtype=torch.float64).tolist())
    unfinished = list(range(len(texts)))
    for step in range(new_tokens):
        logits = next_logits(model, [texts[n][-model.window :] for n in unfinished])
        chosen = [
            (n, choose(row, how, draws[n][step]))
            for n, row in zip(unfinished, logits, strict=True)
        ]
        unfinished = [n for n, token in chosen if token != eod]
        for n, token in chosen:
            if token != eod:
                texts[n].append(token)
        if not unfinished:
            break
    return texts


def next_logits(model: Model, windows: Sequence[Sequence[int]]) -> Tensor:
    """[number of windows, v]: what follows each; short ones are padded behind, out of sight."""
    lengths = [len(window) for window in windows]
    tokens = torch.zeros(len(windows), max(lengths), dtype=torch.int64)
    for row, window in zip(tokens, windows, strict=True):
        row[: len(window)] = torch.tensor(window)
    hidden = model.stage.hidden(batch_of(tokens), None)  # [s, b, h]
    last = hidden[torch.tensor(lengths) - 1, torch.arange(len(windows))]
    return model.stage.logits(last.unsqueeze(0))[0, :, : model.vocab_size]


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
