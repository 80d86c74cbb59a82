"""A step's gradients: from the device, through the reduction over the ranks, to where they wait for the update."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..device.events import Done, Event
from ..device.protocols import Arrival, HostArrays
from ..device.trace import REDUCTION
from ..dtypes import BY_NUMPY, FLOAT32
from ..errors import GradientError
from ..native import kernels
from ..native.grad_norm import SumOfSquares
from .bucket_states import Gradient, GradientEvent
from .bucket_terms import as_it_stays
from .buckets import LocalBuckets
from .local_bucket import LocalBucket

UNUSED = frozenset({Gradient.FILLING, Gradient.TRAVELLING, Gradient.LANDED})
"""A bucket that has gradients which no update has used."""


@dataclass
class _Round:
    """One launch of every bucket, one a micro-step."""

    filled: list[LocalBucket] = field(default_factory=list)
    """Buckets in the order in which they filled."""
    next: int = 0
    """The place, in the order of launching, of the bucket to be launched next."""
    launched: set[LocalBucket] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)
    """Parameters that had their gradient, were settled, or launched without it: a further one is of the next round."""
    without: set[int] = field(default_factory=set)
    """Parameters that were settled without a gradient on this rank."""

    def is_full(self, work: LocalBucket) -> bool:
        """True if no gradient of this bucket is to come."""
        missing = len(work.members) - len(work.waiting)
        return not missing or (bool(self.without) and missing == len(work.members & self.without))


@dataclass
class Arrivals:
    """The gradients that came since the last update."""

    present: set[int] = field(default_factory=set)
    """Parameters that had one on this rank."""
    begun: bool = False
    """A gradient came, or a bucket was launched; gradients may have been dropped since."""
    micro_steps: int = 0
    round: _Round | None = field(default_factory=_Round)
    """The present round; None where it has ended and no gradient came since."""
    aside: dict[int, Any] = field(default_factory=dict)
    """Gradients of parameters that are yet to be settled."""


class Reduction:
    """The gradients of one process since the last update.

    All ranks launch buckets in one order: that in which they filled on rank 0 in the step before.

    [Note: settled parameters] A rank that launches a bucket waits for the others. So a bucket is full at the same point
    of backward on all ranks. A gradient that comes on some ranks alone, or earlier on some, must not decide that point:
    it waits aside until all ranks are told, alike, that the parameter is settled. A gradient that comes later still is
    of a second round, when the backward has ended: all ranks have it, or none. It may come so each time; therefore that
    parameter is late from then on: it is settled at the end of a backward, and its bucket leaves there.
    """

    def __init__(self, buckets: LocalBuckets) -> None:
        self._buckets = buckets
        self.order: list[LocalBucket] = []
        """The buckets in the order in which ranks meet for them."""
        self.arrivals = Arrivals()
        self._filled_before: list[LocalBucket] = []
        """Buckets in the order in which they filled in the round before."""
        self.last: Event = Done()
        """The arrival of the bucket that was launched last."""
        self._apart: set[int] = set()
        """Parameters that are settled ([Note: settled parameters])."""
        self._late: set[int] = set()
        """Those that are settled at the end of a backward."""

    # --- the order -----------------------------------------------------------------------------------

    def take_on(self, works: Sequence[LocalBucket]) -> None:
        """Launch new buckets after the others."""
        self.order = [*self.order, *works]
        self._apart.update(i for i, spec in enumerate(self._buckets.params) if spec.settled_with is not None)

    def order_of_arrival(self) -> list[LocalBucket]:
        """The buckets of the last round as they filled, then all others."""
        filled = set(self._filled_before)
        return [*self._filled_before, *(work for work in self.order if work not in filled)]

    # --- gradients -----------------------------------------------------------------------------------

    @property
    def holds_gradients(self) -> bool:
        """True if gradients came since the last update, here or (in a bucket that was launched) on another rank."""
        return self.arrivals.begun or any(work.gradient.state in UNUSED for work in self.order)

    @property
    def at_boundary(self) -> bool:
        """True if an update is due at the end of this micro-step."""
        return self.arrivals.micro_steps + 1 >= self._buckets.config.gradient_accumulation_steps

    def check(self, param: int, gradient: Any) -> None:
        """Raise :class:`GradientError` unless the gradient fits its parameter."""
        spec = self._buckets.params[param]
        numel, dtype = self._buckets.device.numel(gradient), self._buckets.device.dtype(gradient)
        if numel != spec.numel:
            raise GradientError(
                f"parameter {spec.name!r}: gradient has {numel} elements, expected {spec.numel}; "
                "was the parameter resized after wrap()?"
            )
        rounds = not self._buckets.terms.direct and self._buckets.config.communication_dtype is None
        if dtype is not spec.dtype and rounds:
            raise GradientError(
                f"parameter {spec.name!r}: gradient is {dtype}, expected {spec.dtype} as the parameter is: it would be "
                f"rounded on its way; set communication_dtype={dtype.name!r}"
            )

    def begins_round(self, params: Set[int]) -> bool:
        """True if gradients of these parameters are of another round."""
        return self.arrivals.round is None or self.has_left(params)

    def has_left(self, params: Set[int]) -> bool:
        """True if one of these parameters had its gradient of this round, or was settled or launched without it."""
        round = self.arrivals.round
        return round is not None and not round.closed.isdisjoint(params)

    def fill(self, gradients: Mapping[int, Any], without: Set[int] = frozenset()) -> bool:
        """Put gradients into their parameters' buckets. Return whether one of them is full, and so :meth:`ready`.

        Args:
            without: parameters that are settled without one.
        """
        arrivals, full = self.arrivals, False
        if arrivals.round is None:
            arrivals.round = _Round()
        if without:
            arrivals.round.without |= without
            arrivals.round.closed |= without
            arrivals.begun = True
        for work in self._works_of(gradients.keys() | without if without else gradients):
            mine = work.members.intersection(gradients)
            if mine:
                if work.task is not None:
                    self._buckets.claim(work)
                work.gradient.on(GradientEvent.ADD)
                arrivals.begun = True
                all_mine = len(mine) == len(gradients)
                work.waiting |= gradients if all_mine else {param: gradients[param] for param in mine}
                arrivals.round.closed |= mine
            elif work.members.isdisjoint(without):
                continue
            if arrivals.round.is_full(work):
                arrivals.round.filled.append(work)
                full = True
        arrivals.present.update(gradients)
        return full

    # --- parameters that are settled -----------------------------------------------------------------

    def put_aside(self, gradients: Mapping[int, Any]) -> Mapping[int, Any]:
        """Keep the gradients of parameters that are yet to be settled. Return the others, to be filled in now."""
        if not self._apart or self._apart.isdisjoint(gradients):
            return gradients
        mine = {param: gradient for param, gradient in gradients.items() if param in self._apart}
        arrivals = self.arrivals
        arrivals.begun = True
        arrivals.round = arrivals.round or _Round()
        arrivals.aside |= mine
        arrivals.present.update(mine)
        return {param: gradient for param, gradient in gradients.items() if param not in mine}

    def late(self, params: Collection[int]) -> Set[int]:
        """Those of these parameters that are settled at the end of a backward."""
        return self._late.intersection(params)

    def settled(self, params: Collection[int]) -> tuple[dict[int, Any], set[int]]:
        """The gradients of these parameters that were put aside, and the parameters that have none."""
        mine, aside = self._apart.intersection(params), self.arrivals.aside
        given = {param: aside.pop(param) for param in mine.intersection(aside)}
        return given, mine.difference(given)

    def out_of_aside(self, params: Collection[int] | None = None) -> dict[int, Any]:
        """The gradients that were put aside, of these parameters or of all, which nobody has settled. Those that come
        too late for this round are late from now on."""
        aside = self.arrivals.aside
        if not aside:
            return {}
        given = {param: aside.pop(param) for param in (set(aside) if params is None else aside.keys() & params)}
        self._late.update(param for param in given if self.has_left({param}))
        return given

    def _works_of(self, params: Collection[int]) -> Sequence[LocalBucket]:
        """Buckets among which are those of these parameters."""
        return self._buckets.of[next(iter(params))] if len(params) == 1 else self._buckets.all

    def ready(self, *, ending: bool = False) -> Iterable[LocalBucket]:
        """The buckets to launch now, in their order. Launch each before you take the next.

        Args:
            ending: the micro-step ends: all that were not launched, full or not, even where no gradient came.
        """
        round = self.arrivals.round
        if round is None:
            if not ending:
                return ()
            self.arrivals.round = round = _Round()
        if self._buckets.device.world_size > 1:
            return self._order_of_ranks(round, ending)
        full, round.next = round.filled[round.next :], len(round.filled)
        return [work for work in self.order if work not in round.launched] if ending else full

    def _order_of_ranks(self, round: _Round, ending: bool) -> Iterator[LocalBucket]:
        """Each waits until it is full and those before it were launched, as on the other ranks."""
        while round.next < len(self.order) and (ending or round.is_full(self.order[round.next])):
            round.next += 1
            if self.order[round.next - 1] not in round.launched:
                yield self.order[round.next - 1]

    def launch(self, work: LocalBucket, *, examine: bool) -> frozenset[int] | None:
        """Bring the gradients of this bucket to their owners' host memory and keep them there.

        Args:
            examine: sum their squares when they have arrived, for the update looks at them.

        Returns:
            The parameters of it that had a gradient here; None if nothing had to travel.
        """
        round = self.arrivals.round
        assert round is not None
        if work.task is not None:
            self._buckets.claim(work)
        round.launched.add(work)
        round.closed |= work.members
        if work.gradient.state is not Gradient.FILLING and self._buckets.device.world_size == 1:
            return None
        work.gradient.on(GradientEvent.LAUNCH)
        self.arrivals.begun = True
        work.squares = None
        gradients, work.waiting = work.waiting, {}
        if self._buckets.terms.direct:
            if gradients:  # they may have been dropped
                self._keep(work, gradients)
            work.gradient.on(GradientEvent.LAND)
            return None
        try:
            self._reduce(work, gradients, examine=examine)
        except BaseException:
            self._buckets.recover()
            raise
        return frozenset(gradients)

    def end_round(self) -> None:
        """The micro-step has ended: every bucket was launched."""
        if self.arrivals.round is not None:
            self._filled_before = self.arrivals.round.filled
            self.arrivals.round = None

    def count_micro_step(self, *, boundary: bool) -> None:
        """A micro-step has ended."""
        self.arrivals.micro_steps = 0 if boundary else self.arrivals.micro_steps + 1

    def begin(self, order: Sequence[LocalBucket] | None = None) -> None:
        """The next step begins: no gradient has come.

        Args:
            order: to launch the buckets in; None: as before.
        """
        self.arrivals = Arrivals()
        if order is not None:
            self.order = list(order)
        self._buckets.in_staging.clear()

    # --- forgetting ----------------------------------------------------------------------------------

    def drop_all(self, order: Sequence[LocalBucket] | None = None) -> None:
        """Forget all gradients that no update has used, also those that were lost. The next step begins."""
        unused = [work for work in self._buckets.all if work.gradient.state is not Gradient.USED]
        for work in unused:
            try:
                self._buckets.claim(work)
            except Exception:
                continue
        self.begin(order)
        for work in unused:
            work.forget_gradients(GradientEvent.DROP)

    def drop(self, params: Sequence[int]) -> None:
        """Forget the gradients of these parameters; raise the errors of those that share a bucket with them."""
        # A gradient that only other ranks had stays with them.
        params = [param for param in params if param in self.arrivals.present]
        touched = dict.fromkeys(work for param in params for work in self._buckets.of[param])
        for work in touched:
            self._buckets.claim(work)
        self.arrivals.present.difference_update(params)
        round = self.arrivals.round
        for param in params:
            self.arrivals.aside.pop(param, None)
        for work in touched:
            dropped = work.members.intersection(params)
            if round is not None and work not in round.launched:
                round.closed -= dropped
            for param in dropped:
                work.waiting.pop(param, None)
            pieces = np.array([i for param in dropped for i in work.positions.get(param, ())], np.int64)
            if work.home is not None:
                for piece in (work.pieces[i] for i in pieces.tolist()):
                    work.home[piece.offset : piece.offset + piece.numel] = 0  # others stay, and later ones are added
            work.hold(pieces, HostArrays.none(len(pieces)))
            work.squares = None
        for work in touched:
            if not work.waiting and not work.has_landed:
                work.forget_gradients(GradientEvent.DROP)

    # --- the way of a bucket -------------------------------------------------------------------------

    def _reduce(self, work: LocalBucket, gradients: Mapping[int, Any], *, examine: bool) -> None:
        """Have the device reduce the bucket, and sum the arrivals with earlier micro-steps'."""
        buckets = self._buckets
        assert buckets.staging is not None
        buckets.await_home(work)
        assert work.home is not None
        bucket, arrival = work.bucket, buckets.device.sizes.arrival(work.wire)
        stays = arrival == as_it_stays(BY_NUMPY[work.home.dtype]) and not work.has_landed
        if len(buckets.in_staging) == buckets.worker.depth:
            oldest, landed = buckets.in_staging.popleft()
            buckets.wait(landed, oldest)
        work.lease = buckets.staging.lease()
        numel = arrival.parts * work.home.size
        received = work.home if stays else work.lease.borrow(numel, arrival.dtype.numpy)
        self.last = event = buckets.device.reduce(bucket, work.wire, gradients, received, work.lease)

        def land() -> None:
            event.wait()
            if not stays:
                with buckets.trace.span(REDUCTION, "sum", bucket.index, received.nbytes):
                    self._sum(work, arrival, received)
            work.release()
            work.gradients = work.at_home()
            if examine:
                squares = SumOfSquares()
                self._square(work, squares)
                work.squares = squares
            work.gradient.on(GradientEvent.LAND)

        staged = len(work.lease)
        work.give(landed := buckets.worker.submit(land))
        if staged:
            buckets.in_staging.append((work, landed))

    def _sum(self, work: LocalBucket, arrival: Arrival, received: np.ndarray) -> None:
        """Sum each shard's parts in their order in fp32, divide once, and add to the gradients that wait."""
        add = work.has_landed
        home = self._buckets.promote(work)
        n_ranks, threads = len(self._buckets.device.ranks), self._buckets.threads
        for parts, shard in zip(received.reshape(n_ranks, -1), home.reshape(n_ranks, -1), strict=True):
            kernels.reduce(
                parts, arrival.parts, arrival.dtype, shard, divisor=arrival.divisor, add=add, threads=threads
            )

    def _keep(self, work: LocalBucket, gradients: Mapping[int, Any]) -> None:
        """Keep first gradients where they are, unless more are to be added; sum further ones in fp32."""
        pieces = np.array([work.positions[param][0] for param in gradients])  # all of a parameter is this process's
        arrived = self._buckets.device.host_arrays([*gradients.values()]).begin_at(work.starts[pieces])
        held = work.gradients  # it stays alive until it has been read
        waits = held.addresses[pieces] != 0
        if work.home is None and not self._buckets.terms.sums and not waits.any():
            work.hold(pieces, arrived)
            return
        self._buckets.promote(work)
        home, threads = work.at_home().of(pieces), self._buckets.threads
        numels = work.numels[pieces]
        first = HostArrays(
            np.where(waits, held.addresses[pieces], arrived.addresses),
            np.where(waits, held.codes[pieces], arrived.codes),
            (),
        )
        for dtype, rows in first.by_type(first.addresses != home.addresses):
            spans = kernels.spans(first.addresses[rows], home.addresses[rows], numels[rows])
            kernels.cast(spans, dtype, FLOAT32, threads=threads)
        for dtype, rows in arrived.by_type(waits):
            spans = kernels.spans(arrived.addresses[rows], home.addresses[rows], numels[rows])
            kernels.accumulate(spans, dtype, threads=threads)
        work.hold(pieces, home)

    def _square(self, work: LocalBucket, total: SumOfSquares) -> None:
        with self._buckets.trace.span(REDUCTION, "norm", work.bucket.index):
            for dtype, pieces in work.held(work.counted):
                spans = kernels.spans(work.gradients.addresses[pieces], 0, work.numels[pieces])
                total.add(spans, dtype, threads=self._buckets.threads)

    def add_squares(self, total: SumOfSquares) -> None:
        """Add the squares of all gradients; those that were summed on arrival are not read again."""
        for work in self._buckets.all:
            if work.squares is None:
                self._square(work, total)
            else:
                total.bins += work.squares.bins
