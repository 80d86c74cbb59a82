"""Code that torch compiles: the one module that knows ``torch.compile``, its tracer (dynamo) and TorchScript.

Dynamo follows the code that a compiled function calls, and makes a graph of it. It guards the graph on the properties
that this code reads: the class of a parameter, the numbers of a module's hooks. If these change, it makes another
graph.

[Note: compiled modules] A compiled module would look at its parameters before any hook is called, and be compiled again
if they are pending. So its forward becomes a :class:`CompiledForward`. This waits for all parameters inside the module
and, in stage 3, gathers them, and then calls the graph.

[Note: units] In stage 3 a compiled module is a unit: a leaf module that is run around its graph, so that its parameters
are plain and whole when the graph is made and whenever it runs. The hooks of the modules inside it see that while the
graph is made, and leave no trace in it. Any other module that a graph comes to breaks the graph. The module's hook then
runs outside of graphs, and makes a unit of the module. Reading a released parameter breaks a graph, too, so no graph
reads one. A released parameter has another class, so no finished graph is used for it.

Torch's compiler takes longer to import than torch. So the marks here are set by hand, as the functions of
``torch._dynamo`` and ``torch.compiler`` would.
"""

import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

F = TypeVar("F", bound=Callable[..., Any])

COMPILED = "_orig_mod"
"""The name under which ``torch.compile(module)`` holds the module."""
_dynamo = torch._C._dynamo.eval_frame
_SKIP = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT)
_TWICE = r"Using `torch\.compile\(module\)` when there are global hooks"
_WHY = (
    "in stage 3 parameters are gathered before a graph begins, not in the middle; expected block.compile() or "
    "engine.compile(), register_external_parameter() for what a block reads of other modules, or `with "
    "gathered_parameters(...)` around a compiled function"
)

# --- asking the compiler ----------------------------------------------------------------------------------

is_traced = torch.compiler.is_dynamo_compiling
"""Returns True in code that dynamo follows to make a graph."""
is_compiling = torch.compiler.is_compiling
"""Returns True while a graph is made, in code that the compiler itself calls, too."""
compiler_of_calls = _dynamo.get_eval_frame_callback
"""Returns the compiler of the functions that are called from here; None: they are not compiled."""


def is_scripted(module: nn.Module) -> bool:
    """Return True if TorchScript runs the module. It calls no hooks, and torch does not see its reads of parameters."""
    return isinstance(module, torch.jit.ScriptModule)


# --- telling the compiler ---------------------------------------------------------------------------------

untraced = torch._disable_dynamo
"""Decorates a function, so that neither it nor the functions that it calls are compiled."""


def breaks_graph(function: F) -> F:
    """Have dynamo end its graph before this function and call it uncompiled; ``fullgraph=True`` says why it cannot."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]
    return function


def begins_no_graph(function: F) -> F:
    """Have dynamo begin no graph at this function. A graph that is made of its caller includes it."""
    _dynamo.set_code_exec_strategy(function.__code__, _SKIP)
    return function


def asked_once(function: F) -> F:
    """Have dynamo call this function while it makes a graph, which then has the result as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def allow_hooks() -> None:
    """Keep torch from warning that hooks on all modules are called twice for a compiled one."""
    if not any(rule[1] is not None and rule[1].pattern == _TWICE for rule in warnings.filters):
        warnings.filterwarnings("ignore", _TWICE, UserWarning)


# --- compiled modules -------------------------------------------------------------------------------------


class Around:
    """Runs the forwards of compiled modules ([Note: compiled modules]). This class only calls them."""

    def needed(self) -> bool:
        """Return False if a forward that is about to begin can be called directly."""
        return False

    def in_unit(self) -> bool:
        """Return True if the innermost module that runs is a unit ([Note: units])."""
        return False

    def __call__(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        """Return the result of ``forward``, a call of the module's compiled forward."""
        return forward()


class _Thread(threading.local):
    around: Around | None = None
    """Runs the innermost compiled module of this thread."""


_THREAD = _Thread()


class CompiledForward:
    """The forward of a compiled module, with something around it."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], around: Around) -> None:
        self._module = module
        self._forward = forward
        self.around = around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_traced() or not self.around.needed():
            return self._forward(*args, **kwargs)  # if it is traced, the compiled code that calls it has waited
        return self._run(partial(self._forward, *args, **kwargs))

    @untraced
    def _run(self, forward: Callable[[], Any]) -> Any:
        outer, _THREAD.around = _THREAD.around, self.around
        try:
            return self.around(self._module, forward)
        finally:
            _THREAD.around = outer


def uncompiled(name: str) -> str:
    """Return the name that a tensor has in the model before ``torch.compile``."""
    return name.replace(f"{COMPILED}.", "")


def uncompiled_module(module: nn.Module) -> nn.Module:
    """Return the module that was given to ``torch.compile``, or the module itself."""
    return getattr(module, COMPILED, module)


def is_compiled(module: nn.Module) -> bool:
    """Return True if the module's own forward is compiled."""
    return module._compiled_call_impl is not None or hasattr(module, COMPILED)


def run_compiled_modules(model: nn.Module, around: Around) -> bool:
    """Have ``around`` run the forwards of a model's compiled modules; return True if there are any.

    This may be called again: modules that were compiled since are added, and all get the new ``around``.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # None until something is compiled
    optimized = () if dynamo is None else dynamo.OptimizedModule
    found = False
    for module in model.modules():
        if isinstance(module, optimized):
            found = True
            module.forward = _with(around, module, module.forward)
        if module._compiled_call_impl is not None:
            found = True
            module._compiled_call_impl = _with(around, module, module._compiled_call_impl)
    return found


def _with(around: Around, module: nn.Module, forward: Callable[..., Any]) -> CompiledForward:
    if not isinstance(forward, CompiledForward):
        return CompiledForward(module, forward, around)
    forward.around = around
    return forward


# --- hooks on modules -------------------------------------------------------------------------------------


@asked_once
def _in_unit() -> bool:
    """Return True if a unit runs. Called only while a graph is made: graphs of equal units are shared."""
    return _THREAD.around is not None and _THREAD.around.in_unit()


class GraphHook:
    """A hook on a module of one model, which a graph leaves out or breaks at. In copies of the module it does nothing.

    Args:
        act: a method, called with a boolean and the hook's arguments: True if the frame around the hook is compiled.
        idle: a method, called with the module: True if a graph of the module needs no call of ``act``.

    The objects of the methods are not kept alive.
    """

    def __init__(self, module: nn.Module, act: Callable[..., None], idle: Callable[[nn.Module], bool]) -> None:
        self._module = weakref.ref(module)
        self._act = weakref.WeakMethod(act)
        self._idle = weakref.WeakMethod(idle)

    @begins_no_graph
    def __call__(self, *args: Any) -> None:
        if is_traced() and (_in_unit() or self._is_idle()):
            return
        self._break_graph(*args)

    @asked_once
    def _is_idle(self) -> bool:
        idle, module = self._idle(), self._module()
        return idle is None or module is None or idle(module)

    @begins_no_graph
    @breaks_graph
    def _break_graph(self, *args: Any) -> None:
        self._run(compiler_of_calls() is not None, *args)

    @untraced
    def _run(self, compiled: bool, *args: Any) -> None:
        if (act := self._act()) is not None:
            act(compiled, *args)

    def __reduce__(self) -> Any:
        return _NoHook, ()


class _NoHook:
    """A :class:`GraphHook` in a copy of its module."""

    def __call__(self, *args: Any) -> None:
        return None
