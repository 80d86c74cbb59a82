"""The formats in which optimizer states are kept: names, bytes, and which states of a parameter have which."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from types import MappingProxyType

import numpy as np

from ..dtypes import BFLOAT16, FLOAT32, ElementType
from ..rules import MASTER, State

BLOCK = 256
"""Elements of a float8 state that share a scale. The first block begins with the parameter's first element."""


@dataclass(frozen=True)
class StateFormat:
    """The format in which the elements of one state are stored; docs/numerics.md defines each."""

    name: str
    stored: np.dtype
    values: ElementType
    """The narrowest element type that holds each value exactly."""
    block: int = 1
    """Elements that share one further byte: in float8 their scale, in split their ties. 1: there is no such byte."""
    has_sign: bool = True
    """False: values of 8 bits have one more exponent bit in place of the sign."""
    upper: ElementType | None = None
    """The parameter's type, if the parameter is the state rounded to it. None: the state stands alone."""

    @property
    def encoded(self) -> bool:
        """True if memory holds codes of the values, so that reading them needs decoding."""
        return self.block > 1

    def n_bytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` elements, without the parameter's own bytes."""
        return numel * self.stored.itemsize + (-(-numel // self.block) if self.encoded else 0)

    def __str__(self) -> str:
        return self.name


_ALL = (
    StateFormat("float32", FLOAT32.numpy, FLOAT32),
    StateFormat("bfloat16", BFLOAT16.numpy, BFLOAT16),
    StateFormat("float8", np.dtype(np.uint8), BFLOAT16, BLOCK),
)
FORMATS = {each.name: each for each in _ALL}
"""The formats that a user can ask for, and that checkpoints name."""
SPLIT = StateFormat("split", np.dtype(np.uint16), FLOAT32, 8, upper=BFLOAT16)
"""A float32 master weight of which the parameter is the upper half: it has all bits of ``"float32"``."""


class Master(Enum):
    """The place of a parameter's master weight."""

    SEPARATE = "in memory of its own, in the store"
    PARAMETER = "the parameter itself"
    WITH_PARAMETER = "in the store, with the parameter: as its upper half, or what it is rounded to"

    @classmethod
    def of(cls, formats: Mapping[str, StateFormat]) -> "Master":
        """The place that follows from the formats of the states in a store."""
        if MASTER not in formats:
            return cls.PARAMETER
        return cls.SEPARATE if formats[MASTER].upper is None else cls.WITH_PARAMETER


SHORT_NAMES: dict[str, tuple[str, str]] = {
    "fp32": ("float32", "float32"),
    "bf16": ("float32", "bfloat16"),
    "8bit": ("float32", "float8"),
}
"""The formats of master weights, and of the other states, that each ``state_format`` means."""


@cache  # a plan asks for each bucket
def formats_of(
    short: str, master: str | None, states: tuple[State, ...], own: tuple[str | None, ...], dtype: ElementType
) -> Mapping[str, StateFormat]:
    """The formats of the states of parameters of type ``dtype``, by the states' names.

    Args:
        short: a key of ``SHORT_NAMES``, for formats that are None.
        master: the format of master weights.
        own: the format of each of the other states.
    """
    of_master, of_others = SHORT_NAMES[short]
    if dtype is not BFLOAT16:  # a master weight is at least as exact as its parameter
        master = of_master = FLOAT32.name
    others = {
        state.name: replace(FORMATS[name or of_others if state.narrows else FLOAT32.name], has_sign=state.has_sign)
        for state, name in zip(states, own, strict=True)
    }
    return MappingProxyType({MASTER: FORMATS[master or of_master], **others})
