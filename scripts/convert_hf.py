"""Checkpoints from and to Hugging Face transformers' layout, both ways, one tensor at a time.

    python scripts/convert_hf.py import HF_DIR SAVE_DIR [--check-logits]
    python scripts/convert_hf.py export SAVE_DIR HF_DIR [--step N] [--dtype bfloat16]

HF_DIR holds config.json, safetensors (one file, or shards with their index) and perhaps tokenizer
files and generation_config.json, which travel as they are. What is read back in with
`--load SAVE_DIR --finetune` runs at any layout, and a checkpoint written by any layout is exported;
import and export are each other's inverse, bit for bit. The model is never whole in memory but for
--check-logits, which compares with transformers.

Supported: gpt2, llama (grouped queries, rope scaling, tied or not) and bert. Exit code 2 and one
message with every reason for what cannot be converted; nothing is left behind then. hf_layout.py
and hf_bert.py have the rules, hf_check.py compares logits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from core.checkpoint.directory import saved_iterations, size_text
from core.checkpoint.errors import CheckpointError
from core.checkpoint.files import Deferred, dtype_named, write_file
from core.checkpoint.pieces import Piece
from core.checkpoint.reader import Checkpoint, open_checkpoint
from core.checkpoint.slices import whole
from core.checkpoint.store import save
from core.comm import Group
from core.config_record import from_json, to_argv, to_json
from data.index_format import DataError
from models.config import BertConfig, GPTConfig
from scripts.hf_check import check_logits
from scripts.hf_families import family_for
from scripts.hf_folder import INDEX, SINGLE, HFFolder, listed
from scripts.hf_layout import Rule, Unsupported
from scripts.tokenizer_flags import tokenizer_in, tokenizer_of_checkpoint

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja"),
)
GENERATION_FILES = ("generation_config.json",)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
UNTIED = "untie_embeddings_and_output_weights"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    ways = parser.add_subparsers(dest="way", required=True)
    come = ways.add_parser("import", help="transformers -> checkpoint")
    come.add_argument("source", type=Path, metavar="HF_DIR")
    come.add_argument("target", type=Path, metavar="SAVE_DIR")
    go = ways.add_parser("export", help="checkpoint -> transformers")
    go.add_argument("source", type=Path, metavar="SAVE_DIR")
    go.add_argument("target", type=Path, metavar="HF_DIR")
    go.add_argument("--step", type=int, help="this iteration (default: what `latest` names)")
    go.add_argument("--tokenizer", type=Path, metavar="DIR", help="folder of tokenizer files")
    go.add_argument("--max-shard-size", type=float, default=5.0, metavar="GB", help="default: 5")
    for way in (come, go):
        dtypes = ("float32", "bfloat16", "float16")
        way.add_argument("--dtype", choices=dtypes, help="round to this (default: as stored)")
        way.add_argument(
            "--check-logits", action="store_true", help="compare logits with transformers"
        )
    args = parser.parse_args(argv)
    start = time.monotonic()
    try:
        done = import_model(args) if args.way == "import" else export_model(args)
        print(f"{done} in {time.monotonic() - start:.1f} s")
        if args.check_logits:
            here, there = args.source, args.target
            ours, theirs = (there, here) if args.way == "import" else (here, there)
            checkpoint = open_checkpoint(ours, getattr(args, "step", None))
            return check_logits(checkpoint, model_config(checkpoint), theirs)
    except (CheckpointError, Unsupported, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


# ---- import ----------------------------------------------------------------------------------


def import_model(args: argparse.Namespace) -> str:
    """Writes iteration 0 of a new --save folder; returns what to tell the user."""
    if have := saved_iterations(args.target):
        raise Unsupported(
            f"{args.target} already has checkpoints ({listed(map(str, have))}); choose another "
            "folder"
        )
    source = HFFolder(args.source)
    config = source.family.fit(source.family.config(source.config), source.names())
    if problems := list(config.problems()):
        raise Unsupported(f"{args.source / 'config.json'}: " + "; ".join(problems))
    rules = list(source.family.rules(config))
    check_tensors(source, rules, tied=not getattr(config, UNTIED, False))
    token_ids = {name: source.config[name] for name in TOKEN_IDS if name in source.config}
    meta = {
        "model": config.identity(),
        "config": {"model": to_json(config)},
        "layout": {"tp": 1, "dp": 1, "pp": 1},
        "imported": {
            "model_type": source.family.model_type,
            "dtype": args.dtype,
            "token_ids": token_ids,
        },
    }
    dtype = dtype_named(args.dtype) if args.dtype else None
    pieces = [joined(source, rule, dtype) for rule in rules]
    path = save(args.target, 0, pieces, meta, Group.single("world"))
    copy_files([args.source], args.target / "tokenizer")
    flags = " ".join(to_argv(config))
    recipe = "pretrain_bert.py" if isinstance(config, BertConfig) else "pretrain_gpt.py"
    print(f"train on with: python {recipe} --load {args.target} --finetune {flags} ...")
    size = sum(p.tensor.numel() * p.tensor.element_size() for p in pieces)
    return f"{path}: {len(pieces)} tensors, {size_text(size)}"


def check_tensors(source: HFFolder, rules: list[Rule], tied: bool) -> None:
    """That the folder has what the config says, and nothing that would be left out."""
    have, problems = set(source.names()), []
    wanted = {name for rule in rules for name in rule.theirs}
    if absent := sorted(wanted - have):
        problems.append(f"{listed(absent)} missing")
    ignored = source.family.buffers + (("lm_head.weight",) if tied else ())
    if extra := sorted(name for name in have - wanted if not name.endswith(ignored)):
        problems.append(f"{listed(extra)} not expected")
    for rule in rules:
        for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True):
            if name in have and source.shape(name) != shape:
                problems.append(f"{name} is {source.shape(name)}, config.json means {shape}")
    if problems:
        raise Unsupported(f"{source.folder}: " + "; ".join(problems))


def joined(source: HFFolder, rule: Rule, dtype: torch.dtype | None) -> Piece:
    """Our tensor, made of theirs when it is written."""
    stored = {source.dtype(name) for name in rule.theirs}
    if len(stored) > 1:
        raise Unsupported(f"{listed(rule.theirs)} have several dtypes")
    dtype = dtype or stored.pop()

    def make() -> Tensor:
        return rule.join(*(source.read(name) for name in rule.theirs)).to(dtype)

    return Piece(
        f"model/{rule.ours}", rule.shape, whole(rule.shape), Deferred(rule.shape, dtype, make)
    )


# ---- export ----------------------------------------------------------------------------------


def export_model(args: argparse.Namespace) -> str:
    """Writes a new folder in transformers' layout; returns what to tell the user."""
    if args.target.exists() and any(args.target.iterdir()):
        raise Unsupported(f"{args.target} is not empty; choose another folder")
    checkpoint = open_checkpoint(args.source, args.step)
    config = model_config(checkpoint)
    family = family_for(config)
    rules = list(family.rules(config))
    checkpoint.check({f"model/{rule.ours}": rule.shape for rule in rules})
    known = {f"model/{rule.ours}" for rule in rules}
    if extra := [n for n in checkpoint.names() if n.startswith("model/") and n not in known]:
        raise Unsupported(f"{checkpoint.path}: no place for {listed(extra)} in {family.model_type}")
    dtype = dtype_named(args.dtype) if args.dtype else None
    tensors = dict(split_tensors(checkpoint, rules, dtype))
    described = family.describe(config) | token_ids_of(args, checkpoint)
    partial_folder = args.target.with_name(args.target.name + ".tmp")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    try:
        size = write_shards(partial_folder, tensors, int(args.max_shard_size * 1e9))
        write_json(partial_folder / "config.json", described | {"dtype": dtype_text(tensors)})
        copy_files(tokenizer_folders(args, checkpoint), partial_folder)
        if args.target.exists():
            args.target.rmdir()
        os.replace(partial_folder, args.target)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    return f"{args.target}: {family.model_type}, {len(tensors)} tensors, {size_text(size)}"


def model_config(checkpoint: Checkpoint) -> GPTConfig | BertConfig:
    """The shape that the run was started with, the vocabulary as its tokenizer had it."""
    try:
        identity = checkpoint.meta["model"]
        kind = BertConfig if "norm_placement" in identity else GPTConfig
        config = from_json(kind, checkpoint.meta["config"]["model"])
        return replace(config, vocab_size=identity["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise Unsupported(f"{checkpoint.path} is not a GPT's or a BERT's: {error}") from None


def split_tensors(
    checkpoint: Checkpoint, rules: list[Rule], dtype: torch.dtype | None
) -> Iterator[tuple[str, Deferred]]:
    """Their tensors by name, each read and cut when it is written; one of ours is kept for that."""

    @lru_cache(maxsize=1)
    def parts(n: int) -> tuple[Tensor, ...]:
        return rules[n].split(checkpoint.read(f"model/{rules[n].ours}", dtype=dtype))

    for n, rule in enumerate(rules):
        kind = dtype or checkpoint.dtype(f"model/{rule.ours}")
        for k, (name, shape) in enumerate(zip(rule.theirs, rule.their_shapes(), strict=True)):
            yield name, Deferred(shape, kind, partial(lambda n, k: parts(n)[k], n, k))


def write_shards(folder: Path, tensors: dict[str, Deferred], limit: int) -> int:
    """One file, or shards of at most `limit` bytes with their index; returns the tensors' bytes."""
    shards: list[dict[str, Deferred]] = [{}]
    size, total = 0, 0
    for name, tensor in tensors.items():
        count = tensor.numel() * tensor.element_size()
        if shards[-1] and size + count > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size, total = size + count, total + count
    where = {}
    for n, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / file, list(shard.items()), metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_json(folder / INDEX, index)
    return total


def dtype_text(tensors: dict[str, Deferred]) -> str:
    return str(next(iter(tensors.values())).dtype).removeprefix("torch.")


def token_ids_of(args: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, object]:
    """The special tokens as they were imported, else the one that the tokenizer knows.

    What is not known is null: where nothing stands, transformers takes another model's numbers.
    """
    kept = checkpoint.meta.get("imported", {}).get("token_ids", {})
    ids = dict.fromkeys(TOKEN_IDS) | kept
    is_bert = isinstance(model_config(checkpoint), BertConfig)
    name, role = ("pad_token_id", "pad") if is_bert else ("eos_token_id", "eod")
    if name in kept:
        return ids
    try:
        if args.tokenizer:
            tokenizer = tokenizer_in(args.tokenizer)
        else:
            tokenizer = tokenizer_of_checkpoint(checkpoint)
        if tokenizer is None:
            raise DataError("there is no tokenizer; --tokenizer DIR gives one")
        return ids | {name: getattr(tokenizer, role)}
    except (DataError, ValueError) as error:  # ValueError: a damaged tokenizer_config.json
        print(f"{name} is null in config.json: {error}")
        return ids


def tokenizer_folders(args: argparse.Namespace, checkpoint: Checkpoint) -> list[Path]:
    """Where the tokenizer's files may be: as given, as imported, or as the run was given them."""
    if args.tokenizer and not args.tokenizer.is_dir():
        raise Unsupported(f"--tokenizer {args.tokenizer} is not a folder")
    given = [args.tokenizer] if args.tokenizer else []
    data = checkpoint.meta["config"].get("data") or {}
    named = [data.get(key) for key in ("tokenizer_model", "vocab_file", "merge_file")]
    places = [checkpoint.path.parent / "tokenizer", *(Path(name) for name in named if name)]
    return given + [p if p.is_dir() else p.parent for p in places if p.exists()]


# ---- both ------------------------------------------------------------------------------------


def copy_files(folders: list[Path], target: Path) -> None:
    """The first tokenizer that one of the folders has, and the first generation_config.json."""
    for names in (TOKENIZER_FILES, GENERATION_FILES):
        found = ([f / name for name in names if (f / name).is_file()] for f in folders)
        for path in next(filter(None, found), ()):
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.name)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
