"""``deepspeed.zero``: models in shards (stage 3)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from offload_core.deepspeed import translation
from offload_core.deepspeed.names import refuse
from offload_core.errors import ConfigError

from ..engine import Engine
from ..stage3.construction import init
from ..stage3.gathering import gathered_parameters, register_external_parameter
from .accelerator import rank_device
from .comm import init_distributed

__all__ = ["GatheredParameters", "Init", "register_external_parameter", "unwrap_model_for_generation"]

_TYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
_SECTIONS = ("zero_optimization", "communication_data_type")
"""The keys that decide how parameters are cut. The others may be incomplete."""


def Init(  # the name that scripts import
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
    given = _loaded(config if config is not None else config_dict_or_path)
    enabled_types = [name for name in _TYPES if _enabled(given.get(name))]
    dtype = dtype or (_TYPES[enabled_types[0]] if enabled_types else None)
    own = {name: given[name] for name in _SECTIONS if name in given}
    own["zero_optimization"] = {**own.get("zero_optimization", {}), "stage": 3}
    settings = {"module": module, "process_group": data_parallel_group, "config": own}
    return _built(dtype, remote_device if remote_device != "none" else None, settings)


@contextmanager
def _built(dtype: torch.dtype | None, remote_device: str | None, settings: Mapping[str, Any]) -> Iterator[None]:
    before = torch.get_default_dtype()
    with torch.device(rank_device()), init(**settings, remote_device=remote_device):
        torch.set_default_dtype(dtype or before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _loaded(given: Any) -> Mapping[str, Any]:
    return {} if given is None else given if isinstance(given, Mapping) else translation.load(given)


def _enabled(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


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
    with ExitStack() as inside:
        inside.enter_context(model.generating())
        yield model.module


def __getattr__(name: str) -> Callable[..., Any]:
    raise AttributeError(f"deepspeed.zero.{name}: {refuse('zero', name)}")
