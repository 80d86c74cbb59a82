"""The global gradient norm, exact and so independent of the order and partition of the elements, and clipping."""

import math
from fractions import Fraction

import numpy as np

from ..dtypes import ElementType
from . import kernels

_LOWEST_BIT = -298


class SumOfSquares:
    """An exact sum of squares of gradients, as integer bins (``c_src/api.h``).

    ``bins`` (int64) may be added element by element to those of other ranks.
    """

    def __init__(self) -> None:
        self.bins = np.zeros(kernels.NORM_BINS, np.int64)

    def add(self, spans: np.ndarray, dtype: ElementType, *, threads: int) -> None:
        """Add the squares of the spans' ``src`` elements."""
        kernels.sum_squares(spans, dtype, self.bins, threads=threads)

    @property
    def finite(self) -> bool:
        """True if no element was an inf or a NaN."""
        return self.bins[kernels.NORM_NONFINITE] == 0

    def exact(self) -> Fraction:
        """The sum, exactly. Only meaningful if ``finite``."""
        total = sum(int(digit) << (32 * i) for i, digit in enumerate(self.bins[: kernels.NORM_DIGITS]))
        return Fraction(total, 1 << -_LOWEST_BIT)

    def norm(self) -> float:
        """The square root of the sum, in double; NaN if an element was an inf or a NaN."""
        return math.sqrt(self.exact()) if self.finite else math.nan


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor that ``torch.nn.utils.clip_grad_norm_`` applies: min(1, max_norm / (norm + 1e-6))."""
    return min(1.0, max_norm / (norm + 1e-6))
