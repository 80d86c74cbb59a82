"""What the pipeline asks of the device that holds parameters and gradients.

Tensors are the front end's: one-dimensional, contiguous, and opaque here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from . import _kernels
from .dtypes import BY_NUMPY, ElementType


@dataclass(frozen=True)
class HostArray:
    """A contiguous run of host memory: address, length, element type, and the object that keeps it alive."""

    address: int
    numel: int
    dtype: ElementType
    owner: Any

    def run(self, start: int, numel: int) -> "HostArray":
        """Elements ``[start, start + numel)``."""
        return HostArray(self.address + start * self.dtype.itemsize, numel, self.dtype, self.owner)

    @classmethod
    def of(cls, array: np.ndarray) -> "HostArray":
        """A C-contiguous NumPy array."""
        return cls(_kernels.address(array), array.size, BY_NUMPY[array.dtype], array)


class Copy(NamedTuple):
    """``host`` and elements ``[start, start + host.size)`` of ``tensor``, of one element type."""

    tensor: Any
    start: int
    host: np.ndarray


class Event(Protocol):
    """The end of some copies."""

    def wait(self) -> None:
        """Block until they are done; raise what went wrong."""


class Device(Protocol):
    """Where device parameters and gradients live."""

    addressable: bool
    """Kernels can read gradients and write parameters where they are: no copies."""
    updates_in_place: bool
    """An fp32 parameter is its own master weight (addressable, and the tensors are mutable)."""
    wants_pinned: bool
    """Copies run asynchronously only from and to memory registered with the CUDA driver."""

    def dtype(self, tensor: Any) -> ElementType: ...

    def numel(self, tensor: Any) -> int: ...

    def host_array(self, tensor: Any) -> HostArray:
        """The tensor's own memory. Only where ``addressable``."""
        ...

    def to_host(self, copies: Sequence[Copy]) -> Event:
        """Start copying from the tensors. Both sides must stay as they are until the event."""
        ...

    def to_device(self, copies: Sequence[Copy]) -> Event:
        """Start copying into the tensors. Both sides must stay as they are until the event."""
        ...


class Done:
    """The event of copies that were done at once."""

    def wait(self) -> None:
        pass


class HostDevice:
    """The device that is the host; its tensors are one-dimensional NumPy arrays."""

    addressable = True
    updates_in_place = True
    wants_pinned = False

    def dtype(self, tensor: np.ndarray) -> ElementType:
        return BY_NUMPY[tensor.dtype]

    def numel(self, tensor: np.ndarray) -> int:
        return tensor.size

    def host_array(self, tensor: np.ndarray) -> HostArray:
        return HostArray.of(tensor)

    def to_host(self, copies: Sequence[Copy]) -> Event:
        for tensor, start, host in copies:
            np.copyto(host, tensor[start : start + host.size])
        return Done()

    def to_device(self, copies: Sequence[Copy]) -> Event:
        for tensor, start, host in copies:
            np.copyto(tensor[start : start + host.size], host)
        return Done()
