"""What makes partitioned parameters whole for the modules that use them (stage 3): hooks around their runs.

[Note: who keeps a parameter whole] A module's run keeps its own parameters and those that were registered with it; its
backward does, from the first of its outputs' nodes until one runs that is older than its forward: autograd runs the
youngest node that it can, so none of the module's is left then. What is touched besides is kept by the innermost module
that runs, and registered with it; in backward by the backward, till its end. Nothing else may touch a released
parameter (``pending.py``).
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from offload_core.errors import StateError
from offload_core.stage3.live_params import LiveParams
from offload_core.step.pipeline import Pipeline

from ..pending import forget, make_pending
from .parameters import PartitionedParameter, PartitionedParameters

_EXTERNAL = "_offload_external_parameters"
"""The attribute of a module that lists the parameters of others that its forward uses."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(eq=False)
class _Call:
    """One run of a module's forward, and of the backward of what it computed."""

    module: nn.Module | None
    params: list[PartitionedParameter]
    began: int = -1
    """Nodes that its forward made have at least this number; -1: none is known to be older than all of them."""
    task: int | None = None
    """The backward in which it keeps its parameters."""
    differentiable: bool = False
    """Whether what that computes will be differentiated itself (``create_graph=True``)."""


class ModuleRuns:
    """The hooks on a model's modules, and the runs of modules that keep parameters whole.

    When it dies, or is closed, no hook is left; without :meth:`close` what needs no other rank becomes whole.
    """

    def __init__(self, model: nn.Module, parameters: PartitionedParameters, pipeline: Pipeline) -> None:
        self._model = weakref.ref(model)
        self._parameters = parameters
        self._pipeline = pipeline
        self._calls: list[_Call] = []
        """Forwards that are running, innermost last."""
        self._backwards: dict[int, list[_Call]] = {}
        """Calls that keep their parameters, by backward."""
        self._kept: dict[PartitionedParameter, bool] = {}
        """Parameters that are kept whole after their calls: until they change, or (False) until the next round."""
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[Any] = []
        weakref.finalize(self, _abandon, self._handles, parameters.records, parameters.live).atexit = False

    def close(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)

    def hook_all(self) -> None:
        """Have all modules that use partitioned parameters keep them whole."""
        model = self._model()
        if model is None:
            return
        for module in model.modules():
            if any(param in self._parameters for param in module.parameters()) or _externals_of(module):
                self.hook(module)

    def hook(self, module: nn.Module) -> None:
        """Have the module's forward keep whole what it uses."""
        if module in self._hooked:
            return
        self._hooked.add(module)
        before = _Hook(self, lambda runs, module, args: runs._before_forward(module))
        after = _Hook(self, lambda runs, module, args, output: runs._after_forward(module, output))
        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    # --- keeping parameters whole --------------------------------------------------------------------

    def hold(self, records: Sequence[PartitionedParameter]) -> None:
        """Make parameters whole, until :meth:`let_go`."""
        try:
            self._parameters.live.acquire([record.live for record in records])
        except BaseException:
            self._pipeline.finish()  # what went wrong in an update is raised as such
            raise
        for record in records:
            forget(record.param)

    def let_go(self, records: Sequence[PartitionedParameter], *, may_stay: bool = True) -> None:
        """The opposite of :meth:`hold`; ``may_stay``: the parameters may be used soon again."""
        self._parameters.live.release([record.live for record in records], may_stay=may_stay)
        for record in records:
            self.guard(record)

    def guard(self, record: PartitionedParameter) -> None:
        """Be told when somebody reads the parameter, if it is not whole."""
        if not record.live.holds:
            make_pending(record.param, partial(_touched, weakref.ref(self), id(record.param), record.spec.name))

    # --- forward -------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module) -> None:
        task = _backward()
        if task is not None:
            self._end_passed(task)
        elif not self._calls:
            self.forget(graphs=False)
            self._parameters.live.begin_round((id(module), torch.is_grad_enabled()))
        call = _Call(
            module,
            self._parameters.among([*module._parameters.values(), *_externals_of(module)]),
            torch._C._autograd._get_sequence_nr(),
        )
        self.hold(call.params)
        self._calls.append(call)

    def _after_forward(self, module: nn.Module, output: Any) -> None:
        if not self._calls or self._calls[-1].module is not module:
            return  # its own hook did not get so far
        call = self._calls.pop()
        outer = self._calls[-1] if self._calls else None
        try:
            leaves = list(_leaves(output))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self._keep_escaped(call, tensors, outer)
            if call.params and torch.is_grad_enabled():
                aside = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
                self._expect_backward(call, [*tensors, *aside], opaque=len(leaves) > len(tensors))
        finally:
            self.let_go(call.params)
            if outer is None and _backward() is None and (output is None or not torch.is_grad_enabled()):
                self._parameters.live.release_idle()

    def _keep_escaped(self, call: _Call, tensors: Sequence[torch.Tensor], outer: _Call | None) -> None:
        """Parameters that a module returns are used by the one that called it."""
        storages = {record.whole.untyped_storage()._cdata: record for record in call.params}
        found = {storages.get(_storage_of(tensor)) for tensor in tensors} if storages else set()
        escaped = [record for record in call.params if record in found]
        for record in escaped:
            if outer is None:
                self._keep([record], for_graph=torch.is_grad_enabled())
            elif record not in outer.params:
                self._join(outer, record)

    def _join(self, call: _Call, record: PartitionedParameter) -> None:
        """A parameter is used by a module that it was not known to be used by."""
        self.hold([record])
        call.params.append(record)
        if call.module is not None:
            note_external(call.module, record.param)

    def _keep(self, records: Sequence[PartitionedParameter], *, for_graph: bool) -> None:
        """Keep parameters whole till the next round, or, where a graph may read them, until they change."""
        self.hold([record for record in records if record not in self._kept])
        for record in records:
            self._kept[record] = for_graph or self._kept.get(record, False)

    def _expect_backward(self, call: _Call, tensors: Sequence[torch.Tensor], *, opaque: bool) -> None:
        ways = [t for tensor in tensors if tensor.requires_grad for t in (tensor, tensor._base) if t is not None]
        nodes = [t.grad_fn for t in ways if t.grad_fn is not None]
        for node in nodes:
            if node._sequence_nr() >= call.began:
                node.register_prehook(partial(self._before_backward, call))
        if opaque and not nodes:
            self._keep(call.params, for_graph=True)

    def touch(self, param: int) -> None:
        """Somebody reads a released parameter."""
        record = self._parameters.records[param]
        if not self.use(record):
            raise StateError(
                f"parameter {record.spec.name!r} of {record.module} was read outside the forward of a module; in stage "
                "3 it is there for those only; expected `with gathered_parameters(...)` around what reads it "
                "(state_dict() too)"
            )

    def use(self, record: PartitionedParameter) -> bool:
        """Have the forward or backward that runs keep a parameter; whether there is one."""
        task = _backward()
        if self._calls and record not in self._calls[-1].params:
            self._join(self._calls[-1], record)
        elif task is not None and not self._calls:
            self.hold([record])
            self._calls_of(task).append(_Call(None, [record], task=task))
        return bool(self._calls) or task is not None

    # --- backward ------------------------------------------------------------------------------------

    def _calls_of(self, task: int) -> list[_Call]:
        """What keeps parameters in a backward, till its end."""
        if task not in self._backwards:
            self._backwards[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._backward_ended, task))
        return self._backwards[task]

    def _before_backward(self, call: _Call, gradients: Any) -> None:
        task = _backward()
        if task is None or call.task == task:
            return
        self._end_passed(task)
        calls = self._calls_of(task)
        self.hold(call.params)
        call.task, call.differentiable = task, torch.is_grad_enabled()
        calls.append(call)

    def _end_passed(self, task: int) -> None:
        """Release what runs needed whose nodes have all been run."""
        node = torch._C._current_autograd_node()
        passed = [
            call for call in self._backwards.get(task, ()) if node is not None and call.began > node._sequence_nr()
        ]
        for call in passed:
            self._backwards[task].remove(call)
            self._end(call)

    def _end(self, call: _Call) -> None:
        call.task = None
        if call.differentiable:
            self._keep(call.params, for_graph=True)
        self.let_go(call.params)

    def _backward_ended(self, task: int) -> None:
        for call in self._backwards.pop(task, ()):
            self._end(call)
        if not self._backwards and not self._calls:
            self._parameters.live.release_idle()

    def forget(self, *, graphs: bool = True) -> None:
        """Release what an error, or a forward without backward, has left; and what is kept, for ``graphs`` too."""
        calls = [*self._calls, *(call for calls in self._backwards.values() for call in calls)]
        self._calls, self._backwards = [], {}
        for call in calls:
            call.task = None
            self.let_go(call.params)
        kept = [record for record, for_graph in self._kept.items() if graphs or not for_graph]
        for record in kept:
            del self._kept[record]
        self.let_go(kept)


class _Hook:
    """A hook on the modules of one model; in copies of a module it does nothing."""

    def __init__(self, runs: ModuleRuns | None = None, act: Callable[..., None] | None = None) -> None:
        self._runs = None if runs is None else weakref.ref(runs)
        self._act = act

    @torch._disable_dynamo
    def __call__(self, *args: Any) -> None:
        runs = None if self._runs is None else self._runs()
        if runs is not None and self._act is not None:
            self._act(runs, *args)

    def __reduce__(self) -> Any:
        return _Hook, ()


def note_external(module: nn.Module, param: torch.Tensor) -> None:
    """The module's forward uses a parameter of another one."""
    if all(param is not known for known in _externals_of(module)):
        module.__dict__.setdefault(_EXTERNAL, []).append(param)


def _externals_of(module: nn.Module) -> list[torch.Tensor]:
    return module.__dict__.get(_EXTERNAL, [])


def _leaves(output: Any) -> Iterator[Any]:
    """The tensors of a module's output, and what may hold others."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif not isinstance(leaf, _PLAIN):
            yield leaf
            yield from (
                value for value in tree_leaves(getattr(leaf, "__dict__", {})) if isinstance(value, torch.Tensor)
            )


def _storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse, and wrappers
        return None


def _backward() -> int | None:
    """Which backward this is in, if any; a nested one is another."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def _touched(runs: "weakref.ref[ModuleRuns]", param: int, name: str) -> None:
    this = runs()
    if this is None:
        raise StateError(
            f"parameter {name!r} was left in shards: its engine is gone; expected engine.close() before, which makes "
            "parameters whole"
        )
    this.touch(param)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _abandon(handles: list[Any], records: dict[int, PartitionedParameter], live: LiveParams) -> None:
    """The engine is gone. What needs no other rank becomes whole."""
    _remove(handles)
    if live.device.world_size == 1:
        for record in records.values():
            live.acquire([record.live])
            forget(record.param)
