"""The devices that are a process group's ranks, and arrays that lie on them.

Ranks are positions along a mesh axis, in the mesh's order. Device ids are not ranks.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from offload_core.errors import ConfigError
from offload_core.support.checks import kind_of

from ...tree.trees import put

REPLICATED = PartitionSpec()


class Ranks(Protocol):
    """Devices that are ranks, and arrays that lie on them."""

    name: str
    """The name by which collectives know the ranks."""
    devices: list[jax.Device]
    """The device of each rank."""
    world_size: int
    ranks: tuple[int, ...]
    """The numbers of this process's ranks."""
    process_of: list[int]
    """The process that holds each rank."""
    split: PartitionSpec
    """The spec of an array whose first dimension is cut into one part for each rank."""

    def map(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """Return a function that has each rank run ``function`` on its parts of the arguments."""
        ...

    def compile(self, function: Any, **options: Any) -> Any:
        """Return ``jax.jit`` of a function made of :meth:`map`."""
        ...

    def across(self, function: Callable[[str, jax.Array], jax.Array], in_specs: Any) -> Any:
        """Return a program in which every rank runs ``function(name, part)``; all get the same result.

        Equal ranks share the program.
        """
        ...

    def stack(self, parts: Sequence[Any]) -> jax.Array:
        """Return an array of one part for each rank, end to end. This process gives the parts of its ranks."""
        ...

    def parts(self, stacked: jax.Array) -> list[jax.Array]:
        """Return this process's parts of an array of :meth:`stack`, rank after rank."""
        ...

    def replicate(self, value: Any) -> jax.Array:
        """Return an array that every rank has whole. All processes give the same value."""
        ...

    def own_slice(self, flat: jax.Array) -> jax.Array:
        """Inside :meth:`map`: cut ``flat`` into one slice for each rank, and return this rank's."""
        ...

    def gather(self, shard: jax.Array) -> jax.Array:
        """Inside :meth:`map`: return all ranks' shards, end to end."""
        ...


class MeshAxis:
    """The ranks along one axis of a mesh, and arrays that lie on them.

    Args:
        axis: its name; None: the mesh's only axis.

    Raises:
        ConfigError: there is no such axis, another one has more than one device, or this process has no device on it.
    """

    def __init__(self, mesh: Mesh, axis: str | None) -> None:
        if not isinstance(mesh, Mesh):
            raise ConfigError(f"mesh: got {kind_of(mesh)}, expected a jax.sharding.Mesh")
        names = ", ".join(map(repr, mesh.axis_names))
        if axis is None and len(mesh.axis_names) != 1:
            raise ConfigError(f"axis: got None for a mesh with the axes {names}; expected the name of one")
        if axis is not None and axis not in mesh.axis_names:
            raise ConfigError(f"axis: got {axis!r}, expected one of the mesh's: {names}")
        self.name: str = mesh.axis_names[0] if axis is None else axis
        others = {name: size for name, size in mesh.shape.items() if name != self.name and size > 1}
        if others:
            sizes = ", ".join(f"{name!r} of size {size}" for name, size in others.items())
            raise ConfigError(
                f"mesh: besides {self.name!r} it has the axis {sizes}; expected size 1, since states would take their "
                "memory for each of its devices, or sharded parameters and no mesh=: wrap(params) takes them as they "
                "lie, over any axes"
            )
        self.mesh = mesh
        self.devices: list[jax.Device] = list(mesh.devices.flat)
        self.world_size = len(self.devices)
        self.ranks = tuple(r for r, d in enumerate(self.devices) if d.process_index == jax.process_index())
        if not self.ranks:
            raise ConfigError("mesh: none of its devices belongs to this process, expected at least one in each")
        self.process_of = [device.process_index for device in self.devices]
        self.split = PartitionSpec(mesh.axis_names)

    def cut_along(self, dim: int) -> PartitionSpec:
        """Return the spec of an array that is cut along this dimension into one part for each rank."""
        names = self.mesh.axis_names  # the other axes have one device
        return PartitionSpec(*[None] * dim, names if len(names) > 1 else self.name)

    def cuts(self, spec: Iterable[Any]) -> bool:
        """True if a spec, or some entries of one, name this axis."""
        return any(self.name in ((entry,) if isinstance(entry, str) else entry or ()) for entry in spec)

    def spec_of(self, leaf: Any) -> PartitionSpec:
        """Return the spec by which a value lies on the mesh."""
        of = jax.typeof(leaf) if isinstance(leaf, jax.core.Tracer) else leaf  # a type has Explicit axes only
        sharding = getattr(of, "sharding", None) if isinstance(leaf, jax.Array) else None
        if not isinstance(sharding, NamedSharding) or sharding.mesh.axis_names != self.mesh.axis_names:
            return REPLICATED
        return sharding.spec if sharding.mesh.shape == self.mesh.shape else REPLICATED

    def map(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        # shard_map would check that outputs are replicated as out_specs says, and cannot see it of these.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def put(self, value: Any, spec: PartitionSpec, memory_kind: str | None = None) -> jax.Array:
        """Return a global array, cut as ``spec`` says. An array that lies so already is not copied.

        A value that only this process has is taken as the whole array; all processes must have the same.
        """
        sharding = NamedSharding(self.mesh, spec, memory_kind=memory_kind)
        if isinstance(value, jax.core.Tracer):
            return jax.device_put(value, sharding)
        if not isinstance(value, jax.Array):
            value = np.array(value)  # which device_put may alias
        elif value.sharding == sharding:
            return value
        elif value.sharding.is_equivalent_to(sharding, value.ndim):
            # The same memory, with this mesh's names: with Explicit axes, arrays of other meshes are of another type.
            shards = [shard.data for shard in value.addressable_shards]
            return jax.make_array_from_single_device_arrays(value.shape, sharding, shards)
        elif not value.is_fully_addressable:
            return jax.device_put(value, sharding)
        return put(value, sharding)

    def of_parts(self, shape: tuple[int, ...], sharding: jax.sharding.Sharding, parts: Sequence[Any]) -> jax.Array:
        """Return a global array; this process gives the parts of its ranks.

        On CPU devices, and in host memory, the array may share the parts' memory.
        """
        kind = sharding.memory_kind
        places = [SingleDeviceSharding(self.devices[rank], memory_kind=kind) for rank in self.ranks]
        return jax.make_array_from_single_device_arrays(shape, sharding, jax.device_put(list(parts), places))

    def replicate(self, value: Any) -> jax.Array:
        return self.put(value, REPLICATED)

    def stack(self, parts: Sequence[Any]) -> jax.Array:
        shape = (self.world_size * parts[0].shape[0], *parts[0].shape[1:])
        return self.of_parts(shape, NamedSharding(self.mesh, self.split), parts)

    def parts(self, stacked: jax.Array) -> list[jax.Array]:
        on = {shard.device: shard.data for shard in stacked.addressable_shards}
        return [on[self.devices[rank]] for rank in self.ranks]

    def compile(self, function: Any, **options: Any) -> Any:
        return jax.jit(function, **options)

    def across(self, function: Callable[[str, jax.Array], jax.Array], in_specs: Any) -> Any:
        return _across(self.mesh, self.name, function, in_specs)

    def own_slice(self, flat: jax.Array) -> jax.Array:
        numel = flat.size // self.world_size
        return lax.dynamic_slice_in_dim(flat, lax.axis_index(self.name) * numel, numel)

    def gather(self, shard: jax.Array) -> jax.Array:
        return lax.all_gather(shard, self.name, tiled=True)


@functools.cache
def _across(mesh: Mesh, name: str, function: Callable[[str, jax.Array], jax.Array], in_specs: Any) -> Any:
    """Return the program of :meth:`Ranks.across`, made once for each mesh: every tree on it needs these programs."""
    each = functools.partial(function, name)
    return jax.jit(jax.shard_map(each, mesh=mesh, in_specs=in_specs, out_specs=REPLICATED, check_vma=False))


class LoneDevice:
    """One device that is the only rank: nothing is exchanged, and its arrays are not committed to it."""

    def __init__(self, device: jax.Device) -> None:
        self.name = "lone"
        self.devices = [device]
        self.world_size = 1
        self.ranks: tuple[int, ...] = (0,)
        self.process_of = [device.process_index]
        self.split = PartitionSpec(self.name)

    def map(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        return function

    def stack(self, parts: Sequence[Any]) -> jax.Array:
        (part,) = parts
        with jax.default_device(self.devices[0]):
            return jax.device_put(part, may_alias=False)  # a program may return its argument unchanged

    def parts(self, stacked: jax.Array) -> list[jax.Array]:
        return [stacked]

    def replicate(self, value: Any) -> jax.Array:
        with jax.default_device(self.devices[0]):
            return jax.device_put(value)

    def compile(self, function: Any, **options: Any) -> Any:
        compiled = jax.jit(function, **options)

        def call(*args: Any) -> Any:
            with jax.default_device(self.devices[0]):  # else arguments that are not committed go elsewhere
                return compiled(*args)

        return call

    def across(self, function: Callable[[str, jax.Array], jax.Array], in_specs: Any) -> Any:
        return self.compile(functools.partial(function, self.name))

    def own_slice(self, flat: jax.Array) -> jax.Array:
        return flat

    def gather(self, shard: jax.Array) -> jax.Array:
        return shard
