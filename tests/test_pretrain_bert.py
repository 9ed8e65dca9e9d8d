"""pretrain_bert.py: every layout's numbers equal one process's; sentences, pairs, masks from files;
what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pretrain_bert
from core.checkpoint.reader import open_checkpoint
from core.comm import Group
from core.config import parse
from data.indexed import IndexedBuilder
from tests.recipe import assert_same_bits, contents, rows, run_recipe

ROOT = Path(__file__).parents[1]
ALONE = Group.single("world")
TP2 = ("--tensor-model-parallel-size", 2)
SP2 = (*TP2, "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", 2)
DROPOUT = ("--attention-dropout", 0.1, "--hidden-dropout", 0.1)


def run(ranks, size: int, *flags: object) -> str:
    """A run that must succeed; returns what rank 0 printed."""
    if size == 1:
        results = [run_recipe(ALONE, *flags, script="pretrain_bert")]
    else:
        results = ranks.run(run_recipe, *flags, size=size, script="pretrain_bert")
    assert [code for code, _ in results] == [0] * size
    return results[0][1]


# ---- layouts -------------------------------------------------------------------------------------

SHAPE = ("--fp64", "--num-layers", 4, "--train-iters", 2, "--eval-iters", 1, *DROPOUT)
LAYOUTS = {
    "dp2": (2, ("--micro-batch-size", 4)),
    "tp2": (2, TP2),
    "tp2-sp": (2, SP2),
    "pp2": (2, PP2),
    "pp2-zb": (2, (*PP2, "--pipeline-schedule", "zb_h1")),
    "dp2-tp2-sp": (4, (*SP2, "--micro-batch-size", 1)),
    "pp2-tp2-sp": (4, (*PP2, *SP2)),
    "pp2-dp2-chunks": (4, (*PP2, "--num-virtual-stages-per-pipeline-rank", 2)),
    "dp2-sharded": (2, ("--data-parallel-sharding-strategy", "optim_grads_params")),
    "pp2-dp2-zero1": (4, (*PP2, "--use-distributed-optimizer", "--overlap-grad-reduce")),
}
MODELS = {
    "post": (),
    "pre-rope": ("--norm-placement", "pre", "--position-embedding-type", "rope"),
}
_references: dict[str, list[dict]] = {}


def assert_same_numbers(found: list[dict], wanted: list[dict]) -> None:
    for mine, one in zip(found, wanted, strict=True):
        assert mine.keys() == one.keys()
        for name, value in one.items():
            known = value if isinstance(value, str) else pytest.approx(value, rel=1e-12, abs=0)
            assert mine[name] == known, f"{name} of {one}"


def reference(ranks, folder: Path, model: str) -> list[dict]:
    if model not in _references:
        path = folder / f"{model}.jsonl"
        run(ranks, 1, *SHAPE, *MODELS[model], "--metrics-file", path)
        _references[model] = [*rows(path), *rows(path, "eval")]
    return _references[model]


@pytest.mark.parametrize(
    ("model", "name"),
    [*(("post", name) for name in LAYOUTS), ("pre-rope", "pp2-tp2-sp"), ("pre-rope", "dp2-tp2-sp")],
)
def test_every_layout_equals_one_process(ranks, tmp_path, model, name):
    """Both losses, the norm of the gradients and the validation: C028 for two losses at once."""
    size, layout = LAYOUTS[name]
    path = tmp_path / "m.jsonl"
    run(ranks, size, *SHAPE, *MODELS[model], *layout, "--metrics-file", path)
    found = [*rows(path), *rows(path, "eval")]
    wanted = reference(ranks, tmp_path, model)
    assert [row["kind"] for row in found] == ["train"] * 2 + ["eval"] * 2
    assert_same_numbers(found, wanted)
    assert len({row["lm_loss"] for row in found}) == len({row["sop_loss"] for row in found}) == 4


@pytest.mark.parametrize(
    "precision", [("--bf16",), ("--fp16", "--initial-loss-scale", 256)], ids=lambda flags: flags[0]
)
def test_low_precision_follows_float32(ranks, tmp_path, precision):
    losses = []
    for name, flags in (("wide", ()), ("low", precision)):
        path = tmp_path / f"{name}.jsonl"
        run(ranks, 2, *SP2, "--train-iters", 3, *flags, "--metrics-file", path)
        losses.append([(row["lm_loss"], row["sop_loss"]) for row in rows(path)])
    assert np.ravel(losses[1]) == pytest.approx(np.ravel(losses[0]), rel=0.01)


def test_the_losses_fall(ranks, tmp_path):
    path = tmp_path / "m.jsonl"
    said = run(ranks, 1, "--train-iters", 25, "--lr", 3e-3, "--metrics-file", path)
    losses = [row["lm_loss"] for row in rows(path)]
    assert losses[-1] < losses[0] - 0.3
    assert " | sop loss: " in said
    assert rows(path)[0]["tokens"] == 8 * 16
    assert 8 <= rows(path)[0]["masked_tokens"] <= 8 * 4


def test_a_resumed_run_equals_the_unbroken_one(ranks, tmp_path):
    """Saved at tp 2 x pp 2, where the table lies on both stages, and its heads on the last."""
    flags = (*DROPOUT, *PP2, *SP2, "--train-iters", 4, "--fp64")
    for name, steps in (("unbroken", ((),)), ("broken", (("--exit-interval", 2), ()))):
        folder = tmp_path / name
        for more in steps:
            load = ("--load", folder) if folder.exists() else ()
            record = ("--save", folder, "--metrics-file", f"{folder}.jsonl")
            run(ranks, 4, *flags, *more, *load, *record)
    unbroken = rows(tmp_path / "unbroken.jsonl")
    assert rows(tmp_path / "broken.jsonl") == unbroken
    assert_same_bits(contents(tmp_path / "broken"), contents(tmp_path / "unbroken"))
    load = ("--load", tmp_path / "broken", "--ckpt-step", 2)
    alone = (*load, "--metrics-file", tmp_path / "one.jsonl")
    run(ranks, 1, *DROPOUT, "--train-iters", 4, "--fp64", *alone)
    assert_same_numbers(rows(tmp_path / "one.jsonl"), unbroken[2:])


# ---- files ---------------------------------------------------------------------------------------

WORDS = "the cat sat on a mat dog ran by door they like wood and river".split()
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "##s", *WORDS]
SPECIAL = 5  # ids below it


@pytest.fixture
def vocab(tmp_path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(VOCABULARY) + "\n")
    return path


def preprocessed(folder: Path, name: str, documents: list[str], vocab: Path) -> Path:
    """Prefix of what preprocess_data.py --split-sentences makes of them."""
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    command = [sys.executable, ROOT / "scripts" / "preprocess_data.py", "--input", source]
    command += ["--output-prefix", folder / name, "--vocab-file", vocab, "--split-sentences"]
    command += ["--tokenizer-type", "BertWordPieceLowerCase", "--workers", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder / f"{name}_text_sentence"


def write_sentences(prefix: Path, documents: list[list[int]], seed: int = 0) -> Path:
    """Documents as lists of sentence lengths; random words."""
    rng = np.random.default_rng(seed)
    with IndexedBuilder(prefix, np.uint16) as builder:
        for lengths in documents:
            builder.add(rng.integers(SPECIAL, len(VOCABULARY), sum(lengths)), lengths)
    return prefix


def on(prefix: Path, vocab: Path, *flags: object) -> tuple[object, ...]:
    tokenizer = ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocab)
    source = ("--no-mock-data", "--data-path", prefix, "--split", "1")
    return (*source, *tokenizer, "--train-iters", 2, *flags)


def problems_of(*flags: object) -> list[str]:
    line = [*"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16".split()]
    line += ["--micro-batch-size", "2", "--lr", "1e-3", *map(str, flags)]
    return list(pretrain_bert.problems(parse(pretrain_bert.RunConfig, line)))


def test_c061_documents_of_one_sentence(ranks, tmp_path, vocab):
    """NVIDIA/Megatron-LM#70, #59, #67: a corpus of one-sentence documents was cut for ever. Refused
    before a rank starts; without the binary head it trains."""
    two = preprocessed(tmp_path, "two", ["The cat sat on a mat.", "They like the river."], vocab)
    (said,) = problems_of(*on(two, vocab))
    assert "each of 2 documents has one sentence" in said
    assert "--split-sentences" in said and "--bert-no-binary-head" in said
    said = run(ranks, 1, *on(two, vocab, "--bert-no-binary-head"))
    assert "sop loss" not in said and f"training on {two}: 16 samples" in said


def test_c061_twenty_documents_of_three_sentences_on_two_ranks(ranks, tmp_path, vocab):
    text = "The cat sat on a mat. A dog ran by the door. They like the wood and the river."
    prefix = preprocessed(tmp_path, "twenty", [text] * 20, vocab)
    said = run(ranks, 2, *on(prefix, vocab), *TP2)
    assert "iteration        2/       2" in said and "sop loss" in said


def test_documents_left_out_are_counted(ranks, tmp_path, vocab):
    documents = [[4, 5], [6], [3, 3, 4], [], [7, 2], [5]]
    prefix = write_sentences(tmp_path / "mixed", documents)
    said = run(ranks, 1, *on(prefix, vocab))
    assert f"{prefix}: 3 of 6 documents have one sentence: left out" in said


def test_masks_and_pairs_do_not_depend_on_the_layout_or_a_restart(ranks, tmp_path, vocab):
    rng = np.random.default_rng(1)
    documents = [rng.integers(3, 9, rng.integers(2, 6)).tolist() for _ in range(40)]
    prefix = write_sentences(tmp_path / "corpus", documents)
    flags = on(prefix, vocab, "--train-iters", 4, "--fp64", *DROPOUT)
    run(ranks, 1, *flags, "--metrics-file", tmp_path / "one.jsonl")
    broken = (*SP2, "--save", tmp_path / "run", "--metrics-file", tmp_path / "two.jsonl")
    run(ranks, 4, *flags, *broken, "--exit-interval", 2)
    run(ranks, 4, *flags, *broken, "--load", tmp_path / "run")
    one, two = rows(tmp_path / "one.jsonl"), rows(tmp_path / "two.jsonl")
    assert_same_numbers(two, one)
    assert len({row["masked_tokens"] for row in one}) > 1


def test_a_blend_of_sentences_and_named_validation_sets(ranks, tmp_path, vocab):
    a, b = (write_sentences(tmp_path / x, [[4, 5, 3]] * 12, seed=n) for n, x in enumerate("ab"))
    flags = on(a, vocab)[5:]
    blend = ("--train-data-path", 1, a, 3, b, "--valid-data-path", 1, a, 1, b)
    path = tmp_path / "m.jsonl"
    more = ("--multiple-validation-sets", "--eval-iters", 1, "--metrics-file", path)
    said = run(ranks, 1, "--no-mock-data", *blend, *flags, *more, "--save", tmp_path / "run")
    assert f"training on {b}: 12 samples" in said
    by_set = {row["set"]: row for row in rows(path, "eval_set")}
    (mean,) = rows(path, "eval")
    for name in ("lm_loss", "sop_loss"):
        assert mean[name] == pytest.approx((by_set["a"][name] + by_set["b"][name]) / 2)
    history = open_checkpoint(tmp_path / "run").meta["data"]["blend"]
    assert history == [[0, {str(a): "1", str(b): "3"}]]


@pytest.mark.parametrize("head", [(), ("--bert-no-binary-head",)], ids=["", "no-head"])
def test_full_validation_reads_every_sample_once(ranks, tmp_path, vocab, head):
    """What fills up the last batch counts nowhere: here 19 of 32 samples, whole microbatches."""
    prefix = write_sentences(tmp_path / "a", [[4, 5, 3]] * 13)
    flags = on(prefix, vocab, "--full-validation", "--eval-iters", 0, "--fp64", *head)[5:]
    flags = ("--no-mock-data", "--train-data-path", prefix, "--valid-data-path", prefix, *flags)
    flags += ("--skip-train", "--short-seq-prob", 0)
    found = []
    for name, size, layout in (
        ("one", 1, ("--micro-batch-size", 1, "--global-batch-size", 1)),
        ("filled", 1, ("--micro-batch-size", 4, "--global-batch-size", 32)),
        ("four", 4, ("--micro-batch-size", 2, "--global-batch-size", 32, *PP2, *SP2)),
        ("dp", 2, ("--micro-batch-size", 8, "--global-batch-size", 32)),
    ):
        path = tmp_path / f"{name}.jsonl"
        run(ranks, size, *flags, *layout, "--metrics-file", path)
        found.append(rows(path, "eval"))
    assert len(found[0]) == 1 and ("sop_loss" in found[0][0]) == (not head)
    for other in found[1:]:
        assert_same_numbers(other, found[0])


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--mock-data --mask-prob 0", "--mask-prob 0 must be above 0 and below 1"),
        ("--mock-data --short-seq-prob 2", "--short-seq-prob 2 must be from 0 to 1"),
        ("--mock-data --mask-max-ngram 0", "--mask-max-ngram 0 must be 1 or more"),
        ("--mock-data --seq-length 6", "--seq-length 6 has no room for two texts"),
        ("--mock-data --reset-position-ids", "it belongs to the GPT script"),
        ("--mock-data --full-validation", "that of --mock-data has none"),
        ("--data-path d --vocab-size 9", "BERT's samples need [CLS], [SEP], [MASK] and [PAD]"),
    ],
)
def test_what_cannot_work(flags, words, capsys):
    line = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1".split()
    line += ["--micro-batch-size", "2", "--train-iters", "1", *flags.split()]
    with pytest.raises(SystemExit) as left:
        parse(pretrain_bert.RunConfig, line, checks=[pretrain_bert.problems])
    assert left.value.code == 2 and words in capsys.readouterr().err


def test_a_vocabulary_without_the_special_tokens(tmp_path, vocab):
    prefix = write_sentences(tmp_path / "a", [[4, 5]])
    vocab.write_text("\n".join(["[UNK]", *WORDS, "x", "y", "z", "w", "v", "u", "t"]) + "\n")
    assert any("has no cls token" in said or "has no mask token" in said
               for said in problems_of(*on(prefix, vocab)))


def test_the_cache_flag_of_gpt_has_no_effect():
    line = ["--mock-data", "--data-cache-path", "d", "--use-mcore-models"]
    notices = parse(pretrain_bert.RunConfig, line).notices
    assert "--data-cache-path has no effect: BERT's samples are cut in memory" in notices[0]


def test_help_needs_no_torch_and_a_run_starts(tmp_path):
    python = [sys.executable, "-W", "error"]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120}
    timed = [*python, "-X", "importtime", "pretrain_bert.py", "--help"]
    done = subprocess.run(timed, **options)
    assert done.returncode == 0
    assert "--norm-placement" in done.stdout and "--mask-prob" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "core.config" in imported and not {"torch", "numpy"} & imported
    small = "--mock-data --train-iters 1 --eval-iters 0 --num-layers 1 --no-progress-bar"
    done = subprocess.run([*python, "pretrain_bert.py", *small.split()], **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "BERT of " in done.stdout and "sop loss" in done.stdout
