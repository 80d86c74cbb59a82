"""A run of values on disk, in a space of its own."""

import numpy as np

from ..memory.pinning import mapped
from .scratch import ALIGNMENT, ScratchFiles, Transfer, aligned


class DiskSpace:
    """Values on disk, zeros at first, that are replaced whole.

    Args:
        files: where they have their space from now on.
        size: in elements.
    """

    def __init__(self, files: ScratchFiles, size: int, dtype: np.dtype) -> None:
        self._files = files
        self.size = size
        self.parameter_dtype = dtype
        self.version: int | None = 0
        self._start = files.grow(size * dtype.itemsize)

    def write(self, values: np.ndarray) -> None:
        """Replace all values; ``values`` is of the space's own element type."""
        assert values.size == self.size
        assert values.dtype == self.parameter_dtype
        memory = mapped(aligned(values.nbytes), 1)
        memory[: values.nbytes] = values.view(np.uint8)
        self._files.write(self._start, memory).result()
        self.version = (self.version or 0) + 1

    def begin_parameter(self, memory: np.ndarray) -> Transfer | None:
        """Begin to read all values to bytes that begin a page."""
        return self._files.read(self._start, memory)

    def read_parameter(self, at: int, out: np.ndarray) -> None:
        """Copy values from ``at`` on to ``out``, of their own element type."""
        first = at * out.itemsize
        begin = first // ALIGNMENT * ALIGNMENT
        memory = mapped(aligned(first + out.nbytes - begin), 1)
        self._files.read(self._start + begin, memory).result()
        np.copyto(out.view(np.uint8), memory[first - begin :][: out.nbytes])
