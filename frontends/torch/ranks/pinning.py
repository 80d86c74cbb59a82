"""How host memory is pinned for a device of torch. Vendors have names here alone."""

import numpy as np
import torch

from offload_core.errors import HostMemoryError
from offload_core.memory.pinning import Cuda, Hip, Pinning, Registered

REGISTERED: dict[str, Registered] = {}
"""The registration of host memory for types of devices whose driver offers it; tests add theirs."""


class TorchPinned:
    """Memory of torch's own pinned allocator, which may round sizes up."""

    def allocate(self, n_bytes: int, threads: int) -> np.ndarray:
        try:
            return torch.zeros(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
        except RuntimeError as error:
            raise HostMemoryError(str(error)) from None


def pinning_for(device: torch.device) -> Pinning:
    """Register our mappings of exact size with the driver where that is known to work."""
    if device.type == "cuda":
        number = torch.accelerator.current_device_index() if device.index is None else device.index
        return Registered(Hip().register if torch.version.hip else Cuda(number).register)
    return REGISTERED.get(device.type) or TorchPinned()
