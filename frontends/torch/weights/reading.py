"""Reads the weights of an engine's model: the one way for exports, :meth:`Engine.named_weights` and the model's part of
checkpoints.

A weight's values lie in one of several places: in its memory, in shards of all ranks (stage 3), in parts on a mesh
(DTensor), and rounded up to fp32 in its master weights. :meth:`Weights.held` says what this process holds of it, and
:meth:`Weights.whole` puts it together.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload_core.errors import ConfigError, ParameterError, StateError
from offload_core.layout.regions import Elements, InMemory
from offload_core.ranks.collectives import merge, merged
from offload_core.ranks.consistency import combine, fingerprint
from offload_core.support import checks

from ..internals.compiled import uncompiled, uncompiled_module
from ..optim.optimizer import OffloadedOptimizer
from ..params.dtensor import Placed, is_dtensor, local_of
from ..params.tensors import ELEMENT_TYPES, NUMPY_DTYPES, elements_of, flat, memory, memory_order, shaped
from ..stage3.gathering import gathered_parameters
from ..stage3.parameters import PartitionedParameter

CPU = torch.device("cpu")
LAYOUTS = ("contiguous", "own")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ELEMENT_TYPES}
_PIECE = 2**20
"""Elements of a shard that are read at a time: one on disk is copied twice."""


@dataclass(frozen=True)
class HeldRun:
    """Elements ``[start, start + numel)`` of a tensor that this process holds, in the order of the tensor's elements
    (``elements_in``)."""

    start: int
    numel: int
    read: Callable[[int, np.ndarray], None]
    """``read(at, out)`` copies elements of the run, from ``at`` on, to ``out``, which has the tensor's type."""


@dataclass(frozen=True)
class NamedWeight:
    """A tensor of a model, under the one name that it is exported with."""

    name: str
    tensor: torch.Tensor
    """The model's own object; it may be in shards."""
    dtype: torch.dtype
    """The element type that it is asked for in."""
    others: tuple[str, ...] = ()
    """Names of the same tensor that are left out."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


class Weights:
    """Reads the weights of a model whose trained parameters an optimizer has.

    Values are those of the last flush. Methods that all ranks call are collective even for a weight that this process
    holds whole.
    """

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = optimizer

    def held(self, tensor: torch.Tensor) -> list[HeldRun]:
        """Return this process's elements of a tensor, where they lie now; they are read when they are asked for.

        The values are those that the model runs with. Not collective.
        """
        record = self._record_of(tensor)
        if record is not None:
            return [HeldRun(start, numel, partial(_read_shard, record, at)) for start, at, numel in record.runs]
        values = self._optimizer.components.device_memory.values(local_of(tensor))
        run = flat(values.data) if is_dense(values) else values.detach().contiguous().view(-1)
        return [HeldRun(0, run.numel(), partial(_read, run))]

    def whole(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype | None = None,
        *,
        layout: str = "contiguous",
        device: torch.device = CPU,
        wanted: bool = True,
    ) -> torch.Tensor | None:
        """Return a copy of a whole weight. All ranks call this.

        Args:
            dtype: an element type: master weights, rounded to it, of a tensor that has any; else the cast values.
                None: the values that the model runs with.
            layout: ``"contiguous"`` or ``"own"``, the tensor's order in memory.
            device: of the copy.
            wanted: False returns None where the values need not be put together.
        """
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        released, record = self._optimizer.is_released, self._record_of(tensor)
        if (dtype is not None or released) and target in ELEMENT_TYPES and self._optimizer.has_states(tensor):
            values = self._master(tensor, target)
            return laid(values, target, layout, device, fresh=True) if wanted else None
        if record is not None and (released or self._holds_all()):
            values = self._from_shards(record, target)
            return laid(values, target, layout, device, fresh=True) if wanted else None
        if released:
            values = self._from_host(tensor)
            return laid(values, target, layout, device, fresh=False) if wanted else None
        with gathered_parameters(tensor):
            values = whole_of(tensor)
            return laid(values, target, layout, device, fresh=is_dtensor(tensor)) if wanted else None

    def _master(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        components, lock = self._optimizer.components, self._optimizer.state_lock
        return lock.change("a read of master weights", components.states.whole, tensor, ("master",), dtype)["master"]

    def _record_of(self, tensor: torch.Tensor) -> PartitionedParameter | None:
        return self._optimizer.sharding.record_of(tensor)

    def _from_shards(self, record: PartitionedParameter, dtype: torch.dtype) -> torch.Tensor:
        """Return a partitioned parameter in host memory, put together of all ranks' shards, in this element type."""
        spec = record.spec
        words = np.zeros(-(-spec.numel * dtype.itemsize // 8), np.int64)  # ranks add bits, and all but one add zeros
        out = torch.from_numpy(words.view(np.uint8)[: spec.numel * dtype.itemsize]).view(dtype)
        for start, first, numel in record.runs:
            for at in range(0, numel, _PIECE):
                part = out[start + at : start + min(at + _PIECE, numel)]
                part.copy_(record.shard.read(first + at, part.numel()).detach())
        if not self._holds_all():
            collectives = self._optimizer.core.collectives
            merge(collectives.sum_integers, words, f"the values of {spec.name}")
        return shaped(out, cast(InMemory, spec.elements))

    def _from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without states while parameters are released, from the copies of its values on the hosts."""
        values = self._optimizer.components.device_memory.values(local_of(tensor)).detach()
        return self._from_parts(tensor, values) if is_dtensor(tensor) else values

    def _from_parts(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Return a DTensor in host memory, put together of all processes' parts.

        Raises:
            StateError: on all processes, if some part lies on none of them.
        """
        name = self._optimizer.names.get(tensor, f"a tensor of shape {tuple(tensor.shape)}")
        placed, collectives = placed_as(name, tensor), self._optimizer.core.collectives
        if not placed.is_cut:
            return local
        what = f"the values of {name}"
        mine = [fingerprint(str(placed.part.box)), local.numel()]
        boxes, sizes = combine(collectives, what, of_each=mine).of_each.T
        _, firsts = np.unique(boxes, return_index=True)  # of those that hold the same elements one gives them
        if sizes[firsts].sum() != tensor.numel():
            raise StateError(
                f"{name!r} is a released DTensor without states, and has parts on processes that have none of the "
                "trained parameters; expected engine.restore() before weights are read"
            )
        own = memory(local.to("cpu").contiguous().view(-1)).reshape(tuple(local.shape))
        parts = [(placed.part.index, own)] if collectives.rank in firsts else []
        whole = merged(collectives, placed.part.shape, own.dtype, parts, what)
        return torch.from_numpy(whole.reshape(-1).view(np.uint8)).view(tensor.dtype).view(tensor.shape)

    def _holds_all(self) -> bool:
        """True if this process has all shards, and nothing that is not in them yet was written to parameters."""
        return self._optimizer.core.world_size == 1 and not self._optimizer.sharding.is_open


# --- the tensors of a model --------------------------------------------------------------------------------------


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that ``state_dict()`` lists, as the model's own objects; none is read, since it may be in shards.

    Raises:
        ParameterError: an entry is not a tensor.
    """
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        name = uncompiled(name)
        if not isinstance(tensor, torch.Tensor):
            raise ParameterError(
                f"{name!r} of the model's state_dict() is {checks.kind_of(tensor)}, expected a tensor: weights "
                "are nothing else (a get_extra_state() that returns one will do)"
            )
        found[name] = tensor
    return found


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the torch type of an argument ``dtype``.

    Raises:
        ConfigError: weights cannot be asked for in this type.
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    checks.choice("dtype", name, _DTYPES)
    return _DTYPES[name]


def check_layout(layout: str) -> None:
    """Raise :class:`ConfigError` unless ``layout`` is one of :data:`LAYOUTS`."""
    if layout not in LAYOUTS:
        raise ConfigError(f"layout: got {layout!r}, expected one of {', '.join(map(repr, LAYOUTS))}")


def untied(model: nn.Module, found: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, tuple[str, ...]]]:
    """Each of these tensors once: under the name that ``transformers`` ties others to, or the first one; and its other
    names."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, tensor in found.items():
        names.setdefault(tensor, []).append(name)
    tied = getattr(uncompiled_module(model), "all_tied_weights_keys", {})  # {the one that is left out: other}
    for same in names.values():
        kept = next((name for name in same if name not in tied), same[0])
        yield kept, found[kept], tuple(name for name in same if name != kept)


def weights_of(model: nn.Module, dtype: torch.dtype | None, what: str) -> list[NamedWeight]:
    """Return the tensors of ``state_dict()`` in its order, each once.

    Args:
        dtype: for those that are floating-point; None: their own.
        what: the call that asks for them, for errors.

    Raises:
        ParameterError: one has no dense values.
    """
    return [checked(name, tensor, dtype, what, others) for name, tensor, others in untied(model, named_tensors(model))]


def checked(
    name: str, tensor: torch.Tensor, dtype: torch.dtype | None, what: str, others: tuple[str, ...] = ()
) -> NamedWeight:
    """Return the weight with its element type, as :func:`weights_of` does."""
    target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if is_traceable_wrapper_subclass(tensor) and not is_dtensor(tensor):
        raise ParameterError(
            f"{what}: {name!r} is {checks.kind_of(tensor)}, which files cannot hold; expected a dense "
            "tensor: save the adapters alone, or the model by the library that quantised it"
        )
    if tensor.layout is not torch.strided or target not in NUMPY_DTYPES or tensor.is_meta:
        where = " on the meta device" * tensor.is_meta
        raise ParameterError(
            f"{what}: {name!r} is {tensor.dtype}, {tensor.layout}{where}; expected a dense tensor with "
            f"values, of one of {', '.join(str(d).removeprefix('torch.') for d in NUMPY_DTYPES)}"
        )
    return NamedWeight(name, tensor, target, others)


# --- where a tensor's elements lie -------------------------------------------------------------------------------


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor; all processes that hold parts of a DTensor must call this."""
    detached: Any = tensor.detach()
    return detached.full_tensor() if is_dtensor(tensor) else detached


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the tensor has neither gaps nor overlaps in memory."""
    try:
        elements_of(tensor)
    except ParameterError:
        return False
    return True


def placed_as(name: str, tensor: torch.Tensor) -> Placed:
    """Return the placement of a DTensor."""
    local = local_of(tensor)
    return Placed.of(name, tensor, memory_order(local) if is_dense(local) else None)


def elements_in(name: str, tensor: torch.Tensor) -> Elements:
    """Return the place in the whole tensor of each element that this process holds."""
    if is_dtensor(tensor):
        return placed_as(name, tensor).part
    return elements_of(tensor) if is_dense(tensor) else InMemory(tuple(tensor.shape))


def _read(run: torch.Tensor, at: int, out: np.ndarray) -> None:
    part = run[at : at + out.size].view(torch.uint8)
    torch.from_numpy(out.view(np.uint8)).copy_(part)


def _read_shard(record: PartitionedParameter, first: int, at: int, out: np.ndarray) -> None:
    _read(record.shard.read(first + at, out.size), 0, out)


def laid(values: torch.Tensor, dtype: torch.dtype, layout: str, device: torch.device, *, fresh: bool) -> torch.Tensor:
    """Return a copy of values in this type and order, on this device.

    Args:
        fresh: the values are a copy already, and may be returned as they are.
    """
    values = values.resolve_conj().resolve_neg()
    order = torch.contiguous_format if layout == "contiguous" else torch.preserve_format
    return values.to(device, dtype, copy=not fresh, memory_format=order).detach()


def bytes_in_order(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a contiguous host tensor, one-dimensional."""
    return memory(tensor.view(-1))
