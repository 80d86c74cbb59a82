"""Contiguous ranges (*runs*) of an optimizer state's elements, in the format in which a store keeps them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from ..config.state_formats import BLOCK, FORMATS, SPLIT, StateFormat
from ..disk.scratch import Transfer
from ..dtypes import BY_NUMPY, FLOAT32
from ..native import kernels

assert BLOCK == kernels.STATE_BLOCK, "Python and C differ in the elements of a block"


class StateRun(ABC):
    """A one-dimensional run of a state, in memory or on disk. It may be read in any thread."""

    format: StateFormat
    size: int
    """In elements."""

    @property
    def view(self) -> np.ndarray | None:
        """A view of values that are in memory unencoded, valid as long as the store; None: they are not."""
        return None

    @property
    def upper(self) -> np.ndarray | None:
        """A view of the parameter that is kept with the state, only for reading; None: there is no such memory."""
        return None

    @abstractmethod
    def __getitem__(self, run: slice) -> "StateRun": ...

    @abstractmethod
    def read(self, at: int, out: np.ndarray) -> None:
        """Copy elements from ``at`` on to ``out``, of any floating-point type."""

    @property
    def parameter_dtype(self) -> np.dtype:
        """The element type in which :meth:`begin_parameter` returns the parameter."""
        return self.format.values.numpy if self.format.upper is None else self.format.upper.numpy

    @property
    def version(self) -> int | None:
        """A number that differs after each change of the run; None: it is not counted."""
        return None

    def begin_parameter(self, memory: np.ndarray) -> Transfer | None:
        """Begin to copy the whole parameter, in ``parameter_dtype``, to ``memory``, which is page-aligned. The run must
        be a whole bucket's.

        Returns:
            The transfer to wait for; None: the copy is complete.
        """
        out = memory[: self.size * self.parameter_dtype.itemsize].view(self.parameter_dtype)
        self.read_parameter(0, out)
        return None

    def read_parameter(self, at: int, out: np.ndarray) -> None:
        """Copy elements of the parameter from ``at`` on to ``out``: the parameter that is kept with the master weights,
        or the rounded master weights."""
        if (upper := self.upper) is not None:
            np.copyto(out, upper[at : at + out.size])
        else:
            self.read(at, out)

    @abstractmethod
    def write(self, values: np.ndarray) -> None:
        """Replace the whole run, which begins with a block, and ends with a block or with its parameter.

        Values are rounded to nearest. Values that came from :meth:`read` are stored exactly.
        """

    def values(self) -> np.ndarray:
        """Return the values in the format's own type: :attr:`view`, or a read-only copy."""
        if (view := self.view) is not None:
            return view
        copy = np.empty(self.size, self.format.values.numpy)
        self.read(0, copy)
        copy.flags.writeable = False
        return copy

    def follow(self, values: np.ndarray, replaced: dict[int, np.ndarray]) -> None:
        """Take the elements of ``values`` that differ from the last update's values, rounded to the same type.

        All other elements get the last update's bits. So weights that somebody replaces and later puts back lose no
        bits.

        Args:
            replaced: the last update's fp32 values of each part that earlier calls have changed, by the part's start.
                This call adds and removes entries.
        """
        assert values.size == self.size
        bits = f"u{values.itemsize}"
        for start in range(0, self.size, _DECODED):
            theirs = values[start : start + _DECODED]
            mine = replaced.get(start)
            if mine is None:
                mine = np.empty(theirs.size, np.float32)
                self.read(start, mine)
            changed = mine.astype(theirs.dtype).view(bits) != theirs.view(bits)
            part = self[start : start + mine.size]
            if changed.any():
                replaced[start] = mine
                part.write(np.where(changed, theirs.astype(np.float32), mine))
            elif start in replaced:
                part.write(mine)
                del replaced[start]  # last: an interrupt may stop the write


class StateBytes:
    """The host memory of a state, and the addresses by which the kernel knows it.

    Args:
        data: the elements as they are stored.
        beside: the bytes that blocks of elements share.
        upper: the parameter, if ``data`` has only the lower bits. Writing the state writes the parameter, too.
    """

    def __init__(self, data: np.ndarray, beside: np.ndarray | None = None, upper: np.ndarray | None = None) -> None:
        self.data, self.data_at = data, kernels.address(data)
        self.beside, self.beside_at = beside, 0 if beside is None else kernels.address(beside)
        self.upper, self.upper_at = upper, 0 if upper is None else kernels.address(upper)


class StateArray(StateRun):
    """A run in host memory, unencoded or encoded."""

    def __init__(
        self, format: StateFormat, memory: StateBytes, *, threads: int = 1, first: int = 0, size: int | None = None
    ) -> None:
        self.format = format
        self._memory = memory
        self._threads = threads
        self._first = first
        self.size = memory.data.size - first if size is None else size

    @classmethod
    def of(cls, array: np.ndarray) -> "StateArray":
        """Return a run of unencoded values in this memory."""
        return cls(FORMATS[str(array.dtype)], StateBytes(array))

    @classmethod
    def allocate(
        cls,
        format: StateFormat,
        numel: int,
        allocate: Callable[[int, np.dtype], np.ndarray],
        allocate_upper: Callable[[int, np.dtype], np.ndarray],
        threads: int,
    ) -> "StateArray":
        """Return ``numel`` elements, all 0. ``allocate(numel, dtype)`` makes arrays of zeros for states, and
        ``allocate_upper`` for parameters that are kept with their states."""
        beside = allocate(-(-numel // format.block), np.dtype(np.uint8)) if format.encoded else None
        upper = None if format.upper is None else allocate_upper(numel, format.upper.numpy)
        return cls(format, StateBytes(allocate(numel, format.stored), beside, upper), threads=threads)

    def __getitem__(self, run: slice) -> "StateArray":
        start, stop, _ = run.indices(self.size)
        first, size = self._first + start, max(stop - start, 0)
        return StateArray(self.format, self._memory, threads=self._threads, first=first, size=size)

    @property
    def view(self) -> np.ndarray | None:
        return None if self.format.encoded else self._memory.data[self._first : self._first + self.size]

    @property
    def upper(self) -> np.ndarray | None:
        upper = self._memory.upper
        return None if upper is None else upper[self._first : self._first + self.size]

    def point(self, rows: np.ndarray, moment: int | None, offsets: np.ndarray) -> None:
        """Have the kernel's rows point to the elements at these offsets, each the first of a block. ``moment`` is the
        index of the state among the moments; None: this is the master weight."""
        at, memory = self._first + offsets, self._memory
        data, beside = (
            (rows["master"], rows["ties"])
            if moment is None
            else (rows["moments"][:, moment], rows["scales"][:, moment])
        )
        data[:] = memory.data_at + at * memory.data.itemsize
        if memory.beside is not None:
            beside[:] = memory.beside_at + at // self.format.block
        if memory.upper is not None:
            rows["high"] = memory.upper_at + at * memory.upper.itemsize

    @property
    def stored(self) -> list[np.ndarray]:
        """The memory of a run that begins with a block: its stored elements, and the bytes that its blocks share."""
        first, stop = self._first, self._first + self.size
        block = self.format.block
        assert first % block == 0
        data, beside = self._memory.data, self._memory.beside
        shared = [] if beside is None else [beside[first // block : -(-stop // block)]]
        return [data[first:stop], *shared]

    def read(self, at: int, out: np.ndarray) -> None:
        if (view := self.view) is not None:
            np.copyto(out, view[at : at + out.size])
            return
        first, left = self._first + at, out.size
        done = 0
        while left:
            numel = min(_DECODED - (first + done) % self.format.block, left)
            start = (first + done) // self.format.block * self.format.block
            out[done : done + numel] = self._decoded(start, first + done + numel)[first + done - start :]
            done, left = done + numel, left - numel

    def write(self, values: np.ndarray) -> None:
        assert values.size == self.size
        if (view := self.view) is not None:
            if values.dtype in BY_NUMPY and values.size:
                given = np.ascontiguousarray(values)
                kernels.cast_array(given, BY_NUMPY[given.dtype], view, self.format.values, self._threads)
            else:
                np.copyto(view, values)
            return
        for start in range(0, self.size, _DECODED):
            part = values[start : start + _DECODED]
            self._encode(self._first + start, _as_float32(part, self._threads))

    def _decoded(self, start: int, stop: int) -> np.ndarray:
        out = np.empty(stop - start, np.float32)
        kernels.decode(self.format.name, out=out, **self._arguments(start, stop), threads=self._threads)
        return out

    def _encode(self, start: int, values: np.ndarray) -> None:
        memory = self._arguments(start, start + values.size)
        kernels.encode(self.format.name, values, **memory, threads=self._threads)

    def _arguments(self, start: int, stop: int) -> dict[str, Any]:
        """The kernels' arguments for elements of ``data`` from ``start``, the first of a block, to ``stop``."""
        part = StateArray(self.format, self._memory, first=start, size=stop - start)
        data, beside = part.stored
        kinds = {"ties": beside} if self.format is SPLIT else {"scales": beside}
        if part.upper is not None:
            kinds["high"] = part.upper
        return {"data": data, "has_sign": self.format.has_sign, **kinds}


_DECODED = 2**20
"""Elements that are decoded at a time: whole blocks."""


def _as_float32(values: np.ndarray, threads: int) -> np.ndarray:
    values = np.ascontiguousarray(values)
    if values.dtype == np.float32 or values.dtype not in BY_NUMPY:
        return values.astype(np.float32, copy=False)
    out = np.empty(values.size, np.float32)
    kernels.cast_array(values, BY_NUMPY[values.dtype], out, FLOAT32, threads)
    return out
