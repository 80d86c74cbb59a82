"""A device's kernels: they update states in the device's own memory, where gradients and parameters are."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..dtypes import ElementType
from ..errors import ConfigError
from ..native.kernels import Kernels
from .events import Event
from .protocols import HostArray, HostArrays, Matrices


class DeviceQueue(Kernels, Protocol):
    """Runs kernels on memory of a device, one after the other, beside the device's other work.

    A call returns before its kernel has run. Kernels run in the order of the calls, of whatever thread. Addresses are
    the device's. A tensor that a kernel reads or writes must live until the event of a later :meth:`mark`.
    """

    def allocate(self, n_bytes: int) -> Any:
        """Return a one-dimensional tensor of zeroed bytes in the device's memory.

        Raises:
            DeviceMemoryError: the device has too little memory.
        """
        ...

    def typed(self, memory: Any, dtype: ElementType) -> Any:
        """Return bytes of :meth:`allocate`, or of a run of them, as a tensor of elements of this type."""
        ...

    def arrays(self, tensors: Sequence[Any]) -> HostArrays:
        """Return the device's memory of each tensor."""
        ...

    def order(self, after: Event) -> None:
        """Have later kernels run after an event."""
        ...

    def mark(self, used: object = None) -> Event:
        """Return the event after all kernels so far.

        Args:
            used: is kept alive until the event has been waited for, or a later event of this queue.
        """
        ...

    def reduce(self, parts: HostArray, n_parts: int, out: HostArray, *, divisor: float, add: bool) -> None:
        """As ``kernels.reduce``: ``out`` (fp32) = or += the sum of ``n_parts`` equal runs of ``parts``, divided."""
        ...

    def squares(self, runs: Sequence[tuple[np.ndarray, ElementType]]) -> Callable[[], np.ndarray]:
        """Start to sum the squares of runs of gradients exactly.

        Args:
            runs: ``(spans, element type)`` pairs, as ``kernels.sum_squares`` takes them.

        Returns:
            A function that waits for the sum and returns its bins (``c_src/api.h``).
        """
        ...

    def to_host(self, memory: Any, host: np.ndarray) -> Event:
        """Start to copy bytes of the device's memory to as many bytes of the host."""
        ...

    def to_device(self, host: np.ndarray, memory: Any) -> Event:
        """Start to copy bytes of the host to as many bytes of the device's memory."""
        ...

    def transform(self, matrices: Matrices, tensor: Any) -> None:
        """Compute with matrices of a flat tensor in bfloat16, and put the results in their place."""
        ...


class NoQueue:
    """The answer of a device that cannot run the kernels.

    Args:
        why: the reason, as a clause that follows "because".
    """

    def __init__(self, why: str) -> None:
        self.why = why

    def __call__(self) -> DeviceQueue:
        """Raise :class:`ConfigError`."""
        raise ConfigError(
            f"states cannot be kept on this device, because {self.why}; expected offload_optimizer='cpu' or 'nvme', "
            "and no device_states_bytes"
        )
