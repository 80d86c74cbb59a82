"""``with`` blocks that are running."""

import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any


class OpenBlocks:
    """The ``with`` blocks of one kind that have begun and not ended, in any thread: true if there is one.

    C code begins and ends each, so that no interrupt leaves one open.
    """

    def __init__(self) -> None:
        self._locks: set[weakref.ref[threading.Lock]] = set()
        """A lock for each block that has not been let go, taken while it runs."""

    def block(self) -> AbstractContextManager[Any]:
        """Return the context of a further block."""
        lock = threading.Lock()
        self._locks.add(weakref.ref(lock, self._locks.discard))
        return lock

    def __bool__(self) -> bool:
        return bool(self._locks) and any(lock.locked() for ref in [*self._locks] if (lock := ref()) is not None)
