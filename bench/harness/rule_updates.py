"""Calls of the update kernel as the engine makes them: any rule, with its states in any format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from bench.harness.streaming import READ, UPDATE, WRITE, Traffic
from offload_core.dtypes import BFLOAT16, FLOAT32, ElementType
from offload_core.memory.host_memory import HostMemory
from offload_core.native import kernels
from offload_core.rules import MASTER, Rule, Scalars

_NUMPY = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float8": np.uint8, "split": np.uint16}
_COLUMNS = 1024
"""Columns of the matrix that the parameters are, for a rule that updates matrices."""

FORMATS = {
    "fp32": ("float32", "float32"),
    "bf16 moments": ("float32", "bfloat16"),
    "8-bit moments": ("float32", "float8"),
    "split masters": ("split", "float32"),
    "split masters, 8-bit moments": ("split", "float8"),
    "bf16 masters": ("bfloat16", "float32"),
    "bf16 masters, 8-bit moments": ("bfloat16", "float8"),
}
"""The format of the master weights, and that of all moments that may be narrow."""


def formats_of(rule: Rule, name: str) -> dict[str, str]:
    """Return the format of each state, by a name in ``FORMATS``."""
    master, moments = FORMATS[name]
    return {MASTER: master, **{state.name: moments if state.narrows else "float32" for state in rule.states}}


def distinct_formats(rule: Rule) -> list[str]:
    """Return the names in ``FORMATS`` that differ for a rule: the first of those that are the same."""
    known: dict[tuple[str, ...], str] = {}
    for name in FORMATS:
        known.setdefault(tuple(formats_of(rule, name).values()), name)
    return list(known.values())


@dataclass(frozen=True)
class Call:
    """A call of the kernel, and the arrays that it passes over."""

    run: Callable[[], None]
    traffic: Traffic


def gradient(memory: HostMemory, n: int, dtype: ElementType) -> np.ndarray:
    """Return a gradient of n elements."""
    array = memory.allocate("grad", n, dtype.numpy)
    array[:] = np.resize(np.random.default_rng(0).standard_normal(1 << 14).astype(np.float32) * 1e-3, n)
    return array


def calls(
    memory: HostMemory,
    threads: int,
    rule: Rule,
    hyper: Any,
    formats: Mapping[str, str],
    grad: np.ndarray,
    param: np.ndarray | None,
    times: int = 1,
) -> dict[str, Call]:
    """Return the kernel's passes over newly allocated states, each of which is made so often in a call.

    There is one pass, ``"update"``; before it, of a rule with a part that a device computes, ``"direction"``.

    Args:
        grad: float32 or bfloat16.
        param: the bfloat16 parameter that is written; None: the master weight is the parameter.
    """
    n = grad.size
    narrow = grad.dtype == BFLOAT16.numpy
    states = {name: _state(memory, rule, name, known, grad, param, threads) for name, known in formats.items()}
    master, *moments = (states[name] for name in rule.state_names)
    row: dict[str, Any] = {"grad": grad, "numel": n, "param": 0 if param is None else param}
    row |= {"master": master["data"], **{kind: array for kind, array in master.items() if kind in ("high", "ties")}}
    row["moments"] = [moment["data"] for moment in moments]
    row["scales"] = [moment.get("scales", 0) for moment in moments]
    run, grad_dtype = kernels.HostKernels(threads), BFLOAT16 if narrow else FLOAT32
    matrix = None if rule.device_kernel is None else (n // _COLUMNS, _COLUMNS)
    scalars = Scalars([rule], [hyper], [0], [matrix], np.zeros(1, np.int64), np.array([9]), [0], grad_scale=0.5)
    read = [(grad, READ)]
    written = [] if param is None or "high" in master else [(param, WRITE)]
    updated = [(array, UPDATE) for state in states.values() for array in state.values()]
    found = {}
    if rule.device_kernel is not None:
        direction = memory.allocate("direction", n, BFLOAT16.numpy)
        first = _segments({**row, "param": direction}, times)
        kept = [(moment["data"], READ) for moment in moments]
        passed = [*read, *kept, (direction, WRITE)]
        found["direction"] = Call(lambda: rule.directions(run, first, scalars, grad_dtype=grad_dtype), passed)
        row["moments"], row["scales"] = [*row["moments"], direction], [*row["scales"], 0]
        read.append((direction, READ))
    segments = _segments(row, times)

    def update() -> None:
        out = None if param is None else BFLOAT16
        rule.update(run, segments, scalars, formats, grad_dtype=grad_dtype, param_dtype=out, keep_states=False)

    return {**found, "update": Call(update, [*read, *updated, *written])}


def _segments(row: Mapping[str, Any], times: int) -> np.ndarray:
    def address(value: Any) -> Any:
        if isinstance(value, list):
            return [address(each) for each in value]
        return kernels.address(value) if isinstance(value, np.ndarray) else value

    plain = {name: address(value) for name, value in row.items()}
    return kernels.segments_of([plain] * times)


def _state(
    memory: HostMemory,
    rule: Rule,
    name: str,
    known: str,
    grad: np.ndarray,
    param: np.ndarray | None,
    threads: int,
) -> dict[str, np.ndarray]:
    """Allocate a state in a format, and give it values that the gradient might have left."""
    n = grad.size
    arrays = {"data": memory.allocate(name, n, np.dtype(_NUMPY[known]))}
    if known == "float8":
        arrays["scales"] = memory.allocate("scale", -(-n // kernels.STATE_BLOCK), np.dtype(np.uint8))
    if known == "split":
        assert param is not None
        arrays |= {"high": param, "ties": memory.allocate("ties", -(-n // 8), np.dtype(np.uint8))}
    has_sign = all(state.has_sign for state in rule.states if state.name == name)
    values = grad.astype(np.float32)
    kinds = {kind: array for kind, array in arrays.items() if kind != "data"}
    data = arrays["data"]
    kernels.encode(known, values if has_sign else values * values, data, **kinds, has_sign=has_sign, threads=threads)
    return arrays
