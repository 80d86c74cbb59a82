"""Hooks on the modules that use partitioned parameters (stage 3)."""

import weakref
from collections import OrderedDict
from typing import Any, cast

from torch import nn
from torch.utils.hooks import RemovableHandle

from offload_core.errors import ParameterError

from ..internals.compiled import GraphHook, is_scripted


class ModuleHooks:
    """Adds one hook before and one hook after each module's forward. The hook after the forward also runs if the
    forward raises.

    All these hooks have one id, ``_number``. Torch guards a compiled graph on the ids of the module's hooks. With one
    id for all hooks, equal modules share a graph.
    """

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._number = RemovableHandle(OrderedDict()).id

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._modules

    def add(self, module: nn.Module, before: GraphHook, after: GraphHook) -> None:
        """Call ``before`` as the first hook before the module's forward, and ``after`` when the forward ends or
        raises."""
        self._modules.add(module)
        module._forward_pre_hooks[self._number] = before
        cast("OrderedDict[int, Any]", module._forward_pre_hooks).move_to_end(self._number, last=False)
        module._forward_hooks[self._number] = after
        module._forward_hooks_always_called[self._number] = True

    def remove(self) -> None:
        """Remove all hooks."""
        for module in self._modules:
            for hooks in (module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called):
                hooks.pop(self._number, None)
        self._modules.clear()


def check_hooks_run(model: nn.Module, threshold: int) -> None:
    """Raise :class:`ParameterError` if TorchScript runs a module with parameters of ``threshold`` elements or more."""
    for name, module in model.named_modules():
        if not is_scripted(module):
            continue
        for own, param in module.named_parameters():
            if param.numel() >= threshold:
                where = f"module {name!r}" if name else "the model"
                raise ParameterError(
                    f"{where} is compiled by TorchScript, which does not run the hooks that gather its {own!r} in "
                    "stage 3; expected the Python module, stage=2, or a param_persistence_threshold above its "
                    f"{param.numel():,} elements"
                )
