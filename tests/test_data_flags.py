"""The data flags through the GPT recipe: what a run reads, evaluates, says and keeps."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import pretrain_bert
from core.checkpoint.reader import open_checkpoint
from core.comm import Group
from core.flag_table import leaves
from core.known_flags import GPT_ONLY, GPT_ONLY_ACCEPTED
from data.config import TOKENIZER_FLAGS, TokenizerType
from data.tokenizer import TOKENIZERS
from pretrain_gpt import RunConfig, problems
from tests.recipe import assert_same_bits, contents, rows, run_recipe, write_corpus

SIX = ("--train-iters", 6)


@pytest.fixture
def pairs(tmp_path):
    """Three corpora of 64, 128 and 128 samples, two documents in each; they hold tokens 0-9, 10-19
    and 20-29."""
    rng = np.random.default_rng(0)
    for i, (name, documents) in enumerate((("a", 64), ("b", 128), ("c", 128))):
        tokens = 10 * i + rng.integers(0, 10, (2 * documents, 8))
        write_corpus(tmp_path / name, tokens)
    return {name: str(tmp_path / name) for name in "abc"}


def run(*flags: object) -> str:
    code, said = run_recipe(Group.single("world"), "--no-mock-data", *flags)
    assert code == 0
    return said


def evaluations(path: Path) -> dict[str, float]:
    """The validation losses of a file with one evaluation: by set, and "" for their mean."""
    found = [*rows(path, "eval_set"), *rows(path, "eval")]
    return {row.get("set", ""): row["lm_loss"] for row in found if row["split"] == "validation"}


# ---- where the tokens come from ------------------------------------------------------------------


def test_a_blend_says_how_often_it_passes_through_each_set(pairs):
    """C050: 48 samples, a quarter of them from a. By size they are shared when no weight is
    given."""
    said = run("--data-path", 1, pairs["a"], 3, pairs["b"], "--split", "1", *SIX)
    assert f"training on {pairs['a']}: 12 samples, 0.188 epochs" in said
    assert f"training on {pairs['b']}: 36 samples, 0.281 epochs" in said
    said = run("--data-path", pairs["a"], pairs["b"], "--split", "1", *SIX)
    assert f"training on {pairs['a']}: 16 samples, 0.25 epochs" in said
    assert f"training on {pairs['b']}: 32 samples, 0.25 epochs" in said


def test_every_way_to_name_a_blend_is_the_same_run(pairs, tmp_path):
    words = ["0.3", pairs["a"], "0.7", pairs["b"]]
    (tmp_path / "words").write_text(" ".join(words))
    (tmp_path / "lists.json").write_text(json.dumps({"train": words}))
    ways = {
        "one": ("--data-path", *words, "--split", "1"),
        "file": ("--data-args-path", tmp_path / "words", "--split", "1"),
        "own": ("--train-data-path", *words),
        "lists": ("--per-split-data-args-path", tmp_path / "lists.json"),
        "threads": ("--train-data-path", *words, "--num-dataset-builder-threads", 4),
    }
    found = []
    for name, flags in ways.items():
        run(*flags, "--train-iters", 2, "--metrics-file", tmp_path / f"{name}.jsonl")
        found.append(rows(tmp_path / f"{name}.jsonl"))
    assert all(each == found[0] for each in found)


def test_another_blend_from_the_middle_on_repeats_nothing(pairs, tmp_path):
    """The checkpoint keeps the blend's history: b goes on where it was, a is left, c begins. At
    another layout the history is the same."""
    save = ("--save", tmp_path / "run", "--metrics-file", tmp_path / "run.jsonl")
    first = ("--data-path", 1, pairs["a"], 1, pairs["b"], "--split", "1")
    run(*first, *SIX, "--exit-interval", 2, *save)
    history = open_checkpoint(tmp_path / "run").meta["data"]["blend"]
    before = {pairs["a"]: "1", pairs["b"]: "1"}
    assert history == [[0, before]]

    second = ("--data-path", 1, pairs["b"], 1, pairs["c"], "--split", "1")
    said = run(*second, *SIX, "--load", tmp_path / "run", *save)
    assert "the blend changes at sample 16; nothing is repeated" in said
    assert f"training on {pairs['a']}" not in said
    assert f"training on {pairs['b']}: 24 samples" in said
    after = {pairs["b"]: "1", pairs["c"]: "1"}
    history = open_checkpoint(tmp_path / "run").meta["data"]["blend"]
    assert history == [[0, before], [16, after]]

    # broken once more, the run is bit for bit what it was
    other = ("--save", tmp_path / "other", "--metrics-file", tmp_path / "other.jsonl")
    run(*first, *SIX, "--exit-interval", 2, *other)
    run(*second, *SIX, "--exit-interval", 4, "--load", tmp_path / "other", *other)
    said = run(*second, *SIX, "--load", tmp_path / "other", *other)
    assert "the blend changes" not in said
    assert rows(tmp_path / "run.jsonl") == rows(tmp_path / "other.jsonl")
    assert_same_bits(contents(tmp_path / "run"), contents(tmp_path / "other"))


def test_sets_that_were_moved_go_on_where_they_were(pairs, tmp_path):
    """Staged to the node's disk, a set began again at its first sample, and nothing was said."""
    flags = (*SIX, "--split", "1", "--save", tmp_path / "run", "--load", tmp_path / "run")
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    blend = ("--data-path", 1, pairs["a"], 1, pairs["b"])
    run(*blend, *SIX, "--split", "1", "--metrics-file", whole)
    run(*blend, *flags, "--exit-interval", 2, "--metrics-file", parts)
    (tmp_path / "node").mkdir()
    for name in "ab":
        for kind in ("bin", "idx"):
            shutil.move(f"{pairs[name]}.{kind}", tmp_path / "node" / f"{name}.{kind}")
    staged = {name: str(tmp_path / "node" / name) for name in "ab"}
    # in the other order, too: of equal weights, the first one named was served first
    said = run("--data-path", 1, staged["b"], 1, staged["a"], *flags, "--metrics-file", parts)
    for name in "ab":
        assert f"--data-path: {pairs[name]} is now at {staged[name]}; training goes on" in said
    assert "the blend changes" not in said
    assert rows(parts) == rows(whole)


def test_a_corpus_that_grew_is_told(pairs, tmp_path):
    blend = ("--data-path", pairs["a"], pairs["b"], "--split", "1")
    flags = (*blend, "--save", tmp_path / "run")
    run(*flags, "--train-iters", 1)
    assert "WARNING" not in run(*flags, "--train-iters", 2, "--load", tmp_path / "run")
    write_corpus(tmp_path / "a", np.ones((130, 8), int))
    said = run(*flags, "--train-iters", 3, "--load", tmp_path / "run")
    assert f"WARNING: {pairs['a']} has 130 documents of 1,040 tokens, and had 128 " in said
    assert "the blend changes at sample 16\n" in said, "and not that nothing is repeated"
    assert "WARNING" not in run(*flags, "--train-iters", 4, "--load", tmp_path / "run")


def test_another_split_is_told_and_what_it_holds_out(pairs, tmp_path):
    """Documents that were trained on came into validation without a word."""
    flags = ("--data-path", 1, pairs["a"], 3, pairs["b"], "--eval-iters", 1, "--save", tmp_path)
    run(*flags, "--split", "3,1,0", "--train-iters", 1)
    again = (*flags, "--load", tmp_path)
    said = run(*again, "--split", "1,1,0", "--train-iters", 2)
    assert f"{pairs['a']} is trained on with its documents 0 to 63, and was with 0 to 95: " in said
    leak = f"{pairs['a']}: documents 64 to 95 were trained on earlier in this run, and are part of "
    assert leak + "validation now\n" in said and f"{pairs['b']}: documents 128 to 191" in said
    # that stays true
    said = run(*again, "--split", "1,1,0", "--train-iters", 3)
    assert leak in said and "is trained on with" not in said


def test_finetuning_begins_with_a_blend_of_its_own(pairs, tmp_path):
    run("--data-path", pairs["a"], "--split", "1", "--train-iters", 1, "--save", tmp_path / "run")
    load = ("--load", tmp_path / "run", "--finetune", "--save", tmp_path / "tuned")
    run("--data-path", pairs["b"], "--split", "1", "--train-iters", 1, *load)
    history = open_checkpoint(tmp_path / "tuned").meta["data"]["blend"]
    assert [start for start, _ in history] == [0] and list(history[0][1]) == [pairs["b"]]


def test_orders_are_kept_and_used_again(pairs, tmp_path):
    """C048: whoever sees no index in its folder builds it."""
    flags = ("--data-path", pairs["a"], "--split", "8,2,0", "--train-iters", 1, "--eval-iters", 1)
    record = ("--metrics-file", tmp_path / "m.jsonl")
    run(*flags, *record)
    plain = [*rows(tmp_path / "m.jsonl"), *rows(tmp_path / "m.jsonl", "eval")]
    for _ in range(2):
        run(*flags, *record, "--data-cache-path", tmp_path / "cache")
        assert len(list((tmp_path / "cache").glob("*.order"))) == 2
        assert [*rows(tmp_path / "m.jsonl"), *rows(tmp_path / "m.jsonl", "eval")] == plain


# ---- evaluation ----------------------------------------------------------------------------------


def one_evaluation(tmp_path: Path, name: str, *flags: object) -> tuple[dict[str, float], str]:
    path = tmp_path / f"{name}.jsonl"
    said = run("--train-iters", 1, "--eval-iters", 2, *flags, "--metrics-file", path)
    return evaluations(path), said


@pytest.mark.parametrize("full", [(), ("--full-validation",)], ids=["part", "full"])
def test_c103_several_validation_sets(pairs, tmp_path, full):
    """bigcode-project/Megatron-LM#29, NVIDIA/Megatron-LM#1549: named sets, one value each, equal to
    separate runs, and their weighted mean."""
    train = ("--train-data-path", pairs["a"], *full)
    alone = [
        one_evaluation(tmp_path, name, *train, "--valid-data-path", pairs[name])[0][""]
        for name in "bc"
    ]
    assert abs(alone[0] - alone[1]) > 1e-4
    both = ("--valid-data-path", 1, pairs["b"], 3, pairs["c"], "--multiple-validation-sets")
    found, said = one_evaluation(tmp_path, "both", *train, *both)
    assert found == {"b": alone[0], "c": alone[1], "": pytest.approx(sum(alone) / 4 + alone[1] / 2)}
    for name, loss in (("b", alone[0]), ("c", alone[1])):
        assert f" validation ({name}) loss at iteration 1 | lm loss value: {loss:.6E} | " in said
    assert f" validation loss at iteration 1 | lm loss value: {found['']:.6E} | " in said


def test_a_set_without_a_share_is_not_opened(pairs, tmp_path):
    """C050: neither for training nor for validation, and its files need not be there."""
    flags = ("--train-data-path", 1, pairs["a"], 0, tmp_path / "nowhere")
    flags += ("--valid-data-path", 1, pairs["b"], 0, tmp_path / "nowhere", 1, pairs["c"])
    found, said = one_evaluation(tmp_path, "m", *flags, "--multiple-validation-sets")
    assert list(found) == ["b", "c", ""] and "nowhere" not in said


def test_the_mean_without_weights_goes_by_size(pairs, tmp_path):
    train = ("--train-data-path", pairs["c"], "--multiple-validation-sets")
    found, _ = one_evaluation(tmp_path, "m", *train, "--valid-data-path", pairs["a"], pairs["b"])
    assert found[""] == pytest.approx((found["a"] + 2 * found["b"]) / 3)


def test_several_sets_on_two_ranks(ranks, pairs, tmp_path):
    flags = ("--no-mock-data", "--train-data-path", pairs["a"], "--multiple-validation-sets")
    flags += ("--valid-data-path", pairs["b"], pairs["c"], "--train-iters", 1, "--eval-iters", 2)
    found = []
    for name, size, layout in (
        ("one", 1, ()),
        ("dp", 2, ()),
        ("pp", 2, ("--pipeline-model-parallel-size", 2)),
    ):
        path = tmp_path / f"{name}.jsonl"
        every = (*flags, *layout, "--fp64", "--metrics-file", path)
        if size == 1:
            run_recipe(Group.single("world"), *every)
        else:
            ranks.run(run_recipe, *every, size=size)
        found.append(evaluations(path))
    assert list(found[0]) == ["b", "c", ""]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-12)


def test_full_validation_reads_every_token_once(pairs, tmp_path):
    """Two sets of 64 x 16 and 128 x 16 tokens: each is a label once, but for the first of a set.
    The mean over all of them is the sets' own means, weighted by their labels."""
    train = ("--train-data-path", pairs["c"], "--full-validation", "--eval-iters", 0)
    losses = [
        one_evaluation(tmp_path, name, *train, "--valid-data-path", pairs[name])[0][""]
        for name in "ab"
    ]
    both = ("--valid-data-path", pairs["a"], pairs["b"])
    found, _ = one_evaluation(tmp_path, "both", *train, *both)
    labels = [64 * 16 - 1, 128 * 16 - 1]
    mean = sum(n * loss for n, loss in zip(labels, losses)) / sum(labels)
    assert found[""] == pytest.approx(mean, rel=1e-6)


def test_no_validation_samples_is_said(pairs):
    flags = ("--data-path", pairs["a"], "--split", "99,0,1", "--train-iters", 1)
    said = run(*flags, "--eval-iters", 1)
    assert "no valid samples: " in said and "validation loss" not in said
    said = run(*flags)
    assert "no valid samples" not in said  # nobody asked for one


def test_the_document_mask_and_the_flags_of_documents(pairs, tmp_path):
    """A document is half a sample: the second half of it does not see the first."""
    losses = []
    for n, flag in enumerate(((), ("--document-attention-mask",))):
        path = tmp_path / f"{n}.jsonl"
        flags = ("--data-path", pairs["a"], "--split", "1", "--train-iters", 1, *flag)
        run(*flags, "--metrics-file", path)
        losses.append(rows(path)[0]["lm_loss"])
    assert math.isfinite(losses[1]) and losses[0] != losses[1]


# ---- what is refused, and tables that must agree -------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--data-path A --train-data-path B", "give one of --data-path"),
        ("--data-path -1 A 2 B", "weight -1 is negative"),
        ("--data-path 0 A 0 B", "all weights are 0"),
        ("--data-path 0.5 A B", "0.5 stands where a prefix is expected"),
        ("--valid-data-path A", "there is no data for train"),
        ("--train-data-path A --eval-interval 1 --eval-iters 1", "there is no data for valid"),
        ("--data-args-path nowhere", "--data-args-path nowhere: "),
        ("--per-split-data-args-path nowhere", "--per-split-data-args-path nowhere: "),
        ("--data-path 1 A 1 nowhere", "nowhere.idx does not exist"),
    ],
)
def test_refusals(pairs, flags, words):
    from core.config import parse
    from tests.recipe import TINY

    named = flags.replace(" A", f" {pairs['a']}").replace(" B", f" {pairs['b']}")
    line = [*TINY, "--train-iters", "1", "--no-mock-data", *named.split()]
    config = parse(RunConfig, line)
    (said,) = problems(config)
    assert words in said


def test_tokenizers_of_the_flags_are_those_of_data():
    given = {"vocab_size"}  # the model's flag
    assert set(TokenizerType.__args__) == set(TOKENIZER_FLAGS) == set(TOKENIZERS)
    for kind, (_, *lists) in TOKENIZERS.items():
        flags = tuple(tuple(name for name in names if name not in given) for names in lists)
        assert TOKENIZER_FLAGS[kind] == flags, kind


def test_flags_of_one_recipe_are_known_to_the_other():
    gpt, bert = set(leaves(RunConfig)), set(leaves(pretrain_bert.RunConfig))
    assert gpt - bert == set(GPT_ONLY) | set(GPT_ONLY_ACCEPTED)
