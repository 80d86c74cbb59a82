"""The residency of a model's tensors, held against what is recorded elsewhere: holds, publications, memory."""

from typing import Any

import torch

from frontends.torch.internals.private import no_read
from frontends.torch.params.dtensor import local_of
from frontends.torch.params.pending import _Pending, residency_of
from frontends.torch.params.residency import Residency


def assert_agrees(engine: Any) -> None:
    """Raise an AssertionError unless each tensor's state is the one that follows from all else that is known of it."""
    for name, tensor in (*engine.module.named_parameters(), *engine.module.named_buffers()):
        got, allowed = residency_of(tensor), _allowed(engine, tensor)
        assert got in allowed, f"{name}: {got}, expected one of {allowed}"
        assert isinstance(tensor, _Pending) == (got is not Residency.RESIDENT), name


def _allowed(engine: Any, tensor: torch.Tensor) -> set[Residency]:
    optimizer = engine.optimizer
    pipeline, record = optimizer.core._pipeline, optimizer.sharding.record_of(tensor)
    with no_read():
        values = local_of(tensor)
        has_memory = values.numel() == 0 or values.untyped_storage().nbytes() > 0
        number = values.untyped_storage()._cdata
    if record is not None:
        there = record.live.holds > 0 or record.live in record.of_model._ahead  # held, or prefetched
        assert has_memory == there or record.lasts, "a whole parameter has memory, one in shards none"
        return {Residency.SHARDED} if record.live.holds == 0 else {Residency.RESIDENT}
    if number in optimizer.components.device_memory._memories:
        assert has_memory or pipeline.parameters.released, "memory that is not released is there"
        return {Residency.RELEASED} if pipeline.parameters.released else {Residency.RESIDENT, Residency.WRITING}
    assert has_memory
    slot = optimizer.components.registration.slots.get(tensor)
    if slot is None:
        return {Residency.RESIDENT}
    if pipeline.early.holds(slot.index) and pipeline.device.world_size > 1:
        return {Residency.WRITING}  # nobody may have read it
    return {Residency.RESIDENT, Residency.WRITING}
