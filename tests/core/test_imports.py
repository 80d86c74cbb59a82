"""Who may import whom, and that nothing needs a framework it does not use."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = [
    {"errors", "dtypes", "control_groups", "disks", "quantities", "optional", "user_line", "_offload"},
    {"checks", "regions", "launch"},
    {"lr_schedules", "cpus"},
    {"deepspeed_keys"},
    {"deepspeed_json"},
    {"_kernels", "config", "partition", "step_state", "tasks", "trace", "use_order"},
    {"host_memory", "grad_norm", "loss_scale", "safetensors_files"},
    {"memory_plan", "collectives", "cpu_adam", "export", "shard_writer", "plain"},
    {"checkpoint_files", "stateful", "memory_report"},
    {"checkpoint_save"},
    {"device", "layout", "thread_ranks"},
    {"local_bucket", "exchange", "fake_device", "bucket_terms"},
    {"host_ranks"},
    {"buckets", "live_params"},
    {"gradients", "updates", "step_time", "machine", "model_shapes"},
    {"agreement", "emission"},
    {"pipeline"},
    {"checkpoint", "step_log", "plan_command", "info_command"},
    {"inspect_command"},
    {"__main__"},
]
"""The core's modules, lowest first: a module imports from layers below its own only."""


def imported_modules(path: Path) -> set[str]:
    """Absolute names of what a file imports, relative ones resolved."""
    package = path.parent.relative_to(ROOT).parts
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)} if not node.module else {module}
    return names


def top(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_the_core_knows_no_framework():
    for path in (ROOT / "offload_core").glob("*.py"):
        assert not top(imported_modules(path)) & {"torch", "jax", "jaxlib", "optax", "frontends"}, path


def test_front_ends_do_not_import_each_other():
    for mine, other in (("torch", "jax"), ("jax", "torch")):
        for path in (ROOT / "frontends" / mine).rglob("*.py"):
            names = imported_modules(path)
            assert other not in top(names), path
            assert not any(name.startswith(f"frontends.{other}") for name in names), path


def test_the_core_imports_in_one_direction():
    level = {module: i for i, layer in enumerate(LAYERS) for module in layer}
    for path in (ROOT / "offload_core").glob("*.py"):
        if path.stem in ("__init__", "_ffi_build"):
            continue
        for name in imported_modules(path):
            if name.startswith("offload_core."):
                imported = name.split(".")[1]
                assert level[imported] < level[path.stem], f"{path.stem} imports {imported}"


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is not installed")
sys.meta_path.insert(0, Blocked())
{code}
"""
TORCH = """
import torch
from frontends.torch import wrap
engine = wrap(torch.nn.Linear(4, 4))
engine.backward(engine(torch.ones(2, 4)).sum())
assert engine.step().updated
"""
JAX = """
import jax.numpy as jnp
from frontends.jax import wrap
offloaded = wrap({"w": jnp.ones(4)})
loss, grads = offloaded.value_and_grad(lambda p, x: (p["w"] * x).sum())(offloaded.params, jnp.ones(4))
offloaded.update(grads)
assert offloaded.report.updated
"""


NEW_MODULES = """
import json, sys
import {framework}
before = {{*sys.modules}}
import frontends.{framework}
print(json.dumps(sorted(sys.modules.keys() - before)))
"""


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_front_end_imports_nothing_optional(framework):
    """Nor more of its framework: torch.compile alone takes longer than ``import torch``."""
    command = [sys.executable, "-c", NEW_MODULES.format(framework=framework)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    new = json.loads(run.stdout)
    may_be = {"frontends", "offload_core", "numpy", "ml_dtypes", "xxhash", "_cffi_backend", "jax"}
    assert {name.partition(".")[0] for name in new} - sys.stdlib_module_names <= may_be
    assert f"frontends.{framework}.integrations" not in new
    assert not [name for name in new if name.startswith(("torch._dynamo", "torch.fx", "torch.distributed", "sympy"))]


@pytest.mark.parametrize(
    ("blocked", "code"),
    [
        (("torch", "jax", "jaxlib", "optax"), "import offload_core, offload_core.pipeline, offload_core.fake_device"),
        (("jax", "jaxlib", "optax", "transformers", "accelerate", "lightning"), TORCH),
        (("torch", "optax", "flax", "equinox", "orbax", "grain"), JAX),
    ],
    ids=["core", "torch", "jax"],
)
def test_nothing_needs_a_framework_it_does_not_use(blocked, code):
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(blocked=blocked, code=code)], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
