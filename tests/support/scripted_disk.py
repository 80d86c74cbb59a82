"""A disk whose transfers end when a script says so, in the place of scratch files.

It is as unkind as a disk may be. A read's memory is spoiled as soon as the read is asked for. Where a read and a write
are at the same bytes of the disk at a time, the read gets neither value. Memory on its way is nobody else's: a write
whose memory changes, and a second transfer of memory that is on its way, are errors. A transfer that fails has done
harm.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Literal

import numpy as np
import pytest

import offload_core.disk.shards
import offload_core.states.on_disk
import offload_core.states.ring
from offload_core.disk.scratch import ALIGNMENT, aligned
from offload_core.errors import DiskError
from tests.support.one_thread import Threads

READ, WRITE = "read", "write"
Order = Literal["late", "at once"] | int
ORDERS: tuple[Order, ...] = ("late", "at once", *range(6))
"""Ends of transfers: when somebody waits for them, before anybody can wait, and by chance: the seeds."""
SPOILED = 0xFF
"""A NaN in each element type."""
MODULES: tuple[ModuleType, ...] = (offload_core.states.ring, offload_core.disk.shards)
"""Modules with threads that decide what the disk does next."""


class ScriptedTransfer:
    """Bytes on their way. They are there when it ends."""

    def __init__(
        self,
        files: "ScriptedFiles",
        way: str,
        at: int,
        memory: np.ndarray,
        then: Callable[[], object] | None,
        *,
        fails: bool,
    ) -> None:
        self.files = files
        self.way = way
        self.at = at
        self.memory = memory
        self.torn = False
        self.ended = False
        self._then = then
        self.fails = fails
        self._error: BaseException | None = None
        if way == READ:
            memory.fill(SPOILED)
        self._before = memory.copy()

    def meets(self, other: "ScriptedTransfer") -> bool:
        """True if both are at the same bytes of the disk."""
        apart = self.at >= other.at + other.memory.size or other.at >= self.at + self.memory.size
        return self.files is other.files and not apart

    def tell(self) -> None:
        """Say that it has ended; a disk may say so shortly before :meth:`done` is true."""
        then, self._then = self._then, None
        if then is not None:
            then()

    def end(self) -> None:
        if self.ended:
            return
        if not np.array_equal(self.memory, self._before):
            self.files.script.find(f"the memory of a {self.way} at {self.at} has changed on its way")
        disk = self.files.content[self.at : self.at + self.memory.size]
        if self.fails:
            self._error = DiskError(f"scripted disk: a {self.way} at {self.at} failed as asked")
        if self.way == WRITE:
            disk[:] = SPOILED if self.fails else self.memory
        elif not self.fails and not self.torn:
            self.memory[:] = disk
        self.ended = True
        self.files.script.pending.remove(self)
        self.tell()

    def done(self) -> bool:
        self.files.script.go_on()
        return self.ended

    def error(self) -> BaseException | None:
        self.end()
        return self._error

    def result(self) -> None:
        if (error := self.error()) is not None:
            raise error


class ScriptedFiles:
    """As :class:`ScratchFiles`."""

    def __init__(self, script: "Script") -> None:
        self.script = script
        self.content = np.zeros(0, np.uint8)
        self.closed = False

    @property
    def n_bytes(self) -> int:
        return self.content.size

    def grow(self, n_bytes: int) -> int:
        start = self.n_bytes
        self.content = np.concatenate([self.content, np.zeros(aligned(n_bytes), np.uint8)])
        return start

    def read(self, at: int, out: np.ndarray, then: Callable[[], object] | None = None) -> ScriptedTransfer:
        return self.script.begin(self, READ, at, out, then)

    def write(self, at: int, data: np.ndarray, then: Callable[[], object] | None = None) -> ScriptedTransfer:
        return self.script.begin(self, WRITE, at, data, then)

    def close(self) -> None:
        for transfer in [transfer for transfer in self.script.pending if transfer.files is self]:
            transfer.end()
        self.closed = True


class Script:
    """The order of events of one run, and what was asked for in it."""

    def __init__(self, order: Order = "late") -> None:
        self.failed: list[ScriptedTransfer] = []
        """Those that were asked to fail."""
        self._fails: Counter[str] = Counter()
        self.asked: list[ScriptedTransfer] = []
        self.pending: list[ScriptedTransfer] = []
        self.all_files: list[ScriptedFiles] = []
        self.faults: list[str] = []
        """Rules that were broken."""
        self.over = False
        self._order = order
        self._random = random.Random(order)

    def files(self, folders: Sequence[str] = ()) -> ScriptedFiles:
        self.all_files.append(ScriptedFiles(self))
        return self.all_files[-1]

    def begin(
        self, files: ScriptedFiles, way: str, at: int, memory: np.ndarray, then: Callable[[], object] | None
    ) -> ScriptedTransfer:
        if at % ALIGNMENT or memory.size % ALIGNMENT or memory.ctypes.data % ALIGNMENT:
            self.find(f"a {way} of {memory.size} bytes at {at} is not aligned")
        if files.closed or at + memory.size > files.n_bytes:
            self.find(f"a {way} at {at} is beyond the files")
        for other in self.pending:
            if np.shares_memory(other.memory, memory):
                self.find(f"the memory of a {other.way} at {other.at} is given to a {way} at {at}")
        transfer = ScriptedTransfer(files, way, at, memory, then, fails=self._fails[way] == 1)
        self._fails[way] -= 1
        if transfer.fails:
            self.failed.append(transfer)
        for other in filter(transfer.meets, self.pending):
            if way == other.way == WRITE:
                self.find(f"two writes at {at} are on their way")
            for each in (transfer, other):
                each.torn = WRITE in (way, other.way)
        self.asked.append(transfer)
        self.pending.append(transfer)
        self.go_on()
        return transfer

    def find(self, fault: str) -> None:
        """Note it, besides raising it: a thread may keep the error for itself. After a scenario that has failed its
        engines are closed, and nobody looks."""
        self.faults.append(fault)
        if not self.over:
            raise AssertionError(fault)

    def go_on(self) -> None:
        """Time passes."""
        if self._order == "at once":
            self.end_all()
        elif self._order != "late":
            for transfer in self._random.sample(self.pending, self._random.randint(0, len(self.pending))):
                if self._random.random() < 0.5:
                    transfer.tell()
                else:
                    transfer.end()

    def end_all(self) -> None:
        for transfer in [*self.pending]:
            transfer.end()

    def fail(self, way: str, number: int = 0) -> None:
        """Have this transfer fail, counted from now on among those of this way."""
        self._fails[way] = number + 1

    def ways(self) -> list[str]:
        return [transfer.way for transfer in self.asked]

    def check(self) -> None:
        assert not self.faults


@contextmanager
def scripted(order: Order = "late") -> Iterator[Script]:
    """Stores and shards that are made inside lie on a scripted disk. Their threads are played, in this order, too."""
    script = Script(order)
    threads = Threads(order if isinstance(order, int) else None)
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "TaskThread", threads)
        for module in (offload_core.states.on_disk, offload_core.disk.shards):
            patch.setattr(module, "ScratchFiles", script.files)
        try:
            yield script
        finally:
            script.over = True
        script.check()
