"""Public names of DeepSpeed 0.19.8 that ``frontends.torch.deepspeed`` does not take, and what to use; and those that it
takes and that differ.

docs/deepspeed.md is made from these tables. A test compares them with the installed package.
"""

import re
from collections.abc import Mapping

VERSION = "0.19.8"
"""The version whose names these are."""

_CONFIG = "read it from `engine.config`, or from `engine.offload_config`, which says what is in force"
_INTERNAL = "it is internal; `engine.optimizer` is a torch optimizer, and `engine.module` the module"
_PARALLEL = (
    "there is no tensor, pipeline, expert or sequence parallelism: each rank has the whole model, in shards in stage 3"
)
_PROFILER = "use `engine.trace(file)`, torch.profiler, or the loop's own clock"
_LOOP = "the loop does this itself, before it calls the engine"
_COMPILE = "`engine.compile()` is torch.compile, without passes of its own"
_QUANTISED = (
    "gradients and parameters travel in their own type; `communication_dtype` narrows gradients (ZeRO++ is not built)"
)
_REDUCE = "ranks exchange gradients in backward by themselves; `torch.distributed` has collectives"
_MODEL = "it changes the model"
_INFERENCE = "there is no engine for inference; `engine.generating()` keeps parameters whole while `generate` runs"
_FRAGMENTS = "the `safe_get_…` and `safe_set_…` functions read and write states"
_GROUPS = "`torch.distributed` has ranks and groups"
_CHECKPOINTING = "use torch.utils.checkpoint"

_PATTERNS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "engine": (
        (r"zero_quantized.*|zero_hpz.*|local_all_to_all_group", _QUANTISED),
        (r"zenflow.*|auto_update", 'ZenFlow is not built; `schedule="delayed"` is the approximation that is'),
        (r"zero_.*|.*_config|.*_enabled|.*_master_weights_and_gradients|bf16_optimizer_states|fp16_auto_cast", _CONFIG),
        (
            r"(checkpoint|dump|is_sanity|load_universal|log|memory|optimizer_legacy|steps|super|use|initial|cpuadam)_.*",
            _CONFIG,
        ),
        (
            r"dynamic_loss_scale_args|gradient_predivide_factor|communication_data_type|get_data_types|postscale_gradients|managed_.*|torch_autocast_.*",
            _CONFIG,
        ),
        (r"autotuning.*|flops.*|.*timers.*|print_forward_breakdown|wall_clock.*|fwd_duration", _PROFILER),
        (
            r"monitor|summary_events",
            "log what `step()` says: `engine.get_lr()`, `get_global_grad_norm()`, or `offload_core.step_log`",
        ),
        (r"random_ltd.*|data_sampling.*|curriculum.*|data_efficiency.*|set_custom_curriculum.*|set_data_post.*", _LOOP),
        (
            r"deepspeed_io|is_(map|iterable)_style_dataset|first_dataloader_check|training_data",
            "make a torch DataLoader with a DistributedSampler",
        ),
        (
            r"is_compiled|compile_.*|get_.*_backend|get_compile_time|is_deepcompile.*|register_compile_pass|uses_parallel.*",
            _COMPILE,
        ),
        (
            r"(sparse_)?all(reduce|_gather).*|sparse_all.*|buffered_allreduce_fallback|clip_fp32_gradients|flatten|unflatten",
            _REDUCE,
        ),
        (
            r"autotp_size|tensor_parallel.*|get_(tensor|model)_parallel.*|get_sequence.*|.*expert.*|.*moe.*|gate_modules",
            _PARALLEL,
        ),
        (
            r"seq_.*|sequence_.*|pipeline_parallelism|mesh_device|mpu|checkpoint_mp_rank|loaded_checkpoint_mp_.*",
            _PARALLEL,
        ),
        (
            r"collect_python_gc",
            "nothing is to be collected; `engine.release()` gives the device back",
        ),
        (
            r"get_optimizer_configuration|checkpoint_engine|.*_hook|losses|param_names|save_(non_)?zero_checkpoint|.*",
            _INTERNAL,
        ),
    ),
    "zero": (
        (r"Tiled.*", _MODEL + ": each tile becomes a separate layer"),
        (r".*", _INTERNAL),
    ),
    "utils": (
        (
            r"(safe_)?(get|set)_full_hp_.*|get_hp_fragment.*|map_to_flat.*|link_hp.*|lazy_init.*|.*fragment.*",
            _FRAGMENTS,
        ),
        (r"groups|.*parallel.*|mesh_device|mpu|initialize|dist", _GROUPS),
        (r"instrument_w_nvtx|nvtx|timer|comms_logging|get_caller_func|debug|pin_memory_tracker", _PROFILER),
        (r"numa|get_numactl_cmd", "threads bind themselves (`bind_threads`)"),
        (r".*", _INTERNAL),
    ),
    "deepspeed": (
        (
            r"init_inference|.*[iI]nference.*|replace_transformer_layer|DeepSpeedTransformer.*|module_inject|model_impl.*",
            _INFERENCE,
        ),
        (r"DeepSpeedHybridEngine", _INFERENCE),
        (
            r"Pipeline.*|DualPipe.*|pipe|moe|MoE|tp_model_init|set_autotp_mode|.*_tp_model_init.*|.*muon.*sharding",
            _PARALLEL,
        ),
        (r"checkpointing", _CHECKPOINTING),
        (r"compile", _COMPILE),
        (
            r"DeepSpeedConfig.*|load_ds_config",
            "a configuration is a dict or a file; `offload_core.OffloadConfig` checks it",
        ),
        (r"autotuning|profiling|monitor", _PROFILER),
        (r"linear", _MODEL + ": use PEFT for adapters"),
        (r".*", _INTERNAL),
    ),
    "initialize": ((r"mpu|mesh_param", _PARALLEL),),
    "zero.Init": (
        (r"mpu", _PARALLEL),
        (r".*", _QUANTISED),
    ),
    "load_checkpoint": (
        (r"custom_load_fn", "load the weights with `engine.module.load_state_dict()` inside `zero.GatheredParameters`"),
    ),
}
"""By place: patterns of names, the first that fits holds, and what to use."""

_NOT_TAKEN: Mapping[str, str] = {
    "engine": """
        aio_config all_gather_scalar all_to_all_group allreduce_and_copy allreduce_bucket allreduce_gradients
        allreduce_no_retain auto_update autotp_size autotuning_enabled autotuning_end_profile_step autotuning_metric
        autotuning_metric_path autotuning_model_info autotuning_model_info_path autotuning_profile_model_info
        autotuning_start_profile_step bf16_master_weights_and_gradients bf16_optimizer_states
        buffered_allreduce_fallback checkpoint_engine checkpoint_mp_rank checkpoint_serialization_enabled
        checkpoint_tag_validation_enabled checkpoint_tag_validation_fail checkpoint_writer_enabled client_lr_scheduler
        client_optimizer clip_fp32_gradients collect_python_gc communication_data_type compile_autosp compile_autotp
        compile_zero_optimization_stage cpuadam_cores_perc curriculum_learning_config curriculum_learning_enabled
        data_efficiency_config data_efficiency_enabled data_sampling_config data_sampling_enabled deepspeed_io
        dist_backend dont_change_device dump_state dynamic_loss_scale_args enable_backward_allreduce engine_timers
        engine_timers_cache expert_data_parallel_group expert_parallel_group first_dataloader_check flatten flops
        flops_profiler flops_profiler_detailed flops_profiler_enabled flops_profiler_module_depth
        flops_profiler_output_file flops_profiler_profile_step flops_profiler_recompute_fwd_factor
        flops_profiler_top_modules fp16_auto_cast fp16_master_weights_and_gradients fwd_duration gate_modules
        get_autosp_backend get_autotp_backend get_compile_time get_data_types get_deepcompile_backend
        get_deepspeed_compile_backend get_optimizer_configuration get_sequence_parallel_group get_tensor_parallel_rank
        get_wall_clock_timers gradient_average gradient_predivide_factor has_moe_layers initial_dynamic_scale
        inside_no_sync_ctxt is_compiled is_deepcompile_active is_deepcompile_enabled is_first_weights_partition_group
        is_iterable_style_dataset is_map_style_dataset is_sanity_checks_enabled load_moe_state_dict
        load_universal_checkpoint loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size
        local_all_to_all_group log_level losses  memory_breakdown mesh_device
        module_forward_post_hook module_forward_pre_hook moe_layers monitor mpu num_experts
        optimized_linear_base_weight_sharding optimized_linear_lora_enabled optimizer_legacy_fusion param_names
        pipeline_parallelism postscale_gradients print_forward_breakdown random_ltd_config random_ltd_enabled
        random_ltd_initialize random_ltd_scheduler register_compile_pass save_non_zero_checkpoint save_zero_checkpoint
        scale_wrt_gas seq_data_parallel_group seq_parallel_group sequence_parallel_size
        set_custom_curriculum_learning_schedule set_data_post_process_func sparse_all_gather sparse_allreduce
        sparse_allreduce_bucket sparse_allreduce_no_retain summary_events super_offload swap_tensor_config
        tensor_parallel_config timers torch_autocast_dtype torch_autocast_enabled
        torch_autocast_lower_precision_safe_modules torch_autocast_z0_gradscaler tput_timer training_data unflatten
        use_ds_comm use_node_local_storage uses_parallelization_pass_only wall_clock_breakdown warn_unscaled_loss
        zenflow zenflow_config zero_allgather_bucket_size zero_allgather_partitions zero_allgather_sequential
        zero_allow_untested_optimizer zero_compute_grad_norm zero_contiguous_gradients zero_elastic_checkpoint
        zero_force_ds_cpu_optimizer zero_gather_16bit_weights_on_model_save zero_hpz_partition_size
        zero_ignore_unused_parameters zero_legacy_stage1 zero_load_from_fp32_weights zero_log_trace_cache_warnings
        zero_model_persistence_threshold zero_module_granularity_threshold zero_multi_rank_bucket_allreduce
        zero_offload_optimizer zero_offload_param zero_overlap_comm zero_parameter_alignment zero_partial_offload
        zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights zero_reduce_scatter
        zero_round_robin_gradients zero_save_muon_momentum_buffer_in_memory zero_sub_group_size""",
    "zero": """
        DeepSpeedTensorOverride DeepSpeedZeRoOffload TiledLinear TiledLinearReturnBias ZeroParamStatus ZeroParamType
        config leaf_module_config linear muon offload_config offload_states parameter_offload partition_parameters
        partitioned_param_coordinator partitioned_param_profiler stage3 stage_1_and_2 tiling utils""",
    "utils": """
        DeprecatedException bwc bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_world_size comms_logging
        config debug exceptions expert_tensor_parallel_world_size fragment_address get_accelerator get_caller_func
        get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_full_hp_grad get_full_hp_param
        get_hp_fragment_mapping get_model_parallel_group get_model_parallel_rank get_model_parallel_world_size
        get_numactl_cmd get_tensor_model_parallel_group get_tensor_model_parallel_rank
        get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size groups init_on_device initialize
        instrument_w_nvtx lazy_init_hp_params_optimizer_state link_hp_params log_dist_once logging
        map_to_flat_opt_states mesh_device mixed_precision_linkage module_utils mpu numa nvtx pin_memory_tracker
        recursive_getattr recursive_setattr set_full_hp_grad set_full_hp_param set_log_level_from_string
        set_tensor_model_parallel_rank set_tensor_model_parallel_world_size tensor_fragment timer types""",
    "deepspeed": """
        DeepSpeedConfig DeepSpeedConfigError DeepSpeedDataLoader DeepSpeedHybridEngine DeepSpeedInferenceConfig
        DeepSpeedOptimizer DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable DeepSpeedTransformerConfig
        DeepSpeedTransformerLayer DualPipeVEngine DualPipeVModule InferenceEngine KV MLA_KV MLA_Q MUON_OPTIMIZER MoE
        NOT_HEAD_BLOCKED PipelineEngine PipelineModule QUERY TORCH_DISTRIBUTED_DEFAULT_PORT autotuning checkpoint
        checkpointing compile constants datastates default_inference_config git_branch git_hash git_version_info
        git_version_info_installed inference init_inference io linear load_ds_config merge_tp_model_init_into_config
        model_implementations module_inject moe monitor pipe profiling record_tp_model_init_args
        replace_transformer_layer resolve_per_head_muon_after_sharding set_autotp_mode set_optimizer_flags
        tp_model_init version""",
}
"""By place: the public names that are not taken."""

_NAMES = {place: frozenset(names.split()) for place, names in _NOT_TAKEN.items()}

DIFFERS: Mapping[str, Mapping[str, str]] = {
    "deepspeed": {
        "initialize": "a client's optimizer hands over to the rule of its name: the optimizer that is returned is ours",
        "init_distributed": "a process that was started alone is a group of one rank",
    },
    "engine": {
        "step": "an error where no backward came before",
        "set_train_batch_size": "between two updates only; the micro-steps of an update are counted from the last one",
        "scale": "an error under loss scaling: `engine.backward(loss)` scales",
        "save_checkpoint": "files without pickles; `client_state` holds plain values, tensors and arrays",
        "load_checkpoint": "any number of ranks and any stage; without a file `latest` it returns `(None, {})`",
        "load_module_state_dict": "outside stage 3",
        "save_16bit_model": "also in stage 3, whatever stage3_gather_16bit_weights_on_model_save says",
        "offload_states": "all that the device holds goes, whatever `include` names",
        "compile": "torch.compile, without passes of its own",
        "no_sync": "on one rank it has no effect",
        "coalesce_grad_reduction": "each backward inside exchanges its gradients, with the results of one exchange",
        "empty_partition_cache": "parameters that stay whole for their next use are released",
        "optimizer": "a torch optimizer; `cur_scale`, `loss_scale`, `overflow` are there, flat groups are not",
        "zero_grad": "between micro-steps gradients stay",
        "train": "it returns the engine",
        "eval": "it returns the engine",
    },
    "zero": {
        "Init": "`module=` cuts a module that exists; parameters of less than the threshold stay whole",
        "GatheredParameters": "a change without `modifier_rank` is an error",
    },
    "utils": {
        "safe_get_local_fp32_param": "a rank's part is ours: its runs in all buckets, end to end; in all stages",
        "safe_set_full_fp32_param": "the parameter changes at once, and not at the next update",
        "zero_to_fp32": "a module: it reads DeepSpeed's checkpoints and ours, leaves the model on its device, and"
        " writes one file without `safe_serialization`",
        "safe_get_full_grad": "averaged over what has come so far, in fp32",
    },
}
"""By place: names that are taken and differ, with the difference."""


def is_theirs(place: str, name: str) -> bool:
    """Return True for a name of DeepSpeed's that is not taken."""
    return name in _NAMES[place]


def names_not_taken(place: str) -> frozenset[str]:
    """Return the public names of this place that are not taken."""
    return _NAMES[place]


def refuse(place: str, name: str) -> str:
    """Return the end of an error: what to use in place of a name that is not taken."""
    for pattern, remedy in _PATTERNS[place]:
        if re.fullmatch(pattern, name):
            return f"DeepSpeed has it, and it is not taken here; {remedy}"
    return "it is not taken here"
