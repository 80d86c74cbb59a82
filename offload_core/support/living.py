"""A set of weak references that threads and finalizers may change while another thread iterates."""

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Living(Generic[T]):
    """The objects that were added and are alive, which are hashed by identity.

    ``weakref.WeakSet`` raises ``RuntimeError`` where another thread adds an object during an iteration. Here each
    change and each snapshot is one call of C code, so no lock is needed: a finalizer, which may run inside any
    allocation of any thread, cannot meet a half-made change.
    """

    def __init__(self) -> None:
        self._refs: set[weakref.ref[T]] = set()

    def add(self, each: T) -> None:
        """Add an object, until it dies."""
        self._refs.add(weakref.ref(each, self._refs.discard))

    def discard(self, each: T) -> None:
        """Remove an object, if it is here."""
        self._refs.discard(weakref.ref(each))

    def __iter__(self) -> Iterator[T]:
        """The objects of this moment: none that another thread adds later."""
        return iter([each for ref in [*self._refs] if (each := ref()) is not None])
