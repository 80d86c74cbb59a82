"""One update of a wrapped tree: its gradients go to the core, and the parameters that it writes become leaves."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from offload_core.engine import Engine, StepArguments, StepReport
from offload_core.errors import ConfigError, DeviceMemoryError, GradientError, OffloadError, StateError
from offload_core.memory.host_memory import format_bytes
from offload_core.rules import Hyper
from offload_core.support.threads import uninterrupted

from ..devices.mesh.tensors import delete
from ..devices.numbers import beside_the_accelerator, cpu_device
from ..placement.memory import local_bytes
from ..placement.placement import Placement
from ..tree.trees import summed
from ..tree.wrapped_tree import Absent, WrappedTree
from .gradients import check_alike, given_gradients
from .loss_scale import DeviceScale

_RELEASED = (
    "the parameters are released, and have no memory on the device; expected offloaded.restore() before params, "
    "update() or a load: while they are released, only what reads states works, as saves do"
)

_NOT_RESTORED = (
    "restore() broke off, and some parameters have no memory on the device; expected it again: it goes on from there"
)

_NOTHING: tuple[frozenset[int], Sequence[Any]] = (frozenset(), ())


class UpdateArguments(NamedTuple):
    """The arguments of an update, after all checks."""

    gradients: dict[int, Any]
    """The gradients as the core takes them, by the number of its parameter."""
    hypers: Sequence[Hyper]
    """The hyperparameters of each group."""
    donated: Sequence[Any]
    """Arrays to delete in the end. Most are deleted earlier, when they have been read."""
    donate_params: bool
    """True to write new parameters over the present ones."""


class TreeUpdates:
    """The updates of a wrapped tree.

    The caller of each method holds the core's state lock, in the middle of a change.
    """

    def __init__(self, core: Engine, placement: Placement, tree: WrappedTree, loss_scale: DeviceScale | None) -> None:
        self.report: StepReport | None = None
        """The report of the last micro-step; None: there was none."""
        self._core = core
        self._gradients, self._parameters = core.gradients, core.parameters
        self._placement = placement
        self._tree = tree
        self._loss_scale = loss_scale
        self._config = config = core.config
        self._groups = [(group, config.rule(group).hyper) for group in config.groups()]
        """The configuration's groups, and the class of each one's hyperparameters."""
        self._constant: list[Hyper] | None = None
        """The hyperparameters of every update, which the configuration has checked; None: a schedule gives them."""
        if not (callable(config.lr) or callable(config.betas)):
            self._constant = _of_each_group(hyper(**config.values(0, group)) for group, hyper in self._groups)
        self._targets: list[Any] = []
        """The tensors to which the core writes the next parameters; empty when the leaves are made of them."""
        self._unread: tuple[frozenset[int], Sequence[Any]] = _NOTHING
        """Donated gradients that may not have been read yet: the core's parameters, and the arrays."""
        self._written_over: Mapping[int, jax.Array] = {}
        """The leaves that are deleted when others are made of the targets, by position. The present ones may be the
        others already, after an interrupt."""
        self._followed = self._parameters.publications
        """The number of the core's last publication of which leaves were made."""

    def check(
        self, grads: Any, learning_rate: Any = None, *, donate: bool, donate_params: bool = False
    ) -> UpdateArguments:
        """Check everything, and return all that :meth:`take` needs.

        An error in one process is an error in all. Otherwise the others would wait for ever.

        Args:
            learning_rate: a rate or a schedule in place of the configuration's; None: the configuration's.
            donate: delete each gradient as soon as it is read.
            donate_params: write new parameters over the present ones.
        """
        core, placement, trained = self._core, self._placement, self._tree.trained
        self.follow()
        self.check_present()
        core.check_readable()  # before the processes meet
        device = core.device
        parameters = [(leaf.path, leaf.dtype) for leaf in trained]
        likes = [self._tree.leaves[leaf.position] for leaf in trained]
        try:
            arrays, unreduced = given_gradients(grads, self._tree, core.scaler, device.world_size)
            for leaf, array, like in zip(trained, arrays, likes, strict=True):
                if array is not None:
                    placement.check_gradient(leaf, array, like, unreduced=unreduced)
            of_groups = self._hypers(learning_rate)
        except Exception:
            check_alike(device.collectives, parameters, None, unreduced=False)
            raise
        check_alike(device.collectives, parameters, arrays, unreduced=unreduced)
        if all(array is None for array in arrays):
            raise GradientError("update: every gradient is None, expected at least one array")
        gradients: dict[int, Any] = {}
        uses = Counter(map(id, arrays))  # one of several leaves is deleted in the end
        for leaf, array, like in zip(trained, arrays, likes, strict=True):
            if array is not None:
                gives = donate and uses[id(array)] == 1
                parts = placement.as_gradient(leaf, summed(array), like, unreduced=unreduced, donate=gives)
                for i, part in zip(leaf.params, parts, strict=True):
                    self._gradients.check(i, part)
                    gradients[i] = part
        return UpdateArguments(gradients, of_groups, jax.tree.leaves(grads) if donate else (), donate_params)

    def _hypers(self, learning_rate: Any) -> list[Hyper]:
        """Return the hyperparameters of this update, as :func:`_of_each_group`."""
        if self._constant is not None and learning_rate is None:
            return self._constant
        updates, hypers = self._core.update_count, []
        with beside_the_accelerator(cpu_device()) as number:
            count = number(updates)
            for group, hyper in self._groups:
                values = self._config.values(count, group)
                if learning_rate is not None and self._follows_rate(group):
                    values["lr"] = float(learning_rate(count) if callable(learning_rate) else learning_rate)
                hypers.append(hyper(**values))
        try:
            for hyper in hypers:
                hyper.check()
        except ConfigError as error:
            raise ConfigError(f"update {updates}: {error}") from None
        return _of_each_group(hypers)

    def _follows_rate(self, group: Mapping[str, Any]) -> bool:
        """True if a rate in place of the configuration's is also this group's."""
        shared = self._config.adjust_lr_fn == "match_rms_adamw" and "lr" not in (self._config.adamw or {})
        return shared or "lr" not in group

    def take(self, given: UpdateArguments) -> None:
        """Take gradients, and at the accumulation boundary update the tree's leaves."""
        core = self._core
        if self._gradients.at_boundary:
            self._targets = self._new_targets(donate=given.donate_params)
        try:
            if self._gradients.are_read_in_place:
                self._gradients.add(given.gradients)
            else:  # a parameter's buckets leave before the next one's, so that its donated gradient is gone by then
                for i, gradient in given.gradients.items():
                    self._gradients.add({i: gradient})
            self.report = self._gradients.end_micro_step()
            if self.report is None:
                divisor = float(self._config.gradient_accumulation_steps)
                self.report = core.step(StepArguments(given.hypers, self._targets, divisor))
                self._parameters.finish()
            self._delete_read(given)
        except BaseException:
            with suppress(StateError):  # a core that has lost a rank may refuse even that
                self._gradients.drop()
            raise
        self.follow()

    def _delete_read(self, given: UpdateArguments) -> None:
        """Delete donated gradients that have been read. Kernels read them in place, after ``update`` has returned if
        the update is a later one or goes on."""
        params, unread = self._unread
        may_be_read = self.report is not None and self.report.skipped == "accumulating"
        if may_be_read and not params <= given.gradients.keys():  # a bucket waits for its last gradients to be read
            self._unread = (params | given.gradients.keys(), (*unread, *given.donated))
            return
        may_be_read |= self._config.schedule == "delayed"
        delete(unread if may_be_read else [*unread, *given.donated])
        self._unread = (frozenset(given.gradients), tuple(given.donated)) if may_be_read else _NOTHING

    def _new_targets(self, *, donate: bool = False) -> list[Any]:
        """Return tensors for the next parameters."""
        trained = self._tree.trained
        arrays = [self._present(leaf.position) for leaf in trained]
        self._written_over = dict(zip(self._tree.positions, arrays, strict=True)) if donate else {}
        return self._placement.targets(trained, arrays, donate=donate)

    def _present(self, position: int) -> jax.Array:
        """Return the present leaf. If it is released, return zeros in its place; and so if an update that broke off, or
        the user, has deleted an array of several devices, because it has no parts then."""
        leaf = self._tree.leaves[position]
        if isinstance(leaf, jax.Array) and leaf.is_deleted() and len(leaf.sharding.device_set) > 1:
            leaf = Absent.of(leaf)
        return leaf.empty() if isinstance(leaf, Absent) else leaf

    def follow(self) -> None:
        """Make the tree's leaves of the parameters that the core wrote last.

        All that read leaves call this first, because an interrupt may have ended the call that had them written. It
        may be interrupted itself: the next call begins anew.
        """
        if self._loss_scale is not None:
            self._loss_scale.follow()
        publications = self._parameters.publications
        if publications != self._followed:
            if self._parameters.are_in_flight:
                self._parameters.finish()
            leaves, published = self._tree.leaves, self._parameters.written
            for leaf in self._tree.trained:
                if all(published.get(i, False) for i in leaf.params):
                    targets = [self._targets[i] for i in leaf.params]
                    leaves[leaf.position] = self._placement.written(leaf, targets, leaves[leaf.position])
                    if leaf.position in self._written_over:
                        delete([self._written_over[leaf.position]])
            self._followed = publications
        self._targets, self._written_over = [], {}

    def release(self, *, donate: bool) -> int:
        """As ``OffloadedParams.release``."""
        parameters, tree = self._parameters, self._tree
        if parameters.released:
            return 0
        self.flush()
        self._gradients.check_none("release()", waiting=False)
        states = parameters.copies_of_states()
        leaves = tree.leaves
        before = {} if self._placement.device.addressable else {i: leaves[i] for i in tree.positions}
        n_bytes = sum(map(local_bytes, before.values()))

        def section() -> None:
            parameters.release(_RELEASED, states)
            leaves[:] = [Absent.of(leaf) if i in before else leaf for i, leaf in enumerate(leaves)]

        uninterrupted(section)
        if donate:
            delete(before.values())
        return n_bytes

    def restore(self) -> None:
        """As ``OffloadedParams.restore``."""
        if not self._parameters.released:
            self.flush()  # to which it is left if it broke off
            return
        try:
            self._parameters.restore_states()
            self._targets = self._new_targets(donate=True)
        except OffloadError:
            raise
        except Exception as error:
            absent = [leaf for leaf in self._tree.leaves if isinstance(leaf, Absent)]
            needed = sum(leaf.size * leaf.dtype.itemsize for leaf in absent)
            raise DeviceMemoryError(
                f"restore(): {format_bytes(needed)} of parameters have no room on the device ({error}); expected room "
                "for them. All is still released: free memory and call it again"
            ) from error
        self._parameters.restore(self._targets)
        self._parameters.finish()
        self.follow()

    def flush(self) -> None:
        """Bring the leaves to the last update, also those that ``schedule="delayed"`` holds back."""
        self.follow()
        if self._config.schedule == "delayed" or self._tree.lacks_some:
            self.publish()

    def check_present(self) -> None:
        """Raise :class:`StateError` if parameters have no memory on the device."""
        self._parameters.check_present()
        if self._tree.lacks_some:
            raise StateError(_NOT_RESTORED)

    def publish(self) -> None:
        """Bring the leaves to the values of their master weights."""
        self.follow()
        self._targets = self._new_targets()
        self._parameters.flush(self._targets)  # all updates have ended
        self._unread, (_, unread) = _NOTHING, self._unread
        delete(unread)
        self.follow()


def _of_each_group(hypers: Iterable[Any]) -> list[Hyper]:
    """Return two for each group: its hyperparameters, and the same without weight decay, for the parameters that
    ``mask`` excludes."""
    return [each for decayed in hypers for each in (decayed, replace(decayed, weight_decay=0.0))]
