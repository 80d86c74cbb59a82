"""``deepspeed.zero``: models in shards (stage 3)."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from offload_core.deepspeed import translation
from offload_core.deepspeed.names import refuse
from offload_core.errors import ConfigError

from ..engine import Engine
from ..params.casting import built_as
from ..stage3.construction import in_shards, init
from ..stage3.gathering import gathered_parameters, register_external_parameter
from .accelerator import rank_device
from .comm import init_distributed
from .runtime.zero.partition_parameters import mark

__all__ = ["GatheredParameters", "Init", "register_external_parameter", "unwrap_model_for_generation"]

_TYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
_SECTIONS = ("zero_optimization", "communication_data_type")
"""The keys that decide how parameters are cut. The others may be incomplete."""


def Init(
    module: nn.Module | None = None,
    data_parallel_group: Any = None,
    mem_efficient_linear: bool = True,
    remote_device: str | None = None,
    pin_memory: bool = False,
    config_dict_or_path: Any = None,
    config: Any = None,
    enabled: bool = True,
    dtype: torch.dtype | None = None,
    **others: Any,
) -> AbstractContextManager[Any]:
    """Return a context in which modules are built in shards on the rank's device: see ``frontends.torch.init``.

    Args:
        dtype: the element type in which parameters are built; None: that of the configuration.
        others: arguments that change nothing here (``param_swapper``, …); those of ZeRO++ and of model parallelism are
            refused.
    """
    for name in ("mpu", "zero_param_parallel_group", "zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if others.get(name):
            raise ConfigError(f"zero.Init({name}=...): {refuse('zero.Init', name)}")
    if not enabled:
        return nullcontext()
    init_distributed()
    config = config if config is not None else config_dict_or_path
    given = translation.load(config) if isinstance(config, str | os.PathLike) else config or {}
    wanted = [kind for name, kind in _TYPES.items() if (given.get(name) or {}).get("enabled") is True]
    cut = {name: given[name] for name in _SECTIONS if name in given}
    cut["zero_optimization"] = {**cut.get("zero_optimization", {}), "stage": 3}
    building = init(
        module, cut, process_group=data_parallel_group, remote_device=None if remote_device == "none" else remote_device
    )
    for param in () if module is None else module.parameters():
        mark(param, in_shards(param))
    return _marked(built_as(dtype or (wanted or [torch.get_default_dtype()])[0], rank_device()), building)


@contextmanager
def _marked(types: AbstractContextManager[Any], building: AbstractContextManager[Any]) -> Iterator[None]:
    with types, building as construction:
        construction.note = mark
        yield


@contextmanager
def GatheredParameters(
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """A context in which parameters in shards are whole: see ``frontends.torch.gathered_parameters``.

    Args:
        fwd_module: a module whose forward uses them, too: see :func:`register_external_parameter`.
        enabled: False does nothing.
    """
    listed = [params] if isinstance(params, torch.Tensor) else [*params]
    if not enabled:
        yield
        return
    if fwd_module is not None:
        for param in listed:
            register_external_parameter(fwd_module, param)
    with gathered_parameters(listed, modifier_rank):
        yield


@contextmanager
def unwrap_model_for_generation(model: Engine) -> Iterator[nn.Module]:
    """A context with the module of an engine, whose parameters stay whole inside: see ``Engine.generating``."""
    with model.generating():
        yield model.module


def __getattr__(name: str) -> Callable[..., Any]:
    raise AttributeError(f"deepspeed.zero.{name}: {refuse('zero', name)}")
