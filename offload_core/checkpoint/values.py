"""Plain values as JSON with arrays beside it, without pickle: for the ``state_dict()`` of a scheduler, for example.

None, booleans, integers, finite floats, strings, and lists and dictionaries with string keys of these stay as they are
in JSON. Other values become ``{"$": kind, …}``.
"""

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import SAFETENSORS_NAMES
from ..errors import CheckpointError

_KIND = "$"
_DEEPEST = 200


class ArrayType(NamedTuple):
    """A framework's type of arrays: its name in JSON, a test for it, and conversions to and from NumPy."""

    kind: str
    of: Callable[[Any], bool]
    to_numpy: Callable[[Any], np.ndarray]
    from_numpy: Callable[[np.ndarray], Any]


NUMPY = ArrayType("array", lambda value: isinstance(value, np.ndarray), np.asarray, np.asarray)


def encode(value: Any, arrays: list[np.ndarray], types: Sequence[ArrayType] = (), *, where: str) -> Any:
    """A value as JSON can hold it; arrays are appended to ``arrays``.

    Raises:
        CheckpointError: it holds a value of another type; the message gives its path, which begins with ``where``.
    """
    types = (*types, NUMPY)

    def walk(value: Any, where: str, depth: int) -> Any:
        if depth > _DEEPEST:
            raise CheckpointError(f"{where[:80]}…: more than {_DEEPEST} levels deep; expected plain values")
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
        if type(value) is complex:
            return {_KIND: "complex", "value": [walk(part, where, depth + 1) for part in (value.real, value.imag)]}
        if isinstance(value, np.generic):
            return {_KIND: "scalar", "value": array(np.asarray(value), where)}
        if isinstance(value, bytes | bytearray):
            return {_KIND: "bytes", "value": base64.b64encode(value).decode()}
        if type(value) in (list, tuple, set, frozenset):
            items = [walk(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
            return items if type(value) is list else {_KIND: type(value).__name__, "value": items}
        if type(value) in (dict, OrderedDict, defaultdict, Counter):  # defaultdict without its factory, which is code
            kind = "Counter" if type(value) is Counter else "dict"
            if kind == "dict" and all(type(key) is str and not key.startswith(_KIND) for key in value):
                return {key: walk(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
            items = [
                [walk(key, where, depth + 1), walk(item, f"{where}[{key!r}]", depth + 1)] for key, item in value.items()
            ]
            return {_KIND: kind, "value": items}
        for arrays_of in types:
            if arrays_of.of(value):
                try:
                    as_numpy = arrays_of.to_numpy(value)
                except Exception as error:  # sparse, donated, of several processes: each framework has its own
                    raise CheckpointError(f"{where}: {error}") from error
                return {_KIND: arrays_of.kind, "value": array(as_numpy, where)}
        raise CheckpointError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}; expected plain values (None, numbers, "
            "strings, bytes, lists, tuples, dictionaries) and arrays: a checkpoint holds nothing that would have to be "
            "run to be read"
        )

    def array(value: np.ndarray, where: str) -> int:
        if value.dtype not in SAFETENSORS_NAMES:
            raise CheckpointError(
                f"{where} is an array of {value.dtype}; expected one of {', '.join(map(str, SAFETENSORS_NAMES))}"
            )
        arrays.append(value)
        return len(arrays) - 1

    return walk(value, where, 0)


def decode(value: Any, arrays: Sequence[np.ndarray], types: Sequence[ArrayType] = ()) -> Any:
    """The inverse of :func:`encode`. Arrays of a framework that is not in ``types`` become NumPy arrays.

    Raises:
        ValueError, KeyError, TypeError, IndexError: ``value`` is not an output of :func:`encode`.
    """
    from_numpy = {kind.kind: kind.from_numpy for kind in types}

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        if _KIND not in value:
            return {key: walk(item) for key, item in value.items()}
        kind, held = value[_KIND], value["value"]
        if kind == "float":
            return float(held)
        if kind == "complex":
            return complex(*walk(held))
        if kind == "bytes":
            return base64.b64decode(held, validate=True)
        if kind in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](walk(held))
        if kind in ("dict", "Counter"):
            return {"dict": dict, "Counter": Counter}[kind]({walk(key): walk(item) for key, item in held})
        if kind == "scalar":
            return arrays[held][()]
        array = arrays[held]
        try:
            return from_numpy.get(kind, np.asarray)(array)
        except Exception as error:  # a framework's own, for keys of a wrong shape, say
            raise ValueError(f"{kind}: {error}") from error

    return walk(value)
