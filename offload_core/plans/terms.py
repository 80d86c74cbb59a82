"""The buffers of a process for its buckets, and their sizes, from the configuration, the device and the sizes alone.

``LocalBuckets`` allocates by the same rules that the plan is made with, so that the plan cannot be another. Sizes of
what comes and goes on the device follow from the order in which gradients are expected: last parameter first.
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
"""Of rules with a part that the device computes from whole matrices."""
GRADIENTS_ON_HOST = "gradients on the host"
PARAMETERS = "parameters"
GATHERED = "gathered parameters"
GRADIENTS = "gradients"
_RESERVED = 10
"""A tenth of the free memory stays free where states may take the rest. A plan leaves out what autograd, the framework
and the page cache take for a time, and that grows with the model; a state that lies on disk only costs time."""
_LEAST_RESERVE = 2**30
"""At least 1 GiB stays free, because libraries take some hundred MiB beside a small model, too."""
GRADIENT_SLOTS = 4
"""Buckets whose gradients are on the host at a time, where memory is lent to them: one whose update is under way, two
on their way, and one more, so that none waits for the others."""


class BucketTerms:
    """The rules for one process.

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
        """Nothing is moved: kernels read gradients and write parameters where they are."""
        self.sums = config.gradient_accumulation_steps > 1 or device.world_size > 1
        """Gradients are summed on the host, in fp32."""
        self.shards_on_disk = config.offload_param == "nvme"
        """True if shards of partitioned parameters lie in the store with their states."""
        self.host_shards = device.addressable or config.offload_param is not None
        """True if this process holds its shards of partitioned parameters, in host memory or on disk."""
        self.worker = Inline if self.direct or config.schedule == "serial" else Background
        """The kind of worker that the tasks of a step are given to."""
        self.examines = _examines(config, device, scaled)
        """A step looks at all gradients before it updates anything."""
        self.sends_early = config.update_in_backward and config.schedule == "overlap"
        """Parameters may be written before their step: where they are, or by being sent to the device."""
        if self.examines and (self.direct or config.stage == 3):  # a parameter that was written in place is lost
            self.sends_early = False
        self.updates_early = self.sends_early and not self.examines
        """Parameters are written early together with their states, so that both are of one step at all times."""
        self.lends_gradient_memory = self.updates_early and not self.direct and config.gradient_accumulation_steps == 1
        """Gradients pass through a few slots on the host, for their update comes as soon as they arrive."""
        self.ring_bytes = 0
        self.lent_bytes = 0
        """The size of the slots of gradients that there are."""
        self.directions_bytes = 0
        """The size of the buffers for directions that there are."""
        budget = self.store_kind.host_budget(config)
        self.state_budget = budget or 0
        """The bytes of host memory that states of new buckets may take, where the store also has another place."""
        self.fills_free_memory = budget is None
        """True if that is as much as is free when parameters are taken on (:meth:`take_free`)."""
        self.blocks: list[tuple[int, int]] = []
        """The states in the store's own place that there are, as :meth:`Store.working_bytes` takes them."""
        self.reads_blocks = config.schedule == "delayed" or (self.sends_early and not self.updates_early)
        """Parameters are also written from states that stay as they are."""
        self.shard_slots = (0, 0)
        """The slots for shards on their way from disk that there are, and the bytes of each."""
        self.given_free: Mapping[str, int | None] | None = None
        """What :attr:`free_elsewhere` is, for plans of another machine; None: this one's."""

    def ring_was_made(self, slot_bytes: int) -> None:
        """There are staging buffers of this size now: plans count what more would take."""
        self.ring_bytes = slot_bytes

    def gradient_slots_were_made(self, slot_bytes: int) -> None:
        """Record the size of the gradient slots, so that plans count only what more they would take."""
        self.lent_bytes = slot_bytes

    def directions_were_made(self, n_bytes: int) -> None:
        """Record the size of the buffers for directions, so that plans count only what more they would take."""
        self.directions_bytes = n_bytes

    def states_were_made(self, buckets: Sequence[Bucket]) -> None:
        """Record what the states of new buckets take, so that plans count only what more they would take."""
        kept, elsewhere = self.parted(kinds_of(buckets))
        self.state_budget = max(self.state_budget - sum(size * n for size, n in kept), 0)
        self.blocks += elsewhere

    def slots_with(self, trained: Kinds, frozen: Kinds) -> tuple[int, int]:
        """Return the slots for shards on their way from disk, with those of new parameters: ``(slots, bytes)``."""
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
        """The bytes that are read from disk for each gathering of the bucket's parameter; 0: it does not lie there."""
        if not self.in_store(bucket):
            return 0
        master = self.state_formats(bucket)[MASTER]
        dtype = bucket.dtype if master is SPLIT else master.values  # which is rounded after it was read
        return aligned(bucket.shard_numel * dtype.itemsize)

    def slots_were_made(self, trained: Kinds, frozen: Kinds) -> None:
        """Record the slots for shards on their way from disk, so that plans count only what more they would take."""
        self.shard_slots = self.slots_with(trained, frozen)

    def take_free(self, free: int, others: int) -> None:
        """Have the states of new buckets take the host memory that is free, less a reserve.

        Args:
            free: the bytes that this process may take.
            others: the bytes of them that all else in its plan takes.
        """
        self.state_budget = max(free - others - max(free // _RESERVED, _LEAST_RESERVE), 0)

    def state_bytes(self, bucket: Bucket) -> int:
        """The bytes of the states of a process's shards of a bucket, in the store's place."""
        numel = len(self.device.ranks) * bucket.shard_numel
        return sum(self.store_kind.n_bytes(format, numel) for format in self.state_formats(bucket).values())

    def parted(self, kinds: Kinds) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the new states that are in host memory, and those of the store's own place.

        Returns:
            Twice ``(bytes of a bucket's states, buckets)``, for each kind in its order.
        """
        blocks = [(self.state_bytes(bucket), n) for bucket, n in kinds]
        kept = self.store_kind.kept_on_host(self.state_budget, blocks)
        stay = [(size, m) for (size, _), m in zip(blocks, kept, strict=True)]
        return stay, [(size, n - m) for (size, n), m in zip(blocks, kept, strict=True)]

    def with_(self, **fields: Any) -> "BucketTerms":
        """Return these terms with other settings."""
        terms = BucketTerms(replace(self.config, **fields), self.device, scaled=self._scaled)
        terms.ring_was_made(self.ring_bytes)
        terms.gradient_slots_were_made(self.lent_bytes)
        terms.shard_slots = self.shard_slots
        terms.directions_were_made(self.directions_bytes)
        terms.state_budget, terms.blocks = self.state_budget, [*self.blocks]
        return terms

    # --- small decisions, each made here only --------------------------------------------------------

    def cut(self, specs: Sequence[ParamSpec]) -> Sequence[Bucket]:
        """The buckets of parameters that are alone."""
        return self._planned(specs)[0]

    def kinds(self, specs: Sequence[ParamSpec]) -> Kinds:
        """The kinds of these buckets: what they take follows from that alone."""
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
        """The update rule of a bucket, or of a parameter."""
        return alike.rule or self.rule

    def state_formats(self, bucket: Bucket) -> dict[str, StateFormat]:
        """The formats of the states that a bucket's parameters have; no master weight where they are their own.

        Master weights are split where the parameters lie on the host, nobody but this package writes to them, and the
        store can hold them so.
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
        """True if the bucket's parameter lies in the store with its states."""
        return bucket.partitioned and self.shards_on_disk

    def master(self, bucket: Bucket) -> Master:
        """The place of the bucket's master weights."""
        return Master.WITH_PARAMETER if self.in_store(bucket) else Master.of(self.state_formats(bucket))

    @property
    def free_elsewhere(self) -> dict[str, int | None]:
        """The free bytes of the place of the states, as :attr:`MemoryPlan.free_elsewhere`."""
        if self.given_free is not None:
            return dict(self.given_free)
        return {self.store_kind.place: self.store_kind.free_bytes(self.config)}

    @property
    def overlaps(self) -> bool:
        """True if copies, reduction and the update run behind the device's work."""
        return self.worker.behind

    @property
    def depth(self) -> int:
        return self.worker.depth

    @property
    def staging_slots(self) -> int:
        ways = 2 if self.sends_early else 1  # at a time; else there is one after the other
        return ways * self.device.sizes.staging_slots * self.depth

    @property
    def accumulates(self) -> bool:
        return self.config.gradient_accumulation_steps > 1 and self.device.world_size == 1

    @property
    def has_home(self) -> bool:
        return self.sums or not self.direct

    def wire(self, bucket: Bucket) -> ElementType:
        """The element type in which gradients travel."""
        asked = self.config.communication_dtype
        return bucket.dtype if asked is None or self.device.world_size == 1 else BY_NAME[asked]

    def way_bytes(self, bucket: Bucket) -> int:
        """The bytes of a travelling bucket on the device, besides gradients and parameters."""
        return self.device.sizes.way_bytes(bucket, self.wire(bucket))

    def home_bytes(self, bucket: Bucket) -> int:
        """The bytes of the bucket's gradients on the host."""
        return len(self.device.ranks) * bucket.shard_numel * self.home_dtype(bucket).itemsize

    def gradient_slot_bytes(self, buckets: Sequence[Bucket]) -> int | None:
        """The size of the slots that the gradients of these buckets pass through, as of the largest one; None: each has
        memory of its own, which takes no more, or needs none."""
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
        """True if the device's copies of gradients may end where they wait, in this element type."""
        return self.device.sizes.arrival(self.wire(bucket)) == as_it_stays(home)

    def home_is_pinned(self, bucket: Bucket) -> bool:
        """True if the device copies to the memory in which the bucket's gradients wait."""
        return self.may_arrive_as(bucket, self.home_dtype(bucket))

    def working_sizes(self, kinds: Kinds) -> dict[bool, Counter[int]]:
        """Return the sizes of the memory that engines use in turn, of pinned memory (True) and of other.

        They are those of a first set of parameters: what other ones have already is not subtracted.
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
        """Buffers for directions: one bucket's may travel while the device computes with another's."""
        return self.device.sizes.staging_slots * (2 if self.overlaps else 1)

    def direction_bytes(self, buckets: Iterable[Bucket]) -> int:
        """The size of each of these buffers."""
        numels = [self.device.sizes.link_numel(b) for b in buckets if self.rule_of(b).device_part is not None]
        return max(numels, default=0) * BFLOAT16.itemsize

    def matrix_bytes(self, buckets: Iterable[Bucket]) -> int:
        """The bytes that the device takes for matrices, beside those that lie on the host."""
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
    """The arrival format that needs no further sum or cast where gradients wait."""
    return Arrival(1, home, 1.0)
