"""The core's tensors on a mesh: parameters with the part of their next value that has arrived, and gradients."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import numpy as np

from offload_core.dtypes import BY_NUMPY, ElementType

from ...tree.shard_layout import ShardLayout


@dataclass
class MeshParameter:
    """A parameter that every rank has whole."""

    array: jax.Array
    """The present value."""
    partial: Any = None
    """The next value, with zeros where nothing has arrived; None: nothing has."""
    received: int = 0
    """Elements of the next value that have arrived."""
    donated: bool = False
    """True if the next value is written over the present one, or replaces it, so that the two never exist together."""

    def donating(self) -> Self:
        """Return the parameter, whose next value is to be written over the present one, if that was not deleted."""
        return self if self.array.is_deleted() else replace(self, partial=self.array, donated=True)

    @property
    def dtype(self) -> ElementType:
        return BY_NUMPY[np.dtype(self.array.dtype)]

    @property
    def numel(self) -> int:
        return int(self.array.size)

    def advance(self, value: Any, numel: int, of: int) -> None:
        """Take on the next value, in which ``numel`` elements more have arrived; it is complete with ``of``."""
        self.partial = value  # the one before was donated
        self.received += numel
        if self.received == of:
            if self.donated:
                delete([self.array])
            self.array, self.partial = value, None


@dataclass
class ShardedParameter(MeshParameter):
    """A parameter of which each rank has a slice.

    Where it lies in host memory, ``partial`` is a NumPy array for each of this process's ranks. ``received`` counts
    elements of each rank's padded slice.
    """

    layout: ShardLayout = field(kw_only=True)

    @property
    def numel(self) -> int:
        return self.layout.numel


@dataclass(frozen=True)
class MeshGradient:
    """A gradient on the mesh."""

    array: jax.Array
    """If ``unreduced``, ``[world_size, *shape]``, a slice on each rank; else the mean, of ``shape``, replicated."""
    unreduced: bool
    numel: int
    dtype: ElementType
    """The element type in which it travels: the array's. A mean does not travel and has its parameter's."""
    used: Callable[[int], None] | None = None
    """Called when so many elements more have been read."""


@dataclass(frozen=True)
class HostGradient:
    """A gradient, or this process's part of one, in host memory."""

    array: jax.Array
    numel: int
    dtype: ElementType


class Donated:
    """Arrays of one gradient, which are deleted as soon as all of its elements have been read."""

    def __init__(self, arrays: Sequence[Any], numel: int) -> None:
        self._arrays, self._left = arrays, numel

    def use(self, numel: int) -> None:
        """Note that programs which were launched read ``numel`` elements more. Memory lives as long as they need it."""
        self._left -= numel
        if self._left <= 0:
            delete(self._arrays)


def delete(arrays: Iterable[Any]) -> None:
    """Delete those that are JAX's."""
    for array in arrays:
        if isinstance(array, jax.Array) and not array.is_deleted():
            array.delete()
