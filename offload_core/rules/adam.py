"""Adam and AdamW: the states that they keep, the scalars of a step, and the update."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

import numpy as np

from ..dtypes import ElementType
from ..native import kernels

STATE_NAMES = ("master", "exp_avg", "exp_avg_sq")
_COUNT_BITS = 32
"""Of a number of updates, which fp32 counts exactly up to 2^24."""


@dataclass(frozen=True)
class AdamHyper:
    """One parameter group's hyper-parameters for one step, as in ``torch.optim.AdamW`` and ``optax.adamw``."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    eps_root: float = 0.0
    bias_correction: Callable[[float, int], float] | None = None
    """``op_order="optax"``: 1 - beta^t as the framework's own float32 arithmetic gives it; None: in double."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """All of them but the function: ranks that have equal numbers update alike."""
        return tuple(map(float, (self.lr, *self.betas, self.eps, self.weight_decay, self.eps_root)))

    def scalars(
        self, t: int, *, op_order: str, grad_scale: float, mode: str = "adamw"
    ) -> tuple[float, tuple[float, ...], int]:
        """The kernel's scalars (``oc_scalars``) for update number ``t``, counted from 1.

        In double, from ``t`` and never from a running product, so that a resumed run gives the same bits. The kernel
        rounds them.
        """
        beta1, beta2 = self.betas
        if op_order == "torch":
            correction1, correction2 = 0.0, math.sqrt(1 - beta2**t)
            step_size = -self.lr / (1 - beta1**t)
        else:
            correct = self.bias_correction or (lambda beta, t: 1 - beta**t)
            correction1, correction2 = correct(beta1, t), correct(beta2, t)
            step_size = -self.lr
        l2, decoupled = (self.weight_decay, 0.0) if mode == "adam" else (0.0, self.weight_decay)
        values = (
            l2,
            decoupled,
            _decay(self.lr, decoupled),
            beta1,
            beta2,
            1 - beta1,
            1 - beta2,
            correction1,
            correction2,
            self.eps,
            self.eps_root,
            step_size,
        )
        return grad_scale, values, t


@lru_cache(maxsize=256)
def _decay(lr: float, weight_decay: float) -> float:
    """1 - lr * weight_decay, rounded once: torch's compiled fused kernel takes one FMA for it."""
    if weight_decay == 0:
        return 1.0
    if not (math.isfinite(lr) and math.isfinite(weight_decay)):
        return 1 - lr * weight_decay
    exact = 1 - Fraction(lr) * Fraction(weight_decay)
    return exact.numerator / exact.denominator if abs(exact) < 2**1000 else float("-inf")


class Scalars:
    """The kernel scalars of one step: a row for each distinct (group, update number).

    Args:
        rule: whose scalars they are.
        hypers: one for each parameter group.
        groups: the group of each parameter.
        steps: updates that each parameter has had.
        present: the parameters that have a gradient.
        grad_scale: the factor on the gradients.
    """

    def __init__(
        self,
        rule: "Adam",
        hypers: Sequence[AdamHyper],
        groups: Sequence[int],
        steps: np.ndarray,
        present: Collection[int],
        *,
        grad_scale: float,
    ) -> None:
        params = np.fromiter(present, np.int64, len(present))
        group, count = np.asarray(groups, np.int64)[params], steps[params].astype(np.int64)
        pairs, of_param = np.unique(group << _COUNT_BITS | count, return_inverse=True)
        self.rows = np.full(len(groups), -1)
        """The row of ``table`` that is each parameter's; -1: it has no gradient."""
        self.rows[params] = of_param
        values = [
            hypers[pair >> _COUNT_BITS].scalars(
                (pair & (1 << _COUNT_BITS) - 1) + 1, op_order=rule.op_order, grad_scale=grad_scale, mode=rule.mode
            )
            for pair in pairs.tolist()
        ]
        self.table = np.array(values, dtype=kernels.SCALARS)


class States(Protocol):
    """A run of a state in host memory."""

    def point(self, rows: np.ndarray, moment: int | None, offsets: np.ndarray) -> None:
        """Have the kernel's rows point to these elements of a moment, by its number; None: of the master."""
        ...


@dataclass(frozen=True)
class Adam:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) or Adam with L2 (Kingma and Ba, arXiv:1412.6980), as
    docs/numerics.md defines their arithmetic."""

    op_order: str
    """``"torch"`` or ``"optax"``: whose rounding."""
    mode: str
    """``"adamw"`` or ``"adam"``."""
    state_names = STATE_NAMES

    def segments(self, states: Mapping[str, States], offsets: np.ndarray, numels: np.ndarray) -> np.ndarray:
        """Rows for the kernel: runs of the states at these offsets, of so many elements.

        Gradients, device parameters, places in the parameters and the rows of scalars are the caller's to fill in.
        """
        rows = np.zeros(len(offsets), kernels.SEGMENT)
        moments = {name: i for i, name in enumerate(self.state_names[1:])}
        for name, array in states.items():
            array.point(rows, moments.get(name), offsets)
        rows["numel"] = numels
        return rows

    def update(
        self,
        segments: np.ndarray,
        scalars: Scalars,
        formats: Mapping[str, str],
        *,
        grad_dtype: ElementType,
        param_dtype: ElementType | None,
        threads: int,
        keep_states: bool,
    ) -> None:
        """One pass over the segments: unscale, clip, update, and round to the device parameters.

        Args:
            formats: the names of the formats of the states that the segments point to, by state.
            param_dtype: of the device parameters to write; None: none are written.
            keep_states: leave the states as they are, and write the device parameters only.
        """
        kernels.update(
            segments,
            scalars.table,
            grad_dtype=grad_dtype,
            param_dtype=param_dtype,
            rule=f"adam_{self.op_order}",
            threads=threads,
            keep_states=keep_states,
            master_format=formats["master"],
            moment_formats=[formats[name] for name in self.state_names[1:]],
        )
