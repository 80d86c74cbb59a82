"""A process's parameters on the device: waits for the updates that write them, and their release from the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..device.events import Event
from ..errors import StateError
from ..support.threads import RUNNING_SECTIONS
from .buckets import LocalBuckets
from .early_publish import EarlyPublish
from .gradients import Gradients
from .health import PipelineHealth, Use
from .last_step import LastStep
from .state_lock import StateLock
from .update import Updates


@dataclass(eq=False)
class Parameters:
    """The trained parameters on the device, by their numbers.

    Tensors are passed in the device's form: one-dimensional and contiguous.
    """

    _buckets: LocalBuckets
    _gradients: Gradients
    _updates: Updates
    _early: EarlyPublish
    _last_step: LastStep
    _health: PipelineHealth
    _state_lock: StateLock

    # --- what the last step wrote ----------------------------------------------------------------------

    @property
    def written(self) -> Mapping[int, bool]:
        """As :attr:`LastStep.published`."""
        return self._last_step.published

    @property
    def publications(self) -> int:
        """The steps and flushes that have set :attr:`written`. An interrupted caller sees here if its own call has."""
        return self._last_step.publications

    @property
    def are_in_flight(self) -> bool:
        """True if the last step or flush may not have written all of its parameters yet."""
        return self._last_step.is_publishing

    @property
    def stale(self) -> frozenset[int]:
        """The parameters that are older than their master weights."""
        return self._last_step.stale

    def finish(self) -> None:  # waits
        """Wait until the last step's parameters are written, and raise its error. States may still be updated."""
        self._last_step.finish_publications()

    def flush(self, tensors: Sequence[Any]) -> None:  # waits
        """Send all stale parameters (with ``schedule="delayed"``, the last step's), and wait for all updates."""
        assert self._state_lock.changing.locked()
        if self._last_step.stale or self._buckets.terms.sends_early:  # ranks exchange parameters
            self._gradients.reduce_first()
        self._early.recall()
        self._last_step.flush(tensors)

    # --- one parameter ---------------------------------------------------------------------------------

    def update_of(self, param: int) -> Event:
        """Return an event: the end of all updates of a parameter that were started so far."""
        return self._updates.update_of(param)

    def was_sent_early(self, param: int) -> bool:
        """As :meth:`EarlyPublish.holds`."""
        return self._early.holds(param)

    def await_param(self, param: int, *, on_host: bool = False) -> None:  # waits
        """Make later device work of this thread wait for the parameter's update.

        Args:
            on_host: wait here until the parameter has been written, for readers on any stream.

        Raises the error of the updates. Raises :class:`StateError` if parameters are released, or, with several ranks,
        if the parameter was sent early for a step that has not come.
        """
        self.check_present()
        if self._early.holds(param):
            self._health.check(Use.PUBLISH)  # else it may be a step that broke off
            if self._buckets.device.world_size > 1:
                raise StateError(
                    f"parameter {self._buckets.params[param].name!r} is read between backward() and step(), and "
                    "update_in_backward=True has written to it; expected engine.step() or engine.zero_grad() before, "
                    "on every rank: set update_in_backward=False to read it there"
                )
            # Readers hold the lock, but no change goes on, so that a signal handler may save while they wait.
            self._state_lock.change("a read of a parameter", self._early.undo)
        try:
            self._updates.await_param(param, on_host=on_host)
        except BaseException:
            self._state_lock.change("a read of a parameter", self._last_step.finish)
            raise

    # --- memory on the device --------------------------------------------------------------------------

    @property
    def released(self) -> bool:
        """True if parameters have no memory on the device."""
        return bool(self._health.released)

    def check_present(self) -> None:
        """Raise :class:`StateError` if parameters have no memory on the device."""
        if self.released:
            raise StateError(self._health.released)

    def release(self, reason: str) -> None:
        """Record that parameters lose their memory on the device. Call :meth:`flush` immediately before.

        Args:
            reason: the message of the :class:`StateError` that each use of parameters raises until :meth:`restore`.
        """
        assert self._state_lock.changing.locked() or RUNNING_SECTIONS
        self._last_step.release(reason)

    def restore(self, tensors: Sequence[Any]) -> None:
        """Send all parameters, which have memory on the device again. Readers :meth:`await_param` each one."""
        assert self._state_lock.changing.locked()
        self._last_step.restore(tensors)
