"""The gradients that came since the last update, and the order in which their buckets are launched.

[Note: rounds] In a round every bucket is launched once. A micro-step is one round, or several where a parameter has
another gradient after its bucket was launched. Among ranks each backward of an engine is a separate round, unless
parameters are sent early: only some ranks may know which parameters had a gradient in the backward before.

========  ============================================================================================================
state     meaning for one parameter in one round
========  ============================================================================================================
open      a gradient of the parameter may come
deferred  a gradient came, and waits until all ranks are told that the parameter is finalized
closed    a gradient came, or the parameter was finalized without a gradient, or the parameter's bucket was launched:
          the parameter's next gradient belongs to the next round
========  ============================================================================================================
"""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..device.protocols import HostArrays
from .bucket_states import Gradient, GradientEvent
from .buckets import LocalBuckets
from .local_bucket import LocalBucket

UNUSED = frozenset({Gradient.FILLING, Gradient.TRAVELLING, Gradient.LANDED})
"""The states of a bucket whose gradients no update has used."""


@dataclass
class _Round:
    """One round, as [Note: rounds] describes it."""

    filled: list[LocalBucket] = field(default_factory=list)
    """The buckets that became full in this round, in the order in which they filled."""
    next: int = 0
    """The index of the next bucket to launch: in ``Arrivals.order`` among ranks, in ``filled`` on a single rank."""
    closed: set[int] = field(default_factory=set)
    """The closed parameters."""


@dataclass
class SinceUpdate:
    """The gradients that came since the last update."""

    present: set[int] = field(default_factory=set)
    """Parameters that had a gradient on this rank."""
    begun: bool = False
    """True if a gradient came or a bucket was launched. It stays true if gradients are dropped later."""
    backward: bool = False
    """True if all ranks had a backward in this micro-step. This rank may have no gradient."""
    micro_steps: int = 0
    """The number of micro-steps that have ended."""
    counts_as: int = 1
    """The number of micro-steps that the present one counts as: more than one if its gradients are sums."""
    round: _Round | None = field(default_factory=_Round)
    """The present round; None: the last round has ended and no gradient came since."""
    deferred: dict[int, Any] = field(default_factory=dict)
    """The gradients that wait until their parameter is finalized, by parameter."""


class Arrivals:
    """The gradients of one process since the last update, in rounds.

    All ranks launch buckets in one order: the order in which the buckets filled on rank 0 in the step before.

    [Note: finalized parameters] A rank that launches a bucket waits for the other ranks. So a bucket must become full
    at the same point of backward on all ranks. For some parameters, only some ranks have a gradient, or some ranks have
    it earlier. Such a gradient must not make its bucket full, so it is deferred until all ranks are told that its
    parameter is finalized. If a gradient comes after its parameter was finalized, it belongs to a second round at the
    end of the backward. All ranks have such a gradient, or none has. From then on the parameter is a straggler: it is
    finalized at the end of each backward, and its bucket is launched there.
    """

    def __init__(self, buckets: LocalBuckets) -> None:
        self._buckets = buckets
        self.per_update = buckets.config.gradient_accumulation_steps
        """The number of micro-steps for each update."""
        self.order: list[LocalBucket] = []
        """The buckets in the order in which all ranks launch them."""
        self.since = SinceUpdate()
        """The gradients since the last update. An update replaces the whole object, so that an interrupt leaves either
        the old or the new one."""
        self._filled_before: list[LocalBucket] = []
        """The buckets that became full in the round before, in the order in which they filled."""
        self._deferring: set[int] = set()
        """The parameters whose gradients are deferred until the parameter is finalized ([Note: finalized
        parameters])."""
        self._stragglers: set[int] = set()
        """The parameters that are finalized only at the end of a backward."""

    # --- the order -----------------------------------------------------------------------------------

    def register(self, buckets: Sequence[LocalBucket]) -> None:
        """Add new buckets, to be launched after the present ones."""
        self.order = [*self.order, *buckets]
        self._deferring.update(i for i, spec in enumerate(self._buckets.params) if spec.finalized_with is not None)

    def defer_gradients_of(self, params: Collection[int]) -> None:
        """From now on, defer the gradients of ``params``, and no other gradients, until their parameter is finalized
        ([Note: finalized parameters]). No gradient may have come since the last update."""
        self._deferring = set(params)

    def order_of_arrival(self) -> list[LocalBucket]:
        """Return the buckets in the order in which they filled in the last round, then all other buckets."""
        filled = set(self._filled_before)
        return [*self._filled_before, *(bucket for bucket in self.order if bucket not in filled)]

    # --- gradients -----------------------------------------------------------------------------------

    @property
    def holds_gradients(self) -> bool:
        """True if gradients came since the last update, here or on another rank."""
        return self.since.backward or self.has_begun

    @property
    def has_begun(self) -> bool:
        """True if, since the last update, a gradient came on this rank or a bucket was launched."""
        return self.since.begun or any(bucket.gradient.state in UNUSED for bucket in self.order)

    @property
    def at_boundary(self) -> bool:
        """True if an update is due at the end of this micro-step."""
        return self.since.micro_steps + self.since.counts_as >= self.per_update

    def divisor(self, *, average: bool = True) -> float:
        """Return the number by which an update divides the gradients that it reads, besides the loss scale. These
        gradients are already averaged over the ranks.

        Args:
            average: True to average over the micro-steps. False to sum over the micro-steps.
        """
        steps = float(self.per_update) if average else 1.0
        return steps if self._buckets.config.average_over_ranks else steps / self._buckets.device.world_size

    def has_left(self, params: Set[int]) -> bool:
        """True if one of these parameters is closed in the present round (see the module's table)."""
        round = self.since.round
        return round is not None and not round.closed.isdisjoint(params)

    def fill(self, gradients: Mapping[int, Any], without: Set[int] = frozenset()) -> bool:
        """Put gradients into their parameters' buckets. Return True if this made a bucket full. :meth:`ready` may then
        yield the bucket.

        Args:
            gradients: device gradients, by parameter.
            without: parameters that are finalized without a gradient.
        """
        since, full = self.since, False
        if since.round is None:
            since.round = _Round()
        if without:
            since.round.closed |= without
            since.begun = True
        params = gradients.keys() | without if without else gradients
        for bucket in self._buckets.of[next(iter(params))] if len(params) == 1 else self._buckets.all:
            mine = bucket.members.intersection(gradients)
            if mine:
                if bucket.task is not None:
                    self._buckets.claim(bucket)
                bucket.gradient.on(GradientEvent.ADD)
                since.begun = True
                all_mine = len(mine) == len(gradients)
                bucket.gradient.waiting |= gradients if all_mine else {param: gradients[param] for param in mine}
                since.round.closed |= mine
            elif bucket.members.isdisjoint(without):
                continue
            if self._is_full(bucket, since.round):
                since.round.filled.append(bucket)
                full = True
        since.present.update(gradients)
        return full

    def _is_full(self, bucket: LocalBucket, round: _Round) -> bool:
        """True if the bucket gets no further gradient in ``round``. The bucket was not launched in this round."""
        return len(bucket.gradient.waiting) == len(bucket.members) or bucket.members <= round.closed

    # --- parameters that are finalized -----------------------------------------------------------------

    def defer(self, gradients: Mapping[int, Any]) -> Mapping[int, Any]:
        """Store the gradients that must wait until their parameter is finalized. Return all other gradients. The caller
        passes these to :meth:`fill`."""
        if not self._deferring or self._deferring.isdisjoint(gradients):
            return gradients
        mine = {param: gradient for param, gradient in gradients.items() if param in self._deferring}
        since = self.since
        since.begun = True
        since.round = since.round or _Round()
        since.deferred |= mine
        since.present.update(mine)
        return {param: gradient for param, gradient in gradients.items() if param not in mine}

    def not_deferring(self, params: Set[int]) -> Set[int]:
        """Return the parameters among ``params`` whose gradients are not deferred."""
        return params - self._deferring

    def stragglers(self, params: Collection[int]) -> Set[int]:
        """Return the parameters among ``params`` that are finalized only at the end of a backward."""
        return self._stragglers.intersection(params)

    def finalized(self, params: Collection[int]) -> tuple[dict[int, Any], set[int]]:
        """Pop the deferred gradients of these parameters, which are finalized now.

        Returns:
            The popped gradients, by parameter; and the parameters among ``params`` whose gradients would be deferred
            but did not come.
        """
        mine, deferred = self._deferring.intersection(params), self.since.deferred
        given = {param: deferred.pop(param) for param in mine.intersection(deferred)}
        return given, mine.difference(given)

    def take_deferred(self, params: Collection[int] | None = None) -> dict[int, Any]:
        """Pop deferred gradients whose parameter was not finalized. If a popped gradient's parameter is already closed
        in the present round, the parameter is a straggler from now on.

        Args:
            params: pop only gradients of these parameters; None: of all parameters.
        """
        deferred = self.since.deferred
        chosen = set(deferred) if params is None else deferred.keys() & params
        given = {param: deferred.pop(param) for param in chosen}
        self._stragglers.update(param for param in given if self.has_left({param}))
        return given

    def ready(self, *, ending: bool = False) -> Iterator[LocalBucket]:
        """Yield the buckets to launch now, in the order of launching. The caller launches each bucket before it takes
        the next.

        Args:
            ending: True at the end of the micro-step: yield every bucket that was not launched, full or not.
        """
        since = self.since
        if since.round is None:
            if not ending:
                return
            since.round = _Round()
        round, is_alone = since.round, self._buckets.device.world_size == 1
        if not is_alone:
            turns = self.order[round.next :]
        else:
            turns = self.order if ending else round.filled[round.next :]
            round.next = len(round.filled)
        for bucket in turns:
            if is_alone:
                if bucket.gradient.state is not Gradient.FILLING:
                    continue
            elif ending or self._is_full(bucket, round):
                round.next += 1
            else:  # a bucket is launched once it is full and all earlier buckets were launched, as on the other ranks
                return
            round.closed |= bucket.members
            since.begun = True
            yield bucket

    def end_backward(self, *, has_round: bool) -> None:
        """Record that all ranks have ended a backward.

        Args:
            has_round: True if this backward is a separate round. Ranks without a gradient then also have a round.
        """
        if has_round:
            self.since.round = self.since.round or _Round()
        self.since.backward = True

    def end_round(self) -> None:
        """End the round, in which every bucket was launched."""
        if self.since.round is not None:
            self._filled_before = self.since.round.filled
            self.since.round = None

    def count_micro_step(self, *, boundary: bool) -> None:
        """Count a micro-step that has ended.

        Args:
            boundary: True if an update follows, so that the count begins again at 0.
        """
        self.since.micro_steps = 0 if boundary else self.since.micro_steps + self.since.counts_as
        self.since.counts_as = 1
        self.since.backward = False

    def where(self) -> str:
        """Return a line that says how many micro-steps the next update has had, for a user who waits."""
        since = self.since
        steps = f"micro-steps since the last update: {since.micro_steps} of {self.per_update}"
        return f"{steps}, and gradients of {len(since.present)} parameters"

    def begin(self, order: Sequence[LocalBucket] | None = None) -> None:
        """Begin the next step: reset :attr:`since`.

        Args:
            order: the order in which all ranks launch buckets from now on; None: keep the order.
        """
        self.since = SinceUpdate()
        if order is not None:
            self.order = list(order)
        self._buckets.in_staging.clear()

    # --- forgetting ----------------------------------------------------------------------------------

    def drop_all(self, order: Sequence[LocalBucket] | None = None) -> None:
        """Discard all gradients that no update has used, also gradients that were lost in flight. Begin the next step
        with this ``order`` (:meth:`begin`)."""
        unused = [bucket for bucket in self._buckets.all if bucket.gradient.state is not Gradient.USED]
        for bucket in unused:
            try:
                self._buckets.claim(bucket)
            except Exception:
                continue
        self.begin(order)
        for bucket in unused:
            bucket.gradient.forget(GradientEvent.DROP)

    def drop(self, params: Sequence[int]) -> None:
        """Discard the gradients of these parameters. If a task of one of their buckets has failed, raise its error, and
        discard nothing."""
        # A gradient that only other ranks had is theirs to discard.
        params = [param for param in params if param in self.since.present]
        touched = dict.fromkeys(bucket for param in params for bucket in self._buckets.of[param])
        for bucket in touched:
            self._buckets.claim(bucket)
        self.since.present.difference_update(params)
        round = self.since.round
        for param in params:
            self.since.deferred.pop(param, None)
        for bucket in touched:
            gradient, dropped = bucket.gradient, bucket.members.intersection(params)
            if round is not None and gradient.state is Gradient.FILLING:  # it was not launched
                round.closed -= dropped
            for param in dropped:
                gradient.waiting.pop(param, None)
            pieces = np.array([i for param in dropped for i in bucket.table.positions.get(param, ())], np.int64)
            if gradient.buffer is not None:
                for i in pieces.tolist():
                    bucket.executor.clear_gradient(bucket, i)  # later gradients are added to it
            gradient.hold(pieces, HostArrays.none(len(pieces)))
            gradient.squares = None
        for bucket in touched:
            if not bucket.gradient.waiting and not bucket.gradient.has_landed:
                bucket.gradient.forget(GradientEvent.DROP)
