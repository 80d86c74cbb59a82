"""Other stores in the place of the store in memory: late ones, and disks."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from offload_core.config.options import OffloadConfig
from offload_core.memory.host_memory import HostMemory
from offload_core.states import STORES, Store
from offload_core.states.on_disk import StatesOnDisk
from offload_core.testing.late_store import LateStore

over_all_stores = pytest.mark.parametrize("store", ["memory", "late", "disk"], indirect=True)
"""A law of one test that is to hold with other stores, too. With ``--store late`` all laws are checked so."""


class Disk(StatesOnDisk):
    """States on disk, whatever a configuration says."""

    def __init__(self, config: OffloadConfig, memory: HostMemory, n_ranks: int) -> None:
        super().__init__(_on_disk(config), memory, n_ranks)

    @classmethod
    def host_budget(cls, config: OffloadConfig) -> int | None:
        return super().host_budget(_on_disk(config))

    @classmethod
    def free_bytes(cls, config: OffloadConfig) -> int | None:
        return super().free_bytes(_on_disk(config))


def _on_disk(config: OffloadConfig) -> OffloadConfig:
    return replace(config, offload_optimizer="nvme", nvme_path=tempfile.gettempdir(), nvme_host_bytes=0)


OTHERS: dict[str, type[Store]] = {"late": LateStore, "disk": Disk}


def take_the_place_of_memory(name: str) -> None:
    """From now on, pipelines of this process keep their states in this other store."""
    STORES["cpu"] = type("Late", (LateStore,), {"max_delay": 1e-4}) if name == "late" else OTHERS[name]


@contextmanager
def late(name: str = "late") -> Iterator[None]:
    """Pipelines that are made inside keep their states in this other store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STORES, "cpu", OTHERS[name])
        yield
