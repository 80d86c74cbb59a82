"""The weights of a model with PEFT's adapters merged into its base, under the names of the base model.

PEFT itself merges, on a host copy of one layer at a time, so that the bits are its own. The model does not change.
"""

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload_core.errors import ParameterError
from offload_core.support.checks import kind_of

from ..internals.compiled import uncompiled, uncompiled_module
from ..params.dtensor import is_dtensor
from ..params.values import is_quantised
from .reading import NamedWeight, checked, named_tensors, untied

_WHAT = "named_weights(merge_lora=True)"
_OTHERWISE = "expected merge_lora=False, which gives the base and the adapters as they are"
Read = Callable[[torch.Tensor], torch.Tensor | None]
"""Returns a copy of a whole tensor in host memory; None where this rank does not want it. All ranks call it."""


@dataclass(frozen=True, eq=False)
class AdaptedLayer:
    """A layer of the model that adapters change."""

    name: str
    """Its name in the base model."""
    layer: Any

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that its merged weights depend on, each once."""
        return tuple(dict.fromkeys((*self.layer.parameters(), *self.layer.buffers())))

    @property
    def base(self) -> dict[str, torch.Tensor]:
        """The tensors that are merged into, by their names in the base model."""
        layer = getattr(self.layer, "token_adapter", self.layer)
        tensors = layer.get_base_layer().state_dict(keep_vars=True)
        return {uncompiled(f"{self.name}.{own}"): tensor for own, tensor in tensors.items()}

    @property
    def recipe(self) -> tuple[Any, ...]:
        """Everything that decides the merged weights besides the values of :attr:`tensors`: which tensors they are, and
        the modules' plain attributes (active adapters, scales, disabled and merged flags)."""
        modules = (
            (path, type(module).__qualname__, [*module._parameters], [*module._buffers], _plain_attributes(module))
            for path, module in self.layer.named_modules()
        )
        return (tuple(map(id, self.tensors)), repr([*modules]))

    def check(self) -> None:
        """Raise :class:`ParameterError` if nothing can be merged into the base."""
        for name, tensor in self.base.items():
            packed = is_quantised(tensor) or (is_traceable_wrapper_subclass(tensor) and not is_dtensor(tensor))
            if packed or not tensor.is_floating_point():
                raise ParameterError(
                    f"{_WHAT}: {name!r} is quantised ({type(tensor).__name__} of {tensor.dtype}), and what is merged "
                    f"into it would be rounded; {_OTHERWISE}"
                )
        inside = [type(module).__name__ for module in self.layer.modules() if hasattr(module, "get_base_layer")]
        if hasattr(self.layer, "unload_and_optionally_merge_module") and len(inside) != 1:
            raise ParameterError(
                f"{_WHAT}: {self.name!r} is {kind_of(self.layer)} with adapters inside it, which change it "
                f"together; {_OTHERWISE}"
            )

    def merged(self, read: Read) -> list[torch.Tensor] | None:
        """Return the merged weights in the order of :attr:`base`, in host memory. All ranks call this."""
        values = {tensor: read(tensor) for tensor in self.tensors}
        if any(value is None for value in values.values()):
            return None
        layer: Any = self._copy(values)
        values.clear()
        disabled = bool(getattr(layer, "disable_adapters", False))  # the model computes with the base then
        if hasattr(layer, "unload_and_optionally_merge_module"):
            base = layer.unload_and_optionally_merge_module(merge=not disabled, safe_merge=False, adapter_names=None)
        else:
            if disabled and layer.merged:
                layer.unmerge()
            elif not disabled and not {*layer.active_adapters} <= {*layer.merged_adapters}:
                layer.merge()
            base = layer.get_base_layer()
        return [value.detach() for value in base.state_dict(keep_vars=True).values()]

    def _copy(self, values: dict[torch.Tensor, Any]) -> nn.Module:
        """Return a copy of the layer with these values, without the hooks of the engine and of others."""
        known: dict[int, Any] = {}
        for tensor in self.tensors:
            value = values[tensor]
            known[id(tensor)] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
        for module in self.layer.modules():
            for own, value in vars(module).items():
                if "_hooks" in own and isinstance(value, dict):
                    known[id(value)] = OrderedDict()
                elif isinstance(value, list) and any(isinstance(each, torch.Tensor) for each in value):
                    known[id(value)] = []  # parameters of other modules
        return copy.deepcopy(self.layer, known)


_NOT_PART = ("training", "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


def _plain_attributes(module: nn.Module) -> list[Any]:
    own = {name: value for name, value in vars(module).items() if "_hooks" not in name and name not in _NOT_PART}
    return [(name, _plain(value)) for name, value in sorted(own.items())]


def _plain(value: Any) -> Any:
    """Return the value if its ``repr`` says all of it, or else its type."""
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    if isinstance(value, Mapping):
        return [(_plain(key), _plain(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [*map(_plain, value)]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, map(_plain, value)))
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value), None if value.is_inference() else value._version)
    return type(value).__qualname__


def merged_weights(
    model: nn.Module, dtype: torch.dtype | None
) -> Iterator[tuple[list[NamedWeight], AdaptedLayer | None]]:
    """Yield the weights of the base model in its order: one that no adapter changes, or those of an adapted layer.

    Args:
        dtype: of floating-point weights; None: their own.

    Raises:
        ParameterError: an adapter cannot be merged.
    """
    names = _Names(model)
    layer_of: dict[torch.Tensor, AdaptedLayer] = {}
    for layer in names.layers.values():
        layer.check()
        for name, tensor in layer.base.items():
            if tensor in layer_of:
                raise _tied(name)
            layer_of[tensor] = layer
    in_base = {tensor: name for layer in names.layers.values() for name, tensor in layer.base.items()}
    found = {}
    for name, tensor in named_tensors(model).items():
        new = in_base.get(tensor) if names.is_inside(name) else names.in_base(name)
        if new is not None:
            found[new] = tensor
    merged: set[AdaptedLayer] = set()
    for name, tensor, others in untied(names.base_model, found):
        adapted = layer_of.get(tensor)
        if adapted is None:
            yield [checked(name, tensor, dtype, _WHAT, others)], None
        elif others:
            raise _tied(name)
        elif adapted not in merged:
            merged.add(adapted)
            yield [checked(own, value, dtype, _WHAT) for own, value in adapted.base.items()], adapted


def _tied(name: str) -> ParameterError:
    return ParameterError(
        f"{_WHAT}: {name!r} is tied to another weight, and an adapter changes one of them; {_OTHERWISE}, or a model "
        "without tied weights (tie_word_embeddings=False)"
    )


class _Names:
    """The layers that adapters change, and the base model's names of a model's tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: dict[str, AdaptedLayer] = {}
        """By their names in the model."""
        self.base_model: nn.Module = uncompiled_module(model)
        self._tuners: dict[str, str] = {}
        """From prefixes of names in the model to those in the base model."""
        self._chosen: dict[str, str] = {}
        """Modules of which one copy of several is used: the name of that copy, with the module's before it."""
        self._inside: tuple[str, ...] = ()
        peft = sys.modules.get("peft")
        if peft is None:  # nobody has imported it, so there are no adapters
            return
        from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        for path, module in model.named_modules():
            path = uncompiled(f"{path}.")[:-1]
            if isinstance(module, peft.PeftModel | peft.PeftMixedModel):
                if not isinstance(module.base_model, BaseTuner):
                    kind = type(module.active_peft_config).__name__
                    raise ParameterError(
                        f"{_WHAT}: the adapter is of {kind}, which has no weights to merge; {_OTHERWISE}"
                    )
                if not path:
                    self.base_model = uncompiled_module(module.get_base_model())
            elif isinstance(module, BaseTuner):
                self._tuners[f"{path}.model." if path else "model."] = path.removesuffix("base_model")
            elif path.startswith(self._inside):
                continue
            elif isinstance(module, ModulesToSaveWrapper):
                active = [] if module.disable_adapters else module.active_adapters
                self._chosen[f"{path}."] = (
                    f"{path}.modules_to_save.{active[0]}." if active else f"{path}.original_module."
                )
            elif isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
                name = self.in_base(f"{path}.")
                if name is not None:  # else it is a copy that is not used
                    self.layers[path] = AdaptedLayer(name.removesuffix("."), module)
                self._inside = (*self._inside, f"{path}.")

    def is_inside(self, name: str) -> bool:
        """True for a tensor of an adapted layer."""
        return name.startswith(self._inside)

    def in_base(self, name: str) -> str | None:
        """Return the base model's name of a tensor; None: it has none."""
        for module, copy_of_it in self._chosen.items():
            if name.startswith(copy_of_it):
                return self._stripped(module + name.removeprefix(copy_of_it))
            if name.startswith(module):
                return None
        return self._stripped(name)

    def _stripped(self, name: str) -> str:
        for prefix, short in self._tuners.items():
            if name.startswith(prefix):
                return short + name.removeprefix(prefix)
        return name
