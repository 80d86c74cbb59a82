"""Where parameters lie, on one device or replicated along a mesh axis, and how they get and are given there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from offload_core.config import OffloadConfig
from offload_core.device import Device
from offload_core.dtypes import BY_NUMPY
from offload_core.errors import ConfigError, GradientError, ParameterError, StateError
from offload_core.host_memory import HostMemory
from offload_core.host_ranks import HostRanks
from offload_core.memory_plan import PlanRow
from offload_core.partition import ParamSpec

from .device import JaxDevice, ParameterBuffers, on_cpu
from .mesh import REPLICATED, JaxMeshDevice, LoneDevice, MeshAxis, MeshGradient, MeshParameter, ordered_mean


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class RankGradients:
    """Each rank's own gradients on a mesh axis, not yet averaged.

    ``tree`` has the parameters' structure; a leaf is ``[world_size, *shape]``, its first dimension split over the axis.
    """

    tree: Any

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.tree,), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Any]) -> "RankGradients":
        return cls(children[0])


class Placement(Protocol):
    """What differs between one device and a mesh."""

    device: Device

    def place(self, path: str, leaf: Any) -> jax.Array:
        """The leaf where parameters lie; ``ParameterError`` if it cannot be."""
        ...

    def pass_through(self, leaf: Any) -> Any:
        """A leaf that is not trained, where functions of :meth:`compile` take it without moving it."""
        ...

    def plan(self, specs: Sequence[ParamSpec], arrays: Sequence[jax.Array], memory: HostMemory) -> list[PlanRow]:
        """What these parameters need of the host, besides the pipeline's own; the first call.

        ``memory`` is the host's account, for what is not device memory.
        """
        ...

    @property
    def planned_host_bytes(self) -> int:
        """What of the plan is in the host's account: where the device is the host, device parameters are not."""
        ...

    def start(self, arrays: Sequence[jax.Array]) -> list[Any]:
        """The tensors that the pipeline reads start values from."""
        ...

    def started(self, tensors: Sequence[Any]) -> list[jax.Array]:
        """The arrays of :meth:`start`, alike on all ranks."""
        ...

    def as_gradient(self, path: str, gradient: jax.Array, like: jax.Array, *, unreduced: bool) -> Any:
        """What the pipeline takes as a gradient of ``like``; ``GradientError`` if it lies where none can be read."""
        ...

    def targets(self, arrays: Sequence[jax.Array]) -> list[Any]:
        """What the pipeline writes the successors of these parameters to."""
        ...

    def written(self, target: Any, like: jax.Array) -> jax.Array:
        """The new parameter, in the shape and place of ``like``."""
        ...

    def compile(self, compute: "Compute", *, in_specs: Any, check_vma: bool) -> "Compute":
        """Compile for these devices."""
        ...

    def as_gradients(self, tree: Any) -> Any:
        """The gradients that a function of :meth:`compile` gave, as the user gets them."""
        ...


Compute = Callable[[list[Any], list[Any], Any, Any, tuple, dict[str, Any]], Any]
"""``(trained, traced, static, scale, args, kwargs) -> (out, gradients)``; ``static`` is hashable, the rest trees."""


def placement_for(config: OffloadConfig, mesh: Mesh | None, axis: str | None, leaves: Sequence[Any]) -> Placement:
    """On the axis of a mesh, or where there is no mesh on the device that the leaves lie on."""
    if mesh is not None:
        return OnMesh(MeshAxis(mesh, axis), native=config.reduction == "native", threads=config.threads)
    if axis is not None:
        raise ConfigError(f"axis: got {axis!r} and no mesh; expected wrap(params, mesh=mesh, axis={axis!r})")
    arrays = [leaf if isinstance(leaf, jax.Array) else jnp.zeros(()) for leaf in leaves]  # NumPy's: where JAX puts them
    devices = {device for array in arrays for device in array.devices()}
    if len(devices) > 1 or on_cpu(arrays[0]):
        return OneDevice(config.threads)
    return OneAccelerator(devices.pop(), config.threads)


class OneDevice:
    """Nothing is moved in buckets: gradients are read where they are, and new parameters are made from host buffers.

    For a device that is host memory, and for parameters that lie on a device each.
    """

    def __init__(self, threads: int) -> None:
        self.device: Device = HostRanks(JaxDevice())
        self.planned_host_bytes = 0
        self._threads = threads
        self._on_cpu = True

    def place(self, path: str, leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and len(leaf.devices()) > 1:
            raise ParameterError(
                f"{path} lies on {len(leaf.devices())} devices; expected one, or wrap(params, mesh=mesh), which "
                "replicates the parameters on the mesh"
            )
        return jnp.asarray(leaf)

    def pass_through(self, leaf: Any) -> Any:
        return leaf

    def plan(self, specs: Sequence[ParamSpec], arrays: Sequence[jax.Array], memory: HostMemory) -> list[PlanRow]:
        self._on_cpu = on_cpu(arrays[0])
        # On the CPU the buffers are the device parameters themselves: the device's account, not the host's.
        self.buffer_memory = HostMemory(self._threads) if self._on_cpu else memory
        self.buffers = ParameterBuffers(self.buffer_memory, specs)
        n_bytes = 2 * self.buffers.generation_bytes
        self.planned_host_bytes = 0 if self._on_cpu else n_bytes
        return [PlanRow("parameter buffers", "host", n_bytes, "param_dtype='bfloat16'")]

    def start(self, arrays: Sequence[jax.Array]) -> list[Any]:
        return list(arrays)

    def started(self, tensors: Sequence[Any]) -> list[jax.Array]:
        return list(tensors)

    def as_gradient(self, path: str, gradient: jax.Array, like: jax.Array, *, unreduced: bool) -> Any:
        _check_plain(path, gradient, unreduced=unreduced)
        if not self._on_cpu:
            gradient.copy_to_host_async()
        return gradient

    def targets(self, arrays: Sequence[jax.Array]) -> list[Any]:
        return self.buffers.take()

    def written(self, target: Any, like: jax.Array) -> jax.Array:
        return jax.device_put(target.reshape(like.shape), like.sharding if like.committed else None)

    def compile(self, compute: Compute, *, in_specs: Any, check_vma: bool) -> Compute:
        if in_specs is not None:
            raise ConfigError("value_and_grad: in_specs without a mesh; expected wrap(params, mesh=mesh)")
        return jax.jit(compute, static_argnums=2)

    def as_gradients(self, tree: Any) -> Any:
        return tree


class OneAccelerator(OneDevice):
    """One device with memory of its own: to the user as any device, to the core as a mesh of it alone.

    Its buckets are packed there, copied while others are summed or updated, and unpacked there.
    """

    def __init__(self, device: jax.Device, threads: int) -> None:
        super().__init__(threads)
        self._lone = LoneDevice(device)
        self.device = JaxMeshDevice(self._lone, threads=threads)

    def plan(self, specs: Sequence[ParamSpec], arrays: Sequence[jax.Array], memory: HostMemory) -> list[PlanRow]:
        # JAX's own, out of the host's account: all buckets may be on their way at once.
        n_bytes = sum(spec.numel * spec.dtype.itemsize for spec in specs)
        return [PlanRow("gradients on their way", "host", n_bytes, "param_dtype='bfloat16'")]

    def start(self, arrays: Sequence[jax.Array]) -> list[Any]:
        return [MeshParameter(array) for array in arrays]

    def started(self, tensors: Sequence[Any]) -> list[jax.Array]:
        return [tensor.array for tensor in tensors]

    def as_gradient(self, path: str, gradient: jax.Array, like: jax.Array, *, unreduced: bool) -> Any:
        _check_plain(path, gradient, unreduced=unreduced)
        # Where it is there already, the same memory: of no mesh, as those of other meshes cannot be packed together.
        gradient = jax.device_put(gradient.addressable_data(0), self._lone.devices[0])
        return MeshGradient(gradient, False, like.size, BY_NUMPY[np.dtype(like.dtype)])

    def targets(self, arrays: Sequence[jax.Array]) -> list[Any]:
        return self.start(arrays)

    def written(self, target: Any, like: jax.Array) -> jax.Array:
        new = target.array if like.size else self._lone.stack([np.empty(like.shape, like.dtype)])  # it is in no bucket
        return jax.device_put(new, like.sharding) if like.committed else new


def _check_plain(path: str, gradient: jax.Array, *, unreduced: bool) -> None:
    """Raise :class:`GradientError` unless the gradient is of one device."""
    if unreduced:
        raise GradientError(
            f"{path}: RankGradients without a mesh; expected plain gradients, or parameters of wrap(params, mesh=mesh)"
        )
    if len(gradient.devices()) > 1:
        raise GradientError(f"{path}: gradient lies on {len(gradient.devices())} devices, expected one")


class OnMesh:
    """Replicated along a mesh axis, whose devices are the ranks."""

    def __init__(self, axis: MeshAxis, *, native: bool, threads: int) -> None:
        self.device: Device = JaxMeshDevice(axis, native=native, threads=threads)
        self.planned_host_bytes = 0
        self._axis = axis
        self._mean = axis.map(self._mean_over_ranks, axis.split, REPLICATED)

    def place(self, path: str, leaf: Any) -> jax.Array:
        return self._axis.replicate(leaf)

    def pass_through(self, leaf: Any) -> Any:
        return self._axis.replicate(leaf) if isinstance(leaf, jax.Array) else leaf

    def plan(self, specs: Sequence[ParamSpec], arrays: Sequence[jax.Array], memory: HostMemory) -> list[PlanRow]:
        if not self._axis.on_cpu:
            return []
        n_bytes = 2 * len(self._axis.ranks) * sum(spec.numel * spec.dtype.itemsize for spec in specs)
        return [PlanRow("parameters of host devices", "host", n_bytes, "param_dtype='bfloat16'")]

    def start(self, arrays: Sequence[jax.Array]) -> list[Any]:
        return [MeshParameter(array) for array in arrays]

    def started(self, tensors: Sequence[Any]) -> list[jax.Array]:
        return [tensor.array for tensor in tensors]

    def as_gradient(self, path: str, gradient: jax.Array, like: jax.Array, *, unreduced: bool) -> Any:
        if not unreduced:
            return MeshGradient(self._axis.replicate(gradient), False, like.size, BY_NUMPY[np.dtype(like.dtype)])
        gradient = self._axis.put(gradient, self._axis.split)
        return MeshGradient(gradient, True, like.size, BY_NUMPY[np.dtype(gradient.dtype)])

    def targets(self, arrays: Sequence[jax.Array]) -> list[Any]:
        return self.start(arrays)

    def written(self, target: Any, like: jax.Array) -> jax.Array:
        if like.size == 0:  # it lies in no bucket; the old one may be donated now
            return self._axis.replicate(np.empty(like.shape, like.dtype))
        return target.array

    def as_gradients(self, tree: Any) -> Any:
        return RankGradients(tree)

    # --- gradients -----------------------------------------------------------------------------------

    def compile(self, compute: Compute, *, in_specs: Any, check_vma: bool) -> Compute:
        """Each rank differentiates the function of its own part of the arguments.

        Parameters are made to differ between ranks first: the gradient of what all ranks share would be their sum.
        """
        axis = self._axis

        def program(trained: Any, traced: Any, static: Any, scale: Any, leaves: list[Any], split: _Split) -> Any:
            def each(trained: Any, traced: Any, scale: Any, leaves: list[Any]) -> Any:
                args, kwargs = jax.tree_util.tree_unflatten(split.treedef, leaves)
                if check_vma:
                    trained = [lax.pcast(array, axis.mesh.axis_names, to="varying") for array in trained]
                results = compute(trained, traced, static, scale, args, kwargs)
                return jax.tree.map(lambda result: jnp.asarray(result)[None], results)

            specs = (REPLICATED, REPLICATED, REPLICATED, list(split.specs))
            mapped = jax.shard_map(each, mesh=axis.mesh, in_specs=specs, out_specs=axis.split, check_vma=check_vma)
            out, gradients = mapped(trained, traced, scale, leaves)
            return self._mean(out), gradients

        compiled = jax.jit(program, static_argnums=(2, 5))

        def call(trained: Any, traced: Any, static: Any, scale: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
            split, leaves = self._split(in_specs, args, kwargs)
            return compiled(
                [self._axis.replicate(array) for array in trained],
                [self._axis.replicate(array) for array in traced],
                static,
                scale,
                leaves,
                split,
            )

        return call

    def _split(self, in_specs: Any, args: tuple, kwargs: dict[str, Any]) -> "tuple[_Split, list[Any]]":
        """How the arguments are cut, and their leaves on the mesh."""
        flat, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
        specs = [self._spec_of(leaf) for _, leaf in flat]
        if in_specs is not None:
            specs = self._specs_as_asked(in_specs, args) + specs[len(jax.tree.leaves(args)) :]
        elif self._axis.world_size > 1 and not any(self._axis.name in _names(spec) for spec in specs):
            axis, first = self._axis.name, next((leaf for _, leaf in flat if hasattr(leaf, "shape")), None)
            got = "" if first is None else f" (the first array is {first.dtype}{list(first.shape)})"
            if any(isinstance(leaf, jax.core.Tracer) for _, leaf in flat):
                raise StateError(
                    f"value_and_grad under jit: how its arguments lie on the mesh axis {axis!r} is not known there; "
                    "expected a call outside jit (it is already compiled), or "
                    f"value_and_grad(fun, in_specs=P({axis!r}))"
                )
            raise ParameterError(
                f"value_and_grad: no argument is split over the mesh axis {axis!r}{got}, so that all ranks would "
                f"compute the same; expected the batch to be: jax.device_put(batch, NamedSharding(mesh, P({axis!r}))), "
                f"or value_and_grad(fun, in_specs=P({axis!r}))"
            )
        leaves = [
            self._axis.put(leaf, spec) if isinstance(leaf, jax.Array | np.ndarray) else leaf
            for (_, leaf), spec in zip(flat, specs, strict=True)
        ]
        return _Split(treedef, tuple(specs)), leaves

    def _spec_of(self, leaf: Any) -> PartitionSpec:
        of = jax.typeof(leaf) if isinstance(leaf, jax.core.Tracer) else leaf  # a type tells of Explicit axes alone
        sharding = getattr(of, "sharding", None) if isinstance(leaf, jax.Array) else None
        if not isinstance(sharding, NamedSharding) or sharding.mesh.axis_names != self._axis.mesh.axis_names:
            return REPLICATED
        return sharding.spec if sharding.mesh.shape == self._axis.mesh.shape else REPLICATED

    def _specs_as_asked(self, in_specs: Any, args: tuple) -> list[PartitionSpec]:
        if isinstance(in_specs, PartitionSpec):
            in_specs = (in_specs,) * len(args)

        def is_spec(x: Any) -> bool:
            return isinstance(x, PartitionSpec)

        try:
            full = jax.tree.broadcast(tuple(in_specs), args, is_leaf=is_spec)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"value_and_grad: in_specs {in_specs!r} does not fit {len(args)} arguments after the parameters; "
                f"expected a PartitionSpec for each, or for each of its subtrees\n{error}"
            ) from None
        return jax.tree.leaves(full, is_leaf=is_spec)

    def _mean_over_ranks(self, stacked: Any) -> Any:
        """The mean of floating-point leaves; of others rank 0's."""

        def one(result: jax.Array) -> jax.Array:
            parts = lax.all_gather(result, self._axis.name, tiled=True)
            if not jnp.issubdtype(result.dtype, jnp.inexact):
                return parts[0]
            return ordered_mean(parts).astype(result.dtype)

        return jax.tree.map(one, stacked)


class _Split(NamedTuple):
    """The structure of ``(args, kwargs)``, and how each leaf lies on the mesh."""

    treedef: Any
    specs: tuple[PartitionSpec, ...]


def _names(spec: PartitionSpec) -> set[str]:
    """The mesh axes that a spec names."""
    return {name for entry in spec if entry is not None for name in ((entry,) if isinstance(entry, str) else entry)}
