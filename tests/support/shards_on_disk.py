"""Shards of parameters on a scripted disk, scratch files with late threads, and scenarios in which a fault shows."""

import os
import tempfile
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from offload_core.device.events import Done, Event
from offload_core.disk import scratch
from offload_core.disk.scratch import ALIGNMENT, ScratchFiles
from offload_core.disk.shards import SLOTS, DiskShards, OnDisk
from offload_core.disk.space import DiskSpace
from offload_core.dtypes import FLOAT32
from offload_core.errors import DiskError
from offload_core.layout.partition import Bucket, ParamSpec, build_buckets
from offload_core.memory.host_memory import HostMemory
from tests.support.one_thread import Threads
from tests.support.oracles import assert_same_bits
from tests.support.scripted_disk import ORDERS, READ, Script, scripted

PADDED = 16
"""Elements of which a bucket's are a multiple."""


class Shards:
    """A parameter of several buckets on disk, and the values that it is to have.

    Args:
        space: of each bucket's shard.
    """

    def __init__(self, script: Script, space: type[DiskSpace] = DiskSpace, n: int = 7, numel: int = 1104) -> None:
        self.script = script
        self.rng = np.random.default_rng(0)
        self.disk = DiskShards(("",), HostMemory(1))
        [self.files] = script.all_files
        self.numel = numel
        self.buckets, self.values, self.parts, self.shards = self.kept("p", n, numel, space)

    def kept(
        self, name: str, n: int, numel: int, space: type[DiskSpace] = DiskSpace
    ) -> tuple[list[Bucket], np.ndarray, list[DiskSpace], OnDisk]:
        assert numel % PADDED == 0
        spec = ParamSpec(name, n * numel, FLOAT32, partitioned=True)
        buckets = sorted(build_buckets([spec], world_size=1, bucket_numel=numel), key=lambda each: each.shard_start)
        values = self.drawn(n * numel)
        parts = [space(self.files, numel, FLOAT32.numpy) for _ in buckets]
        for bucket, part in zip(buckets, parts, strict=True):
            part.write(values[bucket.shard_start :][:numel])
        return buckets, values, parts, OnDisk([*zip(buckets, parts, strict=True)], FLOAT32, self.disk)

    def drawn(self, numel: int) -> np.ndarray:
        return self.rng.standard_normal(numel).astype(np.float32)

    def of(self, i: int) -> np.ndarray:
        return self.values[self.buckets[i].shard_start :][: self.numel]

    def expect(self, *numbers: int) -> None:
        for i in numbers:
            self.shards.expect(self.buckets[i])

    def lend(self, i: int, updated: Event | None = None) -> np.ndarray:
        found = self.shards.lend(self.buckets[i], updated or Done()).owner
        assert_same_bits(f"shard {i}", found, self.of(i))
        return found

    def give_back(self, i: int, read: Event | None = None) -> None:
        self.shards.give_back(self.buckets[i], read)

    def use(self, i: int) -> None:
        self.lend(i)
        self.give_back(i)

    def replace(self, i: int) -> None:
        self.of(i)[:] = self.drawn(self.numel)
        self.shards.write(self.of(i), self.buckets[i].shard_start)

    def end(self) -> None:
        for i in range(len(self.buckets)):
            self.use(i)
        found = np.empty(3 * self.numel, np.float32)
        self.shards.read(100, found)
        assert_same_bits("a part", found, self.values[100:][: found.size])
        self.expect(0, 1)
        self.disk._end.detach()
        self.disk.ahead.close()
        assert not self.script.pending


def in_every_order(scenario: Callable[[Shards], None], space: type[DiskSpace] = DiskSpace) -> Callable[[], None]:
    def run() -> None:
        for order in ORDERS:
            with scripted(order) as script:
                shards = Shards(script, space)
                scenario(shards)
                shards.end()

    run.__name__ = scenario.__name__
    return run


@in_every_order
def shards_that_are_lent(shards):
    """Several at a time, expected or not; each stays as it is until it is given back."""
    for i in range(7):
        shards.use(i)
    shards.expect(*range(7))
    lent = {i: shards.lend(i) for i in range(SLOTS + 2)}
    shards.expect(6, 5)
    shards.lend(6)
    shards.script.end_all()
    for i, found in lent.items():
        assert_same_bits(f"shard {i}, lent", found, shards.of(i))
        shards.give_back(i)
    shards.give_back(6)
    shards.expect(3, 2, 1, 0)
    for i in (2, 5, 0, 3, 1, 4):
        shards.use(i)


@in_every_order
def shards_that_change(shards):
    """One that was read ahead before it changed is read again."""
    shards.expect(*range(4))
    for i in (0, 1, 5):
        shards.replace(i)
    for i in range(7):
        shards.use(i)
    for i in range(3):
        shards.expect(i)
        shards.script.end_all()
        shards.replace(i)
        shards.use(i)


@in_every_order
def a_shard_that_an_update_is_yet_to_change(shards):
    """It is lent as the update leaves it."""

    class Updated(Done):
        def order(self) -> None:
            shards.replace(2)

    shards.expect(1, 2)
    shards.lend(2, Updated())
    shards.give_back(2)


@in_every_order
def a_shard_that_the_device_reads_late(shards):
    """Its slot gets another one's values after that."""
    seen: list[np.ndarray] = []

    class Read(Done):
        def __init__(self, found: np.ndarray) -> None:
            self.found = found

        def wait(self) -> None:
            if not seen:
                seen.append(self.found.copy())

    shards.expect(*range(7))
    read = Read(shards.lend(0))
    shards.give_back(0, read)
    for i in range(1, 7):
        shards.use(i)
    read.wait()
    assert_same_bits("what the device has read", seen[0], shards.of(0))


class Changing(DiskSpace):
    """It is replaced while it is read, once."""

    def write(self, values: np.ndarray) -> None:
        super().write(values)
        self.values = values

    def begin_parameter(self, memory: np.ndarray):
        begun = super().begin_parameter(memory)
        values, self.values = self.values, None
        if values is not None:
            values *= 2
            self._files.script.end_all()
            super().write(values)
        return begun


def shards_that_change_while_they_are_read():
    """What was read is of before the change, and not used."""
    for order in ORDERS:
        with scripted(order) as script:
            shards = Shards(script, Changing)
            shards.expect(0, 1, 2)
            for i in range(3):
                shards.use(i)
            shards.disk.close()


class Uncounted(DiskSpace):
    """Nobody counts its changes."""

    @property
    def version(self) -> None:
        return None

    @version.setter
    def version(self, value: int | None) -> None:
        pass


def shards_whose_changes_nobody_counts():
    """They are read when they are lent, and not before."""
    for order in ORDERS:
        with scripted(order) as script:
            shards = Shards(script, Uncounted)
            shards.expect(0, 1)
            assert READ not in script.ways()
            for _ in range(2):
                shards.use(0)
                shards.replace(0)
            lent = shards.lend(0)
            shards.replace(0)
            del lent
            shards.lend(0)
            shards.give_back(0)
            shards.end()


@in_every_order
def shards_that_outgrow_the_slots(shards):
    """What was on its way to the smaller ones has arrived."""
    shards.expect(0, 1)
    lent = shards.lend(2)
    numel = 3 * shards.numel
    buckets, values, _, larger = shards.kept("larger", 3, numel)
    assert_same_bits("shard 2, lent", lent, shards.of(2))
    shards.give_back(2)
    for bucket in buckets:
        larger.expect(bucket)
    for bucket in buckets:
        found = larger.lend(bucket, Done()).owner
        assert_same_bits("a larger shard", found, values[bucket.shard_start :][:numel])
        larger.give_back(bucket, None)
    shards.expect(0, 1)


def shards_that_cannot_be_read():
    """Each failure is one error of the call that lends it, or of nobody: what was read ahead in vain is read again. All
    slots are used again."""
    for order in ORDERS:
        for number in range(6):
            with scripted(order) as script:
                shards = Shards(script)
                script.fail(READ, number)
                errors = []
                for _ in range(2):
                    shards.expect(*range(4))
                    for i in range(7):
                        try:
                            shards.lend(i)
                        except DiskError as error:
                            errors.append(error)
                            shards.lend(i)
                        shards.give_back(i)
                assert len(script.failed) == 1
                if order == "late":
                    assert len(errors) == 1
                elif order == "at once":
                    assert len(errors) == (number >= SLOTS)
                else:
                    assert len(errors) <= 1
                shards.end()


def a_slot_whose_shard_could_not_be_read():
    """It is free for others."""
    with scripted("at once") as script:
        shards = Shards(script)
        begun = len(script.asked)
        script.fail(READ)
        with pytest.raises(DiskError):
            shards.lend(6)
        shards.expect(*range(SLOTS))
        shards.disk.ahead._do(lambda: None)
        assert [each.at // 8192 for each in script.asked[begun:]] == [6, *range(SLOTS)]
        shards.end()


def shards_that_are_read_ahead():
    """In the order in which they are expected, into all slots that are free; each is read once."""
    with scripted("at once") as script:
        shards = Shards(script)
        begun = len(script.asked)
        shards.expect(3, 1, 4, 6, 0, 2, 3, 1)
        shards.disk.ahead._do(lambda: None)
        assert [each.at // 8192 for each in script.asked[begun:]] == [3, 1, 4, 6]
        for i in (3, 1, 4, 6, 0, 2):
            asked = len(script.asked)
            shards.lend(i)
            assert asked == len(script.asked)
            shards.give_back(i)
            shards.disk.ahead._do(lambda: None)
        assert [each.at // 8192 for each in script.asked[begun:]] == [3, 1, 4, 6, 0, 2]
        begun = len(script.asked)
        shards.expect(*range(SLOTS), 4, 5)
        shards.use(5)  # in the place of 0, which comes last now
        for i in range(1, 5):
            shards.use(i)
        shards.disk.ahead._do(lambda: None)
        assert [each.at // 8192 for each in script.asked[begun:]] == [0, 1, 2, 3, 5, 4]
        shards.end()


# --- scratch files ---------------------------------------------------------------------------------------

PIECE = 2 * ALIGNMENT


def in_scratch_files(scenario: Callable[[ScratchFiles, np.ndarray], None]) -> Callable[[], None]:
    """The scenario gets files of one disk and of several, of small pieces, and the bytes that they are to hold."""

    def run() -> None:
        for n_folders in (1, 3):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(scratch, "TaskThread", Threads())
                patch.setattr(scratch, "PIECE_BYTES", PIECE)
                files = ScratchFiles([tempfile.gettempdir()] * n_folders)
                n_bytes = 11 * ALIGNMENT
                assert [files.grow(n_bytes), files.grow(n_bytes)] == [0, n_bytes]
                sizes = sizes_of(files)
                scenario(files, np.zeros(2 * n_bytes, np.uint8))
                assert sizes_of(files) in ([], sizes)
                files.close()

    run.__name__ = scenario.__name__
    return run


def sizes_of(files: ScratchFiles) -> list[int]:
    return [os.fstat(file.descriptor).st_size for file in files._files]


def page_aligned(n_bytes: int) -> np.ndarray:
    return HostMemory(1).allocate("bytes", n_bytes, np.dtype(np.uint8))


def assert_bytes(files: ScratchFiles, at: int, expected: np.ndarray) -> None:
    found = page_aligned(expected.size)
    files.read(at, found).result()
    assert_same_bits(f"bytes at {at}", found, expected)


@in_scratch_files
def bytes_in_scratch_files(files, expected):
    """They are where they were written, wherever pieces begin; who is told of an end finds all pieces there."""
    rng, told = np.random.default_rng(0), []
    for page, n in ((0, 22), (3, 5), (2, 1), (9, 8), (21, 1)):
        data = page_aligned(n * ALIGNMENT)
        data[:] = rng.integers(0, 255, data.size)
        at = page * ALIGNMENT
        expected[at : at + data.size] = data
        then = partial(lambda at, data: (told.append(at), assert_bytes(files, at, data)), at, data)
        transfer = files.write(at, data, then)
        assert not transfer.done()
        transfer._tasks[0].result()
        assert transfer.done() == (len(transfer._tasks) == 1)
        transfer.result()
        assert transfer.done()
        assert told.pop() == at
        assert not told
    for page, n in ((0, 22), (1, 3), (10, 12)):
        assert_bytes(files, page * ALIGNMENT, expected[page * ALIGNMENT :][: n * ALIGNMENT])


@in_scratch_files
def bytes_that_are_moved_in_part(files, expected):
    """A call that moves less than it was asked for is gone on with."""
    read, write = os.preadv, os.pwritev
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", lambda file, parts, at: write(file, [parts[0][:ALIGNMENT]], at))
        patch.setattr(os, "preadv", lambda file, parts, at: read(file, [parts[0][:ALIGNMENT]], at))
        data = page_aligned(expected.size)
        data[:] = np.arange(data.size) // 1000
        files.write(0, data).result()
        assert_bytes(files, 0, data)


@in_scratch_files
def a_piece_that_fails(files, expected):
    """Is the transfer's error, whichever piece it is, when all have ended; who waits for the end is told."""
    write, told, calls = os.pwritev, [], []

    def failing(file, parts, at):
        calls.append(at)
        if len(calls) == 2:
            raise OSError(5, "as asked")
        return write(file, parts, at)

    data = page_aligned(6 * ALIGNMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        transfer = files.write(0, data, lambda: told.append(len(calls)))
        with pytest.raises(DiskError, match="could not be written at byte .* as asked"):
            transfer.result()
        assert transfer.done()
    assert told == [3]


@in_scratch_files
def scratch_files_that_are_closed(files, expected):
    """What was asked for is done first."""
    data = page_aligned(4 * ALIGNMENT)
    data[:] = 7
    files.write(0, data)
    descriptor = os.dup(files._files[0].descriptor)
    try:
        files.close()
        found = page_aligned(ALIGNMENT)
        os.preadv(descriptor, [found], 0)
        assert_same_bits("bytes", found, data[:ALIGNMENT])
    finally:
        os.close(descriptor)


SCENARIOS = [
    shards_that_are_read_ahead,
    shards_that_are_lent,
    shards_that_change,
    a_shard_that_an_update_is_yet_to_change,
    a_shard_that_the_device_reads_late,
    shards_that_change_while_they_are_read,
    shards_whose_changes_nobody_counts,
    shards_that_outgrow_the_slots,
    shards_that_cannot_be_read,
    a_slot_whose_shard_could_not_be_read,
    bytes_in_scratch_files,
    bytes_that_are_moved_in_part,
    a_piece_that_fails,
    scratch_files_that_are_closed,
]
