"""The core's ``DeviceQueue`` for torch's accelerators: a stream, and a driver's kernels in it."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from offload_core.device.events import Event
from offload_core.device.protocols import HostArray, HostArrays, Matrices
from offload_core.dtypes import ElementType
from offload_core.errors import DeviceMemoryError
from offload_core.memory.host_memory import format_bytes
from offload_core.native import kernels

from ..params.tensors import ELEMENT_TYPES, TORCH_DTYPES
from .device_kernels import compute_in

Upload = Callable[[np.ndarray], int]
"""Copies a host array to the device's memory, in the stream's order, and returns its address there."""


class Launcher(Protocol):
    """Launches the kernels of updates in one stream of a device. Arguments are as in ``offload_core.native.kernels``,
    with the device's addresses."""

    def update(self, segments: np.ndarray, scalars: np.ndarray, *, upload: Upload, **kind: Any) -> None: ...

    def sum_squares(self, spans: np.ndarray, dtype: ElementType, bins_at: int, *, upload: Upload) -> None: ...

    def accumulate(self, spans: np.ndarray, dtype: ElementType, *, upload: Upload) -> None: ...

    def cast(self, spans: np.ndarray, src: ElementType, dst: ElementType, *, upload: Upload) -> None: ...

    def reduce(
        self,
        src_at: int,
        n_sources: int,
        src_type: ElementType,
        dst_at: int,
        numel: int,
        *,
        divisor: float,
        add: bool,
    ) -> None: ...


def entered(stream: torch.Stream) -> torch.Stream:
    """Return a context in which the calling thread's work goes to this stream: another object of the same stream.

    An object that is entered remembers the stream to go back to, and two threads that enter one object would each go
    back to the other's.
    """
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


class TorchQueue:
    """Runs the kernels of updates in one stream.

    Args:
        stream: a stream of the device, beside the model's.
        event: makes the event of a stream's work so far; its argument is kept alive until the event is waited for.
    """

    def __init__(self, stream: torch.Stream, launcher: Launcher, event: Callable[[torch.Stream, Any], Event]) -> None:
        self._stream = stream
        self._launcher = launcher
        self._event = event
        self._events: deque[Event] = deque()
        """The events that may not have come, oldest first. Each keeps alive the memory of the calls before it. Several
        threads add and remove some, each in one call of the deque."""

    def allocate(self, n_bytes: int) -> torch.Tensor:
        try:
            with entered(self._stream):
                return torch.zeros(n_bytes, dtype=torch.uint8, device=self._stream.device)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"{format_bytes(n_bytes)} of {self._stream.device}'s memory for states on the device, or for their "
                f"update, could not be allocated ({error}); expected a smaller device_states_bytes"
            ) from None

    def typed(self, memory: torch.Tensor, dtype: ElementType) -> torch.Tensor:
        return memory.view(TORCH_DTYPES[dtype])

    def arrays(self, tensors: Sequence[torch.Tensor]) -> HostArrays:
        addresses = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uintp, len(tensors))
        codes = [type_.code if (type_ := ELEMENT_TYPES.get(tensor.dtype)) else 0 for tensor in tensors]
        return HostArrays(addresses, np.array(codes, np.uint8), tensors)

    def order(self, after: Event) -> None:  # waits
        with entered(self._stream):
            after.order()

    def mark(self, used: object = None) -> Event:
        with suppress(IndexError):
            while (event := self._events.popleft()).done():
                pass
            self._events.appendleft(event)
        event = self._event(self._stream, used)
        self._events.append(event)
        return event

    # --- kernels -------------------------------------------------------------------------------------

    def update(self, segments: np.ndarray, scalars: np.ndarray, **kind: Any) -> None:
        self._launch(self._launcher.update, segments, scalars, **kind)

    def accumulate(self, spans: np.ndarray, dtype: ElementType) -> None:
        self._launch(self._launcher.accumulate, spans, dtype)

    def cast(self, spans: np.ndarray, src: ElementType, dst: ElementType) -> None:
        self._launch(self._launcher.cast, spans, src, dst)

    def _launch(self, kernel: Callable[..., None], *arguments: Any, **kind: Any) -> None:
        """Launch a kernel. Its tables live until it is in the stream, as another thread may upload others before that.
        After that their memory is used again in the stream's order, and pinned memory after the copies from it."""
        tables: list[torch.Tensor] = []
        kernel(*arguments, upload=partial(self._upload, tables), **kind)

    def reduce(self, parts: HostArray, n_parts: int, out: HostArray, *, divisor: float, add: bool) -> None:
        self._launcher.reduce(parts.address, n_parts, parts.dtype, out.address, out.numel, divisor=divisor, add=add)

    def squares(self, runs: Sequence[tuple[np.ndarray, ElementType]]) -> Callable[[], np.ndarray]:
        host = _pinned(8 * kernels.NORM_BINS).view(torch.int64)
        with entered(self._stream):
            bins = torch.zeros(kernels.NORM_BINS, dtype=torch.int64, device=self._stream.device)
            for spans, dtype in runs:
                self._launch(self._launcher.sum_squares, spans, dtype, bins.data_ptr())
            host.copy_(bins, non_blocking=True)
        return partial(_after, self.mark(bins), host.numpy())

    def _upload(self, tables: list[torch.Tensor], array: np.ndarray) -> int:
        """Copy a table to the device, add it to ``tables``, and return its address."""
        source = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        host = _pinned(source.numel())
        host.copy_(source)
        with entered(self._stream):
            tables.append(table := host.to(self._stream.device, non_blocking=True))
        return table.data_ptr()

    # --- copies --------------------------------------------------------------------------------------

    def to_host(self, memory: torch.Tensor, host: np.ndarray) -> Event:
        with entered(self._stream):
            _bytes(host).copy_(memory.view(torch.uint8), non_blocking=True)
        return self.mark((memory, host))

    def to_device(self, host: np.ndarray, memory: torch.Tensor) -> Event:
        with entered(self._stream):
            memory.view(torch.uint8).copy_(_bytes(host), non_blocking=True)
        return self.mark((memory, host))

    def transform(self, matrices: Matrices, tensor: torch.Tensor) -> None:
        with entered(self._stream):
            compute_in(matrices, tensor)


def _pinned(n_bytes: int) -> torch.Tensor:
    """Return bytes of the host, pinned if that is possible."""
    try:
        return torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(n_bytes, dtype=torch.uint8, device="cpu")


def _bytes(host: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(host.view(np.uint8))


def _after(event: Event, found: np.ndarray) -> np.ndarray:  # waits
    event.wait()
    return found
