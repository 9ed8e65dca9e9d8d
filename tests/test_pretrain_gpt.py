"""pretrain_gpt.py as users start it: by itself, with --nproc, under torchrun, and with mistakes.

Starting processes is slow, so one run serves several questions; what needs no process of its own is
in tests/test_flags.py (single flags), tests/test_resume.py and tests/core/test_train.py.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pretrain_gpt
from core import optional
from core.comm import Group
from data.bpe import byte_characters
from tests.recipe import TINY, rows, run_recipe, write_corpus

ROOT = Path(__file__).parents[1]
PROGRAM = [sys.executable, "-W", "error", "pretrain_gpt.py"]
LIMIT = 180  # seconds; on two idle cores no run here takes 20, and no refusal 3
STRANGERS = ("apex", "amp_C", "transformer_engine", "flash_attn")


def environ(**more: str) -> dict[str, str]:
    """Ours, without a launcher's variables and without a GPU."""
    ours = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "TORCHELASTIC_", "PHALANX_"))
        and key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    return {**ours, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **more}


def start(*flags: object, program: list[str] = PROGRAM, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*program, *map(str, flags)],
        cwd=ROOT,
        env=environ(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    with process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()  # a parent of ranks takes them along
            out, err = process.communicate()
            raise AssertionError(f"no end after {LIMIT} s\n{out}\n{err}") from None
    return process.returncode, out, err


@pytest.fixture(scope="module")
def mock_run(tmp_path_factory) -> tuple[str, list[dict], list[dict]]:
    """What `python pretrain_gpt.py --mock-data` prints, and its rows, cut to eight iterations."""
    metrics = tmp_path_factory.mktemp("mock") / "metrics.jsonl"
    code, out, err = finish(start("--mock-data", "--train-iters", 8, "--metrics-file", metrics))
    assert (code, err) == (0, "")
    return out, rows(metrics), rows(metrics, "eval")


def test_mock_data_alone_is_a_run_that_learns(mock_run):
    out, train, evaluations = mock_run
    losses = [row["lm_loss"] for row in train]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.3
    assert "1 rank (one process): tp 1 x dp 1 x pp 1 on cpu, backend none\n" in out
    assert len(re.findall(r"^ \[.*\] iteration +\d+/ +8 \| consumed", out, re.M)) == 8
    assert "validation loss at iteration 8" in out and "test loss at iteration 8" in out
    assert [row["split"] for row in evaluations] == ["validation", "test"]
    assert all(row["lm_loss"] < losses[0] - 0.3 for row in evaluations)


def test_four_ranks_beside_packages_of_the_wrong_kind(mock_run, tmp_path):
    """NVIDIA/apex#1804: a package of the same name from the public index killed the start. Here
    four such packages fail on import, warnings are errors, no GPU is visible, and the losses are
    those of one process."""
    for name in STRANGERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('wrong package')\n")
    metrics = tmp_path / "metrics.jsonl"
    layout = ("--nproc", 4, "--tensor-model-parallel-size", 2, "--sequence-parallel")
    log = ("--log-communication", "--eval-iters", 0, "--metrics-file", metrics)
    code, out, err = finish(
        start(
            *layout,
            *("--mock-data", "--train-iters", 2, "--lr-decay-iters", 8),
            *log,
            PYTHONPATH=str(tmp_path),
            PYTHONWARNINGS="error",
        )
    )
    assert (code, err) == (0, "")
    assert "4 ranks (" in out and "tp 2 x dp 2 x pp 1 on cpu, backend gloo" in out
    table = out.partition("communication of rank 0")[2]
    assert re.search(r"^tp +all_gather ", table, re.M)
    assert re.search(r"^dp_cp +all_reduce ", table, re.M)
    for mine, one in zip(rows(metrics), mock_run[1], strict=False):
        for key in ("lm_loss", "grad_norm"):
            assert mine[key] == pytest.approx(one[key], rel=1e-5), mine["iteration"]
        assert mine["learning_rate"] == one["learning_rate"]


def test_torchrun(mock_run, tmp_path):
    """Under torchrun, saving, and leaving by --exit-interval with success."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    flags = ("--tensor-model-parallel-size", 2, "--mock-data", "--train-iters", 8)
    metrics = tmp_path / "metrics.jsonl"
    ends = ("--exit-interval", 2, "--save", tmp_path / "run", "--metrics-file", metrics)
    port = str(20000 + os.getpid() % 10000)
    program = [*torchrun, "--master-port", port, "pretrain_gpt.py"]
    code, out, err = finish(start(*flags, *ends, program=program))
    assert code == 0, err
    assert "2 ranks (" in out and "stopped after iteration 2: --exit-interval 2" in out
    assert (tmp_path / "run" / "latest").read_text().strip() == "iter_0000002"
    losses = [row["lm_loss"] for row in rows(metrics)]
    assert losses == pytest.approx([row["lm_loss"] for row in mock_run[1][:2]], rel=1e-6)


# ---- ranks that do not fit together, numbers that are not finite ---------------------------------


def test_two_ranks_with_different_arguments(tmp_path):
    """Found where they meet, within seconds, in one message from rank 0; nobody trains."""
    port = str(20000 + os.getpid() % 10000)  # below those that the system gives away
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    flags = (*TINY, "--train-iters", 2, "--save", tmp_path / "run")
    ranks = [
        start(*flags, "--seed", 1 + rank, RANK=str(rank), LOCAL_RANK=str(rank), **place)
        for rank in range(2)
    ]
    results = [finish(rank) for rank in ranks]
    assert [code for code, _, _ in results] == [2, 2]
    assert re.search(r"rank 1 .* was started with --seed 2, rank 0 with 1\n", results[0][2])
    assert results[1][2] == ""
    assert not (tmp_path / "run").exists()


PLANT = """
import math, os, sys
from core import train

step = train.Trainer.train_step

def planted(self, state, feed):
    if state.iteration == 2 and self.grid.rank == 1:
        dict(self.stages[0].named_parameters())["final_norm.weight"].data[3] = math.nan
    return step(self, state, feed)

train.Trainer.train_step = planted
import pretrain_gpt
sys.exit(pretrain_gpt.main())
"""


def test_a_nan_ends_the_run_and_no_checkpoint_follows(tmp_path):
    """epfLLM/Megatron-LLM#33, from the outside: the exit code, the last words, the folder."""
    program = tmp_path / "plant.py"
    program.write_text(PLANT)
    save = ("--save", tmp_path / "run", "--save-interval", 1)
    layout = ("--nproc", 2, "--tensor-model-parallel-size", 2)
    code, _, err = finish(
        start(
            *(*TINY, "--train-iters", 6, *layout, *save),
            program=[sys.executable, str(program)],
            PYTHONPATH=str(ROOT),
        )
    )
    assert code == 1
    assert "the loss of iteration 3 is nan; nothing was updated or saved" in err
    assert "rank 1: 1 parameter is not finite: final_norm.weight" in err
    assert "microbatch 0, samples 16, 17" in err
    saved = sorted(path.name for path in (tmp_path / "run").glob("iter_*"))
    assert saved == ["iter_0000001", "iter_0000002"]
    assert (tmp_path / "run" / "latest").read_text().strip() == "iter_0000002"


# ---- bad input -----------------------------------------------------------------------------------


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    """bigscience-workshop/Megatron-DeepSpeed#409, mosaicml/examples#41: sizes that do not divide
    were cut silently, or asserted after a long start. One message, exit code 2, no torch, nothing
    written."""
    (tmp_path / "file").write_text("")
    bad = f"""--nproc 5 --tensor-model-parallel-size 3 --num-attention-heads 4 --hidden-size 65
        --num-layers 2 --seq-length 64 --max-position-embeddings 32 --micro-batch-size 4
        --global-batch-size 10 --lr 1e-3 --train-iters 5 --vocab-size 100
        --group-query-attention --num-query-groups 2
        --data-path {tmp_path / "nowhere"} --save {tmp_path / "file" / "run"}"""
    code, out, err = finish(
        start(*bad.split(), program=[sys.executable, "-X", "importtime", "pretrain_gpt.py"])
    )
    lines = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert (code, out) == (2, "")
    assert re.fullmatch(r"pretrain_gpt.py: \d+ problems with the command line", lines[0])
    assert int(lines[0].split()[1]) == len(lines) - 1
    for words in (
        "--hidden-size 65 does not divide by --num-attention-heads 4",
        "--num-attention-heads 4 does not divide by --tensor-model-parallel-size 3",
        "5 ranks do not divide by --tensor-model-parallel-size 3",
        "--seq-length 64 is longer than --max-position-embeddings 32",
        "--global-batch-size 10 does not divide by --micro-batch-size 4",
        "nowhere.idx does not exist",
        f"--save {tmp_path / 'file' / 'run'}: {tmp_path / 'file'} is not a folder",
    ):
        assert sum(words in line for line in lines) == 1, words
    assert not re.search(r"\| +torch$", err, re.M)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """Runs the recipe's checks on flags; returns the sentences of the one message."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # main() sets it; undone at the end
    monkeypatch.setattr(os, "environ", environ())

    def sentences(*flags: object) -> list[str]:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as left:
            pretrain_gpt.main([*TINY, "--train-iters", "2", *map(str, flags)])
        assert left.value.code == 2
        out, err = capsys.readouterr()
        head, *found = err.splitlines()
        assert out == "" and "with the command line" in head
        assert head.split(":")[1].split()[0] == str(len(found))
        assert sorted(tmp_path.rglob("*")) == before
        return [line.strip() for line in found]

    return sentences


@pytest.fixture
def corpus(tmp_path) -> Path:
    """20 documents of 31 tokens below 50."""
    prefix = tmp_path / "corpus"
    write_corpus(prefix, np.random.default_rng(0).integers(0, 50, (20, 31)))
    return prefix


def on(prefix: Path) -> tuple[object, ...]:
    return ("--no-mock-data", "--data-path", prefix)


@pytest.mark.parametrize(
    ("ending", "spoil", "sentence"),
    [
        (".idx", lambda path: path.unlink(), "{path} does not exist"),
        (".bin", lambda path: path.unlink(), "{path} does not exist"),
        (".idx", lambda path: os.truncate(path, 100), "{path} is truncated: 100 bytes where"),
        (".bin", lambda path: os.truncate(path, 600), "{path} has 600 bytes where"),
        (".idx", lambda path: path.write_bytes(b"PK" * 99), "{path} is not a Megatron index"),
        (".idx", lambda path: path.write_bytes(b""), "{path} is"),
    ],
    ids=["no-idx", "no-bin", "cut-idx", "cut-bin", "foreign-idx", "empty-idx"],
)
def test_files_that_are_no_pair(refused, corpus, ending, spoil, sentence):
    path = corpus.with_suffix(ending)
    spoil(path)
    (said,) = refused(*on(corpus))
    assert said.startswith(sentence.format(path=path))


def test_a_corpus_that_is_too_small_or_for_another_vocabulary(refused, corpus):
    small, foreign = refused(*on(corpus), "--seq-length", 600, "--vocab-size", 40)[::-1]
    assert "gives train 19 of 20 documents with 589 tokens" in small and "takes 601" in small
    assert re.search(r"holds token id 4\d, outside the vocabulary of 40 tokens", foreign)


def test_a_vocabulary_smaller_than_the_tokenizers(refused, tmp_path):
    symbols = [*byte_characters().values(), "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({s: n for n, s in enumerate(symbols)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    files = ("--vocab-file", tmp_path / "vocab.json", "--merge-file", tmp_path / "merges.txt")
    (said,) = refused("--tokenizer-type", "GPT2BPETokenizer", *files, "--vocab-size", 100)
    assert said.startswith("--vocab-size 100 is smaller than the tokenizer's 257 tokens; use 257")


def test_null_tokenizer_counts_its_end_of_document(corpus):
    """As in Megatron, --vocab-size 50 makes 51 tokens. (Any size was refused: the tokenizer of N
    tokens was said to need N + 1.)"""
    null = ("--tokenizer-type", "NullTokenizer", "--eod-mask-loss", "--split", "1")
    code, said = run_alone(*on(corpus), *null, "--train-iters", 1)
    assert code == 0 and "vocabulary 51 padded to 52" in said


@pytest.mark.parametrize(
    "flag", ["num-attention-heads", "hidden-size", "num-layers", "seq-length", "vocab-size"]
)
def test_a_shape_of_zero_is_a_sentence(refused, flag):
    """NVIDIA/Megatron-LM#5755 failed deep inside with a shape error; here no heads once divided
    by zero in a check of the disk."""
    assert refused(f"--{flag}", 0) == [f"--{flag} 0 must be 1 or more"]


def test_documents_without_tokens(refused, corpus, tmp_path):
    """Among others they are skipped; alone they are no corpus."""
    write_corpus(tmp_path / "none", [[], [], []])
    (said,) = refused(*on(tmp_path / "none"), "--split", "1")
    assert "3 of 3 documents with 0 tokens" in said
    gaps = [[], *np.random.default_rng(0).integers(0, 50, (9, 31)).tolist(), [], []]
    write_corpus(tmp_path / "gaps", gaps)
    code, said = run_alone(*on(tmp_path / "gaps"), "--split", "1", "--train-iters", 8)
    assert code == 0 and "iteration        8/       8" in said
    assert " loss at iteration" not in said  # --eval-iters 0: no evaluation, not one of loss 0


def run_alone(*flags: object) -> tuple[int, str]:
    from core.comm import Group

    return run_recipe(Group.single("world"), *flags)


def test_a_folder_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("")
    (said,) = refused("--save", tmp_path / "file")
    assert said == f"--save {tmp_path / 'file'}: {tmp_path / 'file'} is not a folder"
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if not os.access(closed, os.W_OK):  # root may write anywhere
        (said,) = refused("--save", closed / "run")
        assert f"cannot write in {closed}" in said


def test_a_checkpoint_of_another_shape(refused, tmp_path):
    """NVIDIA/Megatron-LM#838: one line per difference, with the flag and both values."""
    run_alone("--train-iters", 1, "--save", tmp_path / "run")
    other = ("--hidden-size", 64, "--num-layers", 3, "--swiglu")
    (said,) = refused("--load", tmp_path / "run", *other)
    assert said.startswith(f"--load {tmp_path / 'run'} holds another model: ")
    for words in (
        "--num-layers: 2 in the checkpoint, 3 given",
        "--hidden-size: 32 in the checkpoint, 64 given",
        "--swiglu: False in the checkpoint, True given",
    ):
        assert words in said


def test_only_the_first_rank_speaks(capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for rank, lines in (("0", 2), ("1", 0)):
        monkeypatch.setattr(os, "environ", environ(RANK=rank, LOCAL_RANK=rank, **place))
        with pytest.raises(SystemExit):
            pretrain_gpt.main([*TINY, "--train-iters", "2", "--hidden-size", "33"])
        assert len(capsys.readouterr().err.splitlines()) == lines


def test_tensorboard_gets_the_steps_of_its_interval(tmp_path, monkeypatch):
    steps = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            pass

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            steps.append(step)

        def flush(self) -> None:
            pass

        close = flush

    monkeypatch.setattr(optional, "summary_writer", lambda: Writer)
    flags = ("--train-iters", 5, "--tensorboard-dir", tmp_path, "--tensorboard-log-interval", 2)
    run_recipe(Group.single("world"), *flags)
    assert set(steps) == {2, 4}


def test_a_time_limit_is_exit_code_85(tmp_path):
    """Stopped, saved and resumable; SLURM's requeue and wrappers read the code."""
    flags = ("--train-iters", 9, "--save", tmp_path / "run")
    code, said = run_alone(*flags, "--exit-duration-in-mins", 1e-9)
    assert code == 85
    assert "stopped after iteration 1: --exit-duration-in-mins 1e-09 is over" in said
    code, said = run_alone(*flags, "--load", tmp_path / "run", "--exit-interval", 3)
    assert code == 0 and "stopped after iteration 3" in said
