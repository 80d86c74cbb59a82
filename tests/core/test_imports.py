"""Rules of imports between packages; nothing needs a framework that it does not use."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {
    "offload_core": """
        errors dtypes support native rules deepspeed config layout memory ranks device disk states plans step stage3
        checkpoint engine prove commands testing lr_schedules memory_report pipeline step_log __main__""",
    "frontends.torch": """internals params ranks stage3 training optim weights layerwise engine integrations deepspeed
        prove""",
    "frontends.jax": "tree devices placement training optax_bridge files construction offloaded prove",
    "bench": """record markdown plots fits peers headers harness train disk_demo screens losses phases parts formats
        optimizers gpu report measured run""",
}
"""The rooms of each package and the modules beside them, lowest first: imports go down this list, and never round
inside a room."""


def statements(path: Path) -> Iterator[ast.AST]:
    """Yield the statements of a file, without their expressions: a tenth of the nodes."""
    left: list[ast.AST] = [ast.parse(path.read_text())]
    while left:
        yield (node := left.pop())
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, part, ())


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Absolute names of what a file imports, relative ones resolved."""
    package = path.parent.relative_to(ROOT).parts
    names = set()
    for node in statements(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)} if not node.module else {module}
    return frozenset(names)


def top(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.quick
def test_the_core_knows_no_framework():
    for path in (ROOT / "offload_core").rglob("*.py"):
        assert not top(imported_modules(path)) & {"torch", "jax", "jaxlib", "optax", "frontends"}, path


@pytest.mark.quick
def test_front_ends_do_not_import_each_other():
    for mine, other in (("torch", "jax"), ("jax", "torch")):
        for path in (ROOT / "frontends" / mine).rglob("*.py"):
            names = imported_modules(path)
            assert other not in top(names), path
            assert not any(name.startswith(f"frontends.{other}") for name in names), path


INNER = {
    "checkpoint": "offload_core.engine: Engine.checkpoints, and the names beside it",
    "plans": "offload_core.engine: Engine.plan(), check_memory() and memory_report()",
    "states": "offload_core.engine: Engine.states",
    "step": "offload_core.engine: Engine.step(), gradients, parameters and state_lock",
}
"""Rooms of the core that front ends import nothing of, and what to use instead."""
ENGINES = {"core", "_core"}
"""The names that front ends give an engine of the core."""


PARTS = {"gradients", "gradient_access", "parameters", "checkpoints", "state_lock", "collectives"}
"""The names of an engine's parts, by which front ends hold them."""


def reached_inside(path: Path) -> Iterator[str]:
    """Yield each place where a front end reaches past the engine, with what to use instead."""
    for node in ast.walk(ast.parse(path.read_text())):
        place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            modules = [f"{node.module}.{each.name}" for each in node.names] if isinstance(node, ast.ImportFrom) else []
        for room in {name.split(".")[1] for name in modules if name.startswith("offload_core.")} & INNER.keys():
            yield f"{place}: {ast.unparse(node)}; expected {INNER[room]}"
        if isinstance(node, ast.Attribute) and isinstance(inner := node.value, ast.Attribute):
            of = inner.value
            if (of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")) in ENGINES:
                yield (
                    f"{place}: {ast.unparse(node)} reaches into a part of the engine; expected a verb of Engine, or an "
                    f"object that holds `engine.{inner.attr}` as its own"
                )
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            held_as = getattr(node.value, "attr", getattr(node.value, "id", ""))
            if held_as in ENGINES or held_as.lstrip("_") in PARTS or node.attr == "_pipeline":
                yield f"{place}: {ast.unparse(node)} is private to the core; expected a verb of Engine or of its part"


@pytest.mark.quick
def test_front_ends_reach_the_core_by_its_engine_alone():
    """So a name inside these rooms can change without a front end."""
    found = [each for path in (ROOT / "frontends").rglob("*.py") for each in reached_inside(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "from offload_core import step, states",
        "import offload_core.step.pipeline as p",
        "from offload_core.plans.terms import BucketTerms",
        "optimizer.core.gradients.at_boundary",
        "self._core.states.rule(0)",
        "self._gradients._arrivals.since",
        "core._pipeline",
    ],
)
def test_a_front_end_that_reaches_inside_is_named_with_its_line(code, monkeypatch, tmp_path):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "front.py").write_text(f"\n{code}\n")
    [said, *_] = reached_inside(tmp_path / "front.py")
    assert said.startswith("front.py:2: ")
    assert "expected" in said


def imports_within(package: str) -> dict[str, set[str]]:
    """Of each module of a package the modules of the same package that it imports."""
    folder = ROOT / package.replace(".", "/")
    paths = {".".join(p.relative_to(folder).with_suffix("").parts): p for p in folder.rglob("*.py")}
    found = {}
    for module, path in paths.items():
        if path.name != "__init__.py":
            inside = {name.removeprefix(f"{package}.") for name in imported_modules(path)}
            found[module] = inside & {name for name in paths if not name.endswith("__init__")}
    return found


@pytest.mark.draws(1)
@pytest.mark.quick
@pytest.mark.parametrize("package", ROOMS)
def test_imports_go_down_the_list_of_rooms(package):
    order = {room: i for i, room in enumerate(ROOMS[package].split())}
    imports = imports_within(package)
    assert {module.partition(".")[0] for module in imports} == set(order)
    for module, imported in imports.items():
        mine = module.partition(".")[0]
        for other in imported:
            theirs = other.partition(".")[0]
            assert theirs == mine or order[theirs] < order[mine], f"{package}.{module} imports {other}"
    list(TopologicalSorter(imports).static_order())  # raises CycleError where modules import each other in a circle


def test_no_test_imports_another_and_workers_import_only_what_is_shared():
    """Else a test that is renamed, or one library that is missing, takes other tests along."""
    checked = 0
    for path in (ROOT / "tests").rglob("*.py"):
        for node in statements(path):
            if not (isinstance(node, ast.ImportFrom) and (node.module or "tests").partition(".")[0] == "tests"):
                continue
            assert node.level == 0, f"{path}: line {node.lineno} is a relative import"
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                checked += 1
                assert ".test_" not in name, f"{path} imports {name}; what tests share belongs in tests/support"
                if {"workers", "support"} & set(path.parts):
                    assert name.startswith(("tests.support.", "tests.sampling")), (
                        f"{path} imports {name}, expected only tests.support"
                    )
    assert checked > 100


def test_only_one_module_of_each_package_calls_a_vendors_driver():
    pattern = re.compile(r"torch\.cuda|torch\.version\.hip|\bcu(Mem|Ctx|Device)[A-Z]|\bhip[A-Z]|libcuda|libamdhip")
    found = {
        str(path.relative_to(ROOT))
        for package in ("frontends/torch", "offload_core")
        for path in (ROOT / package).rglob("*.py")
        if pattern.search(path.read_text())
    }
    assert found == {"frontends/torch/ranks/pinning.py", "offload_core/memory/pinning.py"}
    assert "torch.cuda" not in (ROOT / "frontends/torch/ranks/pinning.py").read_text()


def test_two_modules_name_the_private_parts_of_torch_and_one_of_them_its_compiler():
    compiler = re.compile(r"torch\._dynamo|_disable_dynamo|eval_frame|_orig_mod|ScriptModule")
    private = re.compile(r"torch\._[a-z]|torch\._C\b")
    found = {
        pattern: {path.name for path in (ROOT / "frontends/torch").rglob("*.py") if pattern.search(path.read_text())}
        for pattern in (compiler, private)
    }
    assert found == {compiler: {"compiled.py"}, private: {"compiled.py", "private.py"}}


FINALIZERS = {
    "clear_up": "does what may wait in a thread of its own",
    "file.close": "writes what is left to a file",
    "self._tasks.put": "a SimpleQueue may be put into from anywhere",
    "self._live.pop": "forgets an entry",
    "self.register(kernels.address(array), n_bytes)": "calls the driver, which runs no Python",
    "free": "calls the driver, which runs no Python",
    "_remove": "takes hooks off",
    "_end": "closes sockets and gloo's threads, which run no Python",
}
"""Functions that garbage collection calls, and why each waits for no other Python thread. The thread that
collects may be that very one."""


def test_what_garbage_calls_waits_for_no_thread():
    found = {
        ast.unparse(node.args[1])
        for package in ("frontends", "offload_core")
        for path in (ROOT / package).rglob("*.py")
        if "finalize" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "weakref.finalize"
    }
    assert found == {*FINALIZERS}


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


@pytest.mark.long("starts interpreters that import the frameworks")
@pytest.mark.draws(1)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_front_end_imports_nothing_optional(framework):
    """Nor more of its framework: torch.compile alone takes longer than ``import torch``."""
    pytest.importorskip(framework)
    command = [sys.executable, "-c", NEW_MODULES.format(framework=framework)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    new = json.loads(run.stdout)
    may_be = {"frontends", "offload_core", "numpy", "ml_dtypes", "xxhash", "_cffi_backend", "jax"}
    assert {name.partition(".")[0] for name in new} - sys.stdlib_module_names <= may_be
    connections = f"frontends.{framework}.integrations"
    assert all(
        name in (connections, f"{connections}.zero_files") or ".zero_files." in name
        for name in new
        if name.startswith(connections)
    )  # it reads and writes DeepSpeed's files without DeepSpeed
    assert not [name for name in new if name.startswith(("torch._dynamo", "torch.fx", "torch.distributed", "sympy"))]


@pytest.mark.long("starts interpreters that import the frameworks")
@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("blocked", "code"),
    [
        (
            ("torch", "jax", "jaxlib", "optax"),
            "import offload_core, offload_core.engine, offload_core.testing.fake_device",
        ),
        (("jax", "jaxlib", "optax", "transformers", "accelerate", "lightning"), TORCH),
        (("torch", "optax", "flax", "equinox", "orbax", "grain"), JAX),
    ],
    ids=["core", "torch", "jax"],
)
def test_nothing_needs_a_framework_it_does_not_use(blocked, code):
    if code is TORCH:
        pytest.importorskip("torch")
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(blocked=blocked, code=code)], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
