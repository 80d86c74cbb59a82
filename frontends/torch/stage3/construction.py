"""``init()`` builds a model in shards (stage 3), so that it may be larger than one rank's memory.

[Note: what is whole while a model is built] A parameter becomes whole when a module registers it, or when a torch
function reads it while it is in shards. It stays whole until the next parameter becomes whole. Then this rank keeps a
shard of rank 0's values and frees the parameter's memory, unless the running function has the parameter as an argument,
its module is still registering parameters, or another tensor refers to its memory (``w = layer.weight.data``). So
constructors that change their children's weights, ``apply(fn)``, ``nn.init`` and ``load_state_dict`` work as on a whole
model, in the memory of a few parameters. All ranks must run the same code, and each exchange first checks that they do.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from offload_core.config.options import OffloadConfig
from offload_core.config.settings import OffloadSettings
from offload_core.device.host_ranks import HostRanks
from offload_core.disk.folders import check_folders
from offload_core.disk.shards import DiskShards
from offload_core.errors import ConfigError, ParameterError, StateError
from offload_core.memory.host_memory import HostMemory, give_back_freed
from offload_core.memory.plan import PARAMETER_SHARDS
from offload_core.ranks.consistency import combine, fingerprint
from offload_core.support.checks import kind_of
from offload_core.support.progress import progress

from ..internals.private import grad_mode_kept, no_torch_function, storage_users
from ..params.managed import manage, managed
from ..params.pending import METADATA, arrive, is_moving_model, shard
from ..params.tensors import ELEMENT_TYPES, MOVED_TYPES, TORCH_DTYPES, flat, is_offloadable, shaped_like, spec_of
from ..ranks.collectives import default_group
from ..ranks.device import as_torch
from ..ranks.device_ranks import device_for
from .cut import Cut
from .shards import MemoryShard, Shard, on_disk

_LONE = 2
"""The ``storage_users`` of a storage to which only one tensor refers."""
_KEPT = 16 * 2**20
"""Bytes of freed parameters after which the allocator is asked to return memory to the system."""
_RESETS = ("reset_parameters", "_reset_parameters")  # nn.MultiheadAttention has the second


def init(
    module: nn.Module | None = None,
    config: OffloadConfig | Mapping[str, Any] | None = None,
    *,
    init_fn: Callable[[nn.Module], Any] | None = None,
    process_group: Any = None,
    remote_device: str | None = None,
    enabled: bool = True,
    **overrides: Unpack[OffloadSettings],
) -> AbstractContextManager[Any]:
    """A context in which modules are built in shards: ``with init(): model = GPT()``, then ``wrap(model, stage=3)``.

    Code inside may read and change parameters as usual. All ranks must run the same code, and rank 0's values are used.
    Changes on only one rank belong in ``gathered_parameters(..., modifier_rank=...)``. Parameters keep the element type
    in which they are built. (``param_dtype`` is for ``wrap``, whose master weights start from the parameters as built.)
    Parameters of fewer than ``param_persistence_threshold`` elements stay whole. On one rank parameters are cut
    only with ``offload_param``.

    Args:
        module: an existing module, to be cut now. Its tensors on the meta device are first given memory on torch's
            default device, one module at a time.
        config: the configuration for ``wrap`` (``stage=3``). ``wrap`` must get the same ``reduce_bucket_size`` and
            formats of states.
        init_fn: a function of a module that was on the meta device, which sets the module's own parameters and buffers
            but not its children's; None: the module's ``reset_parameters()``.
        process_group: as in ``wrap``.
        remote_device: ``"cpu"`` keeps shards in host memory, as with ``offload_param="cpu"``, and ``"nvme"`` on disk,
            as with ``offload_param="nvme"``, in the folders of the configuration's ``nvme_path``.
        enabled: False makes the context do nothing.
        overrides: fields of ``OffloadConfig``.

    Raises:
        ConfigError: the configuration is not one of stage 3; ``nvme_path`` is missing or cannot be used.
        ParameterError: a module on the meta device has no ``reset_parameters()``, and no ``init_fn`` is given.
        StateError: another ``init()`` with a different configuration is running; or, inside the context, ranks run
            different code.
    """
    if module is not None and not isinstance(module, nn.Module):
        raise ParameterError(f"init: got {kind_of(module)}, expected a torch.nn.Module, or init(config=...)")
    if remote_device not in (None, "cpu", "nvme"):
        raise ConfigError(f"remote_device: got {remote_device!r}, expected 'cpu', 'nvme' or None")
    if not enabled:
        return nullcontext()
    if config is None:
        overrides.setdefault("stage", 3)
    resolved = OffloadConfig.resolve(config, **overrides)
    if resolved.stage != 3:
        raise ConfigError(f"init() with stage={resolved.stage}, in which parameters are whole; expected stage=3")
    if remote_device is not None:
        resolved = replace(resolved, offload_param=remote_device)
    construction = _Construction(resolved, default_group(process_group))
    if module is not None:
        with construction.building() as active:
            active.take(module, init_fn)
    return construction.building()


# --- parameters in shards, before an engine has them ----------------------------------------------------


class InitShards(Cut):
    """This rank's shards of a parameter that no engine has yet, in the element type in which the parameter was built.

    The constructor copies these shards from the values of rank ``source``, and leaves the parameter whole.
    """

    def __init__(self, param: torch.Tensor, name: str, made_by: "_Construction", source: int = 0) -> None:
        self.made_by = made_by
        self.device = made_by.device(param.device)
        spec = spec_of(name, param, 0, partitioned=True)
        super().__init__(spec, self.device.ranks, self.device.world_size, made_by.config)
        self.device.start_alike([spec], [flat(param)], source)
        self.shard = made_by.keep(self, flat(param))
        self.holds = 0
        """The number of ``gathered_parameters`` blocks in which the parameter is whole."""

    def release(self, param: torch.Tensor) -> None:
        """Free the parameter's memory. If other tensors refer to the memory, they keep it."""
        if _refers_to_memory_of(param) or not param.untyped_storage().resizable():
            param.data = torch.empty_like(param.data)
        param.untyped_storage().resize_(0)
        increment_version(param)  # so that a graph that has saved it raises in backward
        this = manage(param)
        this.shards = self
        this.keep(param)
        shard(param, _read)

    def gather(self, param: torch.Tensor) -> None:
        """Make the parameter whole. Collective."""
        self.made_by.agree(f"gather {self.spec.name!r} {self.spec.elements}", self.device)
        arrive(param)
        param.data = shaped_like(self._gathered(param.device), param)

    def _gathered(self, on: torch.device) -> torch.Tensor:
        """Return the whole parameter, one-dimensional, on this device. Collective."""
        whole = torch.empty(self.padded_numel, dtype=TORCH_DTYPES[self.spec.dtype], device=on)
        shards = self.shard.source(self._lent)
        after, what = self.device.mark(), f"parameter {self.spec.name!r}: gathering of its shards"
        for bucket in self.buckets:
            shard = shards.lend(bucket, after)
            self.device.gather(bucket, shard, whole, after, what).wait()
            shards.give_back(bucket, None)
        return whole[: self.spec.numel]

    def _lent(self, values: torch.Tensor) -> Any:
        return self.device.host_array(values) if values.device.type == "cpu" else values

    def for_engine(self, cut: Cut, on: torch.device) -> Shard:
        """Return this rank's shards, cut as an engine needs them. Collective if the engine keeps matrices whole that
        these shards have cut.

        Args:
            cut: the engine's cut of the parameter.
            on: the device of the whole parameter.

        Raises:
            ConfigError: the cuts differ in another way.
            StateError: inside ``gathered_parameters``.
        """
        if self.holds:
            raise StateError(
                f"parameter {cut.spec.name!r} is wrapped inside gathered_parameters(), which gives it back in shards; "
                "expected wrap() after the block"
            )
        if self.alike(cut):
            return self.shard
        if not self.alike(cut.without_matrices()):
            raise ConfigError(
                f"parameter {cut.spec.name!r} was cut for {self.device.world_size} ranks with reduce_bucket_size="
                f"{self.made_by.config.reduce_bucket_size} and state_format={self.made_by.config.state_format!r} by "
                "init(), and wrap() would cut it otherwise; expected the same process group, reduce_bucket_size and "
                "formats of states: give both the same configuration"
            )
        return self.made_by.keep(cut, self._gathered(on))


def shards_of(param: torch.Tensor) -> InitShards | None:
    """Return the shards of a parameter that was built under ``init()``, while no engine has them; else None."""
    return managed(param).shards


def in_shards(param: torch.Tensor) -> bool:
    """Return True if the parameter was built under ``init()`` and no engine has it yet."""
    return shards_of(param) is not None


def hand_over(param: torch.Tensor) -> None:
    """Forget the parameter's ``InitShards``, because an engine has taken its shards."""
    this = manage(param)
    this.shards = None
    this.end_keeping()


def check_takes_none(named: Iterable[tuple[str, torch.Tensor]], config: OffloadConfig) -> None:
    """Raise :class:`StateError` if one of these parameters was built in shards. For an engine that keeps parameters
    whole."""
    name = next((name for name, param in named if in_shards(param)), None)
    if name is not None:
        got = f"stage={config.stage}, offload_param={config.offload_param!r}"
        raise StateError(
            f"parameter {name!r} was built in shards, by init(), and {got} on these ranks keeps parameters whole; "
            "expected wrap(model, stage=3, ...) with the configuration that init() had"
        )


def check_finished() -> None:
    """Raise :class:`StateError` inside ``init()``."""
    if _active() is not None:
        raise StateError("a model is wrapped inside init(), which builds it still; expected wrap() after the block")


@contextmanager
def gathered_shards(params: Sequence[torch.Tensor], modifier_rank: int | None) -> Iterator[None]:
    """A context in which parameters that no engine has yet are whole. At its end, all ranks take the values of
    ``modifier_rank``.

    Raises:
        StateError: a parameter was changed, and ``modifier_rank`` is None.
    """
    active = _active()
    with grad_mode_kept(), torch.no_grad(), no_torch_function():
        if active is not None:
            active.cut([entry for entry in active.whole if any(entry.param is param for param in params)])
        found = [(param, shards) for param in params if (shards := shards_of(param)) is not None]
        for param, shards in found:
            if not shards.holds:
                shards.gather(param)
            shards.holds += 1
    versions = [param._version for param, _ in found]
    try:
        yield
        made_by = next((shards.made_by for _, shards in found), active)
        if modifier_rank is not None and made_by is not None:
            with grad_mode_kept(), torch.no_grad(), no_torch_function():
                made_by.spread(params, modifier_rank)
        else:
            changed = [
                shards for (param, shards), before in zip(found, versions, strict=True) if param._version != before
            ]
            if changed:
                raise unexpected_change(changed[0].spec.name)
    finally:
        with grad_mode_kept(), torch.no_grad(), no_torch_function():
            for param, _ in found:
                shards = managed(param).shards
                shards.holds -= 1
                if not shards.holds:
                    shards.release(param)


def unexpected_change(name: str, where: str = "gathered_parameters()") -> StateError:
    """Return the error of ``gathered_parameters`` for a change without ``modifier_rank``."""
    return StateError(
        f"parameter {name!r} was changed inside {where}, which says that no rank changes it; the change "
        "is lost; expected gathered_parameters(..., modifier_rank=0)"
    )


def _read(param: torch.Tensor) -> None:
    """Make a parameter in shards whole before it is read, or raise :class:`StateError` outside ``init()``."""
    shards, active = managed(param).shards, _active()
    if active is None and is_moving_model():
        raise StateError(
            f"parameter {shards.spec.name!r}, built in shards by init(), was to be moved or cast (.to(), .bfloat16()); "
            "expected the device where it is built (`with torch.device(...), init(...):`), and the element type in "
            "wrap(model, stage=3, param_dtype=...)"
        )
    if active is None:
        raise StateError(
            f"parameter {shards.spec.name!r}, built in shards by init(), was read; expected wrap(model, stage=3, ...) "
            "first, or `with gathered_parameters(...)` around what reads it (state_dict() too)"
        )
    active.make_whole([param])


# --- building -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Whole:
    """A parameter that is still whole."""

    param: torch.Tensor
    name: str
    module: nn.Module | None = None
    """The module that has registered the parameter; None: a torch function has read it in shards."""


class _Construction:
    """Tracks the whole parameters while a model is built ([Note: what is whole while a model is built])."""

    def __init__(self, config: OffloadConfig, group: Any) -> None:
        self.config = config
        self.whole: list[_Whole] = []
        self.note: Callable[[torch.Tensor, bool], None] = lambda param, cut: None
        """Called for each parameter that a module registers or copies, with True if the parameter will be cut."""
        self._advance: Callable[[int], object] = lambda n_bytes: None
        """Called with the bytes of each parameter that a module registers."""
        self._group = group
        self._devices: dict[torch.device, HostRanks] = {}
        self._freed = 0
        """The bytes of parameters that were freed since the allocator was last asked to return memory to the system."""
        self._memory = HostMemory(config.threads)
        self._disk = None
        if config.offload_param == "nvme":
            assert config.nvme_path is not None
            check_folders(config.nvme_path)
            self._disk = DiskShards(config.nvme_path, self._memory)
        self._cuts = config.offload_param is not None or (group is not None and dist.get_world_size(group) > 1)

    def device(self, device: torch.device) -> HostRanks:
        """Return the core's device for parameters on this torch device. Making it is collective."""
        if device not in self._devices:
            self._devices[device] = device_for(device, self._group, self.config)
        return self._devices[device]

    def keep(self, cut: Cut, run: torch.Tensor) -> Shard:
        """Copy this rank's shards of ``run``, a whole one-dimensional parameter, to new memory or disk space.

        On the host this memory is a separate mapping, so that it does not fragment the heap.
        """
        if run.device.type == "cpu" or self.config.offload_param is not None:
            values = as_torch(self._memory.allocate(PARAMETER_SHARDS, cut.shard_numel, ELEMENT_TYPES[run.dtype].numpy))
        else:
            values = torch.zeros(cut.shard_numel, dtype=run.dtype, device=run.device)
        cut.cut(run, values)
        shard = MemoryShard(values)
        return shard if self._disk is None else on_disk(self._disk, cut, shard, MOVED_TYPES[run.dtype])

    @contextmanager
    def building(self) -> "Iterator[_Construction]":
        """The context of ``init()``."""
        outer = _active()
        if outer is not None:
            if (outer.config, outer._group) != (self.config, self._group):
                raise StateError("init() inside init(), of another configuration or process group; expected the same")
            yield outer
            return
        handle = register_module_parameter_registration_hook(self._registered)
        _THREAD.construction = self
        try:
            rank = 0 if self._group is None else dist.get_rank(self._group)
            with progress("building the model", None, rank=rank) as self._advance, _copies_registered(), _Reads(self):
                yield self
            with grad_mode_kept(), torch.no_grad(), no_torch_function():
                self.cut(self.whole, for_good=True)
                for device in self._devices.values():
                    self.agree("end", device)
            give_back_freed()
        finally:
            _THREAD.construction = None
            handle.remove()
            self.whole = []

    def _registered(self, module: nn.Module, name: str, param: torch.Tensor | None) -> None:
        if _active() is self and param is not None:
            self.track(module, name, param)

    def track(self, module: nn.Module, name: str, param: torch.Tensor) -> None:
        """Record a parameter that a module has, to cut it later."""
        with grad_mode_kept(), torch.no_grad(), no_torch_function():
            self.note(param, takes := self._takes(param))
            self._advance(param.nbytes)
            if not takes or in_shards(param) or any(entry.param is param for entry in self.whole):
                return
            self.cut([entry for entry in self.whole if entry.module is not module])
            self.whole.append(_Whole(param, f"{type(module).__name__}.{name}", module))

    def _takes(self, param: torch.Tensor) -> bool:
        fits = type(param) is nn.Parameter and is_offloadable(param)
        return self._cuts and fits and param.numel() >= max(self.config.param_persistence_threshold, 1)

    def make_whole(self, params: Sequence[torch.Tensor]) -> None:
        """Gather the parameters among ``params`` that are in shards. First cut all other parameters that are whole."""
        with grad_mode_kept(), torch.no_grad(), no_torch_function():
            self.cut([entry for entry in self.whole if all(entry.param is not param for param in params)])
            for param in params:
                shards = shards_of(param)
                if shards is not None and not shards.holds:
                    shards.gather(param)
                    hand_over(param)
                    self.whole.append(_Whole(param, shards.spec.name))

    def cut(self, entries: Sequence[_Whole], *, for_good: bool = False) -> None:
        """Cut these parameters. Skip a parameter if on any rank another tensor refers to its memory.

        Args:
            for_good: True: skip none.
        """
        entries = [entry for entry in entries if self._takes(entry.param)]
        if not entries:
            return
        device = self.device(entries[0].param.device)
        self.agree(f"cut {[(entry.name, *entry.param.shape) for entry in entries]}", device)
        referred = [_refers_to_memory_of(entry.param) for entry in entries]
        known = combine(device.collectives, "parameters in use", sums=referred)
        for entry, n in zip(entries, known.sums.tolist(), strict=True):
            if for_good or not n:
                InitShards(entry.param, entry.name, self).release(entry.param)
                self.whole.remove(entry)
                self._freed += entry.param.nbytes if entry.param.device.type == "cpu" else 0
        if self._freed > _KEPT:
            give_back_freed()
            self._freed = 0

    def agree(self, act: str, device: HostRanks) -> None:
        """Raise :class:`StateError` on all ranks unless ``act``, a description of the next action, is equal on all
        ranks."""
        if not combine(device.collectives, "what init() does next", same=[fingerprint(act)]).alike.all():
            raise StateError(
                f"ranks differ in what they do while a model is built by init(); here: {act}; expected all to run the "
                "same code: what one rank alone changes goes into gathered_parameters(..., modifier_rank=...)"
            )

    def spread(self, params: Sequence[torch.Tensor], source: int) -> None:
        """Copy the values of these whole parameters from rank ``source`` to all ranks."""
        for param in params:
            before = shards_of(param)
            if before is None:
                self.device(param.device).start_alike([spec_of("", param, 0)], [flat(param)], source)
            else:
                manage(param).shards = shards = InitShards(param, before.spec.name, before.made_by, source)
                shards.holds = before.holds

    # --- modules that exist --------------------------------------------------------------------------

    def take(self, module: nn.Module, init_fn: Callable[[nn.Module], Any] | None) -> None:
        """Cut the parameters of a module. Parameters on the meta device first get memory and values."""
        device = torch.get_default_device()
        for name, part in module.named_modules():
            if _on_meta(part) and device.type == "meta":
                raise ParameterError(
                    "init(module) where meta is torch's default device; expected one that holds values"
                )
            if init_fn is None and _on_meta(part) and _reset_of(part) is None:
                words = f"{type(part).__name__} {name!r}".removesuffix(" ''")
                raise ParameterError(
                    f"{words} has {', '.join(_on_meta(part))} on the meta device and no reset_parameters(); expected "
                    "init(model, init_fn=...), with a function of a module that gives them their values"
                )

        def make(part: nn.Module) -> None:
            made = _on_meta(part)
            for name, tensor in made.items():
                become(tensor, torch.empty_like(tensor, device=device))
                if name in part._parameters:
                    self.track(part, name, tensor)
            reset = _reset_of(part) if init_fn is None else partial(init_fn, part)
            if made and reset is not None:
                with grad_mode_kept(), torch.no_grad():
                    reset()

        module.apply(make)
        for part in module.modules():
            for name, param in part.named_parameters(recurse=False):
                self.track(part, name, param)


class _Reads(TorchFunctionMode):
    """Gathers parameters in shards before a torch function reads them."""

    def __init__(self, construction: _Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in METADATA:
            params = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, nn.Parameter)]
            if any(map(in_shards, params)):
                self._construction.make_whole(params)
        return func(*args, **(kwargs or {}))


def _on_meta(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own parameters and buffers that are on the meta device, by name."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None and tensor.is_meta}


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    return next((reset for name in _RESETS if callable(reset := getattr(module, name, None))), None)


def become(tensor: torch.Tensor, made: torch.Tensor) -> None:
    """Give ``tensor`` the memory of ``made``, on any device. It stays the same object, so tied weights stay tied."""
    with grad_mode_kept(), torch.no_grad(), no_torch_function():
        if isinstance(tensor, nn.Parameter):
            made = torch.Tensor._make_subclass(type(tensor), made, tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, made)


def _refers_to_memory_of(param: torch.Tensor) -> bool:
    """Return True if another tensor refers to the parameter's memory."""
    return storage_users(param) > _LONE


class _ThreadState(threading.local):
    construction: _Construction | None = None


_THREAD = _ThreadState()


def _active() -> _Construction | None:
    """Return the ``init()`` that runs in this thread; None: no ``init()`` does."""
    return _THREAD.construction


_COPIES = threading.Lock()
_building = 0
"""The number of ``init()`` contexts that are open in all threads. While it is not 0, ``nn.Module.__setstate__`` is
replaced."""
_set_state = nn.Module.__setstate__


def _set_state_and_register(module: nn.Module, state: Any) -> None:
    _set_state(module, state)
    active = _active()
    if active is not None:
        for name, param in module._parameters.items():
            if param is not None:
                active.track(module, name, param)


@contextmanager
def _copies_registered() -> Iterator[None]:
    """Track the parameters of copied and unpickled modules: no constructor runs, but ``__setstate__`` does."""
    global _building
    with _COPIES:
        _building += 1
        nn.Module.__setstate__ = _set_state_and_register  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _COPIES:
            _building -= 1
            if not _building:
                nn.Module.__setstate__ = _set_state  # type: ignore[method-assign]
