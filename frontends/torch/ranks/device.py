"""The core's ``TensorMemory`` for torch tensors: in host memory, or on an accelerator, with copies."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from offload_core.device.events import Done, Event
from offload_core.device.no_queue import NoQueue
from offload_core.device.protocols import Copy, DeviceQueue, HostArray, HostArrays, Matrices
from offload_core.dtypes import ElementType
from offload_core.errors import ParameterError
from offload_core.memory.pinning import Pinning
from offload_core.memory.report import DeviceUse

from ..params.tensors import DTYPE, ELEMENT_TYPES, MOVED_TYPES, TORCH_DTYPES
from .device_kernels import compute_in
from .pinning import launcher_for, pinning_for
from .queue import TorchQueue, entered

_CODES = {dtype: element_type.code for dtype, element_type in ELEMENT_TYPES.items()}


def as_torch(host: np.ndarray) -> torch.Tensor:
    """A torch view of a one-dimensional host array; bfloat16 too, which ``torch.from_numpy`` refuses."""
    dtype = next(dtype for element_type, dtype in TORCH_DTYPES.items() if element_type.numpy == host.dtype)
    return torch.from_numpy(host.view(np.uint8)).view(dtype)


class Lane(Protocol):
    """A queue of copies in one direction, which run in order."""

    def event(self, used: Any) -> Event:
        """The end of the copies so far; ``used`` is kept alive until the event has been waited for.

        What was allocated inside needs no keeping: its memory is used again in the order of the copies.
        """


Told = TypeVar("Told")


def told_by_allocator(ask: Callable[[torch.device], Told], device: torch.device) -> Told | None:
    """Return the answer of a function of ``torch.accelerator`` about a device's memory; None: its allocator keeps no
    statistics.

    A backend outside of torch need not keep them. Torch then raises an internal error.
    """
    try:
        return ask(device)
    except RuntimeError:  # an error of the device itself comes again where it is used
        return None


def device_use(device: torch.device) -> DeviceUse | None:
    """Return the memory in use on a device; None: it is host memory, or its allocator keeps no statistics."""
    if device.type == "cpu":
        return None
    used = told_by_allocator(torch.accelerator.memory_allocated, device)
    peak = told_by_allocator(torch.accelerator.max_memory_allocated, device)
    name_of = getattr(torch.get_device_module(device), "get_device_name", lambda device: "")
    return None if used is None or peak is None else DeviceUse(name_of(device), used, peak)


class TorchDevice(ABC):
    """The common part of both devices."""

    device: torch.device
    addressable: bool
    updates_in_place: bool
    pinning: Sequence[Pinning]

    def free_bytes(self) -> int | None:
        return None

    def dtype(self, tensor: torch.Tensor) -> ElementType:
        return MOVED_TYPES[tensor.dtype]

    def numel(self, tensor: torch.Tensor) -> int:
        return tensor.numel()

    def host_array(self, tensor: torch.Tensor) -> HostArray:
        assert tensor.device.type == "cpu"
        assert tensor.is_contiguous()
        return HostArray(tensor.data_ptr(), tensor.numel(), MOVED_TYPES[tensor.dtype], tensor)

    def host_arrays(self, tensors: Sequence[torch.Tensor]) -> HostArrays:
        addresses = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uintp, len(tensors))
        dtypes = {*map(DTYPE, tensors)}
        if len(dtypes) == 1:
            codes = np.full(len(tensors), _CODES[dtypes.pop()], np.uint8)
        else:
            codes = np.array([_CODES[tensor.dtype] for tensor in tensors], np.uint8)
        return HostArrays(addresses, codes, tensors)

    @abstractmethod
    def queue(self) -> DeviceQueue:
        """As :attr:`Device.queue`."""

    @abstractmethod
    def to_host_lane(self) -> AbstractContextManager[Lane]:
        """Return a context whose copies run after everything that this thread has asked of the device."""

    @abstractmethod
    def to_device_lane(self, after: Event) -> AbstractContextManager[Lane]:
        """Return a context whose copies run after a mark."""

    @abstractmethod
    def mark(self) -> Event: ...

    @abstractmethod
    def synchronize(self) -> None: ...  # waits

    @abstractmethod
    def to_host(self, copies: Sequence[Copy], host: np.ndarray) -> Event: ...

    @abstractmethod
    def to_device(self, host: np.ndarray, copies: Sequence[Copy], after: Event) -> Event: ...

    @abstractmethod
    def through(self, host: torch.Tensor, compute: Callable[[torch.Tensor], None]) -> Event:
        """Start to move a host tensor to the device, to compute there in place, and to move it back."""

    def transform(self, matrices: Matrices, host: np.ndarray) -> Event:
        return self.through(as_torch(host), partial(compute_in, matrices))


class _AtOnce:
    def event(self, used: Any) -> Event:
        return Done()


class HostTorchDevice(TorchDevice):
    """CPU tensors: kernels read and write them in place."""

    device = torch.device("cpu")
    addressable = True
    updates_in_place = True
    pinning = ()

    def queue(self) -> DeviceQueue:
        raise NoQueue("its memory is the host's").refusal

    def to_host_lane(self) -> AbstractContextManager[Lane]:
        return nullcontext(_AtOnce())

    def to_device_lane(self, after: Event) -> AbstractContextManager[Lane]:
        after.order()
        return nullcontext(_AtOnce())

    def mark(self) -> Event:
        return Done()

    def synchronize(self) -> None:  # waits
        pass

    def to_host(self, copies: Sequence[Copy], host: np.ndarray) -> Event:
        fill(as_torch(host), copies)
        return Done()

    def to_device(self, host: np.ndarray, copies: Sequence[Copy], after: Event) -> Event:
        after.order()
        spread(as_torch(host), copies)
        return Done()

    def through(self, host: torch.Tensor, compute: Callable[[torch.Tensor], None]) -> Event:
        compute(host)
        return Done()


def fill(flat: torch.Tensor, copies: Sequence[Copy]) -> None:
    """Write the copies' tensors to a flat tensor of the same device, cast to its element type; zeros fill the gaps."""
    end = 0
    for tensor, start, numel, offset in sorted(copies, key=lambda copy: copy.offset):
        flat[end:offset].zero_()
        end = offset + numel
        flat[offset:end].copy_(tensor[start : start + numel])
    flat[end:].zero_()


def spread(flat: torch.Tensor, copies: Sequence[Copy]) -> None:
    """Write runs of a flat tensor to the copies' tensors."""
    for tensor, start, numel, offset in copies:
        tensor[start : start + numel].copy_(flat[offset : offset + numel])


_LEAVE_AT_ONCE = 2
"""The copies to the host that a plan counts."""


class _StreamEvent:
    def __init__(self, stream: torch.Stream, used: Any) -> None:
        self._device = stream.device
        self._event = stream.record_event()
        self._used = used

    def wait(self) -> None:  # waits
        self._event.synchronize()
        self._used = None

    def order(self) -> None:  # waits
        torch.accelerator.current_stream(self._device).wait_event(self._event)

    def done(self) -> bool:
        return self._event.query()


class _StreamLane:
    def __init__(self, stream: torch.Stream, events: deque[Event]) -> None:
        self._stream = stream
        self._events = events

    def event(self, used: Any) -> Event:
        event = _StreamEvent(self._stream, used)
        self._events.append(event)
        return event


class AcceleratorDevice(TorchDevice):
    """A device with streams. A bucket is packed there and moves in one non-blocking copy from or to pinned memory.

    Each direction has one stream. At most two buckets are on their way to the host, because gradients that backward
    makes faster than they leave would fill the device. The core bounds the copies to the device.
    """

    addressable = False
    updates_in_place = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinning = pinning_for(device)
        self._to_host = torch.Stream(device)
        self._to_device = torch.Stream(device)
        self._leaving: deque[Event] = deque()
        """The ends of the last copies to the host, oldest first."""
        self._queue: TorchQueue | None = None

    def queue(self) -> DeviceQueue:
        if self._queue is None:
            stream = _computing_stream(self.device)
            self._queue = TorchQueue(stream, launcher_for(self.device, stream), _StreamEvent)
        return self._queue

    def free_bytes(self) -> int | None:
        reserved = told_by_allocator(torch.accelerator.memory_reserved, self.device)
        allocated = told_by_allocator(torch.accelerator.memory_allocated, self.device)
        info = told_by_allocator(torch.accelerator.get_memory_info, self.device)
        return None if reserved is None or allocated is None or info is None else info[0] + reserved - allocated

    def mark(self) -> Event:
        return _StreamEvent(torch.accelerator.current_stream(self.device), None)

    def synchronize(self) -> None:  # waits
        for stream in (self._to_host, self._to_device, _computing_stream(self.device)):
            with suppress(RuntimeError):  # the event of a failed copy raises its error
                stream.synchronize()

    def to_host_lane(self) -> AbstractContextManager[Lane]:
        while len(self._leaving) >= _LEAVE_AT_ONCE:
            with suppress(RuntimeError):  # the bucket of a failed copy raises its error
                self._leaving.popleft().wait()
        return self._lane(self._to_host, self.mark(), self._leaving)

    def to_device_lane(self, after: Event) -> AbstractContextManager[Lane]:
        return self._lane(self._to_device, after, deque(maxlen=0))

    @contextmanager
    def _lane(self, stream: torch.Stream, after: Event, events: deque[Event]) -> Iterator[Lane]:
        with entered(stream):
            after.order()
            yield _StreamLane(stream, events)

    def to_host(self, copies: Sequence[Copy], host: np.ndarray) -> Event:
        target = as_torch(host)
        with self.to_host_lane() as lane:
            packed = torch.empty(target.numel(), dtype=target.dtype, device=self.device)
            fill(packed, copies)
            target.copy_(packed, non_blocking=True)
            return lane.event(copies)

    def to_device(self, host: np.ndarray, copies: Sequence[Copy], after: Event) -> Event:
        source = as_torch(host)
        with self.to_device_lane(after) as lane:
            if len(copies) == 1 and copies[0].numel == source.numel():
                [(tensor, start, numel, _)] = copies
                tensor[start : start + numel].copy_(source, non_blocking=True)
                return lane.event(copies)
            packed = torch.empty(source.numel(), dtype=source.dtype, device=self.device)
            packed.copy_(source, non_blocking=True)
            spread(packed, copies)
            return lane.event(copies)

    def through(self, host: torch.Tensor, compute: Callable[[torch.Tensor], None]) -> Event:
        # Three streams: one bucket computes while another one moves.
        with entered(self._to_device):
            moved = host.to(self.device, non_blocking=True)
        with entered(stream := _computing_stream(self.device)):
            stream.wait_event(self._to_device.record_event())
            compute(moved)
        with self._lane(self._to_host, _StreamEvent(stream, None), deque(maxlen=0)) as lane:
            host.copy_(moved, non_blocking=True)
            return lane.event(moved)


@cache
def _computing_stream(device: torch.device) -> torch.Stream:
    """The stream of what updates compute on a device, beside the model's own."""
    return torch.Stream(device)


def memory_of(device: torch.device) -> TorchDevice:
    """The adapter for parameters on ``device``; :class:`ParameterError` if it has no streams."""
    if device.type == "cpu":
        return HostTorchDevice()
    try:
        return AcceleratorDevice(device)
    except (RuntimeError, TypeError) as error:  # NotImplementedError is a RuntimeError
        raise ParameterError(
            f"parameters are on {device}, where torch could make no stream ({error}); expected the CPU or an "
            "accelerator with streams, on which copies need not wait for the model"
        ) from None
