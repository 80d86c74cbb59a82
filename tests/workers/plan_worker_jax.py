"""As plan_worker.py, for JAX on devices of the CPU: FOLDER. What is measured is the live arrays, not the process:
XLA's compiler keeps more than these models take."""

import gc
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from frontends.jax import gathered, wrap
from frontends.jax.device import in_host_memory
from tests.support.held import plans

WIDTH, LAYERS = 512, 4
FIELDS = {"lr": 1e-4, "gradient_clipping": 1.0, "reduce_bucket_size": 2**17}
CASES = {
    f"{n} device(s), stage {stage}{', offload_param' * bool(tier)}, {dtype}": (n, dtype, stage, tier)
    for dtype in ("float32", "bfloat16")
    for n, stage, tier in ((1, 2, None), (2, 2, None), (2, 3, None), (2, 3, "cpu"))
}


def loss_fn(params, x):
    for w in params["w"]:
        x = gathered(lambda w, x: jnp.tanh(x @ w))(w, x)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def live(before):
    """Bytes of the arrays made since, by memory; where two share a buffer it counts once."""
    buffers = {"host": {}, "device": {}}
    for array in jax.live_arrays():
        where = buffers["host" if in_host_memory(array) else "device"]
        for shard in array.addressable_shards:
            if shard.data.unsafe_buffer_pointer() not in before:
                where[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return {where: sum(sizes.values()) for where, sizes in buffers.items()}


def measure(n, dtype, stage, tier):
    rng = np.random.default_rng(0)
    params = {"w": [rng.standard_normal((WIDTH, WIDTH), np.float32).astype(dtype) for _ in range(LAYERS)]}
    mesh = jax.make_mesh((n,), ("dp",), devices=jax.devices()[:n]) if n > 1 else None
    x = jnp.ones((8, WIDTH), dtype)
    if mesh is not None:
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("dp")))
    gc.collect()
    there = jax.live_arrays()  # kept, or memory of theirs may be used again and not be counted
    before = {s.data.unsafe_buffer_pointer() for array in there for s in array.addressable_shards}
    with plans() as seen:
        offloaded = wrap(params, mesh=mesh, stage=stage, offload_param=tier, **FIELDS)
    [plan] = seen
    del params
    most = {"host": 0, "device": 0}

    def sample():
        for where, n_bytes in live(before).items():
            most[where] = max(most[where], n_bytes)

    follow = offloaded._follow  # at its end new parameters are there, and old ones still
    offloaded._follow = lambda: (follow(), sample())
    grad_fn = offloaded.value_and_grad(loss_fn)
    for _ in range(3):
        before_update = offloaded.params
        _, grads = grad_fn(before_update, x)
        sample()
        offloaded.update(grads)
        del before_update, grads
    return {
        "planned": {"host": plan.host_bytes, "device": plan.device_bytes},
        "rows": {f"{row.where} {row.what}": row.n_bytes for row in plan.rows},
        "host": offloaded._pipeline.memory.n_bytes + most["host"],
        "device": {"bytes": most["device"]},
    }


def main(folder):
    jax.config.update("jax_num_cpu_devices", 2)
    results = {name: measure(*case) for name, case in CASES.items()}
    (Path(folder) / "jax.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
