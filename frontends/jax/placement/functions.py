"""Functions compiled with their gradients, for parameters that stay as they were placed or on the ranks of an axis."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from offload_core.config.options import OffloadConfig
from offload_core.errors import ConfigError, ParameterError, StateError

from ..devices.context import without_context_mesh
from ..devices.mesh.axis import REPLICATED, MeshAxis
from ..devices.mesh.gather import DeviceShard, GatherSpec, ToHost, host_tangent
from ..devices.mesh.programs import ordered_mean
from ..tree.memory_kinds import HOST_MEMORY, in_device_memory
from ..tree.shard_layout import ShardLayout
from ..tree.trees import put
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


class Asked(NamedTuple):
    """The arguments of ``OffloadedParams.value_and_grad`` that decide how a function is compiled."""

    in_specs: Any = None
    check_vma: bool = True
    gathers: bool = False
    keep_gradients: bool = False


Compiled = Callable[[list[Any], list[Any], Any, Any, tuple, dict[str, Any]], Any]
"""A compiled :class:`Compute`, without ``seen``."""


def gathering(compute: Compute, leave: Sequence[bool]) -> Compute:
    """Return the computation for a function that gathers its parameters itself. Where it does, a gradient that leaves
    is copied to host memory."""
    if not any(leave):
        return compute

    def of_gathered(trained: list[Any], *others: Any, **options: Any) -> Any:
        def gathered(of: list[Any]) -> list[Any]:
            given = zip(trained, of, leave, strict=True)
            return [DeviceShard(array, tangent, ToHost()) if leaves else tangent for array, tangent, leaves in given]

        pairs = zip(trained, leave, strict=True)
        tangents = [host_tangent(array) if leaves else array for array, leaves in pairs]
        try:
            return compute(tangents, *others, seen=gathered)
        except ValueError as error:
            if "Expected cotangent type" not in str(error):
                raise
            raise ParameterError(
                "value_and_grad: a parameter that is to be gathered was computed with, or a lax.scan or lax.map takes "
                "it from outside, or only some branches of a lax.cond do; expected gather_params(params) before that, "
                f"or the parameter among the arrays that the scan goes over ({error})"
            ) from error

    return of_gathered


def leaving(compute: Compute, leave: Sequence[bool]) -> Compute:
    """Return the computation whose program copies gradients to host memory while backward runs.

    Args:
        leave: for each gradient, True if it is copied.
    """

    if not any(leave):
        return compute

    def of_leaving(*given: Any, **options: Any) -> Any:
        out, gradients = compute(*given, **options)
        pairs = zip(gradients, leave, strict=True)
        return out, [jax.device_put(each, jax.memory.Space.Host) if leaves else each for each, leaves in pairs]

    return of_leaving


def on_one_device(compute: Compute, program: Compute) -> Compiled:
    """Compile a computation of parameters that lie on one device.

    Args:
        compute: the computation in a program that the user compiles.
        program: the computation in a program of its own.
    """
    compiled, in_jit = jax.jit(program, static_argnums=2), jax.jit(compute, static_argnums=2)

    def call(trained: list[Any], traced: Any, static: Any, scale: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if isinstance(trained[0], jax.core.Tracer):
            return in_jit(trained, traced, static, scale, args, kwargs)
        if scale is not None:
            (device,) = trained[0].devices()
            with jax.default_device(device):  # else it is moved to them implicitly, which users may disallow
                scale = jax.device_put(scale)
        return compiled(trained, traced, static, scale, args, kwargs)

    return call


def on_several_devices(compute: Compute, program: Compute, leave: Sequence[bool]) -> Compiled:
    """Compile a computation of parameters that are sharded or replicated over several devices.

    Args:
        compute, program: as in :func:`on_one_device`.
        leave: for each gradient, True if the program copies it to host memory.
    """
    compiled: dict[Any, Any] = {}  # one for each way in which parameters lie: gradients lie as they do
    in_jit = jax.jit(compute, static_argnums=2)  # the user's, which decides where gradients lie

    def call(trained: list[Any], traced: Any, static: Any, scale: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if any(isinstance(array, jax.core.Tracer) for array in trained):
            return in_jit(trained, traced, static, scale, args, kwargs)
        shardings = tuple(in_device_memory(array.sharding) for array in trained)
        if shardings not in compiled:
            pairs = zip(shardings, leave, strict=True)
            lie = [each.with_memory_kind(HOST_MEMORY) if leaves else each for each, leaves in pairs]
            compiled[shardings] = jax.jit(program, static_argnums=2, out_shardings=(None, lie))
        if scale is not None and isinstance(shardings[0], NamedSharding):
            scale = put(scale, NamedSharding(shardings[0].mesh, PartitionSpec()))
        return compiled[shardings](trained, traced, static, scale, args, kwargs)

    return call


class RankFunctions:
    """Compiles programs in which each rank differentiates a function of its part of the arguments.

    Parameters count as different on each rank there. Were they shared, their gradient would be the sum over ranks.

    Args:
        memory_kind: the memory of sharded parameters; None: the devices' own.
    """

    def __init__(self, axis: MeshAxis, config: OffloadConfig, memory_kind: str | None) -> None:
        self._axis = axis
        self._config = config
        self._memory_kind = memory_kind
        self._mean = axis.map(self._mean_over_ranks, axis.split, REPLICATED)

    def compile(self, compute: Compute, parameters: Sequence[Leaf], asked: Asked) -> Compiled:
        """Compile a computation, as ``Placement.compile``."""
        axis, layouts, check_vma = self._axis, [leaf.layout for leaf in parameters], asked.check_vma
        cuts = [None if layout is None else axis.cut_along(layout.dim) for layout in layouts]

        def program(trained: Any, traced: Any, static: Any, scale: Any, leaves: list[Any], split: _Split) -> Any:
            def each(trained: Any, traced: Any, scale: Any, leaves: list[Any]) -> Any:
                args, kwargs = jax.tree_util.tree_unflatten(split.treedef, leaves)
                of, seen = self._differentiated(trained, layouts, varying=check_vma)
                out, gradients = compute(of, traced, static, scale, args, kwargs, seen=seen)
                parts = [
                    gradient[None] if cut is None else gradient for gradient, cut in zip(gradients, cuts, strict=True)
                ]
                return jax.tree.map(lambda result: jnp.asarray(result)[None], out), parts

            in_specs = ([cut or REPLICATED for cut in cuts], REPLICATED, REPLICATED, list(split.specs))
            out_specs = (axis.split, [cut or axis.split for cut in cuts])
            mapped = jax.shard_map(each, mesh=axis.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
            out, gradients = mapped(trained, traced, scale, leaves)
            return self._mean(out), gradients

        compiled = axis.compile(program, static_argnums=(2, 5))

        @without_context_mesh
        def call(trained: list[Any], traced: Any, static: Any, scale: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
            split, leaves = self._split(asked.in_specs, args, kwargs)
            placed = [
                axis.replicate(array) if cut is None else axis.put(array, cut, self._memory_kind)
                for array, cut in zip(trained, cuts, strict=True)
            ]
            others = [axis.replicate(array) for array in traced]
            return compiled(placed, others, static, None if scale is None else axis.replicate(scale), leaves, split)

        return call

    def _differentiated(
        self, trained: Sequence[jax.Array], layouts: Sequence[ShardLayout | None], *, varying: bool
    ) -> tuple[list[jax.Array], Callable[[list[Any]], list[Any]]]:
        """Return the arrays with respect to which gradients are taken, and a function that turns them into the leaves
        that the user's function sees."""

        def leaf_of(array: jax.Array, layout: ShardLayout | None) -> jax.Array:
            # Only its gradient is used. The value is NaN, so that a model which computes with it, and has not gathered
            # the parameter, gives NaN. Under jax.debug_nans that would be the first NaN that JAX finds.
            unusable = jnp.inf if jax.config.jax_debug_nans else jnp.nan  # type: ignore[attr-defined]
            leaf = array if layout is None else jnp.full(array.shape, unusable, jnp.float32)
            return lax.pcast(leaf, self._axis.mesh.axis_names, to="varying") if varying else leaf

        def seen(leaves: list[Any]) -> list[Any]:
            return [
                leaf if layout is None else DeviceShard(array, leaf, self._gathering(layout, array))
                for leaf, array, layout in zip(leaves, trained, layouts, strict=True)
            ]

        return list(map(leaf_of, trained, layouts)), seen

    def _gathering(self, layout: ShardLayout, array: jax.Array) -> GatherSpec:
        comm_dtype = jnp.dtype(self._config.communication_dtype or array.dtype)
        dim = layout.dim - len(layout.shape)
        return GatherSpec(self._axis.name, layout.world_size, dim, comm_dtype, self._config.reduction == "native")

    def _split(self, in_specs: Any, args: tuple, kwargs: dict[str, Any]) -> "tuple[_Split, list[Any]]":
        """Return the cut of the arguments, and their leaves on the mesh."""
        flat, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
        specs = [self._axis.spec_of(leaf) for _, leaf in flat]
        if in_specs is not None:
            specs = _specs_as_asked(in_specs, args) + specs[len(jax.tree.leaves(args)) :]
        elif self._axis.world_size > 1 and not any(map(self._axis.cuts, specs)):
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

    def _mean_over_ranks(self, stacked: Any) -> Any:
        """Return the mean of floating-point leaves, and rank 0's value of others."""

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


def _specs_as_asked(in_specs: Any, args: tuple) -> list[PartitionSpec]:
    """Return the spec of each leaf of the arguments."""
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
