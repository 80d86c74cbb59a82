"""Makes partitioned parameters whole while modules that use them run (stage 3).

[Note: who keeps a parameter whole] A module's forward keeps the module's own parameters whole, and parameters that are
registered with the module. Its backward does so from the first node of the module's outputs until a node runs that is
older than the forward. Autograd runs the youngest ready node, so then none of the module's nodes is left. If a forward
reads another parameter, the innermost running module keeps this parameter whole, and it is registered with that module.
If a backward reads another parameter, this parameter is kept until the backward ends. Reading a released parameter
anywhere else is an error (``pending.py``).

The run of a leaf module or of a unit ([Note: units] in ``compiled.py``) keeps the parameters of all inner modules, and
the inner modules' runs keep none.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from offload_core.engine import Engine
from offload_core.stage3.live_params import LiveParams
from offload_core.support.threads import clear_up

from ..internals.compiled import GraphHook
from ..internals.private import NO_BACKWARD, at_end_of_backward, backward_number, next_node, running_node, storage_of
from ..params.pending import AwaitsInside, arrive, await_all
from .hooks import ModuleHooks
from .leaf_modules import LeafModules, LeafRun
from .parameters import PartitionedParameter, PartitionedParameters, externals_of, note_external
from .saved import Gather, SavedTensors, end_noting
from .whole import WholeParameters, read_error

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(eq=False)
class _ModuleRun:
    """One run of a module's forward, and the backward of its outputs."""

    module: nn.Module | None
    """The module; None: this run is for a parameter that a backward reads outside every module."""
    params: list[PartitionedParameter]
    """The parameters that the run keeps whole."""
    began: int = -1
    """A lower bound on the sequence numbers of the nodes that the forward made; -1: unknown."""
    task: int = NO_BACKWARD
    """The backward (``backward_number``) in which the run keeps parameters whole."""
    in_backward: Sequence[PartitionedParameter] = ()
    """The parameters that the run keeps whole in ``task``. Parameters that were already updated are left out, because
    no node may read their new values."""
    differentiable: bool = False
    """True if ``task`` records a graph itself (``create_graph=True``)."""
    is_leaf: bool = False
    """True if this is the run of a leaf module or a unit."""
    is_unit: bool = False
    leaf: LeafRun | None = None
    """The leaf module's run; None: no parameters are finalized after the backward."""
    saving: saved_tensors_hooks | None = None
    """The run's hooks on saved tensors, inside the user's hooks."""


class _Forwards(list[_ModuleRun]):
    """The forwards that are running, innermost last."""

    @property
    def in_unit(self) -> bool:
        """True if the innermost run is a unit's."""
        return bool(self) and self[-1].is_unit

    def innermost_is(self, module: nn.Module, *, unit: bool) -> bool:
        """Return True if the innermost run is this module's."""
        return bool(self) and self[-1].module is module and self[-1].is_unit == unit

    def has_ended(self, module: nn.Module) -> bool:
        """Return True if the innermost run is another module's, or no forward runs."""
        return not self.innermost_is(module, unit=False)


class _Units(AwaitsInside):
    """Runs a model's compiled modules as units ([Note: units] in ``compiled.py``).

    A copy of this object, and this object after :meth:`remove`, only waits for pending parameters.
    """

    def __init__(self, runs: "ModuleRuns | None" = None) -> None:
        self._runs = None if runs is None else weakref.ref(runs)

    def needed(self) -> bool:
        return self._runs is not None or super().needed()

    def in_unit(self) -> bool:
        runs = None if self._runs is None else self._runs()
        return runs is not None and runs.forwards.in_unit

    def __call__(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        runs = None if self._runs is None else self._runs()
        return super().__call__(module, forward if runs is None else partial(runs.run_unit, module, forward))

    def remove(self) -> None:
        self._runs = None

    def __reduce__(self) -> Any:
        return _Units, ()


class ModuleRuns:
    """The hooks on a model's modules, and the runs of modules that keep parameters whole.

    Closing or deleting this object removes the hooks. If it is deleted without :meth:`close`, parameters become whole
    on one rank, and stay in shards with several.

    Args:
        leaves: the leaf modules.
    """

    def __init__(
        self, model: nn.Module, parameters: PartitionedParameters, core: Engine, leaves: Iterable[nn.Module]
    ) -> None:
        self._model = weakref.ref(model)
        self._parameters = parameters
        self.forwards = _Forwards()
        """The forwards that are running, of the micro-batch that is running (:meth:`switch`)."""
        self.kept_by_caller: Set[PartitionedParameter] = frozenset()
        """Parameters that stay whole for longer than the forwards that run now, and until their backwards have ended.
        These runs do not keep them."""
        self._backwards: dict[int, list[_ModuleRun]] = {}
        """Maps a backward (``backward_number``) to the runs that keep parameters whole in it."""
        self._saved = SavedTensors()
        self._hooks = ModuleHooks()
        self.whole = WholeParameters(parameters, core, self.touch)
        self.leaves = LeafModules(model, leaves, several=parameters.live.device.world_size > 1)
        self.units = _Units(self)
        """Runs the forwards of compiled modules."""
        self.gather_read: Callable[[torch.Tensor], None] | None = None
        """Gathers a parameter that is read outside forward and backward; None: such a read is an error."""
        abandon = partial(_abandon, self._hooks, self.units, parameters.records, parameters.live)
        weakref.finalize(self, clear_up, abandon).atexit = False

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()
        self.units.remove()

    def hook_all(self) -> None:
        """Hook all modules that use partitioned parameters, and leaf modules."""
        model = self._model()
        if model is None:
            return
        for module in model.modules():
            uses = any(param in self._parameters for param in module.parameters()) or externals_of(module)
            if uses or module in self.leaves:
                self.hook(module)

    def hook(self, module: nn.Module) -> None:
        """Have the module's runs keep their parameters whole."""
        if module not in self._hooks:
            before = GraphHook(module, self._before_hook, self._keeps_all_of)
            self._hooks.add(module, before, GraphHook(module, self._after_hook, self.forwards.has_ended))

    def mark_leaves(self, modules: Iterable[nn.Module], leaf: bool) -> None:
        """Make modules leaf modules.

        Args:
            leaf: False: make them ordinary modules again.
        """
        for module in modules:
            self.leaves.choose(module, leaf)
            if leaf:
                self.hook(module)

    # --- several micro-batches at a time -------------------------------------------------------------

    @staticmethod
    def forwards_of_another() -> "_Forwards":
        """Return the forwards of a further micro-batch, for :meth:`switch`. No new round begins in any of them."""
        return _Forwards([_ModuleRun(None, [])])

    def switch(self, forwards: "_Forwards") -> "_Forwards":
        """Continue with the forwards of another micro-batch. Return the forwards that were running."""
        before, self.forwards = self.forwards, forwards
        return before

    def end_forwards(self, forwards: "_Forwards") -> None:
        """Release the parameters that a micro-batch's forwards keep whole."""
        for run in reversed(forwards):
            _end_saving(run)
            self.whole.release(run.params)
        forwards.clear()

    # --- forward -------------------------------------------------------------------------------------

    def run_unit(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        """Run a compiled module. The run is that of a leaf module. It begins before the module's own hooks and ends
        after them, because they are in the module's graph."""
        self._before_forward(module, is_leaf=True, is_unit=True)
        output = None
        try:
            output = forward()
        finally:
            self._after_forward(module, output, is_unit=True)
        return output

    def _before_hook(self, compiled: bool, module: nn.Module, args: Any) -> None:
        if compiled:
            await_all(module.parameters())
        self._before_forward(module, is_leaf=compiled or module in self.leaves)

    def _after_hook(self, compiled: bool, module: nn.Module, args: Any, output: Any) -> None:
        self._after_forward(module, output)

    def _keeps_all_of(self, module: nn.Module) -> bool:
        """Return True if the module's runs keep all parameters of inner modules whole."""
        return all(map(self.whole.runs_hold, self._parameters.used_by(*module.modules())))

    def _before_forward(self, module: nn.Module, *, is_leaf: bool, is_unit: bool = False) -> None:
        task = backward_number()
        if task != NO_BACKWARD:
            self._end_passed(task)
        elif not self.forwards:
            self.forget(graphs=False)
            self._parameters.live.begin_round((id(module), torch.is_grad_enabled()))
        kept = self._kept_by_leaves(task) | self.kept_by_caller
        used = self._parameters.used_by(*module.modules() if is_leaf else (module,))
        params = [record for record in used if record not in kept]
        run = _ModuleRun(module, params, next_node(), is_leaf=is_leaf, is_unit=is_unit)
        if is_leaf and not any(other.is_leaf for other in chain(self.forwards, *self._backwards.values())):
            run.leaf = self.leaves.begin_run(module)
        self.whole.acquire(run.params)
        self.forwards.append(run)
        self._note_saved(run)

    def _kept_by_leaves(self, task: int) -> set[PartitionedParameter]:
        """Return the parameters that a running leaf module keeps whole, in its forward or in backward ``task``."""
        forwards = (run.params for run in self.forwards if run.is_leaf)
        backwards = (run.in_backward for run in self._backwards.get(task, ()) if run.is_leaf)
        return {*chain(*forwards, *backwards)}

    def _note_saved(self, run: _ModuleRun) -> None:
        """Until the run ends, record gathered parameters that graphs save: [Note: saved parameters] in ``saved.py``."""
        if not run.params or not torch.is_grad_enabled() or not self._saved.needed(unit=run.is_unit):
            return
        run.saving = self._saved.note(self._gather_of)
        if run.saving is None:
            self.whole.keep(run.params, for_graph=True)
        else:
            run.saving.__enter__()

    def _gather_of(self, storage: int | None) -> Gather | None:
        """Return a function that begins the backward of the running forward that has gathered this storage; None: no
        running forward has."""
        for run in self.forwards:
            if any(record.storage == storage for record in run.params):
                return partial(self._before_backward, run, None)
        return None

    def _after_forward(self, module: nn.Module, output: Any, *, is_unit: bool = False) -> None:
        if not self.forwards.innermost_is(module, unit=is_unit):
            return  # the module's pre-hook did not run to the end
        run = self.forwards[-1]
        _end_saving(run)  # first: after an interrupt the forwards that run end theirs
        self.forwards.pop()
        outer = self.forwards[-1] if self.forwards else None
        try:
            leaves = list(_leaves(output))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self._keep_escaped(run, tensors, outer)
            around = next((outer for outer in reversed(self.forwards) if outer.is_leaf), None)
            for keeper in (run, around):
                if keeper is not None and (keeper.params or keeper.leaf) and torch.is_grad_enabled():
                    attributes = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
                    opaque = keeper is run and len(leaves) > len(tensors)
                    self._expect_backward(keeper, [*tensors, *attributes], opaque=opaque)
        finally:
            self.whole.release(run.params)
            if outer is None and backward_number() == NO_BACKWARD and (output is None or not torch.is_grad_enabled()):
                self._parameters.live.release_idle()

    def _keep_escaped(self, run: _ModuleRun, tensors: Sequence[torch.Tensor], outer: _ModuleRun | None) -> None:
        """Have the calling module keep parameters that a module returns as output."""
        storages = {storage_of(tensor) for tensor in tensors} if run.params else set()
        escaped = [record for record in run.params if record.storage in storages]
        for record in escaped:
            if outer is None:
                self.whole.keep([record], for_graph=torch.is_grad_enabled())
            elif record not in outer.params:
                self._join(outer, record)

    def _join(self, run: _ModuleRun, record: PartitionedParameter) -> None:
        """Have a running module keep a parameter whole that it turned out to use."""
        self.whole.acquire([record])
        run.params.append(record)
        if run.saving is None and run is self.forwards[-1]:
            self._note_saved(run)
        if run.module is not None:
            note_external(run.module, record.param)

    def _expect_backward(self, run: _ModuleRun, tensors: Sequence[torch.Tensor], *, opaque: bool) -> None:
        """Have the run keep its parameters in the backward of these tensors.

        Args:
            opaque: True if the forward also returned objects that may hold other tensors.
        """
        ways = [t for tensor in tensors if tensor.requires_grad for t in (tensor, tensor._base) if t is not None]
        nodes = [t.grad_fn for t in ways if t.grad_fn is not None]
        for node in nodes:
            if node._sequence_nr() >= run.began:
                node.register_prehook(partial(self._before_backward, run))
                if run.leaf is not None:
                    self.leaves.expect_backward(run.leaf)
        if opaque and not nodes:
            self.whole.keep(run.params, for_graph=True)

    # --- reads of released parameters ----------------------------------------------------------------

    def touch(self, record: PartitionedParameter) -> None:
        """Make a released parameter whole before it is read.

        Raises:
            StateError: no forward and no backward runs.
        """
        self._parameters.live.check_present()
        if self.use(record):
            return
        if self.gather_read is None:
            raise read_error(record)
        self.gather_read(record.param)

    def use(self, record: PartitionedParameter) -> bool:
        """Have the running forward or backward keep a parameter; return False if none runs."""
        task = backward_number()
        if self.forwards and record not in self.forwards[-1].params:
            self._join(self.forwards[-1], record)
        elif task != NO_BACKWARD and not self.forwards:
            self.whole.acquire([record])
            self._runs_of(task).append(_ModuleRun(None, [record], task=task, in_backward=[record]))
        return bool(self.forwards) or task != NO_BACKWARD

    # --- backward ------------------------------------------------------------------------------------

    def _runs_of(self, task: int) -> list[_ModuleRun]:
        """Return the runs of a backward, which keep parameters at most until its end."""
        if task not in self._backwards:
            self._backwards[task] = []
            at_end_of_backward(partial(self._backward_ended, task))
        return self._backwards[task]

    def _before_backward(self, run: _ModuleRun, gradients: Any) -> None:
        task = backward_number()
        if task == NO_BACKWARD or run.task == task:
            return
        self._end_passed(task)
        runs = self._runs_of(task)
        # A parameter that another module uses, too, may have its whole gradient before this module's backward begins.
        current = [record for record in run.params if not self.whole.was_sent_early(record)]
        self.whole.acquire(current)
        run.in_backward = current
        run.task, run.differentiable = task, torch.is_grad_enabled()
        runs.append(run)
        if run.leaf is not None:
            self.leaves.begin_backward(run.leaf, task)

    def _end_passed(self, task: int) -> None:
        """End the runs whose nodes have all run in this backward."""
        node = running_node()
        passed = [run for run in self._backwards.get(task, ()) if node is not None and run.began > node._sequence_nr()]
        for run in passed:
            self._backwards[task].remove(run)
            self._end(run)
        if passed:
            self.leaves.end_runs([run.leaf for run in passed if run.leaf is not None], task)

    def _end(self, run: _ModuleRun) -> None:
        params, run.in_backward = run.in_backward, ()
        run.task = NO_BACKWARD
        if run.differentiable:
            self.whole.keep(params, for_graph=True)
        self.whole.release(params)

    def _backward_ended(self, task: int) -> None:
        runs = self._backwards.pop(task, [])
        for run in runs:
            self._end(run)
        self.leaves.end_backward([run.leaf for run in runs if run.leaf is not None], task)
        if not self._backwards and not self.forwards:
            self._parameters.live.release_idle()

    def forget(self, *, graphs: bool = True) -> None:
        """Release parameters that an error or a forward without backward left whole, and parameters that stay whole
        after their runs (:meth:`WholeParameters.keep`).

        Args:
            graphs: True: also release parameters that are kept because a graph may read them.
        """
        runs = [*chain(*self._backwards.values())]
        params: list[Sequence[PartitionedParameter]] = [run.params for run in self.forwards]
        for run in reversed(self.forwards):
            _end_saving(run)
        self.forwards.clear()
        self._backwards = {}
        self.leaves.forget(graphs=graphs)
        for run in runs:
            params.append(run.in_backward)
            run.task, run.in_backward = NO_BACKWARD, ()
        for each in params:
            self.whole.release(each)
        self.whole.end_keeping(graphs=graphs)


def _end_saving(run: _ModuleRun) -> None:
    if run.saving is not None:
        end_noting(run.saving)
        run.saving = None


def _leaves(output: Any) -> Iterator[Any]:
    """Yield the tensors of a module's output, and objects in it that may hold other tensors."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif not isinstance(leaf, _PLAIN):
            yield leaf
            yield from (
                value for value in tree_leaves(getattr(leaf, "__dict__", {})) if isinstance(value, torch.Tensor)
            )


def _abandon(
    hooks: ModuleHooks, units: _Units, records: dict[torch.Tensor, PartitionedParameter], live: LiveParams
) -> None:
    """Clean up after an engine that was deleted. On one rank, make the engine's parameters whole."""
    hooks.remove()
    units.remove()
    try:
        if live.device.world_size == 1 and not live.released:
            for record in records.values():
                live.acquire([record.live])
                for tensor in record.values.tensors:
                    arrive(tensor)
    finally:
        live.device.synchronize()  # copies read shards in pinned memory, which is freed next
