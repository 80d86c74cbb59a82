"""JAX arrays as the core's ``TensorMemory``, and the host buffers that new parameters are made from.

JAX arrays cannot be written, so every update writes its parameters to host buffers and puts those on the
device. On the CPU the new arrays share the buffers' memory (``jax.device_put`` aliases 64-byte-aligned memory);
elsewhere the runtime copies from the buffers some time later. Either way a buffer may be written again only when the
runtime has let go of it. A weak reference to the buffer shows this.
"""

import gc
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from offload_core.device.events import Done, Event
from offload_core.device.host import fill
from offload_core.device.no_queue import NoQueue
from offload_core.device.protocols import Copy, HostArray, HostArrays, Matrices
from offload_core.dtypes import BY_NUMPY, ElementType
from offload_core.errors import HostMemoryError
from offload_core.layout.partition import ParamSpec, round_up
from offload_core.memory.host_memory import HostMemory, available_bytes, format_bytes
from offload_core.memory.pinning import Pinning
from offload_core.memory.report import DeviceUse

from ..tree.memory_kinds import in_host_memory, on_cpu, start_to_host
from .device_kernels import computed
from .runs import cut_run, split_places

_ALIGNMENT = 64
_PATIENCE = 50
"""Milliseconds to wait for the runtime to let go of a buffer, before another one is allocated."""


class ArrayMemory:
    """The part of the core's protocols that is the same for all of JAX's arrays: they cannot be written in place."""

    updates_in_place = False
    pinning: Sequence[Pinning] = ()
    queue = NoQueue("arrays of JAX cannot be written in place")

    def host_array(self, tensor: Any) -> HostArray:
        raise TypeError("these parameters are not in host memory")

    def host_arrays(self, tensors: Sequence[Any]) -> HostArrays:
        return HostArrays.columns(map(self.host_array, tensors))

    def mark(self) -> Event:
        return Done()

    def synchronize(self) -> None:
        pass


class JaxDevice(ArrayMemory):
    """Reads gradients in place on the CPU, and elsewhere through the host copy that JAX makes."""

    addressable = True

    def free_bytes(self) -> None:
        return None

    def dtype(self, tensor: Any) -> ElementType:
        return BY_NUMPY[np.dtype(tensor.dtype)]

    def numel(self, tensor: Any) -> int:
        return int(tensor.size)

    def host_array(self, tensor: Any) -> HostArray:
        return host_array(tensor)

    def to_host(self, copies: Sequence[Copy], host: np.ndarray) -> Event:
        fill(host, [(c.offset, np.asarray(c.tensor).reshape(-1)[c.start : c.start + c.numel]) for c in copies])
        return Done()

    def to_device(self, host: np.ndarray, copies: Sequence[Copy], after: Event) -> Event:
        for tensor, start, numel, offset in copies:
            np.copyto(tensor[start : start + numel], host[offset : offset + numel])
        return Done()

    def transform(self, matrices: Matrices, host: np.ndarray) -> Event:
        [device, *_] = jax.local_devices(backend="cpu")
        return computed(matrices, host, lambda owner: device)


def host_array(array: Any) -> HostArray:
    """Return the memory of an array on a CPU device or in host memory, when it has been computed."""
    if isinstance(array, jax.Array) and on_cpu(array) and _is_row_major(array):
        # The address, without a NumPy view: while a view lives, JAX silently does not donate the array.
        address = array.block_until_ready().unsafe_buffer_pointer()
        return HostArray(address, array.size, BY_NUMPY[np.dtype(array.dtype)], array)
    return HostArray.of(np.ascontiguousarray(array))


def free_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Return the bytes that can still be allocated on these devices together, equally on each.

    None: it is not known, or the devices' memory is the host's.
    """
    stats = [device.memory_stats() or {} for device in devices]
    if not all({"bytes_limit", "bytes_in_use"} <= each.keys() for each in stats):
        return None
    return len(stats) * min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)


def device_use(devices: Sequence[jax.Device]) -> DeviceUse | None:
    """Return the memory in use on these devices; None: it is host memory, or JAX keeps no statistics of it."""
    stats = [device.memory_stats() or {} for device in devices]
    if not devices or not all({"bytes_in_use", "peak_bytes_in_use"} <= each.keys() for each in stats):
        return None
    used, peak = (sum(each[key] for each in stats) for key in ("bytes_in_use", "peak_bytes_in_use"))
    return DeviceUse(devices[0].device_kind, used, peak, len(devices))


def read(array: jax.Array, start: int, stop: int) -> np.ndarray:
    """Return elements ``[start, stop)`` of a flattened array. It lies on one device, or replicated on several."""
    if in_host_memory(array) or on_cpu(array):
        return np.asarray(array).reshape(-1)[start:stop]
    array = array.addressable_data(0)
    place = jax.device_put(split_places([start])[0], array.sharding)
    return np.asarray(start_to_host(_cut(array, place, stop - start)))


@partial(jax.jit, static_argnums=2)
def _cut(array: jax.Array, place: jax.Array, numel: int) -> jax.Array:
    return cut_run(array.reshape(-1), place, numel)


def _is_row_major(array: jax.Array) -> bool:
    """True if elements lie in row-major order; jit may choose another for outputs (``jax.experimental.layout``)."""
    return array.format.layout.major_to_minor == tuple(range(array.ndim))  # type: ignore[attr-defined]


class _Generation:
    """Memory for one value of every parameter, and a weak reference to each buffer lent from it."""

    def __init__(self, memory: np.ndarray, n_params: int) -> None:
        self.memory = memory
        self.lent: list[weakref.ref[np.ndarray] | None] = [None] * n_params

    def reads(self, i: int) -> bool:
        """True if anyone still reads parameter ``i`` here."""
        reader = self.lent[i]
        return reader is not None and reader() is not None


class ParameterBuffers:
    """Host buffers for new parameters, in generations: a buffer is used again when its last reader is gone.

    Two generations alternate in a training loop that drops its old parameters.
    """

    def __init__(self, memory: HostMemory, specs: Sequence[ParamSpec]) -> None:
        self._memory = memory
        self._specs = specs
        self._offsets = []
        self.generation_bytes = 0
        """Bytes of one generation."""
        for spec in specs:
            self._offsets.append(self.generation_bytes)
            self.generation_bytes += round_up(spec.numel * spec.dtype.itemsize, _ALIGNMENT)
        self._generations: list[_Generation] = []
        self._patience = _PATIENCE

    def take(self) -> list[np.ndarray]:
        """Lend a one-dimensional buffer for each parameter, until the last array made from it dies.

        Raises:
            HostMemoryError: old parameters are still held, and there is no memory for more.
        """
        self._await_readers()
        buffers = [self._lend(i) for i in range(len(self._specs))]
        self._generations = [g for g in self._generations if any(g.reads(i) for i in range(len(self._specs)))]
        return buffers

    def _await_readers(self) -> None:
        """Wait a little for the buffers of old parameters that the caller has dropped.

        The runtime lets go of them when the computations that read them have ended, and gives their memory back at the
        next garbage collection.
        """
        if len(self._generations) < 2:
            return
        if self._one_is_free():
            return
        for _ in range(self._patience):
            gc.collect(0)
            time.sleep(1e-3)
            if self._one_is_free():
                self._patience = _PATIENCE
                return
        self._patience //= 2  # they are in use, then: wait less each time

    def _one_is_free(self) -> bool:
        return all(any(not g.reads(i) for g in self._generations) for i in range(len(self._specs)))

    def _lend(self, i: int) -> np.ndarray:
        generation = next((g for g in self._generations if not g.reads(i)), None)
        if generation is None:
            if self.generation_bytes > available_bytes():
                raise HostMemoryError(
                    f"new parameters need {format_bytes(self.generation_bytes)} of host memory and "
                    f"{format_bytes(available_bytes())} is available: {len(self._generations)} older versions of the "
                    "parameters are still held; expected the training loop to drop them"
                )
            memory = self._memory.allocate("parameter buffers", self.generation_bytes, np.dtype(np.uint8))
            generation = _Generation(memory, len(self._specs))
            self._generations.append(generation)
        spec, offset = self._specs[i], self._offsets[i]
        # Made from a memoryview, so that arrays made from the buffer refer to the buffer and not to the whole memory.
        window = generation.memory[offset : offset + spec.numel * spec.dtype.itemsize].data
        buffer = np.frombuffer(window, spec.dtype.numpy)
        generation.lent[i] = weakref.ref(buffer)
        return buffer
