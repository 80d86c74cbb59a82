"""The partitioned parameters of a model (stage 3), and this rank's shards.

[Note: storages of partitioned parameters] A partitioned parameter keeps its identity, shape and element type; while it
is released its storage has no bytes. Gathering resizes the storage and fills it through another tensor. Tensors that
autograd saved in forward share this storage, so they have their values again in backward, and no version counter moves.
"""

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import nn

from offload_core.config.options import OffloadConfig
from offload_core.device.protocols import GatheringDevice
from offload_core.disk.shards import OnDisk, ShardsInMemory
from offload_core.engine import Engine
from offload_core.errors import ParameterError
from offload_core.layout.partition import ParamSpec
from offload_core.layout.regions import InMemory
from offload_core.memory.plan import PlanRow
from offload_core.ranks.consistency import check_start
from offload_core.rules import Matrix
from offload_core.stage3.live_params import LiveParams, PartitionedParam

from ..internals.private import grad_mode_kept, no_read, storage_of
from ..params.casting import Casts
from ..params.data_writes import DataWrites, set_data
from ..params.local_elements import LocalElements
from ..params.managed import ManagedTensor, Wait, manage, managed
from ..params.pending import can_wait
from ..params.tensors import TORCH_DTYPES, elements_of, is_offloadable, memory_of_all, shaped
from ..params.values import Values, packed_values
from .construction import hand_over, in_shards, shards_of
from .cut import Cut
from .shards import MemoryShard, Shard, tier_for

_EXTERNAL = "_offload_external_parameters"
"""The attribute of a module that lists the parameters of other modules that its forward uses."""


class PartitionedParameter(Cut):
    """A parameter of the model, this rank's shards, and the storage ([Note: storages of partitioned parameters])."""

    def __init__(
        self,
        live: LiveParams,
        spec: ParamSpec,
        param: torch.Tensor,
        values: Values,
        module: str,
        config: OffloadConfig,
    ) -> None:
        super().__init__(spec, live.device.ranks, live.device.world_size, config)
        self.param = param
        self.values = values
        self.module = module
        """The type and name of the parameter's module, for errors."""
        self.shard: Shard = MemoryShard(torch.empty(0))
        """This rank's shards, concatenated. Updates, ``gathered_parameters`` and loads of checkpoints write to them."""
        self.whole = torch.empty(0)
        """The whole parameter, one-dimensional, and its last bucket's padding."""
        self.storage = storage_of(self.whole)
        """The id of the storage of ``whole``, as ``storage_of`` returns it."""
        self.index: int | None = None
        """The parameter's index in the core; None while it is not trained."""
        self.data_writes = DataWrites(param)
        self.spread = -1
        """The parameter's version after ``gathered_parameters`` last gave all ranks one rank's values."""
        self.lasts = False
        """True if other tensors may refer to the storage. Then :meth:`free` leaves the storage to these tensors, and
        gives the parameter a new one."""
        self.of_model = live
        """The ``LiveParams`` of the parameter's model."""
        self.managed: list[ManagedTensor] = []
        """The ``ManagedTensor`` of the parameter, and of each tensor with its values. Their ``record`` is this
        object."""
        self.live: PartitionedParam = live.add(spec, self.buckets, ShardsInMemory(None), self)

    def empty(self) -> None:
        """Give the parameter a new storage without bytes. Tensors that refer to the old storage keep it."""
        with torch.inference_mode(False), no_read():
            self.whole = torch.empty(self.padded_numel, dtype=TORCH_DTYPES[self.spec.dtype], device=self.param.device)
            self.values.point(self.whole[: self.spec.numel])
        self.storage = storage_of(self.whole)
        self.whole.untyped_storage().resize_(0)
        self.lasts = False

    @property
    def fits(self) -> bool:
        """True if the whole parameter has the shape, memory order and type of its shards."""
        return elements_of(self.param) == self.spec.elements and self.param.dtype == self.whole.dtype

    def restore(self) -> None:
        """Make the parameter refer to ``whole`` again, in its original shape and type."""
        with grad_mode_kept(), torch.no_grad():
            set_data(self.param, shaped(self.whole[: self.spec.numel], cast(InMemory, self.spec.elements)))

    def allocate(self) -> torch.Tensor:
        self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())
        return self.whole

    def free(self) -> None:
        if self.lasts:
            self.empty()
        else:
            self.whole.untyped_storage().resize_(0)


class ElementsInShards(LocalElements):
    """This rank's shards of a trained parameter. A read gathers the parameter, and the gathering waits for the update
    of the shards. Besides updates, only ``gathered_parameters`` and loads change the shards.

    This object has only a weak reference to the ``PartitionedParameter``, which refers to the core: a parameter must
    not keep the core alive.
    """

    def __init__(self, record: PartitionedParameter) -> None:
        self.param = record.param
        self._record = weakref.ref(record)

    @property
    def _shard(self) -> Shard:
        record = self._record()
        assert record is not None
        return record.shard

    def memory(self) -> torch.Tensor | OnDisk:
        return self._shard.values

    def copy(self) -> torch.Tensor:
        return self._shard.read(0, self._shard.numel).clone()

    @property
    def readers_can_wait(self) -> bool:
        return can_wait(self.param)

    def have_readers_wait(self, wait: Wait) -> None:
        pass

    def stay(self, leaving: Collection[int]) -> None:
        pass

    def unregister(self) -> None:
        pass

    def was_written(self, changed: bool, used: Collection[DataWrites]) -> bool:
        return False

    def forget_writes(self) -> None:
        pass


class PartitionedParameters:
    """The partitioned parameters of a model.

    Args:
        device: the device of whole parameters.
        world: the device and ranks over which shards are gathered.
        core: updates the trained parameters.
        casts: the element types of the parameters after casting.
        matrices: the matrices of frozen parameters, which must not be cut, so that the parameters can be trained later.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        world: GatheringDevice,
        core: Engine,
        casts: Casts,
        matrices: Mapping[torch.Tensor, Matrix],
    ) -> None:
        self._config = config = core.config
        self._states, self._trained = core.states, core.parameters
        self._casts = casts
        self._device = device
        self._world = world
        self.live = core.live_params(world)
        """Tracks which parameters are whole."""
        self.records: dict[torch.Tensor, PartitionedParameter] = {}
        """Maps a parameter to its record. Module hooks use :meth:`among`, because hashing a tensor in shards calls code
        of the tensor's class."""
        self._owners: dict[torch.Tensor, tuple[str, str]] = {}
        """Maps each parameter of the model to its name, and the type and name of its module."""
        self._matrices = matrices
        self._tier = tier_for(config, device, core.memory)
        self.packed = packed_values(model)
        """Maps each frozen quantised parameter to its values."""
        for name, module in model.named_modules():
            for own, param in module.named_parameters(recurse=False):
                words = f"{type(module).__name__} {name!r}" if name else type(module).__name__
                self._owners.setdefault(param, (f"{name}.{own}" if name else own, words))

    def __contains__(self, param: torch.Tensor) -> bool:
        return self._has(managed(param).record)

    @property
    def of_model(self) -> list[torch.Tensor]:
        """All parameters of the model, partitioned or not, and the tensors that hold values of quantised ones."""
        beside = [tensor for values in self.packed.values() for tensor in values.tensors]
        return [*self._owners, *beside]

    def name_of(self, param: torch.Tensor) -> str:
        """Return the parameter's name in the model."""
        return self._owners[param][0]

    def among(self, params: Iterable[torch.Tensor | None]) -> list[PartitionedParameter]:
        """Return the records of the parameters in ``params`` that are partitioned, each record once."""
        found = (managed(param).record for param in params if param is not None)
        return list(dict.fromkeys(filter(self._has, found)))

    def _has(self, record: PartitionedParameter | None) -> bool:
        """True if ``record`` is a record of this model, not None and not another model's."""
        return record is not None and record.of_model is self.live

    def used_by(self, *modules: nn.Module) -> list[PartitionedParameter]:
        """Return the records of the parameters that these modules have or are registered to use, each once."""
        return self.among(p for m in modules for p in (*m._parameters.values(), *externals_of(m)))

    def record_of(self, param: torch.Tensor) -> PartitionedParameter | None:
        """Return the parameter's record; None if it is not partitioned."""
        return self.records.get(param)

    # --- cutting parameters --------------------------------------------------------------------------

    def takes(self, param: torch.Tensor) -> bool:
        """Return True if the parameter is partitioned, or will be."""
        if param in self.records or (param in self._owners and in_shards(param)):
            return True
        whole = param in self._owners and type(param) is nn.Parameter and is_offloadable(param)
        return (whole or param in self.packed) and param.numel() >= max(self._config.param_persistence_threshold, 1)

    def frozen(self, trained: Collection[torch.Tensor]) -> list[tuple[ParamSpec, torch.Tensor]]:
        """Return the specs and tensors of parameters that are not in ``trained`` and that are, or will be,
        partitioned."""
        trains = {*trained}
        owned = [
            (name, param) for param, (name, _) in self._owners.items() if param not in trains and self.takes(param)
        ]
        specs = [self._values(param).spec(name, self._casts.of_param(param)) for name, param in owned]
        return [
            (replace(spec, matrix=None if param in self.packed else self._matrices.get(param)), param)
            for spec, (_, param) in zip(specs, owned, strict=True)
        ]

    def check_cut(self, spec: ParamSpec, param: torch.Tensor) -> None:
        """Raise :class:`ParameterError` if a parameter's shards cut matrices that its update needs whole."""
        record = self.records.get(param)
        if record is None or record.spec.matrix == spec.matrix:
            return
        if not record.alike(Cut(spec, self._world.ranks, self._world.world_size, self._config)):
            raise ParameterError(
                f"parameter {spec.name!r} was cut into shards for another optimizer than its group has now: frozen "
                "matrices of more elements than reduce_bucket_size are cut for that of their group at wrap(). Expected "
                "them in a group of the same optimizer there (frozen ones may be in it), or reduce_bucket_size of at "
                f"least {param.numel():,}"
            )

    def _values(self, param: torch.Tensor) -> Values:
        return self.packed.get(param) or Values(param)

    def plan_cut(self, *entries: Sequence[tuple[ParamSpec, torch.Tensor]]) -> PlanRow:
        """Plan the bytes that :meth:`cut` takes until :meth:`keep_shard`, in addition to the whole parameters.

        Args:
            entries: the arguments of several calls of :meth:`cut`, one after the other.
        """
        n_bytes = max(sum(self._given_bytes(spec, param) for spec, param in each) for each in entries)
        return PlanRow("shards as they were given", self._tier.where, n_bytes, "init()", passing=True)

    def _given_bytes(self, spec: ParamSpec, param: torch.Tensor) -> int:
        if not spec.partitioned or param in self.records or in_shards(param):
            return 0
        cut = Cut(spec, self._world.ranks, self._world.world_size, self._config)
        return cut.shard_numel * param.element_size()

    def cut(self, entries: Sequence[tuple[ParamSpec, torch.Tensor]]) -> dict[torch.Tensor, PartitionedParameter]:
        """Cut the partitioned parameters among ``entries``. Return their records, with this rank's shards.

        A new parameter keeps its element type until :meth:`keep_shard`. If it was whole, it stays whole until then,
        with rank 0's values. All ranks must call this together with the same entries, even if no parameter is new.
        After the first check an error may come on only one rank. The other ranks then wait until its process ends, or
        for the group's timeout.
        """
        found = {param: self.records.get(param) for spec, param in entries if spec.partitioned}
        new = [(spec, param) for spec, param in entries if spec.partitioned and found[param] is None]
        given = [f"{param.dtype}{' in shards' * in_shards(param)}" for _, param in new]
        check_start(self._world.collectives, self._config, [spec for spec, _ in new], given)
        if not new:
            return {param: record for param, record in found.items() if record is not None}
        shard_of = self._tier.given()
        with grad_mode_kept(), torch.no_grad():
            for spec, param in new:
                words, built = self._owners[param][1], shards_of(param)
                values = self._values(param)
                record = PartitionedParameter(self.live, spec, param, values, words, self._config)
                if built is not None:
                    record.shard = built.for_engine(record, param.device).near(self.shards_device)
                else:
                    run = values.run()
                    self._world.start_alike([spec], [run])
                    part = torch.zeros(record.shard_numel, dtype=run.dtype, device=self.shards_device)
                    record.cut(run, part)
                    record.shard = shard_of(record, part)
                found[param] = record
        return {param: record for param, record in found.items() if record is not None}

    @property
    def shards_device(self) -> torch.device:
        """The device whose memory has the shards. Shards on disk are in this memory before they are written."""
        return self._tier.device

    def keep_shard(self, record: PartitionedParameter) -> None:
        """Cast the record's shard to its final element type, move it to its final memory or disk space, and release the
        whole parameter."""
        # If master weights hold the shard, they already have its values.
        self._place(record, self._in_states(record) or self._tier.keep(record, record.shard))
        hand_over(record.param)
        gradient, record.param.grad = record.param.grad, None
        record.empty()
        record.param.grad = None if gradient is None else gradient.to(record.whole.dtype)
        record.managed = [*map(manage, dict.fromkeys((record.param, *record.values.tensors)))]
        for each in record.managed:
            each.record = record
        self.records[record.param] = record

    def join_master(self, record: PartitionedParameter) -> None:
        """Handle that a frozen parameter is now trained: if its master weights contain its shard, use their memory."""
        if (shard := self._in_states(record)) is not None:
            self.live.device.synchronize()  # copies from the old memory may be in flight
            self._place(record, shard)

    def _in_states(self, record: PartitionedParameter) -> Shard | None:
        """Return the shards of a trained parameter that its master weights contain; None: they contain none, or the
        parameter is not trained."""
        if record.index is None:
            return None
        return self._tier.in_states(self._states, record.index, record.spec.dtype)

    def _place(self, record: PartitionedParameter, shard: Shard) -> None:
        record.shard = shard
        on_host = self.shards_device.type == "cpu"
        record.live.shards = shard.source(self._world.host_array if on_host else _itself)

    def train(self, record: PartitionedParameter, index: int) -> None:
        """Connect the record with ``index``, the parameter's index in the core."""
        record.index = index
        record.live.updated = partial(self._trained.update_of, index)

    @property
    def shard_bytes(self) -> int:
        """The bytes that shards take on the device."""
        if self._config.offload_param is not None:
            return 0
        return memory_of_all(values for record in self.records.values() for values in record.shard.on(self._device))

    @property
    def disk_bytes(self) -> int:
        """The bytes of disk that shards take, without shards that are master weights."""
        return self._tier.disk_bytes

    def close(self) -> None:
        """Remove all parameters, and free their shards' disk space."""
        for record in self.records.values():
            for each in record.managed:
                each.record = None
        self.records.clear()
        self._tier.close()


def _itself(values: torch.Tensor) -> torch.Tensor:
    return values


def note_external(module: nn.Module, param: torch.Tensor) -> None:
    """Register that the module's forward uses a parameter of another module."""
    if all(param is not known for known in externals_of(module)):
        module.__dict__.setdefault(_EXTERNAL, []).append(param)


def externals_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters of other modules that were registered as used by the module's forward."""
    return module.__dict__.get(_EXTERNAL, [])
