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

SAFETENSORS_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""The NumPy types of the elements that a file may hold, by their names in the safetensors format."""
SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
