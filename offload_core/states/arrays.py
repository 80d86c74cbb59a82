"""Runs of optimizer states in the format in which they are kept."""

from collections.abc import Callable

import numpy as np

from ..config.state_formats import BLOCK, FORMATS, StateFormat
from ..native import kernels

assert BLOCK == kernels.STATE_BLOCK, "Python and C differ in the elements of a block"


class StateArray:
    """A one-dimensional run of a state.

    Its values lie in memory as they are (:attr:`view`), or encoded; :meth:`read` and :meth:`write` serve both.
    """

    def __init__(
        self,
        format: StateFormat,
        data: np.ndarray,
        scales: np.ndarray | None = None,
        *,
        threads: int = 1,
        first: int = 0,
        size: int | None = None,
    ) -> None:
        self.format = format
        self._data = data
        self._scales = scales
        self._threads = threads
        self._first = first
        self.size = data.size - first if size is None else size

    @classmethod
    def of(cls, array: np.ndarray) -> "StateArray":
        """Values that lie in memory as they are."""
        return cls(FORMATS[str(array.dtype)], array)

    @classmethod
    def allocate(
        cls, format: StateFormat, numel: int, allocate: Callable[[int, np.dtype], np.ndarray], threads: int
    ) -> "StateArray":
        """So many elements, all 0; ``allocate(numel, dtype)`` makes arrays of zeros."""
        scales = allocate(-(-numel // format.block), np.dtype(np.uint8)) if format.scaled else None
        return cls(format, allocate(numel, format.stored), scales, threads=threads)

    def __getitem__(self, run: slice) -> "StateArray":
        start, stop, _ = run.indices(self.size)
        return StateArray(
            self.format,
            self._data,
            self._scales,
            threads=self._threads,
            first=self._first + start,
            size=max(stop - start, 0),
        )

    @property
    def encoded(self) -> bool:
        """True if the values do not lie in memory as they are."""
        return self.format.scaled

    @property
    def view(self) -> np.ndarray:
        """The memory of values that lie there as they are."""
        assert not self.encoded
        return self._data[self._first : self._first + self.size]

    def addresses(self, offsets: np.ndarray) -> np.ndarray:
        """Where these elements lie."""
        return kernels.address(self._data) + (self._first + offsets) * self._data.itemsize

    def scale_addresses(self, offsets: np.ndarray) -> np.ndarray:
        """Where the scales of the blocks lie that these elements begin."""
        assert self._scales is not None
        return kernels.address(self._scales) + (self._first + offsets) // BLOCK

    def values(self) -> np.ndarray:
        """The values, in the format's own type: memory, or a copy that cannot be written to."""
        if not self.encoded:
            return self.view
        copy = np.empty(self.size, self.format.values.numpy)
        self.read(0, copy)
        copy.flags.writeable = False
        return copy

    def read(self, at: int, out: np.ndarray) -> None:
        """Copy elements from ``at`` on to ``out``, of any floating-point type. From any thread."""
        if not self.encoded:
            np.copyto(out, self.view[at : at + out.size])
            return
        first, left = self._first + at, out.size
        done = 0
        while left:
            numel = min(_DECODED - (first + done) % BLOCK, left)
            start = (first + done) // BLOCK * BLOCK
            out[done : done + numel] = self._decoded(start, first + done + numel)[first + done - start :]
            done, left = done + numel, left - numel

    def _decoded(self, start: int, stop: int) -> np.ndarray:
        assert self._scales is not None
        out = np.empty(stop - start, np.float32)
        scales = self._scales[start // BLOCK : -(-stop // BLOCK)]
        kernels.decode(
            self.format.name,
            self._data[start:stop],
            out,
            scales=scales,
            has_sign=self.format.has_sign,
            threads=self._threads,
        )
        return out

    def write(self, values: np.ndarray) -> None:
        """Replace the whole run, which begins with a block, and ends with one or with its parameter.

        Values are rounded to nearest. Those of :meth:`read` stay as they are.
        """
        assert values.size == self.size
        if not self.encoded:
            np.copyto(self.view, values)
            return
        assert self._scales is not None
        assert self._first % BLOCK == 0
        for start in range(0, self.size, _DECODED):
            part = np.ascontiguousarray(values[start : start + _DECODED], np.float32)
            at = self._first + start
            data, scales = self._data[at : at + part.size], self._scales[at // BLOCK : -(-(at + part.size) // BLOCK)]
            kernels.encode(
                self.format.name, part, data, scales=scales, has_sign=self.format.has_sign, threads=self._threads
            )


_DECODED = 2**20
"""Elements that are decoded at a time, whole blocks."""
