"""Training steps in JAX on meshes of 4 host devices, parameters sharded over both axes: offload-core with the user's
own ``jax.jit``, and ``optax.adamw`` in one ``jax.jit``. And how long ``update(wait=False)`` holds Python.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import record
from bench.harness.recording import Recording
from offload_core.support.units import count

MESHES = ((2, 2), (4, 1), (1, 4))
LAYERS = 8
TARGET = 1.10


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = record.parser("jax_mesh", __doc__.strip())
    parser.add_argument("--width", type=count, help="of a layer (default: 560, 20 M parameters; --quick: 64)")
    parser.add_argument("--steps", type=count, help="counted on each mesh (default: 15; --quick: 2)")
    args = parser.parse_args(arguments)
    args.width = args.width or (64 if args.quick else 560)
    args.steps = args.steps or (2 if args.quick else 15)
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    recording = Recording("jax_mesh", "JAX on meshes")
    recording.versions |= record.versions("jax", "optax")
    for shape in MESHES:
        contenders = make(shape, args.width)
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        held: list[float] = []
        for turn in range(args.steps + 3):
            for name, step in contenders.items():
                begin = time.perf_counter()
                told = step()
                if turn >= 3:  # the first ones compile
                    samples[name].append(time.perf_counter() - begin)
                    held += [told / samples[name][-1]] if told is not None else []
        mesh = " x ".join(map(str, shape))
        ours, theirs = samples["offload-core"], samples["optax.adamw in one jit"]
        recording.add_ratios(
            [
                record.ratio(
                    f"JAX on a mesh of {mesh}: offload-core / optax.adamw in one jit", ours, theirs, target=TARGET
                )
            ],
            f"medians of {np.median(ours) * 1e3:.0f} and {np.median(theirs) * 1e3:.0f} ms",
        )
        name = f"JAX on a mesh of {mesh}: Python held by update(wait=False), part of the step"
        recording.add_ratios([record.ratio(name, held, [1.0] * len(held), target=0.15)], "see docs/jax.md")
    config = {"parameters": 8 * LAYERS * args.width**2, "layers": LAYERS, "width": args.width, "steps": args.steps}
    return recording.finish(args.json, config)


def make(shape: tuple[int, int], width: int) -> dict[str, Callable[[], float | None]]:
    """A step of each, by name; it may return the seconds for which ``update`` held Python."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from frontends.jax import wrap

    mesh = jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp"), "scale": P()}
    rng = np.random.default_rng(0)

    def layer() -> dict[str, Any]:
        up = rng.standard_normal((width, 4 * width), np.float32) * 0.02
        return {"up": up, "down": up.T.copy(), "scale": np.ones(width, np.float32)}

    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    params = [jax.device_put(layer(), shardings) for _ in range(LAYERS)]
    batch = jax.device_put(rng.standard_normal((64, width), np.float32), NamedSharding(mesh, P("fsdp")))

    def loss(params: Any, x: Any) -> Any:
        for layer in params:
            x = x + jnp.tanh((x * layer["scale"]) @ layer["up"]) @ layer["down"]
        return jnp.mean(x**2)

    transformation = optax.adamw(1e-3, weight_decay=1e-4)

    def whole(params: Any, state: Any, batch: Any) -> Any:
        gradients = jax.grad(loss)(params, batch)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    one_jit = jax.jit(whole, donate_argnums=(0, 1))
    theirs = [jax.tree.map(jnp.copy, params), jax.jit(transformation.init)(params)]
    grad = jax.jit(jax.grad(loss), out_shardings=[shardings] * LAYERS)
    offloaded, later = (wrap(params, lr=1e-3, weight_decay=1e-4) for _ in range(2))

    def step_of_theirs() -> None:
        theirs[:] = one_jit(*theirs, batch)
        jax.block_until_ready(theirs)

    def step_of_ours() -> None:
        jax.block_until_ready(offloaded.update(grad(offloaded.params, batch), donate=True))

    def step_behind() -> float:
        gradients = grad(later.params, batch)
        begin = time.perf_counter()
        later.update(gradients, wait=False, donate=True)
        held = time.perf_counter() - begin
        jax.block_until_ready(later.params)
        return held

    return {"offload-core": step_of_ours, "optax.adamw in one jit": step_of_theirs, "behind Python": step_behind}


if __name__ == "__main__":
    sys.exit(main())
