"""Adam and AdamW: the states that they keep, the scalars of a step, and the update."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..config.state_formats import StateFormat
from ..dtypes import ElementType
from ..native import kernels

STATE_NAMES = ("master", "exp_avg", "exp_avg_sq")


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

    def scalars(self, t: int, *, op_order: str, grad_scale: float) -> tuple[float, ...]:
        """The kernel's scalars (``oc_adam_scalars``) for update number ``t``, counted from 1.

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
        return (
            grad_scale,
            self.weight_decay,
            1 - self.lr * self.weight_decay,
            beta1,
            beta2,
            1 - beta1,
            1 - beta2,
            correction1,
            correction2,
            self.eps,
            self.eps_root,
            step_size,
            t,
        )


class Scalars:
    """The kernel scalars of one step: a row for each distinct (group, update number).

    Args:
        rule: whose scalars they are.
        hypers: one for each parameter group.
        groups: the group of each parameter.
        steps: the number of this update, counted from 1, of each parameter that has a gradient.
        grad_scale: the factor on the gradients.
    """

    def __init__(
        self,
        rule: "Adam",
        hypers: Sequence[AdamHyper],
        groups: Sequence[int],
        steps: Mapping[int, int],
        *,
        grad_scale: float,
    ) -> None:
        rows: dict[tuple[int, int], int] = {}
        values: list[tuple[float, ...]] = []
        self.row_of: dict[int, int] = {}
        """The row of ``table`` that is each parameter's."""
        for param, step in steps.items():
            group = groups[param]
            key = (group, step)
            if key not in rows:
                rows[key] = len(values)
                values.append(hypers[group].scalars(step, op_order=rule.op_order, grad_scale=grad_scale))
            self.row_of[param] = rows[key]
        self.table = np.array(values, dtype=kernels.SCALARS)


class States(Protocol):
    """A run of a state in host memory."""

    @property
    def format(self) -> StateFormat: ...

    def addresses(self, offsets: np.ndarray) -> np.ndarray:
        """Where these elements lie."""
        ...

    def scale_addresses(self, offsets: np.ndarray) -> np.ndarray:
        """Where the scales of the blocks lie that these elements begin."""
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
        for name, array in states.items():
            rows[name] = array.addresses(offsets)
            if array.format.scaled:
                rows[f"{name}_scale"] = array.scale_addresses(offsets)
        rows["numel"] = numels
        return rows

    def update(
        self,
        segments: np.ndarray,
        scalars: Scalars,
        formats: Mapping[str, StateFormat],
        *,
        grad_dtype: ElementType,
        param_dtype: ElementType | None,
        threads: int,
        keep_states: bool,
    ) -> None:
        """One pass over the segments: unscale, clip, update, and round to the device parameters.

        Args:
            formats: of the states that the segments point to, by name.
            param_dtype: of the device parameters to write; None: none are written.
            keep_states: leave the states as they are, and write the device parameters only.
        """
        kernels.adam(
            segments,
            scalars.table,
            grad_dtype=grad_dtype,
            param_dtype=param_dtype,
            op_order=self.op_order,
            adam_mode=self.mode,
            threads=threads,
            keep_states=keep_states,
            **{f"{name}_format": format.name for name, format in formats.items()},
        )
