"""The tensors that hold a parameter's values: the parameter itself, or all tensors of a frozen quantised one.

A quantised parameter is packed elements and their scales. The scales are attributes of the parameter or of its module
(bitsandbytes: ``quant_state``, ``SCB``), or tensors inside a wrapper subclass (torchao). In shards, all tensors of a
quantised parameter together are one range of bytes.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload_core.dtypes import BYTE, ElementType
from offload_core.layout.partition import ParamSpec
from offload_core.layout.regions import InMemory

from ..internals.private import no_read
from .data_writes import set_data
from .dtensor import local_of
from .pending import own_class_of
from .tensors import flat, is_offloadable, shaped_like, spec_of, tensors_in

_SMALLEST = 2048
"""The smallest storage, in bytes, that is moved beside the storage of packed elements. Smaller storages have tables of
the library."""
_ALIGNMENT = 64


class Values:
    """The values of a parameter that is one dense tensor."""

    fixed = False
    """True if the values may not be changed."""

    def __init__(self, param: torch.Tensor) -> None:
        self.tensors = [param]
        """The tensors that hold the values."""

    def spec(self, name: str, target: ElementType | None) -> ParamSpec:
        """Return the core's description of the parameter.

        Args:
            target: the element type that the parameter will be cast to; None: its own type.
        """
        return spec_of(name, self.tensors[0], 0, target, partitioned=True)

    def run(self) -> torch.Tensor:
        """Return the values as a one-dimensional tensor: a view of the parameter's memory, or a copy."""
        return flat(self.tensors[0])

    def point(self, run: torch.Tensor) -> None:
        """Have the tensors refer to the memory of ``run``.

        Args:
            run: one-dimensional, as :meth:`run` returns it; its first element is the first element of its storage.
        """
        [param] = self.tensors
        set_data(param, shaped_like(run, param))


class PackedValues(Values):
    """The bytes of a frozen quantised parameter.

    Args:
        tensors: all tensors that hold values, in the same order on all ranks. They may share memory.
    """

    fixed = True

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        extents: dict[int, tuple[int, int]] = {}
        for tensor in tensors:
            start, end = _extent(tensor)
            known = extents.get(_storage(tensor), (start, end))
            extents[_storage(tensor)] = min(start, known[0]), max(end, known[1])
        self._at: dict[int, int] = {}
        """Maps a storage to the offset of its byte 0 in the run, in bytes. The offset is negative if the run leaves out
        enough bytes at the storage's beginning."""
        self.n_bytes = 0
        for storage, (start, end) in extents.items():
            before = start % _ALIGNMENT
            self._at[storage] = self.n_bytes + before - start
            self.n_bytes += -(-(before + end - start) // _ALIGNMENT) * _ALIGNMENT
        self._places = [
            ((self._at[_storage(t)] // t.element_size()) + t.storage_offset(), tuple(t.shape), t.stride())
            for t in tensors
        ]
        self._extents = extents

    def spec(self, name: str, target: ElementType | None) -> ParamSpec:
        return ParamSpec(name, self.n_bytes, BYTE, 0, InMemory((self.n_bytes,), None), partitioned=True)

    def run(self) -> torch.Tensor:
        run = torch.zeros(self.n_bytes, dtype=torch.uint8, device=self.tensors[0].device)
        storages = {_storage(tensor): tensor.untyped_storage() for tensor in self.tensors}
        for storage, (start, end) in self._extents.items():
            values = torch.empty(0, dtype=torch.uint8, device=run.device)
            values.set_(storages[storage], start, (end - start,), (1,))
            run[self._at[storage] + start : self._at[storage] + end] = values
        return run

    def point(self, run: torch.Tensor) -> None:
        for tensor, (offset, shape, stride) in zip(self.tensors, self._places, strict=True):
            values = torch.empty(0, dtype=tensor.dtype, device=run.device)
            values.set_(run.untyped_storage(), offset, shape, stride)
            set_data(tensor, values)


def named_memory(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return ``(name, tensor)`` of each parameter of a model, under each of its names. The tensors inside a wrapper, or
    beside a quantised parameter, follow the parameter with the same name."""
    found = []
    with no_read():  # it may be in shards
        for prefix, module in model.named_modules(remove_duplicate=False):
            for own, param in module._parameters.items():
                if param is None:
                    continue
                name = f"{prefix}.{own}" if prefix else own
                found.append((name, param))
                if is_quantised(param) or is_traceable_wrapper_subclass(local_of(param)):
                    found += [(name, tensor) for tensor in _tensors(local_of(param), module)]
    return found


def packed_values(model: nn.Module) -> dict[torch.Tensor, PackedValues]:
    """Return the values of each frozen quantised parameter of a model. Memory that several parameters share is left
    out."""
    with no_read():  # it may be in shards
        return _packed_values(model)


def _packed_values(model: nn.Module) -> dict[torch.Tensor, PackedValues]:
    found: dict[torch.Tensor, list[torch.Tensor]] = {}
    users: dict[int, set[torch.Tensor]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is None or param in found or not is_quantised(param):
                continue
            tensors = list(dict.fromkeys(_tensors(param, module)))
            if all(_is_dense(tensor) and tensor.device == param.device for tensor in tensors):
                found[param] = tensors
                for tensor in tensors:
                    users.setdefault(_storage(tensor), set()).add(param)
    alone = {
        key: [t for i, t in enumerate(tensors) if not i or len(users[_storage(t)]) == 1]
        for key, tensors in found.items()
        if tensors and len(users[_storage(tensors[0])]) == 1
    }
    return {key: PackedValues(tensors) for key, tensors in alone.items()}


def is_quantised(param: torch.Tensor) -> bool:
    """True if this is a frozen parameter with packed elements, of a class that a library defines."""
    library = _library(param)
    if not isinstance(param, nn.Parameter) or param.requires_grad or param.is_meta or library == "torch":
        return False
    if is_traceable_wrapper_subclass(param) or not is_offloadable(param):
        return True
    # bitsandbytes may keep packed elements as bfloat16
    return next(_beside(vars(param).values(), library, {id(param)}), None) is not None


def _tensors(param: torch.Tensor, module: nn.Module) -> Iterator[torch.Tensor]:
    if is_traceable_wrapper_subclass(param):
        for tensor in tensors_in(param):
            if tensor.untyped_storage().nbytes() >= _SMALLEST:
                yield tensor
        return
    yield param
    for tensor in _beside([*vars(param).values(), *vars(module).values()], _library(param), {id(param)}):
        shared = _storage(tensor) == _storage(param)
        if shared or (tensor.layout is torch.strided and tensor.untyped_storage().nbytes() >= _SMALLEST):
            yield tensor


def _library(param: torch.Tensor) -> str:
    return own_class_of(param).__module__.partition(".")[0]


def _beside(values: Iterable[Any], library: str, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors among ``values``, and the tensors inside objects of ``library``'s classes among ``values``."""
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value).__module__.partition(".")[0] == library and not isinstance(value, nn.Module):
            yield from _beside(getattr(value, "__dict__", {}).values(), library, seen)


def _is_dense(tensor: torch.Tensor) -> bool:
    with no_read():
        return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized and tensor.numel() > 0


def _storage(tensor: torch.Tensor) -> int:
    with no_read():
        return tensor.untyped_storage()._cdata


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the tensor's elements begin and end in its storage, in bytes."""
    first, itemsize = int(tensor.storage_offset()), tensor.element_size()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * itemsize, (last + 1) * itemsize
