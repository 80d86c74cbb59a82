"""Every key of a DeepSpeed configuration and its meaning here. docs/deepspeed.md shows them in tables."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import ConfigError
from ..support import checks
from .schedules import SCHEDULES

VERSION = "0.19.8"
"""The version of DeepSpeed whose keys and defaults these are."""
AUTO = "auto"
OWN_CLIPPING = 1.0
"""The bound on the gradients' norm where a configuration gives none: DeepSpeed's since 0.19.3."""

Convert = Callable[[str, Any], Any]
"""``convert(name, value)`` checks the value of the key ``name``, and returns it as a Python value."""


@dataclass(frozen=True)
class Key:
    """A key of a DeepSpeed configuration."""

    meaning: str
    """The setting that the key gives here, or the reason why it gives none."""
    convert: Convert | None = None
    """The conversion of its value; None: the key sets nothing."""
    keys: "Mapping[str, Key] | None" = None
    """The keys of a section; None: this key is not a section."""
    old: tuple[str, ...] = ()
    """Other spellings."""
    auto: str = ""
    """The meaning of ``"auto"``; empty: the same as leaving the key out."""
    refused: bool = False
    """True if training without the key would give other results: it may only be switched off."""
    agrees: tuple[Any, ...] = ()
    """For a key that sets nothing: the values that ask for the fixed behaviour."""
    switch: str = ""
    """For a section that sets nothing: the key that turns it on. Empty: it is on unless ``enabled`` turns it off."""

    def wants(self, value: Any) -> bool:
        """For a key that sets nothing: True if this value asks for something."""
        if isinstance(value, Mapping):
            on = value.get(self.switch, False) if self.switch else value.get("enabled", bool(value))
            return not checks.is_in(on, (None, False, 0, AUTO))
        lower = value.lower() if isinstance(value, str) else value
        alike = any(checks.is_in(lower, (a,)) and isinstance(value, bool) == isinstance(a, bool) for a in self.agrees)
        return not checks.is_in(value, (None, AUTO)) and not alike


def boolean(name: str, value: Any) -> bool:
    checks.boolean(name, value)
    return value


def number(name: str, value: Any) -> float:
    checks.number(name, value, least=0.0)
    return value


def share(name: str, value: Any) -> float:
    """A number from 0 to 1."""
    checks.number(name, value, least=0.0, most=1.0)
    return value


def integer(least: int) -> Convert:
    """A converter that also takes floats without a fraction, such as JSON's 5e8."""

    def convert(name: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        checks.integer(name, value, least=least)
        return value

    return convert


def one_of(*choices: Any) -> Convert:
    """A converter to one of these words, in upper or lower case."""

    def convert(name: str, value: Any) -> Any:
        lower = value.lower() if isinstance(value, str) else value
        if not checks.is_in(lower, choices):
            checks.choice(name, value, choices)
        return lower

    return convert


def pair(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigError(f"{name}: got {checks.shown(value)}, expected a pair of numbers in [0, 1)")
    for beta in value:
        checks.number(name, beta, least=0.0, below=1.0)
    return tuple(value)


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name}: got {checks.shown(value)}, expected a string")
    return value


def folder(name: str, value: Any) -> str:
    """A string or a path."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}: got {checks.shown(value)}, expected the name of a folder")
    return value


def texts(name: str, value: Any) -> list[str]:
    """A string alone is a list of one."""
    if not isinstance(value, list | tuple | str):
        raise ConfigError(f"{name}: got {checks.shown(value)}, expected a list of strings")
    return [text(name, each) for each in ([value] if isinstance(value, str) else value)]


_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def dtype(name: str, value: Any) -> str:
    return _DTYPES[one_of(*_DTYPES)(name, value)]


def _sets(convert: Convert, meaning: str, *old: str, auto: str = "") -> Key:
    return Key(meaning, convert, old=old, auto=auto)


def _section(keys: "Mapping[str, Key]", *old: str) -> Key:
    return Key("a section", keys=keys, old=old)


def _ignored(reason: str, *agrees: Any, old: tuple[str, ...] = ()) -> Key:
    """``agrees``: see :class:`Key`; False where none is given, nothing if that is None."""
    return Key(reason, old=old, agrees=agrees or (False,))


def _refused(reason: str, *agrees: Any, switch: str = "") -> Key:
    return Key(reason, refused=True, agrees=agrees or (False,), switch=switch)


_GIVEN = "to be given"
_MODELS = "the model's own type"

_ALWAYS_ON = _ignored("reading ahead and writing behind are always on", True)
_OWN_LOOP = "the training loop is yours"
_LOGS = "`offload_core.step_log` writes what steps report to a file, TensorBoard or another place"
_REPORTS = "`engine.step()` returns a `StepReport`, `engine.trace` records a step"
_VARIANT = "this variant is not built"
_ONE_KERNEL = "one C kernel makes all updates"
_GATHER = "gathering follows the prefetch fields"
_OTHER_PARALLELISM = "only data parallelism is built: `train_batch_size` would count other ranks"
_DIAGNOSTICS = "diagnostics of DeepSpeed's own code"
_QUANTIZED = "nothing is quantized on its way"

_DEVICES = one_of("none", "cpu", "nvme")

_OFFLOAD_OPTIMIZER: dict[str, Key] = {
    "device": _sets(
        _DEVICES,
        '`offload_optimizer`: `"cpu"` or `"nvme"`, in any stage; `"none"`, which a section without it means, is None: '
        "states are on the device",
    ),
    "nvme_path": _sets(folder, "`nvme_path`; two folders if `offload_param` names another one"),
    "pin_memory": _sets(boolean, "`pin_memory`"),
    "buffer_count": _ignored("the states of four buckets of `reduce_bucket_size` are in host memory at a time", None),
    "pipeline_read": _ALWAYS_ON,
    "pipeline_write": _ALWAYS_ON,
    "fast_init": _ignored("there is one way to write the first states"),
    "ratio": _sets(share, "`device_states_bytes`, as a share: 1 less this ratio, of the bytes of states"),
    "super_offload": _ignored("`schedule` says what overlaps"),
    "cpuadam_cores_perc": _ignored("`num_threads` says how many threads update"),
}
_OFFLOAD_PARAM: dict[str, Key] = {
    "device": _sets(_DEVICES, '`offload_param`; `"nvme"` only where the states are on disk, too'),
    "nvme_path": _sets(folder, "`nvme_path`, as that of `offload_optimizer`"),
    "pin_memory": _sets(boolean, "`pin_memory`"),
    "buffer_count": _ignored("`stage3_prefetch_bucket_size` bounds the read-ahead", None),
    "buffer_size": _ignored("`stage3_prefetch_bucket_size` bounds the read-ahead", None),
    "max_in_cpu": _ignored("`nvme_host_bytes` says what stays in host memory", None),
}

_ZERO: dict[str, Key] = {
    "stage": _sets(
        integer(0), "`stage`; 0 is stage 1: the same in fp32, other rounding in 16 bits; 2 where it is missing"
    ),
    "offload_optimizer": _section(_OFFLOAD_OPTIMIZER),
    "offload_param": _section(_OFFLOAD_PARAM),
    "cpu_offload": _sets(boolean, "`offload_optimizer.device`, old spelling"),
    "cpu_offload_param": _sets(boolean, "`offload_param.device`, old spelling", "cpu_offload_params"),
    "cpu_offload_use_pin_memory": _sets(boolean, "`pin_memory`, old spelling"),
    "reduce_bucket_size": _sets(integer(1), "`reduce_bucket_size`"),
    "overlap_comm": _sets(boolean, '`schedule`: true is `"overlap"`, false `"serial"`'),
    "stage3_param_persistence_threshold": _sets(
        integer(0),
        "`param_persistence_threshold`",
        "param_persistence_threshold",
        "stage3_param_persitance_threshold",
    ),
    "stage3_max_live_parameters": _sets(integer(0), "`max_live_parameters`", "max_live_parameters"),
    "stage3_prefetch_bucket_size": _sets(integer(0), "`prefetch_bucket_size`", "prefetch_bucket_size"),
    "stage3_max_reuse_distance": _sets(integer(0), "`max_reuse_distance`", "max_reuse_distance"),
    "allgather_bucket_size": _ignored("parameters are gathered in the buckets of `reduce_bucket_size`", None),
    "contiguous_gradients": _ignored("a bucket's gradients are packed where they leave the device", None),
    "reduce_scatter": _ignored("gradients are always reduced to their owners", True),
    "allgather_partitions": _ignored("parameters are always gathered at once", True),
    "use_multi_rank_bucket_allreduce": _ignored("a bucket is always reduced for all its owners at once", True),
    "compute_grad_norm": _ignored("the norm is computed where clipping or loss scaling asks for it", True),
    "load_from_fp32_weights": _ignored("master weights always start from the model's own values", True),
    "ignore_unused_parameters": _ignored("a parameter without gradient is always left alone", True),
    "sub_group_size": _ignored("the update needs no tiles", None),
    "round_robin_gradients": _ignored("all ranks copy parts of each bucket anyway"),
    "parameter_alignment": _ignored("every shard is aligned", None),
    "elastic_checkpoint": _ignored("`engine.save_checkpoint()` saves states"),
    "legacy_stage1": _ignored("there is one stage 1"),
    "zenflow": _ignored('updates are exact; `schedule="delayed"` is the approximation that is built'),
    "stage3_model_persistence_threshold": _ignored(
        "`stage3_param_persistence_threshold` alone decides which parameters stay whole",
        old=("model_persistence_threshold",),
    ),
    "stage3_gather_16bit_weights_on_model_save": _ignored(
        "whole weights of a partitioned model are read inside `gathered_parameters`",
        old=("stage3_gather_fp16_weights_on_model_save", "gather_16bit_weights_on_model_save"),
    ),
    "stage3_module_granularity_threshold": _ignored(_GATHER, 0, old=("module_granularity_threshold",)),
    "stage3_use_all_reduce_for_fetch_params": _ignored(_GATHER, False, old=("use_all_reduce_for_fetch_params",)),
    "stage3_allgather_sequential": _ignored(_GATHER, False, old=("allgather_sequential",)),
    "leaf_module": _section(
        {
            "classes": _sets(texts, "`leaf_modules`"),
            "names": _sets(texts, "`leaf_modules`"),
            "name_suffixes": _sets(texts, "`leaf_modules`"),
        }
    ),
    "memory_efficient_linear": _ignored("`torch.nn.functional.linear` does not change"),
    "override_module_apply": _ignored("`Module.apply` does not change"),
    "pipeline_loading_checkpoint": _ignored("there is no pipeline"),
    "log_trace_cache_warnings": _ignored(_DIAGNOSTICS),
    "enable_sanity_checks": _ignored(_DIAGNOSTICS),
    "save_muon_momentum_buffer_in_memory": _ignored("Muon's momentum is where the other states are"),
    "zero_hpz_partition_size": _ignored("parameters are partitioned over all ranks", 0, 1),
    "zero_quantized_weights": _ignored(_QUANTIZED),
    "zero_quantized_nontrainable_weights": _ignored(_QUANTIZED),
    "zero_quantized_gradients": _ignored(_QUANTIZED),
    "zeropp_loco_param": _ignored(_QUANTIZED),
    "mics_shard_size": _ignored("states are partitioned over all ranks", -1),
    "mics_hierarchical_params_gather": _ignored("states are partitioned over all ranks"),
}


@dataclass(frozen=True)
class Optimizer:
    """A type of optimizer: its rule here, its arguments, and its defaults where they differ from the rule's."""

    rule: str
    params: tuple[str, ...]
    defaults: Mapping[str, Any]


_ADAM = Optimizer(
    "adamw", ("lr", "betas", "eps", "weight_decay", "adam_w_mode", "torch_adam"), {"lr": 1e-3, "weight_decay": 0.0}
)
_SGD = Optimizer("sgd", ("lr", "momentum", "dampening", "weight_decay", "nesterov"), {"lr": 1e-3})
_LION = Optimizer("lion", ("lr", "betas", "weight_decay"), {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0})
_ADAGRAD = Optimizer("adagrad", ("lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value"), {"lr": 1e-2})
_MUON = Optimizer(
    "muon",
    ("lr", "muon_lr", "adam_lr", "momentum", "betas", "eps", "weight_decay", "adam_w_mode", "ns_method"),
    {"lr": 0.02, "weight_decay": 0.0},
)
OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "deepspeedcpuadam"), _ADAM),
    "sgd": _SGD,
    **dict.fromkeys(("lion", "deepspeedcpulion"), _LION),
    **dict.fromkeys(("adagrad", "deepspeedcpuadagrad"), _ADAGRAD),
    "muon": _MUON,
}
"""By the lower case of ``optimizer.type``: DeepSpeed's names, and those of its classes on the CPU."""

_OPTIMIZER: dict[str, Key] = {
    "type": _sets(
        one_of(*OPTIMIZERS),
        '`optimizer`: `"AdamW"`, `"Adam"` (`adam_mode`, with `adam_w_mode`), `"SGD"`, `"Lion"`, `"Adagrad"`, '
        '`"Muon"` (embeddings, heads and vectors by AdamW); others are an error',
    ),
    "params": _section(
        {
            "lr": _sets(number, "`lr`", auto=_GIVEN),
            "betas": _sets(pair, "`betas`"),
            "eps": _sets(number, "`eps`"),
            "momentum": _sets(number, "`momentum`"),
            "muon_lr": _sets(number, "`lr` of Muon, before `lr`"),
            "adam_lr": _sets(number, '`adamw={"lr": ...}`, before `lr`'),
            "ns_method": _sets(one_of("gram", "standard"), "none: the iteration is that of torch's Muon"),
            "dampening": _sets(number, "`dampening`"),
            "nesterov": _sets(boolean, "`nesterov`"),
            "lr_decay": _sets(number, "`lr_decay`"),
            "initial_accumulator_value": _sets(number, "`initial_accumulator_value`"),
            "weight_decay": _sets(
                number,
                "`weight_decay`; 0 where it is missing, as in DeepSpeed (0.01 for a `torch_adam` AdamW)",
                auto=_GIVEN,
            ),
            "adam_w_mode": _sets(boolean, '`adam_mode`: true, the default, is `"adamw"` also for `"Adam"`'),
            "torch_adam": _sets(boolean, "the default of `weight_decay`; one C kernel makes all updates"),
            "max_grad_norm": _refused("DeepSpeed wants it as `gradient_clipping`", 0),
            "bias_correction": _refused(_VARIANT, True),
            "amsgrad": _refused(_VARIANT),
            "maximize": _refused(_VARIANT),
            "fp32_optimizer_states": _ignored('`state_format="bf16"` is what false means', True),
            "foreach": _ignored(_ONE_KERNEL),
            "fused": _ignored(_ONE_KERNEL),
            "capturable": _ignored(_ONE_KERNEL),
            "differentiable": _refused(_VARIANT),
            "set_grad_none": _ignored("gradients leave as they appear"),
        },
    ),
    "legacy_fusion": _ignored(_ONE_KERNEL),
}


_KINDS: dict[Any, Convert] = {
    int: integer(0),
    int | None: integer(0),
    float: number,
    bool: boolean,
    str: one_of("log", "linear"),
}
SCHEDULE_KEYS = {
    name: {field.name: field.type for field in fields(schedule) if field.name != "lr"}
    for name, schedule in SCHEDULES.items()
}
"""The arguments of each schedule that are keys, and their types."""
_OF_THE_RUN = {"warmup_max_lr": "the optimizer's `lr`", "warmup_num_steps": _GIVEN, "total_num_steps": _GIVEN}


def _schedule_keys() -> dict[str, Key]:
    kinds = {key: kind for keys in SCHEDULE_KEYS.values() for key, kind in keys.items()}
    users = {key: ", ".join(f"`{name}`" for name, keys in SCHEDULE_KEYS.items() if key in keys) for key in kinds}
    return {
        key: Key(f"argument of {users[key]}", _KINDS[kind], auto=_OF_THE_RUN.get(key, ""))
        for key, kind in kinds.items()
    }


_SCHEDULER: dict[str, Key] = {
    "type": _sets(text, f"`lr`, a function of the number of updates: {', '.join(f'`{name}`' for name in SCHEDULES)}"),
    "params": _section(
        {
            **_schedule_keys(),
            "last_batch_iteration": _ignored("the count of updates is saved with the states", -1),
        },
    ),
}

_FP16: dict[str, Key] = {
    "enabled": _sets(boolean, '`param_dtype="float16"`', auto=_MODELS),
    "loss_scale": _sets(number, "`loss_scale`; 0 is dynamic"),
    "initial_scale_power": _sets(integer(0), "`initial_loss_scale`, 2 to this power"),
    "loss_scale_window": _sets(integer(1), "`loss_scale_window`; 1000 where it is missing"),
    "hysteresis": _sets(integer(1), "`loss_scale_hysteresis`; 2 where it is missing"),
    "consecutive_hysteresis": _sets(boolean, "`loss_scale_consecutive_hysteresis`"),
    "min_loss_scale": _sets(number, "`min_loss_scale`; an overflow there skips its update and does not end the run"),
    "auto_cast": _ignored("floating-point arguments of forward are always cast", True, False),
    "fp16_master_weights_and_grads": _ignored("master weights of float16 parameters are always fp32"),
}

_BF16: dict[str, Key] = {
    "enabled": _sets(boolean, '`param_dtype="bfloat16"`', auto=_MODELS),
    "check_grad_overflow": _sets(
        boolean, "`skip_nonfinite`, in stages 1 and 2; true where it is missing, and whatever it says in stage 3"
    ),
    "immediate_grad_update": _ignored("gradients leave as they appear", True),
    "bf16_master_weights_and_grads": _sets(boolean, '`master_dtype="bfloat16"`, rounded stochastically'),
    "bf16_optimizer_states": _sets(boolean, '`state_format="bf16"`, rounded stochastically'),
}

KEYS: dict[str, Key] = {
    "train_batch_size": _sets(integer(1), "checked; gives `gradient_accumulation_steps` where that is missing"),
    "train_micro_batch_size_per_gpu": _sets(
        integer(1), "checked; gives `gradient_accumulation_steps` where that is missing"
    ),
    "gradient_accumulation_steps": _sets(
        integer(1), "`gradient_accumulation_steps`", auto="from the batch sizes, or to be given"
    ),
    "gradient_clipping": _sets(
        number, f"`gradient_clipping`; {OWN_CLIPPING:g} where it is missing, as in DeepSpeed; 0 is none", auto=_GIVEN
    ),
    "optimizer": _section(_OPTIMIZER),
    "scheduler": _section(_SCHEDULER),
    "fp16": _section(_FP16),
    "bf16": _section(_BF16, "bfloat16"),
    "zero_optimization": _section(_ZERO),
    "communication_data_type": _sets(dtype, "`communication_dtype`"),
    "fp32_allreduce": _sets(boolean, '`communication_dtype="float32"`, old spelling'),
    "data_types": _section(
        {
            "param_dtype": _sets(dtype, "`param_dtype`; `fp16` and `bf16` must agree"),
            "grad_accum_dtype": _ignored("gradients are always accumulated in fp32", "fp32"),
            "buffer_dtype": _sets(dtype, "`buffer_dtype`"),
            "keep_in_fp32_modules": _ignored("buffers keep their own type unless `buffer_dtype` is given", []),
        },
    ),
    "managed_gradient_accumulation": _refused(
        "`engine.step()` counts micro-steps: leave it out, and call `engine.step(boundary=True)` for an update",
        True,
    ),
    "gradient_allreduce_op": _sets(one_of("mean", "sum"), '`average_over_ranks`: `"sum"` is False; in every stage'),
    "prescale_gradients": _ignored("gradients are summed in fp32 and divided once"),
    "gradient_predivide_factor": _ignored("gradients are summed in fp32 and divided once", 1),
    "sparse_gradients": _ignored("gradients are dense"),
    "disable_allgather": _ignored("parameters are always gathered at once"),
    "allgather_size": _ignored("parameters are gathered in the buckets of `reduce_bucket_size`", None),
    "zero_allow_untested_optimizer": _ignored("there is one optimizer", True, False),
    "zero_force_ds_cpu_optimizer": _ignored("there is one optimizer", True, False),
    "activation_checkpointing": _ignored("`torch.utils.checkpoint` is the model's own affair"),
    "compile": _ignored("`torch.compile` is the model's own affair"),
    "checkpoint": _ignored("`engine.save_checkpoint()` saves states"),
    "datastates_ckpt": _ignored("`engine.save_checkpoint()` saves states"),
    "nebula": _ignored("`engine.save_checkpoint()` saves states"),
    "aio": _ignored("the number of threads and the size of their pieces are fixed"),
    "use_node_local_storage": _ignored("`engine.save_checkpoint()` saves states"),
    "dataloader_drop_last": _ignored(_OWN_LOOP),
    "steps_per_print": _ignored(_REPORTS),
    "wall_clock_breakdown": _ignored(_REPORTS),
    "memory_breakdown": _ignored("`engine.memory_report()` lists the memory in use"),
    "dump_state": _ignored(_REPORTS),
    "timers": _ignored(_REPORTS),
    "comms_logger": _ignored("`engine.sent_bytes` counts"),
    "flops_profiler": _ignored(_REPORTS),
    "tensorboard": _ignored(_LOGS),
    "wandb": _ignored(_LOGS),
    "csv_monitor": _ignored(_LOGS),
    "comet": _ignored(_LOGS),
    "autotuning": _ignored("nothing is tuned"),
    "disable_python_gc": _ignored("Python's collector is left alone"),
    "log_level": _ignored("nothing is logged"),
    "vocabulary_size": _ignored("it serves a warning of DeepSpeed's only"),
    "graph_harvesting": _ignored("CUDA graphs are the model's own affair"),
    "seq_parallel_communication_data_type": _ignored("there is no sequence parallelism", None),
    "use_data_before_expert_parallelism": _ignored("there is no expert parallelism"),
    "pipeline": _ignored("there is no pipeline"),
    "torch_autocast": _refused(
        "it changes what forward computes: leave it out, and use `torch.autocast` round it, or `bf16`", switch="enabled"
    ),
    "amp": _refused("it changes what forward computes: use `fp16` or `bf16`"),
    "tensor_parallel": _refused(_OTHER_PARALLELISM, switch="autotp_size"),
    "sequence_parallel_size": _refused(_OTHER_PARALLELISM, 1),
    "expert_parallel": _refused(_OTHER_PARALLELISM, switch="enabled"),
    "elasticity": _refused("give the three batch sizes instead"),
    "hybrid_engine": _refused("there is no engine for generation", switch="enabled"),
    "data_efficiency": _refused(_OWN_LOOP + ": sample there", switch="enabled"),
    "curriculum_learning": _refused(_OWN_LOOP + ": sample there"),
    "progressive_layer_drop": _refused("it changes the model"),
    "compression_training": _refused("it changes the model"),
    "weight_quantization": _refused("it changes the model"),
    "quantize_training": _refused("it changes the model"),
    "eigenvalue": _refused("it changes the model"),
    "sparse_attention": _refused("it changes the model"),
}


def walk(keys: Mapping[str, Key] = KEYS, path: str = "") -> Iterator[tuple[str, Key]]:
    """Every key that is not a section, with its path."""
    for name, key in keys.items():
        if key.keys is None:
            yield path + name, key
        else:
            yield from walk(key.keys, f"{path}{name}.")


def spellings(keys: Mapping[str, Key]) -> dict[str, str]:
    """The present name of each spelling of these keys."""
    return {spelling: name for name, key in keys.items() for spelling in (name, *key.old)}
