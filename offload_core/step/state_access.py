"""Reads and writes optimizer states outside the step: for checkpoints, ``state_dict`` and changed parameters.

This module imports the pipeline, and the pipeline does not import this module. Methods that return or replace states
wait for the last step's updates, and raise the updates' errors.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..config.state_formats import Master
from ..dtypes import FLOAT32, ElementType
from ..layout.partition import Bucket, Piece
from ..layout.regions import Elements, InMemory
from ..native import kernels
from ..ranks.collectives import merge
from ..rules import MASTER, Rule
from ..states.arrays import StateArray, StateRun
from ..states.store import Extent
from .health import Use
from .local_bucket import LocalBucket
from .pipeline import Pipeline

_PIECE = 2**18
"""The number of elements that are rounded at a time."""


class ParameterRun(NamedTuple):
    """Elements ``[start, start + numel)`` of a parameter, in the core's order, and their states."""

    start: int
    numel: int
    arrays: dict[str, StateRun]
    """The states of the parameter's rule, by name."""
    in_place: bool
    """True if the parameter is its own master weight. ``arrays["master"]`` is then the parameter's memory."""
    read_parameter: Callable[[int, np.ndarray], None]
    """``read_parameter(at, out)`` copies elements ``[start + at, start + at + out.size)`` of the device parameter to
    ``out``."""


class StateAccess:
    """Reads and writes the states of one process's shards.

    Parameters are numbered as in the pipeline. Tensors are the device's, one-dimensional and contiguous. States have
    the names that the parameter's update rule gives them. A parameter that is its own master weight has no state
    ``"master"``.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._buckets = pipeline.buckets

    # --- reading -------------------------------------------------------------------------------------

    def elements(self, param: int) -> Elements:
        """Return the offset of each element of a parameter in the parameter's tensor."""
        spec = self._pipeline.params[param]
        return spec.elements or InMemory((spec.numel,))

    def states(self, param: int) -> list[tuple[int, dict[str, np.ndarray]]]:
        """Return this process's states of a parameter: ``(start, {name: values})`` for each contiguous range of
        elements that this process owns, ascending. ``start`` is the index of the range's first element.

        If the store keeps states in memory, float32 and bfloat16 values are views: call :meth:`will_change` before you
        write to them. All other values are read-only copies.
        """
        self._pipeline.last_step.finish()
        return [(start, {name: run.values() for name, run in runs.items()}) for start, runs in self._states(param)]

    def extents(self, param: int) -> list[tuple[int, int]]:
        """Return ``(start, number of elements)`` of each range of :meth:`states`."""
        return [(start, sum(extent.numel for extent in extents)) for start, extents in self._extents(param)]

    def local_states(self, param: int) -> dict[str, np.ndarray]:
        """Return, for each state, the concatenation of the ranges of :meth:`states`: a one-dimensional array."""
        return {name: run.values() for name, run in self.local_runs(param).items()}

    def local_runs(self, param: int) -> dict[str, StateRun]:
        """Return the states of :meth:`local_states` as runs that the caller may read and write. Call
        :meth:`will_change` before you write."""
        self._pipeline.last_step.finish()
        return self._local_runs(param)

    def runs(self, param: int, tensor: Any) -> list[ParameterRun]:
        """Return this process's states of a parameter, one run for each piece.

        Args:
            tensor: the device parameter.
        """
        self._pipeline.last_step.finish()
        return self._runs(param, tensor)

    def own_masters(self, param: int, tensor: Any) -> list[tuple[int, np.ndarray]]:
        """Return this process's memory of a parameter that is its own master weight: ``(start, values)`` for each
        piece. Return an empty list if the parameter is not its own master weight.

        Args:
            tensor: the device parameter.
        """
        if not any(bucket.master is Master.PARAMETER for bucket in self._buckets.of[param]):
            return []
        if self._pipeline.params[param].partitioned:
            return [(run.start, run.arrays[MASTER].values()) for run in self._runs(param, tensor)]
        return [(0, self._pipeline.device.host_array(tensor).view())]

    def parameter_memory(self, param: int) -> np.ndarray | None:
        """Return the memory of this process's shard of a partitioned parameter, padding included, if this memory is the
        upper half of the master weights (SPLIT). None: it is not, and the caller allocates the shard.

        Only the update and this class may write to this memory.
        """
        layouts, n_ranks = [bucket.layout for bucket in self._buckets.of[param]], len(self._pipeline.device.ranks)
        if self._buckets.terms.shards_on_disk:
            return None
        whole = [Extent(layout.index, 0, n_ranks * layout.shard_numel) for layout in layouts]
        master = self._buckets.store.run(whole).get(MASTER)
        return None if master is None else master.upper

    def parameter_parts(self, param: int) -> list[tuple[Bucket, StateRun]] | None:
        """Return access to this process's master weights of a partitioned parameter: ``(bucket, run)`` for each of the
        parameter's buckets, in order. ``run`` is the bucket's run of master weights. None: the store does not keep the
        parameter with the parameter's states."""
        if not all(self._buckets.terms.in_store(bucket.layout) for bucket in self._buckets.of[param]):
            return None
        n_ranks = len(self._pipeline.device.ranks)
        layouts = sorted((bucket.layout for bucket in self._buckets.of[param]), key=lambda layout: layout.start)
        whole = [Extent(layout.index, 0, n_ranks * layout.shard_numel) for layout in layouts]
        store = self._buckets.store
        return [(layout, store.run([extent])[MASTER]) for layout, extent in zip(layouts, whole, strict=True)]

    def step_count(self, param: int) -> np.ndarray:
        """Return the number of updates that a parameter has had, as a zero-dimensional float32 array. The array is the
        pipeline's count itself, not a copy."""
        return self._pipeline.counts.steps[param]

    def largest_step_count(self) -> int:
        """Return the largest number of updates that any parameter has had."""
        return int(max(map(float, self._pipeline.counts.steps), default=0))

    def rule(self, param: int) -> Rule:
        """Return a parameter's update rule."""
        return self._pipeline.buckets.terms.rule_of(self._pipeline.params[param])

    def whole_states(
        self, param: int, names: Collection[str] | None = None, *, tensor: Any = None, dtype: ElementType = FLOAT32
    ) -> dict[str, np.ndarray]:
        """Return a copy of a parameter's whole states, gathered from all ranks: ``{name: array}``.

        Arrays are one-dimensional, with elements in the order of :meth:`states`. All processes call this alike.
        Rounding to ``dtype`` takes up to 1 MiB of host memory in addition to the arrays.

        Args:
            names: the names of the states; None: all.
            tensor: the device parameter. Its values are read if it is its own master weight.
            dtype: the arrays' element type. Values are rounded to nearest.
        """
        self._pipeline.health.check(Use.READ)
        wanted = self.rule(param).state_names if names is None else names
        return self._pipeline.exchange(lambda: self._whole_states(param, wanted, tensor, dtype))

    # --- writing -------------------------------------------------------------------------------------

    def will_change(self, params: Collection[int]) -> None:
        """Call this before you write to states of these parameters. If one of these parameters was sent early, this
        recalls early sends, because they were computed from the old states."""
        self._pipeline.last_step.finish()
        self._pipeline.early.recall(params)
        self._pipeline.changes.record(params)
        self._buckets.store.will_change(params)

    def watch(self, before_change: Callable[[Iterable[int]], None] | None) -> None:
        """From now on, call ``before_change(params)`` before the states of ``params`` change, in the thread that
        changes them.

        Args:
            before_change: a bound method, whose object the caller keeps alive; None: call nothing.
        """
        self._buckets.store.watch(before_change)

    def set_states(self, param: int, values: Mapping[str, np.ndarray]) -> None:
        """Overwrite this process's states of a parameter.

        The caller then writes the device parameter, which may be its own master weight.

        Args:
            values: whole states by name: one-dimensional fp32 arrays, with elements in the order of :meth:`states`.
        """
        self.will_change([param])
        for start, runs in self._states(param):
            for name in values.keys() & runs.keys():
                runs[name].write(values[name][start : start + runs[name].size])

    def reload_master(self, param: int, tensor: Any) -> None:
        """Overwrite a parameter's master weights with the values of the device parameter ``tensor``."""
        self.will_change([param])
        for bucket, piece in self._pieces_of(param):
            if bucket.master is not Master.PARAMETER:
                self._buckets.load_master(bucket, piece, tensor)

    def adopt(self, param: int, tensor: Any) -> None:
        """Take over a user's change of a device parameter: each element that differs from its rounded master weight
        replaces the master weight. All other master weights keep their low bits.

        If the user puts the last published values back before the next update, the old master weights come back, too.

        Args:
            tensor: the parameter's new values. They are copied to the memory of :meth:`parameter_memory`, if there is
                such memory. ``tensor`` must not share this memory, because the old values there tell which elements
                differ.
        """
        self._pipeline.last_step.finish()
        self._pipeline.early.recall([param])
        self._pipeline.changes.record([param])
        for bucket, piece in self._pieces_of(param):
            if bucket.master is not Master.PARAMETER:
                source = self._buckets.read(bucket, piece, tensor)  # it holds the memory
                self._buckets.store.follow(self._buckets.extent(bucket, piece), param, source.view())

    def publish_later(self, params: Iterable[int]) -> None:
        """Mark these parameters as stale, because their master weights were replaced. The next ``flush`` sends them."""
        for param in params:
            for bucket in self._buckets.of[param]:
                if bucket.master is Master.SEPARATE:
                    bucket.publication.mark_stale([param])

    # --- offsets of states ---------------------------------------------------------------------------

    def _pieces_of(self, param: int) -> list[tuple[LocalBucket, Piece]]:
        return [(bucket, bucket.pieces[i]) for bucket, i in self._buckets.pieces_of(param)]

    def _extents(self, param: int) -> list[tuple[int, list[Extent]]]:
        """Return ``(start, extents)`` for each contiguous range of elements that this process owns."""
        found: list[tuple[int, list[Extent]]] = []
        end = None
        for bucket, piece in self._pieces_of(param):
            if piece.start != end:
                found.append((piece.start, []))
            found[-1][1].append(self._buckets.extent(bucket, piece))
            end = piece.stop
        return found

    def _states(self, param: int) -> list[tuple[int, dict[str, StateRun]]]:
        return [(start, self._buckets.store.run(extents)) for start, extents in self._extents(param)]

    def _local_runs(self, param: int) -> dict[str, StateRun]:
        return self._buckets.store.run([extent for _, extents in self._extents(param) for extent in extents])

    def _runs(self, param: int, tensor: Any) -> list[ParameterRun]:
        found = []
        for bucket, piece in self._pieces_of(param):
            runs = self._buckets.store.run([self._buckets.extent(bucket, piece)])
            in_place = bucket.master is Master.PARAMETER
            if in_place:
                runs[MASTER] = StateArray.of(self._buckets.read(bucket, piece, tensor).view())
            read = partial(self._read_parameter, bucket, piece, tensor)
            found.append(ParameterRun(piece.start, piece.numel, runs, in_place, read))
        return found

    def _read_as(self, dtype: ElementType, run: StateRun, out: np.ndarray) -> None:
        """Copy the elements of ``run`` to ``out``, an array of element type ``dtype``."""
        if dtype is FLOAT32:
            run.read(0, out)
            return
        piece = np.empty(min(out.size, _PIECE), np.float32)
        for at in range(0, out.size, _PIECE):
            part = out[at : at + _PIECE]
            exact = piece[: part.size]
            run.read(at, exact)
            kernels.cast_array(exact, FLOAT32, part, dtype, self._buckets.threads)

    def _read_parameter(self, bucket: LocalBucket, piece: Piece, tensor: Any, at: int, out: np.ndarray) -> None:
        source = self._buckets.read(bucket, piece, tensor, at, out.size)
        np.copyto(out, source.view())

    def _whole_states(
        self, param: int, names: Collection[str], tensor: Any, dtype: ElementType
    ) -> dict[str, np.ndarray]:
        spec = self._pipeline.params[param]
        # int64 words: ranks add bits, and all but one add zeros.
        words = {name: np.zeros(-(-spec.numel * dtype.itemsize // 8), np.int64) for name in names}
        n_bytes = spec.numel * dtype.itemsize
        whole = {name: array.view(np.uint8)[:n_bytes].view(dtype.numpy) for name, array in words.items()}
        for run in self._runs(param, tensor):
            for name, array in whole.items():
                self._read_as(dtype, run.arrays[name], array[run.start : run.start + run.numel])
        for name, mine in words.items() if self._pipeline.device.world_size > 1 else ():
            merge(self._pipeline.device.collectives.sum_integers, mine, f"{name} of {spec.name}")
        return whole
