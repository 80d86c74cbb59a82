"""Takes gradients: during backward as they appear, or from ``p.grad`` at the step."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

from offload_core.engine import Engine, StepArguments, StepReport, changes
from offload_core.errors import GradientError, StateError
from offload_core.support.blocks import OpenBlocks

from ..internals.compiled import compiler_of_calls, untraced
from ..internals.private import no_read
from ..params.dtensor import local_of
from ..params.slots import Slot
from ..params.tensors import check_gradient, flat_like
from .gradient_sums import GradientSums
from .registration import Registration


@dataclass(eq=False)
class _Backward:
    """One call of an engine's ``backward``."""

    thread: int = 0
    average: bool = False
    """True if its gradients are averaged over the accumulation steps."""
    scaled: bool = False
    runs: threading.Lock = field(default_factory=threading.Lock)
    """Locked until the call has ended. C code locks and unlocks it in ``with``, so that no interrupt leaves it
    locked."""


_STARTED: list[_Backward] = []
"""The calls of ``backward`` that are running, in all engines, and some that have ended."""


class GradHooks:
    """Hands the gradients of an optimizer's parameters to the core, and records which have arrived.

    This object lives as long as the core. Closing or deleting it removes its hooks from the parameters.

    Args:
        registration: holds the parameters.
        early: True takes each gradient during backward, as it appears; ``p.grad`` then holds a stand-in.
    """

    def __init__(self, core: Engine, registration: Registration, *, early: bool) -> None:
        self._core = core
        self._gradients, self._scaler = core.gradients, core.scaler
        self._state_lock = core.state_lock
        """The lock for changes. Hooks need it, because they may run in a thread of autograd."""
        self._direct = self._gradients.are_read_in_place
        """True if kernels read gradients in place. Plain gradients (:meth:`ParamTable.plain`) are then passed on
        without a copy."""
        self._registration = registration
        self._slots = registration.slots
        self._param_table = registration.param_table
        self._early = early
        config = core.config
        self._averages = config.average_plain_backward
        self._meets = early and core.world_size > 1
        """True if ranks exchange gradients during each backward."""
        self._arrived: dict[int, int] = {}
        """Maps a parameter's index to the number of its gradients that backwards have given since the last update."""
        self._averaged: dict[int, int] = {}
        """Maps a parameter's index to the number of its gradients in ``_arrived`` that are averaged over the
        accumulation steps."""
        self._counted = 0
        """The number of backwards in earlier micro-steps of this update."""
        self._deferred: dict[int, torch.Tensor] = {}
        """Maps a parameter's index to a ``p.grad`` that the core gets later and adds to earlier gradients."""
        self.fresh = False
        """True if a gradient has arrived in this micro-step, or FSDP2 keeps a gradient."""
        self._discarded = False
        """True if the gradients of this micro-step were discarded: a step may follow, and has nothing to update."""
        self._reduces = False
        """True if a gradient was handed to the core in this micro-step, so that ranks must reduce."""
        self._backward = _Backward()
        """The engine's last call of ``backward``."""
        self._keeps = False
        """True if the gradients of the engine's last ``backward`` stay in ``p.grad``."""
        self._deferrals = OpenBlocks()
        """Blocks of ``Engine.no_sync``: gradients stay in ``p.grad`` while one runs."""
        self._sums: GradientSums | None = None
        """The sums of gradients that wait on the device; None outside of :meth:`summing`."""
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles).atexit = False

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        _remove(self._handles)

    # --- in backward ---------------------------------------------------------------------------------

    def hook(self, slot: Slot) -> None:
        """With ``early``, take the parameter's gradient in each backward as soon as it is complete.

        The stand-in replaces the first gradient in ``p.grad``. Autograd adds later gradients to the stand-in, which
        passes them to the core.
        """
        if not self._early:
            return
        this, param = weakref.ref(self), slot.param

        def accumulated(param: torch.Tensor) -> None:
            grad_hooks, gradient = this(), param.grad
            if grad_hooks is not None and gradient is not slot.stand_in:
                arrive = grad_hooks._arrive if compiler_of_calls() is None else grad_hooks._arrive_untraced
                arrive(slot, gradient, first=True)
            elif slot.stand_in.requires_grad:  # create_graph=True attached its graph to the stand-in: use a new one
                slot.taken.when_added(None)
                slot.replace_stand_in()
                slot.taken.when_added(added)
                if grad_hooks is not None:
                    grad_hooks._param_table.taken[slot.index] = slot.stand_in
                param.grad = slot.stand_in

        def added(gradient: torch.Tensor) -> None:
            grad_hooks = this()
            if grad_hooks is not None and grad_hooks._deferrals:
                grad_hooks._deferred[slot.index] = param.grad = gradient.clone()
            elif grad_hooks is not None:
                grad_hooks._arrive_untraced(slot, gradient, first=False)

        slot.taken.when_added(added)
        frozen = not slot.param.requires_grad
        if frozen:  # torch registers hooks only on tensors that require a gradient; the hooks then stay
            slot.param.requires_grad_(True)
        self._handles.append(slot.param.register_post_accumulate_grad_hook(accumulated))
        if frozen:
            slot.param.requires_grad_(False)

    @changes("backward()")
    def _arrive(self, slot: Slot, gradient: torch.Tensor | None, *, first: bool) -> None:
        assert gradient is not None
        i, gradient = slot.index, slot.placed.own(gradient)
        plain = self._param_table.plain_alone(i, gradient)
        if not (plain or self._param_table.fit({i: gradient})):
            check_gradient(slot.name, slot.values, gradient)
            self._registration.check_unchanged()
        if self._scaler is not None and not self._backward.runs.locked():
            raise GradientError(
                f"parameter {slot.name!r}: gradient of a plain loss.backward() under loss scaling, which would be "
                "unscaled without having been scaled; expected engine.backward(loss)"
            )
        sums = self._sums
        before = (sums is None or i not in sums) and (i in self._arrived or self._gradients.have(i))
        if first and before and not self._continues(i, gradient):
            self._drop([i])  # earlier ones were discarded or replaced by hand
        if sums is not None:
            sums.add(i, flat_like(gradient, slot.values))
            if first:
                slot.param.grad = None
            return
        if self._deferrals:
            self._deferred[i], self.fresh = gradient, True
        else:
            as_it_is = plain and self._direct
            self._take({i: gradient if as_it_is else flat_like(gradient, slot.values)})
        self._arrived[i] = self._arrived.get(i, 0) + 1
        if self._backward.average if self._backward.runs.locked() else self._averages_plain(slot):
            self._averaged[i] = self._averaged.get(i, 0) + 1

    def _averages_plain(self, slot: Slot) -> bool:
        """Return True if a gradient that no ``backward`` of this engine has computed is averaged over the accumulation
        steps.

        If one loss uses two engines, the other engine's ``backward`` decides. For a plain ``loss.backward()`` the
        configuration decides.

        Raises:
            GradientError: the other engine's ``backward`` scales the loss.
        """
        here = threading.get_ident()  # on an accelerator, autograd has threads of its own
        others = [
            other
            for other in _STARTED
            if other.runs.locked() and (here == other.thread or slot.param.device.type != "cpu")
        ]
        if any(other.scaled for other in others):
            raise GradientError(
                f"parameter {slot.name!r}: its gradient comes from the backward() of another engine, under that "
                "engine's loss scale; expected loss_scale=1 in both engines, or one wrap() of a module that holds "
                "both models"
            )
        if not others:
            return self._averages
        return any(other.average for other in others)

    _arrive_untraced = untraced(_arrive)
    """``_arrive`` for backwards whose calls are compiled. The compiler skips this method, which costs 1 us more."""

    @untraced
    @changes("backward()")
    def finalize(self, params: Iterable[torch.Tensor], *, ended: bool) -> set[torch.Tensor]:
        """Record that no gradient of these parameters is to come in this backward.

        Args:
            ended: True: the backward has ended.

        Returns:
            The stragglers among these parameters, which are finalized only when the backward has ended.
        """
        indices = {self._slots[param].index for param in params if param in self._slots}
        if not self._early or self._sums is not None or not (indices or ended):
            return set()
        stragglers = self._gradients.finalize(indices, ended=ended)
        self.fresh = self._reduces = True
        return {self._param_table.params[i] for i in stragglers}

    @contextmanager
    def summing(self) -> Iterator[None]:
        """A context in which arriving gradients are summed on the device. Each sum stays there until
        :meth:`hand_over`."""
        self._sums = GradientSums()
        try:
            yield
        finally:
            self._sums = None

    @property
    def is_summing(self) -> bool:
        """True inside :meth:`summing`."""
        return self._sums is not None

    @property
    def summed(self) -> list[torch.Tensor]:
        """The parameters that have a sum, inside :meth:`summing`."""
        return [] if self._sums is None else [self._param_table.params[i] for i in self._sums]

    @changes("backward()")
    def hand_over(self, params: Iterable[torch.Tensor], *, ended: bool = False) -> None:
        """Give the core the sums of these parameters' gradients. No further gradient of them is to come, on any rank.

        Args:
            ended: True: no gradient of any parameter is to come.
        """
        assert self._sums is not None
        indices = [self._slots[param].index for param in params if param in self._slots]
        given = self._sums.pop(indices)
        without = frozenset(indices) - given.keys() if self._meets else frozenset()
        if given or without:
            self._take(given, without)
        for i in given:
            self._arrived[i] = self._arrived.get(i, 0) + 1
            if self._backward.average:
                self._averaged[i] = self._averaged.get(i, 0) + 1
        if self._meets and (indices or ended):
            self._gradients.finalize(indices, ended=ended)
            self.fresh = self._reduces = True

    def _take(self, given: Mapping[int, torch.Tensor], without: Set[int] = frozenset()) -> None:
        """Pass gradients that fit their parameters to the core. With ``early``, put stand-ins in their place in
        ``p.grad``.

        Args:
            without: parameters that get no gradient in this backward on this rank.
        """
        self._gradients.add(given, without)
        if self._early:
            for i in given:
                self._param_table.params[i].grad = self._param_table.taken[i]
                self._deferred.pop(i, None)
            self.fresh = self._reduces = True

    def _continues(self, i: int, gradient: torch.Tensor | None) -> bool:
        """Return True if ``gradient``, which is in ``p.grad``, is the deferred gradient. With ``create_graph`` autograd
        adds to this gradient by replacing the tensor."""
        deferred = self._deferred.get(i)
        return gradient is not None and deferred is not None and (gradient is deferred or gradient.requires_grad)

    @property
    def in_backward(self) -> bool:
        """True inside :meth:`run_backward`, in any thread."""
        return self._backward.runs.locked()

    def run_backward(self, act: Callable[[float | None], object], *, average: bool) -> None:
        """Call ``act`` with the loss scale (None: no loss scaling), and accept gradients of a loss multiplied by it.

        Args:
            average: True averages the gradients over the accumulation steps, False sums them.

        Raises:
            StateError: inside :meth:`summing`.
        """
        if self._sums is not None:
            raise StateError(
                "backward() inside accumulate(), which calls it itself; expected the loss to be returned alone"
            )
        for other in [*_STARTED]:
            if not other.runs.locked():
                with suppress(ValueError):  # another thread may have removed it
                    _STARTED.remove(other)
        scale = None if self._scaler is None else self._scaler.scale
        started = _Backward(threading.get_ident(), average, scale not in (None, 1))
        with started.runs:
            _STARTED.append(started)
            self._backward = started
            if self._meets:
                self._begin()
            act(scale)
            if self._meets:
                self._end()

    @changes("backward()")
    def _begin(self) -> None:
        """Tell the core that a backward begins whose gradients the ranks exchange. Do nothing inside ``no_sync``."""
        self._keeps = bool(self._deferrals)
        if not self._keeps:
            self._gradients.begin_backward()

    @changes("backward()")
    def _end(self) -> None:
        if not self._keeps:
            self._gradients.end_backward()

    @property
    def is_deferring(self) -> bool:
        """True inside :meth:`deferring`."""
        return bool(self._deferrals)

    def deferring(self) -> AbstractContextManager[Any]:
        """Return a context in which arriving gradients stay in ``p.grad``. Each stays there until another gradient of
        its parameter arrives outside the context, or until the boundary."""
        return self._deferrals.block()

    # --- gradients that have arrived -----------------------------------------------------------------

    @property
    def backwards(self) -> int:
        """The number of backwards since the last micro-step ended. Each parameter that has a gradient has got at least
        one gradient for each of these backwards."""
        return min(self._arrived.values(), default=0) - self._counted

    @property
    def divisor(self) -> float:
        """The divisor of gradients that are averages over ranks: the accumulation steps, if gradients are averaged over
        them, else 1. With ``average_over_ranks=False`` it is further divided by the number of ranks, so that gradients
        become sums over ranks."""
        return self._gradients.divisor(average=bool(self._averaged))

    @property
    def has_deferred(self) -> bool:
        """True if ``p.grad`` of some parameter has a deferred gradient, which the core has not got yet."""
        return bool(self._deferred)

    # --- at a step -----------------------------------------------------------------------------------

    def check_taken(self, slot: Slot) -> None:
        """Check that the core has all gradients of a parameter. If ``p.grad`` is None, discard the gradients that the
        core has.

        Raises:
            StateError: ``p.grad`` has a gradient that the core gets later.
        """
        with no_read():
            gradient = slot.param.grad
        if gradient is None:
            self._drop([slot.index])
        elif gradient is not slot.stand_in:
            raise StateError(
                f"parameter {slot.name!r}: its gradient is in p.grad still, where no_sync() and an optimizer without "
                "early_copy=True leave it; expected p.grad to be read or changed there, or a backward() outside "
                "no_sync() before"
            )

    def take_present(self, left_out: frozenset[int], *, boundary: bool) -> None:
        """Take the gradients in ``p.grad``. None, or another tensor than the stand-in, in ``p.grad`` replaces the
        parameter's gradients that have arrived.

        The caller has checked that the parameters are unchanged (:meth:`Registration.check_unchanged`).

        Args:
            left_out: the indices of parameters that are in no group. Their gradients are not taken.
            boundary: True takes deferred gradients, too.

        Raises:
            GradientError: a gradient does not fit its parameter; none was taken.
        """
        table = self._param_table
        asked = dict(enumerate(table.gradients()))
        if any(map(is_, asked.values(), table.taken)) or left_out or self._deferred:
            asked = {
                i: gradient
                for (i, gradient), taken in zip(asked.items(), table.taken, strict=True)
                if (gradient is not taken or i in left_out) and (boundary or not self._continues(i, gradient))
            }
        if boundary and self._keeps:
            self._keeps = False
            self._gradients.begin_backward()
        if not asked:
            return
        given = table.own({i: g for i, g in asked.items() if g is not None and i not in left_out})
        plain = table.plain(given)
        if not (plain or table.fit(given)):
            slots = [*self._slots.values()]
            for i, gradient in given.items():
                check_gradient(slots[i].name, slots[i].values, gradient)
        self._drop([i for i in asked if not self._continues(i, given.get(i))] if self._deferred else asked)
        if plain and self._direct:
            self._take(given)
        else:  # one by one, so that each can leave
            for i, gradient in given.items():
                self._take({i: flat_like(gradient, local_of(table.params[i]))})

    def end_micro_step(self, arguments: StepArguments | None, *, may_be_empty: bool) -> StepReport | None:
        """End an engine's micro-step in the core. Return the core's report; None if an update follows.

        Args:
            arguments: the arguments of the update that follows; None: no update follows.
            may_be_empty: True if gradients of earlier micro-steps are enough.

        Raises:
            StateError: no gradient arrived since the last call.
            GradientError: averaged and summed gradients are mixed.
            CollectiveError: an earlier exchange between ranks has failed.
        """
        elsewhere = self._gradients.had_backward or (may_be_empty and self._gradients.are_waiting)
        if not (self.fresh or self._discarded or elsewhere):
            self._core.check_step()  # it may say why none arrived
            raise StateError(
                "step() without backward(): no gradient arrived since the last step(); expected "
                "engine.backward(loss) first (does the loss depend on a trained parameter?)"
            )
        if self._gradients.per_update > 1 and self._averaged not in ({}, self._arrived):
            raise GradientError(
                "both engine.backward(loss), which averages over the accumulation steps, and loss.backward(), which "
                "sums, were used for one update; expected one of them throughout: discard the gradients with "
                "engine.optimizer.zero_grad()"
            )
        boundary = arguments is not None
        reduce = self._reduces or boundary
        self.fresh = self._reduces = self._discarded = False
        self._counted += self.backwards
        return self._gradients.end_micro_step(reduce=reduce, boundary=boundary, arguments=arguments)

    def forget(self) -> None:
        """Record that no gradient has arrived, forget sums, and remove the stand-ins from the parameters."""
        self.fresh = self._reduces = self._discarded = False
        self._counted, self._sums = 0, None
        if self._early:
            self._param_table.remove_taken()
        for record in (self._arrived, self._averaged, self._deferred):
            record.clear()

    def discard(self) -> None:
        """Discard all gradients, also the gradients on the host."""
        if self._gradients.discard_all():
            self._registration.flush()
        came = self.fresh or self._discarded
        self.forget()
        self._discarded = came

    def _drop(self, indices: Iterable[int]) -> None:
        """Discard the gradients that have arrived for the parameters with these indices."""
        self._gradients.drop([*indices])
        if self._arrived or self._deferred:
            for i in indices:
                for record in (self._arrived, self._averaged, self._deferred):
                    record.pop(i, None)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
