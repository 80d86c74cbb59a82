"""The places of parameters (where they are, or the ranks of a mesh axis) and their ways to the core and back."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from offload_core.config.options import OffloadConfig
from offload_core.device.protocols import Device
from offload_core.dtypes import ElementType
from offload_core.errors import ConfigError
from offload_core.layout.partition import ParamSpec
from offload_core.memory.numa import bind_threads_near
from offload_core.memory.pinning import DRIVERS
from offload_core.memory.plan import ArrayBytes
from offload_core.rules import Matrix

from ..devices.device import ArrayMemory
from ..devices.mesh.axis import MeshAxis
from ..tree.memory_kinds import on_cpu
from ..tree.wrapped_tree import Leaf
from .as_placed import InHostMemory, OnDevices, OnHosts
from .functions import Asked, Compiled, Compute
from .on_mesh import OnMesh


class Placement(Protocol):
    """Places parameters, takes their gradients, and makes arrays of their next values.

    Parameters stay where they are, or lie on the ranks of a mesh axis.
    """

    device: Device

    def place(self, path: str, leaf: Any) -> jax.Array:
        """Return the leaf where parameters lie; raise :class:`ParameterError` if it cannot lie there."""
        ...

    def sharding(self, leaf: Any, *, trained: bool) -> Sharding | None:
        """Return where a leaf of this form is put by :meth:`place` (:meth:`pass_through` if it is not trained). None:
        it stays where it is."""
        ...

    def leaf(
        self, position: int, path: str, value: Any, dtype: ElementType, first_param: int, matrix: Matrix | None
    ) -> Leaf:
        """Return a parameter of this value, before :meth:`place` or after it, that is trained in this element type."""
        ...

    def specs(self, leaf: Leaf, dtype: ElementType) -> list[ParamSpec]:
        """Return the core's parameters that a leaf consists of."""
        ...

    def cast(self, leaf: Leaf, array: jax.Array) -> jax.Array:
        """Return a placed parameter in the leaf's element type."""
        ...

    def restored(self, leaf: Leaf, value: np.ndarray, like: jax.Array) -> jax.Array:
        """Return a value of :meth:`to_numpy` as an array that lies as the parameter ``like``."""
        ...

    def to_numpy(self, leaf: Leaf | None, array: jax.Array) -> np.ndarray:
        """Return the whole value of a parameter, or (None) of another array. All processes must call this."""
        ...

    def joined(self, leaf: Leaf, parts: Sequence[np.ndarray], what: str) -> np.ndarray:
        """Return states of a leaf, in its shape, made of those of its parameters, in the core's order.

        All processes must call this.
        """
        ...

    def cut(self, leaf: Leaf, whole: np.ndarray) -> list[np.ndarray]:
        """Return the states of each of a leaf's parameters, in the core's order: the inverse of :meth:`joined`."""
        ...

    def spread(self, leaf: Leaf, parts: Sequence[np.ndarray], like: jax.Array) -> jax.Array:
        """Return states of a leaf as an array that lies as its parameter ``like``, in ``pinned_host`` memory if devices
        have it.

        Args:
            parts: this process's parts: one for each of the leaf's parameters, or for each of its ranks if the leaf has
                a layout.
        """
        ...

    def parts(self, leaf: Leaf, array: jax.Array) -> list[jax.Array]:
        """Return the parts of an array that lies as its parameter: the inverse of :meth:`spread`."""
        ...

    def pass_through(self, leaf: Any) -> Any:
        """Put a leaf that is not trained where functions of :meth:`compile` need not move it."""
        ...

    on_host: bool
    """True if the devices' memory is the host's."""

    def held(self, leaves: Sequence[Leaf], specs: Sequence[ParamSpec]) -> list[ArrayBytes]:
        """Return the bytes that the arrays of these parameters will take on this process's devices.

        Call this before any other method that takes leaves.
        """
        ...

    def start(self, leaves: Sequence[Leaf], arrays: Sequence[jax.Array]) -> list[Any]:
        """Return the tensors from which the core reads start values, one for each of the core's parameters."""
        ...

    def started(self, arrays: Sequence[jax.Array], tensors: Sequence[Any]) -> list[jax.Array]:
        """Return the arrays given to :meth:`start`, after the core has made their tensors alike on all ranks."""
        ...

    def check_gradient(self, leaf: Leaf, gradient: Any, like: jax.Array, *, unreduced: bool) -> None:
        """Raise :class:`GradientError` if a gradient of ``like`` cannot be taken from where it lies."""
        ...

    def as_gradient(self, leaf: Leaf, gradient: Any, like: jax.Array, *, unreduced: bool, donate: bool) -> list[Any]:
        """Return a gradient of ``like`` as the core takes it, one for each of the core's parameters.

        Args:
            donate: delete it when the core has read it.
        """
        ...

    def targets(self, leaves: Sequence[Leaf], arrays: Sequence[jax.Array], *, donate: bool) -> list[Any]:
        """Return the tensors to which the core writes the next values of these parameters.

        Args:
            donate: write them over the present values in the device's memory.
        """
        ...

    def written(self, leaf: Leaf, targets: Sequence[Any], like: jax.Array) -> jax.Array:
        """Return the parameter that was written to ``targets``, in the shape and place of ``like``."""
        ...

    def compile(self, compute: Compute, parameters: Sequence[Leaf], asked: Asked) -> Compiled:
        """Compile a computation of these parameters."""
        ...

    per_rank: bool
    """True if the gradients of :meth:`compile` are each rank's own (:class:`RankGradients`)."""
    alone: bool
    """True if an update exchanges nothing with other ranks and processes."""
    exchanges_matrices: bool
    """True if an update of its leaves exchanges matrices between devices by a program of XLA's."""


def placement_for(config: OffloadConfig, mesh: Mesh | None, axis: str | None, leaves: Sequence[Any]) -> Placement:
    """Decide where parameters lie: where they are, or on the axis of a mesh."""
    if config.offload_param == "nvme":
        raise ConfigError(
            "offload_param='nvme' in JAX, whose arrays lie in memory; expected offload_param='cpu' or None, beside "
            "offload_optimizer='nvme', which has 12 of a bf16 parameter's 14 bytes on disk (docs/jax.md, Parameters on "
            "disk)"
        )
    new = jax.device_put(np.float32(0))  # lies where JAX puts NumPy's arrays
    arrays = [leaf if isinstance(leaf, jax.Array) else new for leaf in leaves]
    if config.keeps_states_on_device and not all(map(on_cpu, arrays)):
        ArrayMemory.queue()  # says that it cannot be
    if mesh is not None and not _is_placed(mesh, config, arrays):
        mesh_axis = MeshAxis(mesh, axis)
        _bind_threads_near(config, mesh_axis.devices)
        return OnMesh(mesh_axis, config)
    if axis is not None and mesh is None:
        raise ConfigError(f"axis: got {axis!r} and no mesh; expected wrap(params, mesh=mesh, axis={axis!r})")
    _bind_threads_near(config, {device for array in arrays for device in array.devices()})
    if config.offload_param is not None:
        return InHostMemory(leaves, config.threads)
    return (OnHosts if all(map(on_cpu, arrays)) else OnDevices)(leaves, config.threads)


def _bind_threads_near(config: OffloadConfig, devices: Iterable[jax.Device]) -> None:
    """Have the kernels' threads run near this process's GPUs among these devices."""
    mine = [device for device in devices if device.process_index == jax.process_index() and device.platform == "gpu"]
    bind_threads_near(config, [device.local_hardware_id for device in mine], DRIVERS)


def _is_placed(mesh: Any, config: OffloadConfig, arrays: Sequence[jax.Array]) -> bool:
    """True if parameters stay as they lie on the mesh.

    They stay if they are sharded and all of them are on the mesh. The exception is stage 3 on a mesh of one axis, where
    the model may gather them itself.
    """
    if not isinstance(mesh, Mesh) or all(array.is_fully_replicated for array in arrays):
        return False
    if any(array.sharding.device_set != set(mesh.devices.flat) for array in arrays):
        return False
    return config.stage < 3 or sum(size > 1 for size in mesh.shape.values()) > 1
