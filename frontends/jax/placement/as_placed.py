"""Parameters as they were placed: on one device, or sharded over any axes of any mesh.

Each part of a parameter is a parameter to the core: the process that holds it updates it, and sends it to all of its
devices that hold it. Nothing is exchanged but the norm.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from offload_core.device.host_ranks import HostRanks
from offload_core.device.protocols import Device
from offload_core.dtypes import BY_NUMPY, ElementType
from offload_core.errors import ConfigError, GradientError, ParameterError
from offload_core.layout.partition import ParamSpec
from offload_core.memory.host_memory import HostMemory
from offload_core.plans.at_once import Held, held_shards
from offload_core.ranks.collectives import Collectives, SingleRank, merged

from ..devices.device import JaxDevice, ParameterBuffers
from ..devices.mesh.axis import MeshAxis
from ..devices.mesh.places import Places
from ..devices.mesh.processes import JaxProcesses
from ..devices.mesh.tensors import Donated, MeshGradient, MeshParameter
from ..tree.memory_kinds import beside_its_device, in_device_memory
from ..tree.shards import local_shards, of_parts, on_devices
from ..tree.trees import from_numpy, put, to_numpy
from ..tree.wrapped_tree import Leaf
from .functions import Compiled, Compute, on_one_device, on_several_devices


class AsPlaced:
    """Parameters stay where they are.

    On CPU devices gradients are read where they lie, and new parameters are made from host buffers. Elsewhere buckets
    are packed on the device that holds them, copied while others are updated, and unpacked there.

    Args:
        leaves: the parameters.
        on_host: True if the devices' memory is the host's.
    """

    per_rank = False

    def __init__(self, leaves: Sequence[Any], threads: int, *, on_host: bool) -> None:
        self.on_host = on_host
        self._threads = threads
        meshes = {tuple(_in_order(_sharding_of(leaf))) for leaf in leaves}
        everywhere = max(meshes, key=len)
        self._several = len(everywhere) > 1
        """True if parameters are sharded or replicated over several devices."""
        self._everywhere = everywhere
        here = [device for devices in meshes for device in devices if device.process_index == jax.process_index()]
        self._places = sorted(set(here), key=lambda device: device.id)
        if not here:
            raise ConfigError("params: no device of this process holds a part of them, expected one in each process")
        processes = _processes(everywhere)
        self.device: Device = (
            HostRanks(JaxDevice(), processes=processes) if on_host else Places(self._places, processes, threads=threads)
        )
        self.alone = processes.world_size == 1

    # --- where parameters lie ------------------------------------------------------------------------

    def place(self, path: str, leaf: Any) -> jax.Array:
        array = leaf if isinstance(leaf, jax.Array) else jax.device_put(np.array(leaf))  # which it may alias
        if self._several and array.sharding.device_set != set(self._everywhere):
            raise ParameterError(
                f"{path} lies on {_names(array.devices())}, and other parameters on {_names(self._everywhere)}; "
                "expected all on the same devices: jax.device_put(array, NamedSharding(mesh, PartitionSpec())) "
                "replicates one"
            )
        return array

    def leaf(self, position: int, path: str, value: Any, dtype: ElementType, first_param: int) -> Leaf:
        shards = local_shards(_sharding_of(value), tuple(value.shape), position)
        params = range(first_param, first_param + len(shards))
        return Leaf(position, path, tuple(value.shape), dtype.numpy, params, shards=shards)

    def specs(self, leaf: Leaf, dtype: ElementType) -> list[ParamSpec]:
        return [
            ParamSpec(leaf.path, shard.numel, dtype, elements=shard, place=place, counted=shard.counted)
            for shard in leaf.shards
            for place in [0 if self.on_host else self._places.index(shard.primary)]
        ]

    def cast(self, leaf: Leaf, array: jax.Array) -> jax.Array:
        new = array.astype(leaf.dtype)  # no longer of a weak type, either
        return jax.device_put(new, array.sharding) if self._several else new

    def restored(self, leaf: Leaf, value: np.ndarray, like: jax.Array) -> jax.Array:
        return from_numpy(value, like)

    def pass_through(self, leaf: Any) -> Any:
        return leaf

    # --- memory --------------------------------------------------------------------------------------

    def held(self, leaves: Sequence[Leaf], specs: Sequence[ParamSpec]) -> list[Held]:
        if self.on_host:
            # The buffers are the parameters themselves, so that they count as device memory.
            self.buffer_memory = HostMemory(self._threads)
            self.buffers = ParameterBuffers(self.buffer_memory, specs)
        found = []
        for leaf in leaves:
            copies = [len(shard.devices) for shard in leaf.shards]
            found.append(held_shards(leaf.params, [specs[i] for i in leaf.params], copies, on_host=self.on_host))
        return found

    # --- the pipeline's tensors ----------------------------------------------------------------------

    def start(self, leaves: Sequence[Leaf], arrays: Sequence[jax.Array]) -> list[Any]:
        found: list[Any] = []
        for leaf, array in zip(leaves, arrays, strict=True):
            found += [part if self.on_host else MeshParameter(part) for part in self._parts(leaf, array)]
        return found

    def started(self, arrays: Sequence[jax.Array], tensors: Sequence[Any]) -> list[jax.Array]:
        return list(arrays)

    def check_gradient(self, leaf: Leaf, gradient: Any, like: jax.Array, *, unreduced: bool) -> None:
        if unreduced:
            raise GradientError(
                f"{leaf.path}: RankGradients without a mesh; expected plain gradients, or parameters of "
                "wrap(params, mesh=mesh)"
            )
        if not isinstance(gradient, jax.Array) or gradient.sharding.device_set == like.sharding.device_set:
            return
        movable = gradient.is_fully_addressable and not gradient.committed
        if movable or (self.on_host and not self._several and len(gradient.devices()) == 1):
            return  # a CPU device's is read wherever it lies
        raise GradientError(
            f"{leaf.path}: gradient lies on {_names(gradient.devices())} and its parameter on "
            f"{_names(like.devices())}; expected both on the same devices: compute the gradients of offloaded.params"
        )

    def as_gradient(self, leaf: Leaf, gradient: Any, like: jax.Array, *, unreduced: bool, donate: bool) -> list[Any]:
        array = self._beside(gradient, like)
        parts = self._parts(leaf, array)
        if self.on_host:
            return list(parts)  # they are read when the update is made
        if not self._several:
            # An array of this device alone, since arrays of different meshes cannot be packed together. It is not
            # copied if it lies on the device already.
            parts = [jax.device_put(part.addressable_data(0), self._places[0]) for part in parts]
        used = Donated((gradient, array, *parts), sum(part.size for part in parts)).use if donate else None
        return [MeshGradient(part, False, part.size, BY_NUMPY[np.dtype(like.dtype)], used) for part in parts]

    def _beside(self, gradient: Any, like: jax.Array) -> jax.Array:
        """Return the gradient on the devices of its parameter, cut as the parameter is."""
        to = in_device_memory(like.sharding)
        if not isinstance(gradient, jax.Array):
            return put(gradient, to)
        if gradient.sharding.is_equivalent_to(to, gradient.ndim):
            return gradient
        if self.on_host and not self._several and gradient.committed:
            return gradient
        if gradient.is_fully_addressable:
            return jax.device_put(gradient, to)
        return jax.jit(_same, out_shardings=to)(gradient)

    def _parts(self, leaf: Leaf, array: jax.Array) -> list[jax.Array]:
        """Return the array's part of each of the leaf's parameters."""
        if not self._several:
            return [array]
        return self.parts(leaf, array)

    def targets(self, leaves: Sequence[Leaf], arrays: Sequence[jax.Array]) -> list[Any]:
        return self.buffers.take() if self.on_host else self.start(leaves, arrays)

    def written(self, leaf: Leaf, targets: Sequence[Any], like: jax.Array) -> jax.Array:
        if not self._several:
            [target] = targets
            if self.on_host:
                return jax.device_put(target.reshape(like.shape), like.sharding if like.committed else None)
            assert isinstance(self.device, Places)
            empty = self.device.places[0].axis.stack  # an empty array is in no bucket
            new = target.array if like.size else empty([np.empty(like.shape, like.dtype)])
            return jax.device_put(new, like.sharding) if like.committed else new
        parts = {
            shard.box: target.reshape(shard.local_shape) if self.on_host else target.array
            for shard, target in zip(leaf.shards, targets, strict=True)
        }
        return of_parts(like.shape, like.sharding, parts)

    # --- whole values --------------------------------------------------------------------------------

    def to_numpy(self, leaf: Leaf | None, array: jax.Array) -> np.ndarray:
        if array.is_fully_addressable or array.is_fully_replicated:
            return to_numpy(array if array.is_fully_addressable else array.addressable_data(0))
        on = on_devices(array)
        shards = local_shards(array.sharding, array.shape, 0) if leaf is None else leaf.shards
        parts = [(shard.index, np.asarray(on[shard.primary])) for shard in shards if shard.counted]
        return merged(self.device.collectives, array.shape, np.dtype(array.dtype), parts, "parameters")

    def joined(self, leaf: Leaf, parts: Sequence[np.ndarray], what: str) -> np.ndarray:
        if not self._several:
            return parts[0].reshape(leaf.shape)
        pairs = zip(leaf.shards, parts, strict=True)
        shards = [(shard.index, part.reshape(shard.local_shape)) for shard, part in pairs if shard.counted]
        return merged(self.device.collectives, leaf.shape, parts[0].dtype, shards, what)

    def cut(self, leaf: Leaf, whole: np.ndarray) -> list[np.ndarray]:
        return [whole.reshape(leaf.shape)[shard.index].reshape(-1) for shard in leaf.shards]

    def spread(self, leaf: Leaf, parts: Sequence[np.ndarray], like: jax.Array) -> jax.Array:
        sharding = beside_its_device(like.sharding)
        pairs = zip(leaf.shards, parts, strict=True)
        return of_parts(like.shape, sharding, {shard.box: part.reshape(shard.local_shape) for shard, part in pairs})

    def parts(self, leaf: Leaf, array: jax.Array) -> list[jax.Array]:
        on = on_devices(array)
        return [on[shard.primary] for shard in leaf.shards]

    def compile(self, compute: Compute, parameters: Sequence[Leaf], *, in_specs: Any, check_vma: bool) -> Compiled:
        if in_specs is not None:
            raise ConfigError("value_and_grad: in_specs without a mesh; expected wrap(params, mesh=mesh)")
        return on_several_devices(compute) if self._several else on_one_device(compute)


def _same(array: jax.Array) -> jax.Array:
    return array


def _sharding_of(leaf: Any) -> jax.sharding.Sharding:
    """Return the place of a leaf. JAX puts NumPy's on the default device, or on the mesh that the caller has set."""
    return (leaf if isinstance(leaf, jax.Array) else jax.device_put(np.float32(0))).sharding


def _in_order(sharding: jax.sharding.Sharding) -> list[jax.Device]:
    """Return the devices of a sharding, in its mesh's order."""
    if isinstance(sharding, NamedSharding):
        return list(sharding.mesh.devices.flat)
    return sorted(sharding.device_set, key=lambda device: device.id)


def _names(devices: Iterable[jax.Device]) -> str:
    found = sorted(devices, key=lambda device: device.id)
    one = ", ".join(str(device) for device in found[:4])
    return one if len(found) <= 4 else f"{one}, … ({len(found)} devices)"


def _processes(devices: Sequence[jax.Device]) -> Collectives:
    """Return the collectives between the processes that hold parameters."""
    if all(device.process_index == jax.process_index() for device in devices):
        return SingleRank()
    return JaxProcesses(MeshAxis(Mesh(np.array(devices), ("all",)), None))
