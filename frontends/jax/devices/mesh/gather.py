"""Parameters that the model gathers where a layer needs them, inside ``value_and_grad``.

In stage 3 they are shards. The transpose of gathering is the reduction: every rank sends each other rank its slice of
the gradient. The owner sums the slices that it receives in rank order in fp32 and divides once, as the core's reduction
does. So gradients leave ``value_and_grad`` averaged, in fp32, as shards at their owners.

Elsewhere they are whole, in device or host memory. The transpose of gathering is the gradient's copy to host memory, so
that a ``lax.scan`` over layers sends each layer's gradient while backward runs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from offload_core.errors import ParameterError

from ...tree.trees import Static
from .programs import mean_of_slice


class GatherSpec(NamedTuple):
    """The way from a shard to a parameter, and from the parameter's gradient to a shard."""

    axis: str
    """The mesh axis."""
    world_size: int
    dim: int
    """The dimension that is cut, counted from the last (-1), because a scan takes away the first."""
    comm_dtype: Any
    """The dtype in which gradients travel."""
    native: bool
    """True if XLA's reduce-scatter sums gradients, in that dtype and in an order of its own."""

    def whole(self, array: jax.Array, tangent: Any, after: Any) -> jax.Array:
        """Return the parameter of a shard, on the device.

        Args:
            after: an array that is computed first, where the parameter comes from host memory; None: none.
        """
        if array.ndim < -self.dim:
            raise ParameterError(
                f"gather_params: a shard of shape {list(array.shape)} has lost the dimension ({self.dim}) "
                "that its parameter is cut along; expected slices of other dimensions only, as lax.scan takes of the "
                "first: gather before slicing, or place the parameter cut along another one before wrap()"
            )
        return _gather(self, _on_device(lax.stop_gradient(array), after), tangent)


class ToHost(NamedTuple):
    """The way of a whole parameter to the device, and of its gradient to host memory."""

    def whole(self, array: jax.Array, tangent: Any, after: Any) -> jax.Array:
        """Return the parameter on the device."""
        return _bring(_on_device(lax.stop_gradient(array), after), tangent)


@jax.tree_util.register_pytree_with_keys_class
class DeviceShard:
    """A parameter that is to be gathered, in its place in the tree: this device's part of it, or all of it.

    It is a pytree node, so that a ``lax.scan`` over stacked layers slices it like any array. Models do not compute with
    it: :func:`gathered` or :func:`gather_params` give the parameter. Its leaves may be cast or multiplied by numbers
    (``jax.tree.map``). Anything else that is computed of them, such as a norm over ``jax.tree.leaves``, would be that
    of one rank's part; it is NaN or has NaN gradients instead.
    """

    def __init__(self, array: Any, tangent: Any, how: GatherSpec | ToHost) -> None:
        self._array = array
        self._tangent = tangent  # in the array's shape: the gradient is taken with respect to it; its value is not used
        self._how = how

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], GatherSpec | ToHost]:
        key = jax.tree_util.GetAttrKey
        return ((key("array"), self._array), (key("tangent"), self._tangent)), self._how

    @classmethod
    def tree_unflatten(cls, how: GatherSpec | ToHost, children: Any) -> "DeviceShard":
        array, tangent = children
        return cls(array, tangent, how)

    def gather(self, after: Any = None) -> jax.Array:
        """Return the whole parameter, in device memory. If it comes from there, its copy begins after an array has been
        computed."""
        return self._how.whole(self._array, self._tangent, after)

    def __repr__(self) -> str:
        return f"DeviceShard({self._array!r}, {self._how})"

    def __jax_array__(self) -> NoReturn:
        _refuse("computed with")

    def __getitem__(self, key: Any) -> NoReturn:
        _refuse("indexed")

    def _computed_with(self, *others: Any) -> NoReturn:
        _refuse("computed with")

    # JAX calls __jax_array__ where the other operand is an array. Python calls these for numbers and single operands.
    __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __pow__ = __neg__ = __abs__ = _computed_with
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rpow__ = _computed_with

    def __getattr__(self, name: str) -> NoReturn:
        # An AttributeError, so that hasattr works.
        raise AttributeError(f"{name!r} of a parameter that is to be gathered; {_INSTEAD}")


_INSTEAD = "expected it to be gathered first: frontends.jax.gathered(layer_fn) or gather_params(params)"


def _refuse(what: str) -> NoReturn:
    raise ParameterError(f"a parameter that is to be gathered was {what}; {_INSTEAD}")


def gather_params(params: Any) -> Any:
    """Return the tree with whole parameters in place of shards. Arrays in host memory come to the device.

    The function that ``value_and_grad`` differentiates gets shards. In a plain ``jax.jit`` of ``offloaded.params``
    (evaluation) there are sharded arrays, and XLA gathers them. A parameter that is gathered here lives as long as
    anything needs it, backward included, and its gradients are summed over its uses before they are reduced: gather it
    once for uses that are near each other (tied weights), and use :func:`gathered` for layers.
    """

    return _gathered_after(params, None)


def _gathered_after(params: Any, after: Any) -> Any:
    """As :func:`gather_params`. Copies from host memory begin when an array has been computed: else XLA would begin all
    copies of a program's parameters at once, and keep them."""

    def whole(leaf: Any) -> Any:
        return leaf.gather(after) if isinstance(leaf, DeviceShard) else _on_device(leaf, after)

    return jax.tree.map(whole, params, is_leaf=lambda x: isinstance(x, DeviceShard))


def _on_device(leaf: Any, after: Any) -> Any:
    if not (isinstance(leaf, jax.Array) and jax.typeof(leaf).memory_space == jax.memory.Space.Host):
        return leaf
    if after is not None:
        leaf = _ordered(leaf, lax.stop_gradient(after))
    return jax.device_put(leaf, jax.memory.Space.Device)


@jax.custom_jvp
def _ordered(leaf: jax.Array, after: jax.Array) -> jax.Array:
    return lax.optimization_barrier((leaf, after))[0]


@_ordered.defjvp
def _ordered_jvp(given: Any, tangents: Any) -> Any:
    return _ordered(*given), tangents[0]


def gathered(
    layer_fn: Callable[..., Any],
    *,
    policy: Callable[..., bool] | None = None,
    static_argnums: int | tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Return a layer function whose parameters are gathered while it runs: ``gathered(layer_fn)(params, *args)``.

    ``layer_fn`` gets ``params`` (any tree) whole; leaves that are no arrays stay as they are. Only the shards and the
    arguments are kept for backward: it gathers the parameters again and computes the layer again
    (``jax.checkpoint``). At other stages, or without a mesh, it is ``jax.checkpoint(layer_fn)``, so that a model need
    not know its stage::

        def body(x, layer):
            return gathered(apply_layer)(layer, x), None

        x, _ = jax.lax.scan(body, x, params["layers"])

    Args:
        policy: says which values are kept for backward, as that of ``jax.checkpoint``. A policy that keeps everything
            keeps gathered parameters, too.
        static_argnums: as those of ``jax.checkpoint``; ``params`` is number 0.
    """

    def of_shards(arrays: list[Any], static: Static, *args: Any, **kwargs: Any) -> Any:
        params = jax.tree.unflatten(static.treedef, static.merge(arrays))
        inputs = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.Array)]
        return layer_fn(_gathered_after(params, max(inputs, key=_size, default=None)), *args, **kwargs)

    of_users = (static_argnums,) if isinstance(static_argnums, int) else static_argnums
    checkpointed = jax.checkpoint(
        functools.wraps(layer_fn)(of_shards),
        policy=policy,
        static_argnums=(1, *(n + 1 if n > 0 else n for n in of_users)),
    )

    @functools.wraps(layer_fn)
    def call(params: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten(params)
        static, arrays = Static.split(treedef, leaves)
        return checkpointed(arrays, static, *args, **kwargs)

    return call


def _size(array: jax.Array) -> int:
    return array.size


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(how: GatherSpec, array: jax.Array, tangent: jax.Array | None) -> jax.Array:
    return lax.all_gather(array, how.axis, axis=array.ndim + how.dim, tiled=True)


def _forward(how: GatherSpec, array: jax.Array, tangent: jax.Array | None) -> tuple[jax.Array, None]:
    return _gather(how, array, tangent), None


def _backward(how: GatherSpec, kept: None, gradient: jax.Array) -> tuple[None, jax.Array]:
    dim = gradient.ndim + how.dim
    return None, mean_of_slice(gradient.astype(how.comm_dtype), how.axis, how.world_size, dim=dim, native=how.native)


_gather.defvjp(_forward, _backward)


@jax.custom_vjp
def _bring(array: jax.Array, tangent: jax.Array) -> jax.Array:
    return array


def _brought(array: jax.Array, tangent: jax.Array) -> tuple[jax.Array, None]:
    return array, None


def _leaves(kept: None, gradient: jax.Array) -> tuple[None, jax.Array]:
    return None, jax.device_put(gradient, jax.memory.Space.Host)


_bring.defvjp(_brought, _leaves)


def host_tangent(array: jax.Array) -> jax.Array:
    """Return an array in host memory with respect to which the gradient of a whole parameter is taken. Its value is not
    used, so that no program allocates it."""
    return jax.device_put(jnp.zeros(array.shape, array.dtype), jax.memory.Space.Host)
