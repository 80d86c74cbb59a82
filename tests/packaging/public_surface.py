"""Prints the public surface: names, signatures, fields, bases, and the options of the commands.

    python -m tests.packaging.public_surface > tests/packaging/public_surface.txt

writes anew what ``test_public_surface.py`` expects. A change of that file is a change for users, and belongs in the
changelog. What is described is the package that Python finds first.
"""

import argparse
import dataclasses
import importlib
import inspect
import runpy
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

MODULES = {
    "offload_core": None,
    "offload_core.errors": None,
    "offload_core.lr_schedules": None,
    "offload_core.step_log": None,
    "offload_core.pipeline": ["StepReport"],
    "offload_core.memory_report": ["DeviceUse", "MemoryReport", "MemoryRow"],
    "frontends.torch": None,
    "frontends.jax": None,
    "frontends.torch.integrations.accelerate": ["save_in_shards"],
    "frontends.torch.integrations.lightning": None,
    "frontends.torch.integrations.shards": ["Shards"],
    "frontends.torch.integrations.trainer": ["OffloadTrainer"],
    "frontends.torch.integrations.transformers": None,
}
"""Public modules, and their public names where these are not the module's ``__all__`` or all that it defines."""
_OF_OPTIMIZERS = """report updates step zero_grad flush state_dict load_state_dict torch_state_dict add_param_group
    memory_report device_use where sent_bytes close"""
DOCUMENTED = {
    **dict.fromkeys(
        (
            "OffloadedAdamW",
            "OffloadedOptimizer",
            "OffloadedSGD",
            "OffloadedLion",
            "OffloadedAdagrad",
            "OffloadedMuon",
        ),
        _OF_OPTIMIZERS,
    ),
    "OffloadStrategy": "engine wrap",
    "OffloadPrecision": "",
    "OffloadTrainer": "engine",
}
"""Of these classes only what docs/api/torch.md lists: the rest is for the front end itself or for these libraries."""
COMMANDS = ["offload_core", "bench.train"]
OURS = ("offload_core", "frontends")


def value_text(value: Any) -> str:
    """A default, without what differs between runs and without the modules that things are defined in."""
    if value is inspect.Parameter.empty:
        return ""
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__name__
    text = repr(value)
    return f"<{type(value).__name__}>" if " at 0x" in text else text


def parameters(function: Any) -> str:
    """Parameters and defaults, as in a definition; annotations are checked by the typed_*.py files."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return "(…)"
    parts, kinds = [], [p.kind for p in signature.parameters.values()]
    for i, p in enumerate(signature.parameters.values()):
        if p.kind is p.KEYWORD_ONLY and (i == 0 or kinds[i - 1] not in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)):
            parts.append("*")
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = "" if p.default is p.empty else f"={value_text(p.default)}"
        parts.append(f"{star}{p.name}{default}")
        if p.kind is p.POSITIONAL_ONLY and (i + 1 == len(kinds) or kinds[i + 1] is not p.POSITIONAL_ONLY):
            parts.append("/")
    return f"({', '.join(parts)})"


def members(cls: type) -> Iterator[str]:
    """Methods and properties that this package defines, wherever among the bases, and the fields that the definition
    does not show.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    for name, field in fields.items():
        if field.default_factory is not dataclasses.MISSING:
            yield f"field {name} = {value_text(field.default_factory())}"
        elif not field.init:
            yield f"field {name}"
    found = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] in OURS:
            found |= vars(base)
    for name, member in sorted(found.items()):
        if (name.startswith("_") and name not in ("__call__", "__enter__", "__exit__", "__iter__")) or name in fields:
            continue
        if cls.__name__ in DOCUMENTED and name not in DOCUMENTED[cls.__name__].split():
            continue
        if isinstance(member, property):
            yield f"property {name}{', may be set' if member.fset else ''}"
        elif isinstance(member, (classmethod, staticmethod)):
            yield f"{type(member).__name__} {name}{parameters(member.__func__)}"
        elif inspect.isroutine(member):
            yield f"method {name}{parameters(member)}"
        else:
            yield f"attribute {name}"


def names_of(module: Any, names: list[str] | None) -> list[str]:
    if names is None:
        names = getattr(module, "__all__", None)
    if names is None:
        names = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(name for name in names if not name.startswith("_"))


def surface_of(module_name: str, names: list[str] | None, shown: dict[type, str]) -> Iterator[str]:
    module = importlib.import_module(module_name)
    for name in names_of(module, names):
        value = getattr(module, name)
        if inspect.isclass(value) and value in shown:
            yield f"class {name}: as in {shown[value]}"
        elif inspect.isclass(value):
            shown[value] = module_name
            bases = ", ".join(base.__name__ for base in value.__mro__[1:] if base.__module__.partition(".")[0] != "abc")
            # Bases that others may catch by; how the rest is put together is nobody's business.
            bases = f"({bases.removesuffix(', object')})" if issubclass(value, BaseException) else ""
            made = "" if issubclass(value, BaseException) else parameters(value)
            yield f"class {name}{bases}{made}"
            yield from (f"    {line}" for line in members(value))
        elif inspect.isroutine(value):
            yield f"def {name}{parameters(value)}"
        else:
            yield f"{name}: {type(value).__name__}"


class Parsing(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser with which ``python -m command`` reads its arguments."""

    def caught(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        raise Parsing(parser)

    argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_known_args = caught  # type: ignore
    sys.argv = [command]
    try:
        runpy.run_module(command, run_name="__main__")
    except Parsing as found:
        return found.parser
    raise RuntimeError(f"python -m {command} has read no arguments")


def options_of(parser: argparse.ArgumentParser, command: str) -> Iterator[str]:
    yield f"python -m {command}"
    subcommands = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subcommands = action.choices
            continue
        parts = [" ".join(action.option_strings) or action.dest]
        if type(action) not in (argparse._StoreAction, argparse._HelpAction):
            parts.append(type(action).__name__.strip("_"))
        if action.nargs not in (None, 0):
            parts.append(f"nargs={action.nargs}")
        if action.choices is not None:
            parts.append(f"choices={[*action.choices]}")
        if action.default not in (None, argparse.SUPPRESS):
            parts.append(f"default={value_text(action.default)}")
        if action.option_strings and action.required:
            parts.append("required")
        yield f"    {', '.join(parts)}"
    for name, sub in subcommands.items():
        yield from options_of(sub, f"{command} {name}")


def attributes() -> Iterator[str]:
    """Yield the public attributes of instances."""
    import numpy
    import torch

    import frontends.jax
    import frontends.torch

    engine = frontends.torch.wrap(torch.nn.Linear(2, 2))
    for one in (engine, engine.optimizer, frontends.jax.wrap({"w": numpy.ones(2, numpy.float32)})):
        name = type(one).__name__
        documented = DOCUMENTED[name].split() if name in DOCUMENTED else vars(one)
        yield f"{name}: {', '.join(sorted(n for n in vars(one) if n in documented and not n.startswith('_')))}"


def surface() -> Iterator[str]:
    shown: dict[type, str] = {}
    """The module under which each class is described."""
    for module, names in MODULES.items():
        yield f"# {module}"
        yield from surface_of(module, names, shown)
        yield ""
    yield "# attributes of instances"
    yield from attributes()
    yield ""
    yield "# commands"
    for command in COMMANDS:
        yield from options_of(parser_of(command), command)


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        print("\n".join(surface()))
