"""Flattens and checks torch tensors for the core, and stands in for gradients that the core has taken."""

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload_core.device.exchange_sizes import REFUSED_DEVICES
from offload_core.dtypes import BFLOAT16, BYTE, FLOAT16, FLOAT32, SAFETENSORS_NAMES, ElementType
from offload_core.errors import GradientError, ParameterError
from offload_core.layout.partition import ParamSpec
from offload_core.layout.regions import Elements, InMemory
from offload_core.support.checks import kind_of

from ..internals.compiled import COMPILED
from ..internals.private import DISPATCH_ALONE, NO_BACKWARD, backward_number, no_read
from .dtensor import Placed, is_dtensor, is_here, local_of

ELEMENT_TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
DTYPE: Any = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_ADDITIONS = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
MOVED_TYPES = ELEMENT_TYPES | {torch.uint8: BYTE}
"""The element types of tensors that the engine moves; tensors of :data:`ELEMENT_TYPES` may also train."""
TORCH_DTYPES = {element_type: dtype for dtype, element_type in MOVED_TYPES.items()}
NUMPY_DTYPES = {getattr(torch, dtype.name): dtype for dtype in SAFETENSORS_NAMES}
"""The NumPy types of all torch types that files can hold."""


def memory_order(tensor: torch.Tensor) -> list[int] | None:
    """Return the permutation of dimensions that makes a dense tensor contiguous; None if it is contiguous.

    Raises:
        ParameterError: the tensor has gaps or overlaps in memory.
    """
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dims = [i for i in order if tensor.shape[i] != 1]
    dense = [math.prod(tensor.shape[i] for i in dims[k + 1 :]) for k in range(len(dims))]  # a view may have no storage
    if [tensor.stride(i) for i in dims] != dense:
        raise ParameterError(
            f"parameter of shape {tuple(tensor.shape)} and strides {tensor.stride()} is a view with gaps or overlaps; "
            "expected a dense tensor: make it its own, with torch.nn.Parameter(p.detach().contiguous())"
        )
    return order


def flat(param: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional view of a dense tensor, in its order in memory (channels_last stays in place)."""
    order = memory_order(param)
    detached = param.detach()
    return detached.view(-1) if order is None else detached.permute(order).view(-1)


def flat_like(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Flatten ``tensor``, which has ``param``'s shape, in ``param``'s order in memory; copy it only if necessary."""
    order = memory_order(param)
    detached = tensor.detach().resolve_neg()
    return (detached if order is None else detached.permute(order)).reshape(-1).contiguous()


def memory(run: torch.Tensor) -> np.ndarray:
    """Return a NumPy view of a one-dimensional host tensor, also of bfloat16, which ``Tensor.numpy`` refuses."""
    dtype = NUMPY_DTYPES[run.dtype]
    if run.numel() == 0:
        return np.empty(0, dtype)
    return run.view(torch.uint8).numpy().view(dtype)


def shaped_like(run: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a view of a one-dimensional tensor with ``param``'s shape and order: the inverse of :func:`flat`."""
    return shaped(run, elements_of(param))


def shaped(run: torch.Tensor, elements: InMemory) -> torch.Tensor:
    """Return a view of a one-dimensional tensor of ``elements``, with their shape and memory order."""
    if elements.order is None:
        return run.view(elements.shape)
    inverse = sorted(range(len(elements.order)), key=elements.order.__getitem__)
    return run.view([elements.shape[i] for i in elements.order]).permute(inverse)


_WRAPPERS = re.compile(rf"\b({COMPILED}|_checkpoint_wrapped_module)\.")
"""Parts of a parameter's name that ``torch.compile`` and ``checkpoint_wrapper`` add. They are removed from the name
that seeds random numbers."""


def spec_of(
    name: str,
    param: torch.Tensor,
    group: int,
    target: ElementType | None = None,
    partitioned: bool = False,
    elements: Elements | None = None,
) -> ParamSpec:
    """Return the core's description of a parameter.

    Args:
        param: the tensor that holds the parameter's values on this process.
        target: the element type that the parameter will be cast to; None: the type of ``param``.
        elements: the elements that ``param`` has; None: all elements, in their order in memory.
    """
    dtype = target or ELEMENT_TYPES[param.dtype]
    plain = _WRAPPERS.sub("", name)
    return ParamSpec(name, param.numel(), dtype, group, elements or elements_of(param), partitioned, seed_name=plain)


def elements_of(tensor: torch.Tensor) -> InMemory:
    """Return the order in which :func:`flat` lists a tensor's elements."""
    order = memory_order(tensor)
    return InMemory(tuple(tensor.shape), None if order is None else tuple(order))


def check_param(name: str, param: torch.Tensor) -> None:
    """Raise :class:`ParameterError` unless the parameter can be offloaded."""
    expected = "expected a dense float32, bfloat16 or float16 tensor on the CPU or an accelerator"
    if isinstance(param, torch.nn.UninitializedParameter):
        raise ParameterError(
            f"parameter {name!r} has no shape yet; {expected}: run one forward of the lazy module first"
        )
    if is_dtensor(param):
        local = local_of(param)
        check_param(name, local)
        if is_here(param):  # else all processes raise together (``count_once``)
            Placed.of(name, param, memory_order(local))
        return
    if getattr(param, "_fsdp_flattened", False):
        raise ParameterError(
            f"parameter {name!r} belongs to FullyShardedDataParallel (FSDP1), which has a part of it here that nothing "
            "describes; expected fully_shard (FSDP2), or wrap() of the module without it"
        )
    if is_traceable_wrapper_subclass(param):
        raise ParameterError(
            f"parameter {name!r} is {kind_of(param)}, whose values are in other tensors; {expected}: freeze it "
            "if it is quantised (requires_grad_(False)), and train adapters"
        )
    if param.is_inference():
        raise ParameterError(f"parameter {name!r} was made in inference mode and cannot train; {expected}")
    if param.dtype.is_complex:
        raise ParameterError(
            f"parameter {name!r} is complex ({param.dtype}); {expected}: hold its real and imaginary parts as two "
            "parameters (torch.view_as_real)"
        )
    if param.dtype not in ELEMENT_TYPES:
        raise ParameterError(
            f"parameter {name!r} has dtype {param.dtype}; {expected}: convert it first (model.float())"
        )
    if param.layout is not torch.strided:
        raise ParameterError(f"parameter {name!r} has layout {param.layout}; {expected}")
    if param.device.type == "meta":
        raise ParameterError(
            f"parameter {name!r} is on the meta device and holds no values; {expected}: materialise the model first "
            "(model.to_empty(device=...) and load its weights)"
        )
    if (refusal := refusal_of(param.device)) is not None:
        raise ParameterError(f"parameter {name!r} is on {param.device}; {expected} with streams: {refusal}")
    try:
        memory_order(param)
    except ParameterError as error:
        raise ParameterError(f"{name!r}: {error}") from None


def refusal_of(device: torch.device) -> str | None:
    """Return the reason why parameters on this device cannot be offloaded; None: they can."""
    if device.type in REFUSED_DEVICES:
        return REFUSED_DEVICES[device.type]
    accelerator = torch.accelerator.current_accelerator()
    if device.type != "cpu" and (accelerator is None or device.type != accelerator.type):
        return f"this process's accelerator is {accelerator.type if accelerator else 'none'}"
    return None


def usable_accelerator() -> torch.device | None:
    """Return this process's accelerator, if torch sees one and parameters on it can be offloaded."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and refusal_of(found) is None else None


def is_offloadable(param: torch.Tensor) -> bool:
    """Return True if :func:`check_param` passes."""
    try:
        check_param("", param)
    except ParameterError:
        return False
    return True


def cast_param(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Cast a parameter in place, and its gradient if it has one."""
    if param.dtype != dtype:
        gradient, param.grad = param.grad, None
        param.data = param.data.to(dtype)
        if gradient is not None:
            param.grad = gradient.to(dtype)


def bytes_as(tensor: torch.Tensor, target: ElementType | None) -> int:
    """Return the bytes of the tensor, cast to this element type if it is floating-point."""
    return tensor.numel() * (target.itemsize if target and tensor.is_floating_point() else tensor.element_size())


def tensors_in(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield ``tensor`` itself, or, if it is a wrapper subclass, the plain tensors inside it, also inside nested
    ones."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from tensors_in(getattr(tensor, name))


def memory_of_all(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' memory, counting each storage once."""
    storages = {}
    with no_read():
        for tensor in chain.from_iterable(map(tensors_in, map(local_of, tensors))):
            if tensor.layout is not torch.strided:  # sparse: values, and int64 indices
                storages[-id(tensor)] = tensor._nnz() * (tensor.element_size() + 8 * tensor.dim())
                continue
            try:
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
            except NotImplementedError:  # a wrapper class that does not show the tensors inside
                storages[-id(tensor)] = tensor.nbytes
    return sum(storages.values())


def check_gradient(name: str, param: torch.Tensor, gradient: torch.Tensor) -> None:
    """Raise :class:`GradientError` unless the gradient fits its parameter."""
    if gradient.layout is not torch.strided:
        raise GradientError(
            f"parameter {name!r}: the gradient is sparse ({gradient.layout}), expected a dense one; "
            "make the embedding with sparse=False"
        )
    for what in ("shape", "dtype", "device"):
        got, expected = getattr(gradient, what), getattr(param, what)
        if got != expected:
            raise GradientError(f"parameter {name!r}: the gradient has {what} {got}, expected {expected}")


class TakenGradient(torch.Tensor):
    """The stand-in in ``p.grad`` for a gradient that was taken to the host: its shape without its memory.

    Adding to it adds to the gradient on the host. Autograd accumulates this way. Any other use raises, so that clipping
    or scaling from outside is never lost silently. Setting ``p.grad = None`` (``zero_grad``) also discards the gradient
    on the host; assigning a tensor replaces it.
    """

    __torch_function__ = DISPATCH_ALONE  # type: ignore[assignment]
    _name: str
    _added: Callable[[torch.Tensor], None] | None

    @staticmethod
    def __new__(cls, param: torch.Tensor, name: str) -> "TakenGradient":
        taken = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device, requires_grad=False
        )
        taken._name = name
        taken._added = None
        return taken

    def when_added(self, callback: Callable[[torch.Tensor], None] | None) -> None:
        """Call ``callback`` with each tensor that is added to this gradient; None: refuse additions."""
        self._added = callback

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        taken = next((a for a in _flatten(args) if isinstance(a, cls)), None)
        if (
            func in _ADDITIONS
            and taken is args[0]
            and taken._added
            and isinstance(args[1], torch.Tensor)
            and not kwargs
        ):
            taken._added(args[1])
            return taken
        name = taken._name if taken is not None else "?"
        if backward_number() != NO_BACKWARD:
            raise GradientError(
                f"parameter {name!r}: {func} in backward, on a gradient that has already left for the host. Is there a "
                "DistributedDataParallel or FSDP around the engine or its model? The engine averages gradients itself; "
                "expected wrap(model) of the module without it, and nothing around the engine. A hook of your own "
                "sees the gradient if it is registered with p.register_hook()"
            )
        user = _user()
        if user is not None:
            raise GradientError(f"parameter {name!r}: {user}")
        raise GradientError(
            f"parameter {name!r}: {func} on a gradient that has already left for the host; it would be lost. Clip with "
            "wrap(..., gradient_clipping=...), read and change it with engine.optimizer.whole_gradient(p) and "
            "load_gradient(p, values), discard with zero_grad(set_to_none=True), move or cast the model before "
            "wrap(), or use OffloadedAdamW without early_copy, which reads p.grad at step()"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TakenGradient({self._name!r}, shape={tuple(self.shape)})"


def _user() -> str | None:
    """Return the error text for a ``GradScaler`` or an optimizer among the callers; None: there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        user = frame.f_locals.get("self")
        if isinstance(user, torch.amp.GradScaler):
            return (
                "a GradScaler reads a gradient that has already left for the host; expected engine.backward(loss) and "
                "engine.step() alone: no GradScaler is needed, as float16 parameters have loss scaling here"
            )
        if isinstance(user, torch.optim.Optimizer):
            return (
                f"{type(user).__name__} reads a gradient that has already left for the host; expected engine.step() in "
                "place of that optimizer's step(): the engine updates the parameters itself. Leave those that another "
                "optimizer updates out: wrap(model, params=[...])"
            )
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _flatten(args: Iterable[Any]) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, list | tuple):
            yield from _flatten(arg)
        else:
            yield arg
