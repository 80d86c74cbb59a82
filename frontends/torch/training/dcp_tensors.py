"""The tensor class by which ``state_dict()`` gives a rank's part of a whole tensor to ``torch.distributed.checkpoint``
(DCP).

Stages 1 to 3 cut parameters and states over ranks where buckets end. So a rank's part is a contiguous range of
elements: the end of one row, whole rows, the beginning of another row. DCP stores boxes. By its protocol
``_Checkpointable``, DCP asks a tensor for the boxes that this process has, and for the memory of each box. A checkpoint
then has the whole tensor in boxes, however many processes have saved it and however they were sharded.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from offload_core.errors import StateError
from offload_core.layout.regions import Elements, Region

from ..internals.private import DISPATCH_ALONE, parse_to

ENDS = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Held:
    """Which elements of a whole tensor are in this process's memory, and where.

    Attributes:
        shape: the shape of the whole tensor.
        regions: ``(offset in the memory, region)`` for each region of elements. Together they fill the memory, except
            for padding.
        check: called before the elements are saved. It raises :class:`StateError` if the elements are not of the same
            step as the parameters that are saved with them.
    """

    shape: tuple[int, ...]
    regions: tuple[tuple[int, Region], ...]
    check: Callable[[], object] = field(compare=False)

    @classmethod
    def of(cls, elements: Elements, runs: list[tuple[int, int, int]], check: Callable[[], object]) -> "Held":
        """Return the elements of these ranges.

        Args:
            elements: the parameter's elements, in the core's order.
            runs: ``(start in elements, offset in the memory, number of elements)`` of each range.
        """
        found = [(at + place, region) for start, at, n in runs for place, region in elements.regions(start, n)]
        return cls(tuple(elements.shape), tuple(found), check)

    @cached_property
    def boxes(self) -> dict[tuple[int, ...], tuple[int, ENDS, tuple[int, ...]]]:
        """Maps the index of a box's first element in the whole tensor to ``(offset, ends, order)``: the box's offset in
        the memory, its ``(begin, end)`` in each dimension, and the order of dimensions in which the memory lists its
        elements."""
        every = tuple(range(len(self.shape)))
        return {
            tuple(low for low, _ in ends): (at + place, ends, region.order or every)
            for at, region in self.regions
            for place, ends in region.boxes()
        }

    def view(self, local: torch.Tensor, first: tuple[int, ...]) -> torch.Tensor:
        """Return the memory of one box, in the box's shape.

        Args:
            local: the whole memory, one-dimensional.
            first: the index of the box's first element in the whole tensor.
        """
        at, ends, order = self.boxes[first]
        sizes = [ends[d][1] - ends[d][0] for d in order]
        numel = 1
        for size in sizes:
            numel *= size
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return local[at : at + numel].view(sizes).permute(inverse)

    def __deepcopy__(self, memo: Any) -> "Held":
        return self

    def __str__(self) -> str:
        n = sum(region.numel for _, region in self.regions)
        return f"{n:,} elements of a tensor of shape {list(self.shape)}"


_TWINS = {torch.ops.aten.clone.default, torch.ops.aten.zeros_like.default, torch.ops.aten.empty_like.default,
          torch.ops.aten.new_empty.default}  # fmt: skip
_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class PartOfWhole(torch.Tensor):
    """A rank's part of a tensor. It has the shape of the whole tensor, and memory for this rank's elements only.

    DCP saves and loads it. ``load_state_dict`` takes it on the rank that it came from. ``clone()`` returns another part
    with the same values. ``copy.deepcopy`` returns a plain one-dimensional tensor of this rank's elements. Any other
    function raises :class:`StateError`.

    Args:
        local: this rank's elements, one-dimensional. Their memory is shared, not copied.
        held: which elements they are.
    """

    __torch_function__ = DISPATCH_ALONE  # type: ignore[assignment]
    _local: torch.Tensor
    _held: Held

    @staticmethod
    def __new__(cls, local: torch.Tensor, held: Held) -> "PartOfWhole":
        part = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=local.dtype, device=local.device)
        part._local = local
        part._held = held
        return part

    @property
    def held(self) -> Held:
        """Which elements of the whole tensor this part has."""
        return self._held

    @property
    def local(self) -> torch.Tensor:
        """This rank's elements, one-dimensional, in the order of the rank's memory. The memory is shared, not
        copied."""
        return self._local

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, cls):
            if func in _SAME:
                return cls(first._local, first._held)
            if func in _TWINS:  # how DCP copies what async_save writes
                twin = first._local.clone() if func is torch.ops.aten.clone.default else torch.zeros_like(first._local)
                return cls(twin, first._held)
            if func is torch.ops.aten.copy_.default and isinstance(args[1], cls) and args[1]._held == first._held:
                first._local.copy_(args[1]._local)
                return first
        part = next(each for each in (*args, *(kwargs or {}).values()) if isinstance(each, cls))
        raise StateError(
            f"{func} of a rank's part, {part._held}; expected torch.distributed.checkpoint or load_state_dict(), which "
            "take it as it is. In state_dict() of several ranks, optimizer.state[p] has the same elements as a "
            "one-dimensional tensor, and whole_states(p) and torch_state_dict() gather the whole tensor"
        )

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return this part itself, which stays on the host as other states do, or with ``copy=True`` a copy.

        Raises:
            StateError: another element type is asked for.
        """
        if parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})[1] in (None, self.dtype):
            return self.clone() if kwargs.get("copy") else self
        return super().to(*args, **kwargs)

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if self.device.type == "cpu" else type(self)(self._local.cpu(), self._held)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = copy.deepcopy(self._local, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise :class:`StateError`: other libraries pickle only rank 0's states, and no rank could continue from
        them."""
        raise pickled()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._held}, {self.dtype})"

    # --- torch.distributed._checkpointable._Checkpointable --------------------------------------------

    def __create_chunk_list__(self) -> list[Any]:
        """Return the boxes that this rank has. DCP calls this for a load."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        boxes = self._held.boxes.values()
        found = [([low for low, _ in ends], [high - low for low, high in ends]) for _, ends, _ in boxes]
        if not self.numel():  # every rank has all of it, and one of them writes it
            found = [([0] * len(self._held.shape), [*self._held.shape])]
        return [ChunkStorageMetadata(torch.Size(first), torch.Size(sizes)) for first, sizes in found]

    def __create_write_items__(self, name: str, value: object) -> list[Any]:
        """Return the boxes that this rank writes under this name.

        Raises:
            StateError: the elements are not of the same step as the parameters.
        """
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self._held.check()
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Return the memory of one box of :meth:`__create_chunk_list__`. DCP reads this memory to save, and writes to
        it to load."""
        if not self.numel():
            return self._local.view(self._held.shape)
        return self._held.view(self._local, tuple(index.offset))


def pickled() -> StateError:
    """Return the error for pickling a rank's part of states."""
    return StateError(
        "pickling (torch.save) of optimizer states of which each rank holds a part: a file for all ranks would "
        "lack the others' parts; expected engine.save_checkpoint(folder), dcp.save (torch.distributed.checkpoint), "
        "OffloadCallback (Trainer), save_in_shards (Accelerate), OffloadStrategy (Lightning), or, where every rank's "
        "part is kept, copies: copy.deepcopy(optimizer.state_dict())"
    )
