"""JAX arrays as the core's ``Device``, and the host buffers that new parameters are made from.

JAX arrays cannot be written, so every update writes its parameters to host buffers and puts those on the
device. On the CPU the new arrays are the buffers themselves (``jax.device_put`` aliases 64-byte-aligned
memory), elsewhere the runtime copies from them at a time of its own: either way a buffer may be written again
only when the runtime has let go of it, which its weak reference tells.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from offload_core.device import Copy, Done, Event, HostArray
from offload_core.dtypes import BY_NUMPY, ElementType
from offload_core.host_memory import HostMemory
from offload_core.partition import ParamSpec, round_up

_ALIGNMENT = 64


class JaxDevice:
    """Gradients are read where they are on the CPU, and through JAX's own host copy elsewhere."""

    addressable = True
    updates_in_place = False
    wants_pinned = False

    def dtype(self, tensor: Any) -> ElementType:
        return BY_NUMPY[np.dtype(tensor.dtype)]

    def numel(self, tensor: Any) -> int:
        return int(tensor.size)

    def host_array(self, tensor: Any) -> HostArray:
        if isinstance(tensor, jax.Array) and next(iter(tensor.devices())).platform == "cpu":
            # The address without a NumPy view: a live view makes donating the array silently fail.
            address = tensor.block_until_ready().unsafe_buffer_pointer()
            return HostArray(address, tensor.size, self.dtype(tensor), tensor)
        return HostArray.of(np.ascontiguousarray(tensor))

    def to_host(self, copies: Sequence[Copy]) -> Event:
        for tensor, start, host in copies:
            np.copyto(host, np.asarray(tensor).reshape(-1)[start : start + host.size])
        return Done()

    def to_device(self, copies: Sequence[Copy]) -> Event:
        for tensor, start, host in copies:
            np.copyto(tensor[start : start + host.size], host)
        return Done()


class ParameterBuffers:
    """Host buffers for new parameters, in generations; one is used again when nobody reads it any more.

    In a training loop that drops its old parameters two generations alternate.
    """

    def __init__(self, memory: HostMemory, specs: Sequence[ParamSpec]) -> None:
        self._memory = memory
        self._specs = specs
        self._offsets = []
        self._n_bytes = 0
        for spec in specs:
            self._offsets.append(self._n_bytes)
            self._n_bytes += round_up(spec.numel * spec.dtype.itemsize, _ALIGNMENT)
        self._generations: list[tuple[np.ndarray, list[weakref.ref[np.ndarray] | None]]] = []

    @property
    def generation_bytes(self) -> int:
        """Bytes of one generation."""
        return self._n_bytes

    def take(self) -> list[np.ndarray]:
        """A buffer for each parameter, one-dimensional. It is lent until the last array made from it dies."""
        free = (g for g in self._generations if all(reader is None or reader() is None for reader in g[1]))
        generation = next(free, None)
        if generation is None:
            memory = self._memory.allocate("parameter buffers", self._n_bytes, np.dtype(np.uint8))
            generation = (memory, [None] * len(self._specs))
            self._generations.append(generation)
        memory, lent = generation
        buffers = []
        for i, (spec, offset) in enumerate(zip(self._specs, self._offsets, strict=True)):
            # From a memoryview, so that arrays made from the buffer refer to it and not to the whole memory.
            window = memory[offset : offset + spec.numel * spec.dtype.itemsize].data
            buffer = np.frombuffer(window, spec.dtype.numpy)
            lent[i] = weakref.ref(buffer)
            buffers.append(buffer)
        return buffers
