"""Parameters replicated along a mesh axis; its devices are the ranks, and each computes gradients of its own."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from offload_core.config.options import OffloadConfig
from offload_core.device.protocols import Device
from offload_core.dtypes import BY_NUMPY, ElementType
from offload_core.errors import ConfigError, ParameterError, StateError
from offload_core.layout.partition import ParamSpec
from offload_core.layout.regions import InMemory
from offload_core.step.at_once import Held, held_shards

from ..context import without_context_mesh
from ..device import beside_its_device
from ..mesh.mesh import REPLICATED, Donated, JaxMeshDevice, MeshAxis, MeshGradient, MeshParameter, ordered_mean
from ..tree.shard_layout import ShardLayout
from ..tree.trees import from_numpy, to_numpy
from ..tree.wrapped_tree import Leaf


class Compute(Protocol):
    def __call__(
        self,
        trained: list[Any],
        traced: list[Any],
        static: Any,
        scale: Any,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        seen: Callable[[list[Any]], list[Any]] = list,
    ) -> Any:
        """Return ``(out, gradients)``. ``static`` is hashable, the other arguments are trees.

        Args:
            trained: the arrays with respect to which gradients are taken.
            seen: turns these arrays into the leaves that the user's function sees.
        """
        ...


NOT_TRAINED = "arrays that are not trained"
Compiled = Callable[[list[Any], list[Any], Any, Any, tuple, dict[str, Any]], Any]
"""A compiled :class:`Compute`, without ``seen``."""


class OnMesh:
    """Parameters are replicated along a mesh axis, whose devices are the ranks."""

    gradients_per_rank = True
    alone = False

    def __init__(self, axis: MeshAxis, config: OffloadConfig) -> None:
        self.device: Device = JaxMeshDevice(axis, native=config.reduction == "native", threads=config.threads)
        self.on_host = axis.on_cpu
        self._axis = axis
        self._mean = axis.map(self._mean_over_ranks, axis.split, REPLICATED)

    def layout(self, leaf: Any) -> ShardLayout | None:
        """The cut of a parameter over ranks, before :meth:`place` or after it; None: it is not cut."""
        return None

    def leaf(self, position: int, path: str, value: Any, dtype: ElementType, first_param: int) -> Leaf:
        params = range(first_param, first_param + 1)
        return Leaf(position, path, tuple(value.shape), dtype.numpy, params, layout=self.layout(value))

    def specs(self, leaf: Leaf, dtype: ElementType, group: int) -> list[ParamSpec]:
        elements = leaf.layout or InMemory(leaf.shape)
        numel = math.prod(leaf.shape) if leaf.layout is None else leaf.layout.numel
        return [ParamSpec(leaf.path, numel, dtype, group, elements, partitioned=leaf.layout is not None)]

    def start(self, leaves: Sequence[Leaf], arrays: Sequence[jax.Array]) -> list[Any]:
        return [MeshParameter(array) for array in arrays]

    def started(self, arrays: Sequence[jax.Array], tensors: Sequence[Any]) -> list[jax.Array]:
        return [tensor.array for tensor in tensors]

    def targets(self, leaves: Sequence[Leaf], arrays: Sequence[jax.Array]) -> list[Any]:
        return self.start(leaves, arrays)

    def place(self, path: str, leaf: Any) -> jax.Array:
        return self._axis.replicate(leaf)

    def cast(self, leaf: Leaf, array: jax.Array) -> jax.Array:
        return array.astype(leaf.dtype)

    def to_numpy(self, leaf: Leaf | None, array: jax.Array) -> np.ndarray:
        return to_numpy(array)

    def joined(self, leaf: Leaf, parts: Sequence[np.ndarray], what: str) -> np.ndarray:
        [part] = parts
        return part.reshape(leaf.shape) if leaf.layout is None else leaf.layout.from_core(part)

    def cut(self, leaf: Leaf, whole: np.ndarray) -> list[np.ndarray]:
        return [whole.reshape(-1) if leaf.layout is None else leaf.layout.to_core(whole)]

    def spread(self, leaf: Leaf, parts: Sequence[np.ndarray], like: jax.Array) -> jax.Array:
        [whole] = parts
        kind = beside_its_device(like.sharding).memory_kind
        return self._axis.put(whole.reshape(leaf.shape), REPLICATED, kind)

    def parts(self, leaf: Leaf, array: jax.Array) -> list[jax.Array]:
        return [array.addressable_data(0)]

    def restored(self, leaf: Leaf, value: np.ndarray, like: jax.Array) -> jax.Array:
        return self._axis.replicate(from_numpy(value, like))

    def pass_through(self, leaf: Any) -> Any:
        return self._axis.replicate(leaf) if isinstance(leaf, jax.Array) else leaf

    def held(self, leaves: Sequence[Leaf], specs: Sequence[ParamSpec]) -> list[Held]:
        return [self._replicated(leaf, specs) for leaf in leaves]

    def _replicated(self, leaf: Leaf, specs: Sequence[ParamSpec]) -> Held:
        [param] = leaf.params
        return held_shards(leaf.params, [specs[param]], [len(self._axis.ranks)], on_host=False)

    def check_gradient(self, leaf: Leaf, gradient: Any, like: jax.Array, *, unreduced: bool) -> None:
        pass

    def as_gradient(self, leaf: Leaf, gradient: Any, like: jax.Array, *, unreduced: bool, donate: bool) -> list[Any]:
        if unreduced:
            array, dtype = self._axis.put(gradient, self._axis.split), gradient.dtype
        else:
            array, dtype = self._axis.replicate(gradient), like.dtype
        used = Donated((gradient, array), like.size).use if donate else None
        return [MeshGradient(array, unreduced, like.size, BY_NUMPY[np.dtype(dtype)], used)]

    def written(self, leaf: Leaf, targets: Sequence[Any], like: jax.Array) -> jax.Array:
        [target] = targets
        if like.size == 0:  # it lies in no bucket, and the old array may be donated by now
            return self._axis.replicate(np.empty(like.shape, like.dtype))
        return target.array

    # --- gradients -----------------------------------------------------------------------------------

    def compile(self, compute: Compute, *, in_specs: Any, check_vma: bool) -> Compiled:
        """Compile a program in which each rank differentiates the function of its own part of the arguments.

        Parameters count as different on each rank there. Were they shared, their gradient would be the sum over ranks.
        """
        axis = self._axis

        def program(trained: Any, traced: Any, static: Any, scale: Any, leaves: list[Any], split: _Split) -> Any:
            def each(trained: Any, traced: Any, scale: Any, leaves: list[Any]) -> Any:
                args, kwargs = jax.tree_util.tree_unflatten(split.treedef, leaves)
                of = self._differentiated(trained, varying=check_vma)
                out, gradients = compute(of.leaves, traced, static, scale, args, kwargs, seen=of.seen)
                return jax.tree.map(lambda result: jnp.asarray(result)[None], out), self._as_outputs(gradients)

            in_specs = (self._specs(REPLICATED), REPLICATED, REPLICATED, list(split.specs))
            out_specs = (axis.split, self._specs(axis.split))
            mapped = jax.shard_map(each, mesh=axis.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
            out, gradients = mapped(trained, traced, scale, leaves)
            return self._mean(out), gradients

        compiled = axis.compile(program, static_argnums=(2, 5))

        @without_context_mesh
        def call(trained: Any, traced: Any, static: Any, scale: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
            split, leaves = self._split(in_specs, args, kwargs)
            return compiled(
                self._on_axis(trained),
                [self._axis.replicate(array) for array in traced],
                static,
                None if scale is None else self._axis.replicate(scale),
                leaves,
                split,
            )

        return call

    def _on_axis(self, trained: Sequence[Any]) -> list[jax.Array]:
        """The parameters, placed on the mesh."""
        return [self._axis.replicate(array) for array in trained]

    def _specs(self, whole: PartitionSpec) -> Any:
        """The specs of the parameters, or of their gradients; ``whole`` is the spec of those that are not cut."""
        return whole

    def _differentiated(self, trained: Sequence[jax.Array], *, varying: bool) -> "Differentiated":
        """The arrays with respect to which gradients are taken, given each rank's parameters."""
        return Differentiated([self._axis.vary(array) for array in trained] if varying else list(trained), list)

    def _as_outputs(self, gradients: Sequence[jax.Array]) -> list[jax.Array]:
        """Return each rank's part of the gradients; :meth:`_specs` puts them together."""
        return [gradient[None] for gradient in gradients]

    def _split(self, in_specs: Any, args: tuple, kwargs: dict[str, Any]) -> "tuple[_Split, list[Any]]":
        """The cut of the arguments, and their leaves on the mesh."""
        flat, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
        specs = [self.spec_of(leaf) for _, leaf in flat]
        if in_specs is not None:
            specs = self._specs_as_asked(in_specs, args) + specs[len(jax.tree.leaves(args)) :]
        elif self._axis.world_size > 1 and not any(self._axis.name in names(spec) for spec in specs):
            axis, first = self._axis.name, next((leaf for _, leaf in flat if hasattr(leaf, "shape")), None)
            got = "" if first is None else f" (the first array is {first.dtype}{list(first.shape)})"
            if any(isinstance(leaf, jax.core.Tracer) for _, leaf in flat):
                raise StateError(
                    f"value_and_grad under jit: the cut of its arguments over the mesh axis {axis!r} is not known "
                    "there; expected a call outside jit (it is already compiled), or "
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

    def spec_of(self, leaf: Any) -> PartitionSpec:
        """The spec by which an array lies on the mesh."""
        of = jax.typeof(leaf) if isinstance(leaf, jax.core.Tracer) else leaf  # a type has Explicit axes only
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
        """The mean of floating-point leaves, and rank 0's value of others."""

        def one(result: jax.Array) -> jax.Array:
            parts = lax.all_gather(result, self._axis.name, tiled=True)
            if not jnp.issubdtype(result.dtype, jnp.inexact):
                return parts[0]
            return ordered_mean(parts).astype(result.dtype)

        return jax.tree.map(one, stacked)


class _Split(NamedTuple):
    """The structure of ``(args, kwargs)``, and the spec of each leaf."""

    treedef: Any
    specs: tuple[PartitionSpec, ...]


class Differentiated(NamedTuple):
    """The arrays with respect to which gradients are taken."""

    leaves: list[Any]
    seen: Callable[[list[Any]], list[Any]]
    """Turns them into the leaves that the user's function sees."""


def names(spec: Iterable[Any]) -> set[str]:
    """The mesh axes that a spec names."""
    return {name for entry in spec if entry is not None for name in ((entry,) if isinstance(entry, str) else entry)}
