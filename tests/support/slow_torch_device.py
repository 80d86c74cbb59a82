"""CPU tensors as if they lay on a device whose copies take their time: nothing is there before its event."""

import threading
import time

import torch

from frontends.torch.ranks.device import HostTorchDevice, as_torch, fill, spread
from offload_core.support.threads import Task, TaskThread


class SlowTorchDevice(HostTorchDevice):
    """Destinations are NaN until the copy was done; ``gate`` can hold copies to the device back."""

    addressable = False
    updates_in_place = False

    def __init__(self, delay: float = 1e-3) -> None:
        self.delay = delay
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False
        self._lanes = [TaskThread(f"copies {n}") for n in range(2)]

    def to_host(self, copies, host):
        as_torch(host).fill_(torch.nan)

        def copy():
            time.sleep(self.delay)
            fill(as_torch(host), copies)

        return _Copied(self._lanes[0].submit(copy))

    def to_device(self, host, copies, after):
        after.order()
        for tensor, start, numel, _ in copies:
            tensor[start : start + numel] = torch.nan

        def copy():
            assert self.gate.wait(120)
            time.sleep(self.delay)
            if self.fails:
                raise OSError("the copy failed, as asked")
            spread(as_torch(host), copies)

        return _Copied(self._lanes[1].submit(copy))

    def synchronize(self):
        for lane in self._lanes:
            lane.submit(lambda: None).result()


class _Copied:
    def __init__(self, future: Task) -> None:
        self._future = future

    def wait(self):
        self._future.result()

    order = wait

    def done(self):
        return self._future.done()
