"""The arrival of gradients: out of backward as they appear, or out of ``p.grad`` at the step."""

import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from offload_core.errors import GradientError, StateError
from offload_core.step.pipeline import Pipeline

from .registration import Registration, Slot
from .tensors import TakenGradient, check_gradient, flat_like


class Intake:
    """Hands the gradients of an optimizer's parameters to the pipeline, and knows which have come.

    It lives as long as the pipeline; when it dies, or is closed, no hook is left on the parameters.

    Args:
        registration: of the parameters.
        early: take each gradient in backward, as it appears; ``p.grad`` then holds a stand-in.
        lock: held while the pipeline is called outside the optimizer's own methods.
    """

    def __init__(self, pipeline: Pipeline, registration: Registration, *, early: bool, lock: threading.RLock) -> None:
        self._pipeline = pipeline
        self._registration = registration
        self._slots = registration.slots
        self._early = early
        self._lock = lock
        self.fresh = False
        """Whether a gradient has arrived in this micro-step."""
        self._reduces = False
        """Whether one has left for its owners in this micro-step."""
        self._scaling = self._averaging = False
        self._deferring = False
        """Whether gradients stay in ``p.grad`` for the time being."""
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles).atexit = False

    def close(self) -> None:
        """Take the hooks off the parameters."""
        _remove(self._handles)

    # --- in backward ---------------------------------------------------------------------------------

    def hook(self, slot: Slot) -> None:
        """Take the parameter's gradient as soon as it is complete in each backward, where that is early enough.

        The first one is in ``p.grad`` then and makes way for the stand-in; autograd adds the next ones to the stand-in,
        which passes them on.
        """
        if not self._early:
            return
        this, param = weakref.ref(self), slot.param

        def accumulated(param: torch.Tensor) -> None:
            intake = this()
            if intake is not None and param.grad is not slot.taken:
                intake._arrived(slot, param.grad, first=True)
            elif slot.taken.requires_grad:  # create_graph=True has hung its graph on the stand-in: take another
                slot.taken.when_added(None)
                slot.taken = TakenGradient(param, slot.name)
                slot.taken.when_added(added)
                param.grad = slot.taken

        def added(gradient: torch.Tensor) -> None:
            intake = this()
            if intake is not None and intake._deferring:
                slot.deferred = param.grad = gradient.clone()
            elif intake is not None:
                intake._arrived(slot, gradient, first=False)

        slot.taken.when_added(added)
        frozen = not slot.param.requires_grad
        if frozen:  # torch hangs hooks on what requires a gradient only; they stay
            slot.param.requires_grad_(True)
        self._handles.append(slot.param.register_post_accumulate_grad_hook(accumulated))
        if frozen:
            slot.param.requires_grad_(False)

    @torch._disable_dynamo
    def _arrived(self, slot: Slot, gradient: torch.Tensor | None, *, first: bool) -> None:
        assert gradient is not None
        check_gradient(slot.name, slot.param, gradient)
        if (slot.param.dtype, slot.param.device) != (slot.taken.dtype, slot.taken.device):
            self._registration.check_unchanged()
        with self._lock:
            if self._pipeline.scaler is not None and not self._scaling:
                raise GradientError(
                    f"parameter {slot.name!r}: gradient of a plain loss.backward() under loss scaling, which would be "
                    "unscaled without having been scaled; expected engine.backward(loss)"
                )
            if first and (slot.arrived or self._pipeline.has_gradient(slot.index)) and not slot.continues(gradient):
                self._drop([slot])  # earlier ones were discarded or replaced by hand
            if self._deferring:
                slot.deferred, self.fresh = gradient, True
            else:
                self._take(slot, gradient)
            slot.arrived += 1
            slot.averaged += self._averaging

    def _take(self, slot: Slot, gradient: torch.Tensor) -> None:
        self._pipeline.add_gradient(slot.index, flat_like(gradient, slot.param))
        if self._pipeline.config.update_in_backward:
            self._registration.follow_early()
        slot.param.grad = slot.taken
        slot.deferred = None
        self.fresh = self._reduces = True

    @contextmanager
    def scaled_backward(self, *, average: bool = True) -> Iterator[float | None]:
        """Accept gradients of a loss multiplied by the yielded loss scale (None: no loss scaling).

        Args:
            average: whether they are to be averaged over the accumulation steps, or summed.
        """
        self._scaling, self._averaging = True, average
        try:
            yield None if self._pipeline.scaler is None else self._pipeline.scaler.scale
        finally:
            self._scaling = self._averaging = False

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Gradients that arrive inside stay in ``p.grad`` till the first that arrives outside."""
        before, self._deferring = self._deferring, True
        try:
            yield
        finally:
            self._deferring = before

    # --- what has come -------------------------------------------------------------------------------

    @property
    def averages(self) -> bool:
        """Whether gradients that are to be averaged over the accumulation steps wait for the update."""
        return any(slot.averaged for slot in self._slots.values())

    @property
    def _mixes(self) -> bool:
        """Whether some that wait are to be averaged and others summed."""
        return self.averages and any(slot.averaged != slot.arrived for slot in self._slots.values())

    @property
    def has_deferred(self) -> bool:
        """Whether gradients wait that have not been handed to the pipeline."""
        return any(slot.deferred is not None for slot in self._slots.values())

    # --- at a step -----------------------------------------------------------------------------------

    def take_present(self, trained: Collection[torch.Tensor], *, boundary: bool) -> None:
        """Take the gradients that are in ``p.grad``; that says what counts: none, or another than has arrived.

        Args:
            trained: the parameters that are in a group.
            boundary: take deferred ones, too.

        Raises:
            GradientError: one does not fit its parameter; none was taken then.
        """
        present = [
            (slot, slot.param.grad if slot.param in trained else None)
            for slot in self._slots.values()
            if (slot.param.grad is not slot.taken or slot.param not in trained)
            and (boundary or not slot.continues(slot.param.grad))
        ]
        if not present:
            return
        for slot, gradient in present:
            if gradient is not None:
                check_gradient(slot.name, slot.param, gradient)
        self._drop([slot for slot, gradient in present if not slot.continues(gradient)])
        for slot, gradient in present:
            if gradient is not None:
                if self._early:
                    self._take(slot, gradient)
                else:
                    self._pipeline.add_gradient(slot.index, flat_like(gradient, slot.param))

    def end_micro_step(self, *, boundary: bool, may_be_empty: bool) -> None:
        """Have the pipeline end an engine's micro-step.

        Args:
            boundary: whether an update follows.
            may_be_empty: whether gradients of earlier micro-steps are enough.

        Raises:
            StateError: no gradient arrived since the last call.
            GradientError: averaged and summed gradients are mixed.
        """
        if not (self.fresh or (may_be_empty and self._pipeline.holds_gradients)):
            raise StateError(
                "step() without backward(): no gradient arrived since the last step(); expected "
                "engine.backward(loss) first (does the loss depend on a trained parameter?)"
            )
        if self._pipeline.config.gradient_accumulation_steps > 1 and self._mixes:
            raise GradientError(
                "both engine.backward(loss), which averages over the accumulation steps, and loss.backward(), which "
                "sums, were used for one update; expected one of them throughout: discard the gradients with "
                "engine.optimizer.zero_grad()"
            )
        reduce = self._reduces or boundary
        self.fresh = self._reduces = False
        self._pipeline.end_micro_step(reduce=reduce, boundary=boundary)

    def forget(self) -> None:
        """No gradient has arrived; the stand-ins are taken off the parameters."""
        self.fresh = self._reduces = False
        for slot in self._slots.values():
            slot.release()
            slot.forget()

    def discard(self) -> None:
        """Forget all gradients, those on the host too."""
        self._pipeline.drop_gradients()
        self._pipeline.withdraw()
        self.forget()

    def _drop(self, slots: Sequence[Slot]) -> None:
        present = [slot.index for slot in slots if self._pipeline.has_gradient(slot.index)]
        if present:
            self._pipeline.drop_gradients(present)
        for slot in slots:
            slot.forget()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
