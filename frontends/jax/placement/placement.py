"""The devices on which parameters lie, one or those along a mesh axis, and their ways to them and back."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from offload_core.config.options import OffloadConfig
from offload_core.device.host_ranks import HostRanks
from offload_core.device.protocols import Device
from offload_core.dtypes import BY_NUMPY, ElementType
from offload_core.errors import ConfigError, GradientError, ParameterError
from offload_core.layout.partition import ParamSpec
from offload_core.memory.host_memory import HostMemory
from offload_core.memory.near import work_near
from offload_core.memory.pinning import DRIVERS
from offload_core.memory.plan import PlanRow

from ..device import JaxDevice, ParameterBuffers, on_cpu
from ..mesh.mesh import JaxMeshDevice, LoneDevice, MeshAxis, MeshGradient, MeshParameter
from ..tree.shard_layout import ShardLayout
from ..tree.trees import from_numpy
from .on_mesh import SMALLER, Compiled, Compute, OnMesh, replicated_rows
from .sharded import ShardedOnMesh
from .whole import Whole


class Placement(Protocol):
    """The differences between one device and a mesh."""

    device: Device

    def place(self, path: str, leaf: Any) -> jax.Array:
        """The leaf, where parameters lie; raises :class:`ParameterError` if it cannot lie there."""
        ...

    def layout(self, leaf: Any) -> ShardLayout | None:
        """The cut of a parameter over ranks, before :meth:`place` or after it; None: it is not cut."""
        ...

    def cast(self, array: jax.Array, dtype: ElementType, layout: ShardLayout | None) -> jax.Array:
        """A placed parameter in another element type."""
        ...

    def restored(self, value: np.ndarray, like: jax.Array, layout: ShardLayout | None) -> jax.Array:
        """A value of :meth:`to_numpy` as an array that lies as the parameter ``like``."""
        ...

    def to_numpy(self, array: jax.Array, layout: ShardLayout | None) -> np.ndarray:
        """A parameter's whole value; with several processes all must call this."""
        ...

    def pass_through(self, leaf: Any) -> Any:
        """A leaf that is not trained, put where functions of :meth:`compile` need not move it."""
        ...

    on_host: bool
    """True if the devices' memory is the host's."""

    def plan(
        self, specs: Sequence[ParamSpec], layouts: Sequence[ShardLayout | None], memory: HostMemory
    ) -> list[PlanRow]:
        """The memory that training these parameters takes besides the pipeline's host memory.

        It is called first of all. Gradients come all at once. New parameters are other arrays than the old ones, which
        live until all new ones are there.

        Args:
            memory: the host memory to allocate in, if not all is device memory.
        """
        ...

    def start(self, arrays: Sequence[jax.Array]) -> list[Any]:
        """The tensors from which the pipeline reads start values."""
        ...

    def started(self, tensors: Sequence[Any]) -> list[jax.Array]:
        """The arrays of the tensors of :meth:`start`, which the pipeline has made alike on all ranks."""
        ...

    def as_gradient(
        self, path: str, gradient: jax.Array, like: jax.Array, layout: ShardLayout | None, *, unreduced: bool
    ) -> Any:
        """A gradient of ``like`` as the pipeline takes it; raises :class:`GradientError` if it cannot be read."""
        ...

    def targets(self, arrays: Sequence[jax.Array]) -> list[Any]:
        """The tensors to which the pipeline writes the next values of these parameters."""
        ...

    def written(self, target: Any, like: jax.Array) -> jax.Array:
        """The parameter that was written to ``target``, in the shape and place of ``like``."""
        ...

    def compile(self, compute: Compute, *, in_specs: Any, check_vma: bool) -> Compiled:
        """Compile a computation for these devices."""
        ...

    gradients_per_rank: bool
    """True if a function of :meth:`compile` returns each rank's own gradients (:class:`RankGradients`)."""


def placement_for(config: OffloadConfig, mesh: Mesh | None, axis: str | None, leaves: Sequence[Any]) -> Placement:
    """The placement on the axis of a mesh, or without a mesh on the device where the leaves lie."""
    if mesh is not None:
        mesh_axis = MeshAxis(mesh, axis)
        work_near(config, _gpus(mesh_axis.devices[rank] for rank in mesh_axis.ranks), DRIVERS)
        return (ShardedOnMesh if config.stage == 3 else OnMesh)(mesh_axis, config)
    if config.offload_param is not None:
        raise ConfigError(
            f"offload_param={config.offload_param!r} without a mesh; expected wrap(params, mesh=mesh), also for one "
            "device: jax.make_mesh((1,), ('dp',))"
        )
    if axis is not None:
        raise ConfigError(f"axis: got {axis!r} and no mesh; expected wrap(params, mesh=mesh, axis={axis!r})")
    arrays = [leaf if isinstance(leaf, jax.Array) else jnp.zeros(()) for leaf in leaves]  # JAX places NumPy's
    devices = {device for array in arrays for device in array.devices()}
    work_near(config, _gpus(devices), DRIVERS)
    if len(devices) > 1 or on_cpu(arrays[0]):
        return OneDevice(config.threads, on_host=on_cpu(arrays[0]))
    return OneAccelerator(devices.pop(), config.threads)


def _gpus(devices: Iterable[jax.Device]) -> list[int]:
    """The numbers that drivers have for those of the devices that are GPUs."""
    return [device.local_hardware_id for device in devices if device.platform == "gpu"]


class WithoutMesh(Whole):
    """Each parameter lies on one device."""

    gradients_per_rank = False

    def place(self, path: str, leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and len(leaf.devices()) > 1:
            raise ParameterError(
                f"{path} lies on {len(leaf.devices())} devices; expected one, or wrap(params, mesh=mesh), which "
                "replicates the parameters on the mesh"
            )
        return jnp.asarray(leaf)

    def restored(self, value: np.ndarray, like: jax.Array, layout: ShardLayout | None) -> jax.Array:
        return from_numpy(value, like)

    def pass_through(self, leaf: Any) -> Any:
        return leaf

    def compile(self, compute: Compute, *, in_specs: Any, check_vma: bool) -> Compiled:
        if in_specs is not None:
            raise ConfigError("value_and_grad: in_specs without a mesh; expected wrap(params, mesh=mesh)")
        return jax.jit(compute, static_argnums=2)


class OneDevice(WithoutMesh):
    """Gradients are read where they lie, and new parameters are made from host buffers; no buckets travel.

    It is for a CPU device, and for parameters that lie on several devices, each on one.
    """

    def __init__(self, threads: int, *, on_host: bool) -> None:
        self.device: Device = HostRanks(JaxDevice())
        self.on_host = on_host
        self._threads = threads

    def plan(
        self, specs: Sequence[ParamSpec], layouts: Sequence[ShardLayout | None], memory: HostMemory
    ) -> list[PlanRow]:
        # On the CPU the buffers are the device parameters themselves, so that they count as device memory.
        self.buffer_memory = HostMemory(self._threads) if self.on_host else memory
        self.buffers = ParameterBuffers(self.buffer_memory, specs)
        n_bytes = 2 * self.buffers.generation_bytes
        rows = replicated_rows(specs, 1)
        return rows if self.on_host else [PlanRow("parameter buffers", "host", n_bytes, SMALLER), *rows]

    def start(self, arrays: Sequence[jax.Array]) -> list[Any]:
        return list(arrays)

    def started(self, tensors: Sequence[Any]) -> list[jax.Array]:
        return list(tensors)

    def as_gradient(
        self, path: str, gradient: jax.Array, like: jax.Array, layout: ShardLayout | None, *, unreduced: bool
    ) -> Any:
        _check_plain(path, gradient, unreduced=unreduced)
        if not self.on_host:
            gradient.copy_to_host_async()
        return gradient

    def targets(self, arrays: Sequence[jax.Array]) -> list[Any]:
        return self.buffers.take()

    def written(self, target: Any, like: jax.Array) -> jax.Array:
        return jax.device_put(target.reshape(like.shape), like.sharding if like.committed else None)


class OneAccelerator(WithoutMesh):
    """One device with memory of its own. Users see any device; the core sees a mesh of this device alone.

    Buckets are packed on the device, copied while others are summed or updated, and unpacked on the device.
    """

    def __init__(self, device: jax.Device, threads: int) -> None:
        self._lone = LoneDevice(device)
        self.device: Device = JaxMeshDevice(self._lone, threads=threads)
        self.on_host = False

    def plan(
        self, specs: Sequence[ParamSpec], layouts: Sequence[ShardLayout | None], memory: HostMemory
    ) -> list[PlanRow]:
        # JAX allocates this, so that the pipeline does not count it: all buckets may be on their way at once.
        n_bytes = sum(spec.numel * spec.dtype.itemsize for spec in specs)
        return [PlanRow("gradients on their way", "host", n_bytes, SMALLER, brief=True), *replicated_rows(specs, 1)]

    def start(self, arrays: Sequence[jax.Array]) -> list[Any]:
        return [MeshParameter(array) for array in arrays]

    def started(self, tensors: Sequence[Any]) -> list[jax.Array]:
        return [tensor.array for tensor in tensors]

    def targets(self, arrays: Sequence[jax.Array]) -> list[Any]:
        return self.start(arrays)

    def as_gradient(
        self, path: str, gradient: jax.Array, like: jax.Array, layout: ShardLayout | None, *, unreduced: bool
    ) -> Any:
        _check_plain(path, gradient, unreduced=unreduced)
        # An array of this device alone, since arrays of different meshes cannot be packed together. It is not copied if
        # it lies on the device already.
        gradient = jax.device_put(gradient.addressable_data(0), self._lone.devices[0])
        return MeshGradient(gradient, False, like.size, BY_NUMPY[np.dtype(like.dtype)])

    def written(self, target: Any, like: jax.Array) -> jax.Array:
        new = target.array if like.size else self._lone.stack([np.empty(like.shape, like.dtype)])  # in no bucket
        return jax.device_put(new, like.sharding) if like.committed else new


def _check_plain(path: str, gradient: jax.Array, *, unreduced: bool) -> None:
    """Raise :class:`GradientError` unless the gradient is plain and lies on one device."""
    if unreduced:
        raise GradientError(
            f"{path}: RankGradients without a mesh; expected plain gradients, or parameters of wrap(params, mesh=mesh)"
        )
    if len(gradient.devices()) > 1:
        raise GradientError(f"{path}: gradient lies on {len(gradient.devices())} devices, expected one")
