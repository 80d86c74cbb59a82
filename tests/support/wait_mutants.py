"""Mutants of Python code that wait for one thing less, and the check that a scenario notices.

The waits are found in the sources. A mutant is made by giving one function other code, and is gone afterwards. It is
shown to the scenarios that reach its place alone, because a search through all of them takes most of the time.
"""

import ast
import gc
import importlib
import inspect
import mmap
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from offload_core.memory import working_memory

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("offload_core", "frontends/torch")
MARK = "  # waits"
"""Ends the line that defines a function that waits: its ``def``, or the assignment of a callable to a name."""
DEFINITION = ast.FunctionDef | ast.ClassDef
OF_TORCH = {"wait_event", "wait_stream", "record_stream"}
"""Methods of torch's streams that wait, which no line of this repository defines."""


@dataclass(frozen=True)
class Wait:
    """A call that waits and whose value nobody needs; it is taken out, its arguments are not."""

    module: str
    function: str
    """The outermost one around it, as ``Class.method``."""
    line: int
    column: int
    text: str

    def __str__(self) -> str:
        return f"{self.module}.{self.function}: {self.text}"

    def tree(self) -> ast.AST:
        return _Removed(self).visit(ast.parse(source_of(self.module)))


@dataclass(frozen=True)
class Other(Wait):
    """An expression in whose place another stands: an order or a memory's owner that is missing."""

    new: str
    said: str

    def __str__(self) -> str:
        return f"{self.module}.{self.function}: {self.said}"

    def tree(self) -> ast.AST:
        return _Exchanged(self).visit(ast.parse(source_of(self.module)))


@dataclass(frozen=True)
class Change:
    """Another text in one function: what makes a wait effective, where it is no call of its own."""

    module: str
    function: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.module}.{self.function}: {self.old} -> {self.new}"

    def _begin(self, source: str) -> int:
        """Return where ``old`` begins in the module's source."""
        nodes = ast.parse(source).body
        for name in self.function.split("."):
            [node] = [n for n in nodes if isinstance(n, DEFINITION) and n.name == name]
            nodes = node.body
        lines = source.splitlines(keepends=True)
        before = "".join(lines[: node.lineno - 1])
        body = "".join(lines[node.lineno - 1 : node.end_lineno])
        assert body.count(self.old) == 1, f"{self.module} no longer holds what this mutant replaces"
        return len(before) + body.index(self.old)

    @property
    def line(self) -> int:
        source = source_of(self.module)
        return source.count("\n", 0, self._begin(source)) + 1

    def tree(self) -> ast.AST:
        source = source_of(self.module)
        begin = self._begin(source)
        return ast.parse(source[:begin] + self.new + source[begin + len(self.old) :])


Mutant = Wait | Change
DROPPED = f"if there are too few mutants, a wait has lost its mark ({MARK.strip()!r}); else write the new number here"


def by_name(mutants: Iterable[Mutant]) -> dict[str, Mutant]:
    """The mutants by what they change; equal ones of a function are counted. An edit elsewhere renames none."""
    named: dict[str, Mutant] = {}
    counts: Counter[str] = Counter()
    for mutant in mutants:
        name = " ".join(str(mutant).split())
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name}, number {counts[name]}"] = mutant
    return named


def modules_of(package: str) -> list[str]:
    """The names of all modules of a package and of those inside it."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / package).rglob("*.py"))]
    return [".".join(path.parts) for path in paths if path.name != "__init__"]


def source_of(module: str) -> str:
    return (ROOT / (module.replace(".", "/") + ".py")).read_text()


def names_marked_in(module: str) -> dict[int, str]:
    """Return the names that the marks of a module stand beside, by line. Raise an AssertionError if one has no name."""
    lines = source_of(module).splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith(MARK)}
    found = {}
    for node in ast.walk(ast.parse("\n".join(lines))) if marked else ():
        if isinstance(node, ast.FunctionDef):
            found |= {node.lineno: node.name} if node.lineno in marked else {}
        elif isinstance(node, ast.Assign) and node.end_lineno in marked:
            found[node.end_lineno] = getattr(target := node.targets[0], "attr", getattr(target, "id", None))
    assert found.keys() == marked, f"{module}: {MARK.strip()!r} in lines {marked - found.keys()} defines no function"
    return found


@cache
def waits() -> set[str]:
    """The names of functions that wait: each has a mark where it is defined."""
    modules = [module for package in PACKAGES for module in modules_of(package)]
    return OF_TORCH.union(*(names_marked_in(module).values() for module in modules))


def unmarked(module: str) -> list[str]:
    """Return the functions without a mark whose name has one elsewhere, as ``module:line: name``."""
    marked, nodes = names_marked_in(module), ast.walk(ast.parse(source_of(module)))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name in waits()]
    return [f"{module}:{node.lineno}: {node.name}" for node in functions if node.lineno not in marked]


def is_wait(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Attribute) and called.attr == "change" and len(node.args) > 1:
        called = node.args[1]  # StateLock.change(what, act)
    return getattr(called, "attr", getattr(called, "id", None)) in waits()


@cache
def nodes_of(module: str) -> list[tuple[ast.AST, ast.stmt, str]]:
    """All of a module inside functions: a node, the statement that it is in, and the outermost function around it."""
    found: list[Any] = []

    def visit(node: ast.AST, statement: ast.stmt | None, path: tuple[str, ...]) -> None:
        if isinstance(node, ast.stmt) and not isinstance(node, ast.With | ast.If | ast.For | ast.While | ast.Try):
            statement = node
        if path:
            found.append((node, statement, ".".join(path[: 2 if path[0].lstrip("_")[0].isupper() else 1])))
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, DEFINITION)
            visit(child, statement, (*path, child.name) if named else path)

    visit(ast.parse(source_of(module)), None, ())
    return found


def waits_of(module: str) -> Iterator[Wait]:
    """Calls that wait, and whose value nobody needs."""
    for node, _, function in nodes_of(module):
        if isinstance(node, ast.Expr | ast.Return | ast.Lambda):
            value = node.body if isinstance(node, ast.Lambda) else node.value
            if value is not None and is_wait(value):
                yield Wait(module, function, value.lineno, value.col_offset, ast.unparse(value))


def orders_of(module: str) -> Iterator[Other]:
    """Events and marks that streams wait for, each as if it had been reached."""
    for node, _, function in nodes_of(module):
        name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if name == "record_event":
            new = f"torch.Event({ast.unparse(node.func.value)}.device)"
        elif name == "mark":
            new = "__import__('offload_core').device.events.Done()"
        else:
            continue
        yield _other(module, function, node, new, ast.unparse(node))


def keepers_of(module: str) -> Iterator[Other]:
    """Yield mutants of what keeps memory alive until a copy has ended: each argument of a call of ``event``."""
    for node, _, function in nodes_of(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "event":
            for argument in node.args:
                for each in argument.elts if isinstance(argument, ast.Tuple) else [argument]:
                    said = f"{ast.unparse(each)} of {ast.unparse(node)}"
                    yield _other(module, function, each, "None", said)


def pins_of(module: str) -> Iterator[Other]:
    """Yield mutants of pinned memory and of copies that do not block, which let copies run while the host goes on."""
    for node, statement, function in nodes_of(module):
        if isinstance(node, ast.keyword) and node.arg in ("pinned", "pin_memory", "non_blocking"):
            yield _other(module, function, node.value, "False", ast.unparse(statement))


def mutants_of(module: str) -> Iterator[Mutant]:
    """All of them: waits, orders, keepers and pins."""
    for find in (waits_of, orders_of, keepers_of, pins_of):
        yield from find(module)


def _other(module: str, function: str, node: ast.AST, new: str, said: str) -> Other:
    return Other(module, function, node.lineno, node.col_offset, ast.unparse(node), new, said)


class _Removed(ast.NodeTransformer):
    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if (node.lineno, node.col_offset) != (self._wait.line, self._wait.column):
            return node
        if ast.unparse(node) != self._wait.text:
            return node  # "future.result()" of "future.result().wait()" begins at the same place
        called = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        parts = [called, *node.args, *(keyword.value for keyword in node.keywords), ast.Constant(None)]
        return ast.Subscript(ast.Tuple(parts, ast.Load()), ast.Constant(-1), ast.Load())


class _Exchanged(ast.NodeTransformer):
    def __init__(self, other: Other) -> None:
        self._other = other

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        place = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        if place != (self._other.line, self._other.column) or not isinstance(node, ast.expr):
            return node
        if ast.unparse(node) != self._other.text:
            return node  # "a" of "a.b()" begins at the same place
        return ast.parse(self._other.new, mode="eval").body


def functions_of(module: types.ModuleType) -> Iterator[types.FunctionType]:
    classes = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    for owner in [module, *classes]:
        for value in vars(owner).values():
            function = value.fget if isinstance(value, property) else inspect.unwrap(getattr(value, "__func__", value))
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                yield function


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from codes_of(constant)


Codes = dict[types.FunctionType, types.CodeType]


def codes_in(tree: ast.AST, module: str, functions: Collection[str]) -> Codes:
    """Return the code that these functions of a module have in another tree."""
    codes = [*codes_of(compile(ast.fix_missing_locations(tree), f"<another {module}>", "exec"))]
    found = {}
    for name in functions:
        [code] = [c for c in codes if c.co_qualname == name]
        [function] = {f for f in functions_of(importlib.import_module(module)) if f.__qualname__ == name}
        assert function.__code__.replace(co_filename="") != code.replace(co_filename="")
        found[function] = code
    return found


@contextmanager
def running(codes: Codes) -> Iterator[None]:
    """Functions run other code meanwhile."""
    sound = {function: function.__code__ for function in codes}
    for function, code in codes.items():
        function.__code__ = code
    working_memory._BLOCKS.clear()  # engines that are made now share no memory with earlier ones, nor with later ones
    try:
        yield
    finally:
        for function, code in sound.items():
            function.__code__ = code
        working_memory._BLOCKS.clear()


def made(mutant: Mutant) -> AbstractContextManager[None]:
    """The function around the mutated place runs other code meanwhile."""
    return running(codes_in(mutant.tree(), mutant.module, [mutant.function]))


REACHED = mmap.mmap(-1, 4096)
"""A byte for each mutant, by its number: 1 once this process or a fork has reached its place."""


def noted(module: str, mutants: Mapping[int, Mutant]) -> Codes:
    """Return code of the functions of these mutants, by number, that notes in ``REACHED`` which places it reaches.

    The note stands before the innermost statement around a place.
    """
    tree = ast.parse(source_of(module))
    bodies = [value for node in ast.walk(tree) for _, value in ast.iter_fields(node) if isinstance(value, list)]

    def extent(statement: tuple[ast.stmt, list[ast.stmt]]) -> tuple[int, bool]:
        node, _ = statement
        return node.end_lineno - node.lineno, isinstance(node, DEFINITION)

    statements = [(node, body) for body in bodies for node in body if isinstance(node, ast.stmt)]
    for number, mutant in mutants.items():
        line = mutant.line
        around = [(node, body) for node, body in statements if node.lineno <= line <= node.end_lineno]
        node, body = min(around, key=extent)
        note = f"__import__('sys').modules[{__name__!r}].REACHED[{number}] = 1"
        body[body.index(node) : body.index(node)] = ast.parse(note).body
    return codes_in(tree, module, {mutant.function for mutant in mutants.values()})


class Search:
    """Shows mutants to the scenarios that reach their places, in the order of the scenarios.

    Any order finds who notices. A scenario that notices much in little time is worth a place at the front.
    """

    def __init__(self, mutants: Mapping[str, Mutant], scenarios: Mapping[str, Callable[[], None]]) -> None:
        assert len(mutants) <= len(REACHED)
        self._mutants = mutants
        self._scenarios = scenarios
        self._reached: dict[str, set[str]] = {}
        """The mutants whose places each scenario reaches that was asked about."""

    @cached_property
    def _noting(self) -> Codes:
        modules: dict[str, dict[int, Mutant]] = {}
        for number, mutant in enumerate(self._mutants.values()):
            modules.setdefault(mutant.module, {})[number] = mutant
        found = [noted(module, mutants) for module, mutants in modules.items()]
        return {function: code for codes in found for function, code in codes.items()}

    def reached_by(self, scenario: str) -> set[str]:
        """Return the mutants whose places it reaches. It is played once, by the sound code."""
        if scenario not in self._reached:
            REACHED[:] = bytes(len(REACHED))
            with running(self._noting):
                self._scenarios[scenario]()
            self._reached[scenario] = {name for name, there in zip(self._mutants, REACHED[:], strict=False) if there}
        return self._reached[scenario]

    def who_notices(self, mutant: str, among: str = "") -> str | None:
        """Return the first scenario that fails under this mutant, of those whose name begins with ``among``."""
        changed = self._mutants[mutant]
        for name, scenario in self._scenarios.items():
            if not name.startswith(among) or mutant not in self.reached_by(name):
                continue
            try:
                with made(changed):
                    scenario()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                print(f"{mutant}  =>  {name}: {error!r:.200}")
            else:
                continue
            gc.collect()  # engines that it left end here, by the sound code: another's copies would kill the process
            return name
        return None
