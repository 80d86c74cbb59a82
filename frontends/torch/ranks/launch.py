"""Joining the ranks that torchrun, ``srun`` or ``mpirun`` started."""

import ipaddress
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from offload_core.errors import CollectiveError, ConfigError
from offload_core.support.launchers import Launched

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def init_process_group(
    device_type: str | None = None, *, backend: str | None = None, timeout: timedelta | None = None
) -> torch.device:
    """Join the other ranks, and return the device that is this one's. A process that is alone joins nobody.

    As ``torch.distributed.init_process_group()``, which it calls, but for what that leaves to its caller: under Slurm
    and Open MPI torchrun's variables are set, for other libraries too; a GPU is made the current one; among several
    machines gloo is given the network interface on the way to rank 0 (unless ``GLOO_SOCKET_IFNAME`` names one), where
    it would take what the host's name resolves to.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``; None: GPUs where torch sees any.
        backend: None: nccl for GPUs, gloo for CPUs.
        timeout: how long ranks wait for each other before they take one for lost; None: torch's, 10 minutes with nccl
            and 30 with gloo.

    Raises:
        ConfigError: the environment is set in part, or the ranks of this machine have no device each.
        CollectiveError: the others did not come.
    """
    launched = Launched.read()
    device = device_of(launched, device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launched.world_size == 1:
        return device
    os.environ.update(launched.variables())
    if launched.several_machines and GLOO_INTERFACE not in os.environ:
        os.environ[GLOO_INTERFACE] = interface_towards(launched)
    try:
        dist.init_process_group(backend or ("nccl" if device.type == "cuda" else "gloo"), timeout=timeout)
    except (ValueError, RuntimeError) as error:
        host, port = launched.meeting_point()
        raise CollectiveError(
            f"rank {launched.rank} of {launched.world_size} did not meet the others at {host}, port {port} ({error}); "
            "expected all of them to be started and that machine and port to be reached from all"
        ) from error
    return device


def device_of(launched: Launched, device_type: str | None = None) -> torch.device:
    """A rank's own: the GPU of its place on the machine, or the CPU.

    Raises:
        ConfigError: there are no GPUs, or fewer than ranks on this machine.
    """
    if device_type not in (None, "cpu", "cuda"):
        raise ConfigError(f"device_type: got {device_type!r}, expected 'cuda', 'cpu' or None for either")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device_type == "cuda" and not gpus:
        raise ConfigError("device_type: got 'cuda', and torch sees no CUDA device; expected one, or 'cpu'")
    if device_type == "cpu" or not gpus:
        return torch.device("cpu")
    if launched.launcher == "Slurm" and gpus == 1:  # --gpus-per-task: each sees its own alone
        return torch.device("cuda", 0)
    if launched.local_world_size > gpus:
        raise ConfigError(
            f"{launched.local_world_size} ranks on this machine and {gpus} CUDA devices; expected at most one rank a "
            "device: start fewer, or take the CPU"
        )
    return torch.device("cuda", launched.local_rank)


def interface_towards(launched: Launched) -> str:
    """The network interface of this machine by which rank 0's machine is reached, or reaches the others.

    Raises:
        ConfigError: rank 0's machine has no address, or none that others could reach.
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
    import psutil  # long to import

    for interface, addresses in psutil.net_if_addrs().items():
        if mine in (address.address.partition("%")[0] for address in addresses):
            return interface
    raise ConfigError(f"MASTER_ADDR {host!r}: no interface has {mine}, from where it is reached; {remedy}")


def _own_address(host: str, port: int) -> str:
    """This machine's, as ``host`` sees it."""
    unreached = OSError("it has no address")
    for family, kind, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as towards:
            try:
                towards.connect(place)  # a datagram's: nothing is sent
            except OSError as error:
                unreached = error
                continue
            return str(towards.getsockname()[0]).partition("%")[0]
    raise unreached
