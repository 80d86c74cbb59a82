"""Checks an installed wheel, on any platform: that it is whole, and that its updates have the bits of every other.

    python tests/packaging/wheel_check.py [torch] [jax] [types]

needs no more than the wheel itself does. Each word adds what needs that library (``types``: mypy).
"""
# ruff: noqa: E402

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT))  # last: the package is the installed one

import numpy as np

import offload_core
from tests.support import oracles
from tests.support.kernel_calls import INSTRUCTION_SETS, State
from tests.support.pinned_bits import BITS, digest, pinned

# --- the checks -----------------------------------------------------------------------------------------


def check_files() -> None:
    """It is the installed package that runs, with what belongs to it."""
    package = Path(offload_core.__file__).parent
    assert package.parent != ROOT, f"{package} is the checkout; run this where the wheel is installed"
    for folder in (package, package.parent / "frontends"):
        assert (folder / "py.typed").exists(), f"{folder}: no py.typed"
    assert not (package.parent / "c_src").exists()
    about = metadata.distribution("offload-core")
    assert "Typing :: Typed" in about.metadata.get_all("Classifier", [])
    files = {str(file) for file in about.files or []}
    assert {"offload_core/native/_offload.abi3.so"} <= files
    assert any(file.endswith("licenses/LICENSE") for file in files)
    sources = [path for name in ("offload_core", "frontends") for path in (ROOT / name).rglob("*.py")]
    missing = {str(path.relative_to(ROOT)) for path in sources} - files
    assert sources
    assert not missing, f"not in the wheel: {sorted(missing)}"


def check_bits() -> None:
    """Every kernel that this processor has equals the oracles, and the pinned bits."""
    for instruction_set in INSTRUCTION_SETS:
        oracles.check_kernels(instruction_set)
        got = digest(instruction_set)
        assert got == BITS, f"{instruction_set}: the pinned vector gave {got}, expected {BITS}"


def check_commands() -> None:
    """``python -m offload_core`` answers."""
    for arguments in (["info"], ["plan", "--preset=tiny", "--dram-bandwidth=10GB"]):
        command = [sys.executable, "-m", "offload_core", *arguments]
        print(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)


HYPER = {"lr": 1e-2, "betas": (0.5, 0.75), "weight_decay": 0.1}  # 1 - beta is exact in every arithmetic


def expected_step(before: np.ndarray, grad: np.ndarray, op_order: str) -> np.ndarray:
    """A parameter after the first step, by the oracle."""
    zeros = np.zeros(before.size, np.float32)
    state = State(grad.reshape(-1), before.reshape(-1), (zeros, zeros))
    step = oracles.Adam(HYPER["lr"], *HYPER["betas"], weight_decay=HYPER["weight_decay"])
    after = oracles.update(state, step, rule=f"adam_{op_order}", param_dtype=None)
    return after.master.reshape(before.shape)


def check_torch() -> None:
    """A first step has the oracle's bits; a checkpoint brings back those of the second."""
    import torch

    from frontends.torch import wrap

    def make():
        torch.manual_seed(0)
        return wrap(torch.nn.Sequential(torch.nn.Linear(19, 7), torch.nn.Linear(7, 3)), **HYPER)

    def step(engine):
        grads = {}
        for i, param in enumerate(engine.parameters()):
            param.register_hook(lambda grad, i=i: grads.__setitem__(i, grad.numpy().copy()))
        engine.backward(engine(torch.ones(5, 19)).square().sum())
        assert engine.step().updated
        return [grads[i] for i in range(len(grads))]

    engine = make()
    before = [p.detach().numpy().copy() for p in engine.parameters()]
    for was, grad, param in zip(before, step(engine), engine.parameters(), strict=True):
        oracles.assert_same_bits("torch", param.detach().numpy(), expected_step(was, grad, "torch"))
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        resumed = make()
        resumed.load_checkpoint(folder)
        engine.export_safetensors(Path(folder) / "weights")
    step(engine)
    step(resumed)
    for a, b in zip(engine.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def check_jax() -> None:
    """As :func:`check_torch`."""
    import jax
    import jax.numpy as jnp

    from frontends.jax import wrap

    def make():
        params = {"w": jnp.asarray(pinned("w", 133, exponents=range(-5, 0)).reshape(19, 7)), "b": jnp.zeros(7)}
        return wrap(params, **HYPER)

    def step(offloaded):
        def loss_of(params):
            return ((jnp.ones((5, 19)) @ params["w"] + params["b"]) ** 2).sum()

        _, grads = offloaded.value_and_grad(loss_of)(offloaded.params)
        grads = jax.tree.map(lambda x: np.array(x), grads)
        offloaded.update(grads)
        return grads

    offloaded = make()
    before = jax.tree.map(lambda x: np.array(x), offloaded.params)
    grads = step(offloaded)
    for name, was in before.items():
        expected = expected_step(was, grads[name], "optax")
        oracles.assert_same_bits(f"jax: {name}", np.asarray(offloaded.params[name]), expected)
    with tempfile.TemporaryDirectory() as folder:
        offloaded.save_checkpoint(folder)
        resumed = make()
        resumed.load_checkpoint(folder)
    step(offloaded)
    step(resumed)
    for name in before:
        oracles.assert_same_bits(name, np.asarray(resumed.params[name]), np.asarray(offloaded.params[name]))


def check_types() -> None:
    """A user's type checker sees the wheel's types, in the front ends whose libraries there are."""
    users = [HERE / f"typed_{name}.py" for name in ("core", "torch", "jax")]
    users = [path for path in users if path.stem == "typed_core" or importlib.util.find_spec(path.stem[6:])]
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", os.devnull, *map(str, users)]
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"


OPTIONAL: dict[str, Callable[[], None]] = {"torch": check_torch, "jax": check_jax, "types": check_types}


def main() -> None:
    words = sys.argv[1:]
    assert set(words) <= set(OPTIONAL), f"{words}: expected some of {list(OPTIONAL)}"
    for check in (check_files, check_bits, check_commands, *map(OPTIONAL.__getitem__, words)):
        check()
        print(f"{check.__name__}: passed", flush=True)


if __name__ == "__main__":
    main()
