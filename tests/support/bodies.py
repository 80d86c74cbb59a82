"""Sends a function of a test to another process, with its closure: its code, where it has no name to be found by."""

import builtins
import importlib
import io
import marshal
import pickle
import types
from collections.abc import Callable
from typing import Any


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, types.FunctionType) or "<" not in value.__qualname__:
            return NotImplemented
        closure = tuple(cell.cell_contents for cell in value.__closure__ or ())
        defaults = value.__defaults__, value.__kwdefaults__
        return _made, (marshal.dumps(value.__code__), value.__module__, value.__name__, *defaults, closure)


def _made(code: bytes, module: str, name: str, defaults: Any, keywords: Any, closure: tuple[Any, ...]) -> Any:
    from _pytest.assertion import rewrite

    names = vars(importlib.import_module(module))
    names |= {"@pytest_ar": rewrite, "@py_builtins": builtins}  # what pytest's assertions call
    made = types.FunctionType(marshal.loads(code), names, name, defaults, tuple(map(types.CellType, closure)))
    made.__kwdefaults__ = keywords
    return made


def dumps(body: Callable[..., Any]) -> bytes:
    """Pickle a function that stands in another one, too."""
    file = io.BytesIO()
    _Pickler(file).dump(body)
    return file.getvalue()
