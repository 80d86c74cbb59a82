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
    """A one-dimensional run of a state's elements, in memory or on disk. Any thread may read it."""

    format: StateFormat
    size: int
    """The number of elements."""

    @property
    def view(self) -> np.ndarray | None:
        """A view of the run's values, valid as long as the store. None: the values are encoded or on disk."""
        return None

    @property
    def upper(self) -> np.ndarray | None:
        """A view of the parameter's elements that the state is stored with, only for reading. None: the parameter is
        not stored with the state, or is on disk."""
        return None

    @abstractmethod
    def __getitem__(self, run: slice) -> "StateRun": ...

    @abstractmethod
    def read(self, at: int, out: np.ndarray) -> None:
        """Copy elements ``[at, at + out.size)`` to ``out``, an array of any floating-point type."""

    @property
    def parameter_dtype(self) -> np.dtype:
        """The element type in which :meth:`begin_parameter` returns the parameter."""
        return self.format.values.numpy if self.format.upper is None else self.format.upper.numpy

    @property
    def version(self) -> int | None:
        """A number that changes whenever the run's values change; None: changes are not counted."""
        return None

    def begin_parameter(self, memory: np.ndarray) -> Transfer | None:
        """Begin to copy all of the run's parameter to ``memory``. The run must contain a whole bucket's elements.

        Args:
            memory: bytes for the parameter in ``parameter_dtype``, page-aligned.

        Returns:
            The transfer to wait for; None: the copy is complete.
        """
        out = memory[: self.size * self.parameter_dtype.itemsize].view(self.parameter_dtype)
        self.read_parameter(0, out)
        return None

    def read_parameter(self, at: int, out: np.ndarray) -> None:
        """Copy elements ``[at, at + out.size)`` of the parameter to ``out``. If the parameter is not stored with this
        run of master weights, copy the master weights, rounded to the element type of ``out``."""
        if (upper := self.upper) is not None:
            np.copyto(out, upper[at : at + out.size])
        else:
            self.read(at, out)

    @abstractmethod
    def write(self, values: np.ndarray) -> None:
        """Replace all elements of the run by ``values``, rounded to nearest. Values that came from :meth:`read` are
        stored exactly.

        The run must begin where a block of the format begins, and end where a block or the parameter ends.
        """

    def values(self) -> np.ndarray:
        """Return the values in the format's own element type: :attr:`view`, or a read-only copy if there is no view."""
        if (view := self.view) is not None:
            return view
        copy = np.empty(self.size, self.format.values.numpy)
        self.read(0, copy)
        copy.flags.writeable = False
        return copy

    def follow(self, values: np.ndarray, replaced: dict[int, np.ndarray]) -> None:
        """Compare ``values`` with the run's values after the last update, rounded to the element type of ``values``.
        Replace the elements that differ.

        All other elements get the value after the last update, with all bits. So a user who replaces weights and later
        puts the old weights back loses no bits.

        Args:
            values: one value for each element of the run.
            replaced: maps the start of each slice that earlier calls have changed to the slice's fp32 values after the
                last update. This call adds and removes entries.
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


class StateAddresses:
    """The addresses of a run of a state's elements, in the memory of the kernels that update it.

    Args:
        data_at: the address of the state's elements in the format's stored type.
        beside_at: the address of the bytes that blocks of elements share; 0: the format has none.
        upper_at: the address of the parameter's elements, if they are the upper half of the state; else 0.
        first: the number of the state's element at which the run begins.
    """

    def __init__(
        self, format: StateFormat, data_at: int, beside_at: int = 0, upper_at: int = 0, *, first: int = 0
    ) -> None:
        self.format = format
        self._data_at, self._beside_at, self._upper_at, self._first = data_at, beside_at, upper_at, first

    def after(self, numel: int) -> "StateAddresses":
        """Return the addresses of the run without its first ``numel`` elements."""
        first = self._first + numel
        return StateAddresses(self.format, self._data_at, self._beside_at, self._upper_at, first=first)

    def of(self, offsets: np.ndarray) -> np.ndarray:
        """Return the address of each element at these offsets in the run."""
        return (self._data_at + (self._first + offsets) * self.format.stored.itemsize).astype(np.uintp)

    def point(self, rows: np.ndarray, moment: int | None, offsets: np.ndarray) -> None:
        """Write the addresses of elements to the kernel's ``rows``, one row for each element.

        Args:
            moment: the index of this state among the rule's moments; None: this state is the master weight.
            offsets: the offsets in the run of elements at which a block of the format begins.
        """
        data, beside = (
            (rows["master"], rows["ties"])
            if moment is None
            else (rows["moments"][:, moment], rows["scales"][:, moment])
        )
        elements = self._first + offsets
        data[:] = self._data_at + elements * self.format.stored.itemsize
        if self._beside_at:
            beside[:] = self._beside_at + elements // self.format.block
        if self._upper_at:
            assert self.format.upper is not None
            rows["high"] = self._upper_at + elements * self.format.upper.itemsize


class StateBytes:
    """The host memory of a state.

    Args:
        data: the elements in the format's stored type.
        beside: one byte for each block of elements, such as the block's scale.
        upper: the parameter's elements, if they are the upper half of the state and ``data`` the lower half. A write to
            the state also writes to the parameter.
    """

    def __init__(self, data: np.ndarray, beside: np.ndarray | None = None, upper: np.ndarray | None = None) -> None:
        self.data = data
        self.beside = beside
        self.upper = upper

    def addresses(self, format: StateFormat) -> StateAddresses:
        """Return the state's addresses."""
        beside, upper = (0 if part is None else kernels.address(part) for part in (self.beside, self.upper))
        return StateAddresses(format, kernels.address(self.data), beside, upper)


class StateArray(StateRun):
    """A run of a state's elements in host memory, unencoded or encoded."""

    def __init__(
        self,
        format: StateFormat,
        memory: StateBytes,
        *,
        threads: int = 1,
        first: int = 0,
        size: int | None = None,
        at: StateAddresses | None = None,
    ) -> None:
        self.format = format
        self._memory = memory
        self.at = memory.addresses(format).after(first) if at is None else at
        """The run's addresses."""
        self._threads = threads
        self._first = first
        self.size = memory.data.size - first if size is None else size

    @classmethod
    def of(cls, array: np.ndarray) -> "StateArray":
        """Return a run whose unencoded values are the elements of ``array``, without a copy."""
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
        """Return a new run of ``numel`` zeros.

        Args:
            allocate: ``allocate(numel, dtype)`` returns an array of zeros for the state.
            allocate_upper: ``allocate_upper(numel, dtype)`` returns an array of zeros for the parameter, if the
                parameter is stored with the state.
        """
        beside = allocate(-(-numel // format.block), np.dtype(np.uint8)) if format.encoded else None
        upper = None if format.upper is None else allocate_upper(numel, format.upper.numpy)
        return cls(format, StateBytes(allocate(numel, format.stored), beside, upper), threads=threads)

    def __getitem__(self, run: slice) -> "StateArray":
        start, stop, _ = run.indices(self.size)
        first, size = self._first + start, max(stop - start, 0)
        at = self.at.after(start)
        return StateArray(self.format, self._memory, threads=self._threads, first=first, size=size, at=at)

    @property
    def view(self) -> np.ndarray | None:
        return None if self.format.encoded else self._memory.data[self._first : self._first + self.size]

    @property
    def upper(self) -> np.ndarray | None:
        upper = self._memory.upper
        return None if upper is None else upper[self._first : self._first + self.size]

    @property
    def stored(self) -> list[np.ndarray]:
        """The memory of this run: an array of its stored elements, and, if the format is encoded, an array with one
        byte for each block. The run must begin where a block begins."""
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
        """Return the kernels' arguments for elements ``[start, stop)`` of the state's memory. A block of the format
        begins at ``start``."""
        at = self.at.after(start - self._first)
        part = StateArray(self.format, self._memory, first=start, size=stop - start, at=at)
        data, beside = part.stored
        kinds = {"ties": beside} if self.format is SPLIT else {"scales": beside}
        if part.upper is not None:
            kinds["high"] = part.upper
        return {"data": data, "has_sign": self.format.has_sign, **kinds}


_DECODED = 2**20
"""The number of elements that are decoded at a time, a multiple of the formats' blocks."""


def _as_float32(values: np.ndarray, threads: int) -> np.ndarray:
    values = np.ascontiguousarray(values)
    if values.dtype == np.float32 or values.dtype not in BY_NUMPY:
        return values.astype(np.float32, copy=False)
    out = np.empty(values.size, np.float32)
    kernels.cast_array(values, BY_NUMPY[values.dtype], out, FLOAT32, threads)
    return out
