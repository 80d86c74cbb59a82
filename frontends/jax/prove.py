"""The programs of JAX's ways in ``python -m offload_core prove``. Each trains a part of a way, and yields arrays by
name."""

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from offload_core.prove import definition as rules
from offload_core.prove.worker import LeftOut, Place

from .devices.numbers import bias_corrections
from .offloaded import OffloadedParams, wrap

warnings.filterwarnings("ignore", message=r".*fork\(\)")  # nothing was computed before these processes were forked

DEVICES = 4
WIDTHS = (36, 187, 333, 36)
"""Few sizes are multiples of 8, so that each array has a tail."""
BATCH = 8
Arrays = Iterator[tuple[str, Any]]


def begin(place: Place) -> dict[str, Any]:
    """The parameters as each way begins. On processors there are four devices."""
    if place.device == "cpu":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
        jax.config.update("jax_platforms", "cpu")
    random = np.random.default_rng(0)
    tree = {}
    for layer, (rows, columns) in enumerate(itertools.pairwise(WIDTHS)):
        w = random.standard_normal((rows, columns), np.float32) * np.float32(rows**-0.5)
        tree[f"layer{layer}"] = {"w": w, "b": np.zeros(columns, np.float32)}
    return tree


def loss_fn(params: Any, x: Any) -> Any:
    y = x
    for layer in params.values():
        y = jnp.tanh(y @ layer["w"] + layer["b"])
    return jnp.mean((y - x) ** 2)


grad_fn = jax.jit(jax.value_and_grad(loss_fn))


def batch(step: int) -> Any:
    return np.random.default_rng((1, step)).standard_normal((BATCH, WIDTHS[0]), np.float32)


def on_one_device(tree: Any) -> Any:
    """A copy of the whole tree on the first device, where all ways compute gradients by the same program."""
    return jax.tree.map(lambda x: jnp.asarray(np.array(x)), tree)


def mesh_of(place: Place) -> Any:
    """The mesh of a way; None without one."""
    shape = place.settings.get("mesh")
    if shape is None:
        return None
    if (found := len(jax.devices())) < np.prod(shape):
        raise LeftOut(f"needs {np.prod(shape)} devices, and JAX sees {found}")
    axes = ("data", "tensor")[: len(shape)]
    devices = jax.devices()[: np.prod(shape)]
    return jax.make_mesh(tuple(shape), axes, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def wrapped(params: Any, place: Place, *, mesh: Any = None) -> OffloadedParams:
    settings = {name: value for name, value in place.settings.items() if name != "mesh"}
    return wrap(params, mesh=mesh, **settings)


def trained(made: OffloadedParams, place: Place, update: Callable[[int], object]) -> Arrays:
    """Run the updates between a load and a save of a checkpoint. Yield the weights as the model runs with them."""
    place.load(made.load_checkpoint)
    for step in range(place.first, place.last):
        update(step)
    made.save_checkpoint(place.checkpoints)
    weights = made.named_weights()
    assert not isinstance(weights, int)
    for name, weight in weights:
        yield f"weight/{name}", np.asarray(weight, np.float32)


def _update(made: OffloadedParams, step: int, **options: Any) -> None:
    _, grads = grad_fn(on_one_device(made.params), batch(step))
    made.update(jax.tree.map(lambda g, p: jax.device_put(g, p.sharding), grads, made.params), **options)


def engine(place: Place) -> Arrays:
    """The loop that README shows, with gradients of a program of one's own."""
    made = wrapped(begin(place), place, mesh=mesh_of(place))
    yield from trained(made, place, partial(_update, made))


def donated(place: Place) -> Arrays:
    made = wrapped(begin(place), place)
    yield from trained(made, place, partial(_update, made, donate=True, donate_params=True))


def value_and_grad(place: Place) -> Arrays:
    made = wrapped(begin(place), place)
    gradients = made.value_and_grad(loss_fn)

    def update(step: int) -> None:
        made.update(gradients(made.params, batch(step))[1])

    yield from trained(made, place, update)


def sharded(place: Place) -> Arrays:
    """Each matrix lies in parts over the mesh."""
    params, mesh = begin(place), mesh_of(place)

    def put(x: np.ndarray) -> Any:
        axes = zip(x.shape, ("data", "tensor"), strict=False)
        spec = PartitionSpec(*(name if n % 2 == 0 else None for n, name in axes))
        return jax.device_put(x, NamedSharding(mesh, spec))

    made = wrapped(jax.tree.map(put, params), place)
    yield from trained(made, place, partial(_update, made))


def released(place: Place) -> Arrays:
    made = wrapped(begin(place), place)

    def update(step: int) -> None:
        _update(made, step)
        with made.released():
            pass

    yield from trained(made, place, update)


def as_optax(place: Place) -> Arrays:
    """A loop of optax."""
    optax = _optax()
    params = on_one_device(begin(place))
    made = wrapped(params, place)
    transformation = made.as_optax()
    state = transformation.init(params)

    def update(step: int) -> None:
        nonlocal params, state
        updates, state = transformation.update(grad_fn(params, batch(step))[1], state, params)
        params = optax.apply_updates(params, updates)

    yield from trained(made, place, update)


def given_gradients(place: Place) -> Arrays:
    """The parameters of a part before, in torch, and the gradients that torch has computed."""
    tree: dict[str, Any] = {}
    with np.load(place.gradients(place.first)) as arrays:
        for name in arrays.files:
            _at(tree, name)[name.rpartition(".")[2]] = jnp.zeros(arrays[name].shape, jnp.float32)
    made = wrapped(tree, place)

    def update(step: int) -> None:
        grads: dict[str, Any] = {}
        with np.load(place.gradients(step)) as arrays:
            for name in arrays.files:
                _at(grads, name)[name.rpartition(".")[2]] = jnp.asarray(arrays[name])
        made.update(grads)

    yield from trained(made, place, update)


def _at(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """The dict that has the leaf of this dotted path."""
    for part in name.split(".")[:-1]:
        tree = tree.setdefault(part, {})
    return tree


def definition(place: Place) -> Arrays:
    """docs/numerics.md, operation by operation, in NumPy."""
    params, s = begin(place), dict(place.settings)
    moments = jax.tree.map(lambda p: [np.zeros_like(p), np.zeros_like(p)], params)
    for step in range(place.first, place.last):
        _, grads = grad_fn(on_one_device(params), batch(step))
        c = [np.float32(each) for each in bias_corrections(s["betas"], step + 1)]  # of XLA: optax's own row checks it
        for layer, name in _leaves(params):
            rules.optax_adamw(params[layer][name], np.asarray(grads[layer][name]), moments[layer][name], s, c)
    for layer, name in _leaves(params):
        of = dict(zip(("exp_avg", "exp_avg_sq"), moments[layer][name], strict=True))
        for kind, array in {"weight": params[layer][name], "master": params[layer][name], **of}.items():
            yield f"{kind}/{layer}.{name}", array


def optax_adamw(place: Place) -> Arrays:
    """``optax.adamw``, outside of ``jax.jit``."""
    optax = _optax()
    params, s = on_one_device(begin(place)), dict(place.settings)
    (b1, b2), rate = s["betas"], s["lr"]
    transformation = optax.adamw(rate, b1=b1, b2=b2, eps=s["eps"], weight_decay=s["weight_decay"])
    state = transformation.init(params)
    for step in range(place.first, place.last):
        updates, state = transformation.update(grad_fn(params, batch(step))[1], state, params)
        params = optax.apply_updates(params, updates)
    for layer, name in _leaves(params):
        of = {"weight": params, "master": params, "exp_avg": state[0].mu, "exp_avg_sq": state[0].nu}
        for kind, tree in of.items():
            yield f"{kind}/{layer}.{name}", tree[layer][name]


def _optax() -> Any:
    try:
        import optax
    except ImportError:
        raise LeftOut("needs optax, which is not installed") from None
    return optax


def _leaves(params: Any) -> Iterator[tuple[str, str]]:
    return ((layer, name) for layer, leaves in params.items() for name in leaves)
