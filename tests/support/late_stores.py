"""Late stores in the place of the store in memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from offload_core.states import STORES
from offload_core.testing.late_store import LateStore

over_both_stores = pytest.mark.parametrize("store", ["memory", "late"], indirect=True)
"""A law of one test that is to hold with a late store, too. With ``--store late`` all laws are checked so."""


def take_the_place_of_memory() -> None:
    """From now on, pipelines of this process keep their states in a late store."""
    STORES["cpu"] = type("Late", (LateStore,), {"max_delay": 1e-4})


@contextmanager
def late() -> Iterator[None]:
    """Pipelines that are made inside keep their states in a late store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STORES, "cpu", LateStore)
        yield
