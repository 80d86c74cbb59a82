"""Plans the bytes that parameters, gradients, states and buffers take in each memory, and the bytes that a step
moves."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from ..config.options import OffloadConfig
from ..config.state_formats import Master, StateFormat
from ..disk.scratch import aligned
from ..dtypes import BFLOAT16, FLOAT32
from ..layout.partition import Bucket, Kinds, ParamSpec, matrices_of
from ..memory.host_memory import ROUNDING
from ..memory.plan import (
    BLOCK_COPY,
    BLOCKS,
    DEVICE,
    FROZEN_SHARDS,
    GATHERED,
    GRADIENTS,
    HOST,
    PARAMETER_SHARDS,
    PARAMETERS,
    PARAMETERS_ON_WAY,
    READ_STATES,
    SHARE,
    Elsewhere,
    MemoryPlan,
    PlanRow,
)
from ..rules import MASTER, Rule
from ..states.on_device import READ_BYTES, StatesOnDevice
from .allocated import Allocated
from .terms import (
    DIRECTIONS,
    GRADIENT_SLOTS,
    GRADIENTS_ON_HOST,
    MATRICES,
    STAGING,
    BucketTerms,
)

ACTIVATIONS = "activations"
SUMS = "sums of gradients"
"""The name in plans of the device's memory for gradients that are summed where their states are."""
_NARROWER = "param_dtype='bfloat16'"
_RANKS = "more ranks, on other machines"
NARROWER: dict[str, dict[str, Any]] = {
    "state_format='bf16'": {"state_format": "bf16"},
    "state_format='8bit'": {"state_format": "8bit"},
    "state_format='8bit', master_dtype='bfloat16'": {"state_format": "8bit", "master_dtype": "bfloat16"},
}
"""Settings that store states in fewer bytes. The setting that takes the most bytes is first."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""The values of ``device_states_bytes`` that errors suggest: the least with which training fits."""
ON_DISK: dict[str, Any] = {"offload_optimizer": "nvme", "nvme_host_bytes": 0}
"""Settings that keep all states on a disk. ``nvme_path`` must be set, too, to a folder on the disk."""
FOLDER = "/folder/on/a/disk"
_NEXT = {"float32": ("bf16", "bfloat16"), "bfloat16": ("8bit", "float8")}
"""Maps a moment's format to the next narrower format: the values of ``state_format`` and of ``<state>_dtype`` for this
format."""


def _narrower_states(config: OffloadConfig, rules: Iterable[Rule], specs: Sequence[ParamSpec]) -> dict[str, str]:
    """Return, for each state by its name, the setting that stores the state in fewer bytes. A state that cannot be
    stored in fewer bytes is left out."""
    formats = {state: str(format) for rule in rules for state, format in config.state_formats(BFLOAT16, rule).items()}
    narrower = {}
    if formats.pop(MASTER, None) == FLOAT32.name and any(spec.dtype is BFLOAT16 for spec in specs):
        narrower[MASTER] = "master_dtype='bfloat16'"
    fixed = {state.name for rule in rules for state in rule.states if not state.narrows}
    for state, format in formats.items():
        if format in _NEXT and state not in fixed:
            short, long = _NEXT[format]
            alone = getattr(config, f"{state}_dtype", None) is not None
            narrower[state] = f"{state}_dtype='{long}'" if alone else f"state_format='{short}'"
    return narrower


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process moves in a step."""

    update: float
    """The bytes that the host's kernel reads from host memory and writes to it."""
    to_host: float
    to_device: float
    disk_read: float = 0
    """The bytes that the store reads from disk."""
    disk_write: float = 0
    sent: float = 0
    """The bytes of gradients and parameters that the process sends to other ranks (:attr:`Device.sent_bytes`). Ranks
    send different bytes if matrices are spread over them; this is then their mean."""
    on_device: float = 0
    """The bytes that the device's kernel reads from the device's memory and writes to it."""


def fill_host_memory(planner: "Planner", plan: MemoryPlan, again: Callable[[], MemoryPlan], free: int) -> MemoryPlan:
    """Give free host memory to the states of new parameters, unless the settings limit it.

    Args:
        plan: the plan of the new parameters.
        again: makes the plan of the new parameters again, after ``planner.allocated`` has changed.
        free: the bytes of host memory that this process may take.

    Returns:
        The plan by which the states are allocated next.
    """
    if planner.terms.host_budget is not None:
        return plan
    planner.allocated.state_budget = 0
    planner.allocated.take_free(free, again().needs[HOST])
    return again()


def fill_device_memory(
    planner: "Planner",
    plan: MemoryPlan,
    again: Callable[[], MemoryPlan],
    specs: Sequence[ParamSpec],
    free: int | None,
) -> MemoryPlan:
    """Give free memory of the device to the states of new parameters, if ``device_states_bytes`` is ``"auto"``.

    Args:
        plan: the plan of the new parameters.
        again: makes the plan of the new parameters again, after ``planner.allocated`` has changed.
        specs: the new trained parameters.
        free: the free bytes of this process's device; None: unknown, and none is given.

    Returns:
        The plan by which the states are allocated next.
    """
    if planner.terms.config.device_states_bytes != "auto" or not planner.terms.tiered or free is None:
        return plan
    planner.allocated.device_budget = 0
    planner.allocated.take_free_of_device(planner.terms.cut(specs), free - again().needs[DEVICE])
    return again()


def check_memory(
    planner: "Planner",
    plan: MemoryPlan,
    again: Callable[[], MemoryPlan],
    specs: Sequence[ParamSpec],
    *,
    host: int,
    device: int | None,
    processes: int,
    lent: int = 0,
) -> None:
    """Check, before new parameters are added, that there is memory for them. First give free host memory to their
    states (:func:`fill_host_memory`).

    Args:
        plan: the plan of the new parameters.
        again: makes the plan of the new parameters again, after ``planner.allocated`` has changed.
        specs: the new trained parameters.
        host: the free bytes of this machine's host memory.
        device: the free bytes of this process's device; None: unknown, and counted as enough.
        processes: the number of processes that share this machine's host memory, each with a plan like this one.
        lent: the bytes of the plan's host memory that each process borrows from its idle engines.

    Raises:
        HostMemoryError, DeviceMemoryError, DiskSpaceError: the plan does not fit.
    """
    host += processes * lent
    plan = fill_device_memory(planner, plan, again, specs, device)
    fill_host_memory(planner, plan, again, host // processes).check(host, device, processes=processes)


class Planner:
    """Makes plans by the same rules (``BucketTerms``) by which a process allocates.

    Sizes on the device assume that the gradient of the last parameter comes first, and the gradient of the first
    parameter last.

    Args:
        allocated: the memory that the process's buckets already have; None: the process has no buckets.
        free_elsewhere: the free bytes of the store's own memory, by its name, for a plan of another machine
            (:attr:`MemoryPlan.free_elsewhere`); None: ask this machine.
    """

    def __init__(
        self,
        terms: BucketTerms,
        allocated: Allocated | None = None,
        *,
        free_elsewhere: Mapping[str, int | None] | None = None,
    ) -> None:
        self.terms = terms
        self.allocated = Allocated(terms) if allocated is None else allocated
        self._free_elsewhere = free_elsewhere

    def plan(
        self,
        specs: Sequence[ParamSpec],
        *,
        frozen: Sequence[ParamSpec] = (),
        besides: int = 0,
        gradients_stay: bool = False,
    ) -> MemoryPlan:
        """Plan the training of ``specs`` where gradients come one by one, as in torch.

        Args:
            frozen: parameters that are not trained.
            besides: the bytes of the model's buffers on the device.
            gradients_stay: True if all gradients stay on the device until the update.
        """
        host = self.host_rows(specs, frozen=frozen, one_by_one=not gradients_stay)
        rows = [*host, *self._device_rows(specs, frozen, besides, gradients_stay), *self.activations()]
        plan = self.plan_of(rows, specs, frozen=frozen, shared=self.terms.device.addressable)
        return replace(plan, on_device=self._on_device(specs, frozen))

    def plan_with(
        self, rows: Iterable[PlanRow], specs: Sequence[ParamSpec], *, devices: int, shared: bool
    ) -> MemoryPlan:
        """Plan the training of ``specs`` where gradients come at once, as in JAX.

        Args:
            rows: rows for parameters and gradients (:func:`rows_at_once`).
            devices: the number of this process's devices.
            shared: True if the device's memory is host memory.
        """
        return self.plan_of((*self.host_rows(specs), *rows, *self.activations(devices)), specs, shared=shared)

    def plan_of(
        self, rows: Iterable[PlanRow], specs: Sequence[ParamSpec], *, shared: bool, frozen: Sequence[ParamSpec] = ()
    ) -> MemoryPlan:
        """Return the plan with these rows, and with the settings that would make the plan smaller.

        Args:
            specs: the trained parameters.
            shared: True if the device's memory is host memory.
            frozen: parameters that are not trained.
        """
        store, free = self.terms.store_kind, self._free_elsewhere
        return MemoryPlan(
            tuple(rows),
            sum(spec.numel for spec in specs),
            shared=shared,
            savings=self.savings(specs, frozen=frozen),
            on_disk=self._on_disk(specs, frozen),
            free_elsewhere={store.place: store.free_bytes(self.terms.config)} if free is None else free,
            folders=tuple(self.terms.config.nvme_path or ()),
        )

    def activations(self, devices: int = 1) -> list[PlanRow]:
        """Return plan rows for the memory that the configuration declares for activations.

        Args:
            devices: the number of this process's devices.
        """
        declared = {
            DEVICE: devices * self.terms.config.activation_memory,
            HOST: self.terms.config.host_activation_memory,
        }
        return [PlanRow(ACTIVATIONS, where, n, "smaller micro-batches") for where, n in declared.items() if n]

    def savings(self, specs: Sequence[ParamSpec], *, frozen: Sequence[ParamSpec] = ()) -> tuple[tuple[str, int], ...]:
        """Return the settings that store states in fewer bytes, if all other settings stay: ``(setting, bytes of host
        memory that the setting saves)``, smallest saving first."""
        mine = self._bytes_in(HOST, specs, frozen)
        saved = {
            setting: mine - self._with(**fields)._bytes_in(HOST, specs, frozen) for setting, fields in NARROWER.items()
        }
        return tuple((setting, n_bytes) for setting, n_bytes in saved.items() if n_bytes > 0)

    def _on_disk(self, specs: Sequence[ParamSpec], frozen: Sequence[ParamSpec]) -> tuple[Elsewhere, ...]:
        """Return the settings that keep all states on a disk, and the settings that also keep host parameters there."""
        config = self.terms.config
        if self.terms.store_kind.place != HOST:
            return ()
        settings: list[dict[str, Any]] = [{}]
        if config.offload_param == "cpu" and config.schedule != "delayed":
            settings.append({"offload_param": "nvme"})
        found = []
        for more in settings:
            there = self._with(**ON_DISK, nvme_path=FOLDER, **more)
            named = {"offload_optimizer": ON_DISK["offload_optimizer"], "nvme_path": FOLDER, **more}
            found.append(
                Elsewhere(
                    ", ".join(f"{name}={value!r}" for name, value in named.items()),
                    self._bytes_in(HOST, specs, frozen) - there._bytes_in(HOST, specs, frozen),
                    there._bytes_in(there.terms.store_kind.place, specs, frozen),
                )
            )
        return tuple(found)

    def _on_device(self, specs: Sequence[ParamSpec], frozen: Sequence[ParamSpec]) -> tuple[Elsewhere, ...]:
        """Return the settings that keep a share of the states on the device, if none are there yet.

        The device then also has the gradients of these states' buckets until the update.
        """
        config = self.terms.config
        if self.terms.device.addressable or config.offload_param is not None or config.keeps_states_on_device:
            return ()
        found = []
        for share in SHARES:
            there = self._with(device_states_bytes=share)
            there.allocated = copy(self.allocated)
            there.allocated.device_budget = share
            kinds, _, _ = there.terms.tiers(specs, share)
            gradients = 0 if there.terms.sums else sum(n * _gradient_bytes(bucket) for bucket, n in kinds)
            found.append(
                Elsewhere(
                    f"{SHARE}={share}",
                    self._bytes_in(HOST, specs, frozen) - there._bytes_in(HOST, specs, frozen),
                    gradients + sum(row.n_bytes for row in there._states_on_device(kinds)),
                )
            )
        return tuple(found)

    def _with(self, **fields: Any) -> "Planner":
        """Return a planner for the same process with other settings."""
        return Planner(self.terms.with_(**fields), self.allocated)

    def _bytes_in(self, where: str, specs: Sequence[ParamSpec], frozen: Sequence[ParamSpec]) -> int:
        return sum(row.n_bytes for row in self.host_rows(specs, frozen=frozen) if row.where == where)

    def host_rows(
        self, specs: Sequence[ParamSpec], *, frozen: Sequence[ParamSpec] = (), one_by_one: bool = False
    ) -> list[PlanRow]:
        """Return plan rows for the memory of the host and of the stores.

        Args:
            specs: the trained parameters.
            frozen: parameters that are not trained. Only their shards take this memory.
            one_by_one: True if gradients come one by one during backward, so that a bucket can be updated as soon as
                its gradients have arrived.
        """
        there, kinds, staged = self.terms.tiers(specs, self.allocated.device_budget)
        rules = dict.fromkeys(self.terms.rule_of(bucket) for bucket, _ in (*there, *kinds)) or {self.terms.rule: None}
        states = dict.fromkeys(name for rule in rules for name in rule.state_names)
        elsewhere = self.terms.store_kind.place
        kept = {place: dict.fromkeys(states, 0) for place in (elsewhere, HOST)}
        host = dict.fromkeys((GRADIENTS_ON_HOST, STAGING, PARAMETER_SHARDS), 0)
        split = self.terms.split(kinds, self.allocated.state_budget)
        for (bucket, _), *counts in zip(kinds, *split, strict=True):
            numel = len(self.terms.device.ranks) * bucket.shard_numel
            for name, format in self.terms.state_formats(bucket).items():
                for place, (_, n) in zip((HOST, elsewhere), counts, strict=True):
                    of_one = StateFormat.n_bytes if place == HOST else self.terms.store_kind.n_bytes
                    kept[place][name] += n * of_one(format, numel)
                if format.upper is not None and self.terms.shards_on_disk:  # in host memory it is a separate array
                    host[PARAMETER_SHARDS] = (
                        host.get(PARAMETER_SHARDS, 0) + counts[0][1] * numel * format.upper.itemsize
                    )
        store, blocks = self.terms.store_kind, self.allocated.blocks
        host[BLOCKS] = store.working_bytes([*blocks, *split[1]]) - store.working_bytes(blocks)
        if self.terms.reads_blocks and store.keeps_blocks:
            host[BLOCK_COPY] = max((size for size, n in split[1] if n), default=0)
        lent = self.terms.gradient_slot_bytes(kinds, self.allocated.gradient_slot_bytes)
        if lent is not None:
            host[GRADIENTS_ON_HOST] = GRADIENT_SLOTS * (lent - self.allocated.gradient_slot_bytes)
        elif self.terms.has_buffer:
            host[GRADIENTS_ON_HOST] = sum(n * self.terms.buffer_bytes(bucket) for bucket, n in kinds)
        if not self.terms.direct:
            slot_bytes = self.terms.slot_bytes([bucket for bucket, _ in staged])
            host[STAGING] = self.terms.staging_slots * max(slot_bytes - self.allocated.staging_slot_bytes, 0)
        if there and not self.allocated.reads_device:
            host[READ_STATES] = READ_BYTES
        if direction_bytes := self.terms.direction_bytes(bucket for bucket, _ in staged):
            more = max(direction_bytes - self.allocated.direction_slot_bytes, 0)
            host[DIRECTIONS] = self.terms.direction_slots * more
        if self.terms.shards_on_disk:
            alone = self.terms.kinds(frozen)
            had, before = self.allocated.shard_slots
            slots, each = self.terms.shard_slots(kinds, alone, self.allocated.shard_slots)
            host[PARAMETERS_ON_WAY] = slots * each - had * before
            spaces = [(n, bucket.shard_numel * bucket.dtype.itemsize) for bucket, n in alone if bucket.partitioned]
            kept[elsewhere][FROZEN_SHARDS] = sum(n * aligned(n_bytes) for n, n_bytes in spaces)
        elif self.terms.config.offload_param is not None:
            host[PARAMETER_SHARDS] = _shard_bytes(kinds) + _shard_bytes(self.terms.kinds(frozen))
        if rounding := self._rounding(kinds, staged, lent, (specs, frozen)):
            host[ROUNDING] = rounding
        smaller = _NARROWER if any(spec.dtype is FLOAT32 for spec in (*specs, *frozen)) else _RANKS
        remedies = {
            **_narrower_states(self.terms.config, rules, specs),
            GRADIENTS_ON_HOST: self._fewer_gradients(one_by_one) or smaller,
            **dict.fromkeys((STAGING, DIRECTIONS, BLOCKS, BLOCK_COPY, PARAMETERS_ON_WAY), "reduce_bucket_size"),
            PARAMETER_SHARDS: smaller,
        }
        return [
            PlanRow(
                what,
                where,
                n_bytes,
                remedies.get(what, _RANKS),
                brief=what == BLOCK_COPY or (what == BLOCKS and not store.keeps_blocks),
            )
            for where, of in (*kept.items(), (HOST, host))
            for what, n_bytes in of.items()
            if n_bytes or where == elsewhere or of is host
        ] + self._states_on_device(there)

    def _rounding(self, kinds: Kinds, staged: Kinds, lent: int | None, params: Iterable[Sequence[ParamSpec]]) -> int:
        """Return the bytes that an allocator of pinned memory takes beyond the buffers' own.

        Args:
            kinds: the kinds of new buckets whose states are not on the device.
            staged: the kinds of new buckets that pass through staging.
            lent: the bytes of each buffer that buckets share for their gradients; None: each has its own.
            params: the trained parameters, and the others.
        """
        terms, had = self.terms, self.allocated
        if not terms.pinned_rounding(3):
            return 0
        buckets, sizes = [bucket for bucket, _ in staged], Counter[int]()
        if not terms.direct and (size := terms.slot_bytes(buckets)) > had.staging_slot_bytes:
            sizes[size] += terms.staging_slots
        if (size := terms.direction_bytes(buckets)) > had.direction_slot_bytes:
            sizes[size] += terms.direction_slots
        pinned = [(bucket, n) for bucket, n in kinds if terms.buffer_is_pinned(bucket)]
        if lent is not None and pinned:
            sizes[lent] += GRADIENT_SLOTS * (lent > had.gradient_slot_bytes)
        elif terms.has_buffer:
            for bucket, n in pinned:
                sizes[terms.buffer_bytes(bucket)] += n
        for specs in params if terms.config.offload_param == "cpu" else ():
            shards = Counter[int]()
            for bucket in terms.cut(specs):
                shards[bucket.pieces[0].param] += _shard_bytes([(bucket, 1)])
            sizes.update(shards.values())
        return sum(n * terms.pinned_rounding(size) for size, n in sizes.items())

    def _fewer_gradients(self, one_by_one: bool) -> str | None:
        """Return a setting with which gradients take less host memory; None: there is no such setting.

        Args:
            one_by_one: True if gradients come one by one during backward.
        """
        if self.terms.lends_gradient_memory:
            return "reduce_bucket_size"
        if self.terms.accumulates:
            return "gradient_accumulation_steps=1"
        may_lend = one_by_one and self.terms.with_(update_in_backward=True).lends_gradient_memory
        return "update_in_backward=True" if may_lend else None

    def _device_rows(
        self, specs: Sequence[ParamSpec], frozen: Sequence[ParamSpec], besides: int, gradients_stay: bool
    ) -> list[PlanRow]:
        every = [*specs, *frozen]
        buckets = self.terms.cut(specs)
        parameters = besides + sum(_bytes(spec) for spec in every if not spec.partitioned)
        if self.terms.config.offload_param is None:
            parameters += _shard_bytes(self.terms.kinds(specs)) + _shard_bytes(self.terms.kinds(frozen))
        gathered, gradients = self._most_together(specs, frozen, buckets, gradients_stay)
        wide = any(spec.dtype is FLOAT32 for spec in every)
        if not (self.terms.has_buffer or self.terms.updates_early):
            sooner = _NARROWER if wide else _RANKS
        else:
            sooner = "wrap(model, ...), which takes them as they come" if gradients_stay else "reduce_bucket_size"
        if self.terms.config.keeps_states_on_device and not self.terms.device.addressable:
            smaller = "stage=3 and more ranks"
        elif self.terms.config.stage < 3:
            smaller = "stage=3, offload_param='cpu'"
        else:
            smaller = (
                "offload_param='cpu'" if self.terms.config.offload_param is None else "param_persistence_threshold"
            )
        rows = {
            PARAMETERS: (parameters, _NARROWER if wide else smaller),
            GATHERED: (gathered, "max_live_parameters, max_reuse_distance"),
            GRADIENTS: (gradients, sooner),
        }
        rows_of = [
            PlanRow(what, DEVICE, n_bytes, remedy, brief=what != PARAMETERS) for what, (n_bytes, remedy) in rows.items()
        ]
        each = [self.terms.in_flight_bytes(bucket) for bucket, _ in self.terms.kinds(specs)]
        on_way = min(self.terms.depth, len(buckets)) * max(each, default=0)
        rows_of.append(PlanRow("buckets on their way", DEVICE, on_way, "reduce_bucket_size", brief=True))
        if matrices := self.terms.matrix_bytes(buckets):
            rows_of.append(PlanRow(MATRICES, DEVICE, matrices, "reduce_bucket_size", brief=True))
        return rows_of

    def _states_on_device(self, there: Kinds) -> list[PlanRow]:
        """Return plan rows for the states of these buckets in the device's memory, and for the sums of their
        gradients."""
        n_bytes: dict[str, int] = {}
        for bucket, n in there:
            numel = len(self.terms.device.ranks) * bucket.shard_numel
            for name, format in self.terms.state_formats(bucket).items():
                n_bytes[name] = n_bytes.get(name, 0) + n * StatesOnDevice.n_bytes(format, numel)
        fewer = "offload_optimizer='cpu'" if self.terms.config.offload_optimizer is None else SHARE
        rows = [PlanRow(what, DEVICE, each, fewer, leaves=True) for what, each in n_bytes.items()]
        sums = sum(n * self.terms.device_sum_bytes(bucket) for bucket, n in there)
        return [*rows, PlanRow(SUMS, DEVICE, sums, fewer)] if sums else rows

    def _most_together(
        self,
        specs: Sequence[ParamSpec],
        frozen: Sequence[ParamSpec],
        buckets: Sequence[Bucket],
        gradients_stay: bool,
    ) -> tuple[int, int]:
        """Return ``(bytes of gathered parameters, bytes of gradients)`` at the moment of backward at which their sum is
        the largest.

        In backward, parameters are released while gradients appear. The order of uses is not known here. So this
        assumes the worst case: of the parameters that backward has not reached yet, as many stay gathered as the
        settings allow.
        """
        partitioned = [spec for spec in (*specs, *frozen) if spec.partitioned]
        numel, n_bytes = sum(spec.numel for spec in partitioned), sum(map(_bytes, partitioned))
        largest = max((spec.numel for spec in partitioned), default=0)
        # Backward first uses the last parameters of forward: half of the distance is in forward, half in backward.
        kept = max(self.terms.config.max_reuse_distance // 2, self.terms.config.prefetch_bucket_size) + largest
        live = max(min(self.terms.config.max_live_parameters, kept), largest)
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
        """Return ``(parameter, bytes)`` for each arrival of a parameter's gradient, in order: the bytes of all
        gradients on the device just after the arrival.

        A gradient is freed when all its buckets have left the device. If the device is addressable, a bucket leaves as
        soon as it is full. Otherwise a bucket leaves when ``depth`` later buckets are full. Parameters with the same
        ``finalized_with`` fill their buckets together, when the last gradient among them has arrived.

        Args:
            stay: True if all gradients stay on the device until the update.
        """
        sizes = [spec.numel * (FLOAT32 if self.terms.config.layerwise else spec.dtype).itemsize for spec in specs]
        stay = stay or not (self.terms.has_buffer or self.terms.updates_early)
        missing = {bucket.index: {piece.param for piece in bucket.pieces} for bucket in buckets}
        of: dict[int, set[int]] = {}
        for bucket in buckets:
            for param in missing[bucket.index]:
                of.setdefault(param, set()).add(bucket.index)
        members = {index: frozenset(params) for index, params in missing.items()}
        missing_of = Counter(spec.finalized_with for spec in specs)
        waiting: dict[int | None, list[int]] = {}
        in_flight = 0 if self.terms.device.addressable else self.terms.depth
        there = self.terms.on_device(buckets, self.allocated.device_budget) if not self.terms.sums else frozenset()
        leaving: deque[int] = deque()
        held, seen = 0, []
        for param in reversed(range(len(specs))):
            held += sizes[param]
            seen.append((param, held))
            number = specs[param].finalized_with
            waiting.setdefault(number, []).append(param)
            missing_of[number] -= 1
            for finalized in waiting.pop(number) if number is None or not missing_of[number] else ():
                for index in sorted(of.get(finalized, ())):
                    missing[index].discard(finalized)
                    if not missing[index] and index not in there:  # else the update reads it where it is
                        leaving.append(index)
            while len(leaving) > in_flight and not stay:
                index = leaving.popleft()
                for member in members[index]:
                    of[member].discard(index)
                    held -= 0 if of[member] else sizes[member]
        return seen

    def matrix_flops(self, specs: Sequence[ParamSpec]) -> list[int]:
        """Return, for each rank, the operations of matrix multiplications in an update of all parameters."""
        flops = [0] * self.terms.device.world_size
        for bucket in self.terms.cut(specs):
            kernel = self.terms.rule_of(bucket).device_kernel
            if kernel is not None and bucket.matrix is not None:
                matrices_of(bucket, flops, kernel.flops(bucket.matrix))
        return flops

    def traffic(self, specs: Sequence[ParamSpec], *, inputs: int = 0) -> tuple[Traffic, Traffic]:
        """Return the bytes that a step moves, and the bytes that the step's last bucket moves.

        With Adam, the kernel reads a gradient, reads and writes three states, and writes the parameter. It also reads
        the parameter if the parameter is a master weight or the upper half of one. With fp32 states these are 28 bytes
        an element for bf16 parameters (26.25 if their shards are on the host), and 28 bytes an element for fp32
        parameters that are updated in place.

        Gradients cross to the host in every micro-step. Parameters cross to the device once in a step. If their shards
        are on the host, they cross for each gathering instead, once or twice in each micro-step. States on a disk are
        read and written once in a step. Parameters that are stored with their states on a disk are also read for each
        gathering.

        Ranks exchange gradients in every micro-step. Each rank sends a parameter's shard to all others for each
        gathering, or once, after the update, if parameters are not partitioned.

        Args:
            inputs: the bytes of blocks' inputs that wait on the host in ``engine.accumulate()``. They cross to the host
                once, and to the device twice: for the next block's forward, and for backward. Their gradients wait,
                too, and cross once each way.
        """
        partitioned = sum(spec.numel for spec in specs if spec.partitioned)
        there, kinds, _ = self.terms.tiers(specs, self.allocated.device_budget)
        each = [(self._traffic_of(bucket, partitioned), n) for bucket, n in kinds]
        each += [(self._traffic_on_device(bucket, partitioned), n) for bucket, n in there]
        names = ("update", "to_host", "to_device", "sent", "on_device")
        update, to_host, to_device, sent, on_device = (sum(n * getattr(one, name) for one, n in each) for name in names)
        if not self.terms.device.addressable:
            to_host, to_device = to_host + 2 * inputs, to_device + 3 * inputs
        on_disk = self.terms.split(kinds, self.allocated.state_budget)[1]
        moved = sum(size * n for size, n in on_disk)
        gathered = sum(
            n * self.terms.bytes_to_gather(bucket) for (bucket, _), (_, n) in zip(kinds, on_disk, strict=True)
        )
        read = moved + self._gatherings(partitioned) * gathered
        whole = Traffic(update, to_host, to_device, read, moved, sent, on_device)
        buckets = self.terms.cut(specs)
        if not buckets:
            return whole, Traffic(0, 0, 0)
        is_there = buckets[-1].index in self.terms.on_device(buckets, self.allocated.device_budget)
        return whole, (self._traffic_on_device if is_there else self._traffic_of)(buckets[-1], partitioned)

    def _gatherings(self, partitioned: int) -> int:
        """Return how often a parameter is gathered in a step: once in each micro-step, or twice if parameters may not
        stay whole from forward to backward. If all micro-batches pass a block while it is whole, twice in all.

        Args:
            partitioned: the number of elements of all partitioned parameters.
        """
        stays = partitioned <= min(self.terms.config.max_live_parameters, self.terms.config.max_reuse_distance)
        if self.terms.config.layerwise:
            return 2
        return self.terms.micro_steps * (1 if stays else 2)

    def _traffic_on_device(self, bucket: Bucket, partitioned: int) -> Traffic:
        """Return the bytes that a bucket moves whose states are in the device's memory. None of them cross the link,
        unless ranks exchange in host memory."""
        alone = self._traffic_of(bucket, partitioned)
        alone = replace(alone, update=0, on_device=alone.update)
        if self.terms.device.world_size > 1 and self.terms.device.sizes.through_host:
            return alone
        return replace(alone, to_host=0, to_device=0)

    def _traffic_of(self, bucket: Bucket, partitioned: int) -> Traffic:
        steps = self.terms.micro_steps
        gradient = self.terms.buffer_dtype(bucket) if self.terms.has_buffer else self.terms.comm_dtype(bucket)
        formats = self.terms.state_formats(bucket)
        separate = self.terms.master(bucket) is Master.SEPARATE
        numel = len(self.terms.device.ranks) * bucket.shard_numel
        states = sum(format.n_bytes(numel) for format in formats.values())
        update = numel * (gradient.itemsize + (1 if separate else 2) * bucket.dtype.itemsize) + 2 * states
        # The first pass reads a gradient and the moments, and writes directions. The second pass reads the result.
        direction = 0 if self.terms.rule_of(bucket).device_kernel is None else BFLOAT16.itemsize
        if direction:
            others = sum(format.n_bytes(numel) for name, format in formats.items() if name != MASTER)
            update += numel * (gradient.itemsize + 2 * direction) + others
        gatherings = self._gatherings(partitioned) if bucket.partitioned else 1
        reduced = steps * self.terms.comm_dtype(bucket).itemsize
        sent = (
            (self.terms.device.world_size - 1) * numel * (reduced + gatherings * bucket.dtype.itemsize + 2 * direction)
        )
        if self.terms.device.addressable:
            return Traffic(update, 0, 0, sent=sent)
        crossing = self.terms.device.sizes.link_numel(bucket)
        to_host = steps * crossing * self.terms.device.sizes.leaves_as(self.terms.comm_dtype(bucket)).itemsize
        from_shards = bucket.partitioned and self.terms.config.offload_param is not None
        to_device = (gatherings if from_shards else 1) * crossing * bucket.dtype.itemsize
        return Traffic(update, to_host + crossing * direction, to_device + crossing * direction, sent=sent)


def _gradient_bytes(bucket: Bucket) -> int:
    return bucket.padded_numel * bucket.dtype.itemsize


def _bytes(spec: ParamSpec) -> int:
    return spec.numel * spec.dtype.itemsize


def _shard_bytes(kinds: Kinds) -> int:
    return sum(n * bucket.shard_numel * bucket.dtype.itemsize for bucket, n in kinds if bucket.partitioned)
