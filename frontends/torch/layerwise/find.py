"""Finds the blocks of a model: modules that run one after the other, and hold most of its parameters."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from offload_core.errors import ParameterError
from offload_core.support.checks import kind_of

from ..internals.compiled import COMPILED, is_compiled

Chosen = str | Sequence[str] | Sequence[nn.Module] | None


def find_blocks(model: nn.Module, chosen: Chosen) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in the order in which they are to run.

    Args:
        chosen: the name of an ``nn.ModuleList`` or ``nn.Sequential``, or names of modules, or modules, in order. None:
            the modules of the classes in ``_no_split_modules``, as Hugging Face's models name them, else those of the
            list that holds most parameters.

    Raises:
        ParameterError: no blocks were found, or a chosen one is no module of the model.
    """
    found = _chosen(model, chosen) if chosen is not None else _not_to_split(model) or _in_largest_list(model)
    if not found:
        lists = [name for name, module in model.named_modules() if _is_list(module)]
        raise ParameterError(
            f"accumulate: {type(model).__name__} has no blocks that could be found; expected blocks=..., the name of "
            "an nn.ModuleList or nn.Sequential whose modules run one after the other, or the modules in their order"
            + (f"; it has {', '.join(map(repr, lists[:8]))}" if lists else "")
        )
    _check_not_compiled_around(model, found)
    return found


def _chosen(model: nn.Module, chosen: Chosen) -> dict[str, nn.Module]:
    names = {module: name for name, module in model.named_modules()}
    modules = {name: module for module, name in names.items()}
    if isinstance(chosen, str):
        if chosen not in modules or not _is_list(modules[chosen]):
            what = "no module" if chosen not in modules else f"of type {type(modules[chosen]).__name__}"
            raise ParameterError(
                f"accumulate: blocks={chosen!r} is {what}; expected the name of an nn.ModuleList or nn.Sequential of "
                f"{type(model).__name__}"
            )
        return {f"{chosen}.{own}": block for own, block in modules[chosen].named_children()}
    if isinstance(chosen, nn.Module) or not isinstance(chosen, Iterable):
        raise ParameterError(
            f"accumulate: blocks is {kind_of(chosen)}, expected the name of an nn.ModuleList or nn.Sequential, or a "
            "list of modules or names"
        )
    found = {}
    for each in chosen:
        name = names.get(each) if isinstance(each, nn.Module) else each
        if name is None or name not in modules:
            shown = type(each).__name__ if isinstance(each, nn.Module) else repr(each)
            raise ParameterError(
                f"accumulate: blocks has {shown}, which is no module of {type(model).__name__}; expected the modules "
                "that run one after the other, or their names"
            )
        found[name] = modules[name]
    inside = next((n for n in found for other in found if n != other and n.startswith(f"{other}.")), None)
    if inside is not None:
        raise ParameterError(f"accumulate: the block {inside!r} is inside another one; expected one after the other")
    return found


def _not_to_split(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules of the classes that ``_no_split_modules`` names, where there are several of a
    class."""
    kinds: set[str] = set()
    for module in model.modules():
        kinds.update(getattr(module, "_no_split_modules", None) or ())
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if _kind(module) in kinds and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    counts = Counter(map(_kind, found.values()))
    return {name: module for name, module in found.items() if counts[_kind(module)] > 1}


def _in_largest_list(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of the list that has most parameters, among those with several modules of one class if there
    is such a list."""
    lists = [(name, module) for name, module in model.named_modules() if _is_list(module)]
    lists = [(name, module) for name, module in lists if len(_children(module)) > 1]
    alike = [(name, module) for name, module in lists if max(Counter(map(_kind, _children(module))).values()) > 1]
    if not lists:
        return {}
    name, largest = max(alike or lists, key=lambda entry: sum(p.numel() for p in entry[1].parameters()))
    return {f"{name}.{own}" if name else own: block for own, block in largest.named_children()}


def _children(module: nn.Module) -> list[nn.Module]:
    return [*module.children()]


def _kind(module: nn.Module) -> str:
    return type(getattr(module, COMPILED, module)).__name__


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _check_not_compiled_around(model: nn.Module, blocks: Iterable[str]) -> None:
    """Raise :class:`ParameterError` if code is compiled that calls a block: it would run through all blocks at once."""
    for name, module in model.named_modules():
        around = [block for block in blocks if block != name and (not name or block.startswith(f"{name}."))]
        if around and is_compiled(module):
            raise ParameterError(
                f"accumulate: the blocks are inside {f'module {name!r}' if name else 'the model'}, which is compiled, "
                "so that its code runs through them at once; expected each block compiled, or none: block.compile()"
            )


def params_of_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[Any]]:
    """Return, for each block, its parameters that no other module of the model has."""
    users = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    own = [Counter(id(p) for m in block.modules() for p in m._parameters.values() if p is not None) for block in blocks]
    return [
        [param for param in block.parameters() if users[id(param)] == counts[id(param)]]
        for block, counts in zip(blocks, own, strict=True)
    ]
