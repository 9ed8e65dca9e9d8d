"""scripts/generate.py: what it reads from a checkpoint, how it chooses, what it says."""

import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from core.checkpoint.errors import BrokenCheckpoint
from core.checkpoint.reader import open_checkpoint
from core.comm import Group
from core.grid import RankGrid
from core.process_grid import ProcessGrid
from data.bpe import byte_characters
from models.gpt import build_stages
from scripts import convert_hf
from scripts import generate as script
from scripts.generate import Sampling, choose, generate, main, next_logits, read_model
from scripts.tokenizer_flags import SETTINGS
from tests.recipe import run_recipe, write_corpus
from tests.scripts.test_convert_hf import BERT, write_theirs
from tests.scripts.test_convert_hf import GPT2 as TINY_HF
from tests.training import GPT2

ROOT = Path(__file__).parents[2]

LLAMA = """--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --label-smoothing 0.1""".split()
COUNTING = [[(start + i) % 40 for i in range(60)] for start in range(40)]  # … 38 39 0 1 …


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    """The --save folder of a model that has learnt to count modulo 40."""
    folder = tmp_path_factory.mktemp("counter")
    write_corpus(folder / "corpus", COUNTING)
    code, _ = run_recipe(
        Group.single("world"),
        *("--no-mock-data", "--data-path", folder / "corpus", "--split", "1"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", 49),
        *("--train-iters", 60, "--lr", 1e-2, *LLAMA),
        *("--save", folder / "run", "--save-interval", 30),
    )
    assert code == 0
    return folder / "run"


def test_greedy_text_counts_on(counter, capsys):
    """Longer than the window of 16 tokens, and each prompt as if it were alone."""
    flags = ["--load", str(counter), "--temperature", "0", "--max-new-tokens", "24"]
    assert main([*flags, "--prompt", "5 6 7"]) == 0
    assert capsys.readouterr().out == " ".join(str(n) for n in range(5, 32)) + "\n"
    assert main([*flags, "--prompt", "5 6 7", "--prompt", "39", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out == (
        "---- prompt 1\n5 6 7 8 9 10\n---- prompt 2\n39 0 1 2\n"
    )


@pytest.mark.parametrize("step", [None, 60])
def test_a_window_is_what_the_model_was_trained_on(counter, step):
    """Padding behind short windows changes nothing: logits equal those of each window alone."""
    model = read_model(open_checkpoint(counter, step))
    assert (model.window, model.vocab_size) == (16, 50)
    windows = [[1, 2, 3, 4, 5], [9], list(range(16))]
    together = next_logits(model, windows)
    assert together.shape == (3, 50)
    for row, window in zip(together, windows, strict=True):
        torch.testing.assert_close(row, next_logits(model, [window])[0], rtol=1e-5, atol=1e-5)
    assert together.argmax(dim=1).tolist() == [6, 10, 16]


def test_the_seed_decides_and_company_does_not(counter):
    model = read_model(open_checkpoint(counter))
    warm = Sampling(temperature=3.0, seed=7)
    alone = generate(model, [[5]], 12, warm)
    assert alone == generate(model, [[5]], 12, warm)
    assert alone[0] == generate(model, [[5], [6, 7]], 12, warm)[0]
    several = generate(model, [[5]], 12, warm, num_samples=3)
    assert several[0] == alone[0] and len({tuple(text) for text in several}) == 3
    assert alone != generate(model, [[5]], 12, Sampling(temperature=3.0, seed=8))


def test_a_text_ends_before_the_end_of_document(counter):
    """With 10 as the end token, counting stops at 9; other texts go on."""
    model = read_model(open_checkpoint(counter))
    texts = generate(model, [[7], [20]], 6, Sampling(temperature=0), eod=10)
    assert texts == [[7, 8, 9], [20, 21, 22, 23, 24, 25, 26]]


def random_model(**changes):
    """Untrained, with weights large enough that texts wander."""
    config = replace(GPT2, vocab_size=50, init_method_std=0.5, **changes)
    grid = ProcessGrid.single()
    (stage,) = build_stages(
        config, grid, micro_batch_size=1, sequence_parallel=False, seed=3, dtype=torch.float64
    )
    stage.eval().requires_grad_(False)
    return script.Model(stage, config.max_positions, 50, grid.tp)


SHAPES = {
    "gpt2": {},
    "llama": {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
              "group_query_attention": True, "num_query_groups": 2, "qk_layernorm": True},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "how", [Sampling(temperature=0), Sampling(), Sampling(1.3, top_k=9), Sampling(0.8, top_p=0.7)]
)
def test_what_is_kept_changes_no_text(shape, how):
    """Prompts of unlike lengths, texts that end early, and texts that outgrow the window."""
    model = random_model(**SHAPES[shape])
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9], [30, 31]]
    kept = generate(model, prompts, 22, how, num_samples=2, eod=11)
    assert kept == generate(model, prompts, 22, how, num_samples=2, eod=11, cached=False)
    assert max(map(len, kept)) > model.window


def test_only_new_tokens_are_read(monkeypatch):
    model, read, hidden_of = random_model(), [], script.hidden_of

    def watched(stage, batch, cache):
        read.append(tuple(batch["tokens"].shape))
        return hidden_of(stage, batch, cache)

    monkeypatch.setattr(script, "hidden_of", watched)
    generate(model, [[1, 2, 3, 4], [5]], 5, Sampling(temperature=0))
    assert read == [(2, 4), (2, 1), (2, 1), (2, 1), (2, 1)]


def texts_at(world, folder, how):
    grid = ProcessGrid.build(RankGrid(tp=world.size), world)
    model = read_model(open_checkpoint(folder), grid)
    return generate(model, [[5, 6], [30]], 20, how, num_samples=2)


@pytest.mark.parametrize("how", [Sampling(temperature=0), Sampling(2.0, top_k=20, top_p=0.9)])
def test_the_text_is_the_same_at_any_tp(ranks, counter, how):
    alone = texts_at(Group.single("world"), counter, how)
    assert ranks.run(texts_at, counter, how, size=2) == [alone, alone]


def test_ranks_from_the_command_line(counter):
    command = [sys.executable, "scripts/generate.py", "--load", counter, "--nproc", "2"]
    command += ["--temperature", "0", "--prompt", "5 6 7", "--max-new-tokens", "4"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "5 6 7 8 9 10 11\n", "")


def refused_by(world, folder):
    """(exit code, what this rank says)"""
    args = script.parse_args(["--load", str(folder), "--nproc", str(world.size)])
    with contextlib.redirect_stderr(io.StringIO()) as said:
        grid = ProcessGrid.build(RankGrid(tp=world.size), world)
        return script.answer(args, grid), said.getvalue()


def test_heads_that_ranks_cannot_share_are_said_once(ranks, counter):
    (code, said), *others = ranks.run(refused_by, counter, size=3)
    assert code == 2 and "--num-attention-heads 4 does not divide by --nproc 3" in said
    assert said.count("\n") == 1 and others == [(2, "")] * 2


def answered(world, folder, broken: dict[int, type[Exception]]):
    """(exit code, iterations that were read) where rank 1 cannot read some."""
    grid, seen = ProcessGrid.build(RankGrid(tp=world.size), world), []
    args = script.parse_args(["--load", str(folder), "--prompt", "5 6", "--max-new-tokens", "2"])

    def read(checkpoint, grid):
        seen.append(checkpoint.iteration)
        if world.rank == 1 and checkpoint.iteration in broken:
            raise broken[checkpoint.iteration]("not here")
        return read_model(checkpoint, grid)

    with mock.patch.object(script, "read_model", read):
        return script.answer(args, grid), seen


def test_a_checkpoint_that_one_rank_cannot_read(ranks, counter):
    """All turn to the one before, or leave: none waits for another in a collective."""
    earlier = ranks.run(answered, counter, {60: BrokenCheckpoint}, size=2)
    assert earlier == [(0, [60, 30]), (0, [60, 30])]
    none = ranks.run(answered, counter, {60: BrokenCheckpoint, 30: BrokenCheckpoint}, size=2)
    assert none == [(2, [60, 30]), (2, [60, 30])]
    assert ranks.run(answered, counter, {60: OSError}, size=2) == [(2, [60]), (2, [60])]


# ---- choosing ------------------------------------------------------------------------------------

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0]).log()  # p = 0, 1/2, 1/6, 1/3


def shares(how: Sampling) -> list[float]:
    """How much of [0, 1) leads to each token."""
    n = 3000
    picks = [choose(LOGITS, how, (i + 0.5) / n) for i in range(n)]
    return [picks.count(token) / n for token in range(4)]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Sampling(), [0, 1 / 2, 1 / 6, 1 / 3]),
        (Sampling(temperature=0), [0, 1, 0, 0]),
        (Sampling(temperature=0.5), [0, 9 / 14, 1 / 14, 4 / 14]),
        (Sampling(top_k=2), [0, 3 / 5, 0, 2 / 5]),
        (Sampling(top_k=9), [0, 1 / 2, 1 / 6, 1 / 3]),
        (Sampling(top_p=0.5), [0, 1, 0, 0]),
        (Sampling(top_p=0.51), [0, 3 / 5, 0, 2 / 5]),
        (Sampling(top_p=0.84), [0, 1 / 2, 1 / 6, 1 / 3]),
        (Sampling(top_k=2, top_p=0.55), [0, 1, 0, 0]),  # 3/5 of what top_k leaves is enough
    ],
    ids=str,
)
def test_choose(how, expected):
    assert shares(how) == pytest.approx(expected, abs=2e-3)


def test_choose_at_the_ends():
    assert choose(LOGITS, Sampling(), 0.0) == 1
    assert choose(LOGITS, Sampling(), 1 - 2**-53) == 2
    assert choose(torch.zeros(3), Sampling(temperature=0), 0.5) == 0  # of equals, the first


# ---- measuring -----------------------------------------------------------------------------------


def test_perplexity_of_a_text(counter, tmp_path, capsys):
    """Against the plain formula, over windows of 16 labels, the last one shorter; the smoothing of
    the training loss takes no part."""
    text = " ".join(str(n % 40) for n in range(3, 43))
    (tmp_path / "text").write_text(text)
    assert main(["--load", str(counter), "--perplexity", str(tmp_path / "text")]) == 0
    said = capsys.readouterr().out
    model, tokens = read_model(open_checkpoint(counter)), [n % 40 for n in range(3, 43)]
    loss = 0.0
    for i in range(1, len(tokens)):
        start = (i - 1) // 16 * 16
        logits = next_logits(model, [tokens[start:i]])[0].double()
        loss -= float(logits.log_softmax(0)[tokens[i]])
    mean, bits = loss / 39, loss / math.log(2) / len(text)
    expected = f"loss {mean:.4f}, perplexity {math.exp(mean):.2f}, {bits:.3f} bits per byte"
    assert said == f"40 tokens: {expected}\n"


# ---- tokenizers and mistakes ---------------------------------------------------------------------


def write_byte_tokenizer(folder):
    """GPT-2's files for a vocabulary of single bytes and the end of a document, 256."""
    symbols = [*byte_characters().values(), "<|endoftext|>"]
    vocabulary = {symbol: n for n, symbol in enumerate(symbols)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")


@pytest.fixture(scope="module")
def speller(tmp_path_factory):
    """A run on mock data at tp 1 whose settings name GPT-2's tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("speller")
    write_byte_tokenizer(folder)
    flags = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", folder / "vocab.json")
    code, _ = run_recipe(
        Group.single("world"),
        *(*flags, "--merge-file", folder / "merges.txt", "--vocab-size", 300),
        *("--train-iters", 2, "--save", folder / "run"),
    )
    assert code == 0
    return folder


def test_the_tokenizer_is_the_trained_one(speller, capsys):
    flags = ["--load", str(speller / "run"), "--max-new-tokens", "5", "--top-k", "1"]
    assert main([*flags, "--prompt", "né "]) == 0
    first = capsys.readouterr().out
    assert first.startswith("né ")
    assert main(flags) == 0  # no prompt: as a document begins
    named = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(speller / "vocab.json")]
    named += ["--merge-file", str(speller / "merges.txt"), "--prompt", "né "]
    capsys.readouterr()
    assert main([*flags, *named]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--load", "nowhere", "--prompt", "1"], "nowhere"),
        (["--prompt", "1 60"], "token id 60 is not in 0 .. 49"),
        (["--prompt", "one"], "NullTokenizer reads numbers between spaces"),
        (["--tokenizer-model", "x"], "the tokenizer flags need --tokenizer-type"),
        (["--tokenizer-type", "HuggingFaceTokenizer"], "needs --tokenizer-model"),
        (["--ckpt-step", "7"], "7"),
        (["--temperature", "-1", "--top-p", "0"], "--temperature -1.0 must be 0 or more; --top-p"),
        (["--perplexity", "nowhere"], "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_said_in_a_line(counter, capsys, flags, words):
    assert main(["--load", str(counter), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("generate.py: ") and err.count("\n") == 1
    assert words in err


def test_a_model_without_tokenizer_speaks_in_numbers(tmp_path, capsys):
    run_recipe(Group.single("world"), "--train-iters", 1, "--save", tmp_path / "run")
    flags = ["--load", str(tmp_path / "run"), "--max-new-tokens", "4"]
    assert main([*flags, "--prompt", "1 2"]) == 0
    assert len(capsys.readouterr().out.split()) == 6
    assert main(flags) == 2
    assert "needs a --prompt of token numbers" in capsys.readouterr().err


def test_help_names_the_flags(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in said for name in ("tokenizer_type", *SETTINGS))


# ---- checkpoints that were imported --------------------------------------------------------------


@pytest.fixture
def imported(tmp_path, capsys):
    """A --save folder of an imported GPT-2 of 257 tokens: single bytes, and the end."""
    write_theirs(tmp_path / "hf", TINY_HF | {"vocab_size": 257})
    write_byte_tokenizer(tmp_path / "hf")
    assert convert_hf.main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    return tmp_path / "ours"


def test_an_import_speaks_with_its_own_tokenizer(imported, tmp_path, capsys):
    flags = ["--load", str(imported), "--max-new-tokens", "5", "--temperature", "0"]
    assert main([*flags, "--prompt", "né "]) == 0
    said = capsys.readouterr().out
    assert said.startswith("né ") and len(said) > len("né \n")
    assert main(flags) == 0  # no prompt: as a document begins
    capsys.readouterr()
    (tmp_path / "text").write_text("né né", encoding="utf-8")
    assert main(["--load", str(imported), "--perplexity", str(tmp_path / "text")]) == 0
    assert capsys.readouterr().out.startswith("7 tokens: loss ")


def test_an_import_without_tokenizer_speaks_in_numbers(imported, capsys):
    shutil.rmtree(imported / "tokenizer")
    flags = ["--load", str(imported), "--max-new-tokens", "2", "--prompt", "1 2"]
    assert main(flags) == 0
    assert len(capsys.readouterr().out.split()) == 4


def test_an_end_that_the_tokenizer_lacks_is_said(imported, capsys):
    path = imported / "tokenizer" / "vocab.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<|stop|>"))
    assert main(["--load", str(imported), "--prompt", "a"]) == 2
    assert "has no eod token" in capsys.readouterr().err


def test_a_bert_writes_no_text(tmp_path, capsys):
    write_theirs(tmp_path / "hf", BERT)
    assert convert_hf.main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    for flags in (["--prompt", "1 2"], ["--perplexity", str(tmp_path / "none")]):
        assert main(["--load", str(tmp_path / "ours"), *flags]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert "holds a BERT, which fills gaps and writes no text" in err
