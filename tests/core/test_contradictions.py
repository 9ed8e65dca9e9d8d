"""Every row of the table of contradictions, one command line each, on the real recipe."""

import shlex

import pytest

from core.comm import Group
from core.config import parse
from core.contradictions import NOTES, RULES, contradictions
from pretrain_gpt import RunConfig
from tests.recipe import run_recipe

OPTIM = "--use-distributed-optimizer"
STRATEGY = "--data-parallel-sharding-strategy"
FP16 = "--fp16 --loss-scale 8 "
FULL, DISTRIBUTE = "--recompute-granularity full", "--distribute-saved-activations"
TP2 = "--tensor-model-parallel-size 2"
LINES = [  # one for every rule, in the table's order: the line, how its sentence begins
    ("--bf16 --fp16", "--bf16 and --fp16 are two precisions"),
    ("--bf16 --fp64", "--bf16 and --fp64 are two precisions"),
    ("--fp16 --fp64", "--fp16 and --fp64 are two precisions"),
    ("--loss-scale 8", "--loss-scale 8 does nothing without --fp16"),
    ("--bf16 --initial-loss-scale 8", "--initial-loss-scale 8 does nothing without --fp16"),
    ("--min-loss-scale 2", "--min-loss-scale 2 does nothing without --fp16"),
    ("--loss-scale-window 5", "--loss-scale-window 5 does nothing without --fp16"),
    ("--hysteresis 3", "--hysteresis 3 does nothing without --fp16"),
    (FP16 + "--initial-loss-scale 8", "--loss-scale 8 is constant, --initial-loss-scale 8"),
    (FP16 + "--min-loss-scale 2", "--loss-scale 8 is constant, --min-loss-scale 2"),
    (FP16 + "--loss-scale-window 5", "--loss-scale 8 is constant, --loss-scale-window 5"),
    (FP16 + "--hysteresis 3", "--loss-scale 8 is constant, --hysteresis 3"),
    ("--fp64 --grad-reduce-in-bf16", "--grad-reduce-in-bf16 would shorten"),
    ("--fp16 --grad-reduce-in-bf16", "--grad-reduce-in-bf16 goes with --bf16"),
    (
        "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
        "--grad-reduce-in-bf16 sends gradients in bfloat16, --accumulate-allreduce-grads-in-fp32",
    ),
    ("--fp32-residual-connection", "--fp32-residual-connection does nothing without --bf16"),
    (f"{OPTIM} {STRATEGY} no_shard", f"{OPTIM} and {STRATEGY} no_shard contradict"),
    ("--overlap-param-gather", "--overlap-param-gather does nothing without"),
    (
        f"{STRATEGY} optim_grads_params --ddp-bucket-size 9",
        "--ddp-bucket-size 9 has no say under",
    ),
    ("--recompute-activations --recompute-granularity full", "--recompute-activations is short"),
    ("--recompute-method uniform", "--recompute-method uniform does nothing without"),
    ("--recompute-num-layers 2", "--recompute-num-layers 2 does nothing without"),
    (DISTRIBUTE, f"{DISTRIBUTE} does nothing without --recompute-granularity full"),
    ("--recompute-modules mlp", "--recompute-modules does nothing without"),
    (f"{FULL} --recompute-method block", "--recompute-method block needs --recompute-num-layers"),
    (f"{FULL} --recompute-num-layers 9", "--recompute-num-layers 9 is more than --num-layers 8"),
    (f"{FULL} {DISTRIBUTE} --sequence-parallel {TP2}", f"{DISTRIBUTE} and --sequence-parallel"),
    (f"{FULL} {DISTRIBUTE}", f"{DISTRIBUTE} does nothing with --tensor-model-parallel-size 1"),
    (
        f"{FULL} {DISTRIBUTE} --seq-length 63 --micro-batch-size 1 --hidden-size 65 {TP2}",
        f"{DISTRIBUTE}: an activation of --seq-length 63 x --micro-batch-size 1 x",
    ),
    (
        "--weight-decay 0.3 --weight-decay-incr-style cosine --start-weight-decay 0 "
        "--end-weight-decay 0.1",
        "--weight-decay 0.3 does nothing with --weight-decay-incr-style cosine",
    ),
    ("--lr-wsd-decay-style cosine", "--lr-wsd-decay-style cosine does nothing without"),
    ("--lr-warmup-init 1e-4", "--lr-warmup-init 0.0001 does nothing without a warm-up"),
    (
        "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4 --lr-decay-style constant",
        "--decoupled-min-lr 0.0001 does nothing with --lr-decay-style constant",
    ),
    ("--decoupled-min-lr 1e-5", "--decoupled-min-lr 1e-05 does nothing without --decoupled-lr"),
    ("--fp64 --optimizer apex_adam", "--optimizer apex_adam has no float64"),
    ("--optimizer sgd --adam-beta1 0.8", "--adam-beta1 0.8 does nothing with --optimizer sgd"),
    ("--optimizer sgd --adam-beta2 0.95", "--adam-beta2 0.95 does nothing with --optimizer sgd"),
    ("--optimizer sgd --adam-eps 1e-6", "--adam-eps 1e-06 does nothing with --optimizer sgd"),
    ("--sgd-momentum 0.8", "--sgd-momentum 0.8 does nothing without --optimizer sgd"),
    ("--log-layer-grad-norms", "--log-layer-grad-norms does nothing without --metrics-file"),
]


NOTED = [  # likewise, for every note
    ("--lr-decay-style constant --min-lr 1e-4", "--min-lr 0.0001 has no effect: --lr-decay-style"),
]


def sentences(line: str, capsys: pytest.CaptureFixture) -> list[str]:
    with pytest.raises(SystemExit) as caught:
        parse(RunConfig, shlex.split("--mock-data " + line), checks=[contradictions])
    assert caught.value.code == 2
    return [text[2:] for text in capsys.readouterr().err.splitlines() if text.startswith("  ")]


@pytest.mark.parametrize(("line", "beginning"), LINES, ids=[line for line, _ in LINES])
def test_what_contradicts_is_refused(line, beginning, capsys):
    found = sentences(line, capsys)
    assert any(sentence.startswith(beginning) for sentence in found), found


@pytest.mark.parametrize(("line", "beginning"), NOTED, ids=[line for line, _ in NOTED])
def test_what_does_nothing_in_many_scripts_is_said(line, beginning):
    config = parse(RunConfig, shlex.split("--mock-data " + line), checks=[contradictions])
    (note,) = contradictions(config, NOTES)
    assert note.startswith(beginning)


def test_every_row_is_tried():
    for (line, _), rule in zip(LINES + NOTED, RULES + NOTES, strict=True):
        flags = [word for word in line.split() if word.startswith("--")]
        context = ("--fp16", "--bf16", "--recompute-granularity", "--tensor-model-parallel-size")
        assert all(flag in rule.text for flag in flags if flag not in context), line


def test_all_at_once(capsys):
    found = sentences("--bf16 --fp64 --ddp-bucket-size 0 --overlap-param-gather", capsys)
    assert len(found) == 3
    assert "--ddp-bucket-size 0 must be 1 or more; it counts parameters" in found


def test_a_run_says_its_notes():
    flags = ["--lr-decay-style", "constant", "--min-lr", 1e-4, "--train-iters", 1]
    code, printed = run_recipe(Group.single("world"), *flags)
    assert code == 0
    assert "--min-lr 0.0001 has no effect: " in printed


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--weight-decay 0.3 --lr-decay-style WSD --lr-wsd-decay-style cosine",
        "--lr-warmup-init 1e-4 --lr-warmup-fraction 0.1 --min-lr 1e-4",
        "--weight-decay 0.01 --lr-wsd-decay-style exponential --weight-decay-incr-style linear "
        "--start-weight-decay 0 --end-weight-decay 0.1",
        f"{FULL} --recompute-method uniform --recompute-num-layers 2 {DISTRIBUTE} {TP2}",
        f"{FULL} --recompute-method block --recompute-num-layers 8",
        "--recompute-activations --recompute-granularity selective --recompute-modules mlp",
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--fp16 --initial-loss-scale 65536 --min-loss-scale 2 --hysteresis 1",
        "--fp16 --loss-scale 1024",
        f"--bf16 --grad-reduce-in-bf16 {STRATEGY} optim --ddp-bucket-size 1000",
        f"{OPTIM} {STRATEGY} optim_grads_params",
        "--bf16 --accumulate-allreduce-grads-in-fp32 --no-grad-reduce-in-bf16",
        "--optimizer sgd --sgd-momentum 0.8 --adam-beta1 0.9",  # Megatron's default says nothing
        "--adam-beta2 0.95 --adam-eps 1e-6 --sgd-momentum 0.9",
        "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4 --log-params-norm --log-num-zeros-in-grad",
    ],
)
def test_what_goes_together(line):
    parse(RunConfig, shlex.split("--mock-data " + line), checks=[contradictions])
