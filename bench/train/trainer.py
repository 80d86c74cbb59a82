"""The interface between the training program and a framework: settings in, steps and losses out."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.train.presets import OPTIMIZERS
from bench.train.ranks import Ranks
from offload_core.commands.model_shapes import GPTConfig, specs_of
from offload_core.config.options import OffloadConfig
from offload_core.device.exchange_sizes import planned_device
from offload_core.dtypes import FLOAT32
from offload_core.errors import HostMemoryError
from offload_core.layout.partition import ParamSpec
from offload_core.memory.host_memory import available_bytes, format_bytes
from offload_core.memory.plan import PlanRow
from offload_core.memory.report import MemoryReport
from offload_core.plans.planner import Planner
from offload_core.plans.terms import STAGING, BucketTerms


@dataclass(frozen=True)
class Settings:
    """A run, resolved: the preset's values with those of the command line over them."""

    frontend: str
    optimizer: str
    preset: str
    gpt: GPTConfig
    device: str
    devices: int
    """The devices of each process."""
    timeout: int | None
    """Seconds that ranks wait for each other; None: the framework's default."""
    param_dtype: str
    stage: int
    offload_optimizer: str | None
    """None: states are on the device."""
    device_states_bytes: int | float | None
    """The bytes of the device's memory for states, or their share of all states."""
    offload_param: str | None
    state_format: str
    master_dtype: str | None
    init: bool
    """True if the model is built in shards."""
    persistence_threshold: int
    schedule: str
    seed: int
    steps: int
    micro_batch: int
    context: int
    accumulate: int
    layerwise: bool
    """True if the micro-batches of an update pass block by block (torch)."""
    clip: float | None
    lr: float
    warmup: int
    activation_checkpointing: bool
    compare: int
    """The number of first steps that the framework's own AdamW takes beside it."""
    eval_batches: int
    sample_bytes: int


@dataclass(frozen=True)
class Step:
    """The result of one update: the mean loss before it in nats a byte, and the norm where it was computed."""

    loss: float
    grad_norm: float | None
    lr: float
    skipped: str | None = None


class Trainer(Protocol):
    """A model and its optimizer.

    Batches are int32 of (windows, context + 1), `micro_batch` windows for each rank of this process, in their order.
    """

    def step(self, batches: list[np.ndarray]) -> Step:
        """An update, of a batch for each micro-step."""
        ...

    def losses(self, batch: np.ndarray) -> np.ndarray:
        """The loss of each of this process's ranks on its own windows; all ranks call it alike."""
        ...

    def next_byte_logits(self, text: np.ndarray) -> np.ndarray:
        """fp32 logits of the 256 bytes that may follow `text`, which is at most `context` long.

        One rank calls it, at stage 3 all.
        """
        ...


class OffloadTrainer(Trainer, Protocol):
    """A trainer that goes through a front end."""

    device_name: str
    plain_name: str
    """The framework's own optimizer."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients and parameters that each of this process's ranks has sent to other ranks."""
        ...

    def save(self, folder: Path, extras: Any, keep: int, *, wait: bool) -> None:
        """Save a checkpoint, of all ranks; without `wait` in the background."""
        ...

    def load(self, path: Path) -> Any:
        """Load one, and return its extras."""
        ...

    def memory_report(self) -> MemoryReport: ...

    def trace(self, path: Path) -> AbstractContextManager[None]:
        """Record the steps of the body to a file; every rank writes its own."""
        ...

    def accelerator_bytes(self) -> int:
        """Return the bytes that the front end plans on an accelerator, temporary ones included, also without one."""
        ...

    def peak_device_bytes(self) -> int | None:
        """Return the most bytes that the framework held on a device; None if it keeps no count (the CPU)."""
        ...


def terms_and_specs(settings: Settings, world_size: int, on_host: bool) -> tuple[BucketTerms, list[ParamSpec]]:
    """Return the terms and parameters with which the core plans, before a model is made."""
    config = OffloadConfig(
        optimizer=settings.optimizer,
        **OPTIMIZERS[settings.optimizer],
        stage=settings.stage,
        offload_optimizer=settings.offload_optimizer,
        device_states_bytes=settings.device_states_bytes,
        offload_param=settings.offload_param,
        state_format=settings.state_format,
        master_dtype=settings.master_dtype,
        param_persistence_threshold=settings.persistence_threshold,
        param_dtype=settings.param_dtype,
        schedule=settings.schedule,
        gradient_accumulation_steps=settings.accumulate,
    )
    terms = BucketTerms(config, planned_device(world_size, addressable=on_host))
    return terms, specs_of(settings.gpt.shapes, FLOAT32, config, world_size)


def check_room(settings: Settings, ranks: Ranks, on_host: bool) -> None:
    """Refuse a model that cannot fit before it is made: the front end plans only when it sees the parameters.

    This is the least that the ranks on this machine need; what a front end adds, it checks by itself.
    """
    terms, specs = terms_and_specs(settings, ranks.world_size, on_host)
    plan = Planner(terms).plan(specs)
    least = [row for row in plan.rows if row.what != STAGING]
    if terms.config.takes_apart(ranks.world_size) and not settings.init:  # it is made whole, and then cut
        whole = sum(spec.numel * spec.dtype.itemsize for spec in specs)
        least.append(PlanRow("the model while it is whole", "device", whole, "--init", passing=True))
    plan = replace(plan, rows=tuple(least))
    available = available_bytes()
    if needed := plan.missing(available, processes=ranks.local_world_size).get("host"):
        of_ranks = f" for {ranks.local_world_size} ranks" if ranks.local_world_size > 1 else ""
        raise HostMemoryError(
            f"{settings.preset} in {settings.param_dtype} needs at least {format_bytes(needed)} of host memory"
            f"{of_ranks} ({plan.largest('host')}), and {format_bytes(available)} is available; take a smaller --preset"
        )
