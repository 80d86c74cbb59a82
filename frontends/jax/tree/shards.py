"""The shards of an array, as its sharding cuts it: the part of the array in each, and the devices that hold it."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from offload_core.layout import regions

Box = tuple[tuple[int, int], ...]
"""The ``(begin, end)`` of a part of an array in each dimension."""


@dataclass(frozen=True)
class ArrayShard(regions.Box):
    """A part of an array, and the devices of this process that hold it; the core's ``Elements`` of a parameter that is
    this part."""

    shape: tuple[int, ...]
    """The array's shape."""
    box: Box
    devices: tuple[jax.Device, ...]
    """The devices that hold it, in the mesh's order; not empty."""
    primary: jax.Device
    """The one of them whose gradient is read. Shards of many arrays are spread over the devices that hold them."""
    counted: bool
    """False: another process counts its elements in norms, and saves them."""


@functools.lru_cache(maxsize=4096)
def local_shards(sharding: jax.sharding.Sharding, shape: tuple[int, ...], number: int) -> tuple[ArrayShard, ...]:
    """Return the parts of an array that this process has, each once, however many devices hold it.

    Args:
        number: the array's number in its tree, by which devices take turns at being primary, and processes at counting.
    """
    holders: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(_box(index, shape), []).append(device)
    found = []
    for turn, (box, devices) in enumerate(sorted(holders.items(), key=lambda item: item[0]), number):
        here = tuple(device for device in devices if device.process_index == jax.process_index())
        processes = sorted({device.process_index for device in devices})
        counted = processes[turn % len(processes)] == jax.process_index()
        if here:
            found.append(ArrayShard(shape, box, here, here[turn % len(here)], counted))
    return tuple(found)


def of_parts(shape: tuple[int, ...], sharding: jax.sharding.Sharding, parts: Mapping[Box, Any]) -> jax.Array:
    """Return a global array of the parts that this process has. It may share their memory.

    One call puts them on all devices, in the sharding's own order; a put for each device takes several times as long.
    """

    def part(index: Any) -> Any:
        return parts[_box(index, shape)]

    with jax.transfer_guard("allow"):  # JAX takes a put of this call for an implicit one
        return jax.make_array_from_callback(shape, sharding, part)


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    return tuple((low, high) for low, high, _ in (i.indices(n) for i, n in zip(index, shape, strict=True)))


def on_devices(array: jax.Array) -> dict[jax.Device, jax.Array]:
    """Return the part of an array that each device of this process holds."""
    return {shard.device: shard.data for shard in array.addressable_shards}
