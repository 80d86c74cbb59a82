"""Joining the ranks that torchrun, ``srun`` or ``mpirun`` started."""

import ipaddress
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from offload_core.device.exchange_sizes import REFUSED_DEVICES
from offload_core.errors import CollectiveError, ConfigError, StateError
from offload_core.support.last_words import say_error_last
from offload_core.support.launchers import Launched

from ..params.tensors import usable_accelerator

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def init_process_group(
    device_type: str | None = None, *, backend: str | None = None, timeout: timedelta | None = None
) -> torch.device:
    """Join the other ranks, and return this rank's device. A process that was started alone is a group of one rank.

    This calls ``torch.distributed.init_process_group()``, and does what that leaves to its caller. Under Slurm and
    Open MPI it sets torchrun's variables, which other libraries read, too. It makes the rank's accelerator the current
    one. Between several machines it gives gloo the network interface that leads to rank 0, unless
    ``GLOO_SOCKET_IFNAME`` names one; gloo alone would use the address that the host's name resolves to.

    Args:
        device_type: the accelerator's (``"cuda"``, ``"xpu"``, …) or ``"cpu"``; None: the accelerator if torch sees one.
        backend: None: the device's own (nccl, xccl, …), gloo for CPUs.
        timeout: the time that ranks wait for each other before they report one as lost; None: torch's, 10 minutes with
            nccl and 30 with gloo.

    Raises:
        ConfigError: the launcher's variables are incomplete, or this machine has fewer devices than ranks.
        CollectiveError: the ranks did not meet.
        StateError: this process is in a process group already.
    """
    if dist.is_initialized():
        raise StateError(
            "init_process_group: this process is in a process group already; expected one call: end the earlier group "
            "with torch.distributed.destroy_process_group()"
        )
    say_error_last()
    launched = Launched.read()
    device = device_of(launched, device_type)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    backend = backend or dist.get_default_backend_for_device(device)
    if launched.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return device
    os.environ.update(launched.variables())
    if launched.several_machines and GLOO_INTERFACE not in os.environ:
        os.environ[GLOO_INTERFACE] = interface_towards(launched)
    try:
        dist.init_process_group(backend, timeout=timeout)
    except (ValueError, RuntimeError) as error:
        host, port = launched.meeting_point()
        raise CollectiveError(
            f"rank {launched.rank} of {launched.world_size} did not meet the others at {host}, port {port} ({error}); "
            "expected all of them to be started, that machine and port to be reached from all, and the port to be free "
            "there (MASTER_PORT)"
        ) from error
    say_error_last()
    return device


def device_of(launched: Launched, device_type: str | None = None) -> torch.device:
    """The rank's device: the accelerator of its local rank, or the CPU.

    Raises:
        ConfigError: there are no accelerators, or fewer than ranks on this machine.
    """
    accelerator = usable_accelerator()
    if device_type in REFUSED_DEVICES:
        why = REFUSED_DEVICES[device_type]
        raise ConfigError(f"device_type: got {device_type!r}: {why}; expected 'cpu' or another accelerator")
    if device_type not in (None, "cpu", accelerator and accelerator.type):
        seen = f"{accelerator.type!r} or 'cpu'" if accelerator else "'cpu', the only device that torch sees here"
        raise ConfigError(f"device_type: got {device_type!r}, expected {seen}")
    if device_type == "cpu" or accelerator is None:
        return torch.device("cpu")
    devices = torch.accelerator.device_count()
    if launched.launcher == "Slurm" and devices == 1:  # --gpus-per-task: each rank sees only its own
        return torch.device(accelerator.type, 0)
    if launched.local_world_size > devices:
        raise ConfigError(
            f"{launched.local_world_size} ranks on this machine and {devices} {accelerator.type} devices; expected at "
            "most one rank a device: start fewer, or take the CPU"
        )
    return torch.device(accelerator.type, launched.local_rank)


def interface_towards(launched: Launched) -> str:
    """The network interface of this machine that leads to rank 0's machine; on that machine, to the others.

    Raises:
        ConfigError: rank 0's machine has no address, or none that others can reach.
    """
    host, port = launched.meeting_point()
    remedy = f"set {GLOO_INTERFACE} to the network interface that leads to the other machines (see `ip address`)"
    try:
        mine = _own_address(host, port)
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR {host!r} is not to be reached from here ({error}); {remedy}") from error
    if ipaddress.ip_address(mine).is_loopback:
        raise ConfigError(
            f"MASTER_ADDR {host!r} is {mine} here, where no other machine finds it; {remedy}, or LOCAL_RANK and "
            "LOCAL_WORLD_SIZE where all ranks run on this machine"
        )
    import psutil  # its import is slow

    for interface, addresses in psutil.net_if_addrs().items():
        if mine in (address.address.partition("%")[0] for address in addresses):
            return interface
    raise ConfigError(f"MASTER_ADDR {host!r}: no interface has {mine}, from where it is reached; {remedy}")


def _own_address(host: str, port: int) -> str:
    """The address of this machine on the route to ``host``."""
    unreached = OSError("it has no address")
    for family, kind, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as towards:
            try:
                towards.connect(place)  # of a datagram socket: nothing is sent
            except OSError as error:
                unreached = error
                continue
            return str(towards.getsockname()[0]).partition("%")[0]
    raise unreached
