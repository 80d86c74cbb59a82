"""Reads and overwrites gradients on the host as torch tensors, between ``backward`` and ``step``."""

import numpy as np
import torch

from offload_core.engine import Engine
from offload_core.errors import GradientError, ParameterError, StateError
from offload_core.ranks.consistency import combine

from ..internals.private import NO_BACKWARD, backward_number
from ..params.slots import Slot
from ..params.tensors import flat_like, shaped_like
from ..ranks.device import as_torch
from .grad_hooks import GradHooks
from .registration import Registration
from .state_io import TorchStates


class TorchGradients:
    """Reads and overwrites the gradients of an optimizer's parameters.

    This object lives as long as the core, which holds the gradients themselves.
    """

    def __init__(self, core: Engine, registration: Registration, grad_hooks: GradHooks, states: TorchStates) -> None:
        self._core = core
        self._access = core.gradient_access
        self._registration = registration
        self._grad_hooks = grad_hooks
        self._states = states

    def whole(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of the whole gradient of a parameter that the next update would use. Collective.

        Returns:
            fp32 on the host, in the shape and memory order of the parameter (of a cut DTensor, in the whole shape).
            None: no rank has a gradient of the parameter, or the parameter has no states.

        Raises:
            StateError: ``update_in_backward`` has used the gradient; it is still in ``p.grad``; or a backward is
                running.
        """
        slot = self._slot(param)
        if slot is None:
            return None
        run = self._access.whole(slot.index, divisor=self._grad_hooks.divisor)
        if slot.placed.is_cut:
            return self._joined(slot, run)
        return None if run is None else shaped_like(as_torch(run), slot.values)

    def own(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of this rank's elements of the gradient that the next update would use.

        Returns:
            One-dimensional, fp32, on the host. None: no rank has a gradient of the parameter, or the parameter has no
            states.

        Raises:
            StateError: as :meth:`whole`.
        """
        slot = self._slot(param)
        runs = None if slot is None else self._access.own(slot.index, divisor=self._grad_hooks.divisor)
        if runs is None:
            return None
        return as_torch(np.concatenate([np.empty(0, np.float32), *(values for _, values in runs)]))

    def load(self, param: torch.Tensor, values: torch.Tensor, *, own: bool) -> None:
        """Overwrite the gradient of a parameter that the next update uses. All ranks must call this.

        Args:
            values: the whole gradient, in the parameter's shape and equal on all ranks; or this rank's elements of it,
                as :meth:`own` returns them.
            own: True: ``values`` are this rank's elements.

        Raises:
            StateError: as :meth:`whole`; or no rank has a gradient of the parameter.
            GradientError, ParameterError: the values do not fit the parameter, or the parameter has no states.
        """
        slot = self._slot(param)
        if slot is None:
            raise ParameterError(
                f"load_gradient: a parameter of shape {tuple(param.shape)} that this optimizer has no states of; "
                "expected one that it trains"
            )
        if not own and values.shape != param.shape:
            raise GradientError(
                f"load_gradient: parameter {slot.name!r}: got values of shape {tuple(values.shape)}, expected "
                f"{tuple(param.shape)}; this rank's part is loaded with own=True"
            )
        run = self._states.spread(slot, values) if own else _flat(slot, values)
        self._access.load(slot.index, run, divisor=self._grad_hooks.divisor)

    def _slot(self, param: torch.Tensor) -> Slot | None:
        slot = self._registration.slots.get(param)
        if self._grad_hooks.in_backward or backward_number() != NO_BACKWARD:
            raise StateError(
                "a gradient is read or written in the middle of a backward; expected it between backward() and step(): "
                "a hook sees the gradient if it is registered with p.register_hook()"
            )
        if slot is not None:
            self._grad_hooks.check_taken(slot)
        return slot

    def _joined(self, slot: Slot, run: np.ndarray | None) -> torch.Tensor | None:
        """Return the whole gradient of a DTensor, merged from all processes' elements; None: no process has a gradient.

        Args:
            run: this process's elements, one-dimensional; None: this process has no gradient.
        """
        collectives = self._core.collectives
        what = f"parameter {slot.name!r}: has a gradient"
        flags = [int(run is not None)]
        if not combine(collectives, what, sums=flags).sums.any():
            return None
        if run is None:
            run = np.zeros(self._core.params[slot.index].numel, np.float32)
        return self._states.joined(slot, "gradient", shaped_like(as_torch(run), slot.values))


def _flat(slot: Slot, values: torch.Tensor) -> np.ndarray:
    return flat_like(slot.placed.own(values).detach().to("cpu", torch.float32), slot.values).numpy()
