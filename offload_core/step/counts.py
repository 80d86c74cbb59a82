"""The number of updates that parameters have had, and the kernel scalars of the next one."""

from collections.abc import Collection, Sequence

import numpy as np

from ..layout.partition import ParamSpec
from ..rules import Matrix, Rule, Scalars
from .decision import StepArguments


class UpdateCounts:
    """Counts the updates of a pipeline's parameters.

    Args:
        rule: of parameters that name none.
    """

    def __init__(self, rule: Rule) -> None:
        self.updates = 0
        """Updates made so far."""
        self.steps: list[np.ndarray] = []
        """Updates that each parameter has had: zero-dimensional float32 arrays, so that a front end can share them."""
        self._memory: list[np.ndarray] = [np.zeros(0, np.float32)]
        """The memory of ``steps``: an array for each :meth:`take_on`."""
        self._rule = rule
        self._rules: list[Rule] = []
        self._matrices: dict[Matrix | None, int] = {None: 0}
        """Numbers the shapes of the matrices that parameters consist of."""
        self._of_shape = np.zeros(0, np.int64)
        """The number of each parameter's shape."""

    def take_on(self, specs: Sequence[ParamSpec]) -> None:
        """Add parameters, which have had no update."""
        self._memory.append(np.zeros(len(specs), np.float32))
        self.steps += [self._memory[-1][i : i + 1].reshape(()) for i in range(len(specs))]
        self._rules += [spec.rule or self._rule for spec in specs]
        shapes = [self._matrices.setdefault(spec.matrix, len(self._matrices)) for spec in specs]
        self._of_shape = np.append(self._of_shape, np.array(shapes, np.int64))

    def count(self, params: Collection[int]) -> None:
        """Add one update of these parameters."""
        had = np.zeros(len(self.steps), np.float32)
        had[np.fromiter(params, np.int64, len(params))] = 1
        for counts in self._memory:
            counts += had[: len(counts)]
            had = had[len(counts) :]

    def scalars(self, given: StepArguments, params: Collection[int], grad_scale: float) -> Scalars:
        """Return the kernel scalars of the next update of these parameters; ``grad_scale``: the factor on gradients."""
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
