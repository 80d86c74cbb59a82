"""The elements of a parameter that a run of memory holds, in any order: integers only.

A parameter's *logical* elements are numbered as in a C-contiguous array of its shape. Front ends lay them out in orders
of their own (``channels_last``, slices along a dimension). Files record the elements that they hold, so that any layout
can be loaded into any other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Region:
    """Elements ``[start, start + numel)`` of a box of a parameter, flattened.

    The box is counted in the dimensions of the parameter transposed by ``order``.
    """

    shape: tuple[int, ...]
    """The parameter's shape."""
    start: int
    numel: int
    order: tuple[int, ...] | None = None
    """A permutation of the dimensions; None: the identity."""
    box: tuple[tuple[int, int], ...] | None = None
    """The box's ``(begin, end)`` in each (permuted) dimension; None: the whole parameter."""

    @property
    def view(self) -> tuple[tuple[int, ...] | None, tuple[tuple[int, int], ...] | None]:
        """``(order, box)``. Regions with equal views are ranges of the same sequence of elements."""
        return self.order, self.box

    @property
    def is_whole(self) -> bool:
        """True if it is the whole parameter in logical order."""
        return self.view == (None, None) and self.numel == math.prod(self.shape)

    def __str__(self) -> str:
        """The region as a NumPy expression on the parameter; empty for the whole parameter."""
        if self.is_whole:
            return ""
        order = "" if self.order is None else f".transpose{self.order}"
        box = "" if self.box is None else f"[{', '.join(f'{low}:{high}' for low, high in self.box)}]"
        return f"{order}{box}[{self.start}:{self.start + self.numel}]"

    def check(self) -> None:
        """Raise :class:`ValueError` if the numbers contradict each other."""
        dims = len(self.shape)
        if self.order is not None and sorted(self.order) != list(range(dims)):
            raise ValueError(f"order {self.order} of {dims} dimensions")
        shape = [self.shape[d] for d in self.order or range(dims)]
        box = self.box or tuple((0, n) for n in shape)
        if len(box) != dims or any(not 0 <= low <= high <= n for (low, high), n in zip(box, shape, strict=True)):
            raise ValueError(f"box {box} of {shape}")
        if not 0 <= self.start <= self.start + self.numel <= math.prod(high - low for low, high in box):
            raise ValueError(f"elements {self.start} to {self.start + self.numel} of the box {box}")

    def runs(self) -> np.ndarray:
        """The region as runs of logical elements: rows ``(logical start, elements)``, int64, in the region's order."""
        if self.numel == 0:
            return np.zeros((0, 2), np.int64)
        dims = self.order or range(len(self.shape))
        box = self.box or tuple((0, self.shape[d]) for d in dims)
        strides = [math.prod(self.shape[d + 1 :]) for d in dims]
        # Merge dimensions from the innermost outwards, as long as rows follow each other without a gap.
        outer, row = len(box), 1
        while outer and (strides[outer - 1] == row or box[outer - 1][1] - box[outer - 1][0] == 1):
            low, high = box[outer - 1]
            outer, row = outer - 1, row * (high - low)
        origin = sum(low * stride for (low, _), stride in zip(box, strides, strict=True))
        first, last = self.start // row, (self.start + self.numel - 1) // row
        counters = np.arange(first, last + 1, dtype=np.int64)
        starts = np.full(counters.size, origin, np.int64)
        for (low, high), stride in reversed(list(zip(box[:outer], strides[:outer], strict=True))):
            counters, places = np.divmod(counters, high - low)
            starts += places * stride
        lengths = np.full(starts.size, row, np.int64)
        skipped = self.start - first * row
        starts[0] += skipped
        lengths[0] -= skipped
        lengths[-1] -= (last + 1) * row - (self.start + self.numel)
        return np.stack([starts, lengths], axis=1)

    def boxes(self) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """The region as boxes of the parameter, each after its place in the region.

        A box is its ``(begin, end)`` in each of the parameter's dimensions. Its elements lie in the region one after
        another, in C order of the dimensions transposed by ``order``. Of k dimensions there are at most 2k - 1 boxes.
        """
        order = self.order or tuple(range(len(self.shape)))
        origin = self.box or tuple((0, self.shape[d]) for d in order)
        found = []
        for at, box in _boxes(self.start, self.start + self.numel, [high - low for low, high in origin]):
            ends: list[tuple[int, int]] = [(0, 0)] * len(order)
            for d, (low, _), (begin, end) in zip(order, origin, box, strict=True):
                ends[d] = (low + begin, low + end)
            found.append((at, tuple(ends)))
        return found


def _boxes(start: int, stop: int, shape: Sequence[int]) -> list[tuple[int, list[tuple[int, int]]]]:
    """The elements ``[start, stop)`` of a C-contiguous array as boxes, each after its place in them: the end of a row,
    whole rows, and the beginning of a row. A row is what one index of the first dimension has."""
    if start == stop:
        return []
    if len(shape) < 2:
        return [(0, [(start, stop)] * len(shape))]
    row = math.prod(shape[1:])
    found: list[tuple[int, list[tuple[int, int]]]] = []
    place = start
    while place < stop:
        index = place // row
        whole = stop // row - index if place % row == 0 else 0
        if whole:
            found.append((place - start, [(index, index + whole), *((0, n) for n in shape[1:])]))
            place += whole * row
            continue
        end = min(stop, (index + 1) * row)
        for at, box in _boxes(place - index * row, end - index * row, shape[1:]):
            found.append((place - start + at, [(index, index + 1), *box]))
        place = end
    return found


class Elements(Protocol):
    """Maps the core's elements of a parameter, numbered from 0, to its logical elements; ``str`` names the order."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        ...

    def regions(self, start: int, numel: int) -> list[tuple[int, Region]]:
        """The regions that the core's elements ``[start, start + numel)`` hold, each after its place in that run.

        Elements in no region are padding.
        """
        ...


@dataclass(frozen=True)
class InMemory:
    """The elements of a dense array, in the order in which they lie in memory."""

    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    """The permutation of dimensions that makes it C-contiguous; None: the identity."""

    def regions(self, start: int, numel: int) -> list[tuple[int, Region]]:
        return [(0, Region(self.shape, start, numel, self.order))]

    def __str__(self) -> str:
        return f"{list(self.shape)}" + ("" if self.order is None else f" in memory order {list(self.order)}")


class Box:
    """The elements of a box of a dense array, in the order in which they lie in memory; the base of front ends' parts
    of parameters.

    Attributes:
        shape: the array's.
        box: the ``(begin, end)`` of the part in each dimension.
        order: the permutation of dimensions that makes the part C-contiguous; None: the identity.
    """

    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    order: tuple[int, ...] | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(high - low for low, high in self.box)

    @property
    def index(self) -> tuple[slice, ...]:
        """The part, as an index of the array."""
        return tuple(slice(low, high) for low, high in self.box)

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def is_whole(self) -> bool:
        return self.local_shape == self.shape

    @property
    def first(self) -> int | None:
        """The number of its first element in the array, if it is one run of the array's elements; None: it is not."""
        [(_, region)] = self.regions(0, self.numel)
        runs = region.runs()
        return None if len(runs) > 1 or self.order is not None else int(runs[0, 0]) if len(runs) else 0

    def regions(self, start: int, numel: int) -> list[tuple[int, Region]]:
        box = None if self.is_whole else tuple(self.box[d] for d in self.order or range(len(self.box)))
        return [(0, Region(self.shape, start, numel, self.order, box))]

    def __str__(self) -> str:
        part = "" if self.is_whole else f"[{', '.join(f'{low}:{high}' for low, high in self.box)}]"
        return f"{list(self.shape)}{part}" + ("" if self.order is None else f" in memory order {list(self.order)}")


def common(sources: Sequence[Region], target: Region) -> np.ndarray:
    """The elements that are in a source and in ``target``, as runs, in the order of the sources.

    All regions have one shape, and sources do not overlap.

    Returns:
        int64 rows ``(index of the source, place in it, place in the target, elements)``; adjacent runs are one row.
    """
    numbers = [i for i, source in enumerate(sources) if source.numel]
    if not numbers or not target.numel:
        return np.zeros((0, 4), np.int64)
    if all(sources[i].view == target.view for i in numbers):  # all are ranges of one sequence
        found = []
        for i in numbers:
            start = max(sources[i].start, target.start)
            end = min(sources[i].start + sources[i].numel, target.start + target.numel)
            if start < end:
                found.append((i, start - sources[i].start, start - target.start, end - start))
        return np.array(found, np.int64).reshape(-1, 4)
    theirs, mine = [sources[i].runs() for i in numbers], target.runs()
    index = np.repeat(np.array(numbers, np.int64), [len(runs) for runs in theirs])
    places = np.concatenate([np.cumsum(runs[:, 1]) - runs[:, 1] for runs in theirs])
    starts, lengths = np.concatenate(theirs).T
    order = np.argsort(starts)
    index, places, starts, lengths = index[order], places[order], starts[order], lengths[order]
    own_places, own_order = np.cumsum(mine[:, 1]) - mine[:, 1], np.argsort(mine[:, 0])
    own_starts, own_lengths, own_places = mine[own_order, 0], mine[own_order, 1], own_places[own_order]

    # At each point where a run begins: the last run of the sources, and of the target, that begins there or before.
    begins = np.unique(np.concatenate([starts, own_starts]))
    of = np.searchsorted(starts, begins, "right") - 1
    own = np.searchsorted(own_starts, begins, "right") - 1
    known = (of >= 0) & (own >= 0)
    begins, of, own = begins[known], of[known], own[known]
    numel = np.minimum(starts[of] + lengths[of], own_starts[own] + own_lengths[own]) - begins
    shared = numel > 0
    begins, of, own, numel = begins[shared], of[shared], own[shared], numel[shared]
    rows = np.stack([index[of], places[of] + begins - starts[of], own_places[own] + begins - own_starts[own], numel], 1)
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    if len(rows) == 0:
        return rows
    ends = rows[:-1, 1:3] + rows[:-1, 3:]
    disjoint = np.concatenate([[True], (rows[1:, 0] != rows[:-1, 0]) | (rows[1:, 1:3] != ends).any(axis=1)])
    firsts = np.flatnonzero(disjoint)
    rows[firsts, 3] = np.add.reduceat(rows[:, 3], firsts)
    return rows[firsts]
