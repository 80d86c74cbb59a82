"""Blocks of host memory that the engines of a process use in turn: staging, and gradients until their update.

An engine reserves the sizes that it needs when it takes parameters on. Blocks are made for what is lacking, so that an
engine whose turn it is finds all of its sizes among them while the others rest. A block is lent when it is needed, and
is free again as soon as no array of it is alive: nobody gives it back, so that no interrupt and no failed copy can lose
it, or give it to two. If engines work at the same time and no block is free, another one is made. Nobody ever waits for
a block: two engines in two threads cannot stop each other, and the order in which ranks exchange does not depend on who
has which block.

There is no lock here: a finalizer, which may run inside any allocation of any thread, would wait for its own thread.
Each change and each snapshot is one call of C code, and nothing iterates over what another thread may change (not even
``dict.items()``, whose tuples may start a collection). Two threads that meet make one block too many at worst. An
interrupt may lose a block that is about to be lent, until no engine is left.
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import setitem
from typing import Any

import numpy as np

from ..native import kernels
from ..support.living import Living


class Block:
    """Host memory of one size, lent to one engine at a time.

    Args:
        free: the blocks of this size that nobody has now, as keys.
    """

    def __init__(self, memory: np.ndarray, free: "dict[Block, Any]") -> None:
        self.memory = memory
        """Its bytes."""
        self.free = free
        self.array_interface = {
            "version": 3,
            "typestr": "|u1",
            "shape": memory.shape,
            "data": (kernels.address(memory), False),
        }


class _Loan:
    """The memory of a block, as NumPy takes it over. Every array of it keeps this object alive."""

    def __init__(self, block: Block) -> None:
        self.memory = block.memory
        self.__array_interface__ = block.array_interface


def unprotected(array: np.ndarray) -> np.ndarray:
    """Return a view of the same memory that does not keep its loan: the memory may be lent again while it is alive.

    Copies of real devices keep no loan either. Devices of tests use this, so that a missing wait shows.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, _Loan):
        return array
    start = kernels.address(array) - kernels.address(base.memory)
    return base.memory[start : start + array.nbytes].view(array.dtype)


class Blocks:
    """The blocks of one kind of host memory, and what the engines need of it."""

    def __init__(self) -> None:
        self._free: dict[int, dict[Block, Any]] = {}
        """The blocks that are not lent, by size. The values mean nothing."""
        self._loans: dict[Block, weakref.ref[_Loan]] = {}
        """The last loan of each block. When it dies, C code makes the block free."""
        self._made: Living[Block] = Living()
        """All blocks, lent or free."""
        self._needs: list[tuple[Hashable, tuple[int, ...]]] = []
        """Each reservation: an engine, and sizes that it needs at a time, besides those of its other reservations."""

    @property
    def sizes(self) -> list[int]:
        """The sizes of all blocks, lent or free."""
        return [block.memory.size for block in self._made]

    def lend(self, n_bytes: int, make: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return an array of so many bytes, of the smallest block that is free and large enough; ``make`` makes one."""
        sizes = sorted(size for size in [*self._free] if size >= n_bytes)
        block = next((block for size in sizes if (block := self._take(size)) is not None), None)
        if block is None:
            block = self._new(make(n_bytes))
        loan = _Loan(block)
        self._loans[block] = weakref.ref(loan, partial(setitem, block.free, block))
        return np.asarray(loan)[:n_bytes]

    def _take(self, size: int) -> Block | None:
        try:
            return self._free[size].popitem()[0]
        except KeyError:
            return None

    def _new(self, memory: np.ndarray) -> Block:
        block = Block(memory, self._free.setdefault(memory.size, {}))
        self._made.add(block)
        return block

    # --- what engines need -----------------------------------------------------------------------------

    def _needs_of(self, engine: Hashable) -> Counter[int]:
        return _by_engine([*self._needs]).get(engine, Counter())

    def lacking(self, engine: Hashable, sizes: Iterable[int]) -> list[int]:
        """Return the sizes of the blocks to be made for these sizes, besides those that the engine needs already."""
        needed = sorted(chain(self._needs_of(engine).elements(), sizes), reverse=True)
        there, lacking = deque(sorted(self.sizes, reverse=True)), []
        for size in needed:  # one that is large enough for this size is so for each that follows
            if there and there[0] >= size:
                there.popleft()
            else:
                lacking.append(size)
        return lacking

    def reserve(self, engine: Hashable, sizes: Iterable[int], make: Callable[[int], np.ndarray]) -> None:
        """Have blocks for these sizes while the engine works alone. An error of ``make`` leaves no need behind."""
        need = (engine, tuple(sizes))
        self._needs.append(need)  # first: from now on no thread frees a block that counts for it
        try:
            for size in self.lacking(engine, ()):
                block = self._new(make(size))
                block.free[block] = None
        except BaseException:
            self.cancel(*need)
            raise
        self.trim()

    def cancel(self, engine: Hashable, sizes: Iterable[int]) -> None:
        """End what :meth:`reserve` began for the same sizes, and free blocks that no engine needs. A finalizer may call
        this, in any thread."""
        with suppress(ValueError):
            self._needs.remove((engine, tuple(sizes)))
        self.trim()

    def trim(self) -> None:
        """Free the blocks that no engine needs, if they are not lent."""
        while True:
            needs = [*self._needs]
            if not needs:
                for block in [*self._loans]:
                    if (loan := self._loans.get(block)) is not None and loan() is None:
                        self._loans.pop(block, None)
            for size in sorted(self._free, reverse=True):
                while (free := self._take(size)) is not None and self._free_idle(free):
                    del free
            if needs == [*self._needs]:  # else a thread that ended a need may have missed a block that was in hand here
                return

    def _free_idle(self, block: Block) -> bool:
        """Forget a block that was taken from the free ones, unless an engine needs it: then it is free again.

        The block is taken out of the count *before* the needs are compared. So two threads that each take a block see
        each other's missing, and neither frees one that is needed.

        Returns:
            True if it is forgotten.
        """
        size = block.memory.size
        self._made.discard(block)
        required, sizes = _required(_by_engine([*self._needs]).values()), self.sizes
        if all(sum(s >= least for s in sizes) >= n for least, n in required.items() if least <= size):
            self._loans.pop(block, None)
            return True
        self._made.add(block)
        block.free[block] = None
        return False

    def shared_bytes(self, engine: Hashable) -> int:
        """Return the bytes of an engine's needs that other engines would keep if it were closed."""
        needs = _by_engine([*self._needs])
        mine = needs.pop(engine, Counter())
        more = bytes_in_turn([*needs.values(), mine]) - bytes_in_turn(needs.values())
        return bytes_in_turn([mine]) - more


def _by_engine(needs: Iterable[tuple[Hashable, tuple[int, ...]]]) -> dict[Hashable, Counter[int]]:
    """Return how many blocks of each size each engine needs at a time."""
    counts: dict[Hashable, Counter[int]] = {}
    for engine, sizes in needs:
        counts.setdefault(engine, Counter()).update(sizes)
    return counts


def _required(needs: Collection[Mapping[int, int]]) -> dict[int, int]:
    """Return, for each size, the blocks of this size or more that the engine needs that needs the most of them."""
    needs = [each for each in needs if each]
    sizes = sorted(set(chain.from_iterable(needs)), reverse=True)
    sums: list[int] = [0] * len(needs)
    required = {}
    for size in sizes:
        sums = [n + each.get(size, 0) for n, each in zip(sums, needs, strict=True)]
        required[size] = max(sums)
    return required


def bytes_in_turn(needs: Collection[Mapping[int, int]]) -> int:
    """Return the bytes of blocks that suffice for engines that work one at a time.

    Args:
        needs: how many blocks of each size each engine needs.
    """
    total = before = 0
    for size, n in _required(needs).items():
        total, before = total + size * (n - before), n
    return total


_BLOCKS: dict[Any, Blocks] = {}


def blocks_of(kind: Any) -> Blocks:
    """Return the blocks of a kind of host memory: what pins it for a device, or None."""
    return _BLOCKS.setdefault(kind, Blocks())


def shared_bytes(engine: Hashable) -> int:
    """As :meth:`Blocks.shared_bytes`, of all kinds of memory."""
    return sum(blocks.shared_bytes(engine) for blocks in [*_BLOCKS.values()])


def bytes_held() -> int:
    """Return the bytes of all blocks of this process."""
    return sum(sum(blocks.sizes) for blocks in [*_BLOCKS.values()])
