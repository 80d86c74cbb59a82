"""Gathers and releases partitioned parameters, and has each read of a released parameter call the parameter's
engine."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from offload_core.engine import Engine
from offload_core.errors import StateError

from ..internals.private import innermost_transform, outside_transforms
from ..params.managed import managed
from ..params.pending import arrive, is_moving_model, shard
from .parameters import PartitionedParameter, PartitionedParameters

_Touch = Callable[[PartitionedParameter], None]


class WholeParameters:
    """The partitioned parameters of a model that are whole now.

    Args:
        core: updates the parameters.
        touch: a method that gathers a released parameter before it is read, or raises :class:`StateError`. The object
            of the method is not kept alive.
    """

    def __init__(self, parameters: PartitionedParameters, core: Engine, touch: _Touch) -> None:
        self._live = parameters.live
        self._core = core
        self._parameters = core.parameters
        self._state_lock = core.state_lock
        self._touch = weakref.WeakMethod(touch)
        self._staying: dict[PartitionedParameter, None] | None = None
        """The parameters that stay whole until the end of :meth:`staying`; None outside of it."""
        self._kept: dict[PartitionedParameter, bool] = {}
        """Maps a parameter that stays whole after its run to True if it stays whole until it changes, or to False if it
        stays whole until the next forward."""

    def acquire(self, records: Sequence[PartitionedParameter]) -> None:
        """Make parameters whole, until :meth:`release`.

        Raises:
            StateError: a parameter's shards are of a step that has not come (``update_in_backward``).
        """
        for record in records:
            if self.was_sent_early(record):
                assert record.index is not None
                self._state_lock.run(self._parameters.await_param, record.index)
        try:
            with nullcontext() if innermost_transform() is None else outside_transforms():
                self._live.acquire([record.live for record in records])
        except BaseException:
            # If an update failed, finish() raises its error, which is the cause.
            self._state_lock.change("a gathering of parameters", self._core.finish)
            raise
        for record in records:
            for tensor in record.values.tensors:
                arrive(tensor)
        if self._staying is not None:
            self._stay([record for record in records if record not in self._staying])

    def _stay(self, records: Sequence[PartitionedParameter]) -> None:
        assert self._staying is not None
        self._live.hold([record.live for record in records])
        self._staying |= dict.fromkeys(records)

    @contextmanager
    def staying(self) -> Iterator[None]:
        """A context until whose end each parameter that is acquired inside stays whole."""
        outer, self._staying = self._staying, {}
        try:
            yield
        finally:
            stayed, self._staying = [*self._staying], outer
            self.release(stayed, may_stay=False)

    def hold(self, records: Sequence[PartitionedParameter]) -> None:
        """Keep parameters whole from now on, or from their next :meth:`acquire` on, until :meth:`release`. Begin to
        gather them, and do not wait for them."""
        self._live.hold([record.live for record in records])

    def was_sent_early(self, record: PartitionedParameter) -> bool:
        """Return True if the parameter's shards may already have the values of a step that is still pending or was
        cancelled (``update_in_backward``)."""
        return record.index is not None and self._parameters.was_sent_early(record.index)

    def release(self, records: Sequence[PartitionedParameter], *, may_stay: bool = True) -> None:
        """End one :meth:`acquire` of these parameters.

        Args:
            may_stay: True: the parameters may stay whole for their next use.
        """
        if records:
            self._live.release([record.live for record in records], may_stay=may_stay)
        for record in records:
            self.guard(record)

    def guard(self, record: PartitionedParameter) -> None:
        """If the parameter is released, have its next read call ``touch``."""
        if not record.live.holds:
            several = self._live.device.world_size > 1
            touched = partial(_touched, self._touch, record.spec.name, several)
            for tensor in record.values.tensors:
                shard(tensor, touched)

    def keep(self, records: Sequence[PartitionedParameter], *, for_graph: bool) -> None:
        """Keep parameters whole until the next forward.

        Parameters that were sent early have changed, and are not kept.

        Args:
            for_graph: True: keep them until they change, because a graph may read them.
        """
        records = [record for record in records if not self.was_sent_early(record)]
        self.acquire([record for record in records if record not in self._kept])
        for record in records:
            self._kept[record] = for_graph or self._kept.get(record, False)

    def end_keeping(self, *, graphs: bool) -> None:
        """Release the parameters that :meth:`keep` keeps until the next forward.

        Args:
            graphs: True: also release the parameters that :meth:`keep` keeps until they change.
        """
        kept = [record for record, for_graph in self._kept.items() if graphs or not for_graph]
        for record in kept:
            del self._kept[record]
        self.release(kept)

    def runs_hold(self, record: PartitionedParameter) -> bool:
        """Return True if an :meth:`acquire` by another caller than :meth:`keep` keeps the parameter whole."""
        return record.live.holds > (record in self._kept)


def read_error(record: PartitionedParameter) -> StateError:
    """Return the error for a read of a parameter that is in shards."""
    name = f"parameter {record.spec.name!r} of {record.module}"
    if is_moving_model():
        return StateError(
            f"{name} was to be moved or cast (.to(), .bfloat16()), and an engine has it in shards; expected the "
            "device before wrap() and the element type in wrap(param_dtype=...), or engine.close() before another "
            "engine or Trainer gets the model; in gathered_parameters() it is whole, but stays as it is"
        )
    return StateError(
        f"{name} was read outside the forward of a module; in stage 3 it is there for those only; expected `with "
        "gathered_parameters(...)` around what reads it (state_dict() too), or stage=2 where that is code of others"
    )


def _touched(method: "weakref.WeakMethod[_Touch]", name: str, several: bool, tensor: torch.Tensor) -> None:
    if (touch := method()) is not None and (record := managed(tensor).record) is not None:
        try:
            return touch(record)
        except StateError as error:
            refused = error.with_traceback(None)  # the traceback would keep the engine alive
        del touch, record
        gc.collect()  # a reference cycle of an old trainer may keep its engine alive, which else frees its model
        if method() is not None:
            raise refused
        if not several:
            return None
    raise StateError(
        f"parameter {name!r} was left in shards: its engine is gone; expected engine.close() before, which makes "
        "parameters whole"
    )
