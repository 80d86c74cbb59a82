"""As plan_worker.py, for JAX on devices of the CPU: FOLDER. What is measured is the live arrays, not the process:
XLA's compiler keeps more than these models take."""

import gc
import io
import json
import math
import sys
import tempfile
import threading
from contextlib import redirect_stdout
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from frontends.jax import gathered, wrap
from frontends.jax.devices.mesh.device import JaxMeshDevice
from frontends.jax.devices.mesh.tensors import Donated
from frontends.jax.placement import placement
from frontends.jax.tree.memory_kinds import in_host_memory
from offload_core.__main__ import main as command
from offload_core.commands.jax_shapes import cuts_of
from offload_core.native import kernels
from tests.support.held import plans

WIDTH, LAYERS = 512, 4
FIELDS = {"lr": 1e-4, "gradient_clipping": 1.0, "reduce_bucket_size": 2**17}
CASES = {
    f"2 devices, stage {stage}{', offload_param' * bool(tier)}, {dtype}": (dtype, stage, tier)
    for dtype in ("float32", "bfloat16")
    for stage, tier in ((2, None), (3, None), (3, "cpu"))
}
PLACED = {
    f"{'x'.join(map(str, sizes))} device(s), {'the host' if on_host else 'their own'} memory, {dtype}": (
        dtype,
        sizes,
        on_host,
    )
    for dtype in ("float32", "bfloat16")
    for sizes in ((1,), (2, 2))
    for on_host in (True, False)
}
"""Parameters as they were placed, sharded as the command shards them."""


def loss_fn(params, x):
    for w in params["w"]:
        x = gathered(lambda w, x: jnp.tanh(x @ w))(w, x)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def made_before():
    """The buffers of arrays that are there, and these arrays, which must be kept, lest their memory is used again."""
    gc.collect()
    there = [array for array in jax.live_arrays() if not array.is_deleted()]
    return {s.data.unsafe_buffer_pointer() for array in there for s in array.addressable_shards}, there


def live(before, besides=()):
    """Bytes of the arrays made since, by memory; where two share a buffer it counts once, and none in ``besides``."""
    lent = [range(kernels.address(memory), kernels.address(memory) + memory.nbytes) for memory in besides]
    buffers = {"host": {}, "device": {}}
    for array in jax.live_arrays():
        if array.is_deleted():
            continue
        where = buffers["host" if in_host_memory(array) else "device"]
        for shard in array.addressable_shards:
            at = shard.data.unsafe_buffer_pointer()
            if at not in before and not any(at in memory for memory in lent):
                where[at] = shard.data.nbytes
    return {where: sum(sizes.values()) for where, sizes in buffers.items()}


def own_memory(offloaded):
    """The buffers that new parameters share on the host."""
    buffers = getattr(offloaded._placement, "buffers", None)
    return [generation.memory for generation in buffers._generations] if buffers else []


def peak_of(offloaded, plan, before, gradients):
    """Return the planned bytes, and the bytes at the peak of three updates whose gradients are donated.

    Copies arrive as late as they may: when the caller waits for them.
    """
    pipeline, updates = offloaded._core._pipeline, offloaded._updates
    most, opened = {"host": 0, "device": 0}, threading.Event()

    def sample():
        buffers = own_memory(offloaded)
        made = live(before, buffers)
        made["device"] += sum(memory.nbytes for memory in buffers)
        for where, n_bytes in made.items():
            most[where] = max(most[where], n_bytes)

    def then(method, *first):
        return lambda *args: ([act() for act in (*first, sample)], method(*args))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Donated, "use", then(Donated.use))  # called when a bucket has been packed
        patch.setattr(JaxMeshDevice, "_publish", then(JaxMeshDevice._publish))
        patch.setattr(pipeline.gradients, "end_micro_step", then(pipeline.gradients.end_micro_step, opened.set))
        patch.setattr(updates, "follow", lambda of=updates.follow: (of(), sample()))
        for _ in range(3):
            old = offloaded.params  # the new ones come beside them
            grads = gradients(old)
            opened.clear()
            if pipeline.buckets.worker.is_asynchronous:
                pipeline.buckets.worker.submit(opened.wait)
            offloaded.update(grads, donate=True)
            del old, grads
    rows = {f"{row.where} {row.what}": row.n_bytes for row in plan.rows}
    of_jax = rows.get("host gradients on their way", 0)  # here it makes no copies: the device is the host
    return {
        "planned": {"host": plan.host_bytes - of_jax, "device": plan.device_bytes},
        "rows": rows,
        "host": pipeline.memory.n_bytes + most["host"],
        "device": {"bytes": most["device"]},
    }


def measure(dtype, stage, tier):
    rng = np.random.default_rng(0)
    params = {"w": [rng.standard_normal((WIDTH, WIDTH), np.float32).astype(dtype) for _ in range(LAYERS)]}
    mesh = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2])
    x = jax.device_put(jnp.ones((8, WIDTH), dtype), NamedSharding(mesh, jax.P("dp")))
    before, _there = made_before()
    with plans() as seen:
        offloaded = wrap(params, mesh=mesh, stage=stage, offload_param=tier, **FIELDS)
    del params
    grad_fn = offloaded.value_and_grad(loss_fn)
    return peak_of(offloaded, seen[0], before, lambda params: grad_fn(params, x)[1])


def measure_placed(dtype, sizes, on_host):
    rng = np.random.default_rng(0)
    axes = [f"axis{i}" for i in range(len(sizes))]
    devices = jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)

    def placed(shape):
        value = rng.standard_normal(shape, np.float32).astype(dtype)
        spec = jax.P(*(tuple(axes[axis] for axis in dim) or None for dim in cuts_of(shape, sizes)))
        return jax.device_put(value, NamedSharding(mesh, spec) if len(sizes) > 1 else None)

    before, _there = made_before()
    params = {f"{i}": {"w": placed((WIDTH, WIDTH)), "b": placed((WIDTH,))} for i in range(LAYERS)}
    with plans() as seen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "on_cpu", lambda array: on_host)
        offloaded = wrap(params, **FIELDS)
    del params
    result = peak_of(offloaded, seen[0], before, lambda params: jax.tree.map(lambda leaf: leaf * 2, params))
    return {**result, "command": by_the_command(offloaded, sizes, on_host)}


def by_the_command(offloaded, sizes, on_host):
    """The rows that ``python -m offload_core plan`` prints for the same."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as printed:
        offloaded.export_safetensors(folder)
        mesh, device = "x".join(map(str, sizes)), "cpu" if on_host else "cuda"
        rates = ["--dram-bandwidth=1GB", f"--reduce-bucket-size={FIELDS['reduce_bucket_size']}"]
        command(
            ["plan", "--frontend=jax", "--json", f"--mesh={mesh}", f"--device={device}", f"--model={folder}", *rates]
        )
    [donated, _] = json.loads(printed.getvalue())["tiers"]
    return {f"{row['where']} {row['what']}": row["n_bytes"] for row in donated["rows"]}


def main(folder):
    jax.config.update("jax_num_cpu_devices", 4)
    results = {name: measure(*case) for name, case in CASES.items()}
    results |= {name: measure_placed(*case) for name, case in PLACED.items()}
    (Path(folder) / "jax.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
