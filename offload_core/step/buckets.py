"""All buckets of a process: their states, gradient memory and staging, and the thread that may touch each bucket."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import starmap
from typing import Any, TypeVar

import numpy as np

from ..config.options import OffloadConfig
from ..config.state_formats import Master
from ..device.protocols import Copy, Device, HostArray, Matrices, OneMatrix
from ..device.trace import COMPUTE
from ..disk.shards import OnDisk
from ..dtypes import ElementType
from ..layout.partition import Bucket, ParamSpec, Piece, cut, matrices_of
from ..memory.host_memory import HostMemory, StagingRing
from ..memory.plan import DEVICE, PlanRow
from ..plans.allocated import Allocated
from ..plans.planner import SUMS, Planner
from ..plans.terms import DIRECTIONS, BucketTerms
from ..ranks.consistency import check_start, heard_by_all
from ..rules import MASTER
from ..states import tiers
from ..states.store import Extent
from ..support.progress import progress
from ..support.threads import Task, clear_up
from .executor import HostExecutor, InPlace, ReadInPlace, Staged
from .gradient_memory import GradientMemory
from .local_bucket import BucketGradient, Executor, LocalBucket, PieceTable, Writes
from .on_device import OnDevice

T = TypeVar("T")

_NO_WAIT = nullcontext()
"""Around the result of a task that is done, which a trace does not show."""


class LocalBuckets:
    """The buckets of one process, their states and staging, and the worker that does tasks on them.

    A bucket that was given to the worker belongs to the worker until :meth:`claim`.
    """

    def __init__(self, config: OffloadConfig, device: Device, *, scaled: bool = False) -> None:
        self.config = config
        self.terms = BucketTerms(config, device, scaled=scaled)
        self.allocated = Allocated(self.terms)
        self.device = device
        self.trace = device.trace
        self.threads = config.threads
        self.params: list[ParamSpec] = []
        self.all: list[LocalBucket] = []
        self.of: list[list[LocalBucket]] = []
        """Entry ``i``: the buckets with elements of parameter ``i``, of any rank."""
        self.memory = HostMemory(config.threads, self.terms.ways_to_pin)
        self.planned: list[PlanRow] = []
        """The plan's rows of host memory. Each :meth:`add` appends the rows of its parameters."""
        self.gradient_memory = GradientMemory(self.memory, device, self.terms, self.allocated)
        self.staging: StagingRing | None = None
        self.directions: StagingRing | None = None
        """Memory for matrices in flight to and from the device; None: no rule needs any."""
        self._matrix_flops = [0] * device.world_size
        """The operations of each rank for matrix multiplications in an update of all parameters."""
        self.in_staging: deque[tuple[LocalBucket, Task[None]]] = deque()
        """Buckets in flight to the host, oldest first, each with the task that ends its copy. Each may hold staging."""
        self._on_host: Executor = self._executor_of_host()(self)
        self._on_device = OnDevice(self) if self.terms.tiered else None
        """The executor of buckets whose states are on the device; None: no states may be there."""
        self.store = tiers(self.terms.store_kind, config, self.memory, device, on_device=self.terms.tiered)
        self._end = weakref.finalize(self, clear_up, self.store.close)
        self._end.atexit = False  # tasks and saves may still need the states
        self.worker = self.terms.worker()

    def _executor_of_host(self) -> type[HostExecutor]:
        if self.terms.direct:
            return InPlace
        return ReadInPlace if self.terms.gradients_in_place else Staged

    def close(self) -> None:
        """Free the states, the gradient memory and the staging. If nobody calls this (a user does not close the engine,
        or ``wrap`` fails), garbage collection frees the states."""
        if self._end.detach() is not None:
            self.store.close()
        self.device.synchronize()  # a step that broke off may have left copies in flight
        for bucket in self.all:
            bucket.gradient.give_back()
            bucket.lease = None
        self.staging = self.directions = None
        self.gradient_memory = GradientMemory(self.memory, self.device, self.terms, self.allocated)

    # --- parameters and states ---------------------------------------------------------------------

    def add(
        self, specs: Sequence[ParamSpec], tensors: Sequence[Any], frozen: Sequence[ParamSpec] = ()
    ) -> list[LocalBucket]:
        """Add parameters: build buckets, allocate their states and buffers, and copy ``tensors`` to the master weights.
        Return the new buckets.

        Args:
            tensors: the start values of each parameter of ``specs``, in any floating-point type.
            frozen: parameters that are not trained. The front end allocates their shards. Here they only count in the
                plan.
        """
        terms = self.terms
        planned = Planner(terms, self.allocated).host_rows(specs, frozen=frozen)
        self.run(lambda: self._agree_on_start(specs, tensors))
        layouts = self._build(specs)
        there = terms.on_device(layouts, self.allocated.device_budget)
        with heard_by_all(self.device.collectives, "memory for states"):  # a disk may be too small on one rank
            self._allocate(layouts, there, specs, frozen)
        first = len(self.params)
        self.params += specs
        self.planned += planned
        self.of += [[] for _ in specs]
        on_host = [layout for layout in layouts if layout.index not in there]
        private = dict(zip([layout.index for layout in on_host], self.gradient_memory.register(on_host), strict=True))
        for layout in layouts:
            in_place = terms.direct or (layout.partitioned and terms.host_shards)
            pieces, comm_dtype = layout.shards(self.device.ranks), terms.comm_dtype(layout)
            table = PieceTable(layout, pieces, {piece.param: specs[piece.param - first] for piece in layout.pieces})
            arrival, buffer_dtype = self.device.sizes.arrival(comm_dtype), terms.buffer_dtype(layout)
            bucket = LocalBucket(
                layout,
                pieces,
                table,
                terms.rule_of(layout),
                self._executor(layout.index in there),
                BucketGradient(
                    layout.index, table.offsets, comm_dtype, arrival, buffer_dtype, private.get(layout.index)
                ),
                terms.master(layout),
                Writes.IN_PLACE if in_place else Writes.STAGING,
                self._matrices(layout),
            )
            bucket.executor.restore(bucket)
            self.all.append(bucket)
            for param in bucket.members:
                self.of[param].append(bucket)
        new = self.all[-len(layouts) :] if layouts else []
        rank, n_bytes = self.device.collectives.rank, sum(layout.n_bytes for layout in layouts)
        with progress("building states", n_bytes, rank=rank) as advance:
            for bucket in new:
                for piece in bucket.pieces if bucket.master is not Master.PARAMETER else ():
                    self.load_master(bucket, piece, tensors[piece.param - first])
                self._begin_states(bucket)
                advance(bucket.layout.n_bytes)
        return new

    def _executor(self, on_device: bool) -> Executor:
        if not on_device:
            return self._on_host
        assert self._on_device is not None
        return self._on_device

    def _allocate(
        self,
        buckets: Sequence[Bucket],
        there: frozenset[int],
        specs: Sequence[ParamSpec],
        frozen: Sequence[ParamSpec],
    ) -> None:
        """Allocate the states of new buckets. Replace the staging rings by larger ones if the new buckets do not fit
        into their slots.

        Args:
            there: the indices of the buckets whose states are on the device.
        """
        terms, allocated = self.terms, self.allocated
        self.store.keep_on_device(there)
        self.store.allocate(buckets, terms.state_formats, allocated.state_budget)
        allocated.add_states(buckets, there)
        allocated.add_shard_slots(terms.kinds(specs), terms.kinds(frozen))
        staged = terms.staged(buckets, there)
        slot_bytes = terms.slot_bytes(staged)
        if not terms.direct and slot_bytes > (0 if self.staging is None else self.staging.slot_bytes):
            self.staging = None  # free before allocating its successor
            self.staging = StagingRing(self.memory, slots=terms.staging_slots, n_bytes=slot_bytes, pinned=True)
            allocated.staging_slot_bytes = slot_bytes
        direction_bytes = terms.direction_bytes(staged)
        if direction_bytes > (0 if self.directions is None else self.directions.slot_bytes):
            self.directions = None
            self.directions = StagingRing(
                self.memory, slots=terms.direction_slots, n_bytes=direction_bytes, pinned=True, label=DIRECTIONS
            )
            allocated.direction_slot_bytes = direction_bytes

    def held_elsewhere(self) -> dict[tuple[str, str], int]:
        """Return the bytes in use that are not allocated from ``memory``, by ``(where, what)``: of states, and of sums
        of gradients on the device."""
        sums = [b.gradient.private for b in self.all if b.executor is self._on_device]
        n_bytes = sum(each.nbytes for each in sums if each is not None)
        return self.store.held_in() | ({(DEVICE, SUMS): n_bytes} if n_bytes else {})

    def lent_bytes(self, specs: Sequence[ParamSpec]) -> int:
        """Return the bytes of host memory that :meth:`add` would borrow from other engines of this process instead of
        allocating them. The result is 0 once this engine has parameters."""
        if self.all:
            return 0
        sizes = self.terms.working_sizes(specs, self.allocated.device_budget)
        needed = {pinned: [*each.elements()] for pinned, each in sizes.items()}
        return sum(sum(each) - self.memory.lacking_bytes(each, pinned=pinned) for pinned, each in needed.items())

    def _begin_states(self, bucket: LocalBucket) -> None:
        """Fill each state of a new bucket with the state's first value, if this value is not 0."""
        for state in bucket.rule.states if any(state.first for state in bucket.rule.states) else ():
            for piece in bucket.pieces:
                run = self.store.run([self.extent(bucket, piece)])[state.name]
                run.write(np.broadcast_to(np.float32(state.first), piece.numel))

    def _matrices(self, bucket: Bucket) -> Matrices | None:
        kernel, shape = self.terms.rule_of(bucket).device_kernel, bucket.matrix
        if kernel is None or shape is None:
            return None
        return Matrices(
            kernel, shape, tuple(starmap(OneMatrix, matrices_of(bucket, self._matrix_flops, kernel.flops(shape))))
        )

    def _agree_on_start(self, specs: Sequence[ParamSpec], tensors: Sequence[Any]) -> None:
        if self.device.world_size > 1 or self.device.collectives.world_size == 1:  # else processes differ in parameters
            check_start(self.device.collectives, self.config, specs, [self._dtype(tensor).name for tensor in tensors])
        whole = [i for i, spec in enumerate(specs) if not spec.partitioned]
        self.device.start_alike([specs[i] for i in whole], [tensors[i] for i in whole])

    def _dtype(self, tensor: Any) -> ElementType:
        return tensor.dtype if isinstance(tensor, OnDisk) else self.device.dtype(tensor)

    # --- who may touch a bucket ----------------------------------------------------------------------

    def claim(self, bucket: LocalBucket, what: str = "wait") -> None:  # waits
        """Wait for the bucket's task, take the bucket back from the worker, and raise the task's error.

        Args:
            what: the name of the wait in traces.
        """
        if bucket.task is None:
            return
        task = bucket.task
        try:
            self.wait(task, bucket.layout.index, what)
        finally:
            if task.done():
                bucket.take()

    def wait(self, task: Task[T], bucket: int, what: str = "wait") -> T:  # waits
        """Wait for a task of the worker, and return the task's result. If this raises, it first calls :meth:`recover`.

        Args:
            bucket: the index of the bucket that the task works on, for traces.
            what: the name of the wait in traces.
        """
        try:
            with _NO_WAIT if task.done() else self.trace.span(COMPUTE, what, bucket):
                return task.result()
        except BaseException:
            self.recover()
            raise

    def recover(self) -> None:  # waits
        """After a failure: wait for the tasks of the worker and the device, and return all staging memory to its
        rings."""
        self.worker.recover()
        self.device.synchronize()
        self.in_staging.clear()
        for bucket in self.all:
            bucket.release()
            bucket.release_direction()

    def run(self, task: Callable[[], T]) -> T:
        """Have the worker do a task after all earlier tasks. Wait for the task, and return its result."""
        try:
            asked = self.worker.submit(task)
            with _NO_WAIT if asked.done() else self.trace.span(COMPUTE, "wait"):
                return asked.result()
        except BaseException:
            self.recover()
            raise

    def make_room(self) -> None:  # waits
        """If as many buckets are in flight to the host as there is staging for, wait for the oldest one."""
        if len(self.in_staging) == self.worker.depth:
            oldest, landed = self.in_staging.popleft()
            self.wait(landed, oldest.layout.index)

    def await_buffer(self, bucket: LocalBucket) -> None:  # waits
        """Ensure that the bucket has memory for gradients. If all slots are lent, wait for updates that free one."""
        if bucket.gradient.buffer is None:
            self.gradient_memory.lend(bucket, lambda other: self.claim(other, "wait for gradient memory"))

    # --- small decisions, each made here only --------------------------------------------------------

    def _build(self, specs: Sequence[ParamSpec]) -> list[Bucket]:
        return cut(
            self.config,
            specs,
            world_size=self.device.world_size,
            first_param=len(self.params),
            first_bucket=len(self.all),
        )

    def load_master(self, bucket: LocalBucket, piece: Piece, tensor: Any) -> None:
        """Overwrite a piece's master weights with the piece's elements of ``tensor``."""
        source = self.read(bucket, piece, tensor)  # keeps the memory alive
        self.store.run([self.extent(bucket, piece)])[MASTER].write(source.view())

    def pieces_of(self, param: int) -> list[tuple[LocalBucket, int]]:
        """Return this process's pieces of a parameter, in the order of their elements, each as ``(bucket, index of the
        piece in bucket.pieces)``."""
        found = [(bucket, i) for bucket in self.of[param] for i in bucket.table.positions.get(param, ())]
        return sorted(found, key=lambda pair: pair[0].pieces[pair[1]].start)

    def extent(self, bucket: LocalBucket, piece: Piece) -> Extent:
        """Return the extent of a piece's states in the store."""
        return Extent(bucket.layout.index, piece.offset, piece.numel)

    def read(self, bucket: LocalBucket, piece: Piece, tensor: Any, at: int = 0, numel: int | None = None) -> HostArray:
        """Return elements of a piece of a parameter, in host memory and in the element type of ``tensor``.

        Args:
            tensor: the parameter's tensor, or its shards on disk.
            at: the offset of the first element, counted from the beginning of the piece.
            numel: the number of elements; None: the number in the whole piece.
        """
        start = bucket.layout.in_tensor(piece, len(self.device.ranks)) + at
        numel = piece.numel if numel is None else numel
        if isinstance(tensor, OnDisk):
            host = np.empty(numel, tensor.dtype.numpy)
            tensor.read(start, host)
            return HostArray.of(host)
        if self.terms.host_shards if bucket.layout.partitioned else self.device.addressable:
            return self.device.host_array(tensor).run(start, numel)
        host = np.empty(numel, self.device.dtype(tensor).numpy)
        self.device.to_host([Copy(tensor, start, numel, 0)], host).wait()
        return HostArray.of(host)
