"""Parameters whose values are missing for now: an update still writes them, or they are in shards (stage 3).

A module that is called first waits for its own pending parameters, because its code may be one that torch does not see:
TorchScript, or an extension in C++. It does not wait for those of modules inside it, so the first layer of the next
forward starts while the last one is being updated. A compiled module waits for those inside it, too, before its graph;
in stage 3 it gathers them (``stage3/hooks.py``).

Outside of modules a pending parameter's class tells: it is :class:`PendingParameter`. A torch function that could see
its values first waits for this one parameter, or gathers it, and restores its class; functions that only see shape,
gradient and the like do not wait. So state_dict(), evaluation or a read by hand see finished values, too.
"""

import copy
import sys
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

_WAITS: dict[int, Callable[[], None]] = {}
"""The function to call before a pending parameter is read, by the parameter's ``id``."""
_BEFORE_MODULES: set[int] = set()
"""The pending parameters, by ``id``, for which a module that is called waits."""

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
"""Torch functions that take parameters (``inputs``) as places in a graph, and do not read them."""


def _edge(param: "_Pending") -> GradientEdge:
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(cast(torch.Tensor, param))


class _Pending:
    """What a tensor's class is made of until somebody reads the tensor."""

    __slots__ = ()
    own_class: type = nn.Parameter
    """The tensor's own class."""
    in_shards = False
    """True if its values come only for a while: a graph cannot count on them, so it breaks before it reads them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        await_values(cast(torch.Tensor, self))
        return copy.deepcopy(self, memo)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.in_shards and torch.compiler.is_dynamo_compiling():
            return _call_outside_graphs(func, args, kwargs)
        in_graph = torch.compiler.is_compiling() and not cls.in_shards  # the compiler itself looks, too
        if in_graph:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, _Pending):
                    await_for_compiled_code(leaf)  # type: ignore[arg-type]
        if in_graph or func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _DIFFERENTIATE:
            return func(*tree_map_only(_Pending, _edge, args), **tree_map_only(_Pending, _edge, kwargs or {}))
        return _await_values_and_call(func, args, kwargs)


def _await_values_and_call(func: Any, args: Any, kwargs: Any) -> Any:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, _Pending):
            await_values(cast(torch.Tensor, leaf))
    return func(*args, **(kwargs or {}))


def breaks_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that compiled code calls as it is, outside of graphs; ``fullgraph=True`` says why it cannot."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]
    return function  # as torch._dynamo.skip does, whose import is slow


_WHY = (
    "in stage 3 parameters are gathered before a graph begins, not in the middle; expected block.compile() or "
    "engine.compile(), register_external_parameter() for what a block reads of other modules, or `with "
    "gathered_parameters(...)` around a compiled function"
)


@breaks_graph
def _call_outside_graphs(func: Any, args: Any, kwargs: Any) -> Any:
    return _await_values_and_call(func, args, kwargs)


class PendingParameter(_Pending, nn.Parameter):
    """An ``nn.Parameter`` until somebody reads it."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        return nn.Parameter(data, requires_grad)  # a new object of this type is a plain parameter


_IN_SHARDS: dict[type, type] = {}
"""The class of tensors in shards, by their own."""


def own_class_of(tensor: torch.Tensor) -> type:
    """The tensor's own class, pending or not."""
    return tensor.own_class if isinstance(tensor, _Pending) else type(tensor)


_READ_WHAT_IS_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules that in evaluation give the weights of modules inside them to one C++ function, if they are plain parameters.
"""


def _before_forward(module: nn.Module, args: Any) -> None:
    """Wait for the parameters that a module's forward reads in ways that torch does not show."""
    if torch.compiler.is_dynamo_compiling() or not _BEFORE_MODULES:
        return
    inside = isinstance(module, torch.jit.ScriptModule) or (
        isinstance(module, _READ_WHAT_IS_INSIDE) and not module.training
    )
    await_all(module.parameters() if inside else module._parameters.values())


def await_all(params: Iterable[torch.Tensor | None]) -> None:
    """Wait for those that an update still writes."""
    for param in params:
        if param is not None and id(param) in _BEFORE_MODULES:
            await_values(param)


Around = Callable[[nn.Module, Callable[[], Any]], Any]
"""Runs the forward of a compiled module, which is given as a call."""


class _WaitsFirst:
    """The forward of a compiled module. Its graph is for parameters that are there, and for modules without hooks."""

    around: Around | None = None
    """What gathers its parameters in stage 3."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not (_BEFORE_MODULES or self.around):
            return self._forward(*args, **kwargs)  # the module around it has waited, if any has to
        return self._run(partial(self._forward, *args, **kwargs))

    @torch._disable_dynamo
    def _run(self, forward: Callable[[], Any]) -> Any:
        global _in_compiled_code
        await_all(self._module.parameters())
        _in_compiled_code += 1
        _watch_modules()
        try:
            return forward() if self.around is None else self.around(self._module, forward)
        finally:
            _in_compiled_code -= 1
            _watch_modules()


def have_compiled_modules_wait(model: nn.Module, around: Around | None = None) -> bool:
    """Have the compiled modules of a model wait for all parameters inside them; return whether there are any.

    A module that is compiled would look at its parameters before any hook is called, and be compiled again if they are
    pending.

    Args:
        around: what runs their forwards in stage 3.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # None until something is compiled; its import is slow
    optimized = () if dynamo is None else dynamo.OptimizedModule
    found = False
    for module in model.modules():
        if isinstance(module, optimized):
            found = True
            if not isinstance(module.forward, _WaitsFirst):
                module.forward = _WaitsFirst(module, module.forward)
            module.forward.around = around
        if (compiled := module._compiled_call_impl) is not None:
            found = True
            if not isinstance(compiled, _WaitsFirst):
                compiled = module._compiled_call_impl = _WaitsFirst(module, compiled)
            compiled.around = around
    return found


_in_compiled_code = 0
"""Forwards of compiled modules that are running."""
_NUMBER = RemovableHandle(OrderedDict()).id
"""Of the hook on all modules, whenever it is there: graphs are made for the numbers of hooks."""
_TWICE = r"Using `torch\.compile\(module\)` when there are global hooks"


def _watch_modules() -> None:
    """Have every module that is called wait for its parameters, while there are any to wait for.

    Another thread may do the same; at worst the hook stays, and finds nothing to wait for. It stays, too, while code is
    being compiled, which looks at it twice: garbage that is collected meanwhile may have been the last to wait for.
    """
    if (watch := bool(_BEFORE_MODULES and not _in_compiled_code)) and _NUMBER not in _global_forward_pre_hooks:
        if not any(rule[1] is not None and rule[1].pattern == _TWICE for rule in warnings.filters):
            warnings.filterwarnings("ignore", _TWICE, UserWarning)  # the second call finds nothing to wait for
        _global_forward_pre_hooks[_NUMBER] = _before_forward
    elif not watch and _NUMBER in _global_forward_pre_hooks and not torch.compiler.is_compiling():
        _global_forward_pre_hooks.pop(_NUMBER, None)
        if _BEFORE_MODULES and not _in_compiled_code:
            _watch_modules()


def await_for_compiled_code(param: torch.Tensor) -> bool:
    """Wait for a parameter that code reads which is being compiled. It stays pending: the code is for its class.

    Compiled code calls nobody before it reads: :data:`compiled_code_reads` tells later steps to wait for their updates.
    Parameters of other models are left alone. They may have been sent early, and then refuse to be read before their
    step. Only a compiler that shows a tensor without values in the parameter's place makes this wait for all.
    """
    global compiled_code_reads
    compiled_code_reads = True
    for each in [id(param)] if isinstance(param, _Pending) else [*_BEFORE_MODULES]:
        if (wait := _WAITS.get(each)) is not None:
            wait()
    return True


await_for_compiled_code._dynamo_marked_constant = True  # type: ignore[attr-defined]
# As torch.compiler.assume_constant_result does, which imports the compiler: it is called while code is compiled.

compiled_code_reads = False
"""True if code was compiled that reads a parameter of a model that is not compiled itself."""


def can_wait(param: torch.Tensor) -> bool:
    """Return whether readers of the parameter can be made to wait."""
    return own_class_of(param) is nn.Parameter


def make_pending(param: torch.Tensor, wait: Callable[[], None], *, before_modules: bool = False) -> None:
    """Call ``wait`` before the parameter's next read; for a parameter of a class of its own, call it now.

    If ``wait`` raises, the parameter stays pending.

    Args:
        before_modules: call it, too, before the forward of a module that has the parameter.
    """
    if can_wait(param):
        _WAITS[id(param)] = wait
        if before_modules:
            _BEFORE_MODULES.add(id(param))
            _watch_modules()
        param.__class__ = PendingParameter
    else:
        wait()


def guard(tensor: torch.Tensor, wait: Callable[[], None]) -> None:
    """As :func:`make_pending`, for a tensor in shards of any class that holds values itself, parameter or not."""
    own = own_class_of(tensor)
    if own not in _IN_SHARDS:
        bases = (PendingParameter,) if own is nn.Parameter else (_Pending, own)
        members = {"own_class": own, "in_shards": True}
        _IN_SHARDS[own] = types.new_class(
            f"Pending{own.__name__}", bases, exec_body=lambda space: space.update(members)
        )
    _WAITS[id(tensor)] = wait
    tensor.__class__ = _IN_SHARDS[own]


@torch._disable_dynamo
def await_values(param: torch.Tensor) -> None:
    """Wait for the parameter, if it is pending."""
    await_values_of_garbage(param)


def await_values_of_garbage(param: torch.Tensor) -> None:
    """As :func:`await_values`, without an import of the compiler, for what is done when garbage is collected."""
    if isinstance(param, _Pending):
        wait = _WAITS.get(id(param))
        if wait is not None:  # else a signal handler has waited for it just now
            wait()
        forget(param)


def is_moving_model() -> bool:
    """Return whether a module's ``to()``, ``bfloat16()``, ``cuda()`` and the like are running in this thread."""
    frame = sys._getframe(1)
    while frame.f_code is not nn.Module._apply.__code__:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return True


def forget(param: torch.Tensor) -> None:
    """Record that the parameter is not pending."""
    if isinstance(param, _Pending):
        param.__class__ = param.own_class
    _WAITS.pop(id(param), None)
    if id(param) in _BEFORE_MODULES:
        _BEFORE_MODULES.discard(id(param))
        _watch_modules()


def have_been_written(params: Iterable[torch.Tensor]) -> None:
    """These parameters have been written: who has not waited for an earlier update need not wait any more. A graph is
    made for their class."""
    for param in [param for param in params if id(param) in _BEFORE_MODULES] if _BEFORE_MODULES else ():
        forget(param)


def forget_at_end(param: torch.Tensor) -> None:
    """Drop the parameter's entry when it is deleted."""
    weakref.finalize(param, _WAITS.pop, id(param), None).atexit = False
