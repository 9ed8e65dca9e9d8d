"""Megatron-LM's flags that are no fields of ours, so that its scripts get an answer by name.

DeepSpeed's of the same scripts are here too.

Pure data: standard library only. core/config.py looks a typed flag up in its own fields first, then
here; a flag that becomes a field leaves this file. Names are spelled as fields (num_experts).

    OLD_SPELLINGS   stand for a flag we have
    ACCEPTED        say what always holds here, or choose between implementations of one result:
                    one line tells the user so
    REFUSED         would change what is trained, stored or measured
    GPT_ONLY, GPT_ONLY_ACCEPTED   fields of the GPT recipe, for the one that has no such field
    FAMILIES        prefixes whose every flag is refused for one reason
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class OldSpelling(NamedTuple):
    name: str  # the field it stands for
    value: str
    agrees: tuple[str, ...] = ()  # other values that it does not contradict


class Accepted(NamedTuple):
    why: str
    only: tuple[str, ...] = ()  # the values that have no effect; empty: any, and no value
    otherwise: str = ""  # what to do instead of another value


OLD_SPELLINGS: dict[str, OldSpelling] = {
    "use_rotary_position_embeddings": OldSpelling("position_embedding_type", "rope"),
    "log_timers": OldSpelling("timing_log_level", "1", agrees=("2",)),
    "no_position_embedding": OldSpelling("position_embedding_type", "none", agrees=("rope",)),
    # Megatron-DeepSpeed's
    "checkpoint_activations": OldSpelling("recompute_granularity", "full"),
    "deepspeed_activation_checkpointing": OldSpelling("recompute_granularity", "full"),
    "no_pipeline_parallel": OldSpelling("pipeline_model_parallel_size", "1"),
}


def _by_reason(reasons: Mapping[str, str]) -> dict[str, str]:
    """{reason: "a b c"} -> {"a": reason, "b": reason, "c": reason}"""
    return {name: reason for reason, names in reasons.items() for name in names.split()}


_ALWAYS = {
    "there is one layer implementation, with torch's scaled_dot_product_attention": (
        "use_mcore_models transformer_impl attention_backend use_flash_attn"
    ),
    "gradients are always accumulated in float32 (float64 under --fp64), and reduced in it "
    "without --grad-reduce-in-bf16": "accumulate_allreduce_grads_in_fp32",
    "the loss is always the mean over the kept tokens of the whole global batch": (
        "calculate_per_token_loss"
    ),
    "a loss that is not finite always stops the run": "check_for_nan_in_loss_and_grad",
    "norm weights are not decayed, so storing them as an offset from 1 gives the same model": (
        "apply_layernorm_1p"
    ),
    "runs repeat bit for bit on CPU with no flag": "deterministic_mode",
    "SIGTERM and SIGUSR1 always save and stop; --exit-signal adds one": "exit_signal_handler",
    "random values are functions of the seed and the sample; there is no state to keep": (
        "no_load_rng no_save_rng te_rng_tracker"
    ),
    "which operations are fused does not change the result and is not a choice here": (
        "cross_entropy_loss_fusion cross_entropy_fusion_impl no_masked_softmax_fusion "
        "no_bias_gelu_fusion no_bias_swiglu_fusion no_rope_fusion no_gradient_accumulation_fusion "
        "no_bias_dropout_fusion no_apply_rope_fusion no_cross_entropy_loss_fusion "
        "no_gradient_reduce_div_fusion bias_swiglu_fusion bias_gelu_fusion masked_softmax_fusion "
        "rope_fusion apply_rope_fusion gradient_accumulation_fusion bias_dropout_fusion"
    ),
    "initial values are the same bits on any device": "use_cpu_initialization",
    "norms have one implementation": "persist_layer_norm no_persist_layer_norm",
    "the attention mask is never built by the loader": "no_create_attention_mask_in_dataloader",
    "samples are read by the training process itself": (
        "num_workers exit_signal_handler_dataloader"
    ),
    "checkpoints have one format, which any layout can load": (
        "ckpt_format use_dist_ckpt auto_detect_ckpt_format dist_ckpt_format "
        "ckpt_fully_parallel_save no_ckpt_fully_parallel_save ckpt_fully_parallel_load "
        "ckpt_assume_constant_structure dist_ckpt_optim_fully_reshardable"
    ),
    "names and shapes in a checkpoint are always compared in full": "dist_ckpt_strictness",
    "the checkpoint's schedules always win, unless --override-opt-param-scheduler": (
        "use_checkpoint_opt_param_scheduler"
    ),
    "the tokenizer is always the command line's": "no_use_tokenizer_model_from_checkpoint_args",
    "there is one implementation of each tokenizer": "legacy_tokenizer",
    "a tokenizer is read from its files; code that lies beside them is never run": (
        "trust_remote_code"
    ),
    "sample after sample is drawn from each data set, so that none needs a surplus": (
        "mid_level_dataset_surplus"
    ),
    "receives are posted as early as the plan allows, and waited for where they are used": (
        "overlap_p2p_communication_warmup_flush overlap_p2p_communication "
        "no_overlap_p2p_communication"
    ),
    "how stages send to each other does not change the result and is not a choice here": (
        "use_ring_exchange_p2p"
    ),
    "every pipeline stage reduces gradients and gathers parameters when they are due": (
        "no_align_grad_reduce no_align_param_gather"
    ),
    "all groups have one backend, --distributed-backend, and none is needed beside them": (
        "enable_gloo_process_groups disable_gloo_process_groups"
    ),
    "no errors are injected": "error_injection_type",
    "the times of --timing-log-level are those of rank 0": "timing_log_option",
    "--tensorboard-dir always gets it": (
        "log_timers_to_tensorboard log_validation_ppl_to_tensorboard "
        "log_learning_rate_to_tensorboard log_loss_scale_to_tensorboard"
    ),
}

_SINGLE = "leave it out, or give 1"
_FLOAT32 = Accepted(
    "it is always float32 (float64 under --fp64)", ("fp32",), "leave it out, or give fp32"
)
ACCEPTED: dict[str, Accepted] = {
    **{name: Accepted(reason) for name, reason in _by_reason(_ALWAYS).items()},
    "context_parallel_size": Accepted("no context parallelism", ("1",), _SINGLE),
    "expert_model_parallel_size": Accepted("every layer is dense", ("1",), _SINGLE),
    "expert_tensor_parallel_size": Accepted("every layer is dense", ("1",), _SINGLE),
    "num_distributed_optimizer_instances": Accepted(
        "the optimizer's state is sharded over all data parallel ranks", ("1",), _SINGLE
    ),
    "dataloader_type": Accepted(
        "samples come in one fixed shuffled order", ("single",), "give single"
    ),
    "empty_unused_memory_level": Accepted("cached memory is kept", ("0",), "give 0"),
    **dict.fromkeys(
        ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "main_params_dtype"), _FLOAT32
    ),
    "ds_sequence_parallel_size": Accepted(
        "ranks do not exchange heads for parts of the sequence",
        ("1",),
        f"{_SINGLE}; --sequence-parallel cuts activations over tensor parallel ranks",
    ),
    "error_injection_rate": Accepted("no errors are injected", ("0",), "leave it out, or give 0"),
    "cuda_graph_impl": Accepted("no graphs are captured", ("none",), "give none"),
}


_RETRIEVAL = "retrieval models are not supported"
_TEXT_ONLY = "only text models are supported here"
_WITHOUT = "leave it out: the numbers are the same without it"
REFUSED: dict[str, str] = _by_reason(
    {
        "masters, moments and gradient sums are float32; leave it out": (
            "use_precision_aware_optimizer"
        ),
        "the loss is never computed in float16; leave it out": "fp16_lm_cross_entropy",
        "what DeepSpeed's file sets are flags here (--micro-batch-size, --global-batch-size, "
        "--clip-grad, --bf16, --data-parallel-sharding-strategy); leave it out": (
            "deepspeed deepspeed_config"
        ),
        "stages 0, 1, 2 and 3 are --data-parallel-sharding-strategy no_shard, optim, optim_grads "
        "and optim_grads_params": "zero_stage",
        "it is --clip-grad here, with the same value": "gradient_clipping",
        "it is --recompute-num-layers here, with --recompute-granularity full": (
            "checkpoint_num_layers"
        ),
        "it is --distribute-saved-activations here, with --recompute-granularity full": (
            "partition_activations"
        ),
        "the optimizer's state stays on the device; --use-distributed-optimizer cuts it over the "
        "data parallel ranks": (
            "cpu_optimizer cpu_torch_adam optimizer_cpu_offload optimizer_offload_fraction "
            "use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d no_pin_cpu_grads "
            "no_pin_cpu_params"
        ),
        "not here yet; leave it out (--rerun-mode validate_results finds the cause of a loss or "
        "gradient norm that is not finite)": "check_for_spiky_loss check_for_large_grads",
        "every pipeline stage reduces a bucket as soon as it is complete; leave it out: the "
        "numbers are the same": "delay_grad_reduce",
        f"a gradient is reduced while the next product is made; {_WITHOUT}": (
            "no_async_tensor_model_parallel_allreduce"
        ),
        "no cluster's service is asked; leave it out: SIGTERM, SIGUSR1 and "
        "--exit-duration-in-mins save and stop a run": "adlr_autoresume adlr_autoresume_interval",
        "groups are always made before the model; leave it out": "lazy_mpu_init",
        "one timeout holds from start to end, --distributed-timeout-minutes": (
            "distributed_timeout_seconds_after_init"
        ),
        "--pipeline-model-parallel-layout gives the embedding a stage of its own, as in "
        "'E|tt|ttL'": "standalone_embedding_stage",
        "one stack of layers is cut over the ranks, by --pipeline-model-parallel-size and "
        "--pipeline-model-parallel-layout; leave it out": "pipeline_model_parallel_split_rank",
        "the order of microbatches is the schedule's: --pipeline-schedule takes a file too": (
            "microbatch_group_size_per_virtual_pipeline_stage microbatch_group_size_per_vp_stage"
        ),
        "all groups have one backend, --distributed-backend": (
            "pipeline_model_parallel_comm_backend"
        ),
        "use --pipeline-schedule zb_h1, where every weight gradient can wait": (
            "defer_embedding_wgrad_compute wgrad_deferral_limit delay_wgrad_compute"
        ),
        "sharding is chosen by --data-parallel-sharding-strategy, here optim_grads_params": (
            "use_megatron_fsdp use_torch_fsdp2 use_custom_fsdp"
        ),
        "parameters are gathered behind the forward pass: --overlap-param-gather": (
            "overlap_param_gather_with_optimizer_step"
        ),
        "the size of a bucket is given, not their number: --ddp-bucket-size": "ddp_num_buckets",
        "gradients are summed, and divided by the tokens once; leave it out": (
            "ddp_average_in_collective"
        ),
        f"not here yet; {_WITHOUT}": (
            "tp_comm_overlap manual_gc manual_gc_interval no_manual_gc_eval "
            "ddp_pad_buckets_for_high_nccl_busbw init_model_with_meta_device "
            "use_persistent_ckpt_worker async_strategy high_priority_stream_groups "
            "nccl_ub use_nccl_ub use_sharp "
            "disable_tp_comm_overlap_ag disable_tp_comm_overlap_rs disable_tp_comm_bulk_dgrad "
            "disable_tp_comm_bulk_wgrad disable_tp_comm_split_ag disable_tp_comm_split_rs"
        ),
        "the check that the loss is finite cannot be turned off; leave the flag out": (
            "no_check_for_nan_in_loss_and_grad"
        ),
        "use --rampup-batch-size START INCREMENT SAMPLES": "step_batch_size_schedule",
        "initial values depend on --seed alone; ranks cannot differ": "data_parallel_random_init",
        "not here yet; give --tokenizer-type HuggingFaceTokenizer a tokenizer.json": (
            "vocab_extra_ids tokenizer_metadata"
        ),
        "it belongs to the BERT script; this one trains GPT": (
            "mask_prob short_seq_prob bert_no_binary_head"
        ),
        _RETRIEVAL: (
            "bert_load titles_data_path bert_embedder_type block_data_path evidence_data_path "
            "use_one_sent_docs embedding_path query_in_block_prob"
        ),
        _TEXT_ONLY: "classes_fraction data_per_class_fraction num_classes img_h img_w patch_dim",
        "the layout is the command line's, and any layout loads a checkpoint; give "
        "--tensor-model-parallel-size and --pipeline-model-parallel-size": (
            "use_mp_args_from_checkpoint_args"
        ),
        "every checkpoint keeps the place in the data; leave it out": "dataloader_save",
        "data is read from files; copy it or mount the store, and give --data-path that": (
            "s3_cache_path object_storage_cache_path"
        ),
        "not here yet; --metrics-file and the log line have loss, gradient norm and times": (
            "log_progress tensorboard_queue_size "
            "log_world_size_to_tensorboard log_max_attention_logit log_energy logging_level"
        ),
        "not here yet; the log says what memory goes to, predicted and measured": (
            "log_memory_to_tensorboard"
        ),
        "--tensorboard-dir always gets it; leave the flag out": (
            "no_log_learnig_rate_to_tensorboard no_log_learning_rate_to_tensorboard "
            "no_log_loss_scale_to_tensorboard"
        ),
        "nothing is sent elsewhere; use --metrics-file or --tensorboard-dir": (
            "wandb_project wandb_exp_name wandb_entity"
        ),
        "not here yet; --log-communication lists what ranks send": (
            "profile use_pytorch_profiler record_memory_history log_straggler nvtx_ranges "
            "memory_snapshot_path"
        ),
        "it is torchrun's: put it before pretrain_gpt.py, or use --nproc N": (
            "nproc_per_node nnodes node_rank master_addr master_port rdzv_backend rdzv_endpoint "
            "rdzv_id max_restarts standalone local_rank"
        ),
        "only --position-embedding-type rope with --use-rope-scaling stretches positions": (
            "rotary_scaling_factor mscale mscale_all_dim original_max_position_embeddings"
        ),
        "every token attends to all earlier ones": "window_size window_attn_skip_freq",
        "the scale of attention is 1/sqrt(head width) in every layer": (
            "apply_query_key_layer_scaling softmax_scale attention_output_gate"
        ),
        "only dense GPT is supported, without expert layers": "num_experts",
        "only multi-head and grouped-query attention is supported": (
            "multi_latent_attention kv_lora_rank q_lora_rank qk_head_dim qk_pos_emb_head_dim "
            "v_head_dim qk_clip"
        ),
        "only decoder models are supported; use --num-layers and --seq-length": (
            "encoder_seq_length decoder_seq_length encoder_num_layers decoder_num_layers spec"
        ),
        "this script trains; it does not serve": "max_tokens_to_oom return_log_probs",
        "the sequence is not cut over ranks; leave it out": (
            "cp_comm_type hierarchical_context_parallel_sizes"
        ),
        "not here yet; replicas start equal and apply equal updates": (
            "check_weight_hash_across_dp_replicas_interval"
        ),
    }
)

GPT_ONLY: dict[str, str] = _by_reason(
    {
        "it belongs to the GPT script; this one trains BERT": (
            "untie_embeddings_and_output_weights label_smoothing z_loss "
            "reset_position_ids reset_attention_mask document_attention_mask eod_mask_loss"
        ),
    }
)
GPT_ONLY_ACCEPTED: dict[str, Accepted] = {
    "data_cache_path": Accepted("BERT's samples are cut in memory at every start"),
}


FAMILIES: dict[str, str] = {
    "moe_": "only dense GPT is supported, without expert layers",
    "zero_": "how DeepSpeed shards is --data-parallel-sharding-strategy here",
    "fp8_": "fp8 is not supported; use --bf16",
    "fp4_": "fp4 is not supported; use --bf16",
    "wandb_": "nothing is sent elsewhere; use --metrics-file or --tensorboard-dir",
    "profile_": "not here yet; --log-communication lists what ranks send",
    "cuda_graph_": f"graphs are not captured; {_WITHOUT}",
    "inference_": "this script trains; it does not serve",
    "rl_": "reinforcement learning is not supported",
    "mtp_": "multi-token prediction is not supported",
    "mamba_": "only transformer layers are supported",
    "hybrid_": "only transformer layers are supported",
    "vision_": _TEXT_ONLY,
    "biencoder_": _RETRIEVAL,
    "ict_": _RETRIEVAL,
    "indexer_": _RETRIEVAL,
    "retriever_": _RETRIEVAL,
    "sft": "not here yet; documents are read as plain text, without turns of a conversation",
    "non_persistent_": "not here yet; every checkpoint is kept in --save; use --save-interval",
    "replication": "not here yet; every checkpoint is kept in --save, once for all ranks",
    "ckpt_convert_": (
        "there is one format, with nothing to convert; scripts/convert_hf.py export writes "
        "transformers' layout"
    ),
}


def accepted(name: str) -> Accepted | None:
    return ACCEPTED.get(name)


def refusal(name: str) -> str | None:
    """Why a flag of Megatron's is refused and what to do; None for a name we do not know."""
    if name in REFUSED or name in ACCEPTED:
        return REFUSED.get(name)
    return next((why for prefix, why in FAMILIES.items() if name.startswith(prefix)), None)


def all_names() -> list[str]:
    return [*OLD_SPELLINGS, *ACCEPTED, *REFUSED]
