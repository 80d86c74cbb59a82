"""The offsets of a bucket's states in the bucket's block of bytes on disk."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..config.state_formats import StateFormat
from ..disk.scratch import ALIGNMENT, aligned
from .arrays import StateArray, StateBytes

_BYTE = np.dtype(np.uint8)


class ByteRange(NamedTuple):
    """A range of bytes in a bucket's block."""

    start: int
    n_bytes: int

    def of(self, memory: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return these bytes of ``memory`` as an array of element type ``dtype``."""
        return memory[self.start : self.start + self.n_bytes].view(dtype)


@dataclass(frozen=True)
class StateLayout:
    """The byte ranges of one state in a bucket's block.

    The format groups a state's elements into blocks, too. ``beside`` has one byte for each such block.
    """

    format: StateFormat
    numel: int
    upper: ByteRange | None
    """The bytes of the parameter; None: the parameter is not stored with the state."""
    data: ByteRange
    beside: ByteRange | None

    def array(self, memory: np.ndarray, threads: int) -> StateArray:
        """Return the state as an array. ``memory`` contains all bytes of the bucket's block."""
        return self._array([span and span.of(memory, _BYTE) for span in (self.upper, self.data, self.beside)], threads)

    def _array(self, parts: Sequence[np.ndarray | None], threads: int) -> StateArray:
        upper, data, beside = parts
        assert data is not None
        if upper is not None and self.format.upper is not None:
            upper = upper.view(self.format.upper.numpy)
        return StateArray(self.format, StateBytes(data.view(self.format.stored), beside, upper), threads=threads)

    def array_of(self, start: int, stop: int, read: Callable[[ByteRange], np.ndarray], threads: int) -> StateArray:
        """Return elements ``[start, stop)`` of the state.

        Args:
            start: the index of the first element of a block of the format.
            read: returns the bytes of a range of the bucket's block.
        """
        block = self.format.block
        spans = (
            self.parameter(start, stop) if self.upper is not None else None,
            _part(self.data, start, stop, self.format.stored.itemsize),
            None if self.beside is None else _part(self.beside, start // block, -(-stop // block), 1),
        )
        return self._array([span and read(span) for span in spans], threads)

    def parameter(self, start: int, stop: int) -> ByteRange:
        """Return the byte range of elements ``[start, stop)`` of the parameter. If the parameter is not stored with the
        state, return the byte range of these elements of the state."""
        if self.upper is None or self.format.upper is None:
            return _part(self.data, start, stop, self.format.stored.itemsize)
        return _part(self.upper, start, stop, self.format.upper.itemsize)

    @property
    def parameter_dtype(self) -> np.dtype:
        """The element type of the bytes in the range that :meth:`parameter` returns."""
        return self.format.stored if self.format.upper is None else self.format.upper.numpy


def _part(span: ByteRange, start: int, stop: int, itemsize: int) -> ByteRange:
    return ByteRange(span.start + start * itemsize, (stop - start) * itemsize)


class BlockLayout:
    """The byte ranges of all states of a bucket, and of the parameter if it is stored with the states. Each range
    begins at a multiple of ``ALIGNMENT``.

    Args:
        formats: the format of each state, by the state's name.
        numel: the number of elements of each state.
    """

    def __init__(self, formats: Mapping[str, StateFormat], numel: int) -> None:
        self.states: dict[str, StateLayout] = {}
        self.n_bytes = 0
        for name, format in formats.items():
            upper = None if format.upper is None else self._next(numel * format.upper.itemsize)
            data = self._next(numel * format.stored.itemsize)
            beside = self._next(-(-numel // format.block)) if format.encoded else None
            self.states[name] = StateLayout(format, numel, upper, data, beside)

    def _next(self, n_bytes: int) -> ByteRange:
        span = ByteRange(self.n_bytes, n_bytes)
        self.n_bytes += aligned(n_bytes)
        return span

    def arrays(self, memory: np.ndarray, threads: int) -> dict[str, StateArray]:
        """Return the states as arrays, by name. ``memory`` contains all bytes of the bucket's block."""
        return {name: state.array(memory, threads) for name, state in self.states.items()}


def padded_bytes(format: StateFormat, numel: int) -> int:
    """Return the bytes that ``numel`` elements of a state take in a bucket's block, padding included."""
    return BlockLayout({"": format}, numel).n_bytes


def around(span: ByteRange) -> ByteRange:
    """Return the smallest range that contains ``span`` and begins and ends at multiples of ``ALIGNMENT``."""
    start = span.start // ALIGNMENT * ALIGNMENT
    return ByteRange(start, aligned(span.start + span.n_bytes) - start)
