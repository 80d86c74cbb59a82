"""The composer: gradients in, updated parameters out.

A gradient's way: :meth:`Pipeline.add_gradient` -> its bucket fills -> :meth:`_launch`: alone, device to host and
:meth:`_keep` (hold or accumulate); among ranks, :meth:`_reduce` (exchange slices, sum them in rank order, keep the
shard) -> :meth:`step` (norm, clip) -> :meth:`_update` (one C pass: unscale, clip, Adam, cast) -> among ranks,
gathered -> published to the device.

Buckets are launched in their order, one round a micro-step, on every rank alike, whatever the order in which
gradients arrive.

Where device memory is host memory, gradients are read and parameters written where they are; an fp32
parameter is then its own master weight. Elsewhere gradients wait on the host in their own element type
(fp32 once they accumulate), so the device can free them at once.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import _kernels
from .collectives import Collectives
from .config import OffloadConfig
from .cpu_adam import STATE_NAMES, AdamHyper, AdamStates
from .device import Copy, Device, HostArray
from .dtypes import FLOAT32, ElementType
from .errors import GradientError, ParameterError, StateError
from .grad_norm import SumOfSquares, clip_coefficient
from .host_memory import HostMemory, StagingRing
from .loss_scale import LossScaler
from .memory_plan import MemoryPlan, MemoryReport, PlanRow
from .partition import Bucket, ParamSpec, Piece, build_buckets
from .step_state import BucketEvent, BucketLife, BucketState

_STAGING_SLOTS = 2


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


@dataclass
class _Work:
    """One bucket of this rank: its shard, and its gradients in the present step."""

    bucket: Bucket
    pieces: tuple[Piece, ...]
    segments: np.ndarray
    """What the kernel is told of each piece, less what changes from step to step."""
    life: BucketLife
    home: np.ndarray | None
    """Where host gradients of the shard are kept: fp32 if ``accumulates``, else of the bucket's element type.
    None where the device's own memory serves."""
    accumulates: bool
    waiting: dict[int, Any] = field(default_factory=dict)
    """Device gradients that arrived since the last launch, by parameter."""
    gradients: list[HostArray | None] = field(default_factory=list)
    """The host gradient of each piece."""

    def __post_init__(self) -> None:
        self.members = {piece.param: piece for piece in self.bucket.pieces}
        """The bucket's piece of each parameter: it has one."""
        self.position = {piece.param: i for i, piece in enumerate(self.pieces)}
        """The index of a parameter's piece of this rank's shard."""
        self.clear()

    @property
    def is_full(self) -> bool:
        """Whether every parameter of the bucket has a gradient waiting."""
        return len(self.waiting) == len(self.members)

    def held(self) -> dict[ElementType, list[tuple[int, HostArray]]]:
        """The host gradients, with the index of their piece, by element type."""
        by_dtype: dict[ElementType, list[tuple[int, HostArray]]] = {}
        for i, gradient in enumerate(self.gradients):
            if gradient is not None:
                by_dtype.setdefault(gradient.dtype, []).append((i, gradient))
        return by_dtype

    def clear(self) -> None:
        self.waiting.clear()
        self.gradients = [None] * len(self.pieces)


class Pipeline:
    """Optimizer states and the schedule of one rank's updates.

    Parameters are numbered in the order in which they were added. The tensors that cross this interface are
    the device's: one-dimensional and contiguous.
    """

    def __init__(
        self, config: OffloadConfig, device: Device, collectives: Collectives, scaler: LossScaler | None
    ) -> None:
        self.config = config
        self.device = device
        self.collectives = collectives
        self.scaler = scaler
        self.op_order = config.op_order or "torch"
        self.params: list[ParamSpec] = []
        self.steps: list[np.ndarray] = []
        """Updates that each parameter has had: zero-dimensional float32 arrays, so that a front end can share them."""
        self.memory = HostMemory(config.threads)
        self._states = AdamStates(self.memory)
        self._works: list[_Work] = []
        self._works_of: list[list[_Work]] = []
        self._ring: StagingRing | None = None
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
        self._accumulates = config.gradient_accumulation_steps > 1

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
            for name in STATE_NAMES:
                if not (name == "master" and self._without_master(bucket)):
                    host[name] += 4 * bucket.shard_numel
            if self._needs_home():
                host["gradients on the host"] += self._home_dtype(bucket.dtype).itemsize * bucket.shard_numel
        if self._stages:
            host["staging"] = _STAGING_SLOTS * max(self._slot_bytes(buckets) - self._ring_bytes, 0)
        remedies = {
            "gradients on the host": "gradient_accumulation_steps=1" if self._accumulates else "param_dtype='bfloat16'",
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
        if self._ranks > 1:
            self._agree(specs, tensors)
        buckets = self._build(specs)
        self._states.add(buckets, without_master=self._without_master)
        slot_bytes = self._slot_bytes(buckets)
        if self._stages and slot_bytes > self._ring_bytes:
            self._ring = None  # free before allocating its successor
            self._ring = StagingRing(self.memory, slots=_STAGING_SLOTS, n_bytes=slot_bytes, pinned=self._pinned)
            self._ring_bytes = slot_bytes
        first = len(self.params)
        self.params += specs
        self._planned_host_bytes += planned
        self.steps += [np.zeros((), np.float32) for _ in specs]
        self._works_of += [[] for _ in specs]
        for bucket in buckets:
            home = None
            if self._needs_home():
                home = self._allocate_home(bucket, self._home_dtype(bucket.dtype))
            pieces = bucket.shard(self.collectives.rank)
            work = _Work(
                bucket, pieces, self._segments(bucket, pieces), BucketLife(bucket.index), home, self._accumulates
            )
            self._works.append(work)
            for param in work.members:
                self._works_of[param].append(work)
            if not self._without_master(bucket):
                for piece in pieces:
                    self._load_master(work, piece, tensors[piece.param - first])

    def states(self, param: int) -> list[tuple[int, dict[str, np.ndarray]]]:
        """This rank's states of a parameter: ``(start, {name: fp32 view})`` a contiguous run, ascending.

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
        """This rank's part of a parameter's states, one-dimensional: the runs of :meth:`states`, end to end."""
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
                self.device.to_host([Copy(tensor, piece.start, theirs)]).wait()
                changed = master.astype(theirs.dtype).view(np.uint8).reshape(piece.numel, -1)
                changed = (changed != theirs.view(np.uint8).reshape(piece.numel, -1)).any(axis=1)
                master[changed] = theirs[changed].astype(np.float32)

    # --- gradients ---------------------------------------------------------------------------------

    def check_gradient(self, param: int, gradient: Any) -> None:
        """Raise :class:`GradientError` unless the gradient has as many elements as its parameter."""
        numel, expected = self.device.numel(gradient), self.params[param].numel
        if numel != expected:
            raise GradientError(
                f"parameter {self.params[param].name!r}: gradient has {numel} elements, expected {expected}; "
                "was the parameter resized after wrap()?"
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
                if param in work.position:
                    work.gradients[work.position[param]] = None
        for work in touched:
            if not work.waiting and not any(work.gradients):
                work.life.on(BucketEvent.DROP)

    def end_micro_step(self) -> bool:
        """End a micro-step; whether it is the boundary, at which an update is due.

        Where gradients accumulate, none of the device's is referred to any more.
        """
        self._end_round()
        self._micro_steps = (self._micro_steps + 1) % self.config.gradient_accumulation_steps
        return self._micro_steps == 0

    @property
    def micro_steps(self) -> int:
        """Micro-steps since the last boundary."""
        return self._micro_steps

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

    def _launch(self, work: _Work) -> None:
        """Bring what arrived in this bucket to its owner's host memory and keep it there."""
        if self._ranks > 1:
            self._reduce(work)
        elif work.life.state is BucketState.FILLING:
            self._fetch(work)

    def _reduce(self, work: _Work) -> None:
        """Exchange the bucket's slices; sum those of this rank's shard in rank order, in fp32, and divide once."""
        work.life.on(BucketEvent.REDUCE)
        bucket, home = work.bucket, work.home
        assert self._ring is not None
        assert home is not None
        dtype, shard = bucket.dtype.numpy, slice(0, bucket.shard_numel)
        with (
            self._ring.slot(bucket.padded_numel, dtype) as send,
            self._ring.slot(bucket.padded_numel, dtype) as received,
        ):
            send[:] = 0
            pieces = [work.members[param] for param in work.waiting]
            copies = [Copy(work.waiting[p.param], p.start, send[p.offset : p.offset + p.numel]) for p in pieces]
            self.device.to_host(copies).wait()
            self.collectives.exchange(send, received, f"bucket {bucket.index}: exchange of gradients")
            work.life.on(BucketEvent.COPY)
            _kernels.reduce(
                received,
                self._ranks,
                bucket.dtype,
                home[shard],
                divisor=float(self._ranks),
                add=any(work.gradients),
                threads=self._threads,
            )
        work.gradients = [HostArray.of(home[p.offset : p.offset + p.numel]) for p in work.pieces]
        work.waiting.clear()
        work.life.on(BucketEvent.ARRIVED)

    def _fetch(self, work: _Work) -> None:
        """The only rank's gradients are the sum: bring them to the host."""
        work.life.on(BucketEvent.REDUCE)
        work.life.on(BucketEvent.COPY)
        arrived = [(work.position[param], work.members[param]) for param in work.waiting]
        if self.device.addressable:
            tensors = {param: self.device.host_array(tensor) for param, tensor in work.waiting.items()}
            self._keep(work, [(i, tensors[piece.param].run(piece.start, piece.numel)) for i, piece in arrived])
        else:
            assert work.home is not None
            direct: list[tuple[int, Piece]] = []
            staged: list[tuple[int, Piece]] = []
            for i, piece in arrived:
                (direct if self._arrives_at_home(work, i, piece) else staged).append((i, piece))
            hosts = [work.home[piece.offset : piece.offset + piece.numel] for _, piece in direct]
            copies = [Copy(work.waiting[p.param], p.start, host) for (_, p), host in zip(direct, hosts, strict=True)]
            self.device.to_host(copies).wait()
            for (i, _), host in zip(direct, hosts, strict=True):
                work.gradients[i] = HostArray.of(host)
            self._keep_through_staging(work, staged)
        work.waiting.clear()
        work.life.on(BucketEvent.ARRIVED)

    def _arrives_at_home(self, work: _Work, i: int, piece: Piece) -> bool:
        assert work.home is not None
        return work.gradients[i] is None and work.home.dtype == self.device.dtype(work.waiting[piece.param]).numpy

    def _keep_through_staging(self, work: _Work, staged: Sequence[tuple[int, Piece]]) -> None:
        assert self._ring is not None
        for i, piece in staged:
            dtype = self.device.dtype(work.waiting[piece.param])
            with self._ring.slot(piece.numel, dtype.numpy) as host:
                self.device.to_host([Copy(work.waiting[piece.param], piece.start, host)]).wait()
                self._keep(work, [(i, HostArray.of(host))])

    def _keep(self, work: _Work, arrived: Sequence[tuple[int, HostArray]]) -> None:
        """Hold first gradients where they are, unless gradients accumulate; sum further ones in fp32."""
        copies: dict[ElementType, list[tuple[int, int, int]]] = {}
        sums: dict[ElementType, list[tuple[int, int, int]]] = {}
        kept: dict[int, HostArray] = {}  # held gradients stay alive until they have been read
        for i, gradient in arrived:
            held, piece = work.gradients[i], work.pieces[i]
            if held is None and self.device.addressable and not work.accumulates:
                kept[i] = gradient
                continue
            if not work.accumulates:  # a second gradient, though gradient_accumulation_steps is 1
                if work.home is None or work.home.dtype != FLOAT32.numpy:
                    work.home = self._allocate_home(work.bucket, FLOAT32)
                work.accumulates = True
            assert work.home is not None
            target = HostArray.of(work.home[piece.offset : piece.offset + piece.numel])
            if held is None:
                copies.setdefault(gradient.dtype, []).append((gradient.address, target.address, piece.numel))
            else:
                if held.address != target.address:
                    copies.setdefault(held.dtype, []).append((held.address, target.address, piece.numel))
                sums.setdefault(gradient.dtype, []).append((gradient.address, target.address, piece.numel))
            kept[i] = target
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
        if self._ranks == 1:
            return {p for work in self._works for p, i in work.position.items() if work.gradients[i] is not None}
        flags = np.zeros(len(self.params), np.int64)
        flags[list(self._present)] = 1
        both = np.concatenate([squares.bins, flags])
        self.collectives.sum_integers(both, "gradient norm")
        squares.bins, flags = both[: squares.bins.size], both[squares.bins.size :]
        present = set(np.flatnonzero(flags).tolist())
        for work in self._works:
            for param, i in work.position.items():
                if param not in present:
                    work.gradients[i] = None
        return present

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

    def _update(self, work: _Work, scalars: "_Scalars", tensors: Sequence[Any], present: set[int]) -> None:
        """One C pass over a shard, and the bucket's parameters to where they are read."""
        work.life.on(BucketEvent.UPDATE)
        if self.device.addressable and (self._ranks == 1 or self._without_master(work.bucket)):
            held = [p.param for p, g in zip(work.pieces, work.gradients, strict=True) if g is not None]
            arrays = {param: self.device.host_array(tensors[param]) for param in held}
            self._run_adam(work, scalars, lambda piece: arrays[piece.param].run(piece.start, piece.numel).address)
            work.life.on(BucketEvent.PUBLISH)
            if self._ranks > 1:
                assert self._ring is not None
                with self._ring.slot(work.bucket.shard_numel, work.bucket.dtype.numpy) as out:
                    mine = [p for p in work.pieces if p.param in present]
                    copies = [Copy(tensors[p.param], p.start, out[p.offset : p.offset + p.numel]) for p in mine]
                    self.device.to_host(copies).wait()
                    self._publish(work, out, tensors, present)
        else:
            assert self._ring is not None
            with self._ring.slot(work.bucket.shard_numel, work.bucket.dtype.numpy) as out:
                base, itemsize = _kernels.address(out), out.itemsize
                self._run_adam(work, scalars, lambda piece: base + piece.offset * itemsize)
                work.life.on(BucketEvent.PUBLISH)
                self._publish(work, out, tensors, present)
        work.clear()
        work.life.on(BucketEvent.PUBLISHED)

    def _publish(self, work: _Work, out: np.ndarray, tensors: Sequence[Any], present: set[int]) -> None:
        """Gather the ranks' updated shards and write the parameters that have a gradient to the device."""
        bucket = work.bucket
        if self._ranks == 1:
            self._write(work.pieces, out, tensors, present)
            return
        assert self._ring is not None
        with self._ring.slot(bucket.padded_numel, bucket.dtype.numpy) as received:
            self.collectives.gather(out, received, f"bucket {bucket.index}: gathering of parameters")
            self._write(bucket.pieces, received, tensors, present)

    def _write(self, pieces: Sequence[Piece], host: np.ndarray, tensors: Sequence[Any], present: set[int]) -> None:
        written = [p for p in pieces if p.param in present]
        self.device.to_device(
            [Copy(tensors[p.param], p.start, host[p.offset : p.offset + p.numel]) for p in written]
        ).wait()

    def _run_adam(self, work: _Work, scalars: "_Scalars", output: Callable[[Piece], int]) -> None:
        """Run the kernel on the pieces that have a gradient; ``output`` gives the address a piece is written to."""
        in_place = self._without_master(work.bucket)
        for dtype, held in work.held().items():
            indices = [i for i, _ in held]
            pieces = [work.pieces[i] for i in indices]
            segments = work.segments[indices]
            segments["grad"] = [gradient.address for _, gradient in held]
            segments["master" if in_place else "param"] = [output(piece) for piece in pieces]
            segments["scalars"] = [scalars.index(piece.param) for piece in pieces]
            _kernels.adam(
                segments,
                scalars.table(),
                grad_dtype=dtype,
                param_dtype=None if in_place else work.bucket.dtype,
                op_order=self.op_order,
                adam_mode=self.config.adam_mode,
                threads=self._threads,
            )

    def _agree(self, specs: Sequence[ParamSpec], tensors: Sequence[Any]) -> None:
        """Make sure that all ranks add the same parameters, and start from rank 0's values."""
        lines = [
            f"{spec.name} {spec.numel} {spec.dtype} {spec.group} {self.device.dtype(t)}"
            for spec, t in zip(specs, tensors, strict=True)
        ]
        digests = [int.from_bytes(hashlib.sha256(line.encode()).digest()[:7]) for line in lines]
        mine = np.array([len(digests), self.config.reduce_bucket_size, *digests], np.int64)
        length = np.array([mine.size], np.int64)
        self.collectives.broadcast(length, "layout")
        theirs = np.zeros(int(length[0]), np.int64)
        theirs[: min(mine.size, theirs.size)] = mine[: theirs.size]
        self.collectives.broadcast(theirs, "layout")
        same = mine.size == theirs.size and bool((mine == theirs).all())
        differing = np.array([0 if same else 1], np.int64)
        self.collectives.sum_integers(differing, "layout")
        if differing[0]:
            raise ParameterError(_difference(mine, theirs, lines))
        for spec, tensor in zip(specs, tensors, strict=True):
            host = np.empty(spec.numel, self.device.dtype(tensor).numpy)
            self.device.to_host([Copy(tensor, 0, host)]).wait()
            self.collectives.broadcast(host, f"parameter {spec.name!r}: initial value")
            self.device.to_device([Copy(tensor, 0, host)]).wait()

    # --- small decisions, each made here only --------------------------------------------------------

    @property
    def _pinned(self) -> bool:
        return self.config.pin_memory and self.device.wants_pinned

    def _build(self, specs: Sequence[ParamSpec]) -> list[Bucket]:
        return build_buckets(
            specs,
            world_size=self.collectives.world_size,
            bucket_numel=self.config.reduce_bucket_size,
            first_param=len(self.params),
            first_bucket=len(self._works),
        )

    def _without_master(self, bucket: Bucket) -> bool:
        """Whether the bucket's parameters are their own master weights."""
        return self.device.updates_in_place and bucket.dtype is FLOAT32

    @property
    def _ranks(self) -> int:
        return self.collectives.world_size

    @property
    def _stages(self) -> bool:
        """Whether data passes through staging: to another device, or to other ranks."""
        return not self.device.addressable or self._ranks > 1

    def _needs_home(self) -> bool:
        return self._accumulates or self._stages

    def _home_dtype(self, bucket_dtype: ElementType) -> ElementType:
        return FLOAT32 if self._accumulates or self._ranks > 1 else bucket_dtype

    def _allocate_home(self, bucket: Bucket, dtype: ElementType) -> np.ndarray:
        pinned = self._pinned and dtype is bucket.dtype  # copies arrive here only in the bucket's own type
        return self.memory.allocate("gradients on the host", bucket.shard_numel, dtype.numpy, pinned=pinned)

    def _slot_bytes(self, buckets: Sequence[Bucket]) -> int:
        return max((bucket.padded_numel * bucket.dtype.itemsize for bucket in buckets), default=0)

    def _pieces_of(self, param: int) -> list[tuple[_Work, Piece]]:
        works = [work for work in self._works_of[param] if param in work.position]
        found = [(work, work.pieces[work.position[param]]) for work in works]
        return sorted(found, key=lambda pair: pair[1].start)

    def _master(self, work: _Work, piece: Piece) -> np.ndarray | None:
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

    def _load_master(self, work: _Work, piece: Piece, tensor: Any) -> None:
        master = self._master(work, piece)
        assert master is not None
        dtype = self.device.dtype(tensor)
        if self.device.addressable:
            source = self.device.host_array(tensor).run(piece.start, piece.numel)
        else:
            host = np.empty(piece.numel, dtype.numpy)
            self.device.to_host([Copy(tensor, piece.start, host)]).wait()
            source = HostArray.of(host)
        rows = _kernels.spans_of([(source.address, _kernels.address(master), piece.numel)])
        _kernels.cast(rows, dtype, FLOAT32, threads=self._threads)


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


def _difference(mine: np.ndarray, theirs: np.ndarray, lines: Sequence[str]) -> str:
    """Where this rank's layout first differs from rank 0's."""
    expected = "expected the same model and configuration on every rank"
    if mine.size > 1 and theirs.size > 1 and mine[1] != theirs[1]:
        return f"reduce_bucket_size is {mine[1]} here and {theirs[1]} on rank 0; {expected}"
    for i, line in enumerate(lines):
        if i + 2 >= theirs.size or mine[i + 2] != theirs[i + 2]:
            name, numel, dtype, group, _ = line.rsplit(" ", 4)
            return f"parameter {name!r} ({numel} elements, {dtype}, group {group}) differs from rank 0's; {expected}"
    if mine.size != theirs.size:
        return f"{mine[0]} parameters here and {theirs[0]} on rank 0; {expected}"
    return f"another rank's parameters differ from rank 0's; {expected}"
