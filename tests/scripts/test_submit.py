"""SLURM batch files: what is asked for is what they say, and they are valid bash."""

import importlib
import re
import subprocess

import pytest

from core.config import parse
from scripts import submit

PROGRAM = ["pretrain_gpt.py", "--mock-data", "--save", "runs/a b", "--load=runs/a b"]


def text_of(capsys, *arguments: str, program=PROGRAM) -> str:
    assert submit.main(["--time", "4:00:00", "--dry-run", *arguments, "--", *program]) == 0
    text = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch) -> None:
    monkeypatch.chdir(submit.SCRIPTS.parent)


def test_srun_starts_one_task_for_each_gpu(capsys) -> None:
    text = text_of(capsys, "--nodes", "2", "--gpus-per-node", "8", "--sbatch=--partition=gpu")
    for option in (
        "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=4:00:00", "--requeue",
        "--signal=USR1@300", "--open-mode=append", "--wait-all-nodes=1", "--partition=gpu",
        "--output='runs/a b/slurm/%x-%j.log'",
    ):  # fmt: skip
        assert f"#SBATCH {option}\n" in text
    assert "srun --kill-on-bad-exit=1 --export=ALL --label" in text
    assert "SRUN_CPUS_PER_TASK=" in text
    assert "pretrain_gpt.py --mock-data --save 'runs/a b' '--load=runs/a b'\n" in text
    assert text.index("requeue.py") < text.index("report.py") < text.index("scontrol requeue")


def test_torchrun_is_one_task_a_node_and_gets_term(capsys) -> None:
    text = text_of(capsys, "--launcher", "torchrun", "--nodes", "2", "--ntasks-per-node", "4")
    assert "#SBATCH --ntasks-per-node=1\n" in text
    assert "#SBATCH --signal=TERM@300\n" in text
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300" in text
    assert "--nnodes=2 --nproc-per-node=4" in text


def test_without_a_save_folder_there_is_nothing_to_go_on_from(capsys) -> None:
    text = text_of(capsys, program=["pretrain_gpt.py", "--mock-data"])
    assert "scontrol requeue" not in text and "#SBATCH --no-requeue\n" in text


@pytest.mark.parametrize(
    ("arguments", "program", "follows"),
    [
        ([], PROGRAM, "requeue"),
        (["--chain", "3"], PROGRAM, "chain"),
        ([], ["pretrain_gpt.py", "--mock-data"], None),
    ],
)
def test_the_ranks_are_told_what_follows_a_stop(capsys, arguments, program, follows) -> None:
    text = text_of(capsys, "--signal-seconds", "120", *arguments, program=program)
    told = dict(re.findall(r"^export (PHALANX_[A-Z_]+)=(\w+)$", text, re.M))
    assert told["PHALANX_EARLY_SIGNAL"] == "120"
    assert told.get("PHALANX_AFTERWARDS") == follows
    assert ("scontrol requeue" in text) == (follows == "requeue")


def test_a_short_job_saves_in_its_last_quarter(capsys) -> None:
    assert submit.main(["--time", "2", "--dry-run", "--", *PROGRAM]) == 0
    assert "--signal=USR1@30\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--save", "runs/a"], "--load is absent: .* go on from --save runs/a; give --load"),
        (["--save", "runs/a", "--load", "runs/b"], "--load is runs/b: .* --pretrained-checkpoint"),
        (["--save=runs/a", "--load=./runs/a", "--finetune"], "--finetune: .* go back each time"),
        (["--save=runs/a", "--load", "runs/a", "--ckpt-step=4"], "--ckpt-step: .* leave it out"),
    ],
)
@pytest.mark.parametrize("chain", [[], ["--chain", "3"]])
def test_a_command_line_that_would_begin_again_each_time_is_refused(
    capsys, flags, said, chain
) -> None:
    with pytest.raises(SystemExit) as caught:
        submit.main(["--time", "60", "--dry-run", *chain, "--", "pretrain_gpt.py", *flags])
    assert caught.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_all_problems_come_at_once(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        submit.main(["--time", "soon", "--nodes", "0", "--", "nothing.py", "--nproc=2"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    for problem in ("--time soon", "--nodes 0", "nothing.py is no file", "--nproc starts ranks"):
        assert problem in said


def test_the_file_is_kept_and_submitted(capsys, tmp_path, monkeypatch) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/submitted\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    save = tmp_path / "ck"
    program = ["pretrain_gpt.py", "--save", str(save), "--load", str(save)]
    assert submit.main(["--time", "60", "--chain", "3", "--", *program]) == 0
    path = save / "slurm" / "pretrain_gpt.sbatch"
    assert "#SBATCH --no-requeue" in path.read_text()
    submitted = (tmp_path / "submitted").read_text().splitlines()
    assert submitted == [f"--dependency=singleton {path}"] * 3


@pytest.mark.parametrize("path", sorted((submit.SCRIPTS / "slurm").glob("*.sbatch")), ids=str)
def test_the_ready_made_files_are_bash_and_their_flags_are_understood(path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text().replace("\\\n", " ")
    command = next(line for line in text.splitlines() if "python -u" in line)
    script, *words = command.partition("python -u")[2].split()
    recipe = importlib.import_module(script.removesuffix(".py")).RunConfig
    assert parse(recipe, words).notices == ()


def test_bert_reads_what_preprocessing_for_it_writes() -> None:
    """Its samples need sentences, and a tokenizer with the special tokens."""
    text = (submit.SCRIPTS / "slurm" / "pretrain_bert.sbatch").read_text()
    assert "--split-sentences" in text and "\ndata=corpus_text_sentence\n" in text
    flags = {"--tokenizer-type": "BertWordPieceLowerCase", "--vocab-file": '"$vocabulary"'}
    assert all(f"{flag} {value} " in text for flag, value in flags.items())
