"""Finds tensors that share memory. Training one such tensor would leave the others with old values."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Set

import numpy as np
import torch
from torch import nn

from offload_core.errors import ParameterError

from ..internals.private import no_read

Named = tuple[str, torch.Tensor]
_TRIED = 100_000
"""The maximal number of steps of the exact search for elements that two tensors share. If the search needs more, the
tensors count as overlapping."""


def tensors_of(model: nn.Module | None) -> Iterator[Named]:
    """Yield the name and the tensor of each parameter, each buffer and each plain tensor attribute of the model's
    modules; nothing for ``None``."""
    for prefix, module in () if model is None else model.named_modules():
        own = {**module._parameters, **module._buffers, **module.__dict__}
        for name, tensor in own.items():
            if isinstance(tensor, torch.Tensor):
                yield f"{prefix}.{name}" if prefix else name, tensor


def check_disjoint(trained: Iterable[Named], others: Iterable[Named]) -> None:
    """Raise :class:`ParameterError` if a trained parameter shares elements with another tensor.

    One tensor under several names (tied weights) is no overlap, and neither are disjoint views of one memory.
    """
    known = {tensor: name for name, tensor in trained}
    of_trained = {*known}
    for name, tensor in others:
        known.setdefault(tensor, name)
    by_storage = defaultdict(list)
    with no_read():
        for tensor, name in known.items():
            if (address := _storage_of(tensor)) is not None:
                by_storage[address].append((tensor.data_ptr(), name, tensor))
        for tensors in by_storage.values():
            if len(tensors) > 1:
                _check_storage(sorted(tensors, key=lambda entry: entry[:2]), of_trained)


def _check_storage(tensors: list[tuple[int, str, torch.Tensor]], trained: Set[torch.Tensor]) -> None:
    reaching: list[tuple[int, str, torch.Tensor]] = []
    for start, name, tensor in tensors:
        reaching = [entry for entry in reaching if entry[0] > start]
        for _, other_name, other in reaching:
            if not trained.isdisjoint((tensor, other)) and _share_elements(tensor, other):
                first, second = (other_name, name) if other in trained else (name, other_name)
                raise ParameterError(
                    f"parameter {first!r} and {second!r} lie over one memory; expected each to have its own, as "
                    "training the first would leave old values in the second: make them one nn.Parameter (second = "
                    "first), which is trained as one, or give the second memory of its own (.clone())"
                )
        reaching.append((start + _extent(tensor), name, tensor))


def _storage_of(tensor: torch.Tensor) -> int | None:
    """Return the address of the tensor's storage. None: the tensor has no dense elements in memory (it is sparse, on
    the meta device, empty, released, or a wrapper of other tensors)."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.numel() == 0:
        return None
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr() if storage.nbytes() else None
    except (NotImplementedError, RuntimeError):  # a wrapper's values are in other tensors
        return None


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the tensor's first element to the end of its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return np.shares_memory(_Addresses(one), _Addresses(other), max_work=_TRIED)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """The addresses of a tensor's elements, as a NumPy array whose memory is never read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        itemsize = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(itemsize * stride for stride in tensor.stride()),
            "typestr": f"|V{itemsize}",
        }
