"""A step's updates: one pass of the kernel over each bucket's shards, and the new parameters' way to the device."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..config.state_formats import Master
from ..device.events import Done, Event, Waiting
from ..device.trace import COMPUTE, UPDATE
from ..dtypes import BY_NUMPY, ElementType
from ..errors import StateError
from ..native import kernels
from ..ranks.consistency import combine
from ..rules import MASTER, Scalars
from ..support.threads import Task
from .bucket_states import Gradient, GradientEvent, Publication, PublicationEvent
from .buckets import LocalBuckets
from .decision import Decision
from .directions import Directions
from .local_bucket import LocalBucket, Writes


class _Ran(NamedTuple):
    """An update of one bucket that was started."""

    event: Event
    """The event after which its kernels have run."""
    out: Any
    """The memory of its new parameters (:meth:`Executor.output`)."""
    published: bool
    """True if its new parameters are published from ``out``."""


class Updates:
    """Runs the updates of each step, from their start until :meth:`finish`.

    Parameters may be sent before the step, as gradients arrive (:meth:`send_early`). The step then confirms them.
    """

    def __init__(self, buckets: LocalBuckets) -> None:
        self._buckets = buckets
        self._directions = Directions(buckets)
        self._travelling: deque[LocalBucket] = deque()
        """The buckets that were sent and for whose arrival no task waits yet, oldest first."""

    # --- the tasks of a step -------------------------------------------------------------------------

    def owe(self, buckets: Iterable[LocalBucket], decision: Decision) -> None:
        """Record that an update of these buckets' states is due."""
        for bucket in buckets:
            bucket.owe(decision.scalars, decision.tensors)

    def start(self, buckets: Sequence[LocalBucket], decision: Decision, after: Event) -> None:
        """Update the states of buckets and send their parameters, bucket after bucket.

        Args:
            after: a mark of the device. The device writes no parameter before the work before this mark has ended.
        """

        def update(bucket: LocalBucket) -> Event:
            ran = self._run(
                bucket, decision.scalars, bucket.writes, decision.tensors, after, then=following.get(bucket)
            )
            if bucket.changed is None:
                bucket.gradient.forget(GradientEvent.END)
            return self._publish(bucket, ran, decision.tensors, decision.present, after)

        following = dict(pairwise(buckets)) if self._buckets.worker.is_asynchronous else {}
        self._buckets.store.expect(bucket.layout.index for bucket in buckets)
        for bucket in buckets:
            bucket.gradient.on(GradientEvent.USE)
            bucket.publication.send(decision.present)
            if self._buckets.terms.direct:  # nothing is copied
                update(bucket)
                bucket.publication.on(PublicationEvent.ARRIVE)
            else:
                self._send(bucket, partial(update, bucket))
        self.land()

    def start_ahead(self, buckets: Sequence[LocalBucket], decision: Decision) -> None:
        """Update the states of buckets, and send no parameters. The parameters were sent early, or :meth:`publish`
        sends them later."""

        def update(bucket: LocalBucket) -> None:
            self._run(bucket, decision.scalars, Writes.STATES)
            bucket.finish_update()
            bucket.gradient.forget(GradientEvent.END)

        self._buckets.store.expect(bucket.layout.index for bucket in buckets)
        for bucket in buckets:
            bucket.gradient.on(GradientEvent.USE)
            if bucket.publication.state is Publication.EARLY:
                bucket.publication.confirm()
            else:
                bucket.publication.mark_stale(bucket.members.intersection(decision.present))
            bucket.give(task := self._buckets.worker.submit(partial(update, bucket)))
            bucket.updated = task

    def publish(
        self,
        buckets: Iterable[LocalBucket],
        tensors: Sequence[Any],
        after: Event,
        *,
        but: frozenset[int] = frozenset(),
    ) -> None:
        """Round the master weights of stale parameters, and send the rounded values.

        Args:
            tensors: the device parameters to write.
            after: a mark of the device. The device writes no parameter before the work before this mark has ended.
            but: parameters to leave out, because an update sends them.
        """
        for bucket in buckets:
            if stale := frozenset(bucket.publication.stale - but):
                bucket.publication.send(stale)
                self._send(bucket, partial(self._round_and_publish, bucket, stale, tensors, after))
        self.land()

    def send_early(
        self,
        bucket: LocalBucket,
        present: frozenset[int],
        scalars: Scalars | None,
        tensors: Sequence[Any],
        is_open: Callable[[], bool],
        *,
        keep_states: bool,
    ) -> None:
        """As soon as a bucket's gradients are on the host, send the bucket's new parameters or write them in place, if
        ``is_open()`` is true on all ranks at that moment. All ranks call this alike.

        Args:
            present: the parameters of the bucket that had a gradient on this rank.
            scalars: the kernel scalars; None: ``is_open()`` is false.
            tensors: the device parameters to write.
            keep_states: True to compute the parameters without a change of the states.
        """

        def start() -> Event:
            sent = self._all_ranks(is_open(), present, bucket)
            if not sent:
                if sent is not None:  # no rank has a gradient in this bucket: there is nothing to update or send
                    bucket.gradient.give_back()
                return Done()
            assert scalars is not None
            if not keep_states:
                bucket.gradient.on(GradientEvent.USE)
                bucket.owe(scalars, tensors, sent)
            bucket.publication.sent_early = sent
            bucket.publication.on(PublicationEvent.SEND_EARLY)
            after = Done()  # the gradients arrived after all earlier reads of these parameters
            ran = self._run(bucket, scalars, bucket.writes, tensors, after, among=sent, keep_states=keep_states)
            if not keep_states:
                bucket.finish_update()
                bucket.gradient.give_back()
            return self._publish(bucket, ran, tensors, sent, after)

        if not keep_states:
            self._buckets.store.expect([bucket.layout.index])
        bucket.give(self._send(bucket, start))

    def _all_ranks(self, send: bool, present: frozenset[int], bucket: LocalBucket) -> frozenset[int] | None:
        """Agree with all processes to send the bucket early, or not.

        Args:
            send: True if this process would send the bucket.
            present: the parameters of the bucket that had a gradient on this process.

        Returns:
            The parameters of the bucket that had a gradient on any process, if all processes would send the bucket.
            Else None.
        """
        if self._buckets.device.world_size == 1:
            return present if send else None
        what, members = f"bucket {bucket.layout.index}: sent early or not", sorted(bucket.members)
        flags = [param in present for param in members]
        known = combine(self._buckets.device.collectives, what, sums=flags, of_each=[send])
        if not known.of_each.all():
            return None
        return frozenset(param for param, n in zip(members, known.sums, strict=True) if n)

    # --- one bucket ----------------------------------------------------------------------------------

    def _run(
        self,
        bucket: LocalBucket,
        scalars: Scalars,
        writes: Writes,
        tensors: Sequence[Any] = (),
        after: Event | None = None,
        *,
        among: frozenset[int] | None = None,
        keep_states: bool = False,
        then: LocalBucket | None = None,
    ) -> "_Ran":
        """Update the bucket's pieces that have a gradient and scalars.

        The kernel always writes a parameter that is its own master weight, or the upper half of its master weight.

        Args:
            writes: the memory to which the kernel writes all other parameters.
            tensors: the device parameters. They may be left out if the kernel writes only states.
            after: a mark of the device, after which its parameters may be written; None: now.
            among: update only these parameters; None: all.
            keep_states: True to write parameters without a change of the states.
            then: the next bucket to update. The device computes with its matrices meanwhile.
        """
        store, executor = self._buckets.store, bucket.executor
        published = writes is Writes.STAGING
        out = executor.output(bucket, after or Done()) if published else None
        table = bucket.table
        rows = scalars.rows[table.params]
        chosen = bucket.chosen(scalars, among)
        directions = self._directions.of(bucket, scalars, among, then)
        updated = {*table.params[chosen].tolist()}
        states = store.read(bucket.layout.index) if keep_states else store.load(bucket.layout.index, updated)
        formats = {name: array.format.name for name, array in states.arrays.items()}
        formats.setdefault(MASTER, bucket.layout.dtype.name)
        param_dtype: ElementType | None
        match writes, bucket.master:
            case (Writes.STAGING, _) | (Writes.IN_PLACE, Master.SEPARATE):
                param_dtype = bucket.layout.dtype
            case _:  # only states, which may include a parameter
                param_dtype = None
        for dtype, pieces in bucket.gradient.held(chosen):
            segments = bucket.rule.segments(states.arrays, table.offsets[pieces], table.numels[pieces])
            segments["grad"] = bucket.gradient.arrays.addresses[pieces]
            segments["scalars"] = rows[pieces]
            segments["start"] = table.numbers[pieces]
            segments["seed"] = table.seeds[pieces]
            if directions is not None:
                segments["moments"][:, len(bucket.rule.states)] = directions[pieces]
            if bucket.master is Master.PARAMETER:
                segments["master"] = executor.in_place(bucket, pieces, tensors)
            if param_dtype is not None:
                segments["param"] = executor.addresses(bucket, pieces, tensors, out)
            with self._buckets.trace.span(UPDATE, "", bucket.layout.index):
                bucket.rule.update(
                    executor.memory,
                    segments,
                    scalars,
                    formats,
                    grad_dtype=dtype,
                    param_dtype=param_dtype,
                    keep_states=keep_states,
                )
            bucket.launched += executor.runs_later and not keep_states
        ran = _Ran(executor.end(bucket), out, published)
        bucket.release_direction()
        if not keep_states:
            store.commit(states)
            bucket.changed = ran.event
            if ran.event.done():
                bucket.finish_update()
        return ran

    def _publish(
        self, bucket: LocalBucket, ran: "_Ran", tensors: Sequence[Any], present: Iterable[int], after: Event
    ) -> Event:
        """Start to send the parameters that an update has written, and return the end of their way."""
        if not ran.published:
            return ran.event
        return bucket.executor.publish(bucket, ran.out, tensors, set(present), ran.event, after)

    def _round_and_publish(
        self, bucket: LocalBucket, stale: frozenset[int], tensors: Sequence[Any], after: Event
    ) -> Event:
        pieces = np.array([i for i, piece in enumerate(bucket.pieces) if piece.param in stale], np.int64)
        executor = bucket.executor
        states = self._buckets.store.read(bucket.layout.index)  # keeps the memory alive
        master = states.arrays[MASTER]
        published = bucket.writes is Writes.STAGING
        out = executor.output(bucket, after) if published else None
        to = executor.addresses(bucket, pieces, tensors, out)
        spans = kernels.spans(master.at.of(bucket.table.offsets[pieces]), to, bucket.table.numels[pieces])
        with self._buckets.trace.span(UPDATE, "round", bucket.layout.index):
            executor.memory.cast(spans, BY_NUMPY[master.format.stored], bucket.layout.dtype)
        return self._publish(bucket, _Ran(executor.end(bucket), out, published), tensors, stale, after)

    def _send(self, bucket: LocalBucket, start: Callable[[], Event]) -> Task[Event]:
        """Submit the task that updates and sends a bucket. At most ``worker.depth`` buckets are in flight, because
        there is staging memory for this number of buckets."""
        if len(self._travelling) == self._buckets.worker.depth:
            self._await_arrival()
        try:
            bucket.publication.written = self._buckets.worker.submit(start)
        finally:  # a task that fails at once counts as in flight, and lost
            self._travelling.append(bucket)
        return bucket.publication.written

    def land(self) -> None:
        """For each bucket in flight, submit the task that waits for its arrival."""
        for _ in range(len(self._travelling)):
            self._await_arrival()

    def _await_arrival(self) -> None:  # waits
        bucket = self._travelling[0]
        written = bucket.publication.written
        assert written is not None

        def arrived() -> None:
            written.result().wait()
            if bucket.changed is not None:
                bucket.finish_update()
                bucket.gradient.forget(GradientEvent.END)
            bucket.release()

        bucket.publication.arrived = self._buckets.worker.submit(arrived)
        self._travelling.popleft()  # last: a task that fails at once counts as in flight, and lost

    # --- waiting for the end ---------------------------------------------------------------------------

    def await_param(self, param: int, *, on_host: bool) -> None:  # waits
        """Make later device work of this thread wait for the parameter's update. If the update has failed, raise its
        error.

        Args:
            on_host: True to wait in this call until the parameter has been written.
        """
        for bucket in self._buckets.of[param]:
            written = bucket.publication.written
            if written is not None:
                with self._buckets.trace.span(COMPUTE, "wait", bucket.layout.index):
                    arrived = written.result()
                    if on_host:
                        arrived.wait()
                    else:
                        arrived.order()

    def update_of(self, param: int) -> Event:
        """Return the event at the end of all updates of a parameter that were started so far."""
        tasks = [bucket.publication.written for bucket in self._buckets.of[param]]
        written = [task for task in tasks if task is not None]

        def order() -> None:  # waits
            for start in written:
                start.result().order()

        return Waiting(order)

    @property
    def publishes(self) -> bool:
        """True if parameters may still be in flight."""
        return bool(self._travelling) or any(bucket.publication.arrived is not None for bucket in self._buckets.all)

    @property
    def finished(self) -> bool:
        """True if no parameter may be in flight, and no state may still change."""
        return not self.publishes and all(bucket.updated is None for bucket in self._buckets.all)

    def finish_publications(self) -> None:  # waits
        """Wait until all parameters in flight have arrived, and raise the error of a failed update or send."""
        self.land()
        for bucket in self._buckets.all:
            publication = bucket.publication
            if publication.arrived is not None:
                # The bucket's next gradients may already be in flight, so do not claim the bucket.
                self._buckets.wait(publication.arrived, bucket.layout.index)
                publication.arrive()
                publication.arrived = None  # last: after an interrupt, wait for the bucket again

    def finish_states(self) -> None:  # waits
        """Wait for all updates that send no parameters, and raise the error of a failed update."""
        for bucket in self._buckets.all:
            if (task := bucket.updated) is not None:
                self._buckets.wait(task, bucket.layout.index)
                if bucket.task is task:
                    bucket.take()
                bucket.updated = None

    def finish(self) -> None:  # waits
        """Wait for all updates and sends, and raise the first error."""
        self.finish_publications()
        self.finish_states()

    @property
    def broke_off(self) -> bool:
        """True if a task that somebody has yet to wait for has failed. If False, an interrupted wait can be
        repeated."""
        asked = [task for bucket in self._buckets.all for task in (bucket.publication.arrived, bucket.updated) if task]
        return any(task.done() and task.exception() is not None for task in asked)

    def complete(self) -> list[LocalBucket]:
        """After a failed send, complete the step's updates of states. Return the buckets that were updated here.

        If this raises, the bucket whose update failed and all later buckets keep the states of the step before.

        Raises:
            StateError: ranks would have to exchange matrices again, and the other processes will not do that.
            Exception: the error of an update.
        """
        owing = [bucket for bucket in self._buckets.all if not self._has_updated(bucket)]
        device = self._buckets.device
        among_ranks, among_processes = device.world_size > len(device.ranks), device.collectives.world_size > 1
        exchanged = [b for b in owing if among_ranks or (among_processes and b.layout.together is not None)]
        if any(bucket.matrices is not None and bucket.direction is None for bucket in exchanged):
            for bucket in owing:
                bucket.release_direction()
            raise StateError("other ranks do not come to exchange its matrices again")
        for bucket in owing:
            assert bucket.owed is not None
            scalars, tensors, among = bucket.owed
            if bucket.gradient.state is not Gradient.USED:
                bucket.gradient.on(GradientEvent.USE)
            writes = bucket.writes if bucket.writes is Writes.IN_PLACE else Writes.STATES
            self._run(bucket, scalars, writes, tensors, among=among)
            bucket.finish_update()
        return owing

    def _has_updated(self, bucket: LocalBucket) -> bool:  # waits
        """True if no update of the bucket's states is due, or the one that was started has run.

        Raises:
            StateError: a part of the update may have been made, and must not be made again.
        """
        if bucket.owed is None:
            return True
        if bucket.changed is not None:
            with suppress(Exception):  # a kernel that did not run: the update starts again
                bucket.finish_update()
                return True
        if bucket.launched > (bucket.changed is not None):
            raise StateError(f"bucket {bucket.layout.index}: only a part of its update may have been made")
        return False

    def forget(self) -> set[LocalBucket]:
        """After a failure, forget all tasks in flight. Return the buckets whose parameters may not have been
        written."""
        arrivals = [(bucket, bucket.publication.arrived) for bucket in self._buckets.all]
        lost = {bucket for bucket, arrived in arrivals if arrived is not None and arrived.exception() is not None}
        lost.update(self._travelling)
        self._travelling.clear()
        for bucket in self._buckets.all:
            bucket.publication.arrived = bucket.updated = None
        return lost
