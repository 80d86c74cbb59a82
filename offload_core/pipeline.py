"""The composer: gradients in, updated parameters out.

A gradient's way: :meth:`Pipeline.add_gradient` -> its bucket fills -> :meth:`Pipeline._launch` (the device reduces
the bucket over the ranks to its owner's host memory) -> :meth:`Pipeline._settle` (held, or summed with earlier
micro-steps') -> :meth:`Pipeline.step` (norm, clip) -> :meth:`Pipeline._update` (one C pass: unscale, clip, Adam,
cast) -> the device publishes the shards to every rank's parameters.

Buckets are launched in their order, one round a micro-step, on every rank alike, whatever the order in which
gradients arrive.

One rank whose tensors are host memory moves nothing (:attr:`Pipeline._direct`): gradients are read and parameters
written where they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _kernels
from .config import OffloadConfig
from .cpu_adam import STATE_NAMES, AdamHyper, AdamStates
from .device import Arrival, Copy, Device, HostArray
from .dtypes import BY_NAME, BY_NUMPY, FLOAT32, ElementType
from .errors import GradientError, StateError
from .grad_norm import SumOfSquares, clip_coefficient
from .host_memory import HostMemory, StagingRing
from .layout import agree
from .local_bucket import LocalBucket
from .loss_scale import LossScaler
from .memory_plan import MemoryPlan, MemoryReport, PlanRow
from .partition import Bucket, ParamSpec, Piece, build_buckets
from .step_state import BucketEvent, BucketState


@dataclass(frozen=True)
class StepReport:
    """What a call of ``step`` did."""

    updated: bool
    skipped: str | None = None
    """Why nothing was updated: ``"accumulating"``, ``"overflow"`` (an inf or NaN gradient) or ``"no gradients"``."""
    grad_norm: float | None = None
    """Global L2 norm of the averaged, unscaled gradients before clipping; None where it was not computed."""
    clip_coefficient: float = 1.0
    loss_scale: float = 1.0
    """The loss scale that these gradients carried."""


class Pipeline:
    """Optimizer states and the schedule of one process's updates.

    Parameters are numbered in the order in which they were added. The tensors that cross this interface are
    the device's: one-dimensional and contiguous.
    """

    def __init__(self, config: OffloadConfig, device: Device, scaler: LossScaler | None) -> None:
        self.config = config
        self.device = device
        self.scaler = scaler
        self.op_order = config.op_order or "torch"
        self.params: list[ParamSpec] = []
        self.steps: list[np.ndarray] = []
        """Updates that each parameter has had: zero-dimensional float32 arrays, so that a front end can share them."""
        self.memory = HostMemory(config.threads)
        self._states = AdamStates(self.memory, len(device.ranks))
        self._works: list[LocalBucket] = []
        self._works_of: list[list[LocalBucket]] = []
        self._staging: StagingRing | None = None
        self._ring_bytes = 0
        self._planned_host_bytes = 0
        self._micro_steps = 0
        self._next = 0
        """The bucket to be launched next in this round."""
        self._round_ended = False
        """Whether the round of the last gradient has ended."""
        self._present: set[int] = set()
        """Parameters that had a gradient on this rank since the last update."""
        self._threads = config.threads
        self._direct = device.addressable and device.world_size == 1
        """Nothing is moved: kernels read gradients and write parameters where they are."""
        self._sums = config.gradient_accumulation_steps > 1 or device.world_size > 1
        """Gradients are summed on the host, in fp32."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "copying or pickling an offloaded optimizer's pipeline, which holds addresses; expected its states to be "
            "copied: optimizer.state_dict() in torch, to_pytree() and load_pytree() in JAX"
        )

    # --- parameters and states ---------------------------------------------------------------------

    def plan(self, specs: Sequence[ParamSpec]) -> MemoryPlan:
        """What :meth:`add_parameters` of ``specs`` would allocate, and what the device holds besides."""
        buckets = self._build(specs)
        host: dict[str, int] = dict.fromkeys((*STATE_NAMES, "gradients on the host", "staging"), 0)
        for bucket in buckets:
            numel = len(self.device.ranks) * bucket.shard_numel
            for name in STATE_NAMES:
                if not (name == "master" and self._without_master(bucket)):
                    host[name] += 4 * numel
            if self._has_home:
                host["gradients on the host"] += self._home_dtype(bucket).itemsize * numel
        if not self._direct:
            host["staging"] = self.device.staging_slots * max(self._slot_bytes(buckets) - self._ring_bytes, 0)
        remedies = {
            "gradients on the host": "gradient_accumulation_steps=1" if self._sums else "param_dtype='bfloat16'",
            "staging": "reduce_bucket_size",
        }
        rows = [PlanRow(what, "host", n_bytes, remedies.get(what, "more ranks")) for what, n_bytes in host.items()]
        on_device = sum(spec.numel * spec.dtype.itemsize for spec in specs)
        rows += [PlanRow(what, "device", on_device, "param_dtype='bfloat16'") for what in ("parameters", "gradients")]
        return MemoryPlan(tuple(rows), sum(spec.numel for spec in specs))

    def add_parameters(self, specs: Sequence[ParamSpec], tensors: Sequence[Any]) -> None:
        """Take on parameters: allocate their states, master weights starting from ``tensors``.

        The tensors may be of another element type than the specs (the model's own, before it is cast).
        """
        planned = self.plan(specs).host_bytes
        agree(self.device.collectives, self.config, specs, [self.device.dtype(tensor).name for tensor in tensors])
        self.device.start_alike(specs, tensors)
        buckets = self._build(specs)
        self._states.add(buckets, without_master=self._without_master)
        slot_bytes = self._slot_bytes(buckets)
        if not self._direct and slot_bytes > self._ring_bytes:
            self._staging = None  # free before allocating its successor
            self._staging = StagingRing(
                self.memory, slots=self.device.staging_slots, n_bytes=slot_bytes, pinned=self._pinned
            )
            self._ring_bytes = slot_bytes
        first = len(self.params)
        self.params += specs
        self._planned_host_bytes += planned
        self.steps += [np.zeros((), np.float32) for _ in specs]
        self._works_of += [[] for _ in specs]
        for bucket in buckets:
            home = self._allocate_home(bucket, self._home_dtype(bucket)) if self._has_home else None
            pieces = bucket.shards(self.device.ranks)
            work = LocalBucket(bucket, pieces, self._segments(bucket, pieces), self._wire(bucket), home)
            self._works.append(work)
            for param in work.members:
                self._works_of[param].append(work)
            if not self._without_master(bucket):
                for piece in pieces:
                    self._load_master(work, piece, tensors[piece.param - first])

    def states(self, param: int) -> list[tuple[int, dict[str, np.ndarray]]]:
        """This process's states of a parameter: ``(start, {name: fp32 view})`` a contiguous run, ascending.

        The names are those of ``cpu_adam.STATE_NAMES``; an fp32 parameter updated in place has no ``"master"``.
        """
        runs: list[tuple[int, int, int, dict[str, np.ndarray]]] = []
        for work, piece in self._pieces_of(param):
            arena, at = self._states.locate(work.bucket.index, piece.offset)
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
        arena, at = self._states.locate(pieces[0][0].bucket.index, pieces[0][1].offset)
        numel = sum(piece.numel for _, piece in pieces)
        last, end = self._states.locate(pieces[-1][0].bucket.index, pieces[-1][1].offset)
        assert last is arena
        assert end + pieces[-1][1].numel == at + numel
        return {name: array[at : at + numel] for name, array in arena.items()}

    def reload_master(self, param: int, tensor: Any) -> None:
        """Take a parameter's master weights from the device parameter."""
        for work, piece in self._pieces_of(param):
            if not self._without_master(work.bucket):
                self._load_master(work, piece, tensor)

    def adopt(self, param: int, tensor: Any) -> None:
        """Follow a change made to a device parameter from outside: where its bits are not those of the rounded
        master weight, the master weight takes its value. The rest keep their low bits."""
        for work, piece in self._pieces_of(param):
            master = self._master(work, piece)
            if master is not None:
                theirs = np.empty(piece.numel, work.bucket.dtype.numpy)
                self.device.to_host([Copy(tensor, piece.start, piece.numel, 0)], theirs).wait()
                changed = master.astype(theirs.dtype).view(np.uint8).reshape(piece.numel, -1)
                changed = (changed != theirs.view(np.uint8).reshape(piece.numel, -1)).any(axis=1)
                master[changed] = theirs[changed].astype(np.float32)

    # --- gradients ---------------------------------------------------------------------------------

    def check_gradient(self, param: int, gradient: Any) -> None:
        """Raise :class:`GradientError` unless the gradient fits its parameter."""
        spec = self.params[param]
        numel, dtype = self.device.numel(gradient), self.device.dtype(gradient)
        if numel != spec.numel:
            raise GradientError(
                f"parameter {spec.name!r}: gradient has {numel} elements, expected {spec.numel}; "
                "was the parameter resized after wrap()?"
            )
        if dtype is not spec.dtype and not self._direct and self.config.communication_dtype is None:
            raise GradientError(
                f"parameter {spec.name!r}: gradient is {dtype}, expected {spec.dtype} as the parameter is: it would be "
                f"rounded on its way; set communication_dtype={dtype.name!r}"
            )

    def add_gradient(self, param: int, gradient: Any) -> None:
        """Take a parameter's gradient of this micro-step; further ones before the next update are summed in fp32.

        Where the device is addressable the gradient is not copied: it must stay as it is until the update.
        """
        self.check_gradient(param, gradient)
        works = self._works_of[param]
        if any(param in work.waiting or work.bucket.index < self._next for work in works):
            self._end_round()  # the parameter's second gradient of this round: it begins the next one
        self._round_ended = False
        self._present.add(param)
        for work in works:
            work.life.on(BucketEvent.GRADIENT)
            work.waiting[param] = gradient
        while self._next < len(self._works) and self._works[self._next].is_full:
            self._launch(self._works[self._next])
            self._next += 1

    def drop_gradients(self, params: Sequence[int] | None = None) -> None:
        """Forget the gradients of these parameters, or of all."""
        touched = self._works if params is None else [work for param in params for work in self._works_of[param]]
        if params is None:
            self._begin()
            for work in touched:
                work.clear()
        for param in params or ():
            self._present.discard(param)
            for work in self._works_of[param]:
                work.waiting.pop(param, None)
                for i in work.positions.get(param, ()):
                    if work.gradients[i] is not None and work.home is not None:
                        work.at_home(i).view()[:] = 0  # others of the bucket stay, and later micro-steps are added
                    work.gradients[i] = None
        for work in touched:
            if not work.waiting and not work.holds_gradients:
                work.life.on(BucketEvent.DROP)

    def end_micro_step(self, *, reduce: bool = True) -> bool:
        """End a micro-step; whether it is the boundary, at which an update is due.

        Where gradients accumulate, none of the device's is referred to any more.

        Args:
            reduce: False where no gradient was added, on any rank alike: the ranks need not meet.
        """
        if reduce:
            self._end_round()
        self._micro_steps = (self._micro_steps + 1) % self.config.gradient_accumulation_steps
        return self._micro_steps == 0

    @property
    def micro_steps(self) -> int:
        """Micro-steps since the last boundary."""
        return self._micro_steps

    @property
    def at_boundary(self) -> bool:
        """Whether an update is due at the end of this micro-step."""
        return self._micro_steps + 1 == self.config.gradient_accumulation_steps

    def _begin(self) -> None:
        """Nothing has arrived."""
        self._micro_steps = self._next = 0
        self._round_ended = False
        self._present.clear()

    def _end_round(self) -> None:
        """Launch the buckets that did not fill: some of their parameters took no part."""
        for work in self._works[self._next :]:
            self._launch(work)
        self._next = 0
        self._round_ended = True

    def _launch(self, work: LocalBucket) -> None:
        """Bring what arrived in this bucket to its owners' host memory and keep it there."""
        if work.life.state is not BucketState.FILLING and self.device.world_size == 1:
            return
        work.life.on(BucketEvent.REDUCE)
        if self._direct:
            tensors = {param: self.device.host_array(tensor) for param, tensor in work.waiting.items()}
            arrived = [(i, p) for i, p in enumerate(work.pieces) if p.param in tensors]
            self._keep(work, [(i, tensors[p.param].run(p.start, p.numel)) for i, p in arrived])
        else:
            self._reduce(work)
        work.waiting.clear()
        work.life.on(BucketEvent.ARRIVED)

    def _reduce(self, work: LocalBucket) -> None:
        """Have the device reduce the bucket, and sum what arrives with what is held."""
        assert self._staging is not None
        assert work.home is not None
        bucket, arrival = work.bucket, self.device.arrival(work.wire)
        if arrival == _as_it_stays(BY_NUMPY[work.home.dtype]) and not work.holds_gradients:
            self.device.reduce(bucket, work.wire, work.waiting, work.home, self._staging).wait()
        else:
            numel = arrival.parts * work.home.size
            with self._staging.slot(numel, arrival.dtype.numpy) as received:
                self.device.reduce(bucket, work.wire, work.waiting, received, self._staging).wait()
                self._sum(work, arrival, received)
        work.gradients = [work.at_home(i) for i in range(len(work.pieces))]

    def _sum(self, work: LocalBucket, arrival: Arrival, received: np.ndarray) -> None:
        """Each shard's parts, summed in their order in fp32 and divided once, to where gradients wait."""
        add = work.holds_gradients
        home = self._promote(work)
        n_ranks = len(self.device.ranks)
        for parts, shard in zip(received.reshape(n_ranks, -1), home.reshape(n_ranks, -1), strict=True):
            _kernels.reduce(
                parts, arrival.parts, arrival.dtype, shard, divisor=arrival.divisor, add=add, threads=self._threads
            )

    def _promote(self, work: LocalBucket) -> np.ndarray:
        """The fp32 home of gradients that are summed; where a sum was not announced, what is held moves there."""
        if work.home is None or work.home.dtype != FLOAT32.numpy:
            home = self._allocate_home(work.bucket, FLOAT32)
            if work.home is not None and work.holds_gradients:
                _kernels.cast_array(work.home, BY_NUMPY[work.home.dtype], home, FLOAT32, self._threads)
            work.home = home
        return work.home

    def _keep(self, work: LocalBucket, arrived: Sequence[tuple[int, HostArray]]) -> None:
        """Hold first gradients where they are, unless gradients are to be summed; sum further ones in fp32."""
        copies: dict[ElementType, list[tuple[int, int, int]]] = {}
        sums: dict[ElementType, list[tuple[int, int, int]]] = {}
        kept: dict[int, HostArray] = {}  # held gradients stay alive until they have been read
        for i, gradient in arrived:
            held = work.gradients[i]
            if held is None and not self._sums and work.home is None:
                kept[i] = gradient
                continue
            self._promote(work)
            kept[i] = target = work.at_home(i)
            if held is None or held.address != target.address:
                first = gradient if held is None else held
                copies.setdefault(first.dtype, []).append((first.address, target.address, first.numel))
            if held is not None:
                sums.setdefault(gradient.dtype, []).append((gradient.address, target.address, gradient.numel))
        for dtype, rows in copies.items():
            _kernels.cast(_kernels.spans_of(rows), dtype, FLOAT32, threads=self._threads)
        for dtype, rows in sums.items():
            _kernels.accumulate(_kernels.spans_of(rows), dtype, threads=self._threads)
        for i, gradient in kept.items():
            work.gradients[i] = gradient

    # --- update ------------------------------------------------------------------------------------

    def step(
        self,
        hypers: Sequence[AdamHyper],
        tensors: Sequence[Any],
        *,
        divisor: float = 1.0,
        groups: Sequence[int] | None = None,
    ) -> StepReport:
        """Update every parameter that has a gradient, or none.

        An error in mid-update (a device copy that fails, an interrupt) leaves the buckets before it updated and the
        others not; the gradients are gone, and the next step goes on from there.

        Args:
            hypers: one for each parameter group.
            tensors: the device parameters to write, one for each parameter.
            divisor: what the summed gradients are divided by, on top of the loss scale.
            groups: the parameter group of each parameter; None: as they were added.
        """
        if not self._round_ended:
            self._end_round()
        loss_scale = self.loss_scale
        squares = SumOfSquares()
        present = self._agree_on_present(squares)
        works = [work for work in self._works if not present.isdisjoint(work.members)]
        if not works:
            self.drop_gradients()
            return StepReport(updated=False, skipped="no gradients", loss_scale=loss_scale)
        norm, coefficient = None, 1.0
        if self._examines:
            if self.scaler:
                self.scaler.update(overflow=not squares.finite)
            if not squares.finite:
                self.drop_gradients()
                return StepReport(updated=False, skipped="overflow", grad_norm=squares.norm(), loss_scale=loss_scale)
            norm = squares.norm() / (loss_scale * divisor)
            if self.config.gradient_clipping is not None:
                coefficient = clip_coefficient(norm, self.config.gradient_clipping)
        groups = [spec.group for spec in self.params] if groups is None else groups
        scalars = _Scalars(self, hypers, groups, coefficient / (loss_scale * divisor))
        try:
            for work in works:
                self._update(work, scalars, tensors, present)
        except BaseException:
            self._abort()
            raise
        finally:
            for param in present:
                self.steps[param] += 1
        self.drop_gradients()
        return StepReport(True, None, norm, coefficient, loss_scale)

    def _agree_on_present(self, squares: SumOfSquares) -> set[int]:
        """The parameters that have a gradient on any rank; add the squares of all ranks' gradients.

        A gradient that no rank had is no gradient: its parameter stays as it is.
        """
        if self._examines:
            for work in self._works:
                for dtype, held in work.held().items():
                    spans = _kernels.spans_of([(g.address, 0, g.numel) for _, g in held])
                    squares.add(spans, dtype, threads=self._threads)
        if self.device.world_size == 1:
            return set(self._present)
        flags = np.zeros(len(self.params), np.int64)
        flags[list(self._present)] = 1
        both = np.concatenate([squares.bins, flags])
        self.device.collectives.sum_integers(both, "gradient norm")
        squares.bins, flags = both[: squares.bins.size], both[squares.bins.size :]
        return set(np.flatnonzero(flags).tolist())

    def _abort(self) -> None:
        self._begin()
        for work in self._works:
            work.clear()
            work.life.on(BucketEvent.ABORT)

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before the next backward."""
        return self.scaler.scale if self.scaler else 1.0

    def memory_report(self, device_bytes: int) -> MemoryReport:
        """Host memory planned and held now; ``device_bytes`` is what the front end's parameters take."""
        numel = sum(spec.numel for spec in self.params)
        return MemoryReport(numel, device_bytes, self._planned_host_bytes, self.memory.report())

    @property
    def _examines(self) -> bool:
        """Whether every update looks at all gradients first."""
        skip = self.config.skip_nonfinite
        return bool(skip) or self.config.gradient_clipping is not None or self.scaler is not None

    def _update(self, work: LocalBucket, scalars: "_Scalars", tensors: Sequence[Any], present: set[int]) -> None:
        """One C pass over the process's shards, and the bucket's parameters to where they are read."""
        work.life.on(BucketEvent.UPDATE)
        if self._direct:
            self._run_adam(work, scalars, tensors, None, present)
            work.life.on(BucketEvent.PUBLISH)
        else:
            assert self._staging is not None
            numel = len(self.device.ranks) * work.bucket.shard_numel
            with self._staging.slot(numel, work.bucket.dtype.numpy) as out:
                self._run_adam(work, scalars, tensors, out, present)
                work.life.on(BucketEvent.PUBLISH)
                self.device.publish(work.bucket, out, tensors, present, self._staging).wait()
        work.clear()
        work.life.on(BucketEvent.PUBLISHED)

    def _run_adam(
        self,
        work: LocalBucket,
        scalars: "_Scalars",
        tensors: Sequence[Any],
        out: np.ndarray | None,
        present: set[int],
    ) -> None:
        """Run the kernel on the pieces that have a gradient.

        Parameters are written to ``out``, or where it is None to the tensors themselves; those that are their own
        master weights are written as such in any case.
        """
        in_place = self._without_master(work.bucket)
        for dtype, held in work.held().items():
            indices = [i for i, _ in held if work.pieces[i].param in present]
            pieces = [work.pieces[i] for i in indices]
            segments = work.segments[indices]
            segments["grad"] = [gradient.address for i, gradient in held if work.pieces[i].param in present]
            segments["scalars"] = [scalars.index(piece.param) for piece in pieces]
            if in_place or out is None:
                arrays = [self.device.host_array(tensors[p.param]).run(p.start, p.numel) for p in pieces]
                segments["master" if in_place else "param"] = [array.address for array in arrays]
            if out is not None:
                segments["param"] = [_kernels.address(out) + piece.offset * out.itemsize for piece in pieces]
            _kernels.adam(
                segments,
                scalars.table(),
                grad_dtype=dtype,
                param_dtype=None if in_place and out is None else work.bucket.dtype,
                op_order=self.op_order,
                adam_mode=self.config.adam_mode,
                threads=self._threads,
            )

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
            first_bucket=len(self._works),
        )

    def _without_master(self, bucket: Bucket) -> bool:
        """Whether the bucket's parameters are their own master weights."""
        return self.device.updates_in_place and bucket.dtype is FLOAT32

    @property
    def _has_home(self) -> bool:
        return self._sums or not self._direct

    def _wire(self, bucket: Bucket) -> ElementType:
        """The element type in which gradients travel."""
        asked = self.config.communication_dtype
        return bucket.dtype if asked is None or self.device.world_size == 1 else BY_NAME[asked]

    def _home_dtype(self, bucket: Bucket) -> ElementType:
        return FLOAT32 if self._sums else self.device.arrival(self._wire(bucket)).dtype

    def _allocate_home(self, bucket: Bucket, dtype: ElementType) -> np.ndarray:
        pinned = self._pinned and self.device.arrival(self._wire(bucket)) == _as_it_stays(dtype)
        numel = len(self.device.ranks) * bucket.shard_numel
        return self.memory.allocate("gradients on the host", numel, dtype.numpy, pinned=pinned)

    def _slot_bytes(self, buckets: Sequence[Bucket]) -> int:
        return max((self.device.slot_bytes(bucket, self._wire(bucket)) for bucket in buckets), default=0)

    def _pieces_of(self, param: int) -> list[tuple[LocalBucket, Piece]]:
        found = [(work, work.pieces[i]) for work in self._works_of[param] for i in work.positions.get(param, ())]
        return sorted(found, key=lambda pair: pair[1].start)

    def _master(self, work: LocalBucket, piece: Piece) -> np.ndarray | None:
        arena, at = self._states.locate(work.bucket.index, piece.offset)
        return arena["master"][at : at + piece.numel] if "master" in arena else None

    def _segments(self, bucket: Bucket, pieces: Sequence[Piece]) -> np.ndarray:
        segments = np.zeros(len(pieces), _kernels.SEGMENT)
        for i, piece in enumerate(pieces):
            arena, at = self._states.locate(bucket.index, piece.offset)
            for name, array in arena.items():
                segments[name][i] = _kernels.address(array) + at * array.itemsize
        segments["numel"] = [piece.numel for piece in pieces]
        return segments

    def _load_master(self, work: LocalBucket, piece: Piece, tensor: Any) -> None:
        master = self._master(work, piece)
        assert master is not None
        dtype = self.device.dtype(tensor)
        if self.device.addressable:
            source = self.device.host_array(tensor).run(piece.start, piece.numel)
        else:
            host = np.empty(piece.numel, dtype.numpy)
            self.device.to_host([Copy(tensor, piece.start, piece.numel, 0)], host).wait()
            source = HostArray.of(host)
        rows = _kernels.spans_of([(source.address, _kernels.address(master), piece.numel)])
        _kernels.cast(rows, dtype, FLOAT32, threads=self._threads)


def _as_it_stays(home: ElementType) -> Arrival:
    """What can arrive where gradients wait, nothing left to be done."""
    return Arrival(1, home, 1.0)


class _Scalars:
    """The kernel scalars of one step: a row for each distinct (group, update number)."""

    def __init__(
        self, pipeline: Pipeline, hypers: Sequence[AdamHyper], groups: Sequence[int], grad_scale: float
    ) -> None:
        self._pipeline = pipeline
        self._groups = groups
        self._hypers = hypers
        self._grad_scale = grad_scale
        self._rows: dict[tuple[int, int], int] = {}
        self._values: list[tuple[float, ...]] = []

    def index(self, param: int) -> int:
        """The row of this parameter."""
        key = (self._groups[param], int(self._pipeline.steps[param]) + 1)
        if key not in self._rows:
            self._rows[key] = len(self._values)
            hyper = self._hypers[key[0]]
            self._values.append(hyper.scalars(key[1], op_order=self._pipeline.op_order, grad_scale=self._grad_scale))
        return self._rows[key]

    def table(self) -> np.ndarray:
        return np.array(self._values, dtype=_kernels.SCALARS)
