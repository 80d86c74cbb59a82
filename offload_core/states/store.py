"""The seam *store*: where the states of a process's shards live, and in which formats."""

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
    """Elements ``[offset, offset + numel)`` of a process's shards of a bucket, which lie end to end."""

    bucket: int
    offset: int
    numel: int


class StateBlock(NamedTuple):
    """The states of a process's shards of one bucket, in host memory until they are committed."""

    bucket: int
    arrays: dict[str, StateArray]
    """By name, the shards end to end."""


class Store(ABC):
    """Master weights and other states of the shards of ``n_ranks`` ranks.

    An update loads a bucket's block, changes it, and commits it. One thread at a time loads and commits.
    """

    # ``testing/late_store.py`` has the model of a store whose memory does not stay; ``test_stores.py`` has the laws.

    place: ClassVar[str]
    """The place of the states in plans: ``"host"``, or a name that tells it from other memory."""

    keeps_blocks: ClassVar[bool] = False
    """True if the memory of :meth:`working_bytes` stays between steps."""

    def __init__(self, config: OffloadConfig, memory: HostMemory, n_ranks: int) -> None:
        self.config = config
        self.memory = memory
        self.n_ranks = n_ranks
        """The ranks whose shards this process holds."""
        self.threads = config.threads
        self._before_change: Callable[[], Callable[[Iterable[int]], None] | None] = lambda: None
        self._replaced: dict[int, dict[Extent, dict[int, np.ndarray]]] = {}
        """By parameter: what :meth:`follow` has replaced since its states last changed."""

    # --- for each store to say -------------------------------------------------------------------------

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
        """Return the bytes of host memory that states may take besides ``place``; None: as many as are free."""
        return 0

    @classmethod
    def kept_on_host(cls, budget: int, blocks: Sequence[tuple[int, int]]) -> list[int]:
        """Return how many buckets of each kind have their states in host memory; the others have them in ``place``.

        Args:
            budget: the bytes of host memory that they may take, besides :meth:`working_bytes`.
            blocks: the kinds: the bytes of a bucket's states, and the number of buckets with so many.
        """
        return [0 for _ in blocks]

    @classmethod
    @abstractmethod
    def working_bytes(cls, blocks: Collection[tuple[int, int]]) -> int:
        """Return the most bytes of host memory that blocks take during updates, besides ``place``.

        Args:
            blocks: of the buckets with states in ``place``: the bytes of a bucket's states, and the number of buckets
                with so many.
        """

    @classmethod
    @abstractmethod
    def free_bytes(cls, config: OffloadConfig) -> int | None:
        """Return the free bytes in ``place``; None: it is unknown, or the host's."""

    @abstractmethod
    def allocate(
        self, buckets: Sequence[Bucket], formats: Callable[[Bucket], Mapping[str, StateFormat]], budget: int
    ) -> None:
        """Make the states of new buckets, zeroed: those that ``formats`` names, the same for all buckets of a key.

        Args:
            budget: as :meth:`kept_on_host`.
        """

    @abstractmethod
    def expect(self, buckets: Iterable[int]) -> None:
        """Announce that these buckets are loaded next, in this order, after those that were announced before.

        Some may be left out. One that is announced again has its new place alone.
        """

    @abstractmethod
    def read(self, bucket: int) -> StateBlock:
        """Return the states of a bucket, to be read only."""

    @abstractmethod
    def commit(self, block: StateBlock) -> None:
        """Keep the new values of a block. Nobody may use its memory after that."""

    @abstractmethod
    def run(self, extents: Sequence[Extent]) -> dict[str, StateRun]:
        """Return the states of one parameter's extents, end to end, by name. The extents are neighbours in this
        process's shards, in order."""

    @abstractmethod
    def held(self) -> dict[str, int]:
        """Return the bytes of the states by name, if they are not counted in ``memory``."""

    @abstractmethod
    def close(self) -> None:
        """Give back all that the states take. No other call may follow."""

    @abstractmethod
    def _load(self, bucket: int) -> StateBlock:
        """Return the states of a bucket, to be changed and then committed."""

    # --- changes, and who is told of them --------------------------------------------------------------

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
        """Have the master weights of a piece of a parameter follow values that were written from outside.

        Until its states change for good, the parameter may get earlier values back, and then has the master weights
        that belong to them. This takes 4 bytes an element of host memory meanwhile, where anything differs.
        """
        self._announce([param])
        replaced = self._replaced.setdefault(param, {}).setdefault(extent, {})
        self.run([extent])[MASTER].follow(values, replaced)
        if not replaced:
            del self._replaced[param][extent]
        if not self._replaced[param]:
            del self._replaced[param]

    def forget_replaced(self) -> None:
        """Forget what :meth:`follow` has replaced: all states get other values, and earlier ones count no longer."""
        self._replaced.clear()

    def _announce(self, params: Iterable[int]) -> None:
        if (before_change := self._before_change()) is not None:
            before_change(params)

    def watch(self, before_change: Callable[[Iterable[int]], None] | None) -> None:
        """Call ``before_change(params)`` before states of parameters change, in the thread that changes them; None: no
        call.

        The caller keeps the object of this method: it may hold what closes the store once it is gone.
        """
        self._before_change = (lambda: None) if before_change is None else WeakMethod(before_change)
