"""Shared by the kernels' tests: floats of every kind, arrays of them, steps, and calls on plain arrays."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from offload_core import _kernels
from offload_core.dtypes import BY_NUMPY, FLOAT32, ElementType
from offload_core.grad_norm import SumOfSquares

INSTRUCTION_SETS = _kernels.kernel_info().supported
# Timing never decides a test.
LAW = settings(deadline=None, max_examples=60)

# --- calls on arrays --------------------------------------------------------------------------------


@contextlib.contextmanager
def using(instruction_set: str) -> Iterator[None]:
    """Run the kernels of one instruction set."""
    before = _kernels.kernel_info().instruction_set
    _kernels.set_instruction_set(instruction_set)
    try:
        yield
    finally:
        _kernels.set_instruction_set(before)


def placed(array: np.ndarray, offset: int = 0) -> np.ndarray:
    """A copy that starts ``offset`` elements past a 64-byte boundary."""
    memory = np.empty(array.nbytes + 64 + offset * array.itemsize, np.uint8)
    start = -memory.ctypes.data % 64 + offset * array.itemsize
    copy = memory[start : start + array.nbytes].view(array.dtype)
    copy[...] = array
    return copy


@dataclass(frozen=True)
class AdamState:
    """The arrays of one update: ``grad`` of any element type, fp32 states, and the device parameter after it."""

    grad: np.ndarray
    master: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray
    param: np.ndarray | None = None

    def __getitem__(self, part: slice) -> "AdamState":
        arrays = (self.grad, self.master, self.exp_avg, self.exp_avg_sq, self.param)
        return AdamState(*(None if x is None else x[part] for x in arrays))

    def placed(self, offsets: Sequence[int]) -> "AdamState":
        """A copy, each array at its own ``offset`` from a 64-byte boundary."""
        arrays = (self.grad, self.master, self.exp_avg, self.exp_avg_sq)
        return AdamState(*(placed(x, offset) for x, offset in zip(arrays, offsets, strict=True)))


def adam(
    states: Sequence[AdamState],
    scalars: Sequence[np.ndarray],
    *,
    op_order: str,
    adam_mode: str,
    param_dtype: ElementType | None,
    threads: int = 1,
    offsets: Sequence[int] = (0, 0, 0, 0, 0),
) -> list[AdamState]:
    """One call that updates copies of the states, the i-th with the i-th scalars (the last for all further)."""
    after = [state.placed(offsets[:4]) for state in states]
    if param_dtype is not None:
        after = [replace(s, param=placed(np.zeros(s.master.size, param_dtype.numpy), offsets[4])) for s in after]
    segments = np.zeros(len(after), _kernels.SEGMENT)
    for i, state in enumerate(after):
        for name in ("grad", "master", "exp_avg", "exp_avg_sq", "param"):
            if getattr(state, name) is not None:
                segments[i][name] = getattr(state, name).ctypes.data
        segments[i]["numel"] = state.master.size
        segments[i]["scalars"] = min(i, len(scalars) - 1)
    _kernels.adam(
        segments,
        np.concatenate(scalars),
        grad_dtype=BY_NUMPY[states[0].grad.dtype] if states else FLOAT32,
        param_dtype=param_dtype,
        op_order=op_order,
        adam_mode=adam_mode,
        threads=threads,
    )
    return after


def accumulate(src: np.ndarray, dst: np.ndarray, *, threads: int = 1, offset: int = 0) -> np.ndarray:
    """What ``dst`` becomes when ``src`` is added."""
    src, dst = placed(src, offset), placed(dst, offset)
    spans = _kernels.spans_of([(src.ctypes.data, dst.ctypes.data, src.size)])
    _kernels.accumulate(spans, BY_NUMPY[src.dtype], threads=threads)
    return dst


def cast(src: np.ndarray, to: ElementType, *, threads: int = 1, offset: int = 0) -> np.ndarray:
    """``src`` in another element type."""
    src, dst = placed(src, offset), placed(np.zeros(src.size, to.numpy), offset)
    _kernels.cast_array(src, BY_NUMPY[src.dtype], dst, to, threads)
    return dst


def sum_of_squares(*parts: np.ndarray, threads: int = 1, offset: int = 0) -> SumOfSquares:
    """The sum over parts of one element type, in one call."""
    copies = [placed(part, offset) for part in parts]
    total = SumOfSquares()
    spans = _kernels.spans_of([(copy.ctypes.data, 0, copy.size) for copy in copies])
    total.add(spans, BY_NUMPY[copies[0].dtype], threads=threads)
    return total


# --- strategies -------------------------------------------------------------------------------------

# Where formats change: zero, subnormals, limits and rounding ties of fp32, bf16 and fp16.
_SPECIAL = (
    [0x0, 0x1, 0x7FFF, 0x8000, 0x8001, 0x7FFFFF, 0x800000, 0x33000000, 0x33000001, 0x33800000, 0x387FE000]
    + [0x38800000, 0x3F000000, 0x3F800000, 0x3F801000, 0x3F803000, 0x3F808000, 0x3F818000, 0x477FE000]
    + [0x477FEFFF, 0x477FF000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000]
)
_WIDE = st.one_of(
    st.sampled_from(_SPECIAL + [0x80000000 | bits for bits in _SPECIAL]),
    st.integers(0, 2**32 - 1),
    st.floats(-4, 4, width=32).map(lambda x: int(np.float32(x).view(np.uint32))),
)
_HALF = st.one_of(_WIDE.map(lambda bits: bits >> 16), st.integers(0, 2**16 - 1))


@st.composite
def float_arrays(draw, dtype: ElementType, length: int, *, finite: bool = False) -> np.ndarray:
    """``length`` values, a short drawn row over and over: every kind of float, at the price of a few draws."""
    row = draw(st.lists(_WIDE if dtype is FLOAT32 else _HALF, min_size=1, max_size=17))
    values = np.array(row, f"u{dtype.itemsize}").view(dtype.numpy)
    if finite:
        values = np.where(np.isfinite(values), values, dtype.numpy.type(1))
    return np.resize(values, length)


element_types = st.sampled_from(sorted(BY_NUMPY.values(), key=lambda t: t.code))
# Both sides of each boundary of a vector and of a block of the norm.
lengths = st.one_of(st.integers(0, 70), st.sampled_from([2047, 2048, 2049, 4100]))
# Of a chunk of the dispatch.
long_lengths = st.sampled_from([1, 32767, 32768, 32769, 100_003])
offsets = st.integers(0, 17)
kinds = st.fixed_dictionaries(
    {
        "op_order": st.sampled_from(["torch", "optax"]),
        "adam_mode": st.sampled_from(["adamw", "adam"]),
        "param_dtype": st.none() | element_types,
    }
)


@st.composite
def adam_states(draw, of_length: st.SearchStrategy[int] = lengths) -> AdamState:
    """A state before a step; the second moment has no sign, the rest may be anything."""
    n = draw(of_length)
    grad = draw(element_types.flatmap(lambda dtype: float_arrays(dtype, n)))
    master, exp_avg, exp_avg_sq = (draw(float_arrays(FLOAT32, n)) for _ in range(3))
    return AdamState(grad, master, exp_avg, np.abs(exp_avg_sq))
