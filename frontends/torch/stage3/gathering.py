"""Gathers partitioned parameters (stage 3) by hand: ``with gathered_parameters(...)``."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version, saved_tensors_hooks

from offload_core.device.protocols import GatheringDevice
from offload_core.engine import Engine
from offload_core.errors import ParameterError, StateError
from offload_core.layout.partition import ParamSpec
from offload_core.support.blocks import OpenBlocks
from offload_core.support.checks import kind_of
from offload_core.support.hints import hinted

from ..internals.private import grad_mode_kept, next_node
from ..params.data_writes import set_data
from ..params.managed import manage, managed
from ..params.tensors import flat, shaped_like, spec_of
from .construction import gathered_shards, in_shards, unexpected_change
from .parameters import PartitionedParameter, PartitionedParameters, note_external
from .runs import ModuleRuns


class Gathering:
    """Gathers the parameters of one model by hand, and sends the values that one rank wrote to all ranks.

    Args:
        world: the device and ranks over which these values are sent.
    """

    def __init__(
        self, parameters: PartitionedParameters, runs: ModuleRuns, world: GatheringDevice, core: Engine
    ) -> None:
        self._parameters = parameters
        self.runs = runs
        self._world = world
        self._state_lock, self._states = core.state_lock, core.states
        self._open = OpenBlocks()
        """The open blocks of ``gathered_parameters`` and ``generating``."""
        self._managed = [*map(manage, parameters.of_model)]
        for each in self._managed:
            each.gathering = self

    def close(self) -> None:
        """Remove this object from the partitioned parameters."""
        for param in self._parameters.records:
            managed(param).gathering = None

    def knows(self, param: torch.Tensor) -> bool:
        """Return True if the parameter is partitioned."""
        return param in self._parameters

    @property
    def is_open(self) -> bool:
        """True inside ``gathered_parameters`` or ``generating``."""
        return bool(self._open)

    def check_closed(self, what: str = "an update") -> None:
        """Raise :class:`StateError` inside ``gathered_parameters`` or ``generating``."""
        if self._open:
            raise StateError(
                f"{what} inside gathered_parameters() or generating(); expected it after: what is written there is in "
                "no shard yet"
            )

    @contextmanager
    def gathered(self, params: Sequence[torch.Tensor], modifier_rank: int | None) -> Iterator[None]:
        """Make parameters of this model whole, as :func:`gathered_parameters` says."""
        if modifier_rank is not None and modifier_rank not in range(self._world.world_size):
            raise ParameterError(
                f"gathered_parameters: modifier_rank={modifier_rank!r}, expected None or one of the ranks 0 to "
                f"{self._world.world_size - 1}"
            )
        records = self._parameters.among(params)
        self.runs.whole.acquire(records)
        used = [self.runs.use(record) for record in records]
        # Outside a forward nothing gathers a parameter again for backward, so hooks have graphs save the memory itself.
        # torch.func refuses such hooks. So no hooks are used under no_grad, and a graph made there keeps parameters.
        saves = not all(used) and torch.is_grad_enabled()
        graphs = saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach) if saves else nullcontext()
        node = next_node()
        block, versions = self._open.block(), _versions(records)
        try:
            with block, graphs:
                yield
            self._refuse_resized(records)
            changed = _changed(versions)
            fixed = next((record.spec.name for record in changed if record.values.fixed), None)
            if fixed is not None:
                raise StateError(
                    f"parameter {fixed!r} is quantised, and was changed inside gathered_parameters(); expected "
                    "engine.close() before quantised parameters are changed or replaced"
                )
            if modifier_rank is not None:
                self._spread(params, modifier_rank)
            elif changed:
                raise unexpected_change(changed[0].spec.name)
            if not (saves or all(used)) and node != next_node():
                self.runs.whole.keep(records, for_graph=True)
        except RuntimeError as error:
            if saves and "saved tensor hooks" in str(error):
                raise StateError(
                    "torch.func inside gathered_parameters(), whose graphs save parameters by hooks that torch.func "
                    "refuses; expected torch.no_grad() around gathered_parameters(): torch.func differentiates there, "
                    "too"
                ) from error
            raise
        finally:
            for record in records:
                record.lasts = True  # state_dict() and other code may refer to the storage
            self.runs.whole.release(records, may_stay=False)  # an unexpected change must not stay

    @contextmanager
    def gathered_when_read(self) -> Iterator[None]:
        """A context in which a read outside forward and backward gathers its parameter, until the context ends.

        All ranks must read the same parameters in the same order. With one rank, changes of these parameters are kept.
        With several ranks, a change is an error.
        """
        source = 0 if self._world.world_size == 1 else None
        with ExitStack() as gathered:

            def gather(param: torch.Tensor) -> None:
                # Hooks on saved tensors here would not nest with the reader's hooks.
                with grad_mode_kept(), torch.no_grad():
                    gathered.enter_context(self.gathered([param], source))

            before, self.runs.gather_read = self.runs.gather_read, gather
            try:
                yield
            finally:
                self.runs.gather_read = before

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A context in which all parameters are whole.

        Raises:
            StateError: a parameter was changed inside; the change is lost.
        """
        records = list(self._parameters.records.values())
        self.runs.whole.acquire(records)
        versions = _versions(records)
        self._parameters.live.begin_untracked()
        try:
            with self._open.block():
                yield
            if changed := _changed(versions):
                raise unexpected_change(changed[0].spec.name, "generating()")
        finally:
            self._parameters.live.end_untracked()
            self.runs.whole.release(records, may_stay=False)

    def _refuse_resized(self, records: Sequence[PartitionedParameter]) -> None:
        """If code has changed the size or type of parameters, restore these parameters and raise
        :class:`ParameterError`."""
        resized = [record for record in records if not record.values.fixed and not record.fits]
        if not resized:
            return
        got = resized[0].param
        was = f"{tuple(got.shape)} {got.dtype}"
        for record in resized:
            record.restore()
        raise ParameterError(
            f"parameter {resized[0].spec.name!r} became {was} inside gathered_parameters(), and is "
            f"{tuple(got.shape)} {got.dtype} in shards; expected no other size or type: resize or cast the model "
            "before wrap(), or after engine.close(), and wrap it anew. What was written to it is lost"
        )

    def _spread(self, params: Sequence[torch.Tensor], source: int) -> None:
        """Copy the values of these parameters from rank ``source`` to all ranks and to their shards."""
        for param in params:
            record = self._parameters.record_of(param)
            name = self._parameters.name_of(param)
            with grad_mode_kept(), torch.no_grad():
                if record is not None and record.values.fixed:
                    continue
                if record is None:
                    self._send(spec_of(name, param, 0), flat(param), source)
                    continue
                target = shaped_like(record.whole[: record.spec.numel], param)
                if param.data_ptr() != target.data_ptr():  # p.data = ...
                    target.copy_(param)
                    set_data(param, target)
                self._send(record.spec, record.whole[: record.spec.numel], source)
                values = torch.zeros(
                    record.shard_numel, dtype=record.whole.dtype, device=self._parameters.shards_device
                )
                record.cut(flat(param), values)
                increment_version(param)
                record.spread = param._version
                if record.index is not None:
                    self._state_lock.change("gathered_parameters()", self._states.adopt, record.index, values)
                record.shard.write(values)

    def _send(self, spec: ParamSpec, values: torch.Tensor, source: int) -> None:
        self._parameters.live.in_order(lambda: self._world.start_alike([spec], [values], source))


def _versions(records: Sequence[PartitionedParameter]) -> dict[PartitionedParameter, int]:
    """Return the versions of whole parameters, for :func:`_changed`."""
    for record in records:
        record.data_writes.seen()
        record.data_writes.forget()
    return {record: record.param._version for record in records}


def _changed(versions: Mapping[PartitionedParameter, int]) -> list[PartitionedParameter]:
    """Return the parameters that were changed since ``versions``, except by :meth:`Gathering._spread`."""
    return [
        record
        for record, before in versions.items()
        if record.data_writes.seen() or record.param._version not in (before, record.spread)
    ]


@hinted(
    fwd_module="register_external_parameter(module, param) before it",
    enabled="contextlib.nullcontext() in its place where parameters are whole",
)
def gathered_parameters(params: torch.Tensor | Iterable[torch.Tensor], modifier_rank: int | None = None) -> Any:
    """A context in which partitioned parameters (stage 3) are whole: ``with gathered_parameters(layer.weight): ...``

    All ranks must enter it together, with the same parameters in the same order. Tensors taken from a parameter inside
    (``state_dict()``, views) stay valid after the context.

    Args:
        params: a parameter or several. Parameters that are not partitioned are ignored.
        modifier_rank: the rank that changes the parameters. At the end, the parameters and master weights of all ranks
            take this rank's values. None: no rank changes the parameters.

    Raises:
        StateError: a parameter was changed and no ``modifier_rank`` is given; the change is lost.
    """
    return _gathered([params] if isinstance(params, torch.Tensor) else list(params), modifier_rank)


@contextmanager
def _gathered(params: Sequence[torch.Tensor], modifier_rank: int | None) -> Iterator[None]:
    for param in params:
        if not isinstance(param, torch.Tensor):
            raise ParameterError(f"gathered_parameters: got {kind_of(param)}, expected parameters")
    gathering = next((g for g in map(_gathering_of, params) if g is not None), None)
    if gathering is None:
        with gathered_shards(params, modifier_rank):
            yield
        return
    mine = [param for param in params if _gathering_of(param) is gathering]
    others = [param for param in params if _gathering_of(param) is not gathering]
    with _gathered(others, modifier_rank), gathering.gathered(mine, modifier_rank):
        yield


def _gathering_of(param: torch.Tensor) -> Gathering | None:
    return None if in_shards(param) else managed(param).gathering


def register_external_parameter(module: nn.Module, param: torch.Tensor) -> None:
    """Declare, before ``wrap`` or after, that a module's forward uses a parameter of another module.

    In stage 3 the parameter is then whole while the module runs. Without a declaration most such uses are found
    automatically, but the module's first run gathers the parameter separately.

    Raises:
        ParameterError: ``module`` is not a module, or ``param`` not a parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(param, nn.Parameter):
        raise ParameterError(
            f"register_external_parameter: got {type(module).__name__} and {type(param).__name__}, expected a module "
            "and a parameter"
        )
    note_external(module, param)
    gathering: Gathering | None = managed(param).gathering
    if gathering is not None and gathering.knows(param):
        gathering.runs.hook(module)
