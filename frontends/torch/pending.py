"""Parameters whose values are missing for now: an update still writes them, or they are in shards (stage 3).

Meanwhile a parameter's class is :class:`PendingParameter`. A torch function that could see its values first waits for
this one parameter, or gathers it, and restores its class; functions that only see shape, gradient and the like do not
wait. So the first layer of the next forward starts while the last one is being updated, and state_dict(), evaluation
or a read by hand see finished values.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

_WAITS: dict[int, Callable[[], None]] = {}
"""The function to call before a pending parameter is read, by the parameter's ``id``."""

_PROPERTIES = ("grad", "shape", "dtype", "device", "requires_grad", "layout", "ndim", "is_leaf", "grad_fn", "is_cuda",
               "is_cpu", "is_sparse", "is_meta", "is_quantized", "nbytes", "itemsize", "names", "_version",
               "_backward_hooks", "_post_accumulate_grad_hooks")  # fmt: skip
_METHODS = ("size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex",
            "element_size", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "is_inference",
            "storage_offset", "__len__", "__hash__")  # fmt: skip


def _metadata() -> frozenset[Any]:
    properties = [getattr(torch.Tensor, name) for name in _PROPERTIES if hasattr(torch.Tensor, name)]
    accessors = [getattr(p, way) for p in properties for way in ("__get__", "__set__", "__delete__") if hasattr(p, way)]
    return frozenset([*accessors, *(getattr(torch.Tensor, name) for name in _METHODS)])


METADATA = _metadata()
"""Torch functions that do not see values."""


class PendingParameter(nn.Parameter):
    """An ``nn.Parameter`` until somebody reads it."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        return nn.Parameter(data, requires_grad)  # a new object of this type is a plain parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        settle(self)
        return copy.deepcopy(self, memo)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, PendingParameter):
                settle(leaf)
        return func(*args, **(kwargs or {}))


def can_wait(param: torch.Tensor) -> bool:
    """Return whether readers of the parameter can be made to wait."""
    return type(param) in (nn.Parameter, PendingParameter)


def make_pending(param: torch.Tensor, wait: Callable[[], None]) -> None:
    """Call ``wait`` before the parameter's next read; for a parameter of a class of its own, call it now.

    If ``wait`` raises, the parameter stays pending.
    """
    if can_wait(param):
        _WAITS[id(param)] = wait
        param.__class__ = PendingParameter
    else:
        wait()


@torch._disable_dynamo
def settle(param: torch.Tensor) -> None:
    """Wait for the parameter, if it is pending."""
    if isinstance(param, PendingParameter):
        wait = _WAITS.get(id(param))
        if wait is not None:  # else a signal handler has settled it just now
            wait()
        forget(param)


def forget(param: torch.Tensor) -> None:
    """Record that the parameter is not pending."""
    if isinstance(param, PendingParameter):
        param.__class__ = nn.Parameter  # type: ignore[assignment]
    _WAITS.pop(id(param), None)


def forget_at_end(param: torch.Tensor) -> None:
    """Drop the parameter's entry when it is deleted."""
    weakref.finalize(param, _WAITS.pop, id(param), None).atexit = False
