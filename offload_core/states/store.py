"""The seam *store*: the memory and the formats of the states of a process's shards."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple
from weakref import WeakMethod

import numpy as np

from ..config.options import OffloadConfig
from ..config.state_formats import StateFormat
from ..layout.partition import Bucket
from ..memory.host_memory import HostMemory
from ..rules import MASTER
from .arrays import StateArray, StateRun


class Extent(NamedTuple):
    """Elements ``[offset, offset + numel)`` of a process's shards of a bucket, concatenated."""

    bucket: int
    offset: int
    numel: int


class StateBlock(NamedTuple):
    """The states of a process's shards of one bucket, in host memory until they are committed."""

    bucket: int
    arrays: dict[str, StateArray]
    """The process's shards of each state, concatenated, by the state's name."""


class Store(ABC):
    """Master weights and other states of the shards of ``n_ranks`` ranks.

    An update loads a bucket's block, changes it, and commits it. One thread at a time loads and commits.
    """

    # ``testing/late_store.py`` models a store whose memory does not stay; ``test_stores.py`` has the laws.

    place: ClassVar[str]
    """The place of the states in plans: ``"host"``, or another name, such as a disk's."""

    keeps_blocks: ClassVar[bool] = False
    """True if the memory of :meth:`working_bytes` stays between steps."""

    def __init__(self, config: OffloadConfig, memory: HostMemory, n_ranks: int) -> None:
        self.config = config
        self.memory = memory
        self.n_ranks = n_ranks
        """The number of ranks whose shards this process holds."""
        self.threads = config.threads
        self._before_change: Callable[[], Callable[[Iterable[int]], None] | None] = lambda: None
        self._replaced: dict[int, dict[Extent, dict[int, np.ndarray]]] = {}
        """By parameter: the values that :meth:`follow` has replaced since the parameter's states last changed."""

    # --- each store implements -------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def holds(cls, format: StateFormat) -> bool:
        """True if states can be kept in this format."""

    @classmethod
    def n_bytes(cls, format: StateFormat, numel: int) -> int:
        """Return the bytes that ``numel`` elements of a state take in ``place``."""
        return format.n_bytes(numel)

    @classmethod
    def host_budget(cls, config: OffloadConfig) -> int | None:
        """Return the bytes of host memory that states may take besides ``place``; None: all free memory."""
        return 0

    @classmethod
    def kept_on_host(cls, budget: int, blocks: Sequence[tuple[int, int]]) -> list[int]:
        """Return how many buckets of each kind have their states in host memory; the others have them in ``place``.

        Args:
            budget: the bytes of host memory that states may take, besides :meth:`working_bytes`.
            blocks: for each kind, the bytes of a bucket's states, and the number of such buckets.
        """
        return [0 for _ in blocks]

    @classmethod
    @abstractmethod
    def working_bytes(cls, blocks: Collection[tuple[int, int]]) -> int:
        """Return the most bytes of host memory that blocks take during updates, besides ``place``.

        Args:
            blocks: for each kind with states in ``place``, the bytes of a bucket's states, and the number of such
                buckets.
        """

    @classmethod
    @abstractmethod
    def free_bytes(cls, config: OffloadConfig) -> int | None:
        """Return the free bytes in ``place``; None: unknown, or ``place`` is the host."""

    @abstractmethod
    def allocate(
        self, buckets: Sequence[Bucket], formats: Callable[[Bucket], Mapping[str, StateFormat]], budget: int
    ) -> None:
        """Make the states of new buckets, zeroed. ``formats`` names them, equal for all buckets with the same key.

        Args:
            budget: as :meth:`kept_on_host`.
        """

    @abstractmethod
    def expect(self, buckets: Iterable[int]) -> None:
        """Announce that these buckets are loaded next, in this order, after the buckets that were announced before.

        The caller may skip some. A bucket that is announced again moves to its new place in the order.
        """

    @abstractmethod
    def read(self, bucket: int) -> StateBlock:
        """Return the states of a bucket, only for reading."""

    @abstractmethod
    def commit(self, block: StateBlock) -> None:
        """Keep the new values of a block. Nobody may use its memory after that."""

    @abstractmethod
    def run(self, extents: Sequence[Extent]) -> dict[str, StateRun]:
        """Return the states of one parameter's extents, concatenated, by name. The extents are in order and adjacent in
        this process's shards."""

    @abstractmethod
    def held(self) -> dict[str, int]:
        """Return the bytes of the states by name, if they are not counted in ``memory``."""

    @abstractmethod
    def close(self) -> None:
        """Free the states' memory and disk space. No other call may follow."""

    @abstractmethod
    def _load(self, bucket: int) -> StateBlock:
        """Return the states of a bucket, to be changed and then committed."""

    # --- changes, and the call before them -------------------------------------------------------------

    def load(self, bucket: int, params: Iterable[int]) -> StateBlock:
        """Return the states of a bucket, to be changed for these parameters and then committed."""
        self.will_change(params)
        return self._load(bucket)

    def will_change(self, params: Iterable[int]) -> None:
        """Announce that the states of these parameters are about to change for good."""
        for param in params if self._replaced else ():
            self._replaced.pop(param, None)
        self._announce(params)

    def follow(self, extent: Extent, param: int, values: np.ndarray) -> None:
        """Have the master weights of a piece of a parameter take over values that were written from outside.

        If the parameter gets its earlier values back before its states change for good, it gets its earlier master
        weights back, too. Until then this takes 4 bytes of host memory for each element of a part that differs.
        """
        self._announce([param])
        replaced = self._replaced.setdefault(param, {}).setdefault(extent, {})
        self.run([extent])[MASTER].follow(values, replaced)
        if not replaced:
            del self._replaced[param][extent]
        if not self._replaced[param]:
            del self._replaced[param]

    def forget_replaced(self) -> None:
        """Discard the values that :meth:`follow` has replaced, because all states get new values."""
        self._replaced.clear()

    def _announce(self, params: Iterable[int]) -> None:
        if (before_change := self._before_change()) is not None:
            before_change(params)

    def watch(self, before_change: Callable[[Iterable[int]], None] | None) -> None:
        """Call ``before_change(params)`` before states of parameters change, in the thread that changes them; None: no
        call.

        The caller keeps the method's object alive. The store has only a weak reference, because the object may own it.
        """
        self._before_change = (lambda: None) if before_change is None else WeakMethod(before_change)
