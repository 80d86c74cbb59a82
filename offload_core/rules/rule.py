"""The seam *rule*: the states that an update keeps, its hyperparameters, its scalars, and the update itself."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from ..dtypes import BFLOAT16, ElementType
from ..errors import ConfigError
from ..native import kernels

MASTER = "master"
"""The name of the state that every rule has: the master weight."""
_COUNT_BITS = 32
"""Bits for a parameter's number of updates, which fp32 counts exactly up to 2^24."""


@dataclass(frozen=True)
class State:
    """A state that a rule keeps beside the master weight."""

    name: str
    """The framework's own name for it."""
    has_sign: bool = True
    """False: values are never negative. In 8 bits they then have one more bit of exponent."""
    first: float = 0.0
    """The value of each element before a parameter's first update."""
    narrows: bool = True
    """False: it is kept in float32, whatever format the other states have."""


Matrix = tuple[int, int]
"""The numbers of rows and of columns of a matrix."""


class DeviceKernel(ABC):
    """A part of an update that the device computes, from whole matrices in bfloat16 to such matrices."""

    @abstractmethod
    def flops(self, matrix: Matrix) -> int:
        """Return the multiplications that a matrix costs."""

    @abstractmethod
    def numel(self, matrix: Matrix) -> int:
        """Return the elements in bfloat16 that the device needs at a time beside the matrix itself."""


class Hyper(Protocol):
    """One parameter group's hyperparameters for one step: a frozen dataclass. Its fields have the names and defaults of
    torch's own optimizer, or of optax's where torch has none."""

    @property
    def lr(self) -> float:
        """The learning rate."""
        ...

    @property
    def numbers(self) -> tuple[float, ...]:
        """All fields as numbers: ranks that have equal numbers update alike."""
        ...

    def check(self) -> None:
        """Raise :class:`ConfigError` if a value is out of range."""
        ...


class StateMemory(Protocol):
    """A run of a state in memory to which kernels can point: of the host, or of a device."""

    @property
    def at(self) -> "Pointing":
        """Points to it."""
        ...


class Pointing(Protocol):
    """Points kernels to a run of a state."""

    def point(self, rows: np.ndarray, moment: int | None, offsets: np.ndarray) -> None:
        """Have the kernel's rows point to these elements: of the master weight (None), or of the moment of this
        number."""
        ...


@dataclass(frozen=True)
class Rule(ABC):
    """An update rule. Equal rules give equal bits."""

    op_order: str
    """The library whose rounding it has: ``"torch"`` or ``"optax"``."""

    name: ClassVar[str]
    """The value of ``OffloadConfig.optimizer`` that asks for it."""
    hyper: ClassVar[type[Any]]
    """The class of its hyperparameters, a :class:`Hyper`."""
    settings: ClassVar[tuple[str, ...]]
    """The fields of ``OffloadConfig`` that this class of rules reads, and not every one: others refuse them."""
    every_state: ClassVar[tuple[State, ...]]
    """All states that any rule of this class keeps beside the master weight, in the order of the kernel's moments."""

    @classmethod
    @abstractmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """The rule that these fields of ``OffloadConfig`` ask for; a parameter group may have replaced some.

        Raises:
            ConfigError: fields contradict each other.
        """

    @property
    def states(self) -> tuple[State, ...]:
        """The states that this rule keeps beside the master weight, in the order of the kernel's moments."""
        return self.every_state

    @property
    @abstractmethod
    def kernel(self) -> str:
        """The rule's key in ``kernels.RULES``."""

    @property
    def device_kernel(self) -> DeviceKernel | None:
        """The part that the device computes between two passes of the kernel; None: there is one pass.

        The first pass (key ``"direction_"`` + ``kernel``) changes no state, and writes the matrices that the device
        gets. The second has the result as a further moment, which it leaves as it is.
        """
        return None

    def matrix(self, name: str, shape: Sequence[int], *, in_order: bool = True) -> Matrix | None:
        """Return the shape of the matrices that a parameter consists of, and that no bucket may cut; None: any run of
        elements may be updated alone. Ranks' shards and the kernel's threads do cut them: only :attr:`device_kernel`
        sees a whole one.

        Args:
            in_order: False: its elements do not lie row by row in memory.

        Raises:
            ParameterError: the rule cannot update such a parameter.
        """
        return None

    @abstractmethod
    def values(self, hyper: Any, t: int, matrix: Matrix | None) -> tuple[float, ...]:
        """Return the kernel's scalars (``oc_scalars.values``) for update number ``t``, counted from 1, of a parameter
        that consists of such matrices.

        Compute them in double, from ``t`` and never from a running product, so that a resumed run gives the same bits.
        The kernel rounds them.
        """

    def check(self, hyper: Hyper) -> None:
        """Raise :class:`ConfigError` if parameters that have this rule's states cannot be updated with ``hyper``."""
        if type(hyper) is not self.hyper:
            raise ConfigError(
                f"the states belong to optimizer={self.name!r}, and the hyperparameters are {hyper}; expected a group "
                "with that optimizer: make a new optimizer to change it"
            )

    def scalars(
        self, hyper: Any, t: int, matrix: Matrix | None = None, *, grad_scale: float
    ) -> tuple[float, tuple[float, ...], int]:
        """A row of ``kernels.SCALARS`` for update number ``t``, with this factor on the gradients."""
        values = self.values(hyper, t, matrix)
        return grad_scale, (*values, *[0.0] * (kernels.N_SCALARS - len(values))), t

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of all states, the master weight first."""
        return (MASTER, *(state.name for state in self.states))

    def segments(self, states: Mapping[str, StateMemory], offsets: np.ndarray, numels: np.ndarray) -> np.ndarray:
        """Return rows for the kernel: runs of the states at these offsets, with these numbers of elements.

        The caller fills in the gradients, the device parameters, the places in the parameters and the rows of scalars.
        """
        rows = np.zeros(len(offsets), kernels.SEGMENT)
        for moment, state in enumerate(self.states):
            states[state.name].at.point(rows, moment, offsets)
        if MASTER in states:
            states[MASTER].at.point(rows, None, offsets)
        rows["numel"] = numels
        return rows

    def directions(
        self, memory: kernels.Kernels, segments: np.ndarray, scalars: "Scalars", *, grad_dtype: ElementType
    ) -> None:
        """Write in bfloat16, to where the segments have a device parameter, what the device kernel gets.

        Args:
            memory: the kernels of the memory to which the segments point.
        """
        segments["master"] = segments["moments"][:, 0]  # of the same type, and not used
        memory.update(
            segments,
            scalars.table,
            rule=f"direction_{self.kernel}",
            grad_dtype=grad_dtype,
            param_dtype=BFLOAT16,
            keep_states=True,
        )

    def update(
        self,
        memory: kernels.Kernels,
        segments: np.ndarray,
        scalars: "Scalars",
        formats: Mapping[str, str],
        *,
        grad_dtype: ElementType,
        param_dtype: ElementType | None,
        keep_states: bool,
    ) -> None:
        """Unscale, clip, update, and round to the device parameters, in one pass over the segments.

        Args:
            memory: the kernels of the memory to which the segments point.
            formats: the names of the formats of the states that the segments point to, by state.
            param_dtype: the type of the device parameters to write; None: write none.
            keep_states: leave the states as they are, and write the device parameters only.
        """
        directions = [] if self.device_kernel is None else [BFLOAT16.name]
        memory.update(
            segments,
            scalars.table,
            rule=self.kernel,
            grad_dtype=grad_dtype,
            param_dtype=param_dtype,
            keep_states=keep_states,
            master_format=formats[MASTER],
            moment_formats=[*[formats[state.name] for state in self.states], *directions],
        )


class Scalars:
    """The kernel scalars of one step: a row for each distinct (group, shape of matrices, update number).

    Args:
        rules: the rule of each parameter; parameters of one group have the same.
        hypers: one for each parameter group.
        groups: the group of each parameter.
        matrices: shapes of matrices.
        of_shape: the number in ``matrices`` of the shape that each parameter consists of.
        steps: updates that each parameter has had.
        present: the parameters that have a gradient.
        grad_scale: the factor on the gradients.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        hypers: Sequence[Hyper],
        groups: Sequence[int],
        matrices: Sequence[Matrix | None],
        of_shape: np.ndarray,
        steps: np.ndarray,
        present: Collection[int],
        *,
        grad_scale: float,
    ) -> None:
        params = np.fromiter(present, np.int64, len(present))
        alike = np.asarray(groups, np.int64)[params] * len(matrices) + of_shape[params]
        counts = steps[params].astype(np.int64)
        pairs, first, of_param = np.unique(alike << _COUNT_BITS | counts, return_index=True, return_inverse=True)
        self.rows = np.full(len(groups), -1)
        """The row of ``table`` for each parameter; -1: it has no gradient."""
        self.rows[params] = of_param
        rows = []
        for pair, param in zip(pairs.tolist(), params[first].tolist(), strict=True):
            t, hyper = (pair & (1 << _COUNT_BITS) - 1) + 1, hypers[groups[param]]
            rules[param].check(hyper)
            rows.append(rules[param].scalars(hyper, t, matrices[of_shape[param]], grad_scale=grad_scale))
        self.table = np.array(rows, kernels.SCALARS)

    def present(self, params: Iterable[int], among: Collection[int] | None = None) -> frozenset[int]:
        """Return those of these parameters that have a row; ``among``: of these alone."""
        return frozenset(p for p in params if self.rows[p] >= 0 and (among is None or p in among))
