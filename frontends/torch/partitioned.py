"""Stage 3: parameters that exist as shards, made whole for the modules that use them.

[Note: storages of partitioned parameters] A partitioned parameter keeps its identity, shape and element type; while it
is released its storage has no bytes. Gathering gives the storage its bytes back and fills it through another tensor, so
what autograd saved of the parameter in forward, which shares the storage, has its values again in backward, and no
version counter moves.

[Note: who keeps a parameter whole] A module's run keeps its own parameters and those that were registered with it; its
backward does, from the first of its outputs' nodes until one runs that is older than its forward: autograd runs the
youngest node that it can, so none of the module's is left then. What is touched besides is kept by the innermost module
that runs, and registered with it; in backward by the backward, till its end. Nothing else may touch a released
parameter (``pending.py``).
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from offload_core.bucket_terms import PARAMETER_SHARDS
from offload_core.errors import ParameterError, StateError
from offload_core.layout import agree
from offload_core.live_params import LiveParams, PartitionedParam
from offload_core.memory_plan import PlanRow
from offload_core.partition import ParamSpec
from offload_core.pipeline import Pipeline

from .construction import gathered_shards, hand_over, in_shards, shards_of, unexpected_change
from .cut import Cut
from .device import as_torch
from .device_ranks import device_for
from .pending import forget, make_pending
from .tensors import TORCH_DTYPES, flat, is_offloadable, shaped_like, spec_of

_MODELS: "weakref.WeakValueDictionary[int, PartitionedModel]" = weakref.WeakValueDictionary()
"""What a parameter belongs to, by ``id``; it keeps the parameters alive, so no id is reused."""
_EXTERNAL = "_offload_external_parameters"
"""The attribute of a module that lists the parameters of others that its forward uses."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class PartitionedParameter(Cut):
    """A parameter of the model and this rank's shards of it; its storage while it is whole ([Note: storages of
    partitioned parameters])."""

    def __init__(self, live: LiveParams, spec: ParamSpec, param: torch.Tensor, module: str, bucket_numel: int) -> None:
        super().__init__(spec, live.device.ranks, live.device.world_size, bucket_numel)
        self.param = param
        self.module = module
        """The module that it is a parameter of, in words."""
        self.shard = torch.empty(0)
        self.whole = torch.empty(0)
        self.index: int | None = None
        """Its number in the pipeline; None while it is not trained."""
        self.spread = -1
        """The version that all ranks were given last inside ``gathered_parameters``."""
        self.lasts = False
        """Whether others may refer to the storage, which then is theirs."""
        self.live: PartitionedParam = live.add(spec, self.buckets, None, self)

    def empty(self) -> None:
        """Give the parameter a storage without bytes; what it had is left to those who refer to it."""
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            self.whole = torch.empty(self.padded_numel, dtype=TORCH_DTYPES[self.spec.dtype], device=self.param.device)
            self.param.data = shaped_like(self.whole[: self.spec.numel], self.param)
        self.whole.untyped_storage().resize_(0)
        self.lasts = False

    def allocate(self) -> torch.Tensor:
        self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())
        return self.whole

    def free(self) -> None:
        if self.lasts:
            self.empty()
        else:
            self.whole.untyped_storage().resize_(0)


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


class PartitionedModel:
    """The partitioned parameters of a model, and the hooks that make them whole.

    Args:
        device: where whole parameters are.
        group: as in ``device_for``; gathers go their own way between its ranks. Making it is collective.
        pipeline: of those that are trained.
    """

    def __init__(self, model: nn.Module, device: torch.device, group: Any, pipeline: Pipeline) -> None:
        self._config = config = pipeline.config
        self._pipeline = pipeline
        _check_unowned(model)
        self._world = device_for(device, group, config, apart=True)
        self._world.trace = pipeline.device.trace
        self.live = LiveParams(config, self._world)
        self._torch_device = device
        self._of: dict[int, PartitionedParameter] = {}
        self._owners: dict[int, tuple[torch.Tensor, str, str]] = {}
        """A parameter, its name, and the module that has it, in words."""
        self._model = weakref.ref(model)
        for name, module in model.named_modules():
            for own, param in module.named_parameters(recurse=False):
                words = f"{type(module).__name__} {name!r}" if name else type(module).__name__
                self._owners.setdefault(id(param), (param, f"{name}.{own}" if name else own, words))
                _MODELS[id(param)] = self
        self._calls: list[_Call] = []
        """Forwards that are running, innermost last."""
        self._backwards: dict[int, list[_Call]] = {}
        """Calls that keep their parameters, by backward."""
        self._kept: dict[PartitionedParameter, bool] = {}
        """Parameters that are kept whole after their calls: until they change, or (False) until the next round."""
        self._open = 0
        """``gathered_parameters`` that have not ended."""
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[Any] = []
        weakref.finalize(self, _abandon, self._handles, self._of, self.live).atexit = False

    # --- taking parameters apart ---------------------------------------------------------------------

    def takes(self, param: torch.Tensor) -> bool:
        """Whether the parameter is to be partitioned, or is."""
        if id(param) in self._of or (id(param) in self._owners and in_shards(param)):
            return True
        fits = id(param) in self._owners and type(param) is nn.Parameter and is_offloadable(param)
        return fits and param.numel() >= max(self._config.param_persistence_threshold, 1)

    def __contains__(self, param: torch.Tensor) -> bool:
        return id(param) in self._of

    def shard_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """What this rank holds of the parameter, one-dimensional; None: all of it."""
        record = self._of.get(id(param))
        return None if record is None else record.shard

    def record_of(self, param: torch.Tensor) -> PartitionedParameter | None:
        """What there is of a parameter, if it is partitioned."""
        return self._of.get(id(param))

    def cut(self, entries: Sequence[tuple[ParamSpec, torch.Tensor]]) -> dict[torch.Tensor, PartitionedParameter]:
        """The partitioned ones among these, with this rank's shards of them.

        New ones stay whole (of rank 0's values) and of their element type till :meth:`keep_shards`.
        """
        found = {param: self._of.get(id(param)) for spec, param in entries if spec.partitioned}
        new = [(spec, param) for spec, param in entries if spec.partitioned and found[param] is None]
        given = [f"{param.dtype}{' in shards' * in_shards(param)}" for _, param in new]
        agree(self._world.collectives, self._config, [spec for spec, _ in new], given)
        with torch.no_grad():
            for spec, param in new:
                words, built = self._owners[id(param)][2], shards_of(param)
                record = PartitionedParameter(self.live, spec, param, words, self._config.reduce_bucket_size)
                if built is not None:
                    record.shard = built.for_engine(record).to(self._shards_device)
                else:
                    self._world.start_alike([spec], [flat(param)])
                    record.shard = torch.zeros(record.shard_numel, dtype=param.dtype, device=self._shards_device)
                    record.cut(param, record.shard)
                found[param] = record
        return {param: record for param, record in found.items() if record is not None}

    @property
    def _shards_device(self) -> torch.device:
        return torch.device("cpu") if self._config.offload_param == "cpu" else self._torch_device

    def keep_shards(self, records: Iterable[PartitionedParameter]) -> None:
        """From now on these parameters are their shards, of the element type that they are to have."""
        for record in records:
            if id(record.param) in self._of:
                continue
            dtype = record.spec.dtype
            if self._config.offload_param == "cpu":
                pinned = self._config.pin_memory and self._world.wants_pinned
                host = self._pipeline.memory.allocate(PARAMETER_SHARDS, record.shard_numel, dtype.numpy, pinned=pinned)
                shard = as_torch(host).copy_(record.shard)
            else:
                shard = record.shard.to(TORCH_DTYPES[dtype])
            record.shard = shard
            hand_over(record.param)
            record.live.shard = self._world.host_array(shard) if self._pipeline.host_shards else shard
            gradient, record.param.grad = record.param.grad, None
            record.empty()
            record.param.grad = None if gradient is None else gradient.to(TORCH_DTYPES[dtype])
            self._of[id(record.param)] = record
            self._guard(record)
        self._hook_all()

    def frozen(self, trained: Collection[torch.Tensor]) -> list[tuple[ParamSpec, torch.Tensor]]:
        """The parameters that are to be partitioned and are not trained."""
        ids = {id(param) for param in trained}
        owned = [
            (name, param) for param, name, _ in self._owners.values() if id(param) not in ids and self.takes(param)
        ]
        target = self._config.target_dtype
        return [(spec_of(name, param, 0, target, partitioned=True), param) for name, param in owned]

    def plan_cut(self, entries: Sequence[tuple[ParamSpec, torch.Tensor]]) -> PlanRow:
        """What :meth:`cut` of these takes till :meth:`keep_shards`, beside the whole parameters."""
        n_bytes = 0
        for spec, param in entries:
            if spec.partitioned and id(param) not in self._of and not in_shards(param):
                cut = Cut(spec, self._world.ranks, self._world.world_size, self._config.reduce_bucket_size)
                n_bytes += cut.shard_numel * param.element_size()
        where = "host" if self._shards_device.type == "cpu" else "device"
        return PlanRow("shards as they were given", where, n_bytes, "init()", passing=True)

    def keep_frozen(self, trained: Collection[torch.Tensor]) -> None:
        """Partition what is not trained."""
        self.keep_shards(self.cut(self.frozen(trained)).values())

    def train(self, param: torch.Tensor, index: int) -> None:
        """The parameter is the pipeline's of that number."""
        record = self._of[id(param)]
        record.index = index
        record.live.updated = partial(self._pipeline.update_of, index)

    @property
    def sent_bytes(self) -> int:
        """Bytes of parameters that this rank has sent to others."""
        return self._world.sent_bytes

    @property
    def shard_bytes(self) -> int:
        """Bytes that shards take on the device."""
        return 0 if self._config.offload_param == "cpu" else sum(r.shard.nbytes for r in self._of.values())

    def check_closed(self, what: str = "an update") -> None:
        """Raise :class:`StateError` inside ``gathered_parameters``."""
        if self._open:
            raise StateError(
                f"{what} inside gathered_parameters(); expected it after: what is written there is in no shard yet"
            )

    def before_change(self) -> int:
        """Release everything, for parameters are about to change; a number that is the same on all ranks that
        gathered alike.

        Raises :class:`StateError` inside ``gathered_parameters``.
        """
        self.check_closed()
        self._forget_calls()
        return self.live.release_all()

    def recover(self) -> None:
        """After an error nothing is whole any more."""
        self._forget_calls()
        self.live.release_idle()

    def close(self) -> None:
        """Make all parameters whole for good, and remove the hooks. Collective."""
        self.before_change()
        for record in self._of.values():
            self._hold([record])
            _MODELS.pop(id(record.param), None)
        self._of.clear()
        _remove(self._handles)

    # --- hooks ---------------------------------------------------------------------------------------

    def _hook_all(self) -> None:
        model = self._model()
        if model is None:
            return
        for module in model.modules():
            if any(id(param) in self._of for param in module.parameters()) or _externals_of(module):
                self.hook(module)

    def hook(self, module: nn.Module) -> None:
        """Have the module's forward keep whole what it uses."""
        if module in self._hooked:
            return
        self._hooked.add(module)
        before = _Hook(self, lambda model, module, args: model._before_forward(module))
        after = _Hook(self, lambda model, module, args, output: model._after_forward(module, output))
        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _hold(self, records: Sequence[PartitionedParameter]) -> None:
        try:
            self.live.acquire([record.live for record in records])
        except BaseException:
            self._pipeline.finish()  # what went wrong in an update is raised as such
            raise
        for record in records:
            forget(record.param)

    def _let_go(self, records: Sequence[PartitionedParameter], *, may_stay: bool = True) -> None:
        self.live.release([record.live for record in records], may_stay=may_stay)
        for record in records:
            self._guard(record)

    def _guard(self, record: PartitionedParameter) -> None:
        if not record.live.holds:
            make_pending(record.param, partial(_touched, weakref.ref(self), id(record.param), record.spec.name))

    def _records_of(self, module: nn.Module) -> list[PartitionedParameter]:
        params = [*module._parameters.values(), *_externals_of(module)]
        found = {id(param): self._of[id(param)] for param in params if id(param) in self._of}
        return list(found.values())

    # --- forward -------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module) -> None:
        task = _backward()
        if task is not None:
            self._end_passed(task)
        elif not self._calls:
            self._forget_calls(graphs=False)
            self.live.begin_round((id(module), torch.is_grad_enabled()))
        call = _Call(module, self._records_of(module), torch._C._autograd._get_sequence_nr())
        self._hold(call.params)
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
            self._let_go(call.params)
            if outer is None and _backward() is None and (output is None or not torch.is_grad_enabled()):
                self.live.release_idle()

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
        self._hold([record])
        call.params.append(record)
        if call.module is not None:
            register_external_parameter(call.module, record.param)

    def _keep(self, records: Sequence[PartitionedParameter], *, for_graph: bool) -> None:
        """Keep parameters whole till the next round, or, where a graph may read them, until they change."""
        self._hold([record for record in records if record not in self._kept])
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
        record = self._of[param]
        if not self._use(record):
            raise StateError(
                f"parameter {record.spec.name!r} of {record.module} was read outside the forward of a module; in stage "
                "3 it is there for those only; expected `with gathered_parameters(...)` around what reads it "
                "(state_dict() too)"
            )

    def _use(self, record: PartitionedParameter) -> bool:
        """Have the forward or backward that runs keep a parameter; whether there is one."""
        task = _backward()
        if self._calls and record not in self._calls[-1].params:
            self._join(self._calls[-1], record)
        elif task is not None and not self._calls:
            self._hold([record])
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
        self._hold(call.params)
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
        self._let_go(call.params)

    def _backward_ended(self, task: int) -> None:
        for call in self._backwards.pop(task, ()):
            self._end(call)
        if not self._backwards and not self._calls:
            self.live.release_idle()

    def _forget_calls(self, *, graphs: bool = True) -> None:
        """Release what an error, or a forward without backward, has left; and what is kept, for ``graphs`` too."""
        calls = [*self._calls, *(call for calls in self._backwards.values() for call in calls)]
        self._calls, self._backwards = [], {}
        for call in calls:
            call.task = None
            self._let_go(call.params)
        kept = [record for record, for_graph in self._kept.items() if graphs or not for_graph]
        for record in kept:
            del self._kept[record]
        self._let_go(kept)

    # --- gathered by hand ----------------------------------------------------------------------------

    @contextmanager
    def gathered(self, params: Sequence[torch.Tensor], modifier_rank: int | None) -> Iterator[None]:
        """As :func:`gathered_parameters`, of parameters of this model."""
        if modifier_rank is not None and modifier_rank not in range(self._world.world_size):
            raise ParameterError(
                f"gathered_parameters: modifier_rank={modifier_rank!r}, expected None or one of the ranks 0 to "
                f"{self._world.world_size - 1}"
            )
        records = list({id(p): self._of[id(p)] for p in params if id(p) in self._of}.values())
        self._hold(records)
        used = [self._use(record) for record in records]
        # Where nothing runs that would gather it again for backward, a graph keeps the memory, not the parameter.
        graphs = nullcontext() if all(used) else saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach)
        self._open += 1
        versions = [record.param._version for record in records]
        try:
            with graphs:
                yield
            changed = [
                r for r, before in zip(records, versions, strict=True) if r.param._version not in (before, r.spread)
            ]
            if modifier_rank is not None:
                self._spread(params, modifier_rank)
            elif changed:
                raise unexpected_change(changed[0].spec.name)
        finally:
            self._open -= 1
            for record in records:
                record.lasts = True  # state_dict() and others may refer to it
            self._let_go(records, may_stay=False)  # with what was not to be changed

    def _spread(self, params: Sequence[torch.Tensor], source: int) -> None:
        """Give all ranks one rank's values of these parameters."""
        for param in params:
            record = self._of.get(id(param))
            name = self._owners[id(param)][1]
            with torch.no_grad():
                if record is None:
                    self._world.start_alike([spec_of(name, param, 0)], [flat(param)], source)
                    continue
                target = shaped_like(record.whole[: record.spec.numel], param)
                if param.data_ptr() != target.data_ptr():  # p.data = ...
                    target.copy_(param)
                    param.data = target
                self._world.start_alike([record.spec], [record.whole[: record.spec.numel]], source)
                record.cut(param, record.shard)
                increment_version(param)
                record.spread = param._version
                if record.index is not None:
                    self._pipeline.adopt(record.index, record.shard)


def gathered_parameters(params: torch.Tensor | Iterable[torch.Tensor], modifier_rank: int | None = None) -> Any:
    """A context in which partitioned parameters (stage 3) are whole: ``with gathered_parameters(layer.weight): ...``

    All ranks must enter it together, with the same parameters in the same order. What was taken from a parameter inside
    (``state_dict()``, views) stays valid after it.

    Args:
        params: a parameter or several; those that are not partitioned are whole anyway.
        modifier_rank: the rank that changes the parameters: at the end all ranks, and their master weights, take its
            values. None: nobody changes them.

    Raises:
        StateError: a parameter was changed and no ``modifier_rank`` is given; the change is lost.
    """
    return _gathered([params] if isinstance(params, torch.Tensor) else list(params), modifier_rank)


@contextmanager
def _gathered(params: Sequence[torch.Tensor], modifier_rank: int | None) -> Iterator[None]:
    for param in params:
        if not isinstance(param, torch.Tensor):
            raise ParameterError(f"gathered_parameters: got a {type(param).__name__}, expected parameters")
    model = next((m for m in map(_model_of, params) if m is not None), None)
    if model is None:
        with gathered_shards(params, modifier_rank):
            yield
        return
    mine = [param for param in params if _model_of(param) is model]
    others = [param for param in params if _model_of(param) is not model]
    with _gathered(others, modifier_rank), model.gathered(mine, modifier_rank):
        yield


def _model_of(param: torch.Tensor) -> PartitionedModel | None:
    return None if in_shards(param) else _MODELS.get(id(param))


def register_external_parameter(module: nn.Module, param: torch.Tensor) -> None:
    """Say that a module's forward uses a parameter of another module, before ``wrap`` or after.

    In stage 3 it is then whole while the module runs. Most such uses are noticed by themselves, at the cost of
    gathering the parameter once more at the first.

    Raises:
        ParameterError: ``module`` is no module or ``param`` no parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(param, nn.Parameter):
        raise ParameterError(
            f"register_external_parameter: got {type(module).__name__} and {type(param).__name__}, expected a module "
            "and a parameter"
        )
    if all(param is not known for known in _externals_of(module)):
        module.__dict__.setdefault(_EXTERNAL, []).append(param)
    model = _MODELS.get(id(param))
    if model is not None and param in model:
        model.hook(module)


class _Hook:
    """A hook of one model on its modules; in copies of a module it does nothing."""

    def __init__(self, model: PartitionedModel | None = None, act: Callable[..., None] | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._act = act

    @torch._disable_dynamo
    def __call__(self, *args: Any) -> None:
        model = None if self._model is None else self._model()
        if model is not None and self._act is not None:
            self._act(model, *args)

    def __reduce__(self) -> Any:
        return _Hook, ()


def _check_unowned(model: nn.Module) -> None:
    """Raise :class:`StateError` where another engine has taken one of the parameters apart."""
    for name, param in model.named_parameters():
        other = _model_of(param)
        if other is not None and param in other:
            raise StateError(
                f"parameter {name!r} is there in shards of another engine; expected one owner: end that one with "
                ".close(), or give this model a parameter of its own"
            )


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


def _touched(model: "weakref.ref[PartitionedModel]", param: int, name: str) -> None:
    this = model()
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
