"""What each flag of Megatron's and DeepSpeed's that is no field of ours is answered, by name."""

from __future__ import annotations

import shlex

import pytest

from core.config import parse
from core.contradictions import contradictions
from pretrain_gpt import RunConfig

FULL = "--recompute-granularity full"
STRATEGY = "--data-parallel-sharding-strategy"
FUSED = "which operations are fused does not change the result"
SHARDED = "optim_grads_params"
SAME = "the numbers are the same"
ON_DEVICE = "state stays on the device"
FINITE = "--rerun-mode validate_results"

ACCEPTED = [  # the words typed, part of the one line that is printed
    ("--checkpoint-activations", f"old spelling of {FULL}"),
    ("--deepspeed-activation-checkpointing", f"old spelling of {FULL}"),
    (f"--checkpoint-activations {FULL}", "no effect: --recompute-granularity says it"),
    ("--no-pipeline-parallel", "old spelling of --pipeline-model-parallel-size 1"),
    ("--ds-sequence-parallel-size 1", "do not exchange heads"),
    ("--no-align-grad-reduce", "when they are due"),
    ("--no-align-param-gather", "when they are due"),
    ("--enable-gloo-process-groups", "--distributed-backend"),
    ("--disable-gloo-process-groups", "--distributed-backend"),
    ("--exit-signal-handler-dataloader", "by the training process itself"),
    ("--overlap-p2p-communication", "as early as the plan allows"),
    ("--no-overlap-p2p-communication", "as early as the plan allows"),
    ("--use-ring-exchange-p2p", "how stages send"),
    ("--error-injection-rate 0", "no errors are injected"),
    ("--error-injection-type transient_error", "no errors are injected"),
    ("--main-grads-dtype fp32", "always float32"),
    ("--main-params-dtype fp32", "always float32"),
    ("--exp-avg-dtype fp32", "always float32"),
    ("--exp-avg-sq-dtype=fp32", "always float32"),
    ("--bias-swiglu-fusion", FUSED),
    ("--no-bias-swiglu-fusion", FUSED),
    ("--bias-gelu-fusion", FUSED),
    ("--no-bias-gelu-fusion", FUSED),
    ("--masked-softmax-fusion", FUSED),
    ("--no-masked-softmax-fusion", FUSED),
    ("--rope-fusion", FUSED),
    ("--no-rope-fusion", FUSED),
    ("--apply-rope-fusion", FUSED),
    ("--no-apply-rope-fusion", FUSED),
    ("--gradient-accumulation-fusion", FUSED),
    ("--no-gradient-accumulation-fusion", FUSED),
    ("--bias-dropout-fusion", FUSED),
    ("--no-bias-dropout-fusion", FUSED),
    ("--no-gradient-reduce-div-fusion", FUSED),
    ("--no-cross-entropy-loss-fusion", FUSED),
    ("--use-cpu-initialization", "the same bits on any device"),
    ("--no-persist-layer-norm", "norms have one implementation"),
    ("--log-timers-to-tensorboard", "--tensorboard-dir always gets it"),
    ("--timing-log-option minmax", "those of rank 0"),
    ("--accumulate-allreduce-grads-in-fp32", "reduced in it without --grad-reduce-in-bf16"),
]
REFUSED = [  # the words typed, part of the one problem that is found
    ("--deepspeed", f"what DeepSpeed's file sets are flags here (--micro-batch-size, --global-"
     f"batch-size, --clip-grad, --bf16, {STRATEGY}); leave it out"),
    ("--deepspeed-config ds.json", "what DeepSpeed's file sets are flags here"),
    ("--zero-stage 1", f"0, 1, 2 and 3 are {STRATEGY} no_shard, optim, optim_grads and {SHARDED}"),
    ("--zero-reduce-bucket-size 5", STRATEGY),
    ("--gradient-clipping 1.0", "it is --clip-grad here"),
    ("--checkpoint-num-layers 2", "it is --recompute-num-layers here"),
    ("--partition-activations", "it is --distribute-saved-activations here"),
    ("--no-pipeline-parallel --pipeline-model-parallel-size 2", "contradicts --pipeline-model-"),
    ("--checkpoint-activations --recompute-granularity selective", "contradicts --recompute-"),
    ("--recompute-activations --checkpoint-activations", "--recompute-activations is short"),
    ("--checkpoint-activations yes", "takes no value, got yes"),
    ("--cpu-optimizer", ON_DEVICE),
    ("--optimizer-cpu-offload", ON_DEVICE),
    ("--optimizer-offload-fraction 0.5", ON_DEVICE),
    ("--ds-sequence-parallel-size 2", "leave it out, or give 1; --sequence-parallel cuts"),
    ("--check-for-spiky-loss", FINITE),
    ("--check-for-large-grads", FINITE),
    ("--fp16-lm-cross-entropy", "never computed in float16"),
    ("--ddp-pad-buckets-for-high-nccl-busbw", SAME),
    ("--ddp-average-in-collective", "divided by the tokens once; leave it out"),
    ("--init-model-with-meta-device", SAME),
    ("--delay-grad-reduce", SAME),
    ("--no-async-tensor-model-parallel-allreduce", SAME),
    ("--microbatch-group-size-per-vp-stage 2", "--pipeline-schedule takes a file"),
    ("--microbatch-group-size-per-virtual-pipeline-stage 2", "--pipeline-schedule takes a file"),
    ("--error-injection-rate 100", "(no errors are injected); leave it out, or give 0"),
    ("--distributed-timeout-seconds-after-init 60", "--distributed-timeout-minutes"),
    ("--adlr-autoresume", "SIGTERM, SIGUSR1 and --exit-duration-in-mins"),
    ("--adlr-autoresume-interval 50", "SIGTERM, SIGUSR1 and --exit-duration-in-mins"),
    ("--lazy-mpu-init True", "groups are always made before the model"),
    ("--wgrad-deferral-limit 5", "--pipeline-schedule zb_h1"),
    ("--delay-wgrad-compute", "--pipeline-schedule zb_h1"),
    ("--standalone-embedding-stage", "--pipeline-model-parallel-layout gives the embedding"),
    ("--pipeline-model-parallel-split-rank 1", "one stack of layers is cut over the ranks"),
    ("--main-grads-dtype bf16", "leave it out, or give fp32"),
    ("--main-params-dtype fp16", "leave it out, or give fp32"),
    ("--exp-avg-dtype fp8", "leave it out, or give fp32"),
    ("--exp-avg-sq-dtype bf16", "leave it out, or give fp32"),
    ("--use-precision-aware-optimizer", "float32; leave it out"),
    ("--use-torch-fsdp2", SHARDED),
    ("--use-custom-fsdp", SHARDED),
    ("--use-megatron-fsdp", SHARDED),
    ("--nccl-ub", SAME),
    ("--manual-gc", SAME),
    ("--manual-gc-interval 10", SAME),
    ("--no-manual-gc-eval", SAME),
    ("--no-check-for-nan-in-loss-and-grad", "cannot be turned off; leave the flag out"),
    ("--log-memory-to-tensorboard", "the log says what memory goes to"),
    ("--no-log-learnig-rate-to-tensorboard", "--tensorboard-dir always gets it"),
    ("--log-progress", "--metrics-file"),
]  # fmt: skip
OURS = ["--log-throughput", "--weight-decay-incr-style constant", "--recompute-activations"]


def read(words: str) -> RunConfig:
    """With a flag behind it, whose value is its own."""
    argv = ["--mock-data", *shlex.split(words), "--seed", "7"]
    config = parse(RunConfig, argv, checks=[contradictions])
    assert config.train.seed == 7
    return config


@pytest.mark.parametrize(("words", "part"), ACCEPTED)
def test_what_is_accepted_says_why_it_changes_nothing(words: str, part: str) -> None:
    (notice,) = read(words).notices
    assert notice.startswith(words.split()[0].partition("=")[0]) and part in notice


@pytest.mark.parametrize(("words", "part"), REFUSED)
def test_what_is_refused_says_the_way_out(words: str, part: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        read(words)
    assert caught.value.code == 2
    (problem,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  ")]
    assert problem.strip().startswith(words.split()[0]) and part in problem


@pytest.mark.parametrize("words", OURS)
def test_what_is_a_flag_of_ours(words: str) -> None:
    assert read(words).notices == ()


def test_spellings_of_deepspeed_are_what_they_stand_for() -> None:
    assert read("--checkpoint-activations").recompute.recompute_granularity == "full"
    both = read("--deepspeed-activation-checkpointing --checkpoint-activations")
    assert both.recompute.recompute_granularity == "full"
    assert read("--no-pipeline-parallel").parallel.pipeline_model_parallel_size == 1


def test_the_layout_that_a_refusal_shows_is_one() -> None:
    """'E|tt|ttL' for --standalone-embedding-stage"""
    line = "--num-layers 4 --pipeline-model-parallel-size 3 --pipeline-model-parallel-layout"
    placement = read(f"{line} 'E|tt|ttL'").parallel.placement(4)
    assert placement.layers == (0, 2, 2)
