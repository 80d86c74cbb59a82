"""The device that is the host."""

from collections.abc import Sequence

import numpy as np

from ..dtypes import BY_NUMPY, ElementType
from .events import Done, Event
from .protocols import Copy, HostArray, HostArrays


class HostDevice:
    """The device that is the host; its tensors are one-dimensional NumPy arrays."""

    addressable = True
    updates_in_place = True
    pinning = None

    def free_bytes(self) -> None:
        return None

    def dtype(self, tensor: np.ndarray) -> ElementType:
        return BY_NUMPY[tensor.dtype]

    def numel(self, tensor: np.ndarray) -> int:
        return tensor.size

    def host_array(self, tensor: np.ndarray) -> HostArray:
        return HostArray.of(tensor)

    def host_arrays(self, tensors: Sequence[np.ndarray]) -> HostArrays:
        return HostArrays.columns(map(self.host_array, tensors))

    def to_host(self, copies: Sequence[Copy], host: np.ndarray) -> Event:
        fill(host, [(c.offset, c.tensor[c.start : c.start + c.numel]) for c in copies])
        return Done()

    def to_device(self, host: np.ndarray, copies: Sequence[Copy], after: Event) -> Event:
        for tensor, start, numel, offset in copies:
            np.copyto(tensor[start : start + numel], host[offset : offset + numel])
        return Done()

    def mark(self) -> Event:
        return Done()

    def synchronize(self) -> None:
        pass


def fill(host: np.ndarray, runs: Sequence[tuple[int, np.ndarray]]) -> None:
    """Write ``(offset, values)`` runs to a flat array, cast to its element type, and zeros between them."""
    end = 0
    for offset, values in sorted(runs, key=lambda run: run[0]):
        host[end:offset] = 0
        end = offset + values.size
        np.copyto(host[offset:end], values, casting="unsafe")
    host[end:] = 0
