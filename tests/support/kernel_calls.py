"""The kernels called on plain arrays: each function copies its inputs and returns what they became."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from offload_core.dtypes import BY_NUMPY, FLOAT32, ElementType
from offload_core.native import kernels
from offload_core.native.grad_norm import SumOfSquares

INSTRUCTION_SETS = kernels.kernel_info().supported


@contextlib.contextmanager
def using(instruction_set: str) -> Iterator[None]:
    """Run the kernels of one instruction set."""
    before = kernels.kernel_info().instruction_set
    kernels.set_instruction_set(instruction_set)
    try:
        yield
    finally:
        kernels.set_instruction_set(before)


def placed(array: np.ndarray, offset: int = 0) -> np.ndarray:
    """A copy that starts ``offset`` elements past a 64-byte boundary."""
    memory = np.empty(array.nbytes + 64 + offset * array.itemsize, np.uint8)
    start = -memory.ctypes.data % 64 + offset * array.itemsize
    copy = memory[start : start + array.nbytes].view(array.dtype)
    copy[...] = array
    return copy


@dataclass(frozen=True)
class State:
    """The arrays of one update: ``grad`` of any element type, fp32 states, and the device parameter after it.

    A rule leaves the moments that it lacks as they are.
    """

    grad: np.ndarray
    master: np.ndarray
    moments: tuple[np.ndarray, ...]
    param: np.ndarray | None = None

    def __getitem__(self, part: slice) -> "State":
        param = None if self.param is None else self.param[part]
        return State(self.grad[part], self.master[part], tuple(moment[part] for moment in self.moments), param)

    def placed(self, offsets: Sequence[int]) -> "State":
        """A copy, each array at its own ``offset`` from a 64-byte boundary."""
        arrays = (self.grad, self.master, *self.moments)
        grad, master, *moments = (placed(x, offset) for x, offset in zip(arrays, offsets, strict=False))
        return State(grad, master, tuple(moments))


def update(
    states: Sequence[State],
    scalars: Sequence[np.ndarray],
    *,
    rule: str,
    param_dtype: ElementType | None,
    keep_states: bool = False,
    threads: int = 1,
    offsets: Sequence[int] = (0, 0, 0, 0, 0),
) -> list[State]:
    """One call that updates copies of the states, the i-th with the i-th scalars (the last for all further)."""
    after = [state.placed(offsets[:4]) for state in states]
    if param_dtype is not None:
        after = [replace(s, param=placed(np.zeros(s.master.size, param_dtype.numpy), offsets[4])) for s in after]
    rows = [
        {
            "grad": state.grad.ctypes.data,
            "master": state.master.ctypes.data,
            "moments": [*(moment.ctypes.data for moment in state.moments), 0, 0][: kernels.MOMENTS],
            "param": 0 if state.param is None else state.param.ctypes.data,
            "numel": state.master.size,
            "scalars": min(i, len(scalars) - 1),
        }
        for i, state in enumerate(after)
    ]
    kernels.update(
        kernels.segments_of(rows),
        np.concatenate(scalars),
        grad_dtype=BY_NUMPY[states[0].grad.dtype] if states else FLOAT32,
        param_dtype=param_dtype,
        rule=rule,
        keep_states=keep_states,
        threads=threads,
    )
    return after


def accumulate(src: np.ndarray, dst: np.ndarray, *, threads: int = 1, offset: int = 0) -> np.ndarray:
    """Return ``dst`` after ``src`` is added."""
    src, dst = placed(src, offset), placed(dst, offset)
    spans = kernels.spans_of([(src.ctypes.data, dst.ctypes.data, src.size)])
    kernels.accumulate(spans, BY_NUMPY[src.dtype], threads=threads)
    return dst


def cast(src: np.ndarray, to: ElementType, *, threads: int = 1, offset: int = 0) -> np.ndarray:
    """``src`` in another element type."""
    src, dst = placed(src, offset), placed(np.zeros(src.size, to.numpy), offset)
    kernels.cast_array(src, BY_NUMPY[src.dtype], dst, to, threads)
    return dst


def sum_of_squares(*parts: np.ndarray, threads: int = 1, offset: int = 0) -> SumOfSquares:
    """The sum over parts of one element type, in one call."""
    copies = [placed(part, offset) for part in parts]
    total = SumOfSquares()
    spans = kernels.spans_of([(copy.ctypes.data, 0, copy.size) for copy in copies])
    total.add(spans, BY_NUMPY[copies[0].dtype], threads=threads)
    return total


def reduce(
    parts: Sequence[np.ndarray], dst: np.ndarray, *, divisor: float, add: bool, threads: int = 1, offset: int = 0
) -> np.ndarray:
    """Return ``dst`` after the ranks' equal parts are summed in order and divided."""
    src, dst = placed(np.concatenate(parts), offset), placed(dst, offset)
    kernels.reduce(src, len(parts), BY_NUMPY[src.dtype], dst, divisor=divisor, add=add, threads=threads)
    return dst
