"""Parameters as they were placed: on one device, or sharded over any axes of any mesh.

Each part of a parameter is a parameter to the core: the process that holds it updates it, and sends it to all of its
devices that hold it. Nothing is exchanged but the norm, and with Muon the matrices that are cut.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from offload_core.device.protocols import Device
from offload_core.dtypes import BY_NUMPY, ElementType
from offload_core.errors import ConfigError, GradientError, ParameterError
from offload_core.layout.partition import ParamSpec
from offload_core.memory.host_memory import HostMemory
from offload_core.memory.plan import HOST, ArrayBytes
from offload_core.ranks.collectives import Collectives, SingleRank, merged
from offload_core.rules import Matrix

from ..devices.device import ParameterBuffers
from ..devices.mesh.axis import MeshAxis
from ..devices.mesh.cut_matrices import CutMatrices
from ..devices.mesh.places import HostParts, Places
from ..devices.mesh.processes import JaxProcesses
from ..devices.mesh.tensors import HostGradient, MeshParameter, delete
from ..tree.memory_kinds import (
    beside_its_device,
    check_host_memory,
    has_host_memory,
    in_device_memory,
    in_host_memory,
    lies_as,
    start_to_host,
)
from ..tree.shards import ArrayShard, local_shards, of_parts, on_devices
from ..tree.trees import from_numpy, put, to_numpy
from ..tree.wrapped_tree import Leaf
from .functions import Asked, Compiled, Compute, gathering, leaving, on_one_device, on_several_devices


class AsPlaced(ABC):
    """Parameters stay where they are.

    How bytes cross to the core is left to :class:`OnHosts` and :class:`OnDevices`; what arrays are on one device and on
    several, to :class:`OneDevice` and :class:`SeveralDevices`.

    Args:
        leaves: the parameters.
    """

    per_rank = False
    exchanges_matrices = False
    on_host: bool

    def __init__(self, leaves: Sequence[Any], threads: int) -> None:
        self._threads = threads
        meshes = {tuple(_in_order(_sharding_of(leaf))) for leaf in leaves}
        everywhere = max(meshes, key=len)
        here = [device for devices in meshes for device in devices if device.process_index == jax.process_index()]
        self._places = sorted(set(here), key=lambda device: device.id)
        if not here:
            raise ConfigError("params: no device of this process holds a part of them, expected one in each process")
        processes = _processes(everywhere)
        self.cut_matrices = CutMatrices()
        self.device = self._device(processes)
        self.alone = processes.world_size == 1
        self._arrays = OneDevice() if len(everywhere) == 1 else SeveralDevices(everywhere, processes)

    @abstractmethod
    def _device(self, processes: Collectives) -> Device:
        """Return the core's device, whose ranks exchange between these processes."""

    # --- where parameters lie ------------------------------------------------------------------------

    def place(self, path: str, leaf: Any) -> jax.Array:
        array = leaf if isinstance(leaf, jax.Array) else jax.device_put(np.array(leaf))  # which it may alias
        self._arrays.check(path, array)
        return array

    def sharding(self, leaf: Any, *, trained: bool) -> jax.sharding.Sharding | None:
        return None

    def leaf(
        self, position: int, path: str, value: Any, dtype: ElementType, first_param: int, matrix: Matrix | None
    ) -> Leaf:
        shape, sharding = tuple(value.shape), _sharding_of(value)
        shards = local_shards(sharding, shape, position)
        leaf = Leaf(
            position, path, shape, dtype.numpy, range(first_param, first_param + len(shards)), matrix, shards=shards
        )
        if matrix is not None and sharding.shard_shape(shape)[-2:] != matrix:
            self.cut_matrices.add(leaf, sharding)
            self.alone, self.exchanges_matrices = False, True  # exchanges must not cross those of the program
        return leaf

    def specs(self, leaf: Leaf, dtype: ElementType) -> list[ParamSpec]:
        cut = self.cut_matrices.of.get(leaf.position)
        return [
            ParamSpec(
                leaf.path,
                shard.numel,
                dtype,
                elements=shard,
                place=self._place(shard.primary) if cut is None else 0,
                counted=shard.counted,
                matrix=leaf.matrix,
                cut_at=None if cut is None else cut.part_numel,
                together=None if cut is None else leaf.position,
            )
            for shard in leaf.shards
        ]

    @abstractmethod
    def _place(self, device: jax.Device) -> int:
        """Return the number of this process's memory that a device reads."""

    def cast(self, leaf: Leaf, array: jax.Array) -> jax.Array:
        return self._arrays.cast(array, leaf.dtype)

    def restored(self, leaf: Leaf, value: np.ndarray, like: jax.Array) -> jax.Array:
        return from_numpy(value, like)

    def pass_through(self, leaf: Any) -> Any:
        return leaf

    # --- memory --------------------------------------------------------------------------------------

    def held(self, leaves: Sequence[Leaf], specs: Sequence[ParamSpec]) -> list[ArrayBytes]:
        found = []
        for leaf in leaves:
            copies = [len(shard.devices) for shard in leaf.shards]
            own = [specs[i] for i in leaf.params]
            found.append(ArrayBytes.of_shards(leaf.params, own, copies, on_host=self.on_host, leaves=not self.on_host))
        return found

    # --- the core's tensors ----------------------------------------------------------------------

    def start(self, leaves: Sequence[Leaf], arrays: Sequence[jax.Array]) -> list[Any]:
        found: list[Any] = []
        for leaf, array in zip(leaves, arrays, strict=True):
            found += map(self._tensor, self._arrays.parts(leaf, array))
        return found

    @abstractmethod
    def _tensor(self, part: jax.Array) -> Any:
        """Return an array of one device as the core reads and writes it."""

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
        if movable or self._reads(gradient):
            return
        raise GradientError(
            f"{leaf.path}: gradient lies on {_names(gradient.devices())} and its parameter on "
            f"{_names(like.devices())}; expected both on the same devices: compute the gradients of offloaded.params"
        )

    def _reads(self, gradient: jax.Array) -> bool:
        """True if a gradient is read where it lies, though its parameter lies elsewhere."""
        return False

    def _beside(self, gradient: Any, like: jax.Array) -> jax.Array:
        """Return the gradient on the devices of its parameter, cut as the parameter is."""
        to = in_device_memory(like.sharding)
        if isinstance(gradient, jax.Array) and lies_as(gradient, like):
            return gradient
        if not isinstance(gradient, jax.Array):
            return put(gradient, to)
        if gradient.sharding.is_equivalent_to(to, gradient.ndim) or (gradient.committed and self._reads(gradient)):
            return gradient
        if gradient.is_fully_addressable:
            return jax.device_put(gradient, to)
        return jax.jit(_same, out_shardings=to)(gradient)

    def _on_host(self, leaf: Leaf, gradient: Any, like: jax.Array, *, donate: bool) -> list[jax.Array]:
        """Start to copy a gradient's parts to host memory, unless they are there. Delete it if it is donated."""
        array = self._beside(gradient, like)
        parts = self._arrays.parts(leaf, array)
        copies = list(map(start_to_host, parts))
        if donate and all(map(in_host_memory, copies)) and not any(map(in_host_memory, parts)):
            delete((gradient, array, *parts))  # the copies keep the memory until they have read it
        return copies

    def written(self, leaf: Leaf, targets: Sequence[Any], like: jax.Array) -> jax.Array:
        parts = [self._value(target, shard) for target, shard in zip(targets, leaf.shards, strict=True)]
        return self._arrays.of_parts(leaf, parts, like)

    @abstractmethod
    def _value(self, target: Any, shard: ArrayShard) -> Any:
        """Return a part of a parameter, in its own shape, that the core has written."""

    # --- whole values --------------------------------------------------------------------------------

    def to_numpy(self, leaf: Leaf | None, array: jax.Array) -> np.ndarray:
        if array.is_fully_addressable or array.is_fully_replicated:
            return to_numpy(array if array.is_fully_addressable else array.addressable_data(0))
        on = on_devices(array)
        shards = local_shards(array.sharding, array.shape, 0) if leaf is None else leaf.shards
        parts = [(shard.index, np.asarray(on[shard.primary])) for shard in shards if shard.counted]
        return merged(self.device.collectives, array.shape, np.dtype(array.dtype), parts, "parameters")

    def joined(self, leaf: Leaf, parts: Sequence[np.ndarray], what: str) -> np.ndarray:
        return self._arrays.joined(leaf, parts, what)

    def cut(self, leaf: Leaf, whole: np.ndarray) -> list[np.ndarray]:
        return [whole.reshape(leaf.shape)[shard.index].reshape(-1) for shard in leaf.shards]

    def spread(self, leaf: Leaf, parts: Sequence[np.ndarray], like: jax.Array) -> jax.Array:
        sharding = beside_its_device(like.sharding)
        pairs = zip(leaf.shards, parts, strict=True)
        return of_parts(like.shape, sharding, {shard.box: part.reshape(shard.local_shape) for shard, part in pairs})

    def parts(self, leaf: Leaf, array: jax.Array) -> list[jax.Array]:
        on = on_devices(array)
        return [on[shard.primary] for shard in leaf.shards]

    def compile(self, compute: Compute, parameters: Sequence[Leaf], asked: Asked) -> Compiled:
        if asked.in_specs is not None:
            raise ConfigError("value_and_grad: in_specs without a mesh; expected wrap(params, mesh=mesh)")
        leave = [self._leaves(leaf, asked) for leaf in parameters]
        program = gathering(compute, leave) if asked.gathers else leaving(compute, leave)
        return self._arrays.compile(compute, program, leave)

    def _leaves(self, leaf: Leaf, asked: Asked) -> bool:
        """True if a program copies a parameter's gradient to host memory."""
        return False


class OnHosts(AsPlaced):
    """On CPU devices: gradients are read where they lie, and new parameters are made from host buffers."""

    on_host = True

    def _device(self, processes: Collectives) -> Device:
        return HostParts(self.cut_matrices, processes)

    def _place(self, device: jax.Device) -> int:
        return 0

    def held(self, leaves: Sequence[Leaf], specs: Sequence[ParamSpec]) -> list[ArrayBytes]:
        # The buffers are the parameters themselves, so that they count as device memory.
        self.buffer_memory = HostMemory(self._threads)
        self.buffers = ParameterBuffers(self.buffer_memory, specs)
        return super().held(leaves, specs)

    def _tensor(self, part: jax.Array) -> Any:
        return part

    def _reads(self, gradient: jax.Array) -> bool:
        return self._arrays.read_anywhere and len(gradient.devices()) == 1

    def as_gradient(self, leaf: Leaf, gradient: Any, like: jax.Array, *, unreduced: bool, donate: bool) -> list[Any]:
        return self._arrays.parts(leaf, self._beside(gradient, like))  # read when the update is made

    def targets(self, leaves: Sequence[Leaf], arrays: Sequence[jax.Array], *, donate: bool) -> list[Any]:
        return self.buffers.take()

    def _value(self, target: Any, shard: ArrayShard) -> Any:
        return target.reshape(shard.local_shape)


class InHostMemory(OnHosts):
    """In the host memory beside devices, from where the model brings each parameter to its device. Gradients come to
    host memory, too, and new parameters are made from host buffers."""

    def _device(self, processes: Collectives) -> Device:
        self.on_host = self._places[0].platform == "cpu"
        check_host_memory(self._places)
        return super()._device(processes)

    def place(self, path: str, leaf: Any) -> jax.Array:
        array = super().place(path, leaf)
        return jax.device_put(array, beside_its_device(array.sharding))

    def sharding(self, leaf: Any, *, trained: bool) -> jax.sharding.Sharding | None:
        return beside_its_device(_sharding_of(leaf)) if trained else None

    def cast(self, leaf: Leaf, array: jax.Array) -> jax.Array:
        if array.dtype == leaf.dtype and not array.weak_type:
            return array
        parts = [np.asarray(part).astype(leaf.dtype) for part in self._arrays.parts(leaf, array)]
        return self._arrays.of_parts(leaf, parts, array)

    def held(self, leaves: Sequence[Leaf], specs: Sequence[ParamSpec]) -> list[ArrayBytes]:
        # The next values are in a buffer. If the devices are no CPUs, JAX copies them from it to memory of its own.
        copies = 1 if self.on_host else 2
        return [replace(each, where=HOST, following=copies * each.following) for each in super().held(leaves, specs)]

    def as_gradient(self, leaf: Leaf, gradient: Any, like: jax.Array, *, unreduced: bool, donate: bool) -> list[Any]:
        return self._on_host(leaf, gradient, like, donate=donate)

    def _leaves(self, leaf: Leaf, asked: Asked) -> bool:
        return True

    def compile(self, compute: Compute, parameters: Sequence[Leaf], asked: Asked) -> Compiled:
        if asked.keep_gradients:
            raise ConfigError(
                "value_and_grad: keep_gradients=True with offload_param='cpu', where gradients come to host memory as "
                "the parameters do; expected keep_gradients=False"
            )
        return super().compile(compute, parameters, asked._replace(gathers=True))


class OnDevices(AsPlaced):
    """On devices with memory of their own: gradients are copied to host memory, where kernels read them. Buckets of new
    parameters are copied to the device that holds them while others are updated, and unpacked there."""

    on_host = False

    def _device(self, processes: Collectives) -> Device:
        self._ranks = Places(self._places, processes, self.cut_matrices, threads=self._threads)
        return self._ranks

    def _leaves(self, leaf: Leaf, asked: Asked) -> bool:
        if asked.keep_gradients or not has_host_memory(self._places):
            return False
        if self._places[0].platform == "tpu" and not asked.gathers:
            return False  # there XLA copies all gradients in the end, and takes more memory than if they stay
        return all(len(shard.devices) == 1 for shard in leaf.shards)  # of replicas each device would copy its own

    def _place(self, device: jax.Device) -> int:
        return self._places.index(device)

    def _tensor(self, part: jax.Array) -> Any:
        return MeshParameter(part)

    def as_gradient(self, leaf: Leaf, gradient: Any, like: jax.Array, *, unreduced: bool, donate: bool) -> list[Any]:
        copies = self._on_host(leaf, gradient, like, donate=donate)
        return [HostGradient(copy, copy.size, BY_NUMPY[np.dtype(copy.dtype)]) for copy in copies]

    def targets(self, leaves: Sequence[Leaf], arrays: Sequence[jax.Array], *, donate: bool) -> list[Any]:
        tensors = self.start(leaves, arrays)
        return [tensor.donating() for tensor in tensors] if donate else tensors

    def _value(self, target: Any, shard: ArrayShard) -> Any:
        if shard.numel:
            return target.array
        # It is in no bucket, and the array that it was may be donated by now.
        axis = self._ranks.places[self._place(shard.primary)].axis
        return axis.stack([np.empty(shard.local_shape, target.array.dtype)])


class OneDevice:
    """Arrays of one device, each its only part. One that is not committed to its device stays so."""

    read_anywhere = True
    """True if the host may read a gradient from another device than its parameter's."""

    def check(self, path: str, array: jax.Array) -> None:
        """Raise :class:`ParameterError` if an array lies elsewhere than all others."""

    def cast(self, array: jax.Array, dtype: np.dtype) -> jax.Array:
        """Return the array in this element type, no longer of a weak type."""
        return array.astype(dtype)

    def parts(self, leaf: Leaf, array: jax.Array) -> list[jax.Array]:
        """Return the array's part of each of the leaf's parameters."""
        return [array]

    def of_parts(self, leaf: Leaf, parts: Sequence[Any], like: jax.Array) -> jax.Array:
        """Return an array of these parts that lies as ``like``. It may share their memory."""
        [part] = parts
        return jax.device_put(part, like.sharding if like.committed else None)

    def joined(self, leaf: Leaf, parts: Sequence[np.ndarray], what: str) -> np.ndarray:
        """As ``Placement.joined``."""
        return parts[0].reshape(leaf.shape)

    def compile(self, compute: Compute, program: Compute, leave: Sequence[bool]) -> Compiled:
        """As :func:`on_several_devices`."""
        return on_one_device(compute, program)


class SeveralDevices(OneDevice):
    """Arrays that are sharded or replicated over several devices.

    Args:
        devices: all of them, of all processes.
    """

    read_anywhere = False

    def __init__(self, devices: Sequence[jax.Device], processes: Collectives) -> None:
        self._devices = devices
        self._processes = processes

    def check(self, path: str, array: jax.Array) -> None:
        if array.sharding.device_set != set(self._devices):
            raise ParameterError(
                f"{path} lies on {_names(array.devices())}, and other parameters on {_names(self._devices)}; "
                "expected all on the same devices: jax.device_put(array, NamedSharding(mesh, PartitionSpec())) "
                "replicates one"
            )

    def cast(self, array: jax.Array, dtype: np.dtype) -> jax.Array:
        return jax.device_put(array.astype(dtype), array.sharding)

    def parts(self, leaf: Leaf, array: jax.Array) -> list[jax.Array]:
        on = on_devices(array)
        return [on[shard.primary] for shard in leaf.shards]

    def of_parts(self, leaf: Leaf, parts: Sequence[Any], like: jax.Array) -> jax.Array:
        boxes = (shard.box for shard in leaf.shards)
        return of_parts(like.shape, like.sharding, dict(zip(boxes, parts, strict=True)))

    def joined(self, leaf: Leaf, parts: Sequence[np.ndarray], what: str) -> np.ndarray:
        pairs = zip(leaf.shards, parts, strict=True)
        shards = [(shard.index, part.reshape(shard.local_shape)) for shard, part in pairs if shard.counted]
        return merged(self._processes, leaf.shape, parts[0].dtype, shards, what)

    def compile(self, compute: Compute, program: Compute, leave: Sequence[bool]) -> Compiled:
        return on_several_devices(compute, program, leave)


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


def processes_of(sharding: jax.sharding.Sharding) -> Collectives:
    """Return the collectives between the processes that hold parts of an array."""
    return _processes(_in_order(sharding))


def _processes(devices: Sequence[jax.Device]) -> Collectives:
    """Return the collectives between the processes that hold parameters."""
    if all(device.process_index == jax.process_index() for device in devices):
        return SingleRank()
    return JaxProcesses(MeshAxis(Mesh(np.array(devices), ("all",)), None))
