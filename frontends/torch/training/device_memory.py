"""Frees a model's memory on the device, and takes it again: ``release()`` and ``restore()``.

[Note: released tensors] A released tensor keeps its identity, shape, element type and storage, so views, tied weights
and graphs still share this storage with it. The storage has no bytes, like the storage of a released partitioned
parameter ([Note: storages of partitioned parameters] in ``stage3/parameters.py``). ``restore()`` resizes the storage
and fills it. If a storage has only trained parameters, or only this rank's shards of trained parameters, the values
come from their master weights. All other storages (frozen parameters, buffers) are copied to pinned host memory before
the release. A read of a released tensor is an error. After ``restore()``, the first read of a tensor waits until this
tensor has its values.

On the CPU, the device's memory is the host's, and stays. The rules for callers are the same.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload_core.device.events import AfterAll, Done, Event
from offload_core.device.protocols import Copy, TensorMemory
from offload_core.disk.shards import OnDisk
from offload_core.engine import Engine
from offload_core.errors import DeviceMemoryError, ParameterError, StateError
from offload_core.memory.host_memory import format_bytes
from offload_core.memory.plan import format_table
from offload_core.ranks.consistency import combine, together
from offload_core.support.threads import clear_up, uninterrupted

from ..internals.private import NO_BACKWARD, backward_number, no_read
from ..params import pending
from ..params.dtensor import is_dtensor, local_of
from ..params.managed import Wait
from ..params.pending import await_values, can_wait, end_wait
from ..params.slots import slot_of
from ..ranks.device import as_torch, told_by_allocator
from ..stage3.parameters import PartitionedParameter
from ..stage3.sharding import Sharding
from ..stage3.shards import MemoryShard, Shard
from .grad_hooks import GradHooks
from .registration import Registration

HOST_COPIES = "released values"
"""The label of host memory that has the values of released tensors."""
_CHUNK = 64 * 2**20
"""The bytes that are copied between device and host at a time."""
_ALIGNMENT = 64

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class ReleaseReport:
    """The device's memory before and after ``release()``, in bytes."""

    released: int
    """Bytes of parameters and buffers that were given back."""
    copied: int
    """The bytes among ``released`` that were copied to the host first, because no master weights have the values."""
    allocated: tuple[int, int] | None
    """Bytes that torch's allocator has given to all code of this process, before and after; None: unknown."""
    reserved: tuple[int, int] | None
    """Bytes that torch's allocator has reserved, in use or cached, before and after; None: unknown."""

    def __str__(self) -> str:
        rows = [("released", format_bytes(self.released), ""), ("copied to the host", format_bytes(self.copied), "")]
        for what, pair in (("allocated", self.allocated), ("reserved", self.reserved)):
            rows += [] if pair is None else [(what, format_bytes(pair[0]), format_bytes(pair[1]))]
        return format_table(rows, ("device memory", "before", "after"))


@dataclass(eq=False)
class _Memory:
    """One storage, and the tensors in it. A storage of this class stays on the device (:class:`_Stays`)."""

    storage: torch.UntypedStorage
    n_bytes: int
    kind: str
    """A description of the storage's contents, for reports."""
    wait: Wait
    """The function that a read of one of its tensors calls."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    """The tensors in the storage that other code may read."""
    trained: dict[torch.Tensor, int] = field(default_factory=dict)
    """Maps each trained parameter in the storage to the bytes of its values or shards."""
    frozen: list[PartitionedParameter] = field(default_factory=list)
    """The frozen parameters whose shards are in the storage."""
    at: int = 0
    """The offset of the storage's copy in the host memory, in bytes."""
    arrived: Event = field(default_factory=Done)

    given_back = 0
    """The bytes that leave the device."""

    @property
    def to_copy(self) -> bool:
        """True if the storage's values must be copied to the host before it leaves the device."""
        return False

    @property
    def leaving(self) -> Sequence[torch.Tensor]:
        """The tensors that other code may read and whose values leave the device."""
        return ()

    def values(self, tensor: torch.Tensor, host: np.ndarray) -> torch.Tensor:
        """Return a tensor's values while it is released."""
        return tensor.detach()

    def stand_in(self, host: np.ndarray) -> dict[PartitionedParameter, Shard]:
        """Replace the frozen parameters' shards in this storage by their copies on the host. Return the replaced
        shards."""
        return {}

    def free(self) -> None:
        """Free the storage's memory."""

    def take(self) -> None:
        """Allocate the storage's memory again, without values."""

    def end_waits(self) -> None:
        """Clear the pending mark of this storage's tensors, unless another engine has released them meanwhile."""
        for tensor in self.tensors:
            end_wait(tensor, self.wait)

    @property
    def copied(self) -> bool:
        """True if master weights do not have all values of the storage, so that the host needs a copy."""
        return sum(self.trained.values()) < self.n_bytes

    @property
    def bytes(self) -> torch.Tensor:
        """The storage's whole memory, as a uint8 tensor."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


class _MovedMemory(_Memory):
    """A storage that leaves the device (:class:`_Leaves`)."""

    @property
    def given_back(self) -> int:  # type: ignore[override]
        return self.n_bytes

    @property
    def to_copy(self) -> bool:
        return self.copied

    @property
    def leaving(self) -> Sequence[torch.Tensor]:
        return self.tensors

    def values(self, tensor: torch.Tensor, host: np.ndarray) -> torch.Tensor:
        assert self.copied
        run = as_torch(host[self.at : self.at + self.n_bytes])
        offset = run.storage_offset() // tensor.element_size() + int(tensor.storage_offset())
        return torch.empty(0, dtype=tensor.dtype).set_(run.untyped_storage(), offset, tensor.shape, tensor.stride())

    def stand_in(self, host: np.ndarray) -> dict[PartitionedParameter, Shard]:
        shards = {record: record.shard for record in self.frozen}
        for record, shard in shards.items():
            [values] = shard.on(self.storage.device)
            record.shard = MemoryShard(self.values(values, host))
        return shards

    def free(self) -> None:
        self.storage.resize_(0)

    def take(self) -> None:
        self.storage.resize_(self.n_bytes)


class _Stays:
    """A device whose memory is the host's: ``release()`` leaves all storages in place.

    Attributes:
        kind: the class that describes its storages.
    """

    kind = _Memory

    def may_leave(self, values: torch.Tensor) -> bool:
        """True if the memory of these values can be freed."""
        return values.layout is torch.strided

    def synchronize(self) -> None:  # waits
        """Wait for all kernels on the device: one may still read memory that is about to be freed."""

    def allocator(self, *, emptied: bool = False) -> tuple[int | None, int | None]:
        """Return the bytes that torch's allocator has given out, and the bytes that it has reserved; None: unknown.

        Args:
            emptied: True: the allocator first frees its cached memory.
        """
        return None, None


class _Leaves(_Stays):
    """A device whose memory is not the host's: ``release()`` frees storages."""

    kind = _MovedMemory

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def may_leave(self, values: torch.Tensor) -> bool:
        return super().may_leave(values) and values.untyped_storage().resizable()

    def synchronize(self) -> None:  # waits
        torch.accelerator.synchronize(self._device)

    def allocator(self, *, emptied: bool = False) -> tuple[int | None, int | None]:
        if emptied:
            told_by_allocator(lambda _: torch.accelerator.empty_cache(), self._device)
        asked: list[Callable[[torch.device], int]] = [
            torch.accelerator.memory_allocated,
            torch.accelerator.memory_reserved,
        ]
        allocated, reserved = (told_by_allocator(ask, self._device) for ask in asked)
        return allocated, reserved


class DeviceMemory:
    """The device memory of an optimizer's parameters, and of the other tensors of the optimizer's model.

    This object lives as long as the core.

    Args:
        memory: the core's device.
    """

    def __init__(
        self,
        core: Engine,
        memory: TensorMemory,
        registration: Registration,
        grad_hooks: GradHooks,
        sharding: Sharding,
    ) -> None:
        self._core, self._parameters, self._gradients = core, core.parameters, core.gradients
        self._world = core.device
        self.memory, self._host_memory = memory, core.memory
        self._registration = registration
        self._grad_hooks = grad_hooks
        self._sharding = sharding
        self._device = registration.device
        self._place = _Stays() if memory.addressable else _Leaves(self._device)
        self._memories: dict[int, _Memory] = {}
        """Maps ``storage._cdata`` to a storage of the last release; empty once all storages are restored. The storages
        have no memory while the core says that parameters are released. Otherwise they have memory again."""
        self._on_device: dict[PartitionedParameter, Shard] = {}
        """Maps each frozen parameter to its shards on the device, while a copy on the host replaces them."""
        self._host = np.empty(0, np.uint8)
        """Host memory for values of released storages. It is kept for the next release, because pinning takes long."""
        weakref.finalize(self, clear_up, partial(_finish_all, self._memories)).atexit = False

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or, while it is released, its values on the host. Do not call this for a released trained
        parameter, whose values may be only in its master weights."""
        if not self._parameters.released or tensor.layout is not torch.strided:
            return tensor
        with no_read():
            memory = self._memories.get(_number(tensor))
            if memory is None:
                return tensor
            return memory.values(tensor, self._host)

    # --- release -------------------------------------------------------------------------------------

    def release(self, named: NamedTensors, keep: Collection[str] = ()) -> ReleaseReport:
        """Free the memory of these tensors and of this rank's shards. All ranks call this.

        Args:
            named: whole tensors, by name.
            keep: names of tensors that stay, or of modules whose tensors stay.

        Raises:
            StateError: gradients wait for an update, or a backward runs.
            ParameterError: no tensor or module has a name in ``keep``, or a tensor's memory cannot be freed.
            HostMemoryError: the host has no room for copies.
        """
        slots = self._registration.slots
        before = self._place.allocator()
        with self._together("release()"):
            if self._agreed("release()"):
                uninterrupted(self._free)  # an interrupt may have cut off the end of the one before
                return ReleaseReport(0, 0, _pair(before, before, 0), _pair(before, before, 1))
            self._check_idle()
            memories = self._to_release([*named], keep)
            leaving = {memory.storage._cdata for memory in memories}
            self.finish_restore()  # what stays now, or leaves again, may still be on its way from the host's copies
            copied = [memory for memory in memories if memory.to_copy]
            self._host_for(copied)
        with self._together("release()"):
            self._parameters.flush(self._registration.current_tensors())
            self._sharding.before_change()
            self._await_others(memories)
            for slot in slots.values():
                slot.local.stay(leaving)  # the flush has written it, and it may be used while others are released
            for event in [self._world.to_host(copies, host) for copies, host in self._chunks(copied)]:
                event.wait()
            states = self._parameters.copies_of_states()
            self._place.synchronize()

        @torch.no_grad()  # in the section's own thread
        def section() -> None:
            self._parameters.release(
                "released parameters have no memory on the device; expected engine.restore() (or optimizer.restore()) "
                "before they are used: while they are released, only what reads states works, as saves do",
                states,
            )
            self._memories.clear()
            self._memories.update({memory.storage._cdata: memory for memory in memories})
            for memory in memories:
                self._refuse_reads(memory)

        try:
            uninterrupted(section)
        finally:  # a section of its own: a signal handler that reads while the first one runs ends before memory goes
            uninterrupted(self._free)
        of_states = sum(copy.nbytes for copy in states.values())
        after, given_back = self._place.allocator(emptied=True), sum(memory.given_back for memory in memories)
        n_copied = sum(memory.n_bytes for memory in copied)
        return ReleaseReport(
            given_back + of_states, n_copied + of_states, _pair(before, after, 0), _pair(before, after, 1)
        )

    def _await_others(self, memories: Iterable[_Memory]) -> None:
        """Wait until other engines have restored the tensors in these storages that they use, too, because the copies
        to the host read these tensors."""
        for memory in memories:
            for tensor in memory.leaving:
                await_values(tensor)

    def _agreed(self, what: str) -> bool:
        """Return True if parameters are released.

        Raises:
            StateError: on all ranks, if parameters are released on only some ranks.
        """
        released, collectives = self._parameters.released, self._core.collectives
        if not combine(collectives, what, same=[released]).alike.all():
            raise StateError(
                f"{what}: parameters are {'released' if released else 'on the device'} on this rank, and not so on "
                "another; expected the same calls of release() and restore() on all ranks"
            )
        return released

    def _check_idle(self) -> None:
        if backward_number() != NO_BACKWARD or self._grad_hooks.in_backward:
            raise StateError("release() in the middle of a backward; expected it after step()")
        self._sharding.check_closed("release()")
        self._gradients.check_none("release()", waiting=self._grad_hooks.fresh or self._grad_hooks.has_deferred)

    def _to_release(self, named: Sequence[tuple[str, torch.Tensor]], keep: Collection[str]) -> list[_Memory]:
        """Return the storages of these tensors and of their shards, except storages of a tensor in ``keep``."""
        found: dict[int, _Memory] = {}
        kept, used = set[int](), set[str]()
        slots = self._registration.slots
        with no_read():
            for name, tensor in named:
                stays = {each for each in keep if name == each or name.startswith(f"{each}.")}
                used |= stays
                record = self._sharding.record_with(tensor)
                held = [local_of(tensor)] if record is None else record.shard.on(self._device)
                values = next(iter(held), None)
                if values is None or values.device != self._device or values.numel() == 0:
                    continue
                if is_traceable_wrapper_subclass(values):
                    continue  # the tensors inside are named, too (``named_memory``)
                if stays and values.layout is not torch.strided:
                    continue
                if not (stays or self._place.may_leave(values)):
                    raise ParameterError(
                        f"release(): {name!r} is a {values.layout} tensor whose memory cannot be given back; expected "
                        f"a dense tensor of torch's own allocator: clone() it, or leave it there with keep=[{name!r}]"
                    )
                slot = slot_of(tensor)
                if slot is not None and slots.get(tensor) is not slot:
                    continue  # another optimizer trains it
                number, storage = _number(values), values.untyped_storage()
                if stays:
                    kept.add(number)
                trained = tensor in slots
                kind = "trained parameters" if trained else "frozen parameters and buffers"
                memory = found.get(number)
                if memory is None:
                    wait = partial(_await, weakref.WeakMethod(self.await_values), number)
                    memory = found[number] = self._place.kind(storage, storage.nbytes(), kind, wait)
                if trained:
                    memory.trained[tensor] = values.nbytes
                if record is not None:
                    memory.frozen += [record] if not trained and record not in memory.frozen else []
                elif all(tensor is not other for other in memory.tensors):
                    memory.tensors.append(tensor)
        if unknown := [name for name in keep if name not in used]:
            raise ParameterError(
                f"release(keep=...): nothing is named {unknown[0]!r}; expected names of parameters, buffers or "
                "modules, as named_parameters(), named_buffers() and named_modules() give them"
            )
        return [memory for number, memory in found.items() if number not in kept and memory.n_bytes]

    def _host_for(self, copied: Sequence[_Memory]) -> None:
        """Allocate host memory for copies of these storages, and give each storage an offset in it."""
        end = 0
        for memory in copied:
            memory.at = end
            end += -(-memory.n_bytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._host.nbytes:
            self._host = np.empty(0, np.uint8)  # free before allocating its successor
            self._host = self._host_memory.allocate(HOST_COPIES, end, np.dtype(np.uint8), pinned=True)

    def _chunks(self, copied: Sequence[_Memory]) -> Iterator[tuple[list[Copy], np.ndarray]]:
        """Yield the copies of these storages, at most about ``_CHUNK`` bytes at a time, each time with their range of
        the host memory."""
        copies: list[Copy] = []
        begin = end = 0
        for memory in copied:
            flat = memory.bytes
            for start in range(0, memory.n_bytes, _CHUNK):
                n_bytes = min(_CHUNK, memory.n_bytes - start)
                at = memory.at + start
                if copies and at + n_bytes - begin > _CHUNK:
                    yield copies, self._host[begin:end]
                    copies = []
                begin = begin if copies else at
                copies.append(Copy(flat, start, n_bytes, at - begin))
                end = at + n_bytes
        if copies:
            yield copies, self._host[begin:end]

    def _refuse_reads(self, memory: _Memory) -> None:
        """Have each read of the storage's tensors call ``memory.wait`` from now on, and replace shards in it by their
        copies."""
        self._on_device.update(memory.stand_in(self._host))
        for tensor in memory.tensors:
            pending.release(tensor, memory.wait)

    def _free(self) -> None:
        """Free the storages of released tensors; do nothing while parameters are on the device."""
        if self._parameters.released:
            for memory in self._memories.values():
                memory.free()

    # --- restore -------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Allocate the released memory again, and start to fill it. All ranks call this.

        Raises:
            DeviceMemoryError: this rank's device has no room. All tensors are still released.
            StateError: another rank's device has no room.
        """
        with self._together("restore()"):
            if not self._agreed("restore()"):
                return
            self._registration.current_tensors()  # what was kept may have been written to, and is sent again, too
            self._allocate()
        copied = [memory for memory in self._memories.values() if memory.to_copy]
        ends: dict[int, list[Event]] = {}
        after = self._world.mark()
        for copies, host in self._chunks(copied):
            event = self.memory.to_device(host, copies, after)
            for copy in copies:
                ends.setdefault(_number(copy.tensor), []).append(event)
        for memory in copied:
            memory.arrived = AfterAll(ends[memory.storage._cdata])
            for record in memory.frozen:
                record.live.updated = partial(_identity, memory.arrived)
        for record, shard in self._on_device.items():
            record.shard = shard
        tensors: list[torch.Tensor | OnDisk] = []

        def section() -> None:  # in its own thread: a signal handler in this one reads past our classes in no_read()
            with no_read():
                tensors.extend(self._registration.tensors())

        uninterrupted(section)
        self._parameters.restore(tensors)
        for memory in self._memories.values():
            for tensor in memory.tensors:
                pending.restore(tensor, memory.wait)
        self._registration.have_readers_wait()  # of the core, and no longer of this object
        self._on_device.clear()
        self._registration.param_table.mark_known_all()
        for memory in self._memories.values():
            for tensor in memory.tensors:
                if not can_wait(tensor):
                    memory.arrived.order()
                    end_wait(tensor, memory.wait)

    def _allocate(self) -> None:
        done: list[_Memory] = []
        try:
            for memory in self._memories.values():
                done.append(memory)
                memory.take()
            self._parameters.restore_states()
        except BaseException as error:
            for memory in done:
                memory.free()
            if not isinstance(error, RuntimeError | DeviceMemoryError):
                raise
            raise DeviceMemoryError(self._no_room(error)) from error

    def _no_room(self, error: Exception) -> str:
        needed = Counter[str]()
        for memory in self._memories.values():
            needed[memory.kind] += memory.n_bytes
        rows = [(what, format_bytes(n_bytes)) for what, n_bytes in needed.items()]
        rows.append(("in all", format_bytes(needed.total())))
        allocated = told_by_allocator(torch.accelerator.memory_allocated, self._device)
        rows += [] if allocated is None else [("allocated by others of this process", format_bytes(allocated))]
        free = self._world.free_bytes()
        rows += [] if free is None else [("free", format_bytes(free))]
        return (
            f"restore(): {self._device} has no room for what was released ({error}):\n"
            f"{format_table(rows, ('device memory', 'bytes'))}\n"
            "expected as much free memory there: end what has taken it (an inference engine: put it to sleep), then "
            "restore() again; all is still released, and nothing is lost"
        )

    def await_values(self, storage: int, tensor: torch.Tensor) -> None:  # waits
        """Wait until a restored tensor has its values.

        Args:
            storage: the ``_cdata`` of the tensor's storage.

        Raises:
            StateError: the tensor is still released.
        """
        self._parameters.check_present()
        if (memory := self._memories.get(storage)) is not None:  # else it has arrived
            # FSDP2 reads on streams of its own, which follow the reader's at the beginning of a forward only.
            memory.arrived.wait() if is_dtensor(tensor) else memory.arrived.order()
        self._registration.await_values(tensor)

    def before_backward(self) -> None:
        """Have a backward follow the copies of :meth:`restore`. The backward's graph may be older than the release, and
        C++ code reads the tensors that the graph has saved. Once all copies have ended, drop the references to the
        restored storages."""
        if self._parameters.released or not self._memories:
            return
        arrived = all(memory.arrived.done() for memory in self._memories.values())
        for memory in self._memories.values():
            for tensor in memory.leaving:
                if _has_memory(tensor):  # else another engine has released it
                    await_values(tensor)
        if arrived:
            self.finish_restore()

    def finish_restore(self) -> None:
        """Wait until all restored storages are filled, clear the pending mark of their tensors, and drop the references
        to the storages."""
        if not self._parameters.released:
            _finish_all(self._memories)
            self._memories.clear()

    # --- ranks and the allocator -----------------------------------------------------------------------

    def _together(self, what: str) -> AbstractContextManager[None]:
        return together(self._core.collectives, what, partial(_failed_elsewhere, what))


def _failed_elsewhere(what: str, others: str) -> StateError:
    return StateError(f"{what} failed on rank {others}, whose own error says why; nothing has changed on this rank")


def _pair(
    before: tuple[int | None, int | None], after: tuple[int | None, int | None], i: int
) -> tuple[int, int] | None:
    first, second = before[i], after[i]
    return None if first is None or second is None else (first, second)


def _finish_all(memories: Mapping[int, _Memory]) -> None:
    for memory in memories.values():
        if memory.storage.nbytes():  # else its tensors must go on to refuse reads
            memory.arrived.wait()
            memory.arrived = Done()
            if memory.copied:
                memory.end_waits()


def _has_memory(tensor: torch.Tensor) -> bool:
    with no_read():
        return local_of(tensor).untyped_storage().nbytes() > 0


def _identity(event: Event) -> Event:
    return event


def _number(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _await(
    method: "weakref.WeakMethod[Callable[[int, torch.Tensor], None]]", storage: int, tensor: torch.Tensor
) -> None:
    if (wait := method()) is None:
        raise StateError(
            "a parameter or buffer was left released: its engine is gone; expected engine.restore() or engine.close() "
            "before that"
        )
    wait(storage, tensor)
