"""Tensors of micro-batches that wait in pinned host memory while other micro-batches pass a block."""

import weakref
from collections import deque
from collections.abc import Iterable

import numpy as np
import torch

from offload_core.device.events import Done, Event
from offload_core.memory.host_memory import HostMemory
from offload_core.support.threads import clear_up

from ..internals.private import storage_users
from ..params.pending import arrive, is_pending, shard
from ..ranks.device import TorchDevice

ACTIVATIONS = "activations"
"""The name in plans and reports of the host memory in which tensors wait (``host_activation_memory``)."""
_LEAVING = 2
"""The tensors whose copies to the host are on their way at a time. Each still takes device memory."""


_ITS_OWN = 2
"""The users of a tensor's storage where no other tensor has it: the tensor, and the call that asks."""


class HostSlots:
    """Pinned slots of host memory. Slots that are given back are lent again.

    Args:
        n_bytes: the most bytes of all slots together.
        device: copies from a slot may be on their way when it is given back.
    """

    def __init__(self, memory: HostMemory, n_bytes: int, device: TorchDevice) -> None:
        self._memory = memory
        self._device = device
        self._room = n_bytes
        self._free: list[np.ndarray] = []
        weakref.finalize(self, clear_up, device.synchronize).atexit = False  # before the slots are freed

    def borrow(self, n_bytes: int) -> np.ndarray | None:
        """Return a slot of ``n_bytes`` or more; None: all slots together would take more bytes than allowed."""
        fitting = [slot for slot in self._free if n_bytes <= slot.size <= 2 * n_bytes]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.size)
            self._free = [other for other in self._free if other is not slot]
            return slot
        if n_bytes > self._room and self._free:
            self._device.synchronize()
        while n_bytes > self._room and self._free:
            self._room += self._free.pop().size
        if n_bytes > self._room:
            return None
        self._room -= n_bytes
        return self._memory.allocate(ACTIVATIONS, n_bytes, np.dtype(np.uint8), pinned=True)

    def give_back(self, slot: np.ndarray) -> None:
        self._free.append(slot)


class Waiting:
    """A tensor that may leave the device, and comes back before it is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        self.n_bytes = self.storage.nbytes()
        self.slot: np.ndarray | None = None
        """Its values on the host; None: there are none."""
        self.copied: Event | None = None
        """The end of the copy to the host, until the device memory is free."""
        self.coming: Event | None = None
        """The end of the copy back, until somebody has waited for it."""
        self.is_here = True
        """True if it has device memory."""

    @property
    def bytes(self) -> torch.Tensor:
        """All of the tensor's memory, as uint8."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


class Waits:
    """Has tensors of micro-batches wait. This class leaves them where they are."""

    def leave(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move these tensors to the host, if there is room, and if no other tensor has their memory."""

    def expect(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to bring these tensors back."""

    def need(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have the device wait until these tensors are back."""

    def forget(self, tensor: torch.Tensor) -> None:
        """Give back the host memory of a tensor that is not needed any more."""

    def close(self) -> None:
        """Forget all tensors, after an error too. Those on the host have no values any more."""


class WaitingTensors(Waits):
    """Moves tensors to the host and back. A read of one that is on the host brings it back."""

    def __init__(self, device: TorchDevice, slots: HostSlots) -> None:
        self._device = device
        self._slots = slots
        self._of: dict[int, Waiting] = {}
        self._leaving: deque[Waiting] = deque()

    def leave(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            waiting = self._of.get(id(tensor))
            if waiting is None:
                if storage_users(tensor) > _ITS_OWN or not tensor.untyped_storage().nbytes():
                    continue
                waiting = self._of[id(tensor)] = Waiting(tensor)
            if waiting.is_here and waiting.copied is None:
                self._await(waiting)
                if storage_users(tensor) == _ITS_OWN:  # a view may have come since
                    self._leave(waiting)

    def _leave(self, waiting: Waiting) -> None:
        if waiting.slot is None:
            waiting.slot = self._slots.borrow(waiting.n_bytes)
            if waiting.slot is None:
                del self._of[id(waiting.tensor)]
                return
            host = torch.from_numpy(waiting.slot[: waiting.n_bytes])
            with self._device.to_host_lane() as lane:
                host.copy_(waiting.bytes, non_blocking=True)
                waiting.copied = lane.event(None)
        else:
            waiting.copied = Done()  # what reads it on the device comes before what gets its memory
        self._leaving.append(waiting)
        self._free_left(_LEAVING)

    def _free_left(self, most: int) -> None:
        """Wait for the oldest copies to the host and free the device memory of their tensors, until at most ``most``
        tensors are being copied."""
        while self._leaving and (len(self._leaving) > most or self._leaving[0].copied is None):
            waiting = self._leaving.popleft()
            if waiting.copied is not None:
                waiting.copied.wait()
                waiting.copied = None
                waiting.is_here = False
                shard(waiting.tensor, self._read)
                waiting.storage.resize_(0)

    def expect(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            waiting = self._of.get(id(tensor))
            if waiting is None:
                continue
            waiting.copied = None  # it stays
            if not waiting.is_here:
                self._bring(waiting)

    def _bring(self, waiting: Waiting) -> None:
        assert waiting.slot is not None
        arrive(waiting.tensor)
        waiting.storage.resize_(waiting.n_bytes)
        waiting.is_here = True
        host = torch.from_numpy(waiting.slot[: waiting.n_bytes])
        with self._device.to_device_lane(self._device.mark()) as lane:
            waiting.bytes.copy_(host, non_blocking=True)
            waiting.coming = lane.event(None)
        shard(waiting.tensor, self._read)

    def need(self, tensors: Iterable[torch.Tensor]) -> None:
        tensors = [*tensors]
        self.expect(tensors)
        for tensor in tensors:
            if (waiting := self._of.get(id(tensor))) is not None:
                self._await(waiting)

    def _await(self, waiting: Waiting) -> None:
        if waiting.coming is not None:
            waiting.coming.order()
            waiting.coming = None
        if is_pending(waiting.tensor):
            arrive(waiting.tensor)

    def _read(self, tensor: torch.Tensor) -> None:
        self.need([tensor])

    def forget(self, tensor: torch.Tensor) -> None:
        waiting = self._of.pop(id(tensor), None)
        if waiting is None:
            return
        waiting.copied = None  # copies to and from a slot are made in the order in which they were asked for
        self._await(waiting)
        if waiting.slot is not None:
            self._slots.give_back(waiting.slot)

    def close(self) -> None:
        for waiting in [*self._of.values()]:
            self.forget(waiting.tensor)
        self._leaving.clear()
