"""Short runs that save a checkpoint and go on: what tests/fixtures/checkpoints/make.py wrote, and what follows today.

Only public names, as they were then, so that the code of another commit can be run. Gradients come from a hash and are
the same on every rank, so that neither the machine nor the number of ranks has a part in the bits.
"""

import hashlib
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

SAVED, STEPS = 3, 2
"""Steps before the checkpoint, and steps after it whose bits are compared."""
SHAPES = {"embed": (11, 6), "bias": (7,), "norm": ()}
TORCH = {
    "stage 2": {"param_dtype": "bfloat16", "gradient_clipping": 2.0},
    "stage 3": {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 10},
    "fp16": {"param_dtype": "float16", "initial_loss_scale": 64.0, "loss_scale_window": 2, "skip_nonfinite": True},
    "delayed": {"param_dtype": "bfloat16", "schedule": "delayed", "delay_warmup_steps": 1},
}
JAX = {name: fields for name, fields in TORCH.items() if name != "stage 3"} | {
    "stage 3": {"stage": 3, "param_persistence_threshold": 10},
}


def hyper() -> dict[str, Any]:
    from offload_core.lr_schedules import WarmupLR

    return {"lr": WarmupLR(0.01, warmup_num_steps=10), "weight_decay": 0.1, "reduce_bucket_size": 64}


def values(label: str, shape: tuple[int, ...]) -> np.ndarray:
    """Multiples of 1/64 between -2 and 2, which every element type holds exactly."""
    raw = np.frombuffer(hashlib.shake_128(label.encode()).digest(max(1, int(np.prod(shape)))), np.int8)
    return (raw.astype(np.float32) / 64).reshape(shape)


def gradients(name: str, step: int) -> dict[str, np.ndarray]:
    found = {param: values(f"{step} {param}", shape) for param, shape in SHAPES.items()}
    if name == "fp16" and step == 1:  # so that the loss scale that is saved is not the first one
        found["bias"] = np.full(SHAPES["bias"], 1e30, np.float32)
    return found


class Counter:
    """An object with a state, as a data loader has."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def digest(arrays: dict[str, np.ndarray]) -> str:
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def told(report: Any) -> list[Any]:
    return [report.updated, report.skipped, report.grad_norm, report.clip_coefficient, report.loss_scale, *report.lr]


class TorchRun:
    def __init__(self, name: str, values_of: str = "start") -> None:
        import torch

        from frontends.torch import wrap

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                for param, shape in SHAPES.items():
                    start = torch.from_numpy(values(f"{values_of} {param}", shape).copy())
                    self.register_parameter(param, torch.nn.Parameter(start))
                self.frozen = torch.nn.Parameter(torch.full((3,), 0.5), requires_grad=False)

            def forward(self, gradients: dict[str, Any]) -> torch.Tensor:
                """Its gradients are those that it is given."""
                return sum((p * gradients[n].to(p.dtype)).sum() for n, p in self.named_parameters() if n in gradients)

        torch.manual_seed(len(values_of))
        self.name, self.counter = name, Counter()
        self.engine = wrap(Model(), **hyper(), **TORCH[name])

    def step(self, step: int) -> list[Any]:
        import torch

        self.engine.backward(self.engine({n: torch.from_numpy(g) for n, g in gradients(self.name, step).items()}))
        self.counter.count += 1
        return told(self.engine.step())

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(folder, stateful={"counter": self.counter})

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(folder, stateful={"counter": self.counter})

    def bits(self, folder: Path) -> dict[str, str]:
        """Of everything that is trained, and of what is drawn next; ``folder`` may be written to."""
        import torch
        from safetensors.torch import load_file

        found = {}
        for dtype in (None, "float32"):
            self.engine.export_safetensors(folder / str(dtype), dtype=dtype)
            tensors = load_file(folder / str(dtype) / "model.safetensors")
            arrays = {name: tensor.contiguous().view(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()}
            found["parameters" if dtype is None else "masters"] = digest(arrays)
        states = self.engine.optimizer.torch_state_dict(rank0_only=False)["state"]
        moments = {f"{i} {key}": np.asarray(tensor) for i, state in states.items() for key, tensor in state.items()}
        drawn = [int(torch.randint(2**30, ())), int(np.random.randint(2**30)), random.randrange(2**30)]
        return found | {"states": digest(moments), "drawn": str(drawn), "counter": str(self.counter.count)}


class JaxRun:
    def __init__(self, name: str, values_of: str = "start", mesh: Any = None) -> None:
        from frontends.jax import wrap

        tree = {name: values(f"{values_of} {name}", shape) for name, shape in SHAPES.items()}
        self.name, self.counter = name, Counter()
        self.offloaded = wrap(tree, **hyper(), **JAX[name], mesh=mesh)

    def step(self, step: int) -> list[Any]:
        import jax.numpy as jnp

        params, given = self.offloaded.params, gradients(self.name, step)
        grads = {name: jnp.asarray(g).astype(params[name].dtype) for name, g in given.items()}
        if self.name == "fp16":  # what carries the loss scale comes from value_and_grad
            grads = self.offloaded.value_and_grad(
                lambda params, given: sum((param * given[name]).sum() for name, param in params.items())
            )(params, grads)[1]
        self.offloaded.update(grads)
        self.counter.count += 1
        return told(self.offloaded.report)

    def save(self, folder: Path) -> None:
        self.offloaded.save_checkpoint(folder, stateful={"counter": self.counter})

    def load(self, folder: Path) -> None:
        self.offloaded.load_checkpoint(folder, stateful={"counter": self.counter})

    def bits(self, folder: Path) -> dict[str, str]:
        import jax

        leaves = jax.tree_util.tree_leaves_with_path(self.offloaded.to_pytree())
        arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
        drawn = [int(np.random.randint(2**30)), random.randrange(2**30)]
        return {"states": digest(arrays), "drawn": str(drawn), "counter": str(self.counter.count)}


def going_on(run: TorchRun | JaxRun, folder: Path) -> list[Any]:
    """Return the reports and the bits of the steps after the checkpoint."""
    return [[run.step(step), run.bits(folder / str(step))] for step in range(SAVED, SAVED + STEPS)]


def saved(run: TorchRun | JaxRun, checkpoint: Path, folder: Path) -> list[Any]:
    """Train, save, and go on."""
    random.seed(1)
    np.random.seed(2)
    for step in range(SAVED):
        run.step(step)
    run.save(checkpoint)
    return going_on(run, folder)


def on_rank_of_torch(
    follow: Callable[..., list[Any]],
    values_of: str,
    folder: Path,
    exports: Path,
    rank: int,
    *,
    names: Iterable[str] = TORCH,
) -> dict[str, list[Any]]:
    """Follow :func:`saved` or :func:`resumed` in each of these cases on a rank; checkpoints are below the folder."""
    return {name: follow(TorchRun(name, values_of), folder / "torch" / name, exports / name) for name in names}


def resumed(run: TorchRun | JaxRun, checkpoint: Path, folder: Path) -> list[Any]:
    run.load(checkpoint)
    return going_on(run, folder)
