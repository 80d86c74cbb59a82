"""States and gradients of one parameter, whose optimizer is found, also between backward and step.

On several ranks all call these functions alike.
"""

import torch

from offload_core.errors import StateError

from ..optim.optimizer import optimizer_of
from ..params.dtensor import local_of
from ..params.tensors import TakenGradient


def get_state(param: torch.Tensor, name: str, *, own: bool) -> torch.Tensor | None:
    """Return a copy of a state, whole or this rank's part (``own``), on the parameter's device; None: it has none.

    Raises:
        StateError: its rule has no state of that name.
    """
    optimizer = optimizer_of(param)
    if optimizer is None:
        return None
    read = optimizer.own_states if own else optimizer.whole_states
    try:
        return read(param, [name])[name].to(param.device)
    except KeyError:
        known = ", ".join(map(repr, optimizer.own_states(param)))
        raise StateError(f"state {name!r} of a parameter that has none of that name; expected one of {known}") from None


def set_state(param: torch.Tensor, value: torch.Tensor, name: str, *, own: bool) -> None:
    """Overwrite a state, whole or this rank's part."""
    if (optimizer := optimizer_of(param)) is not None:
        optimizer.load_state(param, name, value if own else _shaped(value, param), own=own)


def _shaped(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    return value.reshape(param.shape) if value.numel() == param.numel() else value


def left_in_place(param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that the engine has not taken (``no_sync``, or no engine at all)."""
    gradient = param.grad
    return None if gradient is None or isinstance(local_of(gradient), TakenGradient) else gradient


def get_gradient(param: torch.Tensor, *, own: bool) -> torch.Tensor | None:
    """Return a copy of a gradient, multiplied by the loss scale: whole or this rank's part; None: there is none."""
    optimizer = optimizer_of(param)
    if optimizer is None:
        return None
    found = optimizer.own_gradient(param) if own else optimizer.whole_gradient(param)
    return None if found is None else found.mul_(optimizer.core.loss_scale).to(param.device)


def set_gradient(param: torch.Tensor, value: torch.Tensor, *, own: bool) -> None:
    """Overwrite a gradient, which carries the loss scale: whole or this rank's part."""
    if (optimizer := optimizer_of(param)) is not None:
        unscaled = value.detach().float() / optimizer.core.loss_scale
        optimizer.load_gradient(param, unscaled if own else _shaped(unscaled, param), own=own)
