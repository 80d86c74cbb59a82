"""The seam *store*: the memory and the formats of the states of a process's shards."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol
from weakref import WeakMethod

import numpy as np

from ..config.options import OffloadConfig
from ..config.state_formats import StateFormat
from ..layout.partition import Bucket
from ..memory.host_memory import HostMemory
from ..rules import MASTER
from .arrays import StateAddresses, StateRun


class KernelStates(Protocol):
    """A state that kernels can update: in host memory (:class:`StateArray`), or in a device's."""

    @property
    def format(self) -> StateFormat: ...

    @property
    def at(self) -> StateAddresses:
        """The addresses of its elements."""
        ...


class Extent(NamedTuple):
    """Elements ``[offset, offset + numel)`` of the concatenation of a process's shards of a bucket."""

    bucket: int
    offset: int
    numel: int


class StateBlock(NamedTuple):
    """The states of a process's shards of one bucket. Their memory is valid until :meth:`Store.commit`."""

    bucket: int
    arrays: Mapping[str, KernelStates]
    """For each state, by its name, the concatenation of the process's shards."""


class Store(ABC):
    """Keeps the master weights and other states of one process's shards: the shards of ``n_ranks`` ranks.

    An update loads a bucket's block, changes it, and commits it. One thread at a time loads and commits.
    """

    # ``testing/late_store.py`` models a store whose memory does not stay; ``test_stores.py`` has the laws.

    place: ClassVar[str]
    """The name that plans give to the store's own memory: ``"host"``, or another name such as ``"disk"``."""

    keeps_blocks: ClassVar[bool] = False
    """True if the host memory that :meth:`working_bytes` counts stays allocated between steps."""

    def __init__(self, config: OffloadConfig, memory: HostMemory, n_ranks: int) -> None:
        self.config = config
        self.memory = memory
        self.n_ranks = n_ranks
        """The number of ranks whose shards this process holds."""
        self.threads = config.threads
        self._before_change: Callable[[], Callable[[Iterable[int]], None] | None] = lambda: None
        self._replaced: dict[int, dict[Extent, dict[int, np.ndarray]]] = {}
        """For each parameter and each of its extents, the fp32 master weights that :meth:`follow` has replaced since an
        update or a load last changed the parameter's states."""

    # --- each store implements -------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def holds(cls, format: StateFormat) -> bool:
        """True if this class can store states in this format."""

    @classmethod
    def n_bytes(cls, format: StateFormat, numel: int) -> int:
        """Return the bytes that ``numel`` elements of a state take in ``place``."""
        return format.n_bytes(numel)

    @classmethod
    def host_budget(cls, config: OffloadConfig) -> int | None:
        """Return the bytes of host memory that states may take in addition to ``place``; None: all free memory."""
        return 0

    @classmethod
    def kept_on_host(cls, budget: int, blocks: Sequence[tuple[int, int]]) -> list[int]:
        """Return, for each kind of bucket, the number of buckets whose states are in host memory. The states of all
        other buckets are in ``place``.

        Args:
            budget: the bytes of host memory that states may take, in addition to :meth:`working_bytes`.
            blocks: ``(bytes of a bucket's states, number of buckets)`` for each kind.
        """
        return [0 for _ in blocks]

    @classmethod
    @abstractmethod
    def working_bytes(cls, blocks: Collection[tuple[int, int]]) -> int:
        """Return the most bytes of host memory that updates need for blocks that they load from ``place``.

        Args:
            blocks: ``(bytes of a bucket's states, number of buckets)`` for each kind with states in ``place``.
        """

    @classmethod
    @abstractmethod
    def free_bytes(cls, config: OffloadConfig) -> int | None:
        """Return the free bytes in ``place``; None: unknown, or ``place`` is the host."""

    @abstractmethod
    def allocate(
        self, buckets: Sequence[Bucket], formats: Callable[[Bucket], Mapping[str, StateFormat]], budget: int
    ) -> None:
        """Create the states of new buckets, with all elements 0.

        Args:
            formats: returns the format of each of a bucket's states, by the state's name. Buckets with the same key
                have the same formats.
            budget: the bytes of host memory that states may take, in addition to :meth:`working_bytes`.
        """

    @abstractmethod
    def expect(self, buckets: Iterable[int]) -> None:
        """Announce that these buckets are loaded next, in this order, after the buckets that were announced before.

        The caller need not load every announced bucket. A bucket that is announced again moves to its new position in
        the order.
        """

    @abstractmethod
    def read(self, bucket: int) -> StateBlock:
        """Return the states of a bucket. The caller only reads them."""

    @abstractmethod
    def commit(self, block: StateBlock) -> None:
        """Store the changed states of a block that :meth:`load` returned. Nobody may use the block's memory after
        that."""

    @abstractmethod
    def run(self, extents: Sequence[Extent]) -> dict[str, StateRun]:
        """Return, for each state by its name, one run over all these extents.

        Args:
            extents: extents of one parameter, in order and adjacent in this process's shards.
        """

    @abstractmethod
    def held(self) -> dict[str, int]:
        """Return the bytes of each state, by name, that are not allocated from ``memory``: the bytes in ``place``."""

    def held_in(self) -> dict[tuple[str, str], int]:
        """Return the bytes of :meth:`held`, by ``(place, name of the state)``."""
        return {(self.place, name): n_bytes for name, n_bytes in self.held().items()}

    def keep_on_device(self, buckets: Collection[int]) -> None:
        """Have :meth:`allocate` keep the states of the buckets with these indices in the device's memory."""
        assert not buckets, "this store has no memory of a device"

    def copies(self) -> dict[int, np.ndarray]:
        """Return copies in host memory of the states that are in the device's memory, by bucket, for :meth:`release`.

        Raises:
            HostMemoryError: there is no host memory for the copies.
        """
        return {}

    def release(self, copies: Mapping[int, np.ndarray]) -> None:
        """Free the device's memory. The states of these copies are on the host until :meth:`restore`."""
        assert not copies

    def restore(self) -> None:
        """Copy the states of :meth:`release` back to the device's memory.

        Raises:
            DeviceMemoryError: the device has too little memory. Nothing has changed.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Free the states' memory and disk space. The caller may call no method after that."""

    @abstractmethod
    def _load(self, bucket: int) -> StateBlock:
        """Return the states of a bucket. The caller changes them and calls :meth:`commit`."""

    # --- changes, and the call before them -------------------------------------------------------------

    def load(self, bucket: int, params: Iterable[int]) -> StateBlock:
        """Return the states of a bucket. The caller changes them for these parameters and calls :meth:`commit`."""
        self.will_change(params)
        return self._load(bucket)

    def will_change(self, params: Iterable[int]) -> None:
        """Announce that an update, a load or a user is about to change the states of these parameters. The master
        weights that :meth:`follow` has replaced cannot come back after that."""
        for param in params if self._replaced else ():
            self._replaced.pop(param, None)
        self._announce(params)

    def follow(self, extent: Extent, param: int, values: np.ndarray) -> None:
        """Have master weights take over parameter values that a user wrote.

        If the user puts the earlier parameter values back before :meth:`will_change`, the earlier master weights come
        back, too, with all bits. Until then the earlier master weights take 4 bytes of host memory an element, for each
        slice of the extent that the user has changed.

        Args:
            extent: the elements of a piece of the parameter.
            values: the piece's new values.
        """
        self._announce([param])
        replaced = self._replaced.setdefault(param, {}).setdefault(extent, {})
        self.run([extent])[MASTER].follow(values, replaced)
        if not replaced:
            del self._replaced[param][extent]
        if not self._replaced[param]:
            del self._replaced[param]

    def forget_replaced(self) -> None:
        """Discard the master weights that :meth:`follow` has replaced, because all states get new values."""
        self._replaced.clear()

    def _announce(self, params: Iterable[int]) -> None:
        if (before_change := self._before_change()) is not None:
            before_change(params)

    def watch(self, before_change: Callable[[Iterable[int]], None] | None) -> None:
        """From now on, call ``before_change(params)`` before the states of ``params`` change, in the thread that
        changes them.

        Args:
            before_change: a bound method; None: call nothing. The caller keeps the method's object alive: the store has
                only a weak reference to the object, because the object may own the store.
        """
        self._before_change = (lambda: None) if before_change is None else WeakMethod(before_change)
