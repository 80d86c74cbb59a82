"""Predicts the time of a step from the bytes that it moves and the speeds of a machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..dtypes import ElementType
from ..layout.partition import ParamSpec
from .planner import Planner, Traffic

_FLOPS_A_TOKEN = 6
_FLOPS_A_TOKEN_CHECKPOINTED = 8


@dataclass(frozen=True)
class Speeds:
    """Speeds of a machine, in bytes and operations a second; None: unknown."""

    dram: float
    """The bandwidth of host memory in an update, shared by all processes of the machine."""
    link: float | None = None
    """The bandwidth of a device's link to the host, in each direction."""
    flops: float | None = None
    """Operations a second that a device reaches in forward and backward."""
    disk: float | None = None
    """The bandwidth of all disks of the machine, for reads and writes together, shared by all its processes."""
    device: float | None = None
    """The bandwidth of a device's memory, in the updates that it makes."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model, each of which takes the output of the block before it."""

    n: int
    width: int
    """Elements of a token between two blocks: the hidden size."""

    def input_bytes(self, tokens: int, dtype: ElementType) -> int:
        """Return the bytes that wait for backward in ``engine.accumulate()``: the inputs of all blocks, and the output
        of the last one.

        Args:
            tokens: of all micro-batches of a step, on one rank.
            dtype: the element type of the inputs.
        """
        return (self.n + 1) * tokens * self.width * dtype.itemsize


@dataclass(frozen=True)
class StepTime:
    """The seconds that each part of a step takes; None: unknown."""

    compute: float | None
    update: float
    to_host: float | None
    to_device: float | None
    tail: float
    """Seconds of the last bucket: the copy to the host, the update, and the copy back."""
    overlaps: bool
    """True if compute, the update and both copies run at the same time."""
    disk: float | None = 0.0
    """The seconds that reads and writes of states on a disk take."""
    on_device: float | None = 0.0
    """The seconds that the device takes for the updates that it makes, between backward and the next forward."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step, from the known parts."""
        update = max(self.update, self.disk or 0.0)  # a store reads and writes during the update in any schedule
        busy = (self.compute or 0.0) + (self.on_device or 0.0)
        parts = [part for part in (busy, update, self.to_host, self.to_device) if part is not None]
        return max(parts) + self.tail if self.overlaps else sum(parts)

    @property
    def is_known(self) -> bool:
        """True if no part is unknown, so that a step takes no longer than :attr:`seconds`."""
        return None not in (self.compute, self.to_host, self.to_device, self.disk, self.on_device)


def predict(
    planner: Planner,
    specs: Sequence[ParamSpec],
    speeds: Speeds,
    *,
    processes: int = 1,
    devices: int = 1,
    numel: int | None = None,
    tokens: int | None = None,
    checkpointing: bool = False,
    inputs: int = 0,
) -> StepTime:
    """Return the time of a step, by a model of ideal overlap.

    If all parts overlap, a step takes

        max(compute + update on the device, update on the host, disk, copy to the host, copy to the device)
        + the last bucket's tail

    If no parts overlap (``schedule="serial"``, or one rank on the CPU), a step takes the sum of all parts, except that
    the disk still overlaps the update. The parts are:

    - Compute: 6 operations for each parameter and token, 2 in forward and 4 in backward (Kaplan et al., "Scaling Laws
      for Neural Language Models", section 2.1), or 8 if activations are computed again, as ``engine.accumulate()``
      always does, divided by ``speeds.flops``.
    - Update: the bytes of the kernel (:meth:`Planner.traffic`: 28 for each bf16 parameter), divided by the bandwidth of
      host memory. The device updates the states that are in its memory, at the bandwidth of that memory, and computes
      nothing else meanwhile.
    - Disk: the bytes read and written, divided by the bandwidth of the disks.
    - Each copy: 2 bytes for each bf16 parameter, divided by the link's bandwidth. Both directions work at the same
      time. ZeRO-Offload (arXiv:2101.06840, sections 4 and 5) makes the same copies.

    The model leaves out the exchange between ranks, the memory that the norm reads, and the sums of a loop's
    micro-batches on the host.

    Args:
        specs: the trained parameters.
        processes: the number of processes that share the machine's host memory and disks.
        devices: the number of devices of a process. Each has a separate link, and carries an equal part of the bytes.
        numel: the number of elements of the model's parameters; None: the number of elements of ``specs``.
        tokens: the number of tokens of a whole step on one rank, or on each device.
        checkpointing: True if activations are computed again in backward.
        inputs: as in :meth:`Planner.traffic`.
    """
    whole, last = planner.traffic(specs, inputs=inputs)

    def over_link(n_bytes: float) -> float | None:
        return 0.0 if not n_bytes else None if speeds.link is None else n_bytes / (devices * speeds.link)

    def update(traffic: Traffic) -> float:
        return processes * traffic.update / speeds.dram

    compute = None
    if speeds.flops is not None and tokens is not None:
        again = checkpointing or planner.terms.config.layerwise
        each = _FLOPS_A_TOKEN_CHECKPOINTED if again else _FLOPS_A_TOKEN
        numel = sum(spec.numel for spec in specs) if numel is None else numel
        compute = each * numel * tokens / speeds.flops
    moved = processes * (whole.disk_read + whole.disk_write)
    disk = 0.0 if not moved else None if speeds.disk is None else moved / speeds.disk
    tail = update(last) + sum(over_link(n) or 0.0 for n in (last.to_host, last.to_device))
    ways = over_link(whole.to_host), over_link(whole.to_device)
    on_device = whole.on_device / (devices * speeds.device) if speeds.device else None if whole.on_device else 0.0
    return StepTime(compute, update(whole), *ways, tail, planner.terms.overlaps, disk, on_device)
