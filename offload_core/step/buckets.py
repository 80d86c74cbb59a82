"""What a process holds of all buckets: states, gradients' homes, staging; and who may touch them when."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..config.options import OffloadConfig
from ..device.protocols import Copy, Device, HostArray
from ..device.trace import COMPUTE
from ..dtypes import BY_NUMPY, FLOAT32, ElementType
from ..layout.partition import Bucket, ParamSpec, Piece, build_buckets
from ..memory.host_memory import HostMemory, StagingRing
from ..memory.plan import PlanRow
from ..native import kernels
from ..ranks.collectives import merge
from ..ranks.consistency import agree
from ..rules.adam import Adam
from ..states.in_memory import StatesInMemory
from .bucket_terms import BucketTerms, as_it_stays
from .local_bucket import LocalBucket

T = TypeVar("T")


class StateRun(NamedTuple):
    """Elements ``[start, start + numel)`` of a parameter, in the core's order, and their states."""

    start: int
    numel: int
    arrays: dict[str, np.ndarray]
    """By name, those of ``cpu_adam.STATE_NAMES``."""
    in_place: bool
    """Whether ``"master"`` is the parameter itself."""
    read_parameter: Callable[[int, np.ndarray], None]
    """``read_parameter(at, out)`` copies the device parameter's own elements, from the run's ``at`` on, to ``out``."""


class LocalBuckets:
    """The buckets of one process, their states and staging, and the worker that is given tasks on them.

    A bucket belongs to the worker from the moment a task on it is asked for until :meth:`claim`.
    """

    def __init__(self, config: OffloadConfig, device: Device, rule: Adam) -> None:
        self.config = config
        self.terms = BucketTerms(config, device)
        self.device = device
        self.trace = device.trace
        self.threads = config.threads
        self.params: list[ParamSpec] = []
        self.all: list[LocalBucket] = []
        self.of: list[list[LocalBucket]] = []
        """The buckets that hold a part of each parameter."""
        self.memory = HostMemory(config.threads)
        self.planned: list[PlanRow] = []
        """What was to be allocated on the host, each time that parameters were taken on."""
        self.staging: StagingRing | None = None
        self.in_staging: deque[tuple[LocalBucket, Future[None]]] = deque()
        """Buckets on their way to the host that may still hold staging, and the end of it, oldest first."""
        self.store = StatesInMemory(self.memory, len(device.ranks), rule.state_names)
        self.worker = self.terms.worker()

    # --- parameters and states ---------------------------------------------------------------------

    def add(
        self, specs: Sequence[ParamSpec], tensors: Sequence[Any], frozen: Sequence[ParamSpec] = ()
    ) -> list[LocalBucket]:
        """Take on parameters, as :meth:`Pipeline.add_parameters`; the new buckets."""
        terms = self.terms
        planned = terms.host_rows(specs, frozen=frozen)
        self.run(lambda: self._agree_on_start(specs, tensors))
        buckets = self._build(specs)
        self.store.allocate(buckets, without_master=terms.without_master)
        slot_bytes = terms.slot_bytes(buckets)
        if not terms.direct and slot_bytes > (0 if self.staging is None else self.staging.slot_bytes):
            self.staging = None  # free before allocating its successor
            self.staging = StagingRing(self.memory, slots=terms.staging_slots, n_bytes=slot_bytes, pinned=self._pinned)
            terms.ring_was_made(slot_bytes)
        first = len(self.params)
        self.params += specs
        self.planned += planned
        self.of += [[] for _ in specs]
        for bucket in buckets:
            home = self._allocate_home(bucket, terms.home_dtype(bucket)) if terms.has_home else None
            work = LocalBucket(bucket, bucket.shards(self.device.ranks), terms.wire(bucket), home)
            self.all.append(work)
            for param in work.members:
                self.of[param].append(work)
            if not terms.without_master(bucket):
                for piece in work.pieces:
                    self._load_master(work, piece, tensors[piece.param - first])
        return self.all[-len(buckets) :] if buckets else []

    def _agree_on_start(self, specs: Sequence[ParamSpec], tensors: Sequence[Any]) -> None:
        agree(self.device.collectives, self.config, specs, [self.device.dtype(tensor).name for tensor in tensors])
        whole = [i for i, spec in enumerate(specs) if not spec.partitioned]
        self.device.start_alike([specs[i] for i in whole], [tensors[i] for i in whole])

    def states(self, param: int) -> list[tuple[int, dict[str, np.ndarray]]]:
        """This process's states of a parameter: ``(start, {name: fp32 view})`` a contiguous run, ascending.

        The names are those of ``cpu_adam.STATE_NAMES``; an fp32 parameter updated in place has no ``"master"``.
        """
        runs: list[tuple[int, int, int, dict[str, np.ndarray]]] = []
        for work, piece in self._pieces_of(param):
            arena, at = self.store.locate(work.bucket.index, piece.offset)
            start, numel = piece.start, piece.numel
            if runs and runs[-1][3] is arena and runs[-1][0] + runs[-1][1] == start and runs[-1][2] + runs[-1][1] == at:
                before = runs.pop()
                start, numel, at = before[0], before[1] + numel, before[2]
            runs.append((start, numel, at, arena))
        return [(start, {name: a[at : at + numel] for name, a in arena.items()}) for start, numel, at, arena in runs]

    def local_states(self, param: int) -> dict[str, np.ndarray]:
        """This process's part of a parameter's states, one-dimensional: the runs of :meth:`states`, end to end."""
        pieces = self._pieces_of(param)
        if not pieces:
            return {}
        arena, at = self.store.locate(pieces[0][0].bucket.index, pieces[0][1].offset)
        numel = sum(piece.numel for _, piece in pieces)
        last, end = self.store.locate(pieces[-1][0].bucket.index, pieces[-1][1].offset)
        assert last is arena
        assert end + pieces[-1][1].numel == at + numel
        return {name: array[at : at + numel] for name, array in arena.items()}

    def runs(self, param: int, tensor: Any) -> list[StateRun]:
        """This process's states of a parameter, bucket after bucket; its memory itself."""
        found = []
        for work, piece in self._pieces_of(param):
            arena, at = self.store.locate(work.bucket.index, piece.offset)
            arrays = {name: array[at : at + piece.numel] for name, array in arena.items()}
            in_place = self.terms.without_master(work.bucket)
            if in_place:
                arrays["master"] = self._read(work, piece, tensor).view()
            read = partial(self._read_parameter, work, piece, tensor)
            found.append(StateRun(piece.start, piece.numel, arrays, in_place, read))
        return found

    def _read_parameter(self, work: LocalBucket, piece: Piece, tensor: Any, at: int, out: np.ndarray) -> None:
        source = self._read(work, piece, tensor, at, out.size)
        np.copyto(out, source.view())

    def own_masters(self, param: int, tensor: Any) -> list[tuple[int, np.ndarray]]:
        """Where a parameter is its own master weight, all of it that this process holds: ``(start, memory)`` a run."""
        if not any(self.terms.without_master(work.bucket) for work in self.of[param]):
            return []
        if self.params[param].partitioned:
            return [(run.start, run.arrays["master"]) for run in self.runs(param, tensor)]
        return [(0, self.device.host_array(tensor).view())]

    def whole_states(self, param: int, names: Collection[str], tensor: Any) -> dict[str, np.ndarray]:
        """As :meth:`Pipeline.whole_states`, when nothing is on its way."""
        spec = self.params[param]
        words = {name: np.zeros(-(-spec.numel // 2), np.int64) for name in names}
        whole = {name: array.view(np.float32)[: spec.numel] for name, array in words.items()}
        for run in self.runs(param, tensor):
            for name, array in whole.items():
                array[run.start : run.start + run.numel] = run.arrays[name]
        for name, mine in words.items():
            merge(self.device.collectives.sum_integers, mine, f"{name} of {spec.name}")
        return whole

    def reload_master(self, param: int, tensor: Any) -> None:
        """Take a parameter's master weights from the device parameter."""
        for work, piece in self._pieces_of(param):
            if not self.terms.without_master(work.bucket):
                self._load_master(work, piece, tensor)

    def adopt(self, param: int, tensor: Any) -> None:
        """Follow a change made to a device parameter from outside: where its bits are not those of the rounded
        master weight, the master weight takes its value. The rest keep their low bits."""
        for work, piece in self._pieces_of(param):
            master = self._master(work, piece)
            if master is not None:
                source = self._read(work, piece, tensor)
                theirs = source.view()
                changed = master.astype(theirs.dtype).view(np.uint8).reshape(piece.numel, -1)
                changed = (changed != theirs.view(np.uint8).reshape(piece.numel, -1)).any(axis=1)
                master[changed] = theirs[changed].astype(np.float32)

    # --- who may touch a bucket ----------------------------------------------------------------------

    def claim(self, work: LocalBucket) -> None:
        """Take the bucket back from the worker; raise the error of its tasks."""
        if work.task is None:
            return
        task = work.task
        try:
            self.wait(task, work)
        finally:
            if task.done():
                work.take()

    def wait(self, task: "Future[T]", work: LocalBucket) -> T:
        """The result of what was asked for on a bucket."""
        try:
            return self._wait_for(task, "wait", work.bucket.index)
        except BaseException:
            self.recover()
            raise

    def _wait_for(self, task: "Future[T]", what: str, bucket: int | None = None) -> T:
        if task.done():
            return task.result()
        with self.trace.span(COMPUTE, what, bucket):
            return task.result()

    def recover(self) -> None:
        """After a failure: let everything that was asked for end, and take it back."""
        self.worker.recover()
        self.device.synchronize()
        self.in_staging.clear()
        for work in self.all:
            work.release()

    def run(self, task: Callable[[], T]) -> T:
        """The result of a task that comes after all that was asked for."""
        try:
            return self._wait_for(self.worker.submit(task), "wait")
        except BaseException:
            self.recover()
            raise

    def promote(self, work: LocalBucket) -> np.ndarray:
        """The fp32 home of gradients that are summed; where a sum was not announced, what is held moves there."""
        if work.home is None or work.home.dtype != FLOAT32.numpy:
            home = self._allocate_home(work.bucket, FLOAT32)
            if work.home is not None and work.has_landed:
                kernels.cast_array(work.home, BY_NUMPY[work.home.dtype], home, FLOAT32, self.threads)
            work.home = home
        return work.home

    # --- small decisions, each made here only --------------------------------------------------------

    @property
    def _pinned(self) -> bool:
        return self.config.pin_memory and self.device.wants_pinned

    def _build(self, specs: Sequence[ParamSpec]) -> list[Bucket]:
        return build_buckets(
            specs,
            world_size=self.device.world_size,
            bucket_numel=self.config.reduce_bucket_size,
            first_param=len(self.params),
            first_bucket=len(self.all),
        )

    def written_by_kernel(self, work: LocalBucket) -> bool:
        """Whether the kernel writes the new parameters where they are, so that nothing is left to publish."""
        return self.terms.direct or (work.bucket.partitioned and self.terms.host_shards)

    def in_place(self, work: LocalBucket, piece: Piece, tensors: Sequence[Any]) -> HostArray:
        """A piece of the parameters themselves, where they are host memory."""
        return self.device.host_array(tensors[piece.param]).run(work.bucket.in_tensor(piece), piece.numel)

    def _allocate_home(self, bucket: Bucket, dtype: ElementType) -> np.ndarray:
        pinned = self._pinned and self.device.sizes.arrival(self.terms.wire(bucket)) == as_it_stays(dtype)
        numel = len(self.device.ranks) * bucket.shard_numel
        return self.memory.allocate("gradients on the host", numel, dtype.numpy, pinned=pinned)

    def _pieces_of(self, param: int) -> list[tuple[LocalBucket, Piece]]:
        found = [(work, work.pieces[i]) for work in self.of[param] for i in work.positions.get(param, ())]
        return sorted(found, key=lambda pair: pair[1].start)

    def _master(self, work: LocalBucket, piece: Piece) -> np.ndarray | None:
        arena, at = self.store.locate(work.bucket.index, piece.offset)
        return arena["master"][at : at + piece.numel] if "master" in arena else None

    def _load_master(self, work: LocalBucket, piece: Piece, tensor: Any) -> None:
        master = self._master(work, piece)
        assert master is not None
        source = self._read(work, piece, tensor)
        rows = kernels.spans_of([(source.address, kernels.address(master), piece.numel)])
        kernels.cast(rows, source.dtype, FLOAT32, threads=self.threads)

    def _read(self, work: LocalBucket, piece: Piece, tensor: Any, at: int = 0, numel: int | None = None) -> HostArray:
        """A piece of a parameter's tensor, or ``numel`` elements of it from ``at`` on; of its own element type."""
        start = work.bucket.in_tensor(piece, len(self.device.ranks)) + at
        numel = piece.numel if numel is None else numel
        if self.terms.host_shards if work.bucket.partitioned else self.device.addressable:
            return self.device.host_array(tensor).run(start, numel)
        host = np.empty(numel, self.device.dtype(tensor).numpy)
        self.device.to_host([Copy(tensor, start, numel, 0)], host).wait()
        return HostArray.of(host)
