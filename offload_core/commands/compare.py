"""The plans of a model in each tier of the places for states and parameters, on the machine that was asked for."""

import argparse
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.options import OffloadConfig
from ..device.exchange_sizes import planned_device, planned_jax_device
from ..disk.folders import free_bytes
from ..dtypes import ElementType
from ..layout.partition import ParamSpec
from ..memory.host_memory import available_bytes
from ..memory.plan import DEVICE, HOST, MemoryPlan, PlanRow
from ..plans.at_once import DONATE, rows_at_once
from ..plans.planner import FOLDER, Planner, Traffic, fill_device_memory, fill_host_memory
from ..plans.prediction import Blocks, Speeds, StepTime, predict
from ..plans.terms import BucketTerms
from ..rules import MASTER, RULES
from ..step.loss_scale import LossScaler
from ..support.processors import default_threads
from .jax_shapes import MeshPart
from .machine import measure_bandwidths, measure_disk
from .model_shapes import Shapes, specs_of

TIERS: dict[str, tuple[tuple[int, str | None], ...]] = {
    "cpu": ((1, None), (2, None), (3, None), (3, "cpu")),
    "nvme": ((1, None), (2, None), (3, None), (3, "cpu"), (3, "nvme")),
    "none": ((1, None), (2, None), (3, None)),
}
"""By ``offload_optimizer``, the fastest first: ``stage`` and ``offload_param``."""
_OF_DISK = ("nvme_path", "nvme_host_bytes", "disk_memory", "disk_bandwidth")
_DAY = 24 * 60 * 60
FIELDS = (
    "reduce_bucket_size",
    "gradient_accumulation_steps",
    "max_live_parameters",
    "layerwise",
    "schedule",
    "update_in_backward",
    "state_format",
    "master_dtype",
    "optimizer",
    "momentum",
    "activation_memory",
    "host_activation_memory",
    "device_states_bytes",
)
_STATES = {MASTER, *(state.name for rule in RULES.values() for state in rule.every_state)}
"""The names of states in plans."""


@dataclass(frozen=True)
class Disk:
    """Bytes that a process's states move to and from a disk in each step."""

    read: float
    written: float
    a_day: float | None
    """Bytes written by all processes of a machine in a day of such steps; None: the disk's bandwidth is unknown."""


@dataclass(frozen=True)
class Inputs:
    """Bytes of blocks' inputs that wait for backward on one rank, in ``engine.accumulate()``."""

    on_host: int
    on_device: int

    @property
    def n_bytes(self) -> int:
        return self.on_host + self.on_device


@dataclass(frozen=True)
class Tier:
    """The plan for one stage; in JAX for one way to give gradients."""

    about: dict[str, Any]
    """The settings of the plan."""
    plan: MemoryPlan
    missing: dict[str, int]
    step: StepTime
    traffic: Traffic
    """The bytes that a rank moves in a step."""
    matrix_flops: list[int]
    """The multiplications of each rank with matrices."""
    disk: Disk | None = None
    """None: no states are on a disk."""
    working: Mapping[bool, Counter[int]] = field(default_factory=dict)
    """As :attr:`Member.working`."""
    frozen: bool = False
    """True if the model is not trained."""
    inputs: Inputs | None = None
    """None: unknown, or micro-batches pass the model one after the other."""
    accumulate: "Tier | None" = None
    """The plan of the same tier with ``engine.accumulate()``; None: it was not asked for."""

    @property
    def name(self) -> str:
        disk = {"nvme": ", nvme", None: ", on the device"}.get(self.about.get("offload_optimizer", "cpu"), "")
        if self.about.get("offload_param") == "nvme":
            disk = ""  # states are there, too
        if "donate" in self.about:
            return (DONATE if self.about["donate"] else "update(grads)") + disk
        stage, tier = self.about["stage"], self.about["offload_param"]
        return f"stage {stage}" + (f", offload_param={tier!r}" if tier else "") + disk

    @property
    def states(self) -> dict[str, int]:
        """The bytes of states by their place."""
        places = (DEVICE, HOST, *self.plan.elsewhere)
        rows = [row for row in self.plan.rows if row.what in _STATES]
        return {where: sum(row.n_bytes for row in rows if row.where == where) for where in places}

    @property
    def fits(self) -> bool:
        return not self.missing


class Asked:
    """The machine and the model that were asked for, and the plans of their tiers."""

    def __init__(
        self,
        args: argparse.Namespace,
        shapes: Shapes,
        dtypes: ElementType | dict[str, ElementType],
        blocks: Blocks | None = None,
        *,
        frozen: bool = False,
    ) -> None:
        self.args, self.shapes, self.dtypes, self.frozen = args, shapes, dtypes, frozen
        self.blocks = blocks
        self.processes: int = args.local_world_size or args.world_size
        """Those of a machine."""
        self.host: int = available_bytes() if args.host_memory is None else args.host_memory
        self.in_jax = args.frontend == "jax"
        self.part = MeshPart(args.mesh or (args.world_size,), args.world_size)
        self.devices = self.part.devices if self.in_jax else 1
        """Those of a process."""
        self.stores = (
            (args.offload_optimizer,) if args.offload_optimizer else ("cpu", "nvme") if disk_options(args) else ("cpu",)
        )
        self.disk: int | None = args.disk_memory
        """Bytes free on the disks of a machine; None: unknown."""
        disk_bandwidth = args.disk_bandwidth
        if args.nvme_path and "nvme" in self.stores:
            if self.disk is None:
                self.disk = free_bytes(args.nvme_path)
            if disk_bandwidth is None:
                disk_bandwidth = measure_disk(args.nvme_path).both
        dram = args.dram_bandwidth or measure_bandwidths(default_threads()).dram
        self.speeds = Speeds(dram, args.link_bandwidth, args.flops, disk_bandwidth, args.device_bandwidth)

    def tiers(self, stores: Sequence[str] | None = None, **fields: Any) -> list[Tier]:
        """Plan each tier with these settings.

        Args:
            stores: values of ``offload_optimizer``, in the order of the tiers; None: those that were asked for.
        """
        args = argparse.Namespace(**vars(self.args) | fields)
        plan = self._plan_jax if self.in_jax else self._plan_torch
        return [plan(args, store, about) for store in stores or self.stores for about in self._tiers_of(store)]

    def _tiers_of(self, store: str) -> list[dict[str, Any]]:
        if self.in_jax:
            return [{"donate": True}, {"donate": False}]
        return [
            {"stage": stage, "offload_param": place}
            for stage, place in TIERS[store]
            if self.args.stage in (None, stage)
            and self.args.offload_param in (None, place or "none")
            and not (place == "nvme" and self.args.schedule == "delayed")
            and not (place and asks_device(self.args))
        ]

    def _plan_torch(self, args: argparse.Namespace, store: str, about: dict[str, Any]) -> Tier:
        config = _config(args, store, **about)
        on_host = args.device == "cpu"
        specs = specs_of(self.shapes, self.dtypes, config, args.world_size)
        scaled = LossScaler.of(config, [spec.dtype for spec in specs]) is not None
        terms = BucketTerms(config, planned_device(args.world_size, addressable=on_host), scaled=scaled)
        planner = self._planner(terms, store)
        if self.frozen:
            return self._tier(args, about, store, planner, [], lambda: planner.plan([], frozen=specs))
        inputs = self._inputs(config)
        if inputs is None:
            return self._tier(args, about, store, planner, specs, lambda: planner.plan(specs))
        row = PlanRow("inputs of blocks", DEVICE, inputs.on_device, "host_activation_memory")

        def plan() -> MemoryPlan:
            made = planner.plan(specs)
            return replace(made, rows=(*made.rows, row))

        return self._tier(args, about, store, planner, specs, plan, inputs)

    def _inputs(self, config: OffloadConfig) -> Inputs | None:
        """Return the inputs of blocks that wait; None: they are unknown, or none wait."""
        tokens, own = self.args.tokens, self.dtypes
        if not config.layerwise or self.blocks is None or tokens is None or not isinstance(own, ElementType):
            return None
        n_bytes = self.blocks.input_bytes(tokens, config.target_dtype or own)
        on_host = min(n_bytes, config.host_activation_memory)
        return Inputs(on_host, n_bytes - on_host)

    def _plan_jax(self, args: argparse.Namespace, store: str, about: dict[str, Any]) -> Tier:
        config = _config(args, store)
        on_host = args.device == "cpu"
        terms = BucketTerms(config, planned_jax_device(on_host=on_host))
        planner = self._planner(terms, store)
        specs, arrays = self.part.specs_of(self.shapes, self.dtypes, config, on_host=on_host)

        def plan() -> MemoryPlan:
            rows = rows_at_once(terms, specs, arrays, on_host=on_host, donate=about["donate"])
            return planner.plan_with(rows, specs, devices=self.devices, shared=on_host)

        return self._tier(args, about, store, planner, specs, plan)

    def _planner(self, terms: BucketTerms, store: str) -> Planner:
        return Planner(terms, free_elsewhere={terms.store_kind.place: self.disk} if store == "nvme" else None)

    def _tier(
        self,
        args: argparse.Namespace,
        about: dict[str, Any],
        store: str,
        planner: Planner,
        specs: Sequence[ParamSpec],
        make_plan: Callable[[], MemoryPlan],
        inputs: Inputs | None = None,
    ) -> Tier:
        on_host = 0 if inputs is None else inputs.on_host
        plan = fill_device_memory(planner, make_plan(), make_plan, specs, self.device_memory)
        plan = fill_host_memory(planner, plan, make_plan, self.host // self.processes)
        step = predict(
            planner,
            specs,
            self.speeds,
            processes=self.processes,
            devices=self.devices,
            numel=sum(map(math.prod, self.shapes.values())) if self.in_jax else None,
            tokens=args.tokens,
            checkpointing=args.activation_checkpointing,
            inputs=on_host,
        )
        traffic, _ = planner.traffic(specs, inputs=on_host)
        missing = plan.missing(self.host, self.device_memory, processes=self.processes)
        disk = None
        if store == "nvme" and not self.frozen:
            written = self.processes * traffic.disk_write
            a_day = None if step.disk is None else written * _DAY / step.seconds if written else 0.0
            disk = Disk(traffic.disk_read, traffic.disk_write, a_day)
        about = {**about, "offload_optimizer": None if store == "none" else store}
        flops, working = (
            planner.matrix_flops(specs),
            planner.terms.working_sizes(specs, planner.allocated.device_budget),
        )
        return Tier(about, plan, missing, step, traffic, flops, disk, working, self.frozen, inputs)

    @property
    def device_memory(self) -> int | None:
        """The memory of a process's devices; None: unknown."""
        return None if self.args.device_memory is None else self.devices * self.args.device_memory


def _config(args: argparse.Namespace, store: str, **about: Any) -> OffloadConfig:
    given = {name: getattr(args, name) for name in FIELDS if getattr(args, name) is not None}
    if store == "nvme":
        folders = tuple(args.nvme_path or (FOLDER,))
        given |= {"offload_optimizer": store, "nvme_path": folders, "nvme_host_bytes": args.nvme_host_bytes}
    if store == "none":
        given |= {"offload_optimizer": None}
    return OffloadConfig(param_dtype=args.param_dtype, **about, **given)


def asks_device(args: argparse.Namespace) -> bool:
    """True if states on the device were asked for."""
    return args.offload_optimizer == "none" or args.device_states_bytes not in (None, 0)


def disk_options(args: argparse.Namespace) -> list[str]:
    """The options of disks that were given."""
    return [f"--{name.replace('_', '-')}" for name in _OF_DISK if getattr(args, name) is not None]
