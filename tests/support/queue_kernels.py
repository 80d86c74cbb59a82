"""The host's kernels replaced by those of a device: memory goes to the device, is updated there, and returns."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from offload_core.device.protocols import DeviceQueue
from offload_core.dtypes import BY_CODE
from offload_core.native import kernels

_ALIGNMENT = 256


class _Copied:
    """Runs of host memory, in the device's memory meanwhile."""

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._runs: dict[int, tuple[np.ndarray, Any, int]] = {}

    def address(self, address: int, n_bytes: int) -> int:
        """Copy a run to the device, once, and return its address there; 0 stays 0."""
        if not address or not n_bytes:
            return 0 if not address else _ALIGNMENT
        if address not in self._runs:
            host = np.frombuffer(kernels.ffi.buffer(kernels.ffi.cast("char *", address), n_bytes), np.uint8)
            memory = self._queue.allocate(n_bytes)
            self._queue.to_device(host, memory).wait()
            self._runs[address] = host, memory, int(self._queue.arrays([memory]).addresses[0])
        return self._runs[address][2]

    def back(self) -> None:
        for host, memory, _ in self._runs.values():
            found = np.empty(host.size, np.uint8)
            self._queue.to_host(memory, found).wait()
            host[:] = found


@contextmanager
def in_place_of_kernels(queue: DeviceQueue) -> Iterator[None]:
    """``kernels.update`` is the queue's meanwhile. Runs that share memory begin at one address."""
    codes = kernels.FORMATS

    def update(segments: np.ndarray, scalars: np.ndarray, **kind: Any) -> None:
        kind.pop("threads")
        formats = [kind.get("master_format", "float32"), *kind.get("moment_formats", ())]
        formats += ["float32"] * (1 + kernels.MOMENTS - len(formats))
        bytes_of = [{"float8": 1, "split": 2}.get(name) or BY_CODE[codes[name]].itemsize for name in formats]
        param = 0 if kind["param_dtype"] is None else kind["param_dtype"].itemsize
        copied, there = _Copied(queue), segments.copy()
        for row in there:
            n = int(row["numel"])
            for name, size in (("grad", kind["grad_dtype"].itemsize), ("master", bytes_of[0]), ("param", param)):
                row[name] = copied.address(int(row[name]), n * size)
            row["high"], row["ties"] = (
                copied.address(int(row["high"]), 2 * n),
                copied.address(int(row["ties"]), -(-n // 8)),
            )
            for i in range(kernels.MOMENTS):
                row["moments"][i] = copied.address(int(row["moments"][i]), n * bytes_of[1 + i])
                row["scales"][i] = copied.address(int(row["scales"][i]), -(-n // kernels.STATE_BLOCK))
        queue.update(there, scalars, **kind)
        queue.mark().wait()
        copied.back()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "update", update)
        yield
