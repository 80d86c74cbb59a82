"""The pool's threads, and through them the memory that they touch first, near the devices that they work for."""

from collections.abc import Collection, Sequence
from functools import partial

from ..config.options import OffloadConfig
from ..native import kernels
from ..support import processors
from ..support.topology import node_of_device
from .pinning import Driver


def bind_threads_near(config: OffloadConfig, ordinals: Collection[int] = (), drivers: Sequence[Driver] = ()) -> None:
    """Bind the pool's workers to this process's share of the processors, unless ``config`` says not to.

    Call it for each engine, before its memory is allocated and before ``config.threads`` is read. The pool is one for
    the process, and so is the share: it is near the devices of all engines so far.

    Args:
        ordinals: the engine's devices, by their numbers among those that this process sees.
        drivers: those that may know the devices. The framework has started theirs.
    """
    if not config.bind_threads:
        return
    if ordinals:
        processors.train_on(ordinals, partial(node_near, drivers))
    share = processors.share()
    kernels.bind_workers(share.cpus if config.threads <= len(share.cpus) else sorted(share.allowed))


def node_near(drivers: Sequence[Driver], ordinal: int) -> int | None:
    """The memory node of the device that a driver counts as this one; None: unknown."""
    addresses = (driver.pci_address(ordinal) for driver in drivers)
    address = next((address for address in addresses if address is not None), None)
    return None if address is None else node_of_device(address)
