"""Which buffers a process has of its buckets, and how large: what follows from configuration, device and sizes alone.

``LocalBuckets`` allocates by the same rules that the plan is made with, so that the plan cannot be another. Sizes of
what comes and goes on the device follow from the order in which gradients are expected: last parameter first.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config.options import OffloadConfig
from ..config.state_formats import SPLIT, Master, StateFormat
from ..device.protocols import Arrival, DeviceTerms
from ..dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, ElementType
from ..layout.partition import Bucket, Kinds, ParamSpec, planned
from ..memory.plan import DEVICE, HOST, PARAMETER_SHARDS, MemoryPlan, PlanRow
from ..rules import MASTER, Rule
from ..states import STORES
from .worker import Background, Inline

STAGING = "staging"
GRADIENTS_ON_HOST = "gradients on the host"
PARAMETERS = "parameters"
GATHERED = "gathered parameters"
GRADIENTS = "gradients"
_NARROWER = "param_dtype='bfloat16'"
_RANKS = "more ranks, on other machines"
GRADIENT_SLOTS = 4
"""Buckets whose gradients are on the host at a time, where memory is lent to them: one whose update is under way, two
on their way, and one more, so that none waits for the others."""


NARROWER: dict[str, dict[str, Any]] = {
    "state_format='bf16'": {"state_format": "bf16"},
    "state_format='8bit'": {"state_format": "8bit"},
    "state_format='8bit', master_dtype='bfloat16'": {"state_format": "8bit", "master_dtype": "bfloat16"},
}
"""Settings that store states in fewer bytes, most bytes first."""
_NEXT = {"float32": ("bf16", "bfloat16"), "bfloat16": ("8bit", "float8")}
"""The next narrower format of a moment: its short name, and its own."""


def _narrower_states(config: OffloadConfig, rules: Iterable[Rule], specs: Sequence[ParamSpec]) -> dict[str, str]:
    """By state the setting that stores it in fewer bytes."""
    formats = {state: str(format) for rule in rules for state, format in config.state_formats(BFLOAT16, rule).items()}
    narrower = {}
    if formats.pop(MASTER, None) == FLOAT32.name and any(spec.dtype is BFLOAT16 for spec in specs):
        narrower[MASTER] = "master_dtype='bfloat16'"
    for state, format in formats.items():
        if format in _NEXT:
            short, long = _NEXT[format]
            alone = getattr(config, f"{state}_dtype", None) is not None
            narrower[state] = f"{state}_dtype='{long}'" if alone else f"state_format='{short}'"
    return narrower


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process moves in a step."""

    update: float
    """To and from the host's memory, by the kernel."""
    to_host: float
    to_device: float


class BucketTerms:
    """The rules for one process.

    Args:
        scaled: True if losses are scaled.
    """

    def __init__(self, config: OffloadConfig, device: DeviceTerms, *, scaled: bool = False) -> None:
        self.config = config
        self._terms = device
        self._scaled = scaled
        self._rule = config.rule()
        self.store = STORES[str(config.offload_optimizer)]
        """The kind of store that keeps the states."""
        self.direct = device.addressable and device.world_size == 1
        """Nothing is moved: kernels read gradients and write parameters where they are."""
        self.sums = config.gradient_accumulation_steps > 1 or device.world_size > 1
        """Gradients are summed on the host, in fp32."""
        self.host_shards = device.addressable or config.offload_param == "cpu"
        """What this process holds of partitioned parameters is host memory."""
        self.sends_early = config.update_in_backward and config.schedule == "overlap"
        """Parameters may leave for the device before their step."""
        if self.direct or config.stage == 3:  # stage 3 gathers them in backward
            self.sends_early = False
        self.worker = Inline if self.direct or config.schedule == "serial" else Background
        """The kind of worker that the tasks of a step are given to."""
        self.examines = _examines(config, device, scaled)
        """A step looks at all gradients before it updates anything."""
        self.lends_gradient_memory = self.sends_early and not (self.examines or config.gradient_accumulation_steps > 1)
        """Gradients pass through a few slots on the host, for their update comes as soon as they arrive."""
        self._ring_bytes = 0
        self.lent_bytes = 0
        """The size of the slots of gradients that there are."""

    def ring_was_made(self, slot_bytes: int) -> None:
        """There are staging buffers of this size now: plans count what more would take."""
        self._ring_bytes = slot_bytes

    def slots_were_made(self, slot_bytes: int) -> None:
        """The same of slots of gradients."""
        self.lent_bytes = slot_bytes

    # --- the plan ------------------------------------------------------------------------------------

    def plan(
        self,
        specs: Sequence[ParamSpec],
        *,
        frozen: Sequence[ParamSpec] = (),
        besides: int = 0,
        gradients_stay: bool = False,
    ) -> MemoryPlan:
        """What training ``specs`` takes where gradients come one by one, as in torch.

        Args:
            frozen: parameters that are not trained.
            besides: bytes on the device of what belongs to the model and stays as it is (buffers).
            gradients_stay: all gradients are on the device till the update, whatever becomes of them.
        """
        host = self.host_rows(specs, frozen=frozen, one_by_one=not gradients_stay)
        rows = [*host, *self._device_rows(specs, frozen, besides, gradients_stay), *self.activations()]
        return MemoryPlan(
            tuple(rows),
            sum(spec.numel for spec in specs),
            shared=self._terms.addressable,
            savings=self.savings(specs, frozen=frozen),
        )

    def activations(self, devices: int = 1) -> list[PlanRow]:
        """What was declared of activations, of a process with so many devices."""
        declared = {
            DEVICE: devices * self.config.activation_memory,
            HOST: self.config.host_activation_memory,
        }
        return [PlanRow("activations", where, n, "smaller micro-batches") for where, n in declared.items() if n]

    def savings(self, specs: Sequence[ParamSpec], *, frozen: Sequence[ParamSpec] = ()) -> tuple[tuple[str, int], ...]:
        """Settings that store states in fewer bytes, the others kept: ``(setting, bytes of the host that it saves)``,
        least first."""

        def host_bytes(terms: "BucketTerms") -> int:
            return sum(row.n_bytes for row in terms.host_rows(specs, frozen=frozen) if row.where == HOST)

        mine = host_bytes(self)
        saved = {setting: mine - host_bytes(self._with(**fields)) for setting, fields in NARROWER.items()}
        return tuple((setting, n_bytes) for setting, n_bytes in saved.items() if n_bytes > 0)

    def _with(self, **fields: Any) -> "BucketTerms":
        """These terms with other settings."""
        terms = BucketTerms(replace(self.config, **fields), self._terms, scaled=self._scaled)
        terms.ring_was_made(self._ring_bytes)
        terms.slots_were_made(self.lent_bytes)
        return terms

    def host_rows(
        self, specs: Sequence[ParamSpec], *, frozen: Sequence[ParamSpec] = (), one_by_one: bool = False
    ) -> list[PlanRow]:
        """What is allocated on the host and in the store when ``specs`` are taken on, and for the shards of ``frozen``.

        Args:
            one_by_one: gradients come during backward, so that updates can follow them.
        """
        kinds = self._kinds(specs)
        rules = dict.fromkeys(self.rule_of(bucket) for bucket, _ in kinds) or {self._rule: None}
        states = dict.fromkeys(name for rule in rules for name in rule.state_names)
        kept, host = dict.fromkeys(states, 0), dict.fromkeys((GRADIENTS_ON_HOST, STAGING), 0)
        for bucket, n in kinds:
            numel = len(self._terms.ranks) * bucket.shard_numel
            for name, format in self.state_formats(bucket).items():
                kept[name] += n * format.n_bytes(numel)
        lent = self._gradient_slot_bytes(kinds)
        if lent is not None:
            host[GRADIENTS_ON_HOST] = GRADIENT_SLOTS * (lent - self.lent_bytes)
        elif self.has_home:
            host[GRADIENTS_ON_HOST] = sum(n * self.home_bytes(bucket) for bucket, n in kinds)
        if not self.direct:
            slot_bytes = self.slot_bytes([bucket for bucket, _ in kinds])
            host[STAGING] = self.staging_slots * max(slot_bytes - self._ring_bytes, 0)
        if self.config.offload_param is not None:
            host[PARAMETER_SHARDS] = _shard_bytes(kinds) + _shard_bytes(self._kinds(frozen))
        smaller = _NARROWER if any(spec.dtype is FLOAT32 for spec in (*specs, *frozen)) else _RANKS
        remedies = {
            **_narrower_states(self.config, rules, specs),
            GRADIENTS_ON_HOST: self._fewer_gradients(one_by_one) or smaller,
            STAGING: "reduce_bucket_size",
            PARAMETER_SHARDS: smaller,
        }
        return [
            PlanRow(what, where, n_bytes, remedies.get(what, _RANKS))
            for where, of in ((self.store.place, kept), (HOST, host))
            for what, n_bytes in of.items()
        ]

    def _fewer_gradients(self, one_by_one: bool) -> str | None:
        """The setting with which gradients take less of the host, if there is one."""
        if self.lends_gradient_memory:
            return "reduce_bucket_size"
        if self._accumulates:
            return "gradient_accumulation_steps=1"
        may_lend = one_by_one and self._with(update_in_backward=True).lends_gradient_memory
        return "update_in_backward=True" if may_lend else None

    def _device_rows(
        self, specs: Sequence[ParamSpec], frozen: Sequence[ParamSpec], besides: int, gradients_stay: bool
    ) -> list[PlanRow]:
        every = [*specs, *frozen]
        buckets = self.cut(specs)
        parameters = besides + sum(_bytes(spec) for spec in every if not spec.partitioned)
        if self.config.offload_param is None:
            parameters += _shard_bytes(self._kinds(specs)) + _shard_bytes(self._kinds(frozen))
        gathered, gradients = self._most_together(specs, frozen, buckets, gradients_stay)
        wide = any(spec.dtype is FLOAT32 for spec in every)
        if not self.has_home:
            sooner = _NARROWER if wide else _RANKS
        else:
            sooner = "wrap(model, ...), which takes them as they come" if gradients_stay else "reduce_bucket_size"
        if self.config.stage < 3:
            smaller = "stage=3, offload_param='cpu'"
        else:
            smaller = "offload_param='cpu'" if self.config.offload_param is None else "param_persistence_threshold"
        rows = {
            PARAMETERS: (parameters, _NARROWER if wide else smaller),
            GATHERED: (gathered, "max_live_parameters, max_reuse_distance"),
            GRADIENTS: (gradients, sooner),
        }
        rows_of = [
            PlanRow(what, DEVICE, n_bytes, remedy, brief=what != PARAMETERS) for what, (n_bytes, remedy) in rows.items()
        ]
        each = [self.way_bytes(bucket) for bucket, _ in self._kinds(specs)]
        on_way = min(self.depth, len(buckets)) * max(each, default=0)
        return [*rows_of, PlanRow("buckets on their way", DEVICE, on_way, "reduce_bucket_size", brief=True)]

    def _most_together(
        self,
        specs: Sequence[ParamSpec],
        frozen: Sequence[ParamSpec],
        buckets: Sequence[Bucket],
        gradients_stay: bool,
    ) -> tuple[int, int]:
        """Bytes of gathered parameters and of gradients when they are the most together.

        In backward parameters are released while gradients appear. The order of uses that decides what stays whole
        is not known: as much does as may, of what backward has not passed yet.
        """
        parted = [spec for spec in (*specs, *frozen) if spec.partitioned]
        numel, n_bytes = sum(spec.numel for spec in parted), sum(map(_bytes, parted))
        largest = max((spec.numel for spec in parted), default=0)
        # What forward used last backward uses first: half the distance is on the way there, half on the way back.
        kept = max(self.config.max_reuse_distance // 2, self.config.prefetch_bucket_size) + largest
        live = max(min(self.config.max_live_parameters, kept), largest)
        bound = int(min(1.0, live / max(numel, 1)) * n_bytes)
        ahead, most = n_bytes, (bound, 0)
        for param, gradients in self._gradients_held(specs, buckets, gradients_stay):
            gathered = min(bound, ahead)
            most = max(most, (gathered, gradients), key=sum)
            if specs[param].partitioned:
                ahead -= _bytes(specs[param])
        return most

    def _gradients_held(
        self, specs: Sequence[ParamSpec], buckets: Sequence[Bucket], stay: bool
    ) -> list[tuple[int, int]]:
        """The bytes of gradients on the device when each parameter's has come, in the order in which they come.

        One leaves when all buckets that hold a part of it have left: when they are full, or where copies take their
        time when as many others are as may be on their way. Those that are settled together wait for one another.
        """
        stay = stay or not self.has_home
        missing = {bucket.index: {piece.param for piece in bucket.pieces} for bucket in buckets}
        of: dict[int, set[int]] = {}
        for bucket in buckets:
            for param in missing[bucket.index]:
                of.setdefault(param, set()).add(bucket.index)
        members = {index: frozenset(params) for index, params in missing.items()}
        missing_of = Counter(spec.settled_with for spec in specs)
        waiting: dict[int | None, list[int]] = {}
        behind = 0 if self._terms.addressable else self.depth
        leaving: deque[int] = deque()
        held, seen = 0, []
        for param in reversed(range(len(specs))):
            held += _bytes(specs[param])
            seen.append((param, held))
            number = specs[param].settled_with
            waiting.setdefault(number, []).append(param)
            missing_of[number] -= 1
            for settled in waiting.pop(number) if number is None or not missing_of[number] else ():
                for index in sorted(of.get(settled, ())):
                    missing[index].discard(settled)
                    if not missing[index]:
                        leaving.append(index)
            while len(leaving) > behind and not stay:
                index = leaving.popleft()
                for member in members[index]:
                    of[member].discard(index)
                    held -= 0 if of[member] else _bytes(specs[member])
        return seen

    def traffic(self, specs: Sequence[ParamSpec]) -> tuple[Traffic, Traffic]:
        """What a step moves, and what its last bucket does.

        An update reads a gradient, reads and writes three states, and writes the parameter, which it also reads where
        that is a master weight or its upper half: with fp32 states 28 bytes an element in bf16 (26.25 from shards on
        the host), and in fp32 where parameters are updated in place. Gradients cross to the host in every micro-step,
        parameters back once, or, from shards on the host, for each forward and each backward; for one of them where
        they may stay whole in between.
        """
        partitioned = sum(spec.numel for spec in specs if spec.partitioned)
        each = [(self._traffic_of(bucket, partitioned), n) for bucket, n in self._kinds(specs)]
        sums = [sum(n * getattr(one, name) for one, n in each) for name in ("update", "to_host", "to_device")]
        last = self.cut(specs)[-1:]
        return Traffic(*sums), self._traffic_of(last[0], partitioned) if last else Traffic(0, 0, 0)

    def _traffic_of(self, bucket: Bucket, partitioned: int) -> Traffic:
        steps = self.config.gradient_accumulation_steps
        gradient = self.home_dtype(bucket) if self.has_home else bucket.dtype
        formats = self.state_formats(bucket)
        apart = Master.of(formats) is Master.APART
        numel = len(self._terms.ranks) * bucket.shard_numel
        states = sum(format.n_bytes(numel) for format in formats.values())
        update = numel * (gradient.itemsize + (1 if apart else 2) * bucket.dtype.itemsize) + 2 * states
        if self._terms.addressable:
            return Traffic(update, 0, 0)
        crossing = self._terms.sizes.link_numel(bucket)
        to_host = steps * crossing * self._terms.sizes.leaves_as(self.wire(bucket)).itemsize
        times = 1
        if bucket.partitioned and self.config.offload_param is not None:
            stays = partitioned <= min(self.config.max_live_parameters, self.config.max_reuse_distance)
            times = steps * (1 if stays else 2)
        return Traffic(update, to_host, times * crossing * bucket.dtype.itemsize)

    # --- small decisions, each made here only --------------------------------------------------------

    def cut(self, specs: Sequence[ParamSpec]) -> Sequence[Bucket]:
        """The buckets of parameters that are alone."""
        return self._planned(specs)[0]

    def _kinds(self, specs: Sequence[ParamSpec]) -> Kinds:
        """The kinds of these buckets: what they take follows from that alone."""
        return self._planned(specs)[1]

    def _planned(self, specs: Sequence[ParamSpec]) -> tuple[Sequence[Bucket], Kinds]:
        config = self.config
        return planned(
            tuple(specs),
            world_size=self._terms.world_size,
            bucket_numel=config.reduce_bucket_size,
            block=config.state_block,
        )

    def rule_of(self, alike: Bucket | ParamSpec) -> Rule:
        """The update rule of a bucket, or of a parameter."""
        return alike.rule or self._rule

    def state_formats(self, bucket: Bucket) -> dict[str, StateFormat]:
        """The formats of the states that a bucket's parameters have; no master weight where they are their own.

        Master weights are split where the parameters lie on the host, nobody but this package writes to them, and the
        store can hold them so.
        """
        formats = dict(self.config.state_formats(bucket.dtype, self.rule_of(bucket)))
        if self.config.schedule == "delayed" or self.sends_early:  # parameter and master may be of different steps
            return formats
        in_place = self.host_shards if bucket.partitioned else self._terms.updates_in_place
        if in_place and bucket.dtype is formats[MASTER].values:
            del formats[MASTER]
        elif bucket.partitioned and self.config.offload_param == "cpu" and bucket.dtype is SPLIT.upper:
            formats[MASTER] = SPLIT if self.store.holds(SPLIT) else formats[MASTER]
        return formats

    @property
    def overlaps(self) -> bool:
        """Whether copies, reduction and the update run behind the device's work."""
        return self.worker.behind

    @property
    def depth(self) -> int:
        return self.worker.depth

    @property
    def staging_slots(self) -> int:
        ways = 2 if self.sends_early else 1  # at a time; else there is one after the other
        return ways * self._terms.sizes.staging_slots * self.depth

    @property
    def _accumulates(self) -> bool:
        return self.config.gradient_accumulation_steps > 1 and self._terms.world_size == 1

    @property
    def has_home(self) -> bool:
        return self.sums or not self.direct

    def wire(self, bucket: Bucket) -> ElementType:
        """The element type in which gradients travel."""
        asked = self.config.communication_dtype
        return bucket.dtype if asked is None or self._terms.world_size == 1 else BY_NAME[asked]

    def way_bytes(self, bucket: Bucket) -> int:
        """What the bucket takes on the device on its way, besides gradients and parameters."""
        return self._terms.sizes.way_bytes(bucket, self.wire(bucket))

    def home_bytes(self, bucket: Bucket) -> int:
        """What the gradients of the bucket's shards take on the host."""
        return len(self._terms.ranks) * bucket.shard_numel * self.home_dtype(bucket).itemsize

    def gradient_slot_bytes(self, buckets: Sequence[Bucket]) -> int | None:
        """The size of the slots that the gradients of these buckets pass through, as of the largest one; None: each has
        memory of its own, which takes no more, or needs none."""
        return self._gradient_slot_bytes([(bucket, 1) for bucket in buckets])

    def _gradient_slot_bytes(self, kinds: Kinds) -> int | None:
        if not self.lends_gradient_memory:
            return None
        sizes = [(self.home_bytes(bucket), n) for bucket, n in kinds]
        largest = max([self.lent_bytes, *(size for size, _ in sizes)])
        own = sum(n * size for size, n in sizes)
        return largest if GRADIENT_SLOTS * (largest - self.lent_bytes) < own else None

    def home_dtype(self, bucket: Bucket) -> ElementType:
        return FLOAT32 if self.sums else self._terms.sizes.arrival(self.wire(bucket)).dtype

    def slot_bytes(self, buckets: Sequence[Bucket]) -> int:
        return max((self._terms.sizes.slot_bytes(bucket, self.wire(bucket)) for bucket in buckets), default=0)


def _examines(config: OffloadConfig, device: DeviceTerms, scaled: bool) -> bool:
    skip = config.skip_nonfinite
    narrow = config.communication_dtype == FLOAT16.name and device.world_size > 1  # may overflow
    wanted = (skip is None and narrow) or bool(skip)
    return wanted or config.gradient_clipping is not None or scaled


def as_it_stays(home: ElementType) -> Arrival:
    """What can arrive where gradients wait, nothing left to be done."""
    return Arrival(1, home, 1.0)


def _bytes(spec: ParamSpec) -> int:
    return spec.numel * spec.dtype.itemsize


def _shard_bytes(kinds: Kinds) -> int:
    return sum(n * bucket.shard_numel * bucket.dtype.itemsize for bucket, n in kinds if bucket.partitioned)
