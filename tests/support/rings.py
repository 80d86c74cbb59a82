"""Blocks of states on a scripted disk, and scenarios in which a fault of the ring shows."""

import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from offload_core.config.state_formats import FORMATS
from offload_core.disk.scratch import aligned
from offload_core.errors import DiskError
from offload_core.memory.host_memory import HostMemory
from offload_core.states.block_layout import BlockLayout
from offload_core.states.ring import Ring
from offload_core.states.slots import SLOTS
from tests.support.oracles import assert_same_bits
from tests.support.scripted_disk import ORDERS, READ, WRITE, Order, Script, scripted

STATES = {"master": FORMATS["float32"], "exp_avg": FORMATS["bfloat16"], "exp_avg_sq": FORMATS["float8"]}
ONE_THREAD = 1


class Blocks:
    """A ring, and the values that its states are to have."""

    def __init__(self, script: Script, n: int = 7, numel: int = 1300) -> None:
        self.script = script
        self.files = script.files()
        self.ring = Ring(self.files, HostMemory(ONE_THREAD), ONE_THREAD)
        self.rng = np.random.default_rng(0)
        self.expected: list[dict[str, np.ndarray]] = []
        self.errors: list[DiskError] = []
        self.add(n, numel)

    @property
    def order(self) -> list[int]:
        return [*range(len(self.expected))]

    def add(self, n: int, numel: int) -> None:
        first = len(self.expected)
        self.ring.add({first + i: BlockLayout(STATES, numel) for i in range(n)})
        self.expected += [{name: np.zeros(numel, np.float32) for name in STATES} for _ in range(n)]

    def drawn(self, numel: int) -> np.ndarray:
        """Values that every format keeps as they are."""
        values = np.exp2(self.rng.integers(-3, 4, -(-numel // 256))).astype(np.float32)
        return np.repeat(values, 256)[:numel]

    # --- what an update does -------------------------------------------------------------------------

    def lend(self, bucket: int):
        """The states of a bucket; errors of the disk are noted, and it is tried again."""
        return self.trying(lambda: self.ring.lend(bucket))

    def trying(self, act: Callable):
        for _ in range(3):
            try:
                return act()
            except DiskError as error:
                self.errors.append(error)
        raise AssertionError("the disk fails more often than asked")

    def update(self, bucket: int, *, meanwhile: Callable[[], object] = lambda: None, breaks_off: bool = False) -> None:
        arrays = self.lend(bucket)
        new = {}
        for name, array in arrays.items():
            assert_same_bits(f"{name} of {bucket}", array.values().astype(np.float32), self.expected[bucket][name])
            new[name] = self.drawn(array.size)
            array.write(new[name])
        meanwhile()
        for name, array in arrays.items():
            assert_same_bits(f"new {name} of {bucket}", array.values().astype(np.float32), new[name])
        if not breaks_off:
            version = self.ring.version(bucket)
            self.ring.give_back(bucket)
            assert self.ring.version(bucket) != version
            self.expected[bucket] = new

    def step(self, buckets: Iterable[int] | None = None) -> None:
        buckets = self.order if buckets is None else [*buckets]
        self.ring.expect(buckets)
        for bucket in buckets:
            self.update(bucket)

    # --- what others do ------------------------------------------------------------------------------

    def write(self, bucket: int, name: str, at: int = 256) -> None:
        values, version = self.drawn(512), self.ring.version(bucket)
        self.trying(lambda: self.ring.write(bucket, name, at, values))
        assert self.ring.version(bucket) != version
        self.expected[bucket][name] = np.concatenate(
            [self.expected[bucket][name][:at], values, self.expected[bucket][name][at + 512 :]]
        )

    def read(self, bucket: int) -> None:
        for name, expected in self.expected[bucket].items():
            out = np.empty(expected.size - 300, np.float32)
            self.ring.read(bucket, name, 259, out)
            assert_same_bits(f"part of {name} of {bucket}", out, expected[259:][: out.size])

    def copy(self, bucket: int) -> None:
        for name, array in self.ring.copy(bucket).items():
            assert_same_bits(
                f"copy of {name} of {bucket}", array.values().astype(np.float32), self.expected[bucket][name]
            )

    def read_parameter(self, bucket: int) -> None:
        out = np.empty(700, np.float32)
        self.ring.read_parameter(bucket, "master", 100, out)
        assert_same_bits(f"parameter of {bucket}", out, self.expected[bucket]["master"][100:800])

    def read_whole_parameter(self, bucket: int) -> None:
        expected = self.expected[bucket]["master"]
        memory = HostMemory(ONE_THREAD).allocate("a slot", aligned(expected.nbytes), np.dtype(np.uint8))
        end = self.ring.begin_parameter(bucket, "master", memory)
        if end is not None:
            end.result()
        assert_same_bits(f"whole parameter of {bucket}", memory.view(np.float32)[: expected.size], expected)

    def look(self, bucket: int) -> None:
        """Look at a bucket's states in all ways."""
        for way in (self.read, self.copy, self.read_parameter, self.read_whole_parameter):
            self.trying(lambda way=way: way(bucket))

    def look_at_all(self) -> None:
        for bucket in self.order:
            self.look(bucket)

    def rest(self) -> None:
        """All that is on its way ends, and the ring has seen it."""
        for _ in range(3):
            self.script.end_all()
            self.ring._do(lambda: None)

    def close(self) -> None:
        self.ring.close()
        assert self.files.closed
        assert not self.script.pending

    def check(self) -> None:
        """Look at all states, also as the disk has them."""
        self.look_at_all()
        self.step()
        self.rest()
        self.look_at_all()
        self.close()


def in_every_order(scenario: Callable[[Blocks, Order], None]) -> Callable[[], None]:
    def run() -> None:
        for order in ORDERS:
            with scripted(order) as script:
                blocks = Blocks(script)
                scenario(blocks, order)
                blocks.check()

    run.__name__ = scenario.__name__
    return run


# --- the ring --------------------------------------------------------------------------------------------


@in_every_order
def blocks_that_are_updated(blocks, order):
    """In the order that was announced, in others, and without one."""
    for _ in range(3):
        blocks.step()
    blocks.step(blocks.order[::-1])
    blocks.step([0, 4])
    blocks.step([5, 1, 5])
    for bucket in (3, 3, 0):
        blocks.update(bucket)


@in_every_order
def blocks_that_others_look_at(blocks, order):
    """What lies on disk counts while a block is updated; what is in memory counts while it is written."""
    blocks.look_at_all()
    blocks.step()
    for bucket in blocks.order:
        blocks.look(bucket)
        blocks.update(bucket, meanwhile=lambda bucket=bucket: blocks.look(bucket))
        blocks.look(bucket)
        blocks.look((bucket + 3) % 7)
    blocks.ring.expect(blocks.order)
    blocks.look_at_all()  # some are being read ahead


@in_every_order
def updates_that_break_off(blocks, order):
    """The states are those before it, for the next update, for a write and for readers."""
    blocks.step()
    for bucket in (0, 6, 2, 2, 0, 3, 4, 5, 6):
        blocks.update(bucket, breaks_off=True)
        blocks.look(bucket)
    blocks.update(6)
    blocks.update(2, breaks_off=True)
    blocks.write(2, "exp_avg")
    blocks.look(2)
    blocks.write(3, "master")  # only memory has it yet
    blocks.update(3, breaks_off=True)
    blocks.update(0, breaks_off=True)
    blocks.look(3)


@in_every_order
def blocks_that_are_written_from_outside(blocks, order):
    """One that is in memory, or not, on its way from disk, or to it."""
    for bucket in blocks.order:
        blocks.write(bucket, "master")
    blocks.look_at_all()
    blocks.step()
    for bucket in (0, 6, 3):
        blocks.write(bucket, "exp_avg_sq", 0)
        blocks.write(bucket, "exp_avg")
        blocks.look(bucket)
    blocks.update(3)
    blocks.write(3, "exp_avg")
    blocks.ring.expect([1, 2, 0])
    for bucket in (1, 2, 4, 5, 0, 3):
        blocks.write(bucket, "master")
    blocks.look_at_all()


@in_every_order
def blocks_that_outgrow_the_slots(blocks, order):
    """All that is in memory alone has come to the disk before larger slots take its place."""
    blocks.step()
    blocks.write(6, "master")
    blocks.write(0, "exp_avg")
    blocks.ring.expect([1, 2])
    blocks.add(3, 5000)
    blocks.look_at_all()


def buckets_of(transfers) -> list[int]:
    block = BlockLayout(STATES, 1300).n_bytes
    return [transfer.at // block for transfer in transfers]


def blocks_that_are_read_ahead():
    """Each is read once in a step and before it is asked for, and is written once, at once."""
    with scripted("at once") as script:
        blocks = Blocks(script, n=9)
        blocks.step()
        for _ in range(3):
            blocks.ring.expect(blocks.order)
            blocks.rest()
            begun = len(script.asked)
            for bucket in blocks.order:
                asked = len(script.asked)
                blocks.ring.lend(bucket)
                assert bucket not in buckets_of(each for each in script.asked[asked:] if each.way == READ)
                asked = len(script.asked)
                blocks.ring.give_back(bucket)
                assert (script.asked[asked].way, *buckets_of([script.asked[asked]])) == (WRITE, bucket)
            blocks.rest()
            ways = script.ways()[begun:]
            assert ways.count(WRITE) == ways.count(READ) == 9
            reads = buckets_of(each for each in script.asked[begun:] if each.way == READ)
            # the first ones had been read at the end of the step before, and those of the next one now
            assert reads == [*range(SLOTS, 9), *range(SLOTS)]
        blocks.look_at_all()
        blocks.close()


def a_block_that_nobody_announced():
    """It takes the slot of the one that is needed last."""
    with scripted("at once") as script:
        blocks = Blocks(script, n=9)
        blocks.step()
        blocks.ring.expect(range(SLOTS))
        blocks.rest()
        begun = len(script.asked)
        for bucket in (7, *range(SLOTS)):
            blocks.update(bucket)
        reads = buckets_of(each for each in script.asked[begun:] if each.way == READ)
        assert reads[0] == 7
        assert not {*range(SLOTS - 1)} & {*reads}
        blocks.check()


def a_block_whose_update_broke_off():
    """Its slot gets what comes next as soon as another one is asked for."""
    with scripted("at once") as script:
        blocks = Blocks(script, n=9)
        blocks.step()
        blocks.rest()
        blocks.ring.expect(blocks.order)
        blocks.update(0, breaks_off=True)
        begun = len(script.asked)
        blocks.ring.lend(1)
        assert buckets_of(script.asked[begun:]) == [SLOTS]
        blocks.check()


@in_every_order
def an_interrupt_before_a_block_has_arrived(blocks, order):
    """Its slot is nobody's until it has."""
    blocks.step()
    blocks.rest()
    for bucket in (0, 5, 2):
        blocks.ring._do(lambda bucket=bucket: blocks.ring._slots.lend(bucket))
    blocks.update(1)


def writes_that_fail():
    """Each is one error of an update to come, the block is written again, and no value is lost."""
    for order in ORDERS[:3]:
        for number in range(0, 18, 3 if isinstance(order, int) else 1):
            with scripted(order) as script:
                blocks = Blocks(script)
                blocks.step()
                script.fail(WRITE, number)
                blocks.step(blocks.order[::-1])
                blocks.look_at_all()
                blocks.step()
                blocks.rest()
                blocks.step()
                blocks.check()
                assert len(script.failed) == len(blocks.errors) == 1, number


def a_write_that_fails_last():
    """The next update says so and writes the block again, without a need for its slot."""
    with scripted("at once") as script:
        blocks = Blocks(script, n=2)
        script.fail(WRITE)
        blocks.update(0)
        blocks.rest()
        with pytest.raises(DiskError, match="a write at 0 failed as asked"):
            blocks.ring.lend(1)
        assert [(each.way, each.at) for each in script.asked] == 2 * [(WRITE, 0)]
        blocks.check()


@in_every_order
def a_write_that_fails_and_does_not_matter(blocks, order):
    """Other values take the place of those that could not be written: nobody is told."""
    blocks.step()
    blocks.rest()
    for seen in (False, True):
        blocks.script.fail(WRITE)
        blocks.update(0)
        if seen:
            blocks.rest()
        blocks.write(0, "master")
        blocks.step()
    assert len(blocks.script.failed) == 2
    if order in ("late", "at once"):  # else an update may come between
        assert not blocks.errors


def reads_that_fail():
    """Each is one error of the act that needs the block, or of nobody; the block is read again."""
    for order in ORDERS[:3]:
        for number in range(0, 20, 3 if isinstance(order, int) else 1):
            with scripted(order) as script:
                blocks = Blocks(script)
                blocks.step()
                blocks.step()
                blocks.rest()
                script.fail(READ, number)
                blocks.step()
                blocks.step(blocks.order[::-1])
                blocks.write(6, "master")
                blocks.check()
                assert len(script.failed) == 1
                assert len(blocks.errors) <= 1


def what_was_read_ahead_in_vain():
    """It is nobody's error as long as the block is not updated, and no reader gets it."""
    for order in ORDERS[:3]:
        for number in range(3):
            with scripted(order) as script:
                blocks = Blocks(script)
                blocks.step()
                blocks.step(blocks.order[::-1])
                blocks.rest()
                script.fail(READ, number)
                blocks.ring.expect([6, 5, 4, 3, 2])
                blocks.rest()
                assert script.failed
                blocks.look_at_all()
                for bucket in (0, 1, 0, 1):
                    blocks.update(bucket)
                assert not blocks.errors
                blocks.check()
                assert len(blocks.errors) <= 1


def anything(blocks: Blocks, chance: random.Random) -> None:
    """Do one thing with a bucket."""
    bucket = chance.randrange(7)
    match chance.randrange(9):
        case 0:
            blocks.look(bucket)
        case 1 | 2:
            blocks.update(bucket)
        case 3:
            blocks.update(bucket, breaks_off=True)
        case 4:
            blocks.write(bucket, "master")
        case 5:
            blocks.write(bucket, "exp_avg")
        case 6:
            blocks.update(bucket, meanwhile=lambda: blocks.look(chance.randrange(7)))
        case 7:
            blocks.ring.expect(chance.sample(blocks.order, 4))
        case 8:
            blocks.step()


def blocks_by_chance():
    """Anything may follow anything."""
    for seed in range(16):
        chance = random.Random(seed)
        with scripted(seed) as script:
            blocks = Blocks(script)
            for _ in range(40):
                anything(blocks, chance)
            blocks.check()


SCENARIOS = [
    a_block_that_nobody_announced,
    updates_that_break_off,
    blocks_that_are_read_ahead,
    a_block_whose_update_broke_off,
    an_interrupt_before_a_block_has_arrived,
    a_write_that_fails_last,
    a_write_that_fails_and_does_not_matter,
    what_was_read_ahead_in_vain,
    blocks_by_chance,
    blocks_that_others_look_at,
    writes_that_fail,
    blocks_that_are_updated,
    blocks_that_are_written_from_outside,
    reads_that_fail,
    blocks_that_outgrow_the_slots,
]
