"""The parameters that have optimizer states: checks, casting, and their tensors in the core."""

import gc
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import ge, is_
from typing import Any

import torch
from torch import nn

from offload_core.disk.shards import OnDisk
from offload_core.dtypes import ElementType
from offload_core.engine import Engine, Parameters, StateLock
from offload_core.errors import ParameterError, StateError
from offload_core.layout.partition import ParamSpec
from offload_core.memory.plan import DEVICE, GRADIENTS, PARAMETERS, MemoryPlan
from offload_core.memory.report import MemoryReport
from offload_core.ranks.consistency import combine, heard_by_all
from offload_core.rules import Matrix, Rule
from offload_core.support.threads import clear_up

from ..internals.private import no_read
from ..params.aliasing import check_disjoint, tensors_of
from ..params.casting import Casts
from ..params.data_writes import DataWrites
from ..params.dtensor import UNDIVIDED, Placement, check_within, count_once, local_of, placement_of, placements_of
from ..params.local_elements import ElementsInPlace, LocalElements
from ..params.managed import Wait, manage
from ..params.param_table import ParamTable
from ..params.pending import await_all, have_been_written, is_pending
from ..params.slots import OwningOptimizer, Slot, owner_of, slot_of
from ..params.tensors import (
    ELEMENT_TYPES,
    TORCH_DTYPES,
    TakenGradient,
    cast_param,
    check_param,
    flat,
    is_offloadable,
    memory_of_all,
    memory_order,
    spec_of,
)
from ..stage3.construction import shards_of
from ..stage3.parameters import ElementsInShards
from ..stage3.sharding import Sharding


def check_is_free(model: nn.Module, *, but: Any = None) -> None:
    """Raise an error if a model cannot be wrapped, because another optimizer still uses its parameters or they have no
    values.

    Args:
        but: an optimizer that may have states of the model's parameters.

    Raises:
        ParameterError: a parameter has no values.
        StateError: an open optimizer has states of a parameter.
    """
    for name, param in model.named_parameters():
        if param.is_meta:
            check_param(name, param)
        if owner_of(param) not in (None, but):
            gc.collect()  # an engine that is in a cycle of references
        if (owner := owner_of(param)) not in (None, but):
            raise StateError(
                f"parameter {name!r} belongs to another engine or optimizer ({type(owner).__name__}), which goes on; "
                "expected one engine for a model: close() or destroy() the other one first"
            )


_NOWHERE = torch.empty(0, device="cpu")

NamedParam = tuple[str, torch.Tensor, int]
"""A parameter's name, the parameter, and the index of its group."""


@dataclass(frozen=True, eq=False)
class _New:
    """A parameter that is about to get states."""

    name: str
    param: torch.Tensor
    group: int
    target: ElementType | None
    """The element type that the parameter is cast to; None: the parameter keeps its type."""
    placed: Placement
    counted: bool = True
    """False: another process counts the parameter's elements in the norm, and saves them."""

    @property
    def values(self) -> torch.Tensor:
        """The tensor that holds this process's values: the parameter, or a DTensor's local tensor."""
        return local_of(self.param)


@dataclass(frozen=True)
class Grouping:
    """A snapshot of an optimizer's groups, and of the parameters that have states."""

    members: list[list[torch.Tensor]]
    """The parameters of each group."""
    groups: list[int]
    """The index of each parameter's group, for the parameters with states in the core's order; 0 for parameters in
    ``left_out``."""
    rules: frozenset[tuple[int, Rule]]
    """Pairs of a group's index and the update rule with which parameters of the group were registered. A group has
    several pairs only if parameters were moved between groups."""
    left_out: frozenset[int]
    """The indices of parameters with states that are in no group."""
    without_states: list[torch.Tensor]
    """Parameters in a group that have no states."""

    def holds(self, groups: Sequence[Mapping[str, Any]], n_slots: int) -> bool:
        """True if these groups still have the same parameters, and ``n_slots`` parameters have states."""
        return (
            len(self.groups) == n_slots
            and [len(group["params"]) for group in groups] == [len(params) for params in self.members]
            and all(all(map(is_, group["params"], params)) for group, params in zip(groups, self.members, strict=True))
        )


class Registration:
    """The parameters that an optimizer has registered, in the core's order.

    This object lives as long as the core. Closing or deleting it releases the parameters for another optimizer.

    Args:
        owner: the optimizer, which is not kept alive.
        device: the device of all parameters.
        sharding: the model's parameters in shards.
        casts: the element types that parameters get.
        members: the ranks of torch's default group that may have elements of DTensor parameters.
        gradients_leave: True if gradients are taken during backward, so that the plan has no room for them.
    """

    def __init__(
        self,
        owner: OwningOptimizer,
        core: Engine,
        device: torch.device,
        sharding: Sharding,
        casts: Casts,
        *,
        members: Collection[int],
        gradients_leave: bool,
    ) -> None:
        self.slots: dict[torch.Tensor, Slot] = {}
        self.param_table = ParamTable(device)
        self._flat: list[torch.Tensor | OnDisk] = []
        """The memory of each parameter when :meth:`current_tensors` last asked for it."""
        self._replaced: set[int] = set()
        """The indices of parameters that have got other memory since then; their old memory is not kept alive."""
        self._used: set[DataWrites] = set()
        """The ``DataWrites`` of parameters whose ``data`` was used."""
        self._grouping = Grouping([], [], frozenset(), frozenset(), [])
        self._owner = weakref.ref(owner)
        self._core = core
        self._config, self._parameters, self._states = core.config, core.parameters, core.states
        self._wait: Wait = partial(_await, self.slots, core.state_lock, core.parameters)
        """The function that a read of a parameter calls while an update writes the parameter. It does not keep this
        object alive."""
        self.device = device
        """The device of all parameters."""
        self._sharding = sharding
        self._casts = casts
        self._members = members
        self._gradients_leave = gradients_leave
        weakref.finalize(self, clear_up, partial(unregister, self.slots)).atexit = False

    def close(self) -> None:
        """Release the parameters."""
        unregister(self.slots)

    def named(self, groups: Sequence[Mapping[str, Any]]) -> list[NamedParam]:
        """Return the parameters of these groups, with names from the groups or from the optimizer."""
        owner = self._owner()
        return named_in(groups, {} if owner is None else owner.names)

    # --- taking parameters on ------------------------------------------------------------------------

    def check_new(self, named: Iterable[NamedParam]) -> None:
        """Call the function :func:`check_new` for parameters that this optimizer is to register in addition."""
        check_new(named, self.device, self._owner(), self.slots)

    def grouping(self, groups: Sequence[Mapping[str, Any]]) -> Grouping:
        """Return the snapshot of these groups and of the parameters that have states. It is made anew only if one of
        the two has changed."""
        if not self._grouping.holds(groups, len(self.slots)):
            members = [list(group["params"]) for group in groups]
            group_of = {param: g for g, params in enumerate(members) for param in params}
            rules = [spec.rule for spec in self._core.params]
            self._grouping = Grouping(
                members,
                [group_of.get(param, 0) for param in self.slots],
                frozenset(
                    (group_of[param], rule)
                    for param, slot in self.slots.items()
                    if param in group_of and (rule := rules[slot.index])
                ),
                frozenset(slot.index for param, slot in self.slots.items() if param not in group_of),
                [param for param in group_of if param not in self.slots],
            )
        return self._grouping

    def unfrozen(self, groups: Sequence[Mapping[str, Any]], *, with_gradient: bool) -> list[NamedParam]:
        """Return the parameters of these groups that have no states and require a gradient.

        Args:
            with_gradient: True: return the ones that have a gradient instead.
        """
        unknown = self.grouping(groups).without_states
        new = {param for param in unknown if (param.grad is not None if with_gradient else param.requires_grad)}
        if not new:
            return []
        return [entry for entry in self.named(groups) if entry[1] in new]

    def register(
        self, named: Sequence[NamedParam], rules: Sequence[Rule], model: nn.Module | None = None
    ) -> list[Slot]:
        """Allocate states for these parameters, and cast the parameters. Earlier optimizers that have states of these
        parameters give way.

        Args:
            rules: the update rule of each group.
            model: the memory plan includes the model's other tensors; None: there is no model.
        """
        for name, param, _ in named:
            check_param(name, param)
        known = ((slot.name, slot.values) for slot in self.slots.values())
        others = ((name, local_of(tensor)) for name, tensor in tensors_of(model))
        check_disjoint([(name, local_of(param)) for name, param, _ in named], (*known, *others))
        core, sharding = self._core, self._sharding
        news, params = self._new(named), [param for _, param, _ in named]
        specs = sharding.describe([(self._spec(new, rules[new.group]), new.param) for new in news])
        frozen = [] if model is None else sharding.frozen(params)
        trained = [*zip(specs, params, strict=True)]
        make_plan = partial(self._plan, trained, frozen, self._others(trained, frozen, _tensors_of(model)))
        plan = make_plan()  # it may refuse the parameters, and no optimizer has given way yet
        self._take_over(named)
        with heard_by_all(core.collectives, "memory for states"):
            core.check_memory(plan, specs, make_plan)
        first = len(core.params)
        with sharding.cut(trained, first) as shards:
            tensors = [shards[new.param] if new.param in shards else flat(new.values) for new in news]
            core.add_parameters(specs, tensors, frozen=[spec for spec, _ in frozen])
        return [self._hold(new, spec, first + i) for i, (new, spec) in enumerate(zip(news, specs, strict=True))]

    def _new(self, named: Sequence[NamedParam]) -> list["_New"]:
        """Return these parameters with their placements. All processes agree which process counts each parameter's
        elements."""
        news = []
        for name, param, group in named:
            check_within(name, param, self._members)
            placed = placement_of(name, param, memory_order(local_of(param)))
            target = self._casts.of_param(param)
            if target not in (None, ELEMENT_TYPES[param.dtype]):
                placed.check_cast(name, param.dtype, target)
            news.append(_New(name, param, group, target, placed))
        device = self._core.device
        if device.world_size == 1 and device.collectives.world_size > 1:
            await_all(new.param for new in news)  # an earlier optimizer may still update them
            held = [(new.name, new.param, new.placed) for new in news]
            counted = count_once(self._core.collectives, held)
            news = [replace(new, counted=counts) for new, counts in zip(news, counted, strict=True)]
        return news

    def _spec(self, new: "_New", rule: Rule) -> ParamSpec:
        spec = spec_of(new.name, new.values, new.group, new.target, elements=new.placed.part)
        return replace(spec, rule=rule, matrix=_matrix(rule, new.name, new.param, new.placed), counted=new.counted)

    def _hold(self, new: "_New", spec: ParamSpec, index: int) -> Slot:
        """Make the slot of a parameter that the core has added, and cast the parameter."""
        local: LocalElements
        if (record := self._sharding.record_of(new.param)) is not None:
            local = ElementsInShards(record)
        else:
            if new.target is not None:
                cast_param(new.param, TORCH_DTYPES[new.target])
            drop = partial(_drop_memory, self._flat, self._replaced, index)
            local = ElementsInPlace(new.param, DataWrites(new.param, self._used, drop))
        taken, order = TakenGradient(new.values, new.name), memory_order(new.values)
        stand_in = new.placed.around(taken)
        known = manage(new.param)
        slot = Slot(new.name, new.param, index, taken, stand_in, order, self._owner, local, new.placed, known)
        self._flat.append(local.memory())
        self.param_table.add(new.param, slot.stand_in, new.placed)
        self.slots[new.param] = slot
        known.slot = slot
        return slot

    def _take_over(self, named: Sequence[NamedParam]) -> None:
        """Have the earlier optimizers that have states of these parameters give way.

        Raises:
            StateError: earlier optimizers have states of these parameters on only some ranks; or one does not give way.
        """
        earlier = earlier_owners(named, self._owner(), self.slots)
        device = self._core.device
        if device.collectives.world_size > 1:
            what = "who takes over from an earlier optimizer"
            known = combine(self._core.collectives, what, same=[bool(earlier)])
            if not known.alike.all():
                got = "belong to an earlier OffloadedAdamW" if earlier else "are nobody's"
                raise StateError(
                    f"parameters {got} on this rank, and it is otherwise on another rank; expected the same on all: "
                    "end an earlier optimizer with .close() on all ranks"
                )
        for owner in earlier:
            owner.give_way()

    # --- what the core reads and writes ----------------------------------------------------------

    def tensors(self) -> list[torch.Tensor | OnDisk]:
        """Return the memory of all parameters, or this rank's shards of them."""
        return [slot.local.memory() for slot in self.slots.values()]

    def current_tensors(self, slots: Collection[Slot] | None = None) -> list[torch.Tensor | OnDisk]:
        """Return the memory of parameters. First have the master weights take over the values that other code wrote to
        these parameters.

        Args:
            slots: the slots of these parameters; None: all parameters.
        """
        written = self._written_from_outside()
        if self._parameters.released:  # parameters without values are as they were; others may have been kept
            written = [slot for slot in written if not is_pending(slot.param)]
        if self._replaced:
            with no_read():
                for slot in self.slots.values():
                    if slot.index in self._replaced:
                        self._replaced.discard(slot.index)  # first: it may be replaced again
                        self._flat[slot.index] = slot.local.memory()
        for slot in written if slots is None else set(slots).intersection(written):
            with no_read():
                tensor = self._flat[slot.index] = slot.local.memory()
            if not self._core.is_torn:  # else only a load may follow, which replaces all states
                self._states.adopt(slot.index, tensor)
            self.mark_known(slot)
        return [*self._flat] if slots is None else [self._flat[slot.index] for slot in slots]

    def _written_from_outside(self) -> list[Slot]:
        """Return the slots of parameters that other code has written to since :meth:`mark_known`, as far as can be
        told. Parameters in shards are not among them."""
        changed = {*self.param_table.changed()}
        used = {writes for writes in [*self._used] if writes.seen()}
        if not changed and not used:
            return []
        return [slot for slot in self.slots.values() if slot.local.was_written(slot.index in changed, used)]

    def mark_known(self, slot: Slot) -> None:
        """Record that the parameter now matches its master weights."""
        slot.local.forget_writes()
        self.param_table.mark_known(slot.index)

    def doubt(self, slot: Slot) -> None:
        """Record that the parameter may differ from its master weights. The next use of the parameter compares them
        first."""
        self.param_table.doubt(slot.index)

    def have_other_states(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """True if the rule of a group would now have other states than the rule with which its parameters were
        registered, because the group's values have changed: SGD that has got a momentum."""
        rules, of = self.grouping(groups).rules, self._config.rule
        return any(type(new := of(groups[g])) is type(rule) and new != rule for g, rule in rules)

    def grown(self) -> bool:
        """True if some parameters are larger than when their states were made, and all other properties are
        unchanged."""
        if self.param_table.unchanged():
            return False
        grown = False
        for slot in self.slots.values():
            before, param = slot.taken.shape, slot.values
            dtype = TORCH_DTYPES[self._core.params[slot.index].dtype]
            larger = param.dim() == len(before) and all(map(ge, param.shape, before)) and param.shape != before
            same = param.shape == before and memory_order(param) == slot.order
            if not (larger or same) or (param.dtype, param.device) != (dtype, self.device):
                return False
            if not (slot.placed.holds(slot.param) and (same or slot.placed.can_grow)):
                return False
            grown |= larger
        return grown

    def check_unchanged(self) -> None:
        """Raise :class:`ParameterError` if a parameter's size, type, device, memory order or placement has changed
        since its states were made."""
        if self.param_table.unchanged():
            return
        for slot in self.slots.values():
            if not slot.placed.holds(slot.param):
                raise ParameterError(
                    f"parameter {slot.name!r} is placed as {placements_of(slot.param)}, and was {slot.placed} when its "
                    "states were made; expected no change: shard and redistribute the model before wrap(), or wrap it "
                    "anew"
                )
            spec, param = self._core.params[slot.index], slot.values
            got = (param.numel(), param.dtype, param.device)
            expected = (spec.numel, TORCH_DTYPES[spec.dtype], self.device)
            reordered = not (slot.order is None and param.is_contiguous()) and memory_order(param) != slot.order
            if got != expected or param.shape != slot.taken.shape or reordered:
                raise ParameterError(
                    f"parameter {slot.name!r} is {tuple(param.shape)} {param.dtype} on {param.device}, strides "
                    f"{param.stride()}, and was {tuple(slot.taken.shape)} {expected[1]} on {expected[2]}, strides "
                    f"{slot.taken.stride()}, when its states were made; expected no change: resize, cast, move or "
                    "reorder the model before wrap(), or wrap it anew"
                )

    # --- after the core has written --------------------------------------------------------------

    def flush(self) -> None:  # waits
        """Write the result of the last step to all parameters, also under ``schedule="delayed"``, and wait until it is
        written. Do nothing while parameters are released."""
        if self._parameters.released:  # :meth:`DeviceMemory.release` has flushed
            return
        if self._config.schedule == "delayed":
            self._sharding.before_change()
        with no_read():  # one that was sent early is written again, and would refuse a read on this rank alone
            tensors = self.tensors()
        self._parameters.flush(tensors)

    def follow_update(self, *, broken: bool = False) -> None:
        """Tell autograd which parameters a begun step writes, and have readers of these parameters wait.

        Args:
            broken: True: an interrupt may have come between a write to a parameter and autograd's count of the write.
        """
        written = [*self._parameters.written]
        self.param_table.count_writes(written)
        if broken:
            self.param_table.mark_known_all()
        for writes in [*self._used]:
            writes.forget()
        if self._core.is_running:
            slots = [*self.slots.values()]
            for slot in [slots[index] for index in written]:
                slot.local.have_readers_wait(self._wait)
        elif not broken:
            have_been_written([self.param_table.params[index] for index in written])

    def have_readers_wait(self) -> None:
        """Have each read of a whole parameter wait for this parameter's update."""
        for slot in self.slots.values():
            slot.local.have_readers_wait(self._wait)

    def await_values(self, param: torch.Tensor) -> None:  # waits
        """Wait until a whole parameter has been written. Do nothing for a tensor without states in this optimizer."""
        self._wait(param)

    def follow_replaced(self, tensors: Sequence[torch.Tensor | OnDisk]) -> None:
        """Write the master weights, which were replaced, to the parameters.

        Args:
            tensors: the memory of all parameters.
        """
        self._parameters.flush(tensors)
        self.param_table.count_writes(range(len(self.slots)))
        for slot in self.slots.values():
            self.mark_known(slot)

    @property
    def readers_can_wait(self) -> bool:
        """True if every reader and writer of every parameter can be made to wait for it."""
        return all(slot.local.readers_can_wait for slot in self.slots.values())

    def before_send(self, params: Collection[int]) -> None:
        """Tell autograd that the core is about to write parameters during backward, and have readers of these
        parameters wait. Readers of parameters in shards wait without this (``WholeParameters.acquire``).

        Args:
            params: the indices of the parameters.
        """
        slots = list(self.slots.values())
        self.param_table.count_writes(params)
        for slot in (slots[param] for param in params):
            self.mark_known(slot)
            slot.local.have_readers_wait(self._wait)

    # --- memory --------------------------------------------------------------------------------------

    def memory_report(self, given: Iterable[torch.Tensor], model: nn.Module | None) -> MemoryReport:
        """Return planned and measured bytes.

        Args:
            given: the tensors in the optimizer's groups.
            model: the trained model, whose other tensors (frozen parameters, buffers) are counted, too.
        """
        core, sharding = self._core, self._sharding
        trained = [(core.params[slot.index], slot.param) for slot in self.slots.values()]
        frozen = sharding.frozen([param for _, param in trained])
        others = self._others(trained, frozen, [*given, *_tensors_of(model)])
        plan = self._plan(trained, frozen, others)
        whole = [param for param in (*(param for _, param in trained), *others) if param not in sharding]
        gradients = [slot.param.grad for slot in self.slots.values() if slot.param.grad is not slot.stand_in]
        held = Counter(sharding.held_bytes())
        held[DEVICE, PARAMETERS] += memory_of_all(whole)
        held[DEVICE, GRADIENTS] += memory_of_all(gradient for gradient in gradients if gradient is not None)
        return core.memory_report([row for row in plan.rows if row.where == DEVICE], held)

    def _others(
        self,
        trained: Sequence[tuple[ParamSpec, torch.Tensor]],
        frozen: Sequence[tuple[ParamSpec, torch.Tensor]],
        tensors: Iterable[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return the tensors on the device that are neither trained nor partitioned, each once."""
        known = {param for _, param in (*trained, *frozen)}
        return list(dict.fromkeys(t for t in tensors if t not in known and t.device == self.device))

    def _plan(
        self,
        trained: Sequence[tuple[ParamSpec, torch.Tensor]],
        frozen: Sequence[tuple[ParamSpec, torch.Tensor]],
        others: Sequence[torch.Tensor],
    ) -> MemoryPlan:
        params = [param for _, param in trained]
        plan = self._core.plan(
            [spec for spec, _ in trained],
            frozen=[spec for spec, _ in frozen],
            besides=sum(map(self._casts.n_bytes, others)),
            gradients_stay=not self._gradients_leave,
        )
        whole = [*params, *(param for _, param in frozen), *others]
        built = [shards.shard for shards in map(shards_of, whole) if shards is not None]
        here = [tensor for tensor in whole if tensor.device == self.device]
        held = memory_of_all([*here, *(values for shard in built for values in shard.on(self.device))])
        return replace(plan, rows=(*plan.rows, *self._sharding.plan_rows(trained, frozen)), held=held)


def _drop_memory(memory: list[torch.Tensor | OnDisk], replaced: set[int], index: int) -> None:
    memory[index] = _NOWHERE
    replaced.add(index)


def named_params(g: int, group: Mapping[str, Any], own: Mapping[torch.Tensor, str]) -> list[NamedParam]:
    """Return the parameters of group ``g``, each once.

    Args:
        own: names that the optimizer has given to parameters of groups without names.
    """
    others = [own.get(param, f"group {g}, parameter {i}") for i, param in enumerate(group["params"])]
    names = group.get("param_names") or others
    entries: dict[torch.Tensor, NamedParam] = {}
    for name, param in zip(names, group["params"], strict=True):
        entries.setdefault(param, (name, param, g))  # torch only warns of a parameter that is in a group twice
    return [*entries.values()]


def named_in(groups: Sequence[Mapping[str, Any]], own: Mapping[torch.Tensor, str]) -> list[NamedParam]:
    """Return the parameters of all groups, as :func:`named_params` returns the parameters of one group."""
    return [entry for g, group in enumerate(groups) for entry in named_params(g, group, own)]


def matrices_of_frozen(named: Iterable[NamedParam], rules: Sequence[Rule]) -> dict[torch.Tensor, Matrix]:
    """Return the matrices of each frozen parameter whose update rule needs whole matrices.

    Args:
        rules: the update rule of each group.
    """
    found = {}
    for name, param, g in named:
        if not param.requires_grad and is_offloadable(param):
            with suppress(ParameterError):  # it cannot be trained so, and is refused when it is unfrozen
                found[param] = _matrix(rules[g], name, param, UNDIVIDED)
    return {key: matrix for key, matrix in found.items() if matrix is not None}


def _matrix(rule: Rule, name: str, param: torch.Tensor, placed: Placement) -> Matrix | None:
    matrix = rule.matrix(name, param.shape, in_order=memory_order(local_of(param)) is None)
    if matrix is not None and placed.is_cut:
        raise ParameterError(
            f"parameter {name!r} is a DTensor of which this process has {placed.part}, and optimizer={rule.name!r} "
            "needs whole matrices; expected another optimizer for it ({'params': ..., 'optimizer': 'adamw'}), or "
            "wrap() of a model without fully_shard and tensor parallelism, whose stages 1 to 3 bring matrices together"
        )
    return matrix


def check_new(
    named: Iterable[NamedParam],
    device: torch.device,
    taker: OwningOptimizer | None,
    known: Collection[torch.Tensor] | Mapping[torch.Tensor, Any] = (),
) -> list[OwningOptimizer]:
    """Check that an optimizer can register these parameters. Return the earlier optimizers that will give way to it.

    Args:
        device: the device that all parameters must be on.
        taker: the optimizer that registers the parameters.
        known: parameters that ``taker`` already has.

    Raises:
        ParameterError: a parameter cannot train, or is on another device.
        StateError: a parameter belongs to another optimizer, which does not give way.
    """
    trained = [entry for entry in named if entry[1].requires_grad]  # others are checked when they are unfrozen
    for name, param, _ in trained:
        check_param(name, param)
        if param.device != device:
            raise ParameterError(
                f"parameter {name!r} is on {param.device}, others are on {device}; expected one device a process"
            )
    return earlier_owners(trained, taker, known)


def earlier_owners(
    named: Iterable[NamedParam],
    taker: OwningOptimizer | None,
    known: Collection[torch.Tensor] | Mapping[torch.Tensor, Any],
) -> list[OwningOptimizer]:
    """Return the other optimizers that have states of these parameters. All of them let ``taker`` take over.

    Raises:
        StateError: one of them does not let ``taker`` take over.
    """
    others = [(name, param) for name, param, _ in named if slot_of(param) is not None and param not in known]
    if others:
        gc.collect()  # a reference cycle of an old trainer may keep its optimizer alive
    found: list[OwningOptimizer] = []
    for name, param in others:
        owner = owner_of(param)
        if owner is None or any(owner is other for other in found):
            continue
        if (reason := owner.keeps_from(taker)) is not None:
            raise StateError(
                f"parameter {name!r} already belongs to another OffloadedAdamW, {reason}; expected one owner: use the "
                "earlier one, or end it with .close() before this one is made"
            )
        found.append(owner)
    return found


def unregister(slots: dict[torch.Tensor, Slot]) -> None:
    """Remove the stand-ins for gradients from the parameters, and release the parameters."""
    for slot in slots.values():
        slot.local.unregister()
        slot.release()
        slot.taken.when_added(None)
        if slot.managed.slot is slot:
            slot.managed.slot = None
    slots.clear()


def _tensors_of(model: nn.Module | None) -> list[torch.Tensor]:
    return [] if model is None else [*model.parameters(), *model.buffers()]


def _await(
    slots: Mapping[torch.Tensor, Slot], state_lock: StateLock, parameters: Parameters, param: torch.Tensor
) -> None:
    if (slot := slots.get(param)) is not None:
        state_lock.run(parameters.await_param, slot.index, on_host=slot.placed.read_on_other_streams)
