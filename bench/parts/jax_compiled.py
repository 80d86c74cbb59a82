"""Device memory of XLA's programs for a GPU, compiled without one: ``value_and_grad`` of a GPT in bf16, for an H100.

It needs the wheels of JAX's CUDA plugin (``pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt
nvidia-cuda-nvcc-cu12``, of JAX's own version, and the other ``nvidia-*`` wheels that ``jax[cuda12]`` names), and no
driver. Bytes are those of ``compiled.memory_analysis()``, for each parameter.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # no driver
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from bench.record import append, parser, versions
from frontends.jax import gather_params, gathered
from frontends.jax.placement.functions import Compute, gathering, leaving
from frontends.jax.training.differentiate import differentiated
from frontends.jax.tree.trees import Static

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 } threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_block_limit: 65536 registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84929347584
}
runtime_version { major: 12 minor: 9 } dnn_version_info { major: 9 minor: 8 } platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""The properties of the GPU, from NVIDIA's data sheet and ``cudaGetDeviceProperties``."""
HEADS, VOCABULARY, CONTEXT, SEQUENCES = 16, 8192, 512, 4


def block(layer: Any, x: jax.Array) -> jax.Array:
    def normed(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6).astype(x.dtype)

    def by_head(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2)

    q, k, v = map(by_head, jnp.split(normed(x) @ layer["qkv"], 3, -1))
    scores = (q @ k.swapaxes(-1, -2)).astype(jnp.float32) / q.shape[-1] ** 0.5
    attended = (jax.nn.softmax(scores).astype(x.dtype) @ v).swapaxes(1, 2).reshape(x.shape)
    x = x + attended @ layer["out"]
    return x + jax.nn.gelu(normed(x) @ layer["up"]) @ layer["down"]


def loss_of(scanned: bool, run: Callable[..., Any]) -> Callable[..., jax.Array]:
    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        embedding = gather_params(params["embedding"])
        x = embedding[tokens[:, :-1]]
        if scanned:
            x, _ = jax.lax.scan(lambda x, layer: (run(layer, x), None), x, params["layers"])
        else:
            for layer in params["layers"]:
                x = run(layer, x)
        logits = jax.nn.log_softmax((x @ embedding.T).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))

    return loss


def shapes_of(width: int, layers: int, *, scanned: bool) -> Any:
    of = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    stacked: Any = {name: (layers, *shape) for name, shape in of.items()} if scanned else [of] * layers
    return {"embedding": (VOCABULARY, width), "layers": stacked}


def compiled(args: argparse.Namespace, *, scanned: bool, run: Any, way: Callable[..., Compute], on_host: bool) -> Any:
    """Compile a program with ``value_and_grad``.

    Args:
        way: makes the program of the computation, for these flags: True for each gradient that leaves.
        on_host: True if parameters are in host memory.
    """
    [device] = topologies.get_topology_desc("gpu", "cuda", target_config=H100, topology="1x1x1").devices
    on_device = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.leaves(shapes_of(args.width, args.layers, scanned=scanned), is_leaf=_is_shape)
    treedef = jax.tree.structure(shapes_of(args.width, args.layers, scanned=scanned), is_leaf=_is_shape)
    static, nothing = Static.split(treedef, [None] * len(shapes))
    compute = differentiated(loss_of(scanned, run), range(len(shapes)), has_aux=False)
    program = way(compute, [True] * len(shapes))

    def value_and_grad(params: list[Any], tokens: jax.Array) -> Any:
        given = [jax.device_put(array, jax.memory.Space.Host) for array in params] if on_host else params
        return program(given, nothing, static, None, (tokens,), {})

    params = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=on_device) for shape in shapes]
    tokens = jax.ShapeDtypeStruct((SEQUENCES, CONTEXT + 1), jnp.int32, sharding=on_device)
    lowered = jax.jit(value_and_grad).lower(params, tokens)
    if on_host:
        _take_from_host(lowered, len(params))
    return lowered.compile().memory_analysis()


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple)


def _take_from_host(lowered: Any, n: int) -> None:
    """Mark the first arguments as arrays in host memory. Devices of a description have no memory kinds to say so."""
    from jax._src.lib.mlir import ir

    module = lowered.compiler_ir("stablehlo")
    with module.context:
        [main] = [op for op in module.body.operations if str(op.attributes["sym_name"]) == '"main"']
        attributes = [{each.name: each.attr for each in of} for of in main.attributes["arg_attrs"]]
        for of in attributes[:n]:
            of["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(of) for of in attributes])


def _stays(compute: Compute, leave: Any) -> Compute:
    return compute


WAYS: dict[str, tuple[Any, Callable[..., Compute], bool]] = {
    "gradients stay": (jax.checkpoint(block), _stays, False),
    "gradients leave": (jax.checkpoint(block), leaving, False),
    "gradients leave, the model gathers": (gathered(block), gathering, False),
    "parameters come, gradients leave": (gathered(block), gathering, True),
}


def main(arguments: list[str] | None = None) -> None:
    options = parser("jax_compiled", __doc__.strip())
    options.add_argument("--width", type=int, default=2048)
    options.add_argument("--layers", type=int, default=12)
    args = options.parse_args(arguments)
    numel = VOCABULARY * args.width + args.layers * 12 * args.width**2
    print(f"{numel:,} parameters; bytes a parameter", f"{'device':>42} {'host':>10}", sep="\n", flush=True)
    found: dict[str, Any] = {}
    for scanned in (False, True):
        for name, (run, way, on_host) in WAYS.items():
            memory = compiled(args, scanned=scanned, run=run, way=way, on_host=on_host)
            device = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
            host = sum(getattr(memory, f"host_{what}_size_in_bytes") for what in ("argument", "output", "temp"))
            label = f"{'scanned' if scanned else 'unrolled'}, {name}"
            found[label] = {"device": device / numel, "host": host / numel}
            print(f"{label:45}{device / numel:6.2f}{host / numel:11.2f}", flush=True)
    append(args.json, {"bench": "jax_compiled", **versions("jax", "jaxlib"), "numel": numel, "bytes": found})


if __name__ == "__main__":
    main()
