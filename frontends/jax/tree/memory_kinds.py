"""Device and host memory of JAX's arrays, and the ways between them that are as fast as the link."""

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any

import jax

from offload_core.errors import ConfigError
from offload_core.memory.pinning import Cuda, Driver, Hip, Pinning

DEVICE_MEMORY = "device"
HOST_MEMORY = "pinned_host"
"""JAX's memory kind of ``offload_param="cpu"``."""


def on_cpu(array: jax.Array) -> bool:
    """True if the array lies on a CPU device."""
    return next(iter(array.devices())).platform == "cpu"


def in_host_memory(array: jax.Array) -> bool:
    """True if the array lies in host memory, where ``offload_param="cpu"`` puts parameters."""
    return array.sharding.memory_kind == HOST_MEMORY


def has_host_memory(devices: Iterable[jax.Device]) -> bool:
    """True if programs of these devices can use host memory."""
    return all(HOST_MEMORY in [memory.kind for memory in device.addressable_memories()] for device in devices)


def check_host_memory(devices: Collection[jax.Device]) -> None:
    """Raise :class:`ConfigError` if these devices have no host memory for ``offload_param="cpu"``."""
    if not has_host_memory(devices):
        device = next(iter(devices))
        kinds = ", ".join(repr(memory.kind) for memory in device.addressable_memories())
        raise ConfigError(
            f"offload_param='cpu': the {device.platform} backend has the memory kinds {kinds} and no {HOST_MEMORY!r}; "
            "expected offload_param=None here"
        )


def beside_its_device(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Return the sharding with host memory in place of its devices' own, if they have any."""
    return sharding.with_memory_kind(HOST_MEMORY) if has_host_memory(sharding.addressable_devices) else sharding


def in_device_memory(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Return the sharding with its devices' own memory in place of host memory."""
    return sharding if sharding.memory_kind in (None, DEVICE_MEMORY) else sharding.with_memory_kind(DEVICE_MEMORY)


def lies_as(value: Any, like: Any) -> bool:
    """True if both are arrays, cut alike over the same devices; the kinds of memory may differ."""
    if not (isinstance(value, jax.Array) and isinstance(like, jax.Array)):
        return False
    of_value, kind = value.sharding, like.sharding.memory_kind
    if kind is not None and of_value.memory_kind != kind:
        of_value = of_value.with_memory_kind(kind)
    return value.shape == like.shape and of_value.is_equivalent_to(like.sharding, like.ndim)


def pinning_for(device: jax.Device) -> Sequence[Pinning]:
    """Return the ways to pin host memory for a GPU, best first; none for other devices.

    XLA copies pinned memory to a GPU at the link's speed, and other memory through buffers of its own, at a sixth
    of it (H200, jax 0.11).
    """
    if device.platform != "gpu":
        return ()
    return _driver("rocm" in device.client.platform_version, device.local_hardware_id or 0).ways


@cache
def _driver(is_amd: bool, number: int) -> Driver:
    """One object for each device: engines see by it that their memory is pinned in one way."""
    return Hip() if is_amd else Cuda(number)


def start_to_host(array: jax.Array) -> jax.Array:
    """Start to copy an array to host memory, where ``np.asarray`` waits for it and shares its memory.

    ``copy_to_host_async`` would copy to pageable memory and hold its caller for that long: 1.4 GB/s, where the link has
    55 (H200, jax 0.11).
    """
    return array if on_cpu(array) or in_host_memory(array) else jax.device_put(array, beside_its_device(array.sharding))
