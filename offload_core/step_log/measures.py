"""Memory, tokens a second, and the share of a device's peak speed that a run reaches."""

import math
import resource
import sys
import time
from pathlib import Path

import psutil

from ..memory.report import DeviceUse

_STATUS = Path("/proc/self/status")
_BF16_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H200": 989.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
    "AMD Instinct MI300X": 1307.0,
}
"""Dense bfloat16 operations of a device's matrix units, in 10^12 a second, by the name that torch and JAX give the
device. Source: the makers' data sheets of these products (nvidia.com, amd.com). For Hopper and Ada the sheets print the
speed with sparsity, which is twice this one. For a device that is not here, the user gives the speed: a wrong one is
worse than none."""


def host_memory() -> dict[str, float]:
    """Return the host memory of this process, now and at its peak, in bytes."""
    now = psutil.Process().memory_info().rss
    if _STATUS.exists():
        # Not ru_maxrss, which a child process takes over from its parent.
        peak = next((int(line.split()[1]) << 10 for line in _STATUS.read_text().splitlines() if "VmHWM:" in line), now)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"host_bytes": now, "host_peak_bytes": max(now, peak)}


def device_memory(use: DeviceUse | None) -> dict[str, float]:
    """Return the record's values of a device's memory, in bytes; none if the device's memory is the host's."""
    return {} if use is None else {"device_bytes": use.used, "device_peak_bytes": use.peak}


class Speed:
    """The speed of a run, from one record to the next.

    Args:
        total: the number of updates of the whole run; None: unknown.
        flops_per_token: operations of the model for a token, forward and backward; None: unknown.
        peak_flops: operations a second that one device can reach; None: that of the table.
    """

    def __init__(self, total: int | None, flops_per_token: float | None, peak_flops: float | None) -> None:
        self._total = total
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._since = time.monotonic()
        self._first: float | None = None
        """The time of the first record. The updates before it compile and allocate."""
        self._updates = 0
        """Updates after the first record."""

    def record(self, step: int, updates: int, tokens: float | None, use: DeviceUse | None) -> dict[str, float]:
        """Return the values of a record.

        Args:
            step: the record's update.
            updates: the number of updates since the last record.
            tokens: of these updates together; None: not given.
            use: the memory of this process's devices; None: their memory is the host's, or unknown.
        """
        now = time.monotonic()
        elapsed, self._since = now - self._since, now
        record = {"seconds": elapsed / updates}
        if tokens is not None and elapsed > 0:
            record["tokens_per_second"] = tokens / elapsed
            if self._flops_per_token is not None:
                record["flops_per_second"] = self._flops_per_token * tokens / elapsed
                if (peak := self._peak(use)) is not None:
                    record["mfu"] = record["flops_per_second"] / peak
        if self._first is None:
            self._first, each = now, record["seconds"]
        else:
            self._updates += updates
            each = (now - self._first) / self._updates
        if self._total is not None:
            record["seconds_left"] = math.ceil(each * max(self._total - step, 0))
        return record

    def _peak(self, use: DeviceUse | None) -> float | None:
        n_devices = 1 if use is None else use.n_devices
        if self._peak_flops is not None:
            return self._peak_flops * n_devices
        known = None if use is None else _BF16_TFLOPS.get(use.name)
        return None if known is None else known * 1e12 * n_devices
