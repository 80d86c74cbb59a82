"""Where torch tensors live, as the core's ``Device``: host memory, or a CUDA device behind copies."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from offload_core.device import Copy, Done, Event, HostArray
from offload_core.dtypes import ElementType

from .tensors import ELEMENT_TYPES, TORCH_DTYPES


def as_torch(host: np.ndarray) -> torch.Tensor:
    """A torch view of a one-dimensional host array; bfloat16 too, which ``torch.from_numpy`` refuses."""
    dtype = next(dtype for element_type, dtype in TORCH_DTYPES.items() if element_type.numpy == host.dtype)
    return torch.from_numpy(host.view(np.uint8)).view(dtype)


class TorchDevice:
    """What both devices say of a tensor."""

    def dtype(self, tensor: torch.Tensor) -> ElementType:
        return ELEMENT_TYPES[tensor.dtype]

    def numel(self, tensor: torch.Tensor) -> int:
        return tensor.numel()

    def host_array(self, tensor: torch.Tensor) -> HostArray:
        assert tensor.device.type == "cpu"
        assert tensor.is_contiguous()
        return HostArray(tensor.data_ptr(), tensor.numel(), self.dtype(tensor), tensor)


class HostTorchDevice(TorchDevice):
    """CPU tensors: gradients are read and parameters written where they are."""

    addressable = True
    updates_in_place = True
    wants_pinned = False

    def to_host(self, copies: Sequence[Copy]) -> Event:
        for tensor, start, host in copies:
            as_torch(host).copy_(tensor[start : start + host.size])
        return Done()

    def to_device(self, copies: Sequence[Copy]) -> Event:
        for tensor, start, host in copies:
            tensor[start : start + host.size].copy_(as_torch(host))
        return Done()


class _CudaEvent:
    """Ends when the stream has run the copies; keeps both sides alive till then."""

    def __init__(self, stream: torch.cuda.Stream, copies: Sequence[Copy]) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)
        self._copies = copies

    def wait(self) -> None:
        self._event.synchronize()
        self._copies = ()


class CudaDevice(TorchDevice):
    """A CUDA device: non-blocking copies from and to pinned memory, one stream each way."""

    addressable = False
    updates_in_place = False
    wants_pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host = torch.cuda.Stream(device)
        self._to_device = torch.cuda.Stream(device)

    def to_host(self, copies: Sequence[Copy]) -> Event:
        return self._run(self._to_host, copies, lambda device, host: host.copy_(device, non_blocking=True))

    def to_device(self, copies: Sequence[Copy]) -> Event:
        return self._run(self._to_device, copies, lambda device, host: device.copy_(host, non_blocking=True))

    def _run(self, stream: torch.cuda.Stream, copies: Sequence[Copy], copy: Callable[..., Any]) -> Event:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for tensor, start, host in copies:
                copy(tensor[start : start + host.size], as_torch(host))
        return _CudaEvent(stream, copies)


def device_for(device: torch.device) -> HostTorchDevice | CudaDevice:
    """The adapter for parameters on ``device``."""
    return HostTorchDevice() if device.type == "cpu" else CudaDevice(device)
