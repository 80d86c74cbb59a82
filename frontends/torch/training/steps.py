"""Checks all that a step of an optimizer needs and gives it to the core, for ``step()`` of an optimizer used alone and
for the micro-steps of an engine."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from offload_core.engine import StepArguments, StepReport, begins, changes
from offload_core.errors import ConfigError, StateError
from offload_core.rules import Hyper

from .components import Components
from .groups import check_unwritten, hypers_of, set_values

T = TypeVar("T")

Groups = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class _MicroStep:
    """An engine's micro-step. The next update first ends it.

    Attributes:
        may_be_empty: True if gradients of earlier micro-steps are enough.
        reads_wait: True if ``update`` may return while the core still updates. Readers of a parameter then wait for it.
    """

    may_be_empty: bool
    reads_wait: bool


class Steps:
    """The steps of an open optimizer. Callers of its methods pass the optimizer's ``param_groups``, as they are now."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self._core = core = components.core
        self._state_lock, self._config = core.state_lock, core.config
        collectives = core.collectives
        self._alone = collectives.world_size == 1
        self._gradients, self._parameters = core.gradients, core.parameters
        self._micro_step: _MicroStep | None = None
        """The engine's micro-step that the next update ends; None: there is none."""
        self._written: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Each group that functions set, with the values that it may have, by name: the last value and the value that
        is being set."""

    def hypers(self, groups: Groups) -> list[Hyper]:
        """Return the hyperparameters of each group for the next update. First set the hyperparameters that are
        functions.

        Raises:
            ConfigError: a value is out of range, or other code has set a value that a function gives.
        """
        check_unwritten(self._written)

        def note(values: dict[str, Any]) -> None:  # before they are set: an interrupt may come in between
            self._written = [(group, {k: (group[k], value) for k, value in values.items()}) for group in groups]

        return hypers_of(groups, self._config, self._core.update_count, note)

    def set_updates(self, count: int) -> None:
        """Set the number of updates made, in a load. The load may also have given other values to groups, so forget the
        values that functions have set."""
        self._core.update_count = count
        self._written = []

    def set_groups(self, groups: Groups, values: Sequence[Mapping[str, Any]]) -> None:
        """Give groups the values that a checkpoint has for them."""
        set_values(groups, values)
        self._written = []

    @changes("step()")
    def accumulate(self, groups: Groups, *, may_be_empty: bool) -> StepReport:
        """End an engine's micro-step that no update follows: take its gradients.

        Raises:
            StateError: no gradient arrived since the last micro-step.
            ParameterError, GradientError, ConfigError: a parameter, a gradient or a hyperparameter does not fit. In all
                these cases nothing has changed.
        """
        return self.or_break_off(partial(self._accumulate, groups, may_be_empty=may_be_empty))

    def _accumulate(self, groups: Groups, *, may_be_empty: bool) -> StepReport:
        self._prepare(groups, boundary=False)
        report = self.components.grad_hooks.end_micro_step(None, may_be_empty=may_be_empty)
        assert report is not None
        return report

    def end_micro_step(self, step: Callable[[], object], *, may_be_empty: bool, reads_wait: bool) -> None:
        """End an engine's micro-step and update.

        Args:
            step: the optimizer's method, which calls :meth:`update`. Hooks and learning-rate schedulers watch this
                method.
            may_be_empty: True if gradients of earlier micro-steps are enough.
            reads_wait: True if the core may still update when this returns. Readers of a parameter then wait for it.

        Raises:
            StateError: no gradient arrived since the last micro-step; nothing has changed.
            ParameterError, GradientError, ConfigError: as :meth:`update`.
        """
        self._micro_step = _MicroStep(may_be_empty, reads_wait)
        try:
            step()
        finally:
            self._micro_step = None

    @begins("step()")
    def update(self, groups: Groups) -> StepReport:
        """Update every parameter that has a gradient.

        Raises:
            ParameterError, GradientError, ConfigError: a parameter, a gradient or a hyperparameter does not fit; no
                parameter and no state changed.
        """
        return self.or_break_off(partial(self._update, groups))

    def _update(self, groups: Groups) -> StepReport:
        micro_step, self._micro_step = self._micro_step, None
        components = self.components
        core, grad_hooks, registration = self._core, components.grad_hooks, components.registration
        hypers, group_of_each = self._prepare(groups, boundary=True)
        arguments = StepArguments(hypers, registration.current_tensors(), grad_hooks.divisor, group_of_each)
        if micro_step is not None:
            grad_hooks.end_micro_step(arguments, may_be_empty=micro_step.may_be_empty)
        gathered = components.sharding.before_change()
        try:
            report = core.step(arguments, gathered=gathered)
            if micro_step is None or not micro_step.reads_wait:
                core.finish()
            grad_hooks.forget()
            registration.follow_update()
        except BaseException:
            self._end_broken_step()
            raise
        return report

    def or_break_off(self, act: Callable[[], T]) -> T:
        """Call ``act``, which makes a backward or a step, and return its result.

        If an interrupt ends ``act`` after ``update_in_backward`` has updated states, the step ends here, and counts. No
        later ``step()`` could end it, because an update may have used a gradient that no stand-in has replaced in
        ``p.grad``.
        """
        try:
            return act()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._break_off()
            raise

    @changes("step()")
    def _break_off(self) -> None:
        if self._core.abandon():
            self._end_broken_step()

    @changes("accumulate()")
    def discard(self) -> None:
        """After an error in the middle of several micro-batches, discard the gradients of all. If
        ``update_in_backward`` has updated states, the step ends here, and counts."""
        self._core.abandon()
        self._end_broken_step()
        self._gradients.count_as(1)

    def _end_broken_step(self) -> None:
        """After an error or an interrupt in a step, discard the step's gradients, and have no reader wait for
        parameters any longer."""
        components = self.components
        components.registration.follow_update(broken=True)  # first: further interrupts may end the waits below
        with suppress(Exception):  # the one that is being raised
            self._core.finish()
        with suppress(StateError):  # states that were updated in backward keep the gradients that they used
            self._gradients.drop()
        components.sharding.forget_order()
        components.grad_hooks.forget()
        components.registration.follow_update(broken=True)

    def _prepare(self, groups: Groups, *, boundary: bool) -> tuple[list[Hyper], list[int]]:
        """Check everything that an update needs, take the gradients that are in ``p.grad``, and return the
        hyperparameters of each group and the group of each parameter.

        Deferred gradients are taken only at the boundary. Raises the errors of :meth:`update`; then nothing has
        changed.
        """
        self._parameters.check_present()
        components, hypers = self.components, self.hypers(groups)
        registration = components.registration
        if not self._core.has_begun:
            components.states.count_written()
        grouping = registration.grouping(groups)
        if boundary:
            components.sharding.check_closed()
            if self._config.update_in_backward:  # else no gradient has been used yet
                arguments = StepArguments(hypers, (), components.grad_hooks.divisor, grouping.groups)
                self._core.check_expected(arguments)
        for g, rule in grouping.rules:
            try:
                rule.check(hypers[g])
            except ConfigError as error:
                raise ConfigError(f"parameter group {g}: {error}") from None
        if grouping.without_states:
            # Among ranks a gradient may be on one of them only; there ``requires_grad`` decides.
            components.register_unfrozen(groups, with_gradient=self._alone)
            grouping = registration.grouping(groups)
        registration.check_unchanged()
        components.grad_hooks.take_present(grouping.left_out, boundary=boundary)
        return hypers, grouping.groups

    @changes("backward()")
    def expect(self, groups: Groups, *, average: bool) -> None:
        """Announce that an update follows the backward that now begins, so that the core may write parameters during
        the backward.

        If autograd would read a parameter that was written, autograd raises. Other readers wait.
        """
        core, registration = self._core, self.components.registration
        by_hand = self.components.sharding.is_open  # what a block has whole stays as it is
        if registration.readers_can_wait and not by_hand:
            if not core.has_begun:
                self.components.states.count_written()
            tensors, group_of_each = registration.current_tensors(), registration.grouping(groups).groups
            divisor = self._gradients.divisor(average=average)
            arguments = StepArguments(self.hypers(groups), tensors, divisor, group_of_each)
            self._core.expect_step(arguments, registration.before_send)
