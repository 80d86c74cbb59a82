"""Decides which buffers each bucket needs, and their sizes, from the configuration, the device and the parameter sizes.

``LocalBuckets`` allocates by these rules and ``Planner`` plans by them, so that plans and allocations agree.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..config.options import OffloadConfig
from ..config.state_formats import SPLIT, Master, StateFormat
from ..device.protocols import Arrival, DeviceTerms
from ..disk.scratch import aligned
from ..disk.shards import SLOTS
from ..dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, ElementType
from ..layout.partition import Bucket, Kinds, ParamSpec, kinds_of, planned
from ..memory.pinning import ways_to_pin
from ..rules import MASTER, Rule
from ..states import STORES
from ..states.on_device import StatesOnDevice
from ..support.worker import Background, Inline

STAGING = "staging"
MATRICES = "matrices in an update"
DIRECTIONS = "directions"
"""The name in plans of the host buffers for directions, which update rules with a device kernel need."""
GRADIENTS_ON_HOST = "gradients on the host"
GRADIENT_SLOTS = 4
"""The number of host buffers that buckets share for their gradients, if they share any: one for a bucket that is
updated, two for buckets in flight, and one more, so that no bucket waits."""
DeviceBudget = int | float | None
"""The device's memory for states of new buckets: a number of bytes, a share of their bytes (a float), or None, all."""


class BucketTerms:
    """The rules for the buffers, the states and the schedule of one process's buckets.

    These rules do not change. Some methods take the sizes of existing buffers, which :class:`Allocated` records.

    Args:
        scaled: True if losses are scaled.
    """

    def __init__(self, config: OffloadConfig, device: DeviceTerms, *, scaled: bool = False) -> None:
        self.config = config
        self.device = device
        self._scaled = scaled
        self.rule = config.rule()
        self.store_kind = STORES[config.offload_optimizer or "cpu"]
        """The class of the store that keeps the states that are not on the device."""
        self.tiered = config.keeps_states_on_device and not device.addressable
        """True if states may be in the device's memory."""
        asked = config.device_states_bytes
        self.device_budget: DeviceBudget = asked if isinstance(asked, int | float) else 0
        """The device's memory that states may take."""
        if config.offload_optimizer is None:
            self.device_budget = None
        self.direct = device.addressable and device.world_size == 1
        """True if there is one rank and its tensors are host memory. Kernels then read gradients and write parameters
        in place, without a copy."""
        self.gradients_in_place = self.direct or device.sizes.gradients_on_host
        """True if kernels read gradients in memory that is not the bucket's, without a copy."""
        self.micro_steps = 1 if config.layerwise else config.gradient_accumulation_steps
        """The number of times in a step that gradients leave the device: once if it sums those of all micro-batches."""
        self.sums = self.micro_steps > 1 or device.world_size > 1
        """True if gradients are summed on the host, in fp32."""
        self.shards_on_disk = config.offload_param == "nvme"
        """True if the store keeps the shards of partitioned parameters on disk, with their states."""
        self.host_shards = device.addressable or config.offload_param is not None
        """True if the shards of partitioned parameters are in host memory or on disk, not on the device."""
        self.ways_to_pin = ways_to_pin(device.pinning, config.pin_memory)
        """The ways to pin host memory for the device, in the order in which they are tried."""
        self.worker = Inline if self.direct or config.schedule == "serial" else Background
        """The class of the worker that runs the tasks of a step."""
        self.examines = _examines(config, device, scaled)
        """True if a step examines all gradients before it updates any state: for clipping, or for an inf or a NaN."""
        self.sends_early = config.update_in_backward and config.schedule == "overlap"
        """True if parameters may be written in place, or sent to the device, before their step."""
        if self.examines and (self.direct or config.stage == 3):  # a parameter that was written in place is lost
            self.sends_early = False
        self.updates_early = self.sends_early and not self.examines
        """True if an early send of parameters also updates their states, so that both are always of one step."""
        self.lends_gradient_memory = self.updates_early and not self.gradients_in_place and self.micro_steps == 1
        """True if the gradients of all buckets share a few host buffers (``GRADIENT_SLOTS``), because a bucket's update
        follows as soon as its gradients have arrived."""
        self.host_budget = self.store_kind.host_budget(config)
        """The bytes of host memory that states may take if the store can also keep states on disk; None: all free
        memory."""
        self.reads_blocks = config.schedule == "delayed" or (self.sends_early and not self.updates_early)
        """True if parameters may be written at a moment at which their states do not change. States on disk are then
        also read to a separate copy."""

    def shard_slots(self, trained: Kinds, frozen: Kinds, existing: tuple[int, int]) -> tuple[int, int]:
        """Return the slots that existing and new parameters need for shards in flight from disk: ``(number of slots,
        bytes of each slot)``.

        Args:
            trained: the kinds of the new trained parameters' buckets.
            frozen: the kinds of the new frozen parameters' buckets.
            existing: ``(number of slots, bytes of each slot)`` of existing parameters.
        """
        if not self.shards_on_disk:
            return 0, 0
        n, size = existing
        read = [(more, self.bytes_to_gather(bucket)) for bucket, more in trained if bucket.partitioned]
        read += [
            (more, aligned(bucket.shard_numel * bucket.dtype.itemsize)) for bucket, more in frozen if bucket.partitioned
        ]
        for more, n_bytes in read:
            n, size = min(n + more, SLOTS), max(size, n_bytes)
        return n, size

    def bytes_to_gather(self, bucket: Bucket) -> int:
        """Return the bytes that each gathering of the bucket's parameter reads from disk; 0 if the parameter is not on
        disk."""
        if not self.in_store(bucket):
            return 0
        master = self.state_formats(bucket)[MASTER]
        dtype = bucket.dtype if master is SPLIT else master.values  # master weights are rounded after the read
        return aligned(bucket.shard_numel * dtype.itemsize)

    def state_bytes(self, bucket: Bucket) -> int:
        """Return the bytes that the states of a process's shards of a bucket take in the store's own memory, such as a
        disk."""
        numel = len(self.device.ranks) * bucket.shard_numel
        return sum(self.store_kind.n_bytes(format, numel) for format in self.state_formats(bucket).values())

    def split(self, kinds: Kinds, budget: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Split the states of new buckets into states in host memory and states in the store's own memory, such as a
        disk.

        Args:
            kinds: the kinds of the new buckets.
            budget: the bytes of host memory that states may take, in addition to the host memory for updates.

        Returns:
            Two lists: states in host memory, and states in the store's own memory. Each has, for each kind in order,
            ``(bytes of a bucket's states, number of buckets)``.
        """
        blocks = [(self.state_bytes(bucket), n) for bucket, n in kinds]
        kept = self.store_kind.kept_on_host(budget, blocks)
        stay = [(size, m) for (size, _), m in zip(blocks, kept, strict=True)]
        return stay, [(size, n - m) for (size, n), m in zip(blocks, kept, strict=True)]

    def on_device(self, buckets: Sequence[Bucket], budget: DeviceBudget) -> frozenset[int]:
        """Return the indices of the new buckets whose states are in the device's memory: as many as there is room for,
        in the order of forward. A share is met as nearly as whole buckets can.

        Args:
            budget: the device's memory that their states may take.
        """
        if not self.tiered:
            return frozenset()
        n_bytes = list(map(self.device_state_bytes, buckets))
        found, left = [], math.inf if budget is None else budget * sum(n_bytes) if isinstance(budget, float) else budget
        slack = 2 if isinstance(budget, float) else 1  # a bucket of which half has room brings a share nearer
        for bucket, needed in zip(buckets, n_bytes, strict=True):
            if needed <= slack * left:
                found.append(bucket.index)
                left -= needed
        return frozenset(found)

    def device_state_bytes(self, bucket: Bucket) -> int:
        """Return the bytes that the states of a process's shards of a bucket take in the device's memory."""
        numel = len(self.device.ranks) * bucket.shard_numel
        return sum(StatesOnDevice.n_bytes(format, numel) for format in self.state_formats(bucket).values())

    def device_sum_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of the device's memory for sums of a bucket's gradients, if its states are there."""
        return self.buffer_bytes(bucket) if self.sums else 0

    def staged(self, buckets: Sequence[Bucket], there: Collection[int]) -> list[Bucket]:
        """Return the buckets that pass through staging.

        Args:
            there: the indices of the buckets whose states are in the device's memory.
        """
        through_host = self.device.world_size > 1 and self.device.sizes.through_host
        return [bucket for bucket in buckets if through_host or bucket.index not in there]

    def tiers(self, specs: Sequence[ParamSpec], budget: DeviceBudget) -> tuple[Kinds, Kinds, Kinds]:
        """Return the kinds of the buckets of ``specs`` whose states are in the device's memory, the kinds of all other
        buckets, and the kinds of the buckets that pass through staging.

        Args:
            budget: as in :meth:`on_device`.
        """
        if not self.tiered:
            return (), self.kinds(specs), self.kinds(specs)
        buckets = self.cut(specs)
        there = self.on_device(buckets, budget)
        mine, rest = ([b for b in buckets if (b.index in there) is which] for which in (True, False))
        return kinds_of(mine), kinds_of(rest), kinds_of(self.staged(buckets, there))

    def with_(self, **fields: Any) -> "BucketTerms":
        """Return a copy of these rules in which the settings ``fields`` of the configuration are replaced."""
        return BucketTerms(replace(self.config, **fields), self.device, scaled=self._scaled)

    # --- small decisions, each made here only --------------------------------------------------------

    def cut(self, specs: Sequence[ParamSpec]) -> Sequence[Bucket]:
        """Return the buckets of ``specs``, built as if ``specs`` were all parameters."""
        return self._planned(specs)[0]

    def kinds(self, specs: Sequence[ParamSpec]) -> Kinds:
        """Return the kinds of the buckets of ``specs``. Buckets of one kind take the same memory."""
        return self._planned(specs)[1]

    def _planned(self, specs: Sequence[ParamSpec]) -> tuple[Sequence[Bucket], Kinds]:
        config = self.config
        return planned(
            tuple(specs),
            world_size=self.device.world_size,
            bucket_numel=config.reduce_bucket_size,
            block=config.state_block,
        )

    def rule_of(self, alike: Bucket | ParamSpec) -> Rule:
        """Return the update rule of a bucket, or of a parameter."""
        return alike.rule or self.rule

    def state_formats(self, bucket: Bucket) -> dict[str, StateFormat]:
        """Return the format of each state of a bucket, by the state's name. If the parameters are their own master
        weights, there is no state ``"master"``.

        Master weights in fp32 are split (SPLIT) if the parameters are partitioned and in bfloat16, and are either on
        disk, or on the host with a store that supports SPLIT. Only this package writes to such parameters.
        """
        formats = dict(self.config.state_formats(bucket.dtype, self.rule_of(bucket)))
        if self.in_store(bucket):
            if bucket.dtype is SPLIT.upper is not formats[MASTER].values:
                formats[MASTER] = SPLIT
            return formats
        if self.config.schedule == "delayed" or (self.sends_early and not self.updates_early):
            return formats  # a parameter and its master weight may be of different steps
        in_place = self.host_shards if bucket.partitioned else self.device.updates_in_place
        if in_place and bucket.dtype is formats[MASTER].values:
            del formats[MASTER]
        elif bucket.partitioned and self.config.offload_param == "cpu" and bucket.dtype is SPLIT.upper:
            formats[MASTER] = SPLIT if self.store_kind.holds(SPLIT) else formats[MASTER]
        return formats

    def in_store(self, bucket: Bucket) -> bool:
        """True if the store keeps the bucket's parameter on disk, with its states."""
        return bucket.partitioned and self.shards_on_disk

    def master(self, bucket: Bucket) -> Master:
        """Return where the bucket's master weights are: separate, in the parameter, or stored with the parameter."""
        return Master.WITH_PARAMETER if self.in_store(bucket) else Master.of(self.state_formats(bucket))

    @property
    def overlaps(self) -> bool:
        """True if copies, reduction and the update run at the same time as the device's work."""
        return self.worker.is_asynchronous

    @property
    def depth(self) -> int:
        return self.worker.depth

    @property
    def staging_slots(self) -> int:
        ways = 2 if self.sends_early else 1  # copies to the host and back at the same time, or one after the other
        return ways * self.device.sizes.staging_slots * self.depth

    @property
    def accumulates(self) -> bool:
        return self.sums and self.device.world_size == 1

    @property
    def has_buffer(self) -> bool:
        return self.sums or not self.gradients_in_place

    def comm_dtype(self, bucket: Bucket) -> ElementType:
        """Return the element type in which gradients travel: fp32 if they are sums over micro-batches."""
        if self.config.layerwise:
            return FLOAT32
        asked = self.config.communication_dtype
        return bucket.dtype if asked is None or self.device.world_size == 1 else BY_NAME[asked]

    def in_flight_bytes(self, bucket: Bucket) -> int:
        """Return the bytes that a bucket in flight takes on the device, in addition to gradients and parameters."""
        return self.device.sizes.in_flight_bytes(bucket, self.comm_dtype(bucket))

    def buffer_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of the bucket's gradients on the host."""
        return len(self.device.ranks) * bucket.shard_numel * self.buffer_dtype(bucket).itemsize

    def gradient_slot_bytes(self, kinds: Kinds, existing: int = 0) -> int | None:
        """Return the size in bytes of one shared gradient buffer: the largest bucket's gradients on the host.

        New and existing buckets share ``GRADIENT_SLOTS`` such buffers. Return None if the new buckets share no buffers,
        because :attr:`lends_gradient_memory` is False or shared buffers would take no less memory. Each new bucket then
        has a separate buffer or needs no buffer.

        Args:
            kinds: the kinds of the new buckets.
            existing: the size in bytes of one existing shared buffer; 0: no shared buffer exists.
        """
        if not self.lends_gradient_memory:
            return None
        sizes = [(self.buffer_bytes(bucket), n) for bucket, n in kinds]
        largest = max([existing, *(size for size, _ in sizes)])
        private = sum(n * size for size, n in sizes)
        return largest if GRADIENT_SLOTS * (largest - existing) < private else None

    def buffer_dtype(self, bucket: Bucket) -> ElementType:
        return FLOAT32 if self.sums else self.device.sizes.arrival(self.comm_dtype(bucket)).dtype

    def may_arrive_as(self, bucket: Bucket, buffer: ElementType) -> bool:
        """True if the device can copy the bucket's gradients directly to a host buffer of element type ``buffer``,
        without a sum or a cast on the host."""
        return not self.gradients_in_place and self.device.sizes.arrival(self.comm_dtype(bucket)) == as_it_stays(buffer)

    def buffer_is_pinned(self, bucket: Bucket) -> bool:
        """True if the bucket's gradient buffer is pinned, because the device copies gradients directly to it."""
        return self.may_arrive_as(bucket, self.buffer_dtype(bucket))

    def pinned_rounding(self, n_bytes: int) -> int:
        """Return the bytes that a pinned buffer of ``n_bytes`` takes beyond these, because its allocator rounds sizes
        up."""
        return self.ways_to_pin[0].taken(n_bytes) - n_bytes if self.ways_to_pin and n_bytes else 0

    def working_sizes(self, specs: Sequence[ParamSpec], budget: float | None) -> dict[bool, Counter[int]]:
        """Return the host buffers that an engine borrows from the memory that all engines of the process share.

        The keys are True (pinned) and False (pageable). Each value counts the buffers of each size in bytes.

        Args:
            specs: the engine's first parameters. The engine has no buffers yet.
            budget: as in :meth:`on_device`.
        """
        _, kinds, staged_kinds = self.tiers(specs, budget)
        found: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
        if self.direct:
            return found
        staged = [bucket for bucket, _ in staged_kinds]
        lent = self.gradient_slot_bytes(kinds)
        if self.gradients_in_place:  # sums have private memory
            kinds = ()
        if lent is not None:
            found[any(self.buffer_is_pinned(bucket) for bucket, _ in kinds)][lent] += GRADIENT_SLOTS
        for bucket, n in kinds if lent is None else ():
            found[self.buffer_is_pinned(bucket)][self.buffer_bytes(bucket)] += n
        found[True][self.slot_bytes(staged)] += self.staging_slots
        found[True][self.direction_bytes(staged)] += self.direction_slots
        return {pinned: Counter({size: n for size, n in sizes.items() if size}) for pinned, sizes in found.items()}

    @property
    def direction_slots(self) -> int:
        """The number of host buffers for directions. With overlap, one bucket's directions may be in flight while the
        device computes with another bucket's."""
        return self.device.sizes.staging_slots * (2 if self.overlaps else 1)

    def direction_bytes(self, buckets: Iterable[Bucket]) -> int:
        """Return the bytes of each host buffer for directions: the bytes of the largest bucket's directions."""
        numels = [self.device.sizes.link_numel(b) for b in buckets if self.rule_of(b).device_kernel is not None]
        return max(numels, default=0) * BFLOAT16.itemsize

    def matrix_bytes(self, buckets: Iterable[Bucket]) -> int:
        """Return the most bytes that matrices take on the device during an update of these buckets."""
        most = 0
        for bucket in buckets:
            kernel = self.rule_of(bucket).device_kernel
            if kernel is not None and bucket.matrix is not None:
                held = 0 if self.device.addressable else (2 if self.overlaps else 1) * bucket.padded_numel
                most = max(most, held + kernel.numel(bucket.matrix))
        return most * BFLOAT16.itemsize

    def slot_bytes(self, buckets: Sequence[Bucket]) -> int:
        return max((self.device.sizes.slot_bytes(bucket, self.comm_dtype(bucket)) for bucket in buckets), default=0)


def _examines(config: OffloadConfig, device: DeviceTerms, scaled: bool) -> bool:
    skip = config.skip_nonfinite
    narrow = config.communication_dtype == FLOAT16.name and device.world_size > 1  # may overflow
    wanted = (skip is None and narrow) or bool(skip)
    return wanted or config.gradient_clipping is not None or scaled


def as_it_stays(buffer: ElementType) -> Arrival:
    """Return the arrival format that needs no further sum or cast in a buffer of this element type."""
    return Arrival(1, buffer, 1.0)
