"""Hooks that make partitioned parameters whole for the modules that use them (stage 3).

[Note: who keeps a parameter whole] A module's forward keeps its own parameters whole, and those registered with it.
Its backward does so from the first node of its outputs until a node runs that is older than the forward: autograd runs
the youngest node that is ready, so none of the module's nodes is left then. Any other parameter that a forward reads is
kept by the innermost running module, and registered with it; one that a backward reads is kept until the backward ends.
Reading a released parameter anywhere else is an error (``pending.py``).

A leaf module's run keeps the parameters of all modules inside it, too, and their own runs keep none: which of them run,
and in which order, is each rank's own affair.

[Note: when a leaf module's parameters are settled] Which of a leaf module's parameters have a gradient, and when, is
each rank's own affair, too. They are settled ([Note: settled parameters] in ``reduction.py``) where all ranks are at
the same point: when the last of the leaf modules' forwards that recorded them has ended its backward, for then none of
their nodes is left. Other runs settle them at the end of the backward: one in a backward (checkpointing that computes
forward again and runs a backward of its own), one whose graph is kept for another backward, and all of them where
another run's backward has not come.

[Note: units] A compiled module is a unit: a leaf module that is run around its graph, so that its parameters are plain
and whole when the graph is made and whenever it runs. The hooks inside it see that while the graph is made, and leave
no trace in it. Any other module that a graph comes to breaks it: its hook runs outside, and makes a unit of the module.
A released parameter breaks a graph, too, so none is made that reads one; its class changes, so none is used for one.

[Note: saved parameters] A module's graph may leave it by another way than its output: in a list, as an attribute of
another module. While a module runs whose graph may save gathered parameters, hooks on saved tensors note them, without
their memory. If such a graph runs and nothing keeps its parameters whole, it begins the backward of the run that saved
them. All other saved tensors go to the user's hooks, if there are any (``torch.autograd.graph.save_on_cpu``). Inside
``torch.func`` such hooks are not allowed: the parameters then stay whole until they change.
"""

import gc
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from offload_core.errors import ParameterError, StateError
from offload_core.stage3.live_params import LiveParams
from offload_core.step.pipeline import Pipeline
from offload_core.support.threads import clear_up

from ..pending import await_all, breaks_graph, forget, guard, is_moving_model
from .parameters import PartitionedParameter, PartitionedParameters

_EXTERNAL = "_offload_external_parameters"
"""The attribute of a module that lists the parameters of others that its forward uses."""


class Settle(Protocol):
    """``Intake.settle``."""

    def __call__(self, params: Iterable[torch.Tensor], *, ended: bool) -> Collection[torch.Tensor]: ...


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(eq=False)
class _Call:
    """One run of a module's forward, and the backward of its outputs."""

    module: nn.Module | None
    params: list[PartitionedParameter]
    began: int = -1
    """A lower bound on the sequence numbers of the nodes that its forward made; -1: none is known."""
    task: int | None = None
    """The backward in which it keeps its parameters."""
    differentiable: bool = False
    """True if that backward records a graph itself (``create_graph=True``)."""
    leaf: bool = False
    """True if it is a leaf module's, or a unit's."""
    settles: Sequence[torch.Tensor] = ()
    """The parameters to settle after its backward."""
    recorded: int | None = None
    """The step in which its backward is to come, of a leaf module's; None: it has come, or nobody waits for it."""
    retained: bool = False
    """True if another backward may follow (``retain_graph=True``)."""
    around: bool = False
    """True if it is a compiled module's, around its hooks."""
    saving: saved_tensors_hooks | None = None
    """Its hooks on saved tensors, over the user's."""


@dataclass(eq=False)
class _Saved:
    """A tensor that a graph has saved; of a gathered parameter, without its memory ([Note: saved parameters])."""

    tensor: torch.Tensor
    version: int
    gather: Callable[[], None] | None = None
    """Makes the parameter whole; None: the tensor is none of a gathered parameter's."""

    def values(self) -> torch.Tensor:
        """The tensor, as autograd gives what it saves itself."""
        if self.tensor._version != self.version:
            what, when = ("parameter", "before step()") if self.gather else ("tensor", "before it is written to")
            raise StateError(
                f"a {what} of shape {tuple(self.tensor.shape)} that backward needs was changed in place after its "
                f"forward: it has version {self.tensor._version}, expected {self.version}; expected backward() {when}"
            )
        if self.gather is not None:
            self.gather()
        return self.tensor


_dynamo = torch._C._dynamo.eval_frame

_units = threading.local()
"""``innermost``: the runs to which the innermost compiled module belongs that runs in this thread."""


def _in_unit() -> bool:
    """Return whether a unit runs. Called while a graph is made, and no more: graphs of equal units are shared."""
    runs: ModuleRuns | None = getattr(_units, "innermost", None)
    return runs is not None and runs.runs_unit


_in_unit._dynamo_marked_constant = True  # type: ignore[attr-defined]

_LEFT_ALONE = (None, "torch.utils.checkpoint")
"""Modules whose hooks on saved tensors copy nothing: torch's own functions, and checkpointing."""


class ModuleRuns:
    """The hooks on a model's modules, and the runs of modules that keep parameters whole.

    Closing or deleting it removes the hooks. If it is deleted without :meth:`close`, parameters become whole on one
    rank, and stay in shards with several.

    Args:
        leaves: the leaf modules.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: PartitionedParameters,
        pipeline: Pipeline,
        leaves: Iterable[nn.Module] = (),
    ) -> None:
        self._model = weakref.ref(model)
        self._parameters = parameters
        self._pipeline = pipeline
        self._calls: list[_Call] = []
        """Forwards that are running, innermost last."""
        self._backwards: dict[int, list[_Call]] = {}
        """Calls that keep their parameters, by backward."""
        self._kept: dict[PartitionedParameter, bool] = {}
        """Parameters that stay whole after their calls: until they change (True), or until the next forward (False)."""
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._leaves: weakref.WeakSet[nn.Module] = weakref.WeakSet(leaves)
        self._settle: Settle | None = None
        """Settles parameters; None on one rank."""
        self.gather_read: Callable[[torch.Tensor], None] | None = None
        """Makes a parameter whole that is read outside forward and backward; None: such a read is an error."""
        self._saves: weakref.WeakSet[Callable[[torch.Tensor], Any]] = weakref.WeakSet()
        """The hooks on saved tensors of its runs."""
        self._step = 0
        self._awaited: Counter[torch.Tensor] = Counter()
        """The number of leaf modules' runs whose backward is to come in this step, for each parameter."""
        self._unsettled: dict[int, set[torch.Tensor]] = {}
        """Parameters of leaf modules that a backward has reached, and that are yet to be settled, by backward."""
        self.around_compiled = AroundCompiled(self)
        """What runs the forwards of compiled modules."""
        self._handles: list[_Removable] = [self.around_compiled]
        self._number = RemovableHandle(OrderedDict()).id
        """Of its hooks, in each module the same: graphs are made for the numbers, and equal blocks share theirs."""
        abandon = partial(_abandon, self._handles, parameters.records, parameters.live)
        weakref.finalize(self, clear_up, abandon).atexit = False

    def close(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)

    def tell(self, settle: Settle) -> None:
        """Have the parameters of leaf modules settled by this method, whose object is not kept alive."""
        method = weakref.WeakMethod(settle)

        def told(params: Iterable[torch.Tensor], *, ended: bool) -> Collection[torch.Tensor]:
            settle = method()
            return () if settle is None else settle(params, ended=ended)

        self._settle = told if self._several else None

    def leaves_of_parameters(self) -> dict[torch.Tensor, int]:
        """On several ranks, a number for each outermost leaf module, by the parameters in it."""
        model, found = self._model(), dict[torch.Tensor, int]()
        if model is not None and self._several:
            leaves = (module for module in model.modules() if module in self._leaves)
            for number, leaf in enumerate(leaves):  # an outer module comes before those in it
                for param in leaf.parameters():
                    found.setdefault(param, number)
        return found

    @property
    def _several(self) -> bool:
        return self._parameters.live.device.world_size > 1

    def hook_all(self) -> None:
        """Hook all modules that use partitioned parameters, and leaf modules."""
        model = self._model()
        if model is None:
            return
        for module in model.modules():
            uses = any(param in self._parameters for param in module.parameters()) or _externals_of(module)
            if uses or module in self._leaves:
                self.hook(module)

    def hook(self, module: nn.Module) -> None:
        """Have the module's runs keep the parameters whole that they use."""
        if module in self._hooked:
            return
        self._hooked.add(module)
        before = _Hook(self, module, ModuleRuns._before_hook, ModuleRuns._kept_for)
        after = _Hook(self, module, ModuleRuns._after_hook, ModuleRuns._is_not_running)
        self._handles.append(_Registered(module, before, after, self._number))

    # --- keeping parameters whole --------------------------------------------------------------------

    def hold(self, records: Sequence[PartitionedParameter]) -> None:
        """Make parameters whole, until :meth:`let_go`."""
        try:
            with _outside_transforms():
                self._parameters.live.acquire([record.live for record in records])
        except BaseException:
            self._pipeline.last_step.finish()  # an error in an update is the cause, and is raised instead
            raise
        for record in records:
            for tensor in record.values.tensors:
                forget(tensor)

    def let_go(self, records: Sequence[PartitionedParameter], *, may_stay: bool = True) -> None:
        """The opposite of :meth:`hold`; ``may_stay``: the parameters may stay whole for their next use."""
        self._parameters.live.release([record.live for record in records], may_stay=may_stay)
        for record in records:
            self.guard(record)

    def guard(self, record: PartitionedParameter) -> None:
        """If the parameter is not whole, have reads of it call :meth:`touch`."""
        if not record.live.holds:
            touched = partial(_touched, weakref.ref(self), id(record.param), record.spec.name)
            for tensor in record.values.tensors:
                guard(tensor, touched)

    # --- forward -------------------------------------------------------------------------------------

    def run_unit(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        """Run a compiled module: as a leaf module, around its hooks, which are in its graph."""
        self._before_forward(module, leaf=True, around=True)
        output, outer = None, getattr(_units, "innermost", None)
        _units.innermost = self
        try:
            output = forward()
        finally:
            _units.innermost = outer
            self._after_forward(module, output, around=True)
        return output

    @property
    def runs_unit(self) -> bool:
        """True if the innermost run is a compiled module's."""
        return bool(self._calls) and self._calls[-1].around

    def _before_hook(self, compiled: bool, module: nn.Module, args: Any) -> None:
        if compiled:
            await_all(module.parameters())
        self._before_forward(module, leaf=compiled or module in self._leaves)

    def _after_hook(self, compiled: bool, module: nn.Module, args: Any, output: Any) -> None:
        self._after_forward(module, output)

    def _kept_for(self, module: nn.Module) -> bool:
        """Return whether all that is used inside the module is whole, and not only until the next forward."""
        return all(record.live.holds > (record in self._kept) for record in self._used_by(module, inside=True))

    def _is_not_running(self, module: nn.Module) -> bool:
        return not self._running(module, around=False)

    def _before_forward(self, module: nn.Module, *, leaf: bool, around: bool = False) -> None:
        task = _backward()
        if task is not None:
            self._end_passed(task)
        elif not self._calls:
            self.forget(graphs=False)
            self._parameters.live.begin_round((id(module), torch.is_grad_enabled()))
        kept = self._kept_by_leaves(task)
        params = [record for record in self._used_by(module, inside=leaf) if record not in kept]
        call = _Call(module, params, torch._C._autograd._get_sequence_nr(), leaf=leaf, around=around)
        if leaf and self._leaves and self._settle is not None:
            others = chain(self._calls, *self._backwards.values())
            call.settles = () if any(other.leaf for other in others) else [*module.parameters()]
        self.hold(call.params)
        self._calls.append(call)
        self._note_saved(call)

    def _note_saved(self, call: _Call) -> None:
        """Note gathered parameters that graphs save from now on, until the run ends ([Note: saved parameters])."""
        users = torch._C._autograd._top_saved_tensors_default_hooks(False)
        none_needed = not call.params or not torch.is_grad_enabled()
        if none_needed or (call.around and users is None):  # a unit's graph is its own node
            return
        if users is not None and (users[0] in self._saves or getattr(users[0], "__module__", None) in _LEFT_ALONE):
            return
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            self.keep(call.params, for_graph=True)
            return

        def save(tensor: torch.Tensor) -> Any:
            storage = _storage_of(tensor)
            for running in self._calls:
                if any(record.storage == storage for record in running.params):
                    return _Saved(tensor.detach(), tensor._version, partial(self._before_backward, running, None))
            # Detached: it may be the output of the node that saves it, which would then keep itself alive.
            return _Saved(tensor.detach(), tensor._version) if users is None else users[0](tensor)

        def restore(packed: Any) -> torch.Tensor:
            return packed.values() if isinstance(packed, _Saved) else users[1](packed)

        self._saves.add(save)
        call.saving = saved_tensors_hooks(save, restore)
        call.saving.__enter__()

    def _kept_by_leaves(self, task: int | None) -> set[PartitionedParameter]:
        """What leaf modules keep whole that run now, or whose backward does."""
        backward = () if task is None else self._backwards.get(task, ())
        return {record for call in (*self._calls, *backward) if call.leaf for record in call.params}

    def _used_by(self, module: nn.Module, *, inside: bool) -> list[PartitionedParameter]:
        """What a module uses; ``inside``: and all modules inside it."""
        modules = module.modules() if inside else (module,)
        return self._parameters.among(p for m in modules for p in (*m._parameters.values(), *_externals_of(m)))

    def _after_forward(self, module: nn.Module, output: Any, *, around: bool = False) -> None:
        if not self._running(module, around=around):
            return  # its pre-hook did not run to the end
        call = self._calls.pop()
        _end_saving(call)
        outer = self._calls[-1] if self._calls else None
        try:
            leaves = list(_leaves(output))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self._keep_escaped(call, tensors, outer)
            leaf = next((around for around in reversed(self._calls) if around.leaf), None)
            for keeper in (call, leaf):
                if keeper is not None and (keeper.params or keeper.settles) and torch.is_grad_enabled():
                    aside = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
                    opaque = keeper is call and len(leaves) > len(tensors)
                    self._expect_backward(keeper, [*tensors, *aside], opaque=opaque)
        finally:
            self.let_go(call.params)
            if outer is None and _backward() is None and (output is None or not torch.is_grad_enabled()):
                self._parameters.live.release_idle()

    def _running(self, module: nn.Module, *, around: bool) -> bool:
        """Return whether this is the innermost run."""
        return bool(self._calls) and self._calls[-1].module is module and self._calls[-1].around == around

    def _keep_escaped(self, call: _Call, tensors: Sequence[torch.Tensor], outer: _Call | None) -> None:
        """Have the calling module keep parameters that a module returns."""
        storages = {_storage_of(tensor) for tensor in tensors} if call.params else set()
        escaped = [record for record in call.params if record.storage in storages]
        for record in escaped:
            if outer is None:
                self.keep([record], for_graph=torch.is_grad_enabled())
            elif record not in outer.params:
                self._join(outer, record)

    def _join(self, call: _Call, record: PartitionedParameter) -> None:
        """Add a parameter that a running module turned out to use."""
        self.hold([record])
        call.params.append(record)
        if call.saving is None and call is self._calls[-1]:
            self._note_saved(call)
        if call.module is not None:
            note_external(call.module, record.param)

    def keep(self, records: Sequence[PartitionedParameter], *, for_graph: bool) -> None:
        """Keep parameters whole until the next forward; if a graph may read them, until they change."""
        self.hold([record for record in records if record not in self._kept])
        for record in records:
            self._kept[record] = for_graph or self._kept.get(record, False)

    def _expect_backward(self, call: _Call, tensors: Sequence[torch.Tensor], *, opaque: bool) -> None:
        ways = [t for tensor in tensors if tensor.requires_grad for t in (tensor, tensor._base) if t is not None]
        nodes = [t.grad_fn for t in ways if t.grad_fn is not None]
        for node in nodes:
            if node._sequence_nr() >= call.began:
                node.register_prehook(partial(self._before_backward, call))
                if call.settles and call.recorded is None and _backward() is None:
                    call.recorded = self._step
                    self._awaited.update(call.settles)
        if opaque and not nodes:
            self.keep(call.params, for_graph=True)

    def touch(self, param: int) -> None:
        """Make a released parameter whole before it is read; raise outside a forward or backward."""
        record = self._parameters.records[param]
        if self.use(record):
            return
        if self.gather_read is not None:
            return self.gather_read(record.param)
        name = f"parameter {record.spec.name!r} of {record.module}"
        if is_moving_model():
            raise StateError(
                f"{name} was to be moved or cast (.to(), .bfloat16()), and an engine has it in shards; expected the "
                "device before wrap() and the element type in wrap(param_dtype=...), or engine.close() before another "
                "engine or Trainer gets the model; in gathered_parameters() it is whole, but stays as it is"
            )
        raise StateError(
            f"{name} was read outside the forward of a module; in stage 3 it is there for those only; expected `with "
            "gathered_parameters(...)` around what reads it (state_dict() too), or stage=2 where that is code of others"
        )

    def use(self, record: PartitionedParameter) -> bool:
        """Have the running forward or backward keep a parameter; return False if none runs."""
        task = _backward()
        if self._calls and record not in self._calls[-1].params:
            self._join(self._calls[-1], record)
        elif task is not None and not self._calls:
            self.hold([record])
            self._calls_of(task).append(_Call(None, [record], task=task))
        return bool(self._calls) or task is not None

    # --- backward ------------------------------------------------------------------------------------

    def _calls_of(self, task: int) -> list[_Call]:
        """The calls that keep parameters until the end of a backward."""
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
        if call.settles:
            call.retained = torch._C._autograd._get_current_graph_task_keep_graph()
            self._unsettled.setdefault(task, set()).update(call.settles)

    def _end_passed(self, task: int) -> None:
        """End the calls whose nodes have all run in this backward."""
        node = torch._C._current_autograd_node()
        passed = [
            call for call in self._backwards.get(task, ()) if node is not None and call.began > node._sequence_nr()
        ]
        for call in passed:
            self._backwards[task].remove(call)
            self._end(call)
        settled = [param for call in passed for param in self._last_of(call)]
        if settled and self._settle is not None:
            late = self._settle(settled, ended=False)
            self._unsettled[task].difference_update(param for param in settled if param not in late)

    def _last_of(self, call: _Call) -> list[torch.Tensor]:
        """The parameters that no other backward of a leaf module is to use, now that this one has ended."""
        if call.recorded != self._step or call.retained:
            return []
        call.recorded = None
        self._awaited.subtract(call.settles)
        return [param for param in call.settles if not self._awaited[param]]

    def _end(self, call: _Call) -> None:
        call.task = None
        if call.differentiable:
            self.keep(call.params, for_graph=True)
        self.let_go(call.params)

    def _backward_ended(self, task: int) -> None:
        for call in self._backwards.pop(task, ()):
            self._end(call)
            self._last_of(call)
        unsettled = self._unsettled.pop(task, None)
        if unsettled is not None and self._settle is not None:
            self._settle(unsettled, ended=True)
        if not self._backwards and not self._calls:
            self._parameters.live.release_idle()

    def forget(self, *, graphs: bool = True) -> None:
        """Release parameters that an error or a forward without backward left whole, and kept ones.

        Args:
            graphs: True also releases those that are kept because a graph may read them.
        """
        calls = [*self._calls, *(call for calls in self._backwards.values() for call in calls)]
        for call in reversed(self._calls):
            _end_saving(call)
        self._calls, self._backwards, self._unsettled = [], {}, {}
        if graphs:
            self._step += 1
            self._awaited.clear()
        for call in calls:
            call.task = None
            self.let_go(call.params)
        kept = [record for record, for_graph in self._kept.items() if graphs or not for_graph]
        for record in kept:
            del self._kept[record]
        self.let_go(kept)


def _end_saving(call: _Call) -> None:
    """Take away the run's hooks on saved tensors. Those that began inside the run, and have not ended, stay."""
    if call.saving is None:
        return
    above, top = [], torch._C._autograd._top_saved_tensors_default_hooks(False)
    while top is not None and top[0] is not call.saving.pack_hook:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        above.append(top)
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if top is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(above):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    call.saving = None


def leaf_modules(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules that ``OffloadConfig.leaf_modules`` names; :class:`ParameterError` if a name is of none."""
    found = []
    for wanted in names:
        some = [
            module
            for name, module in model.named_modules()
            if wanted in (type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}")
            or f".{name}".endswith(f".{wanted}")
        ]
        if not some:
            raise ParameterError(
                f"leaf_modules: the model has no module {wanted!r} and none of this class; expected names of "
                f"model.named_modules(), or of classes such as {type(model).__name__!r}"
            )
        found += some
    return found


def check_hooks_run(model: nn.Module, threshold: int) -> None:
    """Raise :class:`ParameterError` if TorchScript runs a module with parameters of ``threshold`` elements or more."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            continue
        for own, param in module.named_parameters():
            if param.numel() >= threshold:
                where = f"module {name!r}" if name else "the model"
                raise ParameterError(
                    f"{where} is compiled by TorchScript, which does not run the hooks that gather its {own!r} in "
                    "stage 3; expected the Python module, stage=2, or a param_persistence_threshold above its "
                    f"{param.numel():,} elements"
                )


class _Removable(Protocol):
    def remove(self) -> None: ...


class _Registered:
    """Hooks before and after a module's forward, as ``register_forward_hook(after, always_call=True)`` makes them, but
    under a number that is given."""

    def __init__(self, module: nn.Module, before: "_Hook", after: "_Hook", number: int) -> None:
        self._module = weakref.ref(module)
        self._number = number
        module._forward_pre_hooks[number] = before
        cast("OrderedDict[int, Any]", module._forward_pre_hooks).move_to_end(number, last=False)
        module._forward_hooks[number] = after
        module._forward_hooks_always_called[number] = True

    def remove(self) -> None:
        module = self._module()
        if module is not None:
            for hooks in (module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called):
                hooks.pop(self._number, None)


class _Hook:
    """A hook on a module of one model; in copies of the module it does nothing.

    Args:
        act: what it does, a method of ``runs``; it is also told whether the frame around it is compiled.
        idle: whether it has nothing to do in a graph, a method of ``runs``.
    """

    def __init__(
        self,
        runs: ModuleRuns | None = None,
        module: nn.Module | None = None,
        act: Callable[..., None] | None = None,
        idle: Callable[[ModuleRuns, nn.Module], bool] | None = None,
    ) -> None:
        self._runs = None if runs is None else weakref.ref(runs)
        self._module = None if module is None else weakref.ref(module)
        self._act = act
        self._idle = idle

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_dynamo_compiling() and (_in_unit() or self.idle()):
            return
        self._break_graph(*args)

    def idle(self) -> bool:
        """Return whether a graph may leave the hook out. Called while the graph is made, and no more."""
        runs = None if self._runs is None else self._runs()
        module = None if self._module is None else self._module()
        return runs is None or module is None or self._idle is None or self._idle(runs, module)

    idle._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @breaks_graph
    def _break_graph(self, *args: Any) -> None:
        self._run(_dynamo.get_eval_frame_callback() is not None, *args)

    @torch._disable_dynamo
    def _run(self, compiled: bool, *args: Any) -> None:
        runs = None if self._runs is None else self._runs()
        if runs is not None and self._act is not None:
            self._act(runs, compiled, *args)

    def __reduce__(self) -> Any:
        return _Hook, ()


for _function in (_Hook.__call__, _Hook._break_graph):
    # Where no graph is being made, none is begun at them. As torch._dynamo.skip_code does, whose import is slow.
    _skip = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT)
    _dynamo.set_code_exec_strategy(_function.__code__, _skip)


class AroundCompiled:
    """Runs the forwards of a model's compiled modules; in copies of a module, or once removed, it only calls them."""

    def __init__(self, runs: ModuleRuns | None = None) -> None:
        self._runs = None if runs is None else weakref.ref(runs)

    def __call__(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        runs = None if self._runs is None else self._runs()
        return forward() if runs is None else runs.run_unit(module, forward)

    def remove(self) -> None:
        self._runs = None

    def __reduce__(self) -> Any:
        return AroundCompiled, ()


def note_external(module: nn.Module, param: torch.Tensor) -> None:
    """Register that the module's forward uses a parameter of another module."""
    if all(param is not known for known in _externals_of(module)):
        module.__dict__.setdefault(_EXTERNAL, []).append(param)


def _externals_of(module: nn.Module) -> list[torch.Tensor]:
    return module.__dict__.get(_EXTERNAL, [])


def _outside_transforms() -> AbstractContextManager[Any]:
    """A context outside the ``torch.func`` transforms that run here: inside, nothing may be written in place."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def _leaves(output: Any) -> Iterator[Any]:
    """The tensors of a module's output, and objects in it that may hold others."""
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
    except NotImplementedError:  # sparse tensors and wrapper subclasses
        return None


def _backward() -> int | None:
    """The running backward's number; None outside a backward. A nested backward has its own."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def _touched(runs: "weakref.ref[ModuleRuns]", param: int, name: str) -> None:
    if (this := runs()) is not None:
        several = this._several
        try:
            return this.touch(param)
        except StateError as error:
            refused = error.with_traceback(None)  # which would keep the engine alive
        del this
        gc.collect()  # a reference cycle of an old trainer may keep its engine, which else lets go of its model
        if runs() is not None:
            raise refused
        if not several:
            return None
    raise StateError(
        f"parameter {name!r} was left in shards: its engine is gone; expected engine.close() before, which makes "
        "parameters whole"
    )


def _remove(handles: list[_Removable]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _abandon(handles: list[_Removable], records: dict[int, PartitionedParameter], live: LiveParams) -> None:
    """Clean up after an engine that was deleted; on one rank, make its parameters whole."""
    _remove(handles)
    try:
        if live.device.world_size == 1:
            for record in records.values():
                live.acquire([record.live])
                for tensor in record.values.tensors:
                    forget(tensor)
    finally:
        live.device.synchronize()  # copies read shards in pinned memory, which is given back now
