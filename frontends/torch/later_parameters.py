"""Finds parameters that came to a model after ``wrap``: those of adapters that were added, of modules that were put in.

Torch tells whenever a module, of whatever model, gets a parameter or a module. Only then are the model's parameters
looked through.
"""

import weakref
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_registrations = 0
"""Parameters and modules that modules of this process have got since the first engine was made."""
_watched = False


class LaterParameters:
    """Tells which parameters came to the model since this was made, or since :meth:`of` was first called.

    In a copy it begins anew: it is then of a copied model.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        _watch()
        self._first: dict[int, weakref.ref[nn.Parameter]] | None = None if model is None else _known(model)
        self._later: dict[str, nn.Parameter] = {}
        self._seen = _registrations

    def of(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Those parameters, by name."""
        if self._first is None:
            self._first, self._seen = _known(model), _registrations
        if self._seen != _registrations:
            first = self._first
            self._seen = _registrations
            self._later = {name: param for name, param in model.named_parameters() if not _is_in(first, param)}
        return self._later

    def __reduce__(self) -> Any:
        return LaterParameters, ()


def _known(model: nn.Module) -> "dict[int, weakref.ref[nn.Parameter]]":
    return {id(param): weakref.ref(param) for param in model.parameters()}


def _is_in(known: "dict[int, weakref.ref[nn.Parameter]]", param: nn.Parameter) -> bool:
    return id(param) in known and known[id(param)]() is param


def _watch() -> None:
    global _watched
    if not _watched:
        _watched = True
        register_module_parameter_registration_hook(_count)
        register_module_module_registration_hook(_count)


def _count(*registered: Any) -> None:
    _count_one()


def _count_one() -> bool:
    global _registrations
    _registrations += 1
    return True


_count_one._dynamo_marked_constant = True  # type: ignore[attr-defined]
# A forward that makes modules, and is compiled, would be compiled again for each count.
