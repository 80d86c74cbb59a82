"""How long a step will take, from the bytes it moves and the speeds of a machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..layout.partition import ParamSpec
from ..step.bucket_terms import BucketTerms, Traffic

_FLOPS_A_TOKEN = 6
_FLOPS_A_TOKEN_CHECKPOINTED = 8


@dataclass(frozen=True)
class Speeds:
    """A machine's, bytes and operations a second; None: not known."""

    dram: float
    """Of the host's memory, which the processes of a machine share, as the update streams it."""
    link: float | None = None
    """Of a device's link to the host, each way."""
    flops: float | None = None
    """That a device reaches in forward and backward."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step's parts; None: not known."""

    compute: float | None
    update: float
    to_host: float | None
    to_device: float | None
    tail: float
    """Of the last bucket: to the host, updated, and back."""
    overlaps: bool
    """Whether the parts run beside each other."""

    @property
    def seconds(self) -> float:
        """The whole step, of those parts that are known."""
        parts = [part for part in (self.compute, self.update, self.to_host, self.to_device) if part is not None]
        return max(parts) + self.tail if self.overlaps else sum(parts)


def predict(
    terms: BucketTerms,
    specs: Sequence[ParamSpec],
    speeds: Speeds,
    *,
    processes: int = 1,
    tokens: int | None = None,
    checkpointing: bool = False,
) -> StepTime:
    """The time of a step, by a model of ideal overlap.

    With everything behind everything else a step takes

        max(compute, update, way to the host, way to the device) + the last bucket's tail

    and their sum where nothing overlaps (``schedule="serial"``, one rank on the CPU). Update: the kernel's bytes
    (:meth:`BucketTerms.traffic`: 28 a bf16 parameter) over the bandwidth of the host's memory, which bounds it. Ways: 2
    bytes a bf16 parameter over the link's, which carries both at a time. Compute: 6 operations a parameter and token,
    2 forward and 4 backward (Kaplan et al., "Scaling Laws for Neural Language Models", section 2.1), 8 where
    activations are computed again. The ways are those of ZeRO-Offload (arXiv:2101.06840, sections 4 and 5). The
    exchange between ranks, and what the norm reads where gradients are clipped, are not in it.

    Args:
        processes: those that share the host's memory.
        tokens: of a rank's whole step.
        checkpointing: activations are computed again in backward.
    """
    whole, last = terms.traffic(specs)

    def over_link(n_bytes: float) -> float | None:
        return 0.0 if not n_bytes else None if speeds.link is None else n_bytes / speeds.link

    def update(traffic: Traffic) -> float:
        return processes * traffic.update / speeds.dram

    compute = None
    if speeds.flops is not None and tokens is not None:
        each = _FLOPS_A_TOKEN_CHECKPOINTED if checkpointing else _FLOPS_A_TOKEN
        compute = each * sum(spec.numel for spec in specs) * tokens / speeds.flops
    tail = update(last) + sum(over_link(n) or 0.0 for n in (last.to_host, last.to_device))
    return StepTime(compute, update(whole), over_link(whole.to_host), over_link(whole.to_device), tail, terms.overlaps)
