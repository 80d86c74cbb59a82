"""DeepSpeed on the simulated accelerator of the tests: the device that DeepSpeed needs, and a group of one rank."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.support import simulated

_BACKEND = "alone"


class _Accelerator(CPU_Accelerator):
    """DeepSpeed's accelerator. Kernels for the host are the CPU's; streams, copies and bytes are the device's."""

    _torch_pins_host_memory = True

    def __init__(self) -> None:
        super().__init__()
        self._name = simulated.NAME
        self._communication_backend_name = _BACKEND

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return simulated.NAME if device_index is None else f"{simulated.NAME}:{device_index}"

    def device(self, device_index: int = 0) -> Any:
        return simulated.device(device_index)

    def set_device(self, device_index: int) -> None:
        torch.accelerator.set_device_index(device_index)

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        return 1

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == simulated.NAME

    def synchronize(self, device_index: int | None = None) -> None:
        torch.accelerator.synchronize()

    @property
    def Stream(self) -> Any:
        return simulated.Stream

    @property
    def Event(self) -> Any:
        return lambda **options: simulated.Event()

    def stream(self, stream: torch.Stream) -> Any:
        return stream  # a context

    def current_stream(self, device_index: int | None = None) -> torch.Stream:
        return simulated.current_stream()

    default_stream = current_stream

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        return tensor.pin_memory()

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
        return tensor.new_empty(shape, pin_memory=True)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return 0. With memory to spare, DeepSpeed has all parameters on the device twice while it flattens them."""
        return 0

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.accelerator.memory_allocated()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.accelerator.max_memory_allocated()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Keep the statistics: they are read at the end of the run."""

    memory_reserved = memory_cached = memory_allocated
    max_memory_reserved = max_memory_cached = max_memory_allocated
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


class _Done(dist.Work):
    def __init__(self) -> None:
        super().__init__()

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Alone(dist.ProcessGroup):
    """A group of one rank: its results are its own data."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        if size != 1:
            raise ValueError(f"a group of {size} ranks, expected one")
        super().__init__(rank, size)
        self._store = store

    def name(self) -> str:
        return _BACKEND

    def getBackendName(self) -> str:
        return _BACKEND

    @property
    def group_name(self) -> str:
        """The group's name in torch, which does not tell it to groups that are written in Python."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def get_group_store(self) -> Any:
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _in_place(self, *arguments: Any, **options: Any) -> dist.Work:
        return _Done()

    broadcast = allreduce = allreduce_coalesced = reduce = barrier = _in_place

    def allgather(self, received: Any, sent: Any, options: Any = None) -> dist.Work:
        for parts, whole in zip(received, sent, strict=True):
            parts[0].copy_(whole)
        return _Done()

    def reduce_scatter(self, received: Any, sent: Any, options: Any = None) -> dist.Work:
        for part, wholes in zip(received, sent, strict=True):
            part.copy_(wholes[0])
        return _Done()

    def all_gather_single(self, received: Any, sent: Any, *options: Any) -> dist.Work:
        received.view(-1).copy_(sent.view(-1))
        return _Done()

    # The first two are their names before torch 2.13.
    _allgather_base = _reduce_scatter_base = reduce_scatter_single = alltoall_base = all_gather_single

    def allgather_into_tensor_coalesced(self, received: Any, sent: Any, options: Any = None) -> dist.Work:
        for to, of in zip(received, sent, strict=True):
            to.copy_(of)
        return _Done()

    reduce_scatter_tensor_coalesced = allgather_into_tensor_coalesced


def install() -> None:
    """Make the simulated device DeepSpeed's accelerator in this process, which is the only rank."""
    simulated.load()
    set_accelerator(_Accelerator())
    dist.Backend.register_backend(_BACKEND, _Alone, devices=["cpu", simulated.NAME])
    dist.init_process_group(_BACKEND, rank=0, world_size=1, store=dist.HashStore())
    torch.Tensor.data = property(_data.__get__, _set_data)  # type: ignore[assignment, method-assign]


_data = torch.Tensor.data


def _set_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Set ``tensor.data``, also between the CPU and the device: torch allows this only for the backends that it knows,
    and DeepSpeed's ``offload_states`` needs it."""
    if tensor.device.type == other.device.type:
        _data.__set__(tensor, other)
    else:
        torch.ops.simulated.set_data(tensor, other.detach())
