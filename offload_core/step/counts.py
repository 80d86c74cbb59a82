"""The updates that each parameter has had, the kernel scalars of the next update, and each parameter's last change."""

import secrets
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from ..layout.partition import ParamSpec
from ..rules import Matrix, Rule, Scalars
from .decision import StepArguments


class Changes:
    """Counts all changes of parameters, and keeps the count at each parameter's last change. A load does not reset it.

    An update changes the parameters that it updates. Changes from outside (a load, a write to a parameter or to its
    states) count, too.
    """

    def __init__(self) -> None:
        self._source = secrets.randbits(63)
        """A random number that tells this object's marks from other objects' marks, also in other processes."""
        self.number = 0
        """The number of changes of parameters so far: updates, loads, and writes from outside."""
        self.of_all_ranks = 0
        """The updates and loads among these changes. All ranks have the same count."""
        self._last = np.zeros(0, np.int64)
        """The count at each parameter's last change."""

    @property
    def mark(self) -> tuple[int, int]:
        """This object's random number and its present count of changes, for a later :meth:`number_of`."""
        return self._source, self.number

    def number_of(self, mark: tuple[int, int]) -> int | None:
        """Return the count of changes at the moment ``mark``; None: the mark is another object's."""
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
        rule: the rule of parameters that name none.
    """

    def __init__(self, changes: Changes, rule: Rule) -> None:
        self.changes = changes
        changes.hold(0)
        self.updates = 0
        """Updates made so far."""
        self.skipped = 0
        """Updates that this object has counted as skipped, because a gradient had an inf or a NaN."""
        self.steps: list[np.ndarray] = []
        """Updates that each parameter has had: zero-dimensional float32 arrays, so that a front end can share them."""
        self._memory: list[np.ndarray] = [np.zeros(0, np.float32)]
        """The memory of ``steps``: one array for each call of :meth:`register`."""
        self._rule = rule
        self._rules: list[Rule] = []
        self._matrices: dict[Matrix | None, int] = {None: 0}
        """An index for each shape of the matrices that parameters consist of."""
        self._of_shape = np.zeros(0, np.int64)
        """The index of each parameter's shape in ``_matrices``."""

    def register(self, specs: Sequence[ParamSpec]) -> None:
        """Add parameters, which have had no update."""
        self._memory.append(np.zeros(len(specs), np.float32))
        self.steps += [self._memory[-1][i : i + 1].reshape(()) for i in range(len(specs))]
        self._rules += [spec.rule or self._rule for spec in specs]
        shapes = [self._matrices.setdefault(spec.matrix, len(self._matrices)) for spec in specs]
        self._of_shape = np.append(self._of_shape, np.array(shapes, np.int64))
        self.changes.hold(len(self.steps))

    def count(self, params: Collection[int]) -> None:
        """Count one update, of these parameters."""
        self.updates += 1
        self.changes.record(params)
        self.changes.of_all_ranks += 1
        had = np.zeros(len(self.steps), np.float32)
        had[np.fromiter(params, np.int64, len(params))] = 1
        for counts in self._memory:
            counts += had[: len(counts)]
            had = had[len(counts) :]

    def where(self) -> str:
        """Return the counts as a line for somebody who waits."""
        return f"updates: {self.updates}, and {self.skipped} skipped"

    def scalars(self, given: StepArguments, params: Collection[int], grad_scale: float) -> Scalars:
        """Return the kernel scalars of the next update of these parameters. ``grad_scale`` multiplies the gradients."""
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
