"""A step's gradients: from the device, through reduction, to where they wait for the update."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import _kernels
from .bucket_terms import as_it_stays
from .buckets import LocalBuckets
from .device import Arrival, Done, Event, HostArray
from .dtypes import BY_NUMPY, FLOAT32, ElementType
from .errors import GradientError
from .grad_norm import SumOfSquares
from .local_bucket import LocalBucket
from .step_state import BucketEvent, BucketState
from .trace import REDUCTION


class Gradients:
    """The gradients of one process since the last update.

    A round is one launch of every bucket, one a micro-step. Among ranks buckets are launched in one order, whatever
    the order in which gradients arrive: that of rank 0's arrivals in the step before.

    Args:
        examined: whether every update looks at all gradients first.
        reduced: what is done when a bucket has been launched; whether every parameter of it had a gradient here.
    """

    def __init__(
        self, buckets: LocalBuckets, examined: Callable[[], bool], reduced: Callable[[LocalBucket, bool], None]
    ) -> None:
        self._buckets = buckets
        self._examined = examined
        self._reduced = reduced
        self.present: set[int] = set()
        """Parameters that had a gradient on this rank since the last update."""
        self.order: list[LocalBucket] = []
        """The buckets in the order in which ranks meet for them."""
        self._micro_steps = 0
        self._next = 0
        """The bucket in this order to be launched next in this round."""
        self._filled: list[LocalBucket] = []
        """Buckets in the order in which they filled in this round."""
        self._filled_before: list[LocalBucket] = []
        """Likewise in the round before."""
        self.round_ended = False
        """Whether the round of the last gradient has ended."""
        self.pristine = True
        """Whether nothing was added or launched since the last update."""
        self.last: Event = Done()
        """The arrival of the bucket that was launched last."""

    def check(self, param: int, gradient: Any) -> None:
        """Raise :class:`GradientError` unless the gradient fits its parameter."""
        spec = self._buckets.params[param]
        numel, dtype = self._buckets.device.numel(gradient), self._buckets.device.dtype(gradient)
        if numel != spec.numel:
            raise GradientError(
                f"parameter {spec.name!r}: gradient has {numel} elements, expected {spec.numel}; "
                "was the parameter resized after wrap()?"
            )
        if dtype is not spec.dtype and not self._buckets.direct and self._buckets.config.communication_dtype is None:
            raise GradientError(
                f"parameter {spec.name!r}: gradient is {dtype}, expected {spec.dtype} as the parameter is: it would be "
                f"rounded on its way; set communication_dtype={dtype.name!r}"
            )

    def add(self, param: int, gradient: Any) -> None:
        """As :meth:`Pipeline.add_gradient`."""
        works = self._buckets.of[param]
        if self._again(param):
            self.end_round()
        self.round_ended = self.pristine = False
        self.present.add(param)
        for work in works:
            self._buckets.claim(work)
            work.life.on(BucketEvent.GRADIENT)
            work.waiting[param] = gradient
            if work.is_full:
                self._filled.append(work)
                if self._buckets.device.world_size == 1:
                    self._launch(work)
        if self._buckets.device.world_size > 1:
            while self._next < len(self.order) and self.order[self._next].is_full:
                self._launch(self.order[self._next])
                self._next += 1

    def begins_round(self, param: int) -> bool:
        """Whether the parameter's next gradient is the first of another round."""
        return self.round_ended or self._again(param)

    def _again(self, param: int) -> bool:
        return any(param in work.waiting or work.launched for work in self._buckets.of[param])

    def drop(self, params: Sequence[int] | None = None) -> None:
        """Forget the gradients of these parameters, or of all."""
        if params is not None:  # what only other ranks had is theirs: this rank may own its sum
            params = [param for param in params if param in self.present]
        of, everything = self._buckets.of, self._buckets.all
        touched = everything if params is None else [work for param in params for work in of[param]]
        if params is None:
            self._reclaim(touched)
            self.begin()
            for work in touched:
                work.clear()
        else:
            for work in touched:
                self._buckets.claim(work)  # whose others are kept
        for param in params or ():
            self.present.discard(param)
            for work in self._buckets.of[param]:
                work.waiting.pop(param, None)
                for i in work.positions.get(param, ()):
                    if work.gradients[i] is not None and work.home is not None:
                        work.at_home(i).view()[:] = 0  # others of the bucket stay, and later micro-steps are added
                    work.gradients[i] = None
                work.squares = None
        for work in touched:
            if not work.waiting and not work.holds_gradients:
                work.life.on(BucketEvent.DROP)

    def end_micro_step(self, *, reduce: bool = True, boundary: bool | None = None) -> bool:
        """As :meth:`Pipeline.end_micro_step`."""
        if reduce:
            self.end_round()
        boundary = self.at_boundary if boundary is None else boundary
        self._micro_steps = 0 if boundary else self._micro_steps + 1
        return boundary

    @property
    def micro_steps(self) -> int:
        """Micro-steps since the last boundary."""
        return self._micro_steps

    @property
    def at_boundary(self) -> bool:
        """Whether an update is due at the end of this micro-step."""
        return self._micro_steps + 1 >= self._buckets.config.gradient_accumulation_steps

    def begin(self) -> None:
        """Nothing has arrived."""
        self._micro_steps = 0
        self._begin_round()
        self._buckets.in_staging.clear()
        self.round_ended = False
        self.pristine = True
        self.present.clear()

    def _begin_round(self) -> None:
        self._next = 0
        self._filled = []
        for work in self._buckets.all:
            work.launched = False

    def end_round(self) -> None:
        """Launch the buckets that did not fill: some of their parameters took no part."""
        for work in self.order:
            if not work.launched:
                self._launch(work)
        self._filled_before = self._filled
        self._begin_round()
        self.round_ended = True

    def _launch(self, work: LocalBucket) -> None:
        """Bring what arrived in this bucket to its owners' host memory and keep it there."""
        self._buckets.claim(work)
        work.launched = True
        if work.life.state is not BucketState.FILLING and self._buckets.device.world_size == 1:
            return
        self.pristine = False
        work.life.on(BucketEvent.REDUCE)
        work.squares = None
        gradients, work.waiting = work.waiting, {}
        if self._buckets.direct:
            tensors = {param: self._buckets.device.host_array(tensor) for param, tensor in gradients.items()}
            arrived = [(i, p) for i, p in enumerate(work.pieces) if p.param in tensors]
            self._keep(work, [(i, tensors[p.param].run(p.start, p.numel)) for i, p in arrived])
            work.life.on(BucketEvent.ARRIVED)
            return
        try:
            self._reduce(work, gradients)
        except BaseException:
            self._buckets.recover()
            raise

    def _reduce(self, work: LocalBucket, gradients: Mapping[int, Any]) -> None:
        """Have the device reduce the bucket, and sum what arrives with what is held."""
        assert self._buckets.staging is not None
        assert work.home is not None
        bucket, arrival = work.bucket, self._buckets.device.arrival(work.wire)
        stays = arrival == as_it_stays(BY_NUMPY[work.home.dtype]) and not work.holds_gradients
        if len(self._buckets.in_staging) == self._buckets.tasks.depth:
            oldest, settled = self._buckets.in_staging.popleft()
            self._buckets.wait(settled, oldest)
        work.lease = self._buckets.staging.lease()
        numel = arrival.parts * work.home.size
        received = work.home if stays else work.lease.borrow(numel, arrival.dtype.numpy)
        self.last = event = self._buckets.device.reduce(bucket, work.wire, gradients, received, work.lease)
        look = self._examined() and self.at_boundary

        def settle() -> None:
            event.wait()
            if not stays:
                with self._buckets.trace.span(REDUCTION, "sum", bucket.index, received.nbytes):
                    self._sum(work, arrival, received)
            work.release()
            work.gradients = [work.at_home(i) for i in range(len(work.pieces))]
            if look:
                work.squares = self._squares(work)
            work.life.on(BucketEvent.ARRIVED)

        staged = len(work.lease)
        work.task = settled = self._buckets.tasks.submit(settle)
        if staged:
            self._buckets.in_staging.append((work, settled))
        self._reduced(work, len(gradients) == len(work.members))

    def _sum(self, work: LocalBucket, arrival: Arrival, received: np.ndarray) -> None:
        """Each shard's parts, summed in their order in fp32 and divided once, to where gradients wait."""
        add = work.holds_gradients
        home = self._buckets.promote(work)
        n_ranks, threads = len(self._buckets.device.ranks), self._buckets.threads
        for parts, shard in zip(received.reshape(n_ranks, -1), home.reshape(n_ranks, -1), strict=True):
            _kernels.reduce(
                parts, arrival.parts, arrival.dtype, shard, divisor=arrival.divisor, add=add, threads=threads
            )

    def _keep(self, work: LocalBucket, arrived: Sequence[tuple[int, HostArray]]) -> None:
        """Hold first gradients where they are, unless gradients are to be summed; sum further ones in fp32."""
        copies: dict[ElementType, list[tuple[int, int, int]]] = {}
        sums: dict[ElementType, list[tuple[int, int, int]]] = {}
        kept: dict[int, HostArray] = {}  # held gradients stay alive until they have been read
        for i, gradient in arrived:
            held = work.gradients[i]
            if held is None and not self._buckets.sums and work.home is None:
                kept[i] = gradient
                continue
            self._buckets.promote(work)
            kept[i] = target = work.at_home(i)
            if held is None or held.address != target.address:
                first = gradient if held is None else held
                copies.setdefault(first.dtype, []).append((first.address, target.address, first.numel))
            if held is not None:
                sums.setdefault(gradient.dtype, []).append((gradient.address, target.address, gradient.numel))
        for dtype, rows in copies.items():
            _kernels.cast(_kernels.spans_of(rows), dtype, FLOAT32, threads=self._buckets.threads)
        for dtype, rows in sums.items():
            _kernels.accumulate(_kernels.spans_of(rows), dtype, threads=self._buckets.threads)
        for i, gradient in kept.items():
            work.gradients[i] = gradient

    def _squares(self, work: LocalBucket) -> SumOfSquares:
        squares = SumOfSquares()
        with self._buckets.trace.span(REDUCTION, "norm", work.bucket.index):
            for dtype, held in work.held().items():
                spans = _kernels.spans_of([(g.address, 0, g.numel) for _, g in held])
                squares.add(spans, dtype, threads=self._buckets.threads)
        return squares

    def add_squares(self, total: SumOfSquares) -> None:
        for work in self._buckets.all:
            total.bins += (work.squares or self._squares(work)).bins

    def order_of_arrival(self) -> list[LocalBucket]:
        filled = set(self._filled_before)
        return [*self._filled_before, *(work for work in self.order if work not in filled)]

    def _reclaim(self, works: Sequence[LocalBucket]) -> None:
        """As :meth:`LocalBuckets.claim`, where what went wrong does not matter: all that was asked for is dropped."""
        for work in works:
            try:
                self._buckets.claim(work)
            except Exception:
                continue
