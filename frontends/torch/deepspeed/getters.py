"""Methods of DeepSpeed's engine without arguments that say how it is configured and what it has done."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from offload_core.deepspeed.translation import stage_of


def _stage(engine: Any) -> int:
    return stage_of(engine.config)


def _section(engine: Any, section: str, key: str) -> Any:
    return (engine.config.get(section) or {}).get(key)


def _of_groups(engine: Any, name: str) -> list[Any]:
    return [group.get(name, 0.0) for group in engine.optimizer.param_groups]


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_FIELDS = "max_live_parameters max_reuse_distance prefetch_bucket_size param_persistence_threshold reduce_bucket_size"
GETTERS: Mapping[str, Callable[[Any], Any]] = {
    **{f"zero_{name}": attrgetter(f"offload_config.{name}") for name in _FIELDS.split()},
    "zero_optimization_stage": _stage,
    "zero_optimization": lambda engine: _stage(engine) > 0,
    "zero_optimization_partition_gradients": lambda engine: _stage(engine) >= 2,
    "zero_optimization_partition_weights": lambda engine: _stage(engine) >= 3,
    **dict.fromkeys(
        ("zero_cpu_offload", "zero_use_cpu_optimizer"),
        lambda engine: engine.offload_config.offload_optimizer is not None,
    ),
    "zero_nvme_offload_optimizer": lambda engine: engine.offload_config.offload_optimizer == "nvme",
    "gradient_clipping": lambda engine: engine.offload_config.gradient_clipping or 0.0,
    "fp16_enabled": lambda engine: engine.offload_config.param_dtype == "float16",
    "bfloat16_enabled": lambda engine: engine.offload_config.param_dtype == "bfloat16",
    "loss_scale": lambda engine: _section(engine, "fp16", "loss_scale") or 0,
    "dynamic_loss_scale": lambda engine: bool(engine.fp16_enabled() and not engine.loss_scale()),
    "optimizer_name": lambda engine: _section(engine, "optimizer", "type"),
    "optimizer_params": lambda engine: _section(engine, "optimizer", "params"),
    "scheduler_name": lambda engine: _section(engine, "scheduler", "type"),
    "scheduler_params": lambda engine: _section(engine, "scheduler", "params"),
    "steps_per_print": lambda engine: engine.config.get("steps_per_print"),
    "dataloader_drop_last": lambda engine: bool(engine.config.get("dataloader_drop_last")),
    "gradient_accumulation_steps": lambda engine: engine.offload_config.gradient_accumulation_steps,
    "train_micro_batch_size_per_gpu": lambda engine: engine._micro_batch,
    "train_batch_size": lambda engine: engine._micro_batch * engine.gradient_accumulation_steps() * engine.world_size,
    "get_batch_info": lambda engine: tuple(GETTERS[name](engine) for name in _BATCH),
    "get_lr": lambda engine: _of_groups(engine, "lr"),
    "get_mom": lambda engine: _of_groups(engine, "momentum" if engine.optimizer.rule_name == "sgd" else "betas"),
    "get_type": lambda engine: _of_groups(engine, "type"),
    "get_global_grad_norm": lambda engine: engine._norm,
    "was_step_applied": lambda engine: engine._applied,
    "managed_gradient_accumulation": lambda engine: engine._managed,
    "get_data_parallel_rank": lambda engine: engine.global_rank,
    "get_model_parallel_rank": lambda engine: 0,
}
"""By name, of an engine."""
