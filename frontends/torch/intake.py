"""Takes gradients: during backward as they appear, or from ``p.grad`` at the step."""

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from offload_core.errors import GradientError, StateError
from offload_core.step.pipeline import Pipeline
from offload_core.step.state_lock import changes

from .registration import Registration, Slot
from .tensors import TakenGradient, check_gradient, flat_like


class Intake:
    """Hands the gradients of an optimizer's parameters to the pipeline, and records which have arrived.

    It lives as long as the pipeline. Closing or deleting it removes its hooks from the parameters.

    Args:
        registration: holds the parameters.
        early: True takes each gradient during backward, as it appears; ``p.grad`` then holds a stand-in.
    """

    def __init__(self, pipeline: Pipeline, registration: Registration, *, early: bool) -> None:
        self._pipeline = pipeline
        self._state_lock = pipeline.state_lock
        """Hooks may run in a thread of autograd."""
        self._registration = registration
        self._slots = registration.slots
        self._early = early
        self.fresh = False
        """True if a gradient has arrived in this micro-step."""
        self._reduces = False
        """True if a gradient was handed to the pipeline in this micro-step, so that ranks must reduce."""
        self._scaling = self._averaging = False
        self._deferring = False
        """True while gradients stay in ``p.grad`` (``Engine.no_sync``)."""
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles).atexit = False

    def close(self) -> None:
        """Take the hooks off the parameters."""
        _remove(self._handles)

    # --- in backward ---------------------------------------------------------------------------------

    def hook(self, slot: Slot) -> None:
        """With ``early``, take the parameter's gradient in each backward as soon as it is complete.

        The stand-in replaces the first gradient in ``p.grad``. Autograd adds later ones to the stand-in, which passes
        them on.
        """
        if not self._early:
            return
        this, param = weakref.ref(self), slot.param

        def accumulated(param: torch.Tensor) -> None:
            intake = this()
            if intake is not None and param.grad is not slot.taken:
                intake._arrived(slot, param.grad, first=True)
            elif slot.taken.requires_grad:  # create_graph=True attached its graph to the stand-in: use a new one
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
        if frozen:  # torch registers hooks only on tensors that require a gradient; the hooks then stay
            slot.param.requires_grad_(True)
        self._handles.append(slot.param.register_post_accumulate_grad_hook(accumulated))
        if frozen:
            slot.param.requires_grad_(False)

    @torch._disable_dynamo
    @changes("backward()")
    def _arrived(self, slot: Slot, gradient: torch.Tensor | None, *, first: bool) -> None:
        assert gradient is not None
        check_gradient(slot.name, slot.param, gradient)
        if (slot.param.dtype, slot.param.device) != (slot.taken.dtype, slot.taken.device):
            self._registration.check_unchanged()
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
        slot.param.grad = slot.taken
        slot.deferred = None
        self.fresh = self._reduces = True

    @contextmanager
    def scaled_backward(self, *, average: bool = True) -> Iterator[float | None]:
        """Accept gradients of a loss multiplied by the yielded loss scale (None: no loss scaling).

        Args:
            average: True averages the gradients over the accumulation steps, False sums them.
        """
        self._scaling, self._averaging = True, average
        try:
            yield None if self._pipeline.scaler is None else self._pipeline.scaler.scale
        finally:
            self._scaling = self._averaging = False

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Keep the gradients that arrive inside in ``p.grad``, until the first one arrives outside."""
        before, self._deferring = self._deferring, True
        try:
            yield
        finally:
            self._deferring = before

    # --- gradients that have arrived -----------------------------------------------------------------

    @property
    def averages(self) -> bool:
        """True if gradients wait for the update that it averages over the accumulation steps."""
        return any(slot.averaged for slot in self._slots.values())

    @property
    def _mixes(self) -> bool:
        """True if the update would have to average some waiting gradients and sum others."""
        return self.averages and any(slot.averaged != slot.arrived for slot in self._slots.values())

    @property
    def has_deferred(self) -> bool:
        """True if gradients wait in ``p.grad`` that the pipeline has not been given."""
        return any(slot.deferred is not None for slot in self._slots.values())

    # --- at a step -----------------------------------------------------------------------------------

    def take_present(self, trained: Collection[torch.Tensor], *, boundary: bool) -> None:
        """Take the gradients in ``p.grad``, which decides: None or another tensor there replaces what has arrived.

        Args:
            trained: the parameters that are in a group.
            boundary: True takes deferred gradients, too.

        Raises:
            GradientError: one does not fit its parameter; none was taken.
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
        """End an engine's micro-step in the pipeline.

        Args:
            boundary: True if an update follows.
            may_be_empty: True if gradients of earlier micro-steps are enough.

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
        """Record that no gradient has arrived, and remove the stand-ins from the parameters."""
        self.fresh = self._reduces = False
        for slot in self._slots.values():
            slot.release()
            slot.forget()

    def discard(self) -> None:
        """Forget all gradients, those on the host included."""
        self._pipeline.drop_gradients()
        self._pipeline.withdraw()
        if self._pipeline.left_behind:
            self._registration.flush()
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
