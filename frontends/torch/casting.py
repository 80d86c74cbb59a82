"""The element types of a model's tensors: ``param_dtype``, ``buffer_dtype``, and where the two must agree."""

from collections.abc import Container

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from offload_core.config.options import OffloadConfig
from offload_core.dtypes import BY_NAME, FLOAT32, ElementType

from .tensors import ELEMENT_TYPES, TORCH_DTYPES, bytes_as, cast_param


class Casts:
    """The element types that a configuration gives to the tensors of a model.

    Layers with running statistics in float32 (BatchNorm) keep their parameters in float32, too. Torch computes such a
    layer for an input of any type; on the CPU it refuses one whose statistics and parameters are of two types.

    Args:
        model: None for an optimizer alone, which has parameters only.
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
        """The element type that a parameter is cast to; None: it keeps its own."""
        return FLOAT32 if param in self._wide else self._config.target_dtype

    def n_bytes(self, tensor: torch.Tensor) -> int:
        """Bytes of a parameter or buffer after casting."""
        return bytes_as(tensor, self.of_param(tensor) if isinstance(tensor, nn.Parameter) else self._of_buffers)

    def cast_untrained(self, model: nn.Module, but: Container[torch.Tensor] | None) -> None:
        """Cast the model's frozen parameters, which meet the trained ones in the same operations, and its buffers.

        Args:
            but: parameters to leave as they are (partitioned ones).
        """
        for param in model.parameters():
            dtype = self.of_param(param)
            if dtype is not None and param.is_floating_point() and (but is None or param not in but):
                cast_param(param, TORCH_DTYPES[dtype])
        for buffer in model.buffers() if self._of_buffers is not None else ():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(TORCH_DTYPES[self._of_buffers])
