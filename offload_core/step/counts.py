"""Counts of updates and changes of each parameter, and the kernel scalars of the next update."""

import secrets
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from ..layout.partition import ParamSpec
from ..rules import Matrix, Rule, Scalars
from .decision import StepArguments


class Changes:
    """Counts all changes of parameters, and records the count at each parameter's last change. A load does not reset
    the count.

    A change is an update of parameters, a load, a user's write to a parameter or its states, or an addition of
    parameters.
    """

    def __init__(self) -> None:
        self._source = secrets.randbits(63)
        """A random number that tells this object's marks from other objects' marks, also in other processes."""
        self.number = 0
        """The count of changes so far."""
        self.of_all_ranks = 0
        """The count of updates and loads so far, which is the same on all ranks."""
        self._last = np.zeros(0, np.int64)
        """The count at each parameter's last change."""

    @property
    def mark(self) -> tuple[int, int]:
        """This object's random number and its present count of changes. :meth:`number_of` reads such a mark later."""
        return self._source, self.number

    def number_of(self, mark: tuple[int, int]) -> int | None:
        """Return the count of changes at the moment ``mark``; None: another object made the mark."""
        return mark[1] if mark[0] == self._source else None

    def since(self, number: int) -> np.ndarray:
        """Return bool[parameters]: True for each parameter that has changed since the count was ``number``."""
        return self._last > number

    def record(self, params: Iterable[int]) -> None:
        """Count one change of these parameters."""
        self.number += 1
        self._last[np.fromiter(params, np.int64)] = self.number

    def record_all(self) -> None:
        """Count a load, which changes all parameters."""
        self.number += 1
        self.of_all_ranks += 1
        self._last[:] = self.number

    def hold(self, n_params: int) -> None:
        """Set the number of parameters. New parameters count as changed."""
        self.number += 1
        new = np.full(max(n_params - self._last.size, 0), self.number)
        self._last = np.append(self._last[:n_params], new)


class UpdateCounts:
    """Counts the updates of a pipeline's parameters.

    Args:
        changes: records each update as a change.
        rule: the update rule of parameters whose ``ParamSpec.rule`` is None.
    """

    def __init__(self, changes: Changes, rule: Rule) -> None:
        self.changes = changes
        changes.hold(0)
        self.updates = 0
        """The number of updates so far, without skipped updates."""
        self.skipped = 0
        """The number of updates that were skipped because a gradient had an inf or a NaN, since this object exists."""
        self.steps: list[np.ndarray] = []
        """The number of updates that each parameter has had. Each entry is a zero-dimensional float32 array, so that a
        front end can share its memory."""
        self._memory: list[np.ndarray] = [np.zeros(0, np.float32)]
        """The memory of ``steps``: one array for each call of :meth:`register`."""
        self._rule = rule
        self._rules: list[Rule] = []
        self._matrices: dict[Matrix | None, int] = {None: 0}
        """Maps each ``ParamSpec.matrix``, the shape of a parameter's matrices or None, to an index."""
        self._of_shape = np.zeros(0, np.int64)
        """For each parameter, the index of its matrix shape in ``_matrices``."""

    def register(self, specs: Sequence[ParamSpec]) -> None:
        """Add parameters, which have had no update."""
        self._memory.append(np.zeros(len(specs), np.float32))
        self.steps += [self._memory[-1][i : i + 1].reshape(()) for i in range(len(specs))]
        self._rules += [spec.rule or self._rule for spec in specs]
        shapes = [self._matrices.setdefault(spec.matrix, len(self._matrices)) for spec in specs]
        self._of_shape = np.append(self._of_shape, np.array(shapes, np.int64))
        self.changes.hold(len(self.steps))

    def count(self, params: Collection[int]) -> None:
        """Count one update that changed these parameters."""
        self.updates += 1
        self.changes.record(params)
        self.changes.of_all_ranks += 1
        had = np.zeros(len(self.steps), np.float32)
        had[np.fromiter(params, np.int64, len(params))] = 1
        for counts in self._memory:
            counts += had[: len(counts)]
            had = had[len(counts) :]

    def where(self) -> str:
        """Return the counts as a line for a user who waits."""
        return f"updates: {self.updates}, and {self.skipped} skipped"

    def scalars(self, given: StepArguments, params: Collection[int], grad_scale: float) -> Scalars:
        """Return the kernel scalars of the next update.

        Args:
            params: the parameters to update.
            grad_scale: the factor by which the kernel multiplies the gradients.
        """
        steps = np.concatenate(self._memory)
        return Scalars(
            self._rules,
            given.hypers,
            given.groups,
            [*self._matrices],
            self._of_shape,
            steps,
            params,
            grad_scale=grad_scale,
        )
