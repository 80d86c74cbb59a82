"""Blocks of host memory that engines use in turn: who finds one, when it is free again, and what is kept."""

import gc
import sys
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.errors import HostMemoryError, HostMemoryWarning
from offload_core.memory.host_memory import HostMemory
from offload_core.memory.pinning import Pinning
from offload_core.memory.working_memory import Blocks, bytes_in_turn, unprotected
from offload_core.support.living import Living
from tests.support.strategies import law

BYTES = np.dtype(np.uint8)
SIZES = st.lists(st.integers(1, 5), max_size=6)


class Counting:
    """Blocks, and the sizes of those that were made."""

    def __init__(self):
        self.blocks, self.made = Blocks(), []

    def make(self, size):
        self.made.append(size)
        return np.zeros(size, np.uint8)

    def lend(self, size):
        return self.blocks.lend(size, self.make)


@law(200)
@given(st.lists(SIZES, min_size=1, max_size=4), st.data())
def test_an_engine_that_works_alone_finds_all_that_it_has_reserved_in_any_order(engines, data):
    pool = Counting()
    for engine, sizes in enumerate(engines):
        pool.blocks.reserve(engine, sizes, pool.make)
    made = len(pool.made)
    closed = data.draw(st.sets(st.sampled_from(range(len(engines)))))
    for engine in closed:
        pool.blocks.cancel(engine, engines[engine])
    for engine in data.draw(st.permutations([e for e in range(len(engines)) if e not in closed])):
        lent = [pool.lend(size) for size in data.draw(st.permutations(engines[engine]))]
        for number, array in enumerate(lent):
            array[:] = number
        assert [set(array.tolist()) for array in lent] == [{number} for number in range(len(lent))]
        assert len(pool.made) == made
        lent.clear()
        array = None


@law(200)
@given(st.lists(SIZES, min_size=1, max_size=4))
def test_no_block_could_go_and_each_engine_knows_what_others_would_keep(engines):
    pool = Counting()
    for engine, sizes in enumerate(engines):
        pool.blocks.reserve(engine, sizes, pool.make)
    needs = [Counter(sizes) for sizes in engines]
    suffice = [max(sum(n for size, n in each.items() if size >= least) for each in needs) for least in range(1, 6)]
    assert bytes_in_turn(needs) == sum(suffice)
    held = sorted(pool.blocks.sizes)
    assert sum(held) >= sum(suffice)
    for i in range(len(held)):  # none can go
        rest = held[:i] + held[i + 1 :]
        assert any(sum(size >= least for size in rest) < n for least, n in enumerate(suffice, 1))
    for engine, sizes in enumerate(engines):
        others = bytes_in_turn([*needs[:engine], *needs[engine + 1 :]])
        assert pool.blocks.shared_bytes(engine) == sum(sizes) - (sum(suffice) - others)
    for engine, sizes in enumerate(engines):
        pool.blocks.cancel(engine, sizes)
    assert pool.blocks.sizes == []


def test_a_block_is_free_when_its_last_view_is_gone_and_is_then_lent_again():
    pool = Counting()
    pool.blocks.reserve("engine", [64], pool.make)
    array = pool.lend(48)
    view = array.view(np.uint16)[3:5]
    address = array.ctypes.data
    del array
    other = pool.lend(8)  # while the view is alive
    assert pool.made == [64, 8]
    assert view.base is not None
    assert not np.shares_memory(other, view)
    del view
    assert pool.lend(64).ctypes.data == address


def test_engines_that_work_at_a_time_have_blocks_of_their_own_which_are_kept():
    pool = Counting()
    for engine in range(2):
        pool.blocks.reserve(engine, [8, 8], pool.make)
    assert pool.made == [8, 8]
    lent = [pool.lend(8) for _ in range(4)]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(lent) for b in lent[:i])
    del lent
    assert len([pool.lend(8) for _ in range(4)]) == len(pool.made) == 4
    pool.blocks.cancel(0, [8, 8])
    assert pool.blocks.sizes == [8, 8]
    pool.blocks.cancel(1, [8, 8])
    assert pool.blocks.sizes == []


def test_threads_that_borrow_at_a_time_never_get_the_same_memory():
    pool, wrong = Counting(), []
    pool.blocks.reserve("engine", [16] * 3, pool.make)

    def borrow(number):
        for _ in range(300):
            array = pool.lend(16)
            array[:] = number
            for _ in range(3):
                if set(array.tolist()) != {number}:
                    wrong.append(number)
            del array

    threads = [threading.Thread(target=borrow, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(pool.made) <= 4 + 3


@pytest.fixture
def _threads_switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_the_same_time(act, threads=4):
    """Call ``act(number)`` in each of so many threads; return the errors, also those of finalizers."""
    errors, hook = [], sys.unraisablehook

    def run(number):
        try:
            act(number)
        except Exception as error:
            errors.append(error)

    sys.unraisablehook = lambda unraisable: errors.append(unraisable.exc_value)
    try:
        running = [threading.Thread(target=run, args=[number]) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.unraisablehook = hook
    return errors


@pytest.mark.usefixtures("_threads_switch_often")
def test_threads_that_reserve_and_cancel_at_a_time_leave_the_blocks_of_the_needs_that_are_left():
    pool = Counting()
    pool.blocks.reserve("kept", [3, 5], pool.make)

    def work(number):
        for i in range(50):
            sizes = [1 + (number + i) % 5, 4]
            pool.blocks.reserve(number, sizes, pool.make)
            pool.blocks.shared_bytes(number)
            array = pool.lend(4)
            pool.blocks.lacking(number, [i % 7])
            del array
            pool.blocks.cancel(number, sizes)

    for _ in range(8):
        assert at_the_same_time(work) == []
        held = sorted(pool.blocks.sizes)
        assert len(held) >= 2, "a block that an engine needs was freed"
        assert held[-1] >= 5
        assert held[-2] >= 3
        pool.blocks.trim()
        assert len(pool.blocks.sizes) == 2
    pool.blocks.cancel("kept", [3, 5])
    assert pool.blocks.sizes == []


@pytest.mark.usefixtures("_threads_switch_often")
def test_the_account_of_an_engine_is_exact_when_garbage_is_collected_in_any_thread():
    memory = HostMemory(1)

    def work(number):
        for i in range(300):
            cycle = [memory.allocate("states", 8, BYTES), memory.reserve("staging", [16], pinned=False)]
            if i % 2:
                cycle.append(cycle)
            memory.report()
            assert memory.n_bytes > 0

    before = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        assert at_the_same_time(work) == []
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert memory.report() == {}
    assert memory.lacking_bytes([16], pinned=False) >= 0


class Member:
    """An object that may be in a set of weak references."""


@pytest.mark.usefixtures("_threads_switch_often")
def test_objects_may_come_and_go_in_other_threads_while_the_living_are_listed():
    living = Living()
    kept = [Member() for _ in range(50)]
    for each in kept:
        living.add(each)
        living.add(each)

    def work(number):
        for _ in range(200):
            living.add(Member())
            removed = Member()
            living.add(removed)
            living.discard(removed)
            here = [*living]
            assert {*kept} <= {*here}
            assert removed not in here

    assert at_the_same_time(work) == []
    assert {*living} == {*kept}
    assert len([*living]) == len(kept)


def test_a_reservation_that_is_refused_leaves_no_memory():
    memory = HostMemory(1)
    reserved = memory.reserve("staging", [8, 0, 8], pinned=False)
    assert memory.report() == {"staging": 16}
    before = memory.lacking_bytes([64], pinned=False)
    with pytest.raises(HostMemoryError, match="gradients: the system refused 8192.0 TiB"):
        memory.reserve("gradients", [2**53, 64], pinned=False)
    assert memory.report() == {"staging": 16}
    assert memory.lacking_bytes([64], pinned=False) == before
    assert reserved.borrow(2, np.dtype(np.float32)).size == 2
    assert reserved.borrow(0, BYTES).size == 0
    del reserved
    gc.collect()
    assert memory.report() == {}


def test_a_copy_of_a_device_does_not_keep_a_loan():
    pool = Counting()
    pool.blocks.reserve("engine", [32], pool.make)
    array = pool.lend(32)[8:].view(np.uint32)
    seen = unprotected(array)
    array[:] = range(6)
    assert seen.tolist() == [*range(6)]
    del array
    pool.lend(32)[:] = 0xFF
    assert seen.tolist() == [2**32 - 1] * 6
    own = np.zeros(4)
    assert unprotected(own) is own


class Pins(Pinning):
    """Pins so many arrays, and no more."""

    name = done = "pinned"

    def __init__(self, left):
        self.left, self.pinned = left, []

    def allocate(self, n_bytes, threads):
        if not self.left:
            raise HostMemoryError("as asked")
        self.left -= 1
        self.pinned.append(np.zeros(n_bytes, np.uint8))
        return self.pinned[-1]


def test_memory_that_could_not_be_pinned_is_not_lent_as_pinned_memory():
    pinning = Pins(3)
    first, second = HostMemory(1, [pinning]), HostMemory(1, [pinning])
    reserved = first.reserve("staging", [8, 8], pinned=True)
    with pytest.warns(HostMemoryWarning, match="could not be pinned"):
        other = second.reserve("staging", [8, 8, 8, 8], pinned=True)
    assert first.report() == {"staging": 16}
    assert second.report() == {"staging": 32}
    lent = [reserved.borrow(8, BYTES) for _ in range(2)]
    pageable = [other.borrow(8, BYTES) for _ in range(4)]

    def is_pinned(array):
        return any(array.ctypes.data == each.ctypes.data for each in pinning.pinned)

    assert all(map(is_pinned, lent))
    assert not any(map(is_pinned, pageable))
    with pytest.warns(HostMemoryWarning, match="could not be pinned"):
        more = [reserved.borrow(8, BYTES) for _ in range(2)]  # besides what was reserved
    assert not all(map(is_pinned, more))
