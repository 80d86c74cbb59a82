"""Reads and writes gradients between a backward and its update, for programs that log, clip or project gradients.

This module imports the pipeline, and the pipeline does not import this module. Callers read and write the gradient that
the update would use before clipping: the mean over ranks, without the loss scale. The host has gradients with the loss
scale, so a read returns ``gradient / (divisor * loss scale)``, and a write stores ``values * (divisor * loss scale)``,
both in fp32.
"""

from functools import partial

import numpy as np

from ..errors import StateError
from ..ranks.collectives import merge
from ..ranks.consistency import combine
from .local_bucket import LocalBucket
from .pipeline import Pipeline


class GradientAccess:
    """Reads and writes the gradients of one process's shards, as an update would use them now.

    Parameters are numbered as in the pipeline, and their elements are in the pipeline's order. A method that returns or
    replaces a gradient first reduces all gradients that came so far (:meth:`Gradients.reduce_now`). So all ranks call
    such a method alike.

    The argument ``divisor`` is the divisor of the summed gradients besides the loss scale, as in ``StepArguments``.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._buckets = pipeline.buckets

    def has(self, param: int) -> bool:
        """True if the parameter has had a gradient since the last update, on any rank.

        Raises:
            StateError: ``update_in_backward`` has updated states with gradients.
        """
        pipeline, device = self._pipeline, self._pipeline.device
        if not pipeline.gradients.are_waiting:
            return False
        pipeline.gradients.reduce_now()
        mine = pipeline.gradients.have(param)
        if device.world_size == 1:
            return mine
        what = f"parameter {pipeline.params[param].name}: has a gradient"
        known = self._buckets.run(partial(combine, device.collectives, what, sums=[mine]))
        return bool(known.sums[0])

    def own(self, param: int, *, divisor: float = 1.0) -> list[tuple[int, np.ndarray]] | None:
        """Return a copy of this process's pieces of the gradient, ascending: ``(start, fp32 values)`` for each piece.
        None: no rank has had a gradient of the parameter since the last update."""
        return self._own(param, divisor) if self.has(param) else None

    def whole(self, param: int, *, divisor: float = 1.0) -> np.ndarray | None:
        """Return a copy of the whole gradient, gathered from all ranks: fp32, one-dimensional. None: no rank has had a
        gradient of the parameter since the last update."""
        if not self.has(param):
            return None
        spec, device = self._pipeline.params[param], self._pipeline.device
        words = np.zeros(-(-spec.numel // 2), np.int64)  # ranks add bits, and all but one add zeros
        whole = words.view(np.float32)[: spec.numel]
        for start, values in self._own(param, divisor):
            whole[start : start + values.size] = values
        if device.world_size > 1:
            self._buckets.run(lambda: merge(device.collectives.sum_integers, words, f"gradient of {spec.name}"))
        return whole

    def load(self, param: int, values: np.ndarray, *, divisor: float = 1.0) -> None:
        """Overwrite this process's pieces of a gradient with the elements of ``values`` at the same indices.

        The caller's own gradient tensor does not change. The norm, clipping and the search for an inf or a NaN use the
        new values. A gradient that comes before the update is added to the new values.

        Args:
            values: the whole gradient, fp32 and one-dimensional.

        Raises:
            StateError: no rank has had a gradient of the parameter since the last update.
        """
        if not self.has(param):
            raise StateError(
                f"parameter {self._pipeline.params[param].name!r}: its gradient is to be overwritten, and no rank has "
                "had one since the last update; expected a backward() that reaches the parameter before"
            )
        for bucket, i in self._buckets.pieces_of(param):
            self._claim(bucket)
            piece = bucket.pieces[i]
            bucket.gradient.squares = None
            with np.errstate(over="ignore", invalid="ignore"):  # an inf or a NaN is found by the step
                scaled = np.multiply(values[piece.start : piece.stop], np.float32(self._unscale(divisor)))
            bucket.executor.write_gradient(bucket, i, scaled)

    def _own(self, param: int, divisor: float) -> list[tuple[int, np.ndarray]]:
        found, factor = [], np.float32(1.0 / self._unscale(divisor))  # of the kernel's scalars, without clipping
        for bucket, i in self._buckets.pieces_of(param):
            self._claim(bucket)
            piece, values = bucket.pieces[i], bucket.executor.read_gradient(bucket, i)
            if values is None:  # other ranks have it, and this one adds nothing
                values = np.zeros(piece.numel, np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                np.multiply(values, factor, out=values)
            found.append((piece.start, values))
        return found

    def _claim(self, bucket: LocalBucket) -> None:
        try:
            self._buckets.claim(bucket)
        except BaseException as error:
            self._pipeline.last_step.lose_gradient(error)
            raise

    def _unscale(self, divisor: float) -> float:
        return self._pipeline.loss_scale * divisor
