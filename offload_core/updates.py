"""A step's updates: one C pass over each bucket's shards, and the new parameters on their way to the device."""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from . import _kernels
from .buckets import LocalBuckets
from .cpu_adam import AdamHyper
from .device import Done, Event
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
    """The updates of one step, from their start until :meth:`finish`."""

    def __init__(self, buckets: LocalBuckets, op_order: str) -> None:
        self._buckets = buckets
        self._op_order = op_order
        self._updating: Sequence[LocalBucket] = ()
        """Buckets whose update was asked for and not yet seen to have ended."""

    def start(self, works: Sequence[LocalBucket], scalars: Scalars, tensors: Sequence[Any], present: set[int]) -> None:
        """One C pass over the process's shards, and the parameters to where they are read, bucket after bucket.

        While one bucket's parameters travel the next is updated.
        """
        self._updating = works
        after = self._buckets.device.mark()
        travelling: deque[LocalBucket] = deque()
        for work in works:
            if len(travelling) == self._buckets.tasks.depth:
                self._await_publication(travelling.popleft())
            work.written = self._buckets.tasks.submit(
                partial(self._update_bucket, work, scalars, tensors, present, after)
            )
            work.task = work.written
            travelling.append(work)
        for work in travelling:
            self._await_publication(work)

    def _update_bucket(
        self, work: LocalBucket, scalars: Scalars, tensors: Sequence[Any], present: set[int], after: Event
    ) -> Event:
        work.life.on(BucketEvent.UPDATE)
        if self._buckets.direct:
            with self._buckets.trace.span(UPDATE, "", work.bucket.index):
                self._run_adam(work, scalars, tensors, None, present)
            work.life.on(BucketEvent.PUBLISH)
            return Done()
        assert self._buckets.staging is not None
        work.lease = self._buckets.staging.lease()
        out = work.lease.borrow(len(self._buckets.device.ranks) * work.bucket.shard_numel, work.bucket.dtype.numpy)
        with self._buckets.trace.span(UPDATE, "", work.bucket.index):
            self._run_adam(work, scalars, tensors, out, present)
        work.life.on(BucketEvent.PUBLISH)
        return self._buckets.device.publish(work.bucket, out, tensors, present, work.lease, after)

    def _await_publication(self, work: LocalBucket) -> None:
        written = work.written
        assert written is not None

        def end() -> None:
            written.result().wait()
            work.release()
            work.clear()
            work.life.on(BucketEvent.PUBLISHED)

        work.task = self._buckets.tasks.submit(end)

    def await_param(self, param: int) -> None:
        """See to it that what this thread asks of the device from now on reads the parameter as updated.

        Raises what went wrong in the updates.
        """
        for work in self._buckets.of[param]:
            if work.written is not None:
                with self._buckets.trace.span(COMPUTE, "wait", work.bucket.index):
                    work.written.result().order()

    def _run_adam(
        self,
        work: LocalBucket,
        scalars: Scalars,
        tensors: Sequence[Any],
        out: np.ndarray | None,
        present: set[int],
    ) -> None:
        """Run the kernel on the pieces that have a gradient.

        Parameters are written to ``out``, or where it is None to the tensors themselves; those that are their own
        master weights are written as such in any case.
        """
        in_place = self._buckets.without_master(work.bucket)
        for dtype, held in work.held().items():
            indices = [i for i, _ in held if work.pieces[i].param in present]
            pieces = [work.pieces[i] for i in indices]
            segments = work.segments[indices]
            segments["grad"] = [gradient.address for i, gradient in held if work.pieces[i].param in present]
            segments["scalars"] = [scalars.row(piece.param) for piece in pieces]
            if in_place or out is None:
                arrays = [self._buckets.device.host_array(tensors[p.param]).run(p.start, p.numel) for p in pieces]
                segments["master" if in_place else "param"] = [array.address for array in arrays]
            if out is not None:
                segments["param"] = [_kernels.address(out) + piece.offset * out.itemsize for piece in pieces]
            _kernels.adam(
                segments,
                scalars.table,
                grad_dtype=dtype,
                param_dtype=None if in_place and out is None else work.bucket.dtype,
                op_order=self._op_order,
                adam_mode=self._buckets.config.adam_mode,
                threads=self._buckets.threads,
            )

    @property
    def finished(self) -> bool:
        """Whether nothing may still be on its way."""
        return not self._updating

    def finish(self) -> None:
        """Wait until all has ended; raise what went wrong."""
        updating, self._updating = self._updating, ()
        for work in updating:
            self._buckets.claim(work)
            work.written = None

    def forget(self) -> None:
        """Nothing is on its way."""
        self._updating = ()
