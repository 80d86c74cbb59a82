"""Train a GPT on the bytes of a file in JAX, over a mesh of devices that each have a shard of the states (stage 3).

python pretrain_jax.py TEXT OUT, with --cpu-devices 4 on a machine without accelerators. The same command again goes on.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from frontends.jax import gather_params, gathered, init, wrap
from offload_core.lr_schedules import WarmupCosineLR
from offload_core.step_log import ProgressBar, StepLog

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text", type=Path)
parser.add_argument("out", type=Path, help="a folder for checkpoints, the log and the weights")
parser.add_argument("--cpu-devices", type=int, help="take this number of devices on the CPU")
parser.add_argument("--lr", type=float, default=3e-4, help="(default: %(default)s)")
sizes = {"width": 512, "layers": 8, "context": 256, "batch": 32, "updates": 1000, "save-every": 100}
for name, default in sizes.items():
    parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
args = parser.parse_args()
if args.cpu_devices is not None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.cpu_devices)
W, L, HEADS = args.width, args.layers, max(1, args.width // 64)
mesh = jax.make_mesh((jax.device_count(),), ("data",))


def build(key):
    """Return random parameters; those of the layers are stacked."""
    shapes = {"qkv": (L, W, 3 * W), "out": (L, W, W), "up": (L, W, 4 * W), "down": (L, 4 * W, W)}
    shapes = {"layers": shapes, "token": (256, W), "position": (args.context, W), "head": (W, 256)}
    shapes, tree = jax.tree.flatten(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    keys = jax.random.split(key, len(shapes))
    return tree.unflatten([0.02 * jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)])


@gathered  # a layer's parameters are whole only while it runs, in forward and again in backward
def layer(params, x):
    heads = (normed(x) @ params["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
    attended = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True)
    x = x + attended.reshape(x.shape) @ params["out"]
    return x + jax.nn.gelu(normed(x) @ params["up"]) @ params["down"]


def normed(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def loss_fn(params, windows):
    x = gather_params(params["token"])[windows[:, :-1]] + gather_params(params["position"])
    x, _ = jax.lax.scan(lambda x, weights: (layer(weights, x), None), x, params["layers"])
    scores = jax.nn.log_softmax(normed(x) @ gather_params(params["head"]))
    return -jnp.take_along_axis(scores, windows[:, 1:, None], -1).mean()


rate = WarmupCosineLR(args.lr, args.updates, warmup_num_steps=1 + args.updates // 20, warmup_type="linear")
params = init(build, jax.random.key(0), mesh=mesh)  # no device ever has the whole model
offloaded = wrap(params, mesh=mesh, stage=3, lr=rate, weight_decay=0.1, gradient_clipping=1.0)
grad_fn = offloaded.value_and_grad(loss_fn, in_specs=P("data"))
text, whole = np.frombuffer(args.text.read_bytes(), np.uint8), NamedSharding(mesh, P("data"))
begun = offloaded.load_checkpoint(args.out / "checkpoints", missing_ok=True) or {"updates": 0}
with StepLog(args.out / "steps.jsonl", ProgressBar(args.updates), engine=offloaded, total=args.updates) as log:
    for update in range(begun["updates"] + 1, args.updates + 1):
        starts = np.random.default_rng(update).integers(len(text) - args.context, size=args.batch)
        windows = np.stack([text[i : i + args.context + 1] for i in starts]).astype(np.int32)
        loss, grads = grad_fn(offloaded.params, jax.device_put(windows, whole))
        offloaded.update(grads)
        log(offloaded.report, loss=loss, tokens=args.batch * args.context)
        if update % args.save_every == 0 or update == args.updates:
            offloaded.save_checkpoint(args.out / "checkpoints", extras={"updates": update}, keep=2)
offloaded.export_safetensors(args.out / "weights")
