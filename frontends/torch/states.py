"""An optimizer's states as torch sees them: views of the host's memory, and their way through ``state_dict``."""

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload_core.errors import StateError
from offload_core.pipeline import Pipeline

from .tensors import shaped_like


class States(defaultdict):
    """States by parameter. Whoever looks at them waits for the last update to end."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__(dict)
        self._finish = weakref.WeakMethod(finish)

    def _wait(self) -> None:
        finish = self._finish()
        if finish is not None:
            finish()

    def __getitem__(self, param: Any) -> Any:
        self._wait()
        return super().__getitem__(param)

    def get(self, param: Any, default: Any = None) -> Any:
        self._wait()
        return super().get(param, default)

    def items(self) -> Any:
        self._wait()
        return super().items()

    def values(self) -> Any:
        self._wait()
        return super().values()


@dataclass(frozen=True)
class Hidden:
    """A state entry on its way through ``Optimizer.load_state_dict``, which would cast bare tensors."""

    value: Any


class HostState(torch.Tensor):
    """A state, which stays on the host: Accelerate and Lightning call ``to(device)`` of all that an optimizer holds.

    Copies, files and the results of any function are plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As ``Tensor.to``; where no other dtype is asked for, this one."""
        dtype = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})[1]
        if kwargs.get("copy") or dtype not in (None, self.dtype):
            return self.as_subclass(torch.Tensor).to(*args, **kwargs)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = copy.deepcopy(self.as_subclass(torch.Tensor), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def state_views(pipeline: Pipeline, index: int, param: torch.Tensor) -> dict[str, torch.Tensor]:
    views: dict[str, torch.Tensor] = {"step": torch.from_numpy(pipeline.steps[index])}
    states = pipeline.local_states(index)
    alone = pipeline.device.world_size == 1
    if states:
        runs = {name: torch.from_numpy(array) for name, array in states.items()}
        views |= {name: shaped_like(run, param) for name, run in runs.items()} if alone else runs
    else:  # a parameter of no elements, or none of them this rank's
        views |= {name: torch.empty(param.shape if alone else 0) for name in ("exp_avg", "exp_avg_sq")}
    return {name: view.as_subclass(HostState) for name, view in views.items()}


def check_entry(name: str, expected: torch.Tensor, entry: Mapping[str, Any]) -> None:
    for key in ("exp_avg", "exp_avg_sq"):
        value = entry.get(key)
        if not isinstance(value, torch.Tensor) or value.shape != expected.shape:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            raise StateError(
                f"load_state_dict: parameter {name!r}: {key} is {got}, expected a tensor of shape "
                f"{tuple(expected.shape)}; is this the state of another model, or of another optimizer?"
            )
    if "step" not in entry:
        raise StateError(f"load_state_dict: parameter {name!r}: no 'step', expected the number of updates made")


def hide_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return {**state_dict, "state": {key: Hidden(entry) for key, entry in state_dict["state"].items()}}
