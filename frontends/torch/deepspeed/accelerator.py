"""``get_accelerator()``: the device of this process, under the names that scripts for DeepSpeed call it by."""

from typing import Any

import torch

from offload_core.support.launchers import Launched

from ..params.tensors import usable_accelerator
from ..ranks.launch import device_of


class Accelerator:
    """The accelerator that torch sees, or the CPU. Attributes that it lacks are those of torch's module for it, or of
    ``torch.accelerator``: ``synchronize``, ``empty_cache``, ``memory_allocated``, ``Stream``, …"""

    @property
    def _name(self) -> str:
        found = usable_accelerator()
        return "cpu" if found is None else found.type

    def device_name(self, device_index: int | None = None) -> str:
        """Return ``"cuda"``, ``"cuda:1"`` or ``"cpu"``."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device(self) -> int | str:
        """Return the number of the current device; the CPU has none: ``"cpu"``."""
        return "cpu" if self._name == "cpu" else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        """Return the name of the current device, as ``tensor.to()`` takes it."""
        return self.device_name(None if self._name == "cpu" else torch.accelerator.current_device_index())

    def communication_backend_name(self) -> str:
        """Return the backend of ``torch.distributed`` for this device: ``"nccl"``, ``"gloo"``, …"""
        return torch.distributed.get_default_backend_for_device(self._name)

    def is_bf16_supported(self) -> bool:
        """Return True: every device of torch computes in bfloat16, and in float16, some of them slowly."""
        return True

    is_fp16_supported = is_bf16_supported

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is on this device."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, **others: Any) -> torch.Tensor:
        """Return a tensor in pinned memory; on the CPU, the tensor itself."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def __getattr__(self, name: str) -> Any:
        if self._name == "cpu" and ("memory_" in name or name == "empty_cache"):
            return lambda *_: 0  # nothing is on a device
        for module in (torch.get_device_module(self._name), torch.accelerator, torch):
            if hasattr(module, own := _NAMES.get(name, name)):
                return getattr(module, own)
        raise AttributeError(f"get_accelerator().{name}: torch has no such name for {self._name!r}; use torch's own")


_NAMES = {"memory_cached": "memory_reserved", "max_memory_cached": "max_memory_reserved",
          "manual_seed_all": "manual_seed"}  # fmt: skip
_ACCELERATOR = Accelerator()


def get_accelerator() -> Accelerator:
    """Return the device of this process."""
    return _ACCELERATOR


def rank_device() -> torch.device:
    """Return the device of this rank."""
    return device_of(Launched.read())
