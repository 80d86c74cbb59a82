"""A step's updates: one C pass over each bucket's shards, and the new parameters on their way to the device."""

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from . import _kernels
from .buckets import LocalBuckets
from .cpu_adam import AdamHyper
from .device import Done, Event, Waiting
from .dtypes import FLOAT32
from .host_memory import Lease
from .local_bucket import LocalBucket
from .step_state import BucketEvent
from .trace import COMPUTE, UPDATE


class Scalars:
    """The kernel scalars of one step: a row for each distinct (group, update number).

    Args:
        hypers: one for each parameter group.
        groups: the group of each parameter.
        steps: the number of this update, counted from 1, of each parameter that has a gradient.
    """

    def __init__(
        self,
        hypers: Sequence[AdamHyper],
        groups: Sequence[int],
        steps: Mapping[int, int],
        *,
        op_order: str,
        grad_scale: float,
    ) -> None:
        rows: dict[tuple[int, int], int] = {}
        values: list[tuple[float, ...]] = []
        self._row_of: dict[int, int] = {}
        for param, step in steps.items():
            group = groups[param]
            key = (group, step)
            if key not in rows:
                rows[key] = len(values)
                values.append(hypers[group].scalars(step, op_order=op_order, grad_scale=grad_scale))
            self._row_of[param] = rows[key]
        self.table = np.array(values, dtype=_kernels.SCALARS)

    def row(self, param: int) -> int:
        """The row of ``table`` that is this parameter's."""
        return self._row_of[param]


class Updates:
    """The updates of one step, from their start until :meth:`finish`.

    Parameters may be sent before the step, as gradients arrive (:meth:`emit`): its end then finds them where they are
    read, or on their way.
    """

    def __init__(self, buckets: LocalBuckets, op_order: str) -> None:
        self._buckets = buckets
        self._op_order = op_order
        self.emits: Callable[[], bool] = lambda: False
        """Whether buckets whose gradients have arrived are still emitted; those that are not wait for the step."""
        self._travelling: deque[tuple[LocalBucket, Callable[[LocalBucket], None]]] = deque()
        """Buckets that were sent and that nobody waits for yet, oldest first, and what is done when they arrive."""
        self._publishing: list[tuple[LocalBucket, Future[None]]] = []
        """Buckets whose publication was asked for and not yet seen to have ended, and the end of it."""
        self._advancing: list[LocalBucket] = []
        """Likewise those that are updated and not published."""

    def emit(self, work: LocalBucket, scalars: Scalars | None, tensors: Sequence[Any], *, tentatively: bool) -> None:
        """Send a bucket's new parameters as soon as its gradients are on the host, where ``emits`` holds until then.

        Among ranks all call it alike, and nothing is done unless all would.

        Args:
            scalars: None where this rank would not.
            tentatively: leave the states as they are.
        """

        def start() -> Event:
            if not self._all_ranks(scalars is not None and self.emits(), work):
                return Done()
            assert scalars is not None
            work.life.on(BucketEvent.EMIT if tentatively else BucketEvent.UPDATE)
            out = self._borrow(work)
            self._run_adam(work, scalars, work.members, None, out, keep_states=tentatively)
            if not tentatively:
                work.life.on(BucketEvent.UPDATED)
            after = Done()  # the gradients came after all that had been launched before them
            return self._buckets.device.publish(work.bucket, out, tensors, set(work.members), self._lease(work), after)

        work.task = self._send(work, start, lambda work: None)

    def _all_ranks(self, emit: bool, work: LocalBucket) -> bool:
        """Whether this process and all others would emit the bucket."""
        collectives = self._buckets.device.collectives
        if self._buckets.device.world_size == 1:
            return emit
        flags = np.array([emit], np.int64)
        collectives.sum_integers(flags, f"bucket {work.bucket.index}: whether it is emitted")
        return int(flags[0]) == collectives.world_size

    def start(self, works: Sequence[LocalBucket], scalars: Scalars, tensors: Sequence[Any], present: set[int]) -> None:
        """One C pass over the process's shards, and the parameters to where they are read, bucket after bucket."""

        def update(work: LocalBucket, after: Event) -> Event:
            work.life.on(BucketEvent.UPDATE)
            if self._buckets.written_by_kernel(work):
                self._run_adam(work, scalars, present, tensors, None)
                work.life.on(BucketEvent.PUBLISH)
                return Done()
            out = self._borrow(work)
            self._run_adam(work, scalars, present, tensors, out)
            work.life.on(BucketEvent.PUBLISH)
            return self._buckets.device.publish(work.bucket, out, tensors, present, self._lease(work), after)

        def end(work: LocalBucket) -> None:
            work.clear()
            work.life.on(BucketEvent.PUBLISHED)

        self._travel(works, update, end)

    def start_ahead(self, works: Sequence[LocalBucket], scalars: Scalars, present: set[int], *, emitted: bool) -> None:
        """Update states; the parameters were emitted, or follow with :meth:`publish`."""

        def update(work: LocalBucket) -> None:
            self._run_adam(work, scalars, present, None, None)
            if not emitted:
                work.behind |= work.members.intersection(present)
            work.life.on(BucketEvent.UPDATED)
            work.clear()
            work.life.on(BucketEvent.END)

        self._advancing += works
        for work in works:
            work.life.on(BucketEvent.UPDATE)
            work.task = self._buckets.tasks.submit(partial(update, work))

    def publish(self, works: Iterable[LocalBucket], tensors: Sequence[Any]) -> None:
        """Bring master weights that are ahead to the parameters."""

        def start(work: LocalBucket, after: Event) -> Event:
            return self._round_and_publish(work, tensors, after)

        self._travel([work for work in works if work.behind], start, lambda work: None)

    def _round_and_publish(self, work: LocalBucket, tensors: Sequence[Any], after: Event) -> Event:
        behind, work.behind = work.behind, set()
        pieces = [(i, piece) for i, piece in enumerate(work.pieces) if piece.param in behind]
        out = None if self._buckets.written_by_kernel(work) else self._borrow(work)
        rows = []
        for i, piece in pieces:
            if out is None:
                address = self._buckets.in_place(work, piece, tensors).address
            else:
                address = _kernels.address(out) + piece.offset * out.itemsize
            rows.append((int(work.segments["master"][i]), address, piece.numel))
        threads = self._buckets.threads
        with self._buckets.trace.span(UPDATE, "round", work.bucket.index):
            _kernels.cast(_kernels.spans_of(rows), FLOAT32, work.bucket.dtype, threads=threads)
        if out is None:
            return Done()
        return self._buckets.device.publish(work.bucket, out, tensors, behind, self._lease(work), after)

    def _travel(
        self,
        works: Iterable[LocalBucket],
        start: Callable[[LocalBucket, Event], Event],
        end: Callable[[LocalBucket], None],
    ) -> None:
        """While one bucket's parameters travel, start with the next."""
        after = self._buckets.device.mark()
        for work in works:
            self._send(work, partial(start, work, after), end)
        self.land()

    def _send(
        self, work: LocalBucket, start: Callable[[], Event], end: Callable[[LocalBucket], None]
    ) -> "Future[Event]":
        """Have a bucket's parameters sent when there is staging for them."""
        if len(self._travelling) == self._buckets.tasks.depth:
            self._await_publication(*self._travelling.popleft())
        work.written = self._buckets.tasks.submit(start)
        self._travelling.append((work, end))
        return work.written

    def land(self) -> None:
        """Have all that was sent waited for."""
        while self._travelling:
            self._await_publication(*self._travelling.popleft())

    def _await_publication(self, work: LocalBucket, end: Callable[[LocalBucket], None]) -> None:
        written = work.written
        assert written is not None

        def arrived() -> None:
            written.result().wait()
            work.release()
            end(work)

        self._publishing.append((work, self._buckets.tasks.submit(arrived)))

    def _borrow(self, work: LocalBucket) -> np.ndarray:
        """Staging for the process's shards of a bucket."""
        assert self._buckets.staging is not None
        work.lease = self._buckets.staging.lease()
        numel = len(self._buckets.device.ranks) * work.bucket.shard_numel
        return work.lease.borrow(numel, work.bucket.dtype.numpy)

    def _lease(self, work: LocalBucket) -> Lease:
        assert work.lease is not None
        return work.lease

    def await_param(self, param: int) -> None:
        """See to it that what this thread asks of the device from now on reads the parameter as updated.

        Raises what went wrong in the updates.
        """
        for work in self._buckets.of[param]:
            if work.written is not None:
                with self._buckets.trace.span(COMPUTE, "wait", work.bucket.index):
                    work.written.result().order()

    def update_of(self, param: int) -> Event:
        """The end of the parameter's update, as far as it has been asked for."""
        written = [work.written for work in self._buckets.of[param] if work.written is not None]

        def order() -> None:
            for start in written:
                start.result().order()

        return Waiting(order)

    def _run_adam(
        self,
        work: LocalBucket,
        scalars: Scalars,
        present: Container[int],
        tensors: Sequence[Any] | None,
        out: np.ndarray | None,
        *,
        keep_states: bool = False,
    ) -> None:
        """Run the kernel on the pieces that have a gradient.

        Parameters are written to ``out``, or where it is None to ``tensors``, or where that is None too nowhere; those
        that are their own master weights are written as such in any case.
        """
        if not keep_states:
            self._buckets.before_change(work.members)
        in_place = self._buckets.without_master(work.bucket)
        for dtype, held in work.held().items():
            indices = [i for i, _ in held if work.pieces[i].param in present]
            pieces = [work.pieces[i] for i in indices]
            segments = work.segments[indices]
            segments["grad"] = [gradient.address for i, gradient in held if work.pieces[i].param in present]
            segments["scalars"] = [scalars.row(piece.param) for piece in pieces]
            if tensors is not None and (in_place or out is None):
                arrays = [self._buckets.in_place(work, piece, tensors) for piece in pieces]
                segments["master" if in_place else "param"] = [array.address for array in arrays]
            if out is not None:
                segments["param"] = [_kernels.address(out) + piece.offset * out.itemsize for piece in pieces]
            rounds = out is not None or (tensors is not None and not in_place)
            with self._buckets.trace.span(UPDATE, "", work.bucket.index):
                _kernels.adam(
                    segments,
                    scalars.table,
                    grad_dtype=dtype,
                    param_dtype=work.bucket.dtype if rounds else None,
                    op_order=self._op_order,
                    adam_mode=self._buckets.config.adam_mode,
                    threads=self._buckets.threads,
                    keep_states=keep_states,
                )

    @property
    def finished(self) -> bool:
        """Whether nothing may still be on its way."""
        return not self._travelling and not self._publishing and not self._advancing

    def finish_publications(self) -> None:
        """Wait until parameters have been written; raise what went wrong."""
        self.land()
        for work, arrived in self._publishing:  # the bucket itself may be on its way to the next update
            self._buckets.wait(arrived, work)
            work.written = None
        self._publishing = []

    def finish(self) -> None:
        """Wait until all has ended; raise what went wrong."""
        self.finish_publications()
        self.finish_states()

    def finish_states(self) -> None:
        """Wait until what has no parameters to send has ended; raise what went wrong."""
        advancing, self._advancing = self._advancing, []
        for work in advancing:
            self._buckets.claim(work)

    def forget(self) -> set[LocalBucket]:
        """After a failure: nothing is on its way any more. The buckets whose parameters may not have been written."""
        lost = {work for work, arrived in self._publishing if arrived.exception() is not None}
        lost.update(work for work, _ in self._travelling)
        self._travelling.clear()
        self._publishing, self._advancing = [], []
        return lost
