"""The parameters that have optimizer states: checks, casting, and their tensors in the pipeline."""

import gc
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from offload_core.errors import ParameterError, StateError
from offload_core.layout.partition import ParamSpec
from offload_core.memory.host_memory import available_bytes
from offload_core.memory.plan import MemoryPlan
from offload_core.memory.report import MemoryReport
from offload_core.step.bucket_terms import GATHERED, GRADIENTS, PARAMETERS
from offload_core.step.pipeline import Pipeline
from offload_core.step.state_access import StateAccess
from offload_core.support.launchers import local_processes
from offload_core.support.threads import clear_up

from .casting import Casts
from .data_writes import DataWrites, data_of
from .pending import can_wait, forget, make_pending, settle
from .stage3.construction import shards_of
from .stage3.partitioned import PartitionedModel
from .tensors import (
    TORCH_DTYPES,
    TakenGradient,
    cast_param,
    check_param,
    flat,
    memory_of_all,
    memory_order,
    spec_of,
)

OWNED: "weakref.WeakValueDictionary[int, Slot]" = weakref.WeakValueDictionary()
"""Slots by the ``id`` of their parameter; a slot keeps its parameter alive, so no id is reused."""

NamedParam = tuple[str, torch.Tensor, int]
"""A parameter's name, the parameter, and the number of its group."""


@dataclass(eq=False)
class Slot:
    """A parameter that has states: its number in the pipeline, and its version after the last update."""

    name: str
    param: torch.Tensor
    index: int
    taken: TakenGradient
    order: list[int] | None
    """The memory order of its states (``tensors.memory_order``)."""
    arrived: int = 0
    """Gradients taken in backwards since the last update. :class:`Intake` keeps this and the next two fields."""
    averaged: int = 0
    """The number of these that are averaged over the accumulation steps."""
    deferred: torch.Tensor | None = None
    """The ``p.grad`` that the pipeline gets later, in addition to earlier gradients; None: there is none."""
    partitioned: bool = False
    """True if the rank holds a shard of it; then only ``gathered_parameters`` changes it from outside."""
    data_writes: DataWrites | None = None
    """None where the rank holds a shard."""
    version: int = 0
    address: int = 0

    @property
    def changed(self) -> bool:
        """Whether somebody else wrote to the parameter since :meth:`note`, as far as torch or ``data_writes`` tell."""
        if self.data_writes is None:
            return False
        return self.data_writes.seen() or (self.version, self.address) != (self.param._version, self.param.data_ptr())

    def note(self) -> None:
        """Record that the parameter, as it is now, agrees with its master weights."""
        if self.data_writes is not None:
            self.data_writes.forget()
            with torch._C.DisableTorchFunctionSubclass():  # no read: nobody has to wait
                self.version, self.address = self.param._version, self.param.data_ptr()

    def doubt(self) -> None:
        """Record that the parameter may differ from its master weights: their next use compares them first."""
        self.version = -1

    def forget(self) -> None:
        """Record that no gradient has arrived."""
        self.arrived = self.averaged = 0
        self.deferred = None

    def continues(self, gradient: torch.Tensor | None) -> bool:
        """True if this ``p.grad`` is the deferred gradient; with ``create_graph`` autograd replaces the tensor."""
        return (
            gradient is not None and self.deferred is not None and (gradient is self.deferred or gradient.requires_grad)
        )

    def release(self) -> None:
        """Remove the stand-in from the parameter."""
        if self.param.grad is self.taken:
            self.param.grad = None


class Registration:
    """The parameters that an optimizer has taken on, in the pipeline's order.

    It lives as long as the pipeline. Closing or deleting it releases the parameters for another optimizer.

    Args:
        device: the device of all parameters.
        partitioned: the model's partitioned parameters; None: none are.
        casts: the element types that parameters get.
        gradients_leave: True if gradients are taken during backward, so that the plan has no room for them.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        device: torch.device,
        partitioned: PartitionedModel | None,
        casts: Casts,
        *,
        gradients_leave: bool,
    ) -> None:
        self.slots: dict[torch.Tensor, Slot] = {}
        self._pipeline = pipeline
        self._device = device
        self._partitioned = partitioned
        self._casts = casts
        self._gradients_leave = gradients_leave
        weakref.finalize(self, clear_up, partial(let_go, self.slots)).atexit = False

    def close(self) -> None:
        """Release the parameters."""
        let_go(self.slots)

    # --- taking parameters on ------------------------------------------------------------------------

    def check_new(self, named: Iterable[NamedParam]) -> None:
        """As the function :func:`check_new`, for parameters to be added to those of this optimizer."""
        check_new(named, self._device, self.slots)

    def unfrozen(self, groups: Iterable[Mapping[str, Any]], *, with_gradient: bool) -> list[NamedParam]:
        """Parameters of these groups without states that require a gradient (``with_gradient``: have one)."""
        groups = list(groups)
        unknown = [param for group in groups for param in group["params"] if param not in self.slots]
        new = {param for param in unknown if (param.grad is not None if with_gradient else param.requires_grad)}
        if not new:
            return []
        return [entry for g, group in enumerate(groups) for entry in named_params(g, group) if entry[1] in new]

    def take_on(self, named: Sequence[NamedParam], model: nn.Module | None = None) -> list[Slot]:
        """Allocate states for these parameters; cast them as ``casts`` says.

        Args:
            model: the plan includes the memory of its other tensors, too.
        """
        for name, param, _ in named:
            check_param(name, param)
        pipeline, parted = self._pipeline, self._partitioned
        targets = [self._casts.of_param(param) for _, param, _ in named]
        specs = [
            spec_of(name, p, g, target, parted is not None and parted.parameters.takes(p))
            for (name, p, g), target in zip(named, targets, strict=True)
        ]
        frozen = parted.parameters.frozen([p for _, p, _ in named]) if parted is not None and model is not None else []
        trained = [(spec, p) for spec, (_, p, _) in zip(specs, named, strict=True)]
        plan = self._plan(trained, frozen, self._others(trained, frozen, _tensors_of(model)))
        device = pipeline.device
        processes = min(local_processes(), device.world_size)
        plan.check(available_bytes(), device.free_bytes(), processes=processes)
        first = len(pipeline.params)
        cut = parted.parameters.cut(trained) if parted else {}
        tensors = [cut[p].shard if p in cut else flat(p) for _, p, _ in named]
        pipeline.add_parameters(specs, tensors, frozen=[spec for spec, _ in frozen])
        if parted is not None:
            parted.keep_shards(cut.values())
        new = []
        for i, (name, param, _) in enumerate(named):
            if specs[i].partitioned:
                assert parted is not None
                parted.parameters.train(param, first + i)
            elif (target := targets[i]) is not None:
                cast_param(param, TORCH_DTYPES[target])
            slot = Slot(
                name,
                param,
                first + i,
                TakenGradient(param, name),
                memory_order(param),
                partitioned=specs[i].partitioned,
                data_writes=None if specs[i].partitioned else DataWrites(param),
            )
            slot.note()
            self.slots[param] = slot
            OWNED[id(param)] = slot
            new.append(slot)
        return new

    # --- what the pipeline reads and writes ----------------------------------------------------------

    def tensors(self) -> list[torch.Tensor]:
        """The memory of all parameters, or this rank's shards of them."""
        return [self.tensor(slot) for slot in self.slots.values()]

    def tensor(self, slot: Slot) -> torch.Tensor:
        shard = self._partitioned.parameters.shard_of(slot.param) if self._partitioned is not None else None
        # Autograd must not count the pipeline's writes; follow_update counts each update once.
        return flat(data_of(slot.param)) if shard is None else shard

    def current_tensors(self, slots: Collection[Slot] | None = None) -> list[torch.Tensor]:
        """As :meth:`tensors`, for all parameters or for these; master weights first follow changes from outside."""
        slots = self.slots.values() if slots is None else slots
        with torch._C.DisableTorchFunctionSubclass():  # no read: nobody has to wait
            tensors = [self.tensor(slot) for slot in slots]
            changed = [(slot, tensor) for slot, tensor in zip(slots, tensors, strict=True) if slot.changed]
        for slot, tensor in changed:
            StateAccess(self._pipeline).adopt(slot.index, tensor)
            slot.note()
        return tensors

    def check_unchanged(self) -> None:
        """Raise :class:`ParameterError` if a parameter has another size, type, device or order than its states."""
        for slot in self.slots.values():
            spec, param = self._pipeline.params[slot.index], slot.param
            got = (param.numel(), param.dtype, param.device)
            expected = (spec.numel, TORCH_DTYPES[spec.dtype], self._device)
            reordered = not (slot.order is None and param.is_contiguous()) and memory_order(param) != slot.order
            if got != expected or param.shape != slot.taken.shape or reordered:
                raise ParameterError(
                    f"parameter {slot.name!r} is {tuple(param.shape)} {param.dtype} on {param.device}, strides "
                    f"{param.stride()}, and was {tuple(slot.taken.shape)} {expected[1]} on {expected[2]}, strides "
                    f"{slot.taken.stride()}, when its states were made; expected no change: resize, cast, move or "
                    "reorder the model before wrap(), or wrap it anew"
                )

    # --- after the pipeline has written --------------------------------------------------------------

    def flush(self) -> None:
        """As ``OffloadedAdamW.flush``."""
        if self._partitioned is not None and self._pipeline.config.schedule == "delayed":
            self._partitioned.before_change()
        self._pipeline.flush(self.tensors())

    def follow_update(self) -> None:
        """After a step has begun: tell autograd of the written parameters, and have their readers wait for them."""
        written = [slot for slot in self.slots.values() if slot.index in self._pipeline.published]
        for slot in written:
            increment_version(slot.param)  # as after any in-place update
        for slot in self.slots.values():
            slot.note()
        if not self._pipeline.finished:
            for slot in written:
                if not slot.partitioned:
                    _make_readers_wait(slot, self._pipeline)

    def follow_replaced(self, tensors: Sequence[torch.Tensor]) -> None:
        """After master weights were replaced: write them to the parameters."""
        self._pipeline.flush(tensors)
        for slot in self.slots.values():
            increment_version(slot.param)
            slot.note()

    @property
    def readers_can_wait(self) -> bool:
        """True if whoever reads or writes any parameter can be made to wait for it."""
        return all(
            can_wait(slot.param) and not (slot.data_writes is not None and slot.data_writes.possible)
            for slot in self.slots.values()
        )

    def before_send(self, params: Collection[int]) -> None:
        """The pipeline is about to write parameters during backward: tell autograd, and have their readers wait."""
        slots = list(self.slots.values())
        for slot in (slots[param] for param in params):
            increment_version(slot.param)
            slot.note()
            _make_readers_wait(slot, self._pipeline)

    # --- memory --------------------------------------------------------------------------------------

    def memory_report(self, given: Iterable[torch.Tensor], model: nn.Module | None) -> MemoryReport:
        """As ``OffloadedAdamW.memory_report``.

        Args:
            given: the tensors in the optimizer's groups.
        """
        pipeline, parted = self._pipeline, self._partitioned
        trained = [(pipeline.params[slot.index], slot.param) for slot in self.slots.values()]
        frozen = [] if parted is None else parted.parameters.frozen([param for _, param in trained])
        others = self._others(trained, frozen, [*given, *_tensors_of(model)])
        plan = self._plan(trained, frozen, others)
        whole = [
            param for param in (*(param for _, param in trained), *others) if parted is None or param not in parted
        ]
        gradients = [slot.param.grad for slot in self.slots.values() if slot.param.grad is not slot.taken]
        held = {
            PARAMETERS: memory_of_all(whole),
            GRADIENTS: memory_of_all(gradient for gradient in gradients if gradient is not None),
        }
        if parted is not None:
            held[PARAMETERS] += parted.parameters.shard_bytes
            held[GATHERED] = parted.live.n_bytes
        rows = [row for row in plan.rows if row.where == "device"]
        return pipeline.memory_report(rows, {("device", what): n_bytes for what, n_bytes in held.items()})

    def _others(
        self,
        trained: Sequence[tuple[ParamSpec, torch.Tensor]],
        frozen: Sequence[tuple[ParamSpec, torch.Tensor]],
        tensors: Iterable[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The tensors on the device that are neither trained nor partitioned, each once."""
        known = {id(param) for _, param in (*trained, *frozen)}
        return list({id(t): t for t in tensors if id(t) not in known and t.device == self._device}.values())

    def _plan(
        self,
        trained: Sequence[tuple[ParamSpec, torch.Tensor]],
        frozen: Sequence[tuple[ParamSpec, torch.Tensor]],
        others: Sequence[torch.Tensor],
    ) -> MemoryPlan:
        params = [param for _, param in trained]
        plan = self._pipeline.terms.plan(
            [spec for spec, _ in trained],
            frozen=[spec for spec, _ in frozen],
            besides=sum(map(self._casts.n_bytes, others)),
            gradients_stay=not self._gradients_leave,
        )
        rows = [] if self._partitioned is None else [self._partitioned.parameters.plan_cut(trained)]
        whole = [*params, *(param for _, param in frozen), *others]
        shards = [built.values for built in map(shards_of, whole) if built is not None]
        held = memory_of_all(tensor for tensor in (*whole, *shards) if tensor.device == self._device)
        return replace(plan, rows=(*plan.rows, *rows), held=held)


def named_params(g: int, group: Mapping[str, Any]) -> list[NamedParam]:
    """The parameters of group ``g``, each once."""
    names = group.get("param_names") or [f"group {g}, parameter {i}" for i in range(len(group["params"]))]
    entries: dict[torch.Tensor, NamedParam] = {}
    for name, param in zip(names, group["params"], strict=True):
        entries.setdefault(param, (name, param, g))  # torch only warns of a parameter that is in a group twice
    return [*entries.values()]


def check_new(
    named: Iterable[NamedParam], device: torch.device, known: Collection[torch.Tensor] | Mapping[torch.Tensor, Any] = ()
) -> None:
    """Check that an optimizer can take on these parameters.

    Args:
        device: the device that all of them must be on.
        known: parameters that the optimizer already has.

    Raises:
        ParameterError: a parameter cannot train, or is on another device.
        StateError: a parameter belongs to another optimizer.
    """
    for name, param, _ in named:
        if not param.requires_grad:
            continue  # checked when it is unfrozen
        check_param(name, param)
        if param.device != device:
            raise ParameterError(
                f"parameter {name!r} is on {param.device}, others are on {device}; expected one device a process"
            )
        if id(param) in OWNED and param not in known:
            gc.collect()  # a reference cycle of an old trainer may keep its optimizer alive
        if id(param) in OWNED and param not in known:
            raise StateError(
                f"parameter {name!r} already belongs to another OffloadedAdamW (was the model wrapped twice?); "
                "expected one owner: use the first one, or end it with .close() (a Trainer's: "
                "trainer.optimizer.optimizer.close())"
            )


def let_go(slots: dict[torch.Tensor, Slot]) -> None:
    """Remove the stand-ins for gradients from the parameters, and release the parameters."""
    for slot in slots.values():
        if not slot.partitioned:
            with suppress(StateError):  # it was sent early, for a step that is never made
                settle(slot.param)
            forget(slot.param)
        slot.release()
        slot.taken.when_added(None)
        if OWNED.get(id(slot.param)) is slot:
            del OWNED[id(slot.param)]
    slots.clear()


def _tensors_of(model: nn.Module | None) -> list[torch.Tensor]:
    return [] if model is None else [*model.parameters(), *model.buffers()]


def _make_readers_wait(slot: Slot, pipeline: Pipeline) -> None:
    wait = partial(pipeline.state_lock.run, partial(pipeline.await_param, slot.index))
    make_pending(slot.param, wait, before_modules=True)
