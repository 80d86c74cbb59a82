"""Methods of DeepSpeed's engine that say what is configured."""

from collections.abc import Callable, Mapping
from typing import Any


def stage_of(config: Mapping[str, Any]) -> int:
    """Return the stage that a configuration asks for."""
    section = config.get("zero_optimization") or {}
    return int(section.get("stage", 0)) if isinstance(section, Mapping) else int(section)


def _stage(engine: Any) -> int:
    return stage_of(engine.config)


def _section(engine: Any, section: str, key: str) -> Any:
    return (engine.config.get(section) or {}).get(key)


CONFIG_GETTERS: Mapping[str, Callable[[Any], Any]] = {
    "zero_optimization_stage": _stage,
    "zero_optimization": lambda engine: _stage(engine) > 0,
    "zero_optimization_partition_gradients": lambda engine: _stage(engine) >= 2,
    "zero_optimization_partition_weights": lambda engine: _stage(engine) >= 3,
    "zero_cpu_offload": lambda engine: True,
    "zero_use_cpu_optimizer": lambda engine: True,
    "zero_nvme_offload_optimizer": lambda engine: engine.offload_config.offload_optimizer == "nvme",
    "zero_reduce_bucket_size": lambda engine: engine.offload_config.reduce_bucket_size,
    "zero_max_live_parameters": lambda engine: engine.offload_config.max_live_parameters,
    "zero_max_reuse_distance": lambda engine: engine.offload_config.max_reuse_distance,
    "zero_prefetch_bucket_size": lambda engine: engine.offload_config.prefetch_bucket_size,
    "zero_param_persistence_threshold": lambda engine: engine.offload_config.param_persistence_threshold,
    "gradient_clipping": lambda engine: engine.offload_config.gradient_clipping or 0.0,
    "fp16_enabled": lambda engine: engine.offload_config.param_dtype == "float16",
    "bfloat16_enabled": lambda engine: engine.offload_config.param_dtype == "bfloat16",
    "loss_scale": lambda engine: _section(engine, "fp16", "loss_scale") or 0,
    "dynamic_loss_scale": lambda engine: (
        engine.optimizer.pipeline.scaler is not None and not _section(engine, "fp16", "loss_scale")
    ),
    "optimizer_name": lambda engine: _section(engine, "optimizer", "type"),
    "optimizer_params": lambda engine: _section(engine, "optimizer", "params"),
    "scheduler_name": lambda engine: _section(engine, "scheduler", "type"),
    "scheduler_params": lambda engine: _section(engine, "scheduler", "params"),
    "steps_per_print": lambda engine: engine.config.get("steps_per_print"),
    "dataloader_drop_last": lambda engine: bool(engine.config.get("dataloader_drop_last")),
    "get_data_parallel_rank": lambda engine: engine.global_rank,
    "get_model_parallel_rank": lambda engine: 0,
}
"""Methods that say what is configured."""
