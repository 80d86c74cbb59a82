"""The formats in which optimizer states are kept: names, bytes, and which states of a parameter have which."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import numpy as np

from ..dtypes import BFLOAT16, FLOAT32, ElementType

BLOCK = 256
"""Elements of a float8 state that share a scale. The first block begins with the parameter's first element."""


@dataclass(frozen=True)
class StateFormat:
    """How the elements of one state are kept; docs/numerics.md defines each."""

    name: str
    stored: np.dtype
    values: ElementType
    """The narrowest element type that holds each value exactly."""
    block: int = 1
    """Elements that share one byte more: of float8 their scale, of split their ties. 1: there is no such byte."""
    has_sign: bool = True
    """False: values of 8 bits have one more exponent bit in its place."""
    upper: ElementType | None = None
    """The value rounded to this type is kept, too: it is the parameter. None: the state stands alone."""

    @property
    def encoded(self) -> bool:
        """Whether the values do not lie in memory as they are."""
        return self.block > 1

    def n_bytes(self, numel: int) -> int:
        """Bytes of so many elements, without those of the parameter."""
        return numel * self.stored.itemsize + (-(-numel // self.block) if self.encoded else 0)

    def __str__(self) -> str:
        return self.name


_ALL = (
    StateFormat("float32", FLOAT32.numpy, FLOAT32),
    StateFormat("bfloat16", BFLOAT16.numpy, BFLOAT16),
    StateFormat("float8", np.dtype(np.uint8), BFLOAT16, BLOCK),
)
FORMATS = {each.name: each for each in _ALL}
"""Those that a user can ask for, and that checkpoints name."""
SPLIT = StateFormat("split", np.dtype(np.uint16), FLOAT32, 8, upper=BFLOAT16)
"""A float32 master weight of which the parameter is the upper half: it has all bits of ``"float32"``."""

SHORT_NAMES: dict[str, tuple[str, str, str]] = {
    "fp32": ("float32", "float32", "float32"),
    "bf16": ("float32", "bfloat16", "bfloat16"),
    "8bit": ("float32", "float8", "float8"),
}
"""What each ``state_format`` says of master weights, first and second moments."""


@cache  # a plan asks for each bucket
def formats_of(
    short: str, master: str | None, exp_avg: str | None, exp_avg_sq: str | None, dtype: ElementType
) -> Mapping[str, StateFormat]:
    """The formats of the states of parameters of type ``dtype``, by the states' names.

    Args:
        short: a key of ``SHORT_NAMES``, for those of the next three that are None.
    """
    given = (master, exp_avg, exp_avg_sq)
    names = [own or other for own, other in zip(given, SHORT_NAMES[short], strict=True)]
    if dtype is not BFLOAT16:  # a master weight is at least as exact as its parameter
        names[0] = FLOAT32.name
    formats = {state: FORMATS[name] for state, name in zip(("master", "exp_avg", "exp_avg_sq"), names, strict=True)}
    formats["exp_avg_sq"] = replace(formats["exp_avg_sq"], has_sign=False)
    return MappingProxyType(formats)
