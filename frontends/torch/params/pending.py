"""Tensors whose values are missing for now (``residency.py``), and the doors through which they are read.

Before its forward, a module waits for its own pending parameters, because its code may read them in a way that torch
does not see (TorchScript, or an extension in C++). It does not wait for parameters of inner modules, so the first layer
of the next forward starts while the last layer is being updated. A compiled module also waits for the parameters of
inner modules.

Outside of modules, a pending parameter has the class :class:`PendingParameter`. A torch function that could see its
values first waits for this parameter, or gathers it, and restores its class. Functions that only see its shape or its
gradient (:data:`METADATA`) do not wait. So state_dict(), evaluation and reads by hand also see finished values.

Every door calls :func:`await_values`. Calls during garbage collection use :func:`await_values_of_garbage`:

===============================================  ==========================================
a read by                                        waits in
===============================================  ==========================================
a torch function                                 ``_Pending.__torch_function__``
a copy of the tensor or its model                ``_Pending.__deepcopy__``
a module's forward, in Python, C++, TorchScript  ``_before_forward``
a compiled module                                ``AwaitsInside``
code that is being compiled                      ``await_for_compiled_code``, which leaves the tensor pending
methods of a DTensor                             ``_read_local``, ``_replace_local``
FSDP2's ``unshard``                              ``fsdp.py``
a backward that saved a tensor in shards         ``stage3/saved.py``, which gathers the tensor
a graph from before a release                    ``DeviceMemory.before_backward``
a release of tensors that another engine uses    ``DeviceMemory._await_others``
an optimizer that takes over or ends            ``Registration._new``, ``ElementsInPlace.unregister``
===============================================  ==========================================
"""

import copy
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from offload_core.errors import StateError

from ..internals.compiled import (
    Around,
    allow_hooks,
    asked_once,
    breaks_graph,
    is_compiling,
    is_scripted,
    is_traced,
    untraced,
)
from ..internals.private import local_tensor, no_read
from .dtensor import dtensor_class
from .managed import AWAITED, WHEN_DELETED, Wait, manage, managed
from .residency import RESIDENCY, Residency, ResidencyEvent

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

_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward)
"""Torch functions that take parameters (``inputs``) as nodes of a graph, and do not read their values."""


def _edge(param: "_Pending") -> GradientEdge:
    with no_read():
        return get_gradient_edge(cast(torch.Tensor, param))


class _Pending:
    """The base class of pending tensors. The first read of a pending tensor restores its own class."""

    __slots__ = ()
    own_class: type = nn.Parameter
    """The class that the tensor has while it is not pending."""
    breaks_graphs = False
    """True if a graph that is being traced must break before it reads the tensor. A tensor in shards has values only
    for a time, and a finished graph does not recognise pending tensors that are not parameters."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        await_values(cast(torch.Tensor, self))
        return copy.deepcopy(self, memo)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.breaks_graphs and is_traced():
            return _call_outside_graphs(func, args, kwargs)
        in_graph = is_compiling() and not cls.breaks_graphs
        if in_graph:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, _Pending):
                    await_for_compiled_code(leaf)  # type: ignore[arg-type]
        if in_graph or func in METADATA:
            with no_read():
                return func(*args, **(kwargs or {}))
        if func in _DIFFERENTIATE:
            return func(*tree_map_only(_Pending, _edge, args), **tree_map_only(_Pending, _edge, kwargs or {}))
        return _await_values_and_call(func, args, kwargs)


def _await_values_and_call(func: Any, args: Any, kwargs: Any) -> Any:
    for leaf in tree_leaves((args, kwargs)):
        await_values(leaf)
    return func(*args, **(kwargs or {}))


@breaks_graph
def _call_outside_graphs(func: Any, args: Any, kwargs: Any) -> Any:
    return _await_values_and_call(func, args, kwargs)


class PendingParameter(_Pending, nn.Parameter):
    """A pending ``nn.Parameter``."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        return nn.Parameter(data, requires_grad)  # a new object has values


def _read_local(param: Any) -> torch.Tensor:
    await_values(param)
    return local_tensor(param)


def _replace_local(param: Any, local: torch.Tensor) -> None:
    await_values(param)
    param._local_tensor = local


_WAITING_LOCAL = property(_read_local, _replace_local)
"""The attribute ``_local_tensor`` of a pending DTensor. Each read of it waits, because ``to_local``, ``full_tensor``
and FSDP2 read it without a torch function."""
_PENDING: dict[type, type] = {nn.Parameter: PendingParameter}
"""Maps a parameter's own class to the class that it has while it is written or released."""


_BREAKING: dict[type, type] = {}
"""Maps a tensor's own class to its pending class with ``breaks_graphs``."""


def is_pending(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's values are missing for now."""
    return isinstance(tensor, _Pending)


def is_in_shards(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's values are missing because this process has a shard of it."""
    return residency_of(tensor) is Residency.SHARDED


def own_class_of(tensor: torch.Tensor) -> type:
    """Return the class that the tensor has while it is not pending."""
    return tensor.own_class if isinstance(tensor, _Pending) else type(tensor)


_READ_WHAT_IS_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules that, in evaluation, pass the weights of inner modules to one C++ function if all these weights are plain
parameters."""


def _before_forward(module: nn.Module, args: Any) -> None:
    """Wait for the parameters that a module's forward reads in ways that torch does not show."""
    if is_traced() or not AWAITED:
        return
    inside = is_scripted(module) or (isinstance(module, _READ_WHAT_IS_INSIDE) and not module.training)
    await_all(module.parameters() if inside else module._parameters.values())


def await_all(params: Iterable[torch.Tensor | None]) -> None:
    """Wait for each of these parameters that an update still writes."""
    for param in params:
        if param is not None and managed(param) in AWAITED:
            await_values(param)


class AwaitsInside(Around):
    """Runs a compiled module after waiting for updates of parameters inside it ([Note: compiled modules] in
    ``compiled.py``). While the module runs, the hook on all modules is removed, because torch would compile another
    graph for it."""

    def needed(self) -> bool:
        return bool(AWAITED)

    def __call__(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        global _in_compiled_code
        await_all(module.parameters())
        _in_compiled_code += 1
        _watch_modules()
        try:
            return forward()
        finally:
            _in_compiled_code -= 1
            _watch_modules()


_in_compiled_code = 0
"""The number of forwards of compiled modules that are running."""
_NUMBER = RemovableHandle(OrderedDict()).id
"""The id of the hook on all modules. The id never changes, because torch compiles another graph if the ids of hooks
change."""


def _watch_modules() -> None:
    """While an update writes any parameter, have every called module wait for its own parameters.

    Another thread may call this at the same time. At worst the hook stays, and finds nothing to wait for. It also stays
    while code is being compiled: the compiler reads the hooks twice, and in between garbage collection may delete the
    last pending parameter.
    """
    if (watch := bool(AWAITED and not _in_compiled_code)) and _NUMBER not in _global_forward_pre_hooks:
        allow_hooks()  # the second call finds nothing to wait for
        _global_forward_pre_hooks[_NUMBER] = _before_forward
    elif not watch and _NUMBER in _global_forward_pre_hooks and not is_compiling():
        _global_forward_pre_hooks.pop(_NUMBER, None)
        if AWAITED and not _in_compiled_code:
            _watch_modules()


WHEN_DELETED.append(_watch_modules)


@asked_once
def await_for_compiled_code(param: torch.Tensor) -> bool:
    """Wait for a parameter that a graph reads, while the graph is compiled. The parameter stays pending, because the
    graph is compiled for its pending class.

    The finished graph calls no wait before it reads. So :data:`compiled_code_reads` tells later steps to wait for their
    updates. Parameters of other models are not awaited here, because a parameter that was sent early raises before its
    step. Only if ``param`` is a tensor without values, which the compiler passes in place of the parameter, all
    parameters are awaited.
    """
    global compiled_code_reads
    compiled_code_reads = True
    read = [param] if isinstance(param, _Pending) else [each.tensor for each in [*AWAITED]]
    for tensor in read:
        if tensor is not None and (wait := managed(tensor).wait) is not None:
            wait(tensor)
    return True


compiled_code_reads = False
"""True if compiled code reads a parameter of a model that is not compiled itself."""


def can_wait(param: torch.Tensor) -> bool:
    """True if readers of the parameter can be made to wait."""
    own = own_class_of(param)
    return own is nn.Parameter or own is dtensor_class()


def residency_of(tensor: torch.Tensor) -> Residency:
    """Return the tensor's residency, which says whether the tensor may be read now."""
    return managed(tensor).residency if isinstance(tensor, _Pending) else Residency.RESIDENT


def where(tensors: Iterable[torch.Tensor]) -> str:
    """Return a line with the number of tensors in each residency, for a report of what a process waits for."""
    counts = Counter(residency_of(tensor).value for tensor in {id(tensor): tensor for tensor in tensors}.values())
    return f"tensors: {', '.join(f'{count} {residency}' for residency, count in counts.items()) or 'none'}"


def update(param: torch.Tensor, wait: Wait) -> None:
    """Record that an update writes the parameter: call ``wait`` before its next read, or now if its class cannot wait.

    If ``wait`` raises, the parameter stays pending.
    """
    if can_wait(param):
        _move(param, ResidencyEvent.UPDATE, wait)
    else:
        wait(param)


def release(tensor: torch.Tensor, wait: Wait) -> None:
    """Record that the tensor loses its memory. Each read calls ``wait``, which raises until the tensor is restored. The
    tensor may have any class that is no wrapper of other tensors."""
    _move(tensor, ResidencyEvent.RELEASE, wait)


def restore(tensor: torch.Tensor, wait: Wait) -> None:
    """Record that a restore fills a tensor that was released with this ``wait``. Do nothing if another engine has
    released the tensor since."""
    if managed(tensor).wait is wait:
        _move(tensor, ResidencyEvent.RESTORE, wait)


def shard(tensor: torch.Tensor, wait: Wait) -> None:
    """Record that the tensor is in shards: call ``wait`` before its next read. The tensor may have any class that is no
    wrapper of other tensors."""
    _move(tensor, ResidencyEvent.SHARD, wait)


def arrive(tensor: torch.Tensor) -> None:
    """Clear the pending mark: the tensor has its values."""
    _move(tensor, ResidencyEvent.ARRIVE, None)


def end_wait(tensor: torch.Tensor, wait: Wait) -> None:
    """Clear the pending mark if ``wait`` is still the tensor's wait. Other code may have set another one."""
    if managed(tensor).wait is wait:
        arrive(tensor)


def _move(tensor: torch.Tensor, event: ResidencyEvent, wait: Wait | None) -> None:
    """Change the tensor's residency as :data:`RESIDENCY` says for the event. If the event is not allowed, raise
    :class:`StateError` and change nothing. The class is set last, because a signal handler may read the tensor
    before."""
    before = residency_of(tensor)
    after = RESIDENCY.get((before, event))
    if after is None:
        with no_read():
            what = f"a tensor {tuple(tensor.shape)} of {tensor.dtype}"
        raise StateError(f"{what}: {event.value!r} is not allowed while it is {before.value!r}")
    this = manage(tensor)
    if wait is None:
        if isinstance(tensor, _Pending):
            tensor.__class__ = tensor.own_class
        this.wait, this.residency = None, after
        if this in AWAITED:
            AWAITED.discard(this)
            _watch_modules()
        this.end_keeping()
        return
    this.wait, this.residency = wait, after
    this.keep(tensor)
    if after is not Residency.SHARDED:
        AWAITED.add(this)
        _watch_modules()
    tensor.__class__ = _CLASS_IN[after](own_class_of(tensor))


def _class_awaited(own: type) -> type:
    if own is not nn.Parameter and own is not dtensor_class():
        return _class_that_breaks_graphs(own)
    if own not in _PENDING:
        _PENDING[own] = _new_class((_Pending, own), own, _local_tensor=_WAITING_LOCAL)
    return _PENDING[own]


def _class_that_breaks_graphs(own: type) -> type:
    if own not in _BREAKING:
        bases = (PendingParameter,) if own is nn.Parameter else (_Pending, own)
        _BREAKING[own] = _new_class(bases, own, breaks_graphs=True)
    return _BREAKING[own]


_CLASS_IN: dict[Residency, Callable[[type], type]] = {
    Residency.WRITING: _class_awaited,
    Residency.RELEASED: _class_awaited,
    Residency.SHARDED: _class_that_breaks_graphs,
}
"""Maps a residency to a function that returns the pending class for a tensor's own class."""


def _new_class(bases: tuple[type, ...], own: type, **members: Any) -> type:
    return types.new_class(
        f"Pending{own.__name__}", bases, exec_body=lambda space: space.update(members, own_class=own)
    )


@untraced
def await_values(param: Any) -> None:  # waits
    """Wait for the parameter, if it is pending."""
    await_values_of_garbage(param)


def await_values_of_garbage(param: torch.Tensor) -> None:  # waits
    """Wait for the parameter, if it is pending, without importing the compiler: for calls during garbage collection."""
    if isinstance(param, _Pending):
        wait = managed(param).wait
        if wait is not None:  # None: a signal handler has just waited for the parameter
            wait(param)
        arrive(param)


def is_moving_model() -> bool:
    """Return True if a module's ``to()``, ``bfloat16()``, ``cuda()`` or the like runs in this thread."""
    frame = sys._getframe(1)
    while frame.f_code is not nn.Module._apply.__code__:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return True


def have_been_written(params: Iterable[torch.Tensor]) -> None:
    """Clear the pending mark of parameters that an update has written, so that new graphs are compiled for their own
    class."""
    for param in [param for param in params if managed(param) in AWAITED] if AWAITED else ():
        arrive(param)
