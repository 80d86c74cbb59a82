"""Decides which buffers each bucket needs, and their sizes, from the configuration, the device and the parameter sizes.

``LocalBuckets`` allocates by these rules, and plans are made by them, so that both agree.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config.options import OffloadConfig
from ..config.state_formats import SPLIT, Master, StateFormat
from ..device.protocols import Arrival, DeviceTerms
from ..disk.scratch import aligned
from ..disk.shards import SLOTS
from ..dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, ElementType
from ..layout.partition import Bucket, Kinds, ParamSpec, kinds_of, planned
from ..rules import MASTER, Rule
from ..states import STORES
from ..support.worker import Background, Inline

STAGING = "staging"
MATRICES = "matrices in an update"
DIRECTIONS = "directions"
"""Buffers of rules with a part that the device computes from whole matrices."""
GRADIENTS_ON_HOST = "gradients on the host"
_RESERVED = 10
"""If states may take all free memory, a tenth stays free. A plan leaves out temporary memory of autograd, the framework
and the page cache, which grows with the model. More states on disk only cost time."""
_LEAST_RESERVE = 2**30
"""At least 1 GiB stays free, because libraries take some hundred MiB beside a small model, too."""
GRADIENT_SLOTS = 4
"""The slots for gradients on the host, where buckets share them: one for a bucket that is updated, two for buckets in
flight, and one more, so that no bucket waits."""


class BucketTerms:
    """The rules for the buffers, the states and the schedule of one process's buckets.

    Args:
        scaled: True if losses are scaled.
    """

    def __init__(self, config: OffloadConfig, device: DeviceTerms, *, scaled: bool = False) -> None:
        self.config = config
        self.device = device
        self._scaled = scaled
        self.rule = config.rule()
        self.store_kind = STORES[str(config.offload_optimizer)]
        """The kind of store that keeps the states."""
        self.direct = device.addressable and device.world_size == 1
        """True if nothing is copied: kernels read gradients and write parameters in place."""
        self.sums = config.gradient_accumulation_steps > 1 or device.world_size > 1
        """True if gradients are summed on the host, in fp32."""
        self.shards_on_disk = config.offload_param == "nvme"
        """True if shards of partitioned parameters are in the store, with their states."""
        self.host_shards = device.addressable or config.offload_param is not None
        """True if this process holds its shards of partitioned parameters, in host memory or on disk."""
        self.worker = Inline if self.direct or config.schedule == "serial" else Background
        """The class of the worker that runs the tasks of a step."""
        self.examines = _examines(config, device, scaled)
        """True if a step examines all gradients (for clipping, an inf or a NaN) before it updates anything."""
        self.sends_early = config.update_in_backward and config.schedule == "overlap"
        """True if parameters may be written in place, or sent to the device, before their step."""
        if self.examines and (self.direct or config.stage == 3):  # a parameter that was written in place is lost
            self.sends_early = False
        self.updates_early = self.sends_early and not self.examines
        """True if states are updated early together with their parameters, so that both are always of one step."""
        self.lends_gradient_memory = self.updates_early and not self.direct and config.gradient_accumulation_steps == 1
        """True if gradients share a few slots on the host, because each update comes as soon as they arrive."""
        self.ring_bytes = 0
        self.lent_bytes = 0
        """The size of the existing gradient slots."""
        self.directions_bytes = 0
        """The size of the existing buffers for directions."""
        budget = self.store_kind.host_budget(config)
        self.state_budget = budget or 0
        """The bytes of host memory that states of new buckets may take, if the store also has another place."""
        self.fills_free_memory = budget is None
        """True if :meth:`take_free` sets ``state_budget``, from the memory that is free when parameters are added."""
        self.blocks: list[tuple[int, int]] = []
        """The existing states in the store's own place, in the form that :meth:`Store.working_bytes` takes."""
        self.reads_blocks = config.schedule == "delayed" or (self.sends_early and not self.updates_early)
        """True if parameters are also written without a change of their states."""
        self.shard_slots = (0, 0)
        """The number of the existing slots for shards in flight from disk, and the bytes of each slot."""
        self.given_free: Mapping[str, int | None] | None = None
        """The value of :attr:`free_elsewhere` in plans for another machine; None: read this machine's."""

    def ring_was_made(self, slot_bytes: int) -> None:
        """Record the size of the staging ring. Later plans count only the bytes beyond it."""
        self.ring_bytes = slot_bytes

    def gradient_slots_were_made(self, slot_bytes: int) -> None:
        """Record the size of the gradient slots. Later plans count only the bytes beyond it."""
        self.lent_bytes = slot_bytes

    def directions_were_made(self, n_bytes: int) -> None:
        """Record the size of the buffers for directions. Later plans count only the bytes beyond it."""
        self.directions_bytes = n_bytes

    def states_were_made(self, buckets: Sequence[Bucket]) -> None:
        """Record the bytes that the states of new buckets take, so that later plans count only further states."""
        kept, elsewhere = self.parted(kinds_of(buckets))
        self.state_budget = max(self.state_budget - sum(size * n for size, n in kept), 0)
        self.blocks += elsewhere

    def slots_with(self, trained: Kinds, frozen: Kinds) -> tuple[int, int]:
        """Return the slots for shards in flight from disk that new parameters would need, too: ``(slots, bytes)``."""
        if not self.shards_on_disk:
            return 0, 0
        n, size = self.shard_slots
        read = [(more, self.bytes_to_gather(bucket)) for bucket, more in trained if bucket.partitioned]
        read += [
            (more, aligned(bucket.shard_numel * bucket.dtype.itemsize)) for bucket, more in frozen if bucket.partitioned
        ]
        for more, n_bytes in read:
            n, size = min(n + more, SLOTS), max(size, n_bytes)
        return n, size

    def bytes_to_gather(self, bucket: Bucket) -> int:
        """Return the bytes read from disk for each gathering of the bucket's parameter; 0: it is not on disk."""
        if not self.in_store(bucket):
            return 0
        master = self.state_formats(bucket)[MASTER]
        dtype = bucket.dtype if master is SPLIT else master.values  # master weights are rounded after the read
        return aligned(bucket.shard_numel * dtype.itemsize)

    def slots_were_made(self, trained: Kinds, frozen: Kinds) -> None:
        """Record the slots for shards in flight from disk. Later plans count only further slots."""
        self.shard_slots = self.slots_with(trained, frozen)

    def take_free(self, free: int, others: int) -> None:
        """Have the states of new buckets take the free host memory, less a reserve.

        Args:
            free: the free bytes that this process may take.
            others: the bytes that everything else in its plan takes.
        """
        self.state_budget = max(free - others - max(free // _RESERVED, _LEAST_RESERVE), 0)

    def state_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of the states of a process's shards of a bucket, in the store's own place."""
        numel = len(self.device.ranks) * bucket.shard_numel
        return sum(self.store_kind.n_bytes(format, numel) for format in self.state_formats(bucket).values())

    def parted(self, kinds: Kinds) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Split new states into two lists: states in host memory, and states in the store's own place.

        Returns:
            In each list, for each kind in order, ``(bytes of a bucket's states, number of buckets)``.
        """
        blocks = [(self.state_bytes(bucket), n) for bucket, n in kinds]
        kept = self.store_kind.kept_on_host(self.state_budget, blocks)
        stay = [(size, m) for (size, _), m in zip(blocks, kept, strict=True)]
        return stay, [(size, n - m) for (size, n), m in zip(blocks, kept, strict=True)]

    def with_(self, **fields: Any) -> "BucketTerms":
        """Return a copy of these terms with other settings."""
        terms = BucketTerms(replace(self.config, **fields), self.device, scaled=self._scaled)
        terms.ring_was_made(self.ring_bytes)
        terms.gradient_slots_were_made(self.lent_bytes)
        terms.shard_slots = self.shard_slots
        terms.directions_were_made(self.directions_bytes)
        terms.state_budget, terms.blocks = self.state_budget, [*self.blocks]
        return terms

    # --- small decisions, each made here only --------------------------------------------------------

    def cut(self, specs: Sequence[ParamSpec]) -> Sequence[Bucket]:
        """Return the buckets of ``specs``, as if there were no other parameters."""
        return self._planned(specs)[0]

    def kinds(self, specs: Sequence[ParamSpec]) -> Kinds:
        """Return the kinds of these buckets. Buckets of one kind take the same memory."""
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
        """Return the format of each state of a bucket; without a master weight if the parameters are master weights.

        Master weights are split (SPLIT) if the parameters are on the host, only this package writes to them, and the
        store supports it.
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
        """True if the bucket's parameter is in the store, with its states."""
        return bucket.partitioned and self.shards_on_disk

    def master(self, bucket: Bucket) -> Master:
        """Return the place of the bucket's master weights."""
        return Master.WITH_PARAMETER if self.in_store(bucket) else Master.of(self.state_formats(bucket))

    @property
    def free_elsewhere(self) -> dict[str, int | None]:
        """The free bytes in the store's own place, as :attr:`MemoryPlan.free_elsewhere`."""
        if self.given_free is not None:
            return dict(self.given_free)
        return {self.store_kind.place: self.store_kind.free_bytes(self.config)}

    @property
    def overlaps(self) -> bool:
        """True if copies, reduction and the update run at the same time as the device's work."""
        return self.worker.behind

    @property
    def depth(self) -> int:
        return self.worker.depth

    @property
    def staging_slots(self) -> int:
        ways = 2 if self.sends_early else 1  # copies to the host and back at the same time, or one after the other
        return ways * self.device.sizes.staging_slots * self.depth

    @property
    def accumulates(self) -> bool:
        return self.config.gradient_accumulation_steps > 1 and self.device.world_size == 1

    @property
    def has_home(self) -> bool:
        return self.sums or not self.direct

    def wire(self, bucket: Bucket) -> ElementType:
        """Return the element type in which gradients travel."""
        asked = self.config.communication_dtype
        return bucket.dtype if asked is None or self.device.world_size == 1 else BY_NAME[asked]

    def way_bytes(self, bucket: Bucket) -> int:
        """Return the bytes on the device of a bucket in flight, besides gradients and parameters."""
        return self.device.sizes.way_bytes(bucket, self.wire(bucket))

    def home_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of the bucket's gradients on the host."""
        return len(self.device.ranks) * bucket.shard_numel * self.home_dtype(bucket).itemsize

    def gradient_slot_bytes(self, buckets: Sequence[Bucket]) -> int | None:
        """Return the size of the gradient slots that these buckets share, which is the largest bucket's. None: each
        bucket has gradient memory of its own, because slots would take no less, or needs none."""
        return self.slot_bytes_of_kinds([(bucket, 1) for bucket in buckets])

    def slot_bytes_of_kinds(self, kinds: Kinds) -> int | None:
        if not self.lends_gradient_memory:
            return None
        sizes = [(self.home_bytes(bucket), n) for bucket, n in kinds]
        largest = max([self.lent_bytes, *(size for size, _ in sizes)])
        own = sum(n * size for size, n in sizes)
        return largest if GRADIENT_SLOTS * (largest - self.lent_bytes) < own else None

    def home_dtype(self, bucket: Bucket) -> ElementType:
        return FLOAT32 if self.sums else self.device.sizes.arrival(self.wire(bucket)).dtype

    def may_arrive_as(self, bucket: Bucket, home: ElementType) -> bool:
        """True if the device can copy gradients directly to a home of element type ``home``."""
        return self.device.sizes.arrival(self.wire(bucket)) == as_it_stays(home)

    def home_is_pinned(self, bucket: Bucket) -> bool:
        """True if the device copies directly to the bucket's home."""
        return self.may_arrive_as(bucket, self.home_dtype(bucket))

    def working_sizes(self, kinds: Kinds) -> dict[bool, Counter[int]]:
        """Return the sizes of the memory that engines use in turn, by True for pinned memory and False for other.

        ``kinds`` are an engine's first parameters: nothing is subtracted for existing ones.
        """
        found: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
        if self.direct:
            return found
        buckets = [bucket for bucket, _ in kinds]
        lent = self.slot_bytes_of_kinds(kinds)
        if lent is not None:
            found[any(map(self.home_is_pinned, buckets))][lent] += GRADIENT_SLOTS
        for bucket, n in kinds if lent is None else ():
            found[self.home_is_pinned(bucket)][self.home_bytes(bucket)] += n
        found[True][self.slot_bytes(buckets)] += self.staging_slots
        found[True][self.direction_bytes(buckets)] += self.direction_slots
        return {pinned: Counter({size: n for size, n in sizes.items() if size}) for pinned, sizes in found.items()}

    @property
    def direction_slots(self) -> int:
        """The number of buffers for directions: one may be in flight while the device computes with another."""
        return self.device.sizes.staging_slots * (2 if self.overlaps else 1)

    def direction_bytes(self, buckets: Iterable[Bucket]) -> int:
        """Return the size of each buffer for directions."""
        numels = [self.device.sizes.link_numel(b) for b in buckets if self.rule_of(b).device_part is not None]
        return max(numels, default=0) * BFLOAT16.itemsize

    def matrix_bytes(self, buckets: Iterable[Bucket]) -> int:
        """Return the bytes that matrices take on the device."""
        most = 0
        for bucket in buckets:
            part = self.rule_of(bucket).device_part
            if part is not None and bucket.matrix is not None:
                held = 0 if self.device.addressable else (2 if self.overlaps else 1) * bucket.padded_numel
                most = max(most, held + part.numel(bucket.matrix))
        return most * BFLOAT16.itemsize

    def slot_bytes(self, buckets: Sequence[Bucket]) -> int:
        return max((self.device.sizes.slot_bytes(bucket, self.wire(bucket)) for bucket in buckets), default=0)


def _examines(config: OffloadConfig, device: DeviceTerms, scaled: bool) -> bool:
    skip = config.skip_nonfinite
    narrow = config.communication_dtype == FLOAT16.name and device.world_size > 1  # may overflow
    wanted = (skip is None and narrow) or bool(skip)
    return wanted or config.gradient_clipping is not None or scaled


def as_it_stays(home: ElementType) -> Arrival:
    """Return the arrival format that needs no further sum or cast in a home of this element type."""
    return Arrival(1, home, 1.0)
