"""Waits for the updates that write a process's device parameters, and releases the parameters from the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
    """The trained parameters on the device. Methods name a parameter by its index, in the order of addition.

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
        """Maps each parameter that the last step or flush writes on the device to True, or to False if the step broke
        off before the parameter was completely written. With ``schedule="delayed"`` a step writes the parameters of the
        step before."""
        return self._last_step.published

    @property
    def publications(self) -> int:
        """The number of steps and flushes that have set :attr:`written`. A caller that was interrupted compares it with
        the number before its call, to see if the call has set :attr:`written`."""
        return self._last_step.publications

    @property
    def are_in_flight(self) -> bool:
        """True if parameters that the last step or flush sends may not have arrived yet."""
        return self._updates.publishes

    @property
    def stale(self) -> frozenset[int]:
        """The parameters whose device values are older than their master weights."""
        return self._last_step.stale

    def finish(self) -> None:  # waits
        """Wait until the last step's parameters are written, and raise the step's error. Updates of states may still
        run."""
        self._last_step.finish_publications()

    def flush(self, tensors: Sequence[Any]) -> None:  # waits
        """Send all stale parameters, and wait for their arrival and for all updates. With ``schedule="delayed"`` the
        last step's parameters are stale."""
        assert self._state_lock.changing.locked()
        if self._last_step.stale or self._buckets.terms.sends_early:  # ranks exchange parameters
            self._gradients.reduce_first()
        self._early.recall()
        self._last_step.flush(tensors)

    # --- one parameter ---------------------------------------------------------------------------------

    def update_of(self, param: int) -> Event:
        """Return the event at the end of all updates of a parameter that were started so far."""
        return self._updates.update_of(param)

    def was_sent_early(self, param: int) -> bool:
        """True if this parameter was sent early and its step is still pending or was cancelled."""
        return self._early.holds(param)

    def await_param(self, param: int, *, on_host: bool = False) -> None:  # waits
        """Make later device work of this thread wait for the parameter's update. With one rank, first undo an early
        send whose step has not come.

        Args:
            on_host: True to wait in this call until the parameter has been written, for readers on any stream.

        Raises:
            StateError: parameters have no memory on the device; or the parameter was sent early for a step that has not
                come, and there are several ranks or early sends also update states.
            Exception: the error of the parameter's update.
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
        if self._health.released:
            raise StateError(self._health.released)

    def copies_of_states(self) -> Mapping[int, np.ndarray]:
        """Return copies in host memory of the states that are on the device, for :meth:`release`. Call :meth:`flush`
        immediately before.

        Raises:
            HostMemoryError: there is no host memory for the copies.
        """
        return self._buckets.store.copies()

    def release(self, reason: str, copies: Mapping[int, np.ndarray]) -> None:
        """Record that parameters lose their memory on the device. States that are on the device lose theirs, too. No
        parameter or state has changed since :meth:`copies_of_states`.

        Args:
            reason: the message of the :class:`StateError` that each use of parameters raises until :meth:`restore`.
            copies: the return value of :meth:`copies_of_states`.
        """
        assert self._state_lock.changing.locked() or RUNNING_SECTIONS
        self._last_step.release(reason, copies)

    def restore_states(self) -> None:
        """Copy the states of :meth:`release` back to the device. Call this before :meth:`restore`.

        Raises:
            DeviceMemoryError: the device has too little memory. All is still released.
        """
        assert self._state_lock.changing.locked()
        self._last_step.restore_states()

    def restore(self, tensors: Sequence[Any]) -> None:
        """Send all parameters. They have memory on the device again. Readers call :meth:`await_param` for each
        parameter that they read."""
        assert self._state_lock.changing.locked()
        self._last_step.restore(tensors)
