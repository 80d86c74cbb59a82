"""The formats in which optimizer states are kept: names, bytes, and which states of a parameter have which."""

from dataclasses import dataclass, replace

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
    """Elements that share a scale of one byte; 1: there are no scales."""
    has_sign: bool = True
    """False: values of 8 bits have one more exponent bit in its place."""

    @property
    def scaled(self) -> bool:
        return self.block > 1

    def n_bytes(self, numel: int) -> int:
        """Bytes of so many elements."""
        return numel * self.stored.itemsize + (-(-numel // self.block) if self.scaled else 0)

    def __str__(self) -> str:
        return self.name


_ALL = (
    StateFormat("float32", FLOAT32.numpy, FLOAT32),
    StateFormat("bfloat16", BFLOAT16.numpy, BFLOAT16),
    StateFormat("float8", np.dtype(np.uint8), BFLOAT16, BLOCK),
)
FORMATS = {each.name: each for each in _ALL}

SHORT_NAMES: dict[str, tuple[str, str, str]] = {
    "fp32": ("float32", "float32", "float32"),
    "bf16": ("float32", "bfloat16", "bfloat16"),
    "8bit": ("float32", "float8", "float8"),
}
"""What each ``state_format`` says of master weights, first and second moments."""


def formats_of(
    short: str, master: str | None, exp_avg: str | None, exp_avg_sq: str | None, dtype: ElementType
) -> dict[str, StateFormat]:
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
    return formats
