"""The places of a bucket's states in the block of bytes that a disk keeps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..config.state_formats import StateFormat
from ..disk.scratch import ALIGNMENT, aligned
from .arrays import StateArray


class Span(NamedTuple):
    """Bytes of a block."""

    start: int
    n_bytes: int

    def of(self, memory: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return these bytes of ``memory`` as elements."""
        return memory[self.start : self.start + self.n_bytes].view(dtype)


@dataclass(frozen=True)
class StateLayout:
    """One state's place: its elements as they are stored, and the bytes that blocks of elements share."""

    format: StateFormat
    numel: int
    data: Span
    beside: Span | None

    def array(self, memory: np.ndarray, threads: int) -> StateArray:
        """Return the state in a block's memory."""
        beside = None if self.beside is None else self.beside.of(memory, np.dtype(np.uint8))
        return StateArray(self.format, self.data.of(memory, self.format.stored), beside, threads=threads)

    def part(self, start: int, stop: int) -> Iterator[Span]:
        """Yield the bytes that elements from ``start``, which begins a block of the format, to ``stop`` need: their
        own, and what their blocks share."""
        yield self._of(self.data, start * self.format.stored.itemsize, stop * self.format.stored.itemsize)
        if self.beside is not None:
            yield self._of(self.beside, start // self.format.block, -(-stop // self.format.block))

    def _of(self, span: Span, start: int, stop: int) -> Span:
        return Span(span.start + start, stop - start)


class BlockLayout:
    """The places of all states of a bucket. Each begins at a multiple of ``ALIGNMENT``.

    Args:
        formats: by state.
        numel: elements of each.
    """

    def __init__(self, formats: Mapping[str, StateFormat], numel: int) -> None:
        self.states: dict[str, StateLayout] = {}
        self.n_bytes = 0
        for name, format in formats.items():
            data = self._next(numel * format.stored.itemsize)
            beside = self._next(-(-numel // format.block)) if format.encoded else None
            self.states[name] = StateLayout(format, numel, data, beside)

    def _next(self, n_bytes: int) -> Span:
        span = Span(self.n_bytes, n_bytes)
        self.n_bytes += aligned(n_bytes)
        return span

    def arrays(self, memory: np.ndarray, threads: int) -> dict[str, StateArray]:
        """Return the states in a block's memory, by name."""
        return {name: state.array(memory, threads) for name, state in self.states.items()}


def padded_bytes(format: StateFormat, numel: int) -> int:
    """Return the bytes that a state takes in a block."""
    return BlockLayout({"": format}, numel).n_bytes


def around(span: Span) -> Span:
    """Return the least span of whole multiples of ``ALIGNMENT`` that holds this one."""
    start = span.start // ALIGNMENT * ALIGNMENT
    return Span(start, aligned(span.start + span.n_bytes) - start)
