"""Casts the tensors of a model to ``param_dtype`` and ``buffer_dtype``, except for parameters of layers that need
float32."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only

from offload_core.config.options import OffloadConfig
from offload_core.dtypes import BFLOAT16, BY_NAME, FLOAT32, ElementType
from offload_core.errors import ConfigWarning
from offload_core.support.bfloat16 import why_bfloat16_is_slow
from offload_core.support.user_line import UserLine

from ..internals.private import grad_mode_kept
from .tensors import ELEMENT_TYPES, TORCH_DTYPES, bytes_as, cast_param
from .values import is_quantised


class Casts:
    """The element types that a configuration gives to the tensors of a model.

    Layers with running statistics in float32 (BatchNorm) keep their parameters in float32, too. Torch computes such a
    layer for an input of any type. On the CPU, torch refuses a layer whose statistics and parameters have different
    types.

    Args:
        model: None for an optimizer without a model.
    """

    def __init__(self, config: OffloadConfig, model: nn.Module | None) -> None:
        self._config = config
        self._wide: set[torch.Tensor] = set()
        """Parameters that stay float32."""
        for module in model.modules() if model is not None and config.target_dtype is not None else ():
            statistics = module.running_mean if isinstance(module, _NormBase) else None
            if statistics is not None and (self._of_buffers or ELEMENT_TYPES.get(statistics.dtype)) is FLOAT32:
                self._wide.update(module.parameters(recurse=False))

    @property
    def _of_buffers(self) -> ElementType | None:
        return BY_NAME.get(self._config.buffer_dtype or "")

    def of_param(self, param: torch.Tensor) -> ElementType | None:
        """Return the element type that a parameter is cast to; None: the parameter keeps its type."""
        return FLOAT32 if param in self._wide else self._config.target_dtype

    def n_bytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a parameter or buffer after casting."""
        return bytes_as(tensor, self.of_param(tensor) if isinstance(tensor, nn.Parameter) else self._of_buffers)

    def would_change(self, tensor: torch.Tensor) -> bool:
        """True if :meth:`cast` gives a parameter or buffer another element type."""
        target = self.of_param(tensor) if isinstance(tensor, nn.Parameter) else self._of_buffers
        return target is not None and _is_cast(tensor) and tensor.dtype != TORCH_DTYPES[target]

    def cast(self, params: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
        """Cast a model's parameters and buffers in place. Frozen parameters are cast like trained ones, because the
        same operations use both."""
        of_buffers = self._of_buffers
        for tensor, target in [*((p, self.of_param(p)) for p in params), *((b, of_buffers) for b in buffers)]:
            if target is not None and _is_cast(tensor):
                cast_param(tensor, TORCH_DTYPES[target])


@contextmanager
def frozen_for_now(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """A context in which these parameters require no gradient."""
    trained = [param for param in params if param.requires_grad]
    for param in trained:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in trained:
            param.requires_grad_(True)


@contextmanager
def built_as(dtype: torch.dtype, device: torch.device | str) -> Iterator[None]:
    """A context in which modules are built in an element type, on a device."""
    before = torch.get_default_dtype()
    try:  # so that the next line is undone after an interrupt
        torch.set_default_dtype(dtype)
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def round_to_types(model: nn.Module, config: OffloadConfig) -> None:
    """Round each parameter of a model in place to the element type that :class:`Casts` gives to it, so that master
    weights start from rounded values."""
    casts = Casts(config, model)
    with grad_mode_kept(), torch.no_grad():
        for param in model.parameters():
            if casts.would_change(param) and (dtype := casts.of_param(param)) is not None:
                param.copy_(param.to(TORCH_DTYPES[dtype]))


def cast_inputs(config: OffloadConfig, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a forward, with floating-point tensors cast to ``param_dtype``, unless
    ``cast_inputs=False``."""
    if config.target_dtype is None or not config.cast_inputs:
        return args, kwargs
    dtype = TORCH_DTYPES[config.target_dtype]
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))


def _is_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not is_quantised(tensor)


_has_warned = False


def warn_if_slow(config: OffloadConfig, model: nn.Module) -> None:
    """Warn, at most once per process, if the model will compute in bf16 on a CPU that is many times slower in bf16 than
    in fp32."""
    global _has_warned
    if _has_warned or config.target_dtype is not BFLOAT16 or next(model.parameters()).device.type != "cpu":
        return
    if (why := why_bfloat16_is_slow()) is not None:
        _has_warned = True
        UserLine.now().warn(
            ConfigWarning(
                f"param_dtype='bfloat16': {why}, so PyTorch takes 20 to 500 times as long for a matrix product in bf16 "
                "as in fp32; expected param_dtype=None and an fp32 model on this processor, or a device"
            )
        )
