"""The element types of parameters and gradients."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class ElementType:
    """An element type: its name, bytes an element, NumPy type, and code in ``c_src/api.h``."""

    name: str
    itemsize: int
    numpy: np.dtype
    code: int

    def __str__(self) -> str:
        return self.name


FLOAT32 = ElementType("float32", 4, np.dtype(np.float32), 0)
BFLOAT16 = ElementType("bfloat16", 2, np.dtype(ml_dtypes.bfloat16), 1)
FLOAT16 = ElementType("float16", 2, np.dtype(np.float16), 2)
BYTE = ElementType("uint8", 1, np.dtype(np.uint8), -1)
"""The type of frozen parameters that are moved unchanged; no kernel computes with it."""

BY_NAME = {t.name: t for t in (FLOAT32, BFLOAT16, FLOAT16)}
BY_NUMPY = {t.numpy: t for t in BY_NAME.values()}
BY_CODE = {t.code: t for t in BY_NAME.values()}
