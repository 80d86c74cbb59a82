"""Floats of every kind, arrays of them, and steps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from offload_core.dtypes import BY_NUMPY, FLOAT32, ElementType
from offload_core.native.kernels import RULES
from tests import sampling
from tests.support.kernel_calls import State
from tests.support.oracles import Step
from tests.support.rules import DRAWN


def law(max_examples: int = 60, *, least: int = 6, **others: Any) -> Callable[[Any], Any]:
    """Decorate a law of Hypothesis, or a state machine's test case. ``make test`` tries a part of its examples, and
    ``make test-all`` all of them. Other arguments are those of ``settings``.

    Args:
        least: fewer examples than these are not tried, but for that a law has fewer; less than 6 where one takes long.
    """
    chosen = settings(max_examples=sampling.examples(max_examples, least), **others)

    def decorated(test: Any) -> Any:
        if isinstance(test, type):
            test.settings = chosen
        else:
            test = chosen(test)
        return pytest.mark.slow(test) if sampling.whole else test

    return decorated


# Where formats change: zero, subnormals, limits and rounding ties of fp32, bf16 and fp16.
# fmt: off
_SPECIAL = [
    0x0, 0x1, 0x7FFF, 0x8000, 0x8001, 0x7FFFFF, 0x800000, 0x33000000, 0x33000001, 0x33800000, 0x387FE000,
    0x38800000, 0x3F000000, 0x3F800000, 0x3F801000, 0x3F803000, 0x3F808000, 0x3F818000, 0x477FE000,
    0x477FEFFF, 0x477FF000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000,
]
# fmt: on
_WIDE = st.one_of(
    st.sampled_from([*_SPECIAL, *(0x80000000 | bits for bits in _SPECIAL)]),
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
        with np.errstate(invalid="ignore"):  # ml_dtypes widens bfloat16, where a signalling NaN is an event
            values = np.where(np.isfinite(values), values, dtype.numpy.type(1))
    return np.resize(values, length)


element_types = st.sampled_from(sorted(BY_NUMPY.values(), key=lambda t: t.code))
# Both sides of each boundary of a vector and of a block of the norm.
lengths = st.one_of(st.integers(0, 70), st.sampled_from([2047, 2048, 2049, 4100]))
# Of a chunk of the dispatch.
long_lengths = st.sampled_from([1, 32767, 32768, 32769, 100_003])
offsets = st.integers(0, 17)


@st.composite
def states(draw, of_length: st.SearchStrategy[int] = lengths) -> State:
    """A state before a step; the second moment has no sign, the rest may be anything."""
    n = draw(of_length)
    grad = draw(element_types.flatmap(lambda dtype: float_arrays(dtype, n)))
    master, first, second = (draw(float_arrays(FLOAT32, n)) for _ in range(3))
    return State(grad, master, (first, np.abs(second)))


@st.composite
def steps(draw, *rules: str) -> tuple[Step, dict]:
    """A step of one of the rules (default: all), and the other arguments of its kernel call."""
    rule, param_dtype = draw(st.sampled_from(rules or sorted(RULES))), draw(st.none() | element_types)
    step = draw(DRAWN[rule.partition("_")[0]])
    keep_states = param_dtype is not None and draw(st.booleans())
    return step, {"rule": rule, "param_dtype": param_dtype, "keep_states": keep_states}
