"""Training steps in JAX on one device and on meshes of 4, parameters sharded over both axes: offload-core with a
plain ``jax.jit``, ``optax.adamw`` in one ``jax.jit``, and the same with its moments resting in ``pinned_host``
memory, as MaxText has it. And how long ``update(wait=False)`` holds Python.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bench import record
from bench.harness.recording import Recording
from offload_core.support.units import count

MESHES = ((2, 2), (4, 1), (1, 4))
ALONE = {"34 M": 728, "69 M": 1040}
"""The widths of models for one device, by their numbers of parameters."""
LAYERS = 8
WARM_UP = 3
"""Steps that are not counted: the first ones compile."""
MESH_TARGET, ALONE_TARGET, FIRST_TARGET = 1.10, 1.0, 2.0
OURS, IN_ONE_JIT, BEHIND = "offload-core", "optax.adamw in one jit", "behind Python"
RESTING = "optax.adamw, moments in pinned_host"


class Step(NamedTuple):
    """A contender's step, and the bytes that it takes and moves."""

    run: Callable[[], float | None]
    """Takes a step. It may return the seconds for which ``update`` held Python."""
    device_bytes: Callable[[], float]
    """The peak on all devices together, without activations and without states that rest on the host."""
    link_bytes: float
    """Bytes between host and devices in a step, both ways together."""


class Unable(Exception):
    """The backend cannot run the contender."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = record.parser("jax_mesh", __doc__.strip())
    parser.add_argument("--width", type=count, help="of a layer (default: 560, 20 M parameters; --quick: 64)")
    parser.add_argument("--steps", type=count, help="counted in each case (default: 15; --quick: 2)")
    parser.add_argument("--accelerator", action="store_true", help="on JAX's own devices: one, and a mesh of all")
    args = parser.parse_args(arguments)
    args.widths = {name: 64 if args.quick else width for name, width in ALONE.items()}
    args.width = args.width or (64 if args.quick else 560)
    args.steps = args.steps or (2 if args.quick else 15)
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    import jax

    meshes: tuple[tuple[int, int], ...] = MESHES
    if not args.accelerator:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4)
    else:
        meshes = ((jax.device_count(), 1),) if jax.device_count() > 1 else ()
    config = {"parameters": 8 * LAYERS * args.width**2, "layers": LAYERS, "width": args.width, "steps": args.steps}
    config |= {"platform": jax.default_backend(), "devices": jax.device_count()}
    recording = Recording("jax_mesh", "JAX on one device and on meshes", args.json, config)
    recording.versions |= record.versions("jax", "optax")
    for shape in meshes:
        name = f"JAX on a mesh of {' x '.join(map(str, shape))}"
        measure(recording, name, shape, args.width, args.steps, MESH_TARGET)
        recording.keep()
    for size, width in args.widths.items():
        first = measure(recording, f"JAX on one device, {size}", None, width, args.steps, ALONE_TARGET)
        ratio = record.ratio(
            f"JAX, {size}: first update beyond a later one, seconds", [first], [1.0], target=FIRST_TARGET
        )
        recording.add_ratios([ratio], "see docs/jax.md")
    return recording.finish()


def measure(
    recording: Recording, name: str, shape: tuple[int, int] | None, width: int, steps: int, target: float
) -> float:
    """Record one case, and return the seconds of our first update less those of a later one."""
    case = Case(shape, width)
    contenders = {OURS: case.ours(), IN_ONE_JIT: case.optax_in_one_jit(), BEHIND: case.ours_behind_python()}
    try:
        contenders[RESTING] = case.optax_resting()
    except Unable as error:
        recording.notes.append(f"{name}: {RESTING}: not possible on this backend: {error}")
    samples: dict[str, list[float]] = {contender: [] for contender in contenders}
    held: list[float] = []
    for turn in range(steps + WARM_UP):
        for contender, step in contenders.items():
            begin = time.perf_counter()
            told = step.run()
            if turn >= WARM_UP:
                samples[contender].append(time.perf_counter() - begin)
                held += [told / samples[contender][-1]] if told is not None else []
    why = "medians of " + ", ".join(f"{np.median(of) * 1e3:.0f} ms ({name})" for name, of in samples.items())
    print(f"{name}: {why}")
    ratios = [record.ratio(f"{name}: {OURS} / {IN_ONE_JIT}", samples[OURS], samples[IN_ONE_JIT], target=target)]
    if RESTING in samples:
        ratios.append(record.ratio(f"{name}: {RESTING} / {OURS}", samples[RESTING], samples[OURS], better="higher"))
    held_name = f"{name}: Python held by update(wait=False), part of the step"
    ratios.append(record.ratio(held_name, held, [1.0] * len(held), target=0.15))
    recording.add_ratios(ratios, why)
    for contender, step in contenders.items():
        if contender == BEHIND:
            continue
        taken = {"device bytes a parameter": step.device_bytes(), "link bytes a parameter and step": step.link_bytes}
        for metric, n_bytes in taken.items():
            print(f"{name}, {contender}: {n_bytes / case.numel:.2f} {metric}")
            recording.rows.append(record.row(f"{name}, {contender}", metric, "bytes", [n_bytes / case.numel]))
    return case.updates[0] - min(case.updates[1:])


class Case:
    """A model of :data:`LAYERS` layers, on one device or sharded over a mesh."""

    def __init__(self, shape: tuple[int, int] | None, width: int) -> None:
        import jax
        import jax.numpy as jnp
        import optax
        from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
        from jax.sharding import PartitionSpec as P

        gc.collect()  # the case before
        specs = {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp"), "scale": P()}
        if shape is None:
            alone = SingleDeviceSharding(jax.devices()[0])
            self.scalar, of_batch = alone, alone
            shardings: dict[str, Any] = dict.fromkeys(specs, alone)
        else:
            mesh = jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
            shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
            self.scalar, of_batch = NamedSharding(mesh, P()), NamedSharding(mesh, P("fsdp"))
        self.devices = 1 if shape is None else shape[0] * shape[1]
        rng = np.random.default_rng(0)

        def layer() -> dict[str, Any]:
            up = rng.standard_normal((width, 4 * width), np.float32) * 0.02
            return {"up": up, "down": up.T.copy(), "scale": np.ones(width, np.float32)}

        self.shardings = [shardings] * LAYERS
        self.params = [jax.device_put(layer(), shardings) for _ in range(LAYERS)]
        self.numel = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        self.batch = jax.device_put(rng.standard_normal((64, width), np.float32), of_batch)
        self.optimizer = optax.adamw(1e-3, weight_decay=1e-4)
        self.updates: list[float] = []
        """Seconds of the first updates; the very first includes compilation."""

        def loss(params: Any, x: Any) -> Any:
            for layer in params:
                x = x + jnp.tanh((x * layer["scale"]) @ layer["up"]) @ layer["down"]
            return jnp.mean(x**2)

        self.loss = loss
        self.grad = jax.jit(jax.grad(loss), out_shardings=self.shardings)

    def ours(self) -> Step:
        import jax

        offloaded = self._wrap()

        def step() -> None:
            gradients = self.grad(offloaded.params, self.batch)
            if len(self.updates) < WARM_UP:  # else it is a part of the step
                jax.block_until_ready(gradients)
            begin = time.perf_counter()
            jax.block_until_ready(offloaded.update(gradients, donate=True))
            if len(self.updates) < WARM_UP:
                self.updates.append(time.perf_counter() - begin)

        def device_bytes() -> float:
            return sum(row.planned for row in offloaded.memory_report().rows if row.where == "device")

        return Step(step, device_bytes, 2 * _bytes(self.params))

    def ours_behind_python(self) -> Step:
        import jax

        offloaded = self._wrap()

        def step() -> float:
            gradients = self.grad(offloaded.params, self.batch)
            begin = time.perf_counter()
            offloaded.update(gradients, wait=False, donate=True)
            held = time.perf_counter() - begin
            jax.block_until_ready(offloaded.params)
            return held

        return Step(step, lambda: 0, 0)

    def _wrap(self) -> Any:
        from frontends.jax import wrap

        return wrap(self.params, lr=1e-3, weight_decay=1e-4)

    def optax_in_one_jit(self) -> Step:
        import jax

        def whole(params: Any, state: Any, batch: Any) -> Any:
            return self._updated(jax.grad(self.loss)(params, batch), state, params)

        state = self._state()
        return self._in_optax(jax.jit(whole, donate_argnums=(0, 1), out_shardings=(self.shardings, _of(state))), state)

    def _state(self, kind: str = "device") -> Any:
        """Optax's moments, which lie as their parameters, in this kind of memory."""
        import jax
        import optax

        shardings = optax.tree_map_params(
            self.optimizer,
            lambda _, sharding: sharding.with_memory_kind(kind),
            jax.eval_shape(self.optimizer.init, self.params),
            self.shardings,
            transform_non_params=lambda _: self.scalar,
        )
        return jax.device_put(jax.jit(self.optimizer.init)(self.params), shardings)

    def optax_resting(self) -> Step:
        """Return optax's step with resting moments: on the devices, or on the host by ``compute_on`` if the backend
        cannot do it there."""
        import jax

        kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
        if "pinned_host" not in kinds:
            raise Unable(f"it has the memory kinds {', '.join(kinds)}")
        working, resting = _of(self._state()), _of(self._state("pinned_host"))
        try:
            return self._resting(partial(self._moved_and_updated, working=working, resting=resting))
        except jax.errors.JaxRuntimeError:
            try:
                return self._resting(self._updated_on_the_host)
            except jax.errors.JaxRuntimeError as error:
                raise Unable(str(error).splitlines()[0]) from error

    def _resting(self, updated: Any) -> Step:
        import jax

        def whole(params: Any, state: Any, batch: Any) -> Any:
            return updated(jax.grad(self.loss)(params, batch), state, params)

        state = self._state("pinned_host")
        out = (self.shardings, _of(state))
        step = self._in_optax(jax.jit(whole, donate_argnums=(0, 1), out_shardings=out), state)
        step.run()
        return step

    def _updated(self, gradients: Any, state: Any, params: Any) -> Any:
        import optax

        updates, state = self.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def _moved_and_updated(self, gradients: Any, state: Any, params: Any, *, working: Any, resting: Any) -> Any:
        import jax

        params, state = self._updated(gradients, jax.device_put(state, working), params)
        return params, jax.device_put(state, resting)

    def _updated_on_the_host(self, gradients: Any, state: Any, params: Any) -> Any:
        import jax
        from jax.experimental.compute_on import compute_on

        def on_host(tree: Any) -> Any:
            return jax.device_put(tree, jax.tree.map(lambda of: of.with_memory_kind("pinned_host"), self.shardings))

        with compute_on("device_host"):
            params, state = self._updated(on_host(gradients), state, on_host(params))
        return jax.device_put(params, self.shardings), state

    def _in_optax(self, compiled: Any, state: Any) -> Step:
        import jax

        now = [jax.tree.map(lambda leaf: leaf + 0, self.params), state]

        def step() -> None:
            now[:] = compiled(*now, self.batch)
            jax.block_until_ready(now)

        moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
        resting = _bytes([leaf for leaf in moments if leaf.sharding.memory_kind == "pinned_host"])

        def device_bytes() -> float:
            of_step = compiled.lower(*now, self.batch).compile().memory_analysis()  # a device's
            temporary = of_step.temp_size_in_bytes if of_step else 0
            return _bytes(self.params) + _bytes(moments) - resting + self.devices * temporary

        return Step(step, device_bytes, 2 * resting)


def _of(tree: Any) -> Any:
    """Return the shardings of a tree's arrays."""
    import jax

    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _bytes(tree: Any) -> int:
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


if __name__ == "__main__":
    sys.exit(main())
