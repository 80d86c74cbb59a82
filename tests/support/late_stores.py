"""Other stores in the place of the store in memory: late ones, disks, on which parameters may lie, too, and a device's
memory."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from offload_core.config.options import OffloadConfig
from offload_core.device.no_queue import NoQueue
from offload_core.memory.host_memory import HostMemory
from offload_core.plans.terms import BucketTerms
from offload_core.states import STORES, Store
from offload_core.states.on_disk import StatesOnDisk
from offload_core.testing.late_store import LateStore

NAMES = ("late", "disk", "nvme", "half nvme", "device", "half device")
"""``nvme`` is ``disk``, and in torch's stage 3 shards that a configuration has in host memory lie on disk with their
states; ``half nvme``: small models have a part of both in host memory. ``device``: where a device is not the host, its
memory has the states; ``half device``: small models have a part of them there."""

over_all_stores = pytest.mark.parametrize(
    "store", ["memory", "late", pytest.param("disk", marks=pytest.mark.slow)], indirect=True
)
"""A law of one test that is to hold with other stores, too. With ``--store late`` all laws are checked so."""
over_device_stores = pytest.mark.parametrize("store", ["device", "half device"], indirect=True)
"""A law of one test that is to hold with states in the device's memory."""
states_on_disk_too = pytest.mark.parametrize("store", ["memory", "disk"], indirect=True)
"""A law that is to hold with states on disk, too. With ``--store disk`` all laws are checked so."""
parameters_on_disk_too = pytest.mark.parametrize("store", ["memory", "nvme"], indirect=True)
"""A law of stage 3 that is to hold with parameters on disk, too. With ``--store nvme`` all laws are checked so."""

FOLDER = tempfile.gettempdir()
STATES_ON_DISK = {"offload_optimizer": "nvme", "nvme_path": FOLDER, "nvme_host_bytes": 0}
PARAMETERS_ON_DISK = {"stage": 3, "offload_param": "nvme", "param_persistence_threshold": 1, **STATES_ON_DISK}
KEPT_BYTES = {"nvme": 0, "half nvme": 20_000}
NO_QUEUE = NoQueue("there is no device")
DEVICE_BYTES = {"device": None, "half device": 30_000}


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
    return replace(config, **STATES_ON_DISK)


OTHERS: dict[str, type[Store]] = {"late": LateStore, "disk": Disk, "nvme": Disk, "half nvme": Disk}


def take_the_place_of_memory(name: str) -> None:
    """From now on, pipelines of this process keep their states in this other store."""
    _patch(pytest.MonkeyPatch(), name)
    if name == "late":
        STORES["cpu"] = type("Late", (LateStore,), {"max_delay": 1e-4})


@contextmanager
def late(name: str = "late") -> Iterator[None]:
    """Pipelines that are made inside keep their states in this other store."""
    with pytest.MonkeyPatch.context() as patch:
        _patch(patch, name)
        yield


def current() -> str:
    """The name of the store that takes the place of memory; ``"memory"`` without one."""
    return _current


_current = "memory"


def _patch(patch: pytest.MonkeyPatch, name: str) -> None:
    patch.setitem(globals(), "_current", name)
    if name in DEVICE_BYTES:
        _patch_terms(patch, DEVICE_BYTES[name])
        return
    patch.setitem(STORES, "cpu", OTHERS[name])
    if name in KEPT_BYTES:
        _patch_configurations(patch, KEPT_BYTES[name])


def _patch_terms(patch: pytest.MonkeyPatch, budget: int | None) -> None:
    begin = BucketTerms.__init__

    def began(self: BucketTerms, config: OffloadConfig, device: Any, **options: Any) -> None:
        begin(self, config, device, **options)
        has_queue = not isinstance(getattr(device, "queue", NO_QUEUE), NoQueue)  # a plan without a device has none
        asked = config.offload_optimizer == "cpu" and config.device_states_bytes is None
        if asked and config.offload_param is None and has_queue and not device.addressable:
            self.tiered, self.device_budget = True, budget

    patch.setattr(BucketTerms, "__init__", began)


def _patch_configurations(patch: pytest.MonkeyPatch, kept_bytes: int) -> None:
    resolve = OffloadConfig.resolve.__func__

    def resolved(cls: type[OffloadConfig], *args: Any, **fields: Any) -> OffloadConfig:
        config = resolve(cls, *args, **fields)
        on_host = config.stage == 3 and config.offload_param == "cpu" and config.offload_optimizer == "cpu"
        if not on_host or config.schedule == "delayed":  # its parameters are in memory
            return config
        return replace(config, offload_param="nvme", **{**STATES_ON_DISK, "nvme_host_bytes": kept_bytes})

    patch.setattr(OffloadConfig, "resolve", classmethod(resolved))
