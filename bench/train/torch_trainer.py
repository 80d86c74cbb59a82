"""Training through `frontends.torch`, and the plain PyTorch loop to compare it with."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from bench.train.gpt_torch import GPT
from bench.train.presets import BETAS, OPTIMIZERS, WEIGHT_DECAY, learning_rate
from bench.train.ranks import Ranks
from bench.train.trainer import Settings, Step, check_room, terms_and_specs
from frontends.torch import init, init_process_group, wrap
from frontends.torch.ranks.device import told_by_allocator
from frontends.torch.ranks.launch import device_of
from offload_core.errors import CollectiveError
from offload_core.memory.report import MemoryReport
from offload_core.plans.planner import Planner
from offload_core.support.launchers import Launched
from offload_core.support.processors import default_threads


class ProcessGroup(Ranks):
    """The ranks of `torch.distributed`."""

    def gather(self, values: Sequence[float]) -> np.ndarray:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        of_accelerator = accelerator and dist.get_default_backend_for_device(accelerator)
        device = accelerator if dist.get_backend() == of_accelerator else "cpu"
        mine = torch.tensor(values, dtype=torch.float64, device=device)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            dist.all_gather(rows, mine)
        except RuntimeError as error:
            raise CollectiveError(f"rank {self.rank} lost another rank ({error})") from error
        return torch.stack(rows).cpu().numpy()


@contextmanager
def join(settings: Settings) -> Iterator[Ranks]:
    """Meet the other ranks, where a launcher started several, and leave them at the end."""
    ranks = ProcessGroup.launched()
    if ranks.world_size == 1:
        yield Ranks()
        return
    # Launchers set OMP_NUM_THREADS to 1, however many processors a rank has.
    torch.set_num_threads(default_threads())
    timeout = None if settings.timeout is None else timedelta(seconds=settings.timeout)
    init_process_group(device_type(settings), timeout=timeout)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def device_type(settings: Settings) -> str | None:
    return None if settings.device == "auto" else settings.device


def make_offloaded(settings: Settings, ranks: Ranks) -> "Offloaded":
    device = device_of(Launched.read(), device_type(settings))
    check_room(settings, ranks, on_host=device.type == "cpu")
    return Offloaded(settings, ranks, device)


def make_plain(settings: Settings, ranks: Ranks) -> "Plain":
    return Plain(settings, ranks, device_of(Launched.read(), device_type(settings)))


def name_of(device: torch.device) -> str:
    """Return the device's name, as its maker calls it if torch knows."""
    known = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if known is None else str(known(device))


def partitioning(settings: Settings) -> dict[str, Any]:
    """The fields of the configuration that say how parameters are held."""
    return {
        "stage": settings.stage,
        "offload_optimizer": settings.offload_optimizer,
        "device_states_bytes": settings.device_states_bytes,
        "offload_param": settings.offload_param,
        "state_format": settings.state_format,
        "master_dtype": settings.master_dtype,
        "param_persistence_threshold": settings.persistence_threshold,
    }


def make_model(settings: Settings, device: torch.device, in_shards: bool = False) -> GPT:
    """Make the model on its device and in its dtype: a large model in fp32, or on the host, may not fit."""
    torch.manual_seed(settings.seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, settings.param_dtype))
    try:
        with device, init(**partitioning(settings), enabled=in_shards):
            return GPT(settings.gpt, settings.activation_checkpointing)
    finally:
        torch.set_default_dtype(default)


def make_schedule(optimizer: torch.optim.Optimizer, settings: Settings) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: float(learning_rate(step, 1.0, settings.warmup, settings.steps, np)))


class TorchTrainer:
    """The part that both loops share; `model` is the module, or the engine around it."""

    model: torch.nn.Module
    device: torch.device

    def on_device(self, batch: np.ndarray) -> tuple[Tensor, Tensor]:
        windows = torch.from_numpy(batch).to(self.device, torch.int64)
        return windows[:, :-1], windows[:, 1:]

    @torch.no_grad()
    def losses(self, batch: np.ndarray) -> np.ndarray:
        return np.array([self.model(*self.on_device(batch)).item()])

    @torch.no_grad()
    def next_byte_logits(self, text: np.ndarray) -> np.ndarray:
        inputs = torch.from_numpy(text.astype(np.int64)).to(self.device)
        return self.model(inputs[None])[0, -1, :256].cpu().numpy()


class Offloaded(TorchTrainer):
    plain_name = "torch.optim.AdamW(fused=True)"

    def __init__(self, settings: Settings, ranks: Ranks, device: torch.device):
        self.device = device
        terms, specs = terms_and_specs(settings, ranks.world_size, on_host=False)
        self._accelerator_bytes = Planner(terms).plan(specs).device_bytes
        self.device_name = name_of(device)
        self.model = self.engine = wrap(
            make_model(settings, device, settings.init),
            lr=settings.lr,
            optimizer=settings.optimizer,
            **OPTIMIZERS[settings.optimizer],
            gradient_clipping=settings.clip,
            gradient_accumulation_steps=settings.accumulate,
            layerwise=settings.layerwise,
            param_dtype=settings.param_dtype,
            schedule=settings.schedule,
            **partitioning(settings),
        )
        self.schedule = make_schedule(self.engine.optimizer, settings)

    def step(self, batches: list[np.ndarray]) -> Step:
        lr = self.schedule.get_last_lr()[0]
        losses = []
        if self.engine.offload_config.layerwise:
            losses = self.engine.accumulate([*map(self.on_device, batches)], lambda loss, _: loss)
            report = self.engine.step()
        else:
            for batch in batches:
                loss = self.engine(*self.on_device(batch))
                self.engine.backward(loss)
                report = self.engine.step()
                losses.append(loss.detach())
        if report.updated:
            self.schedule.step()
        return Step(torch.stack(losses).mean().item(), report.grad_norm, lr, report.skipped)

    @property
    def sent_bytes(self) -> int:
        return self.engine.sent_bytes

    def save(self, folder: Path, extras: Any, keep: int, *, wait: bool) -> None:
        stateful = {"schedule": self.schedule}
        self.engine.save_checkpoint(folder, stateful=stateful, extras=extras, keep=keep, wait=wait)

    def load(self, path: Path) -> Any:
        return self.engine.load_checkpoint(path, stateful={"schedule": self.schedule})

    def memory_report(self) -> MemoryReport:
        return self.engine.memory_report()

    def trace(self, path: Path) -> AbstractContextManager[None]:
        return self.engine.trace(path)

    def accelerator_bytes(self) -> int:
        return self._accelerator_bytes

    def peak_device_bytes(self) -> int | None:
        known = self.device.type != "cpu"
        return told_by_allocator(torch.accelerator.max_memory_allocated, self.device) if known else None


class Plain(TorchTrainer):
    """`torch.optim.AdamW(fused=True)`; below fp32 it holds fp32 master weights by hand, on the device.

    Several ranks average the summed gradients, in fp32, and each updates the whole model.
    """

    def __init__(self, settings: Settings, ranks: Ranks, device: torch.device):
        self.device = device
        self.ranks = ranks
        self.clip = settings.clip
        self.model = make_model(settings, device)
        self.parameters = list(self.model.parameters())
        # An fp32 parameter is its own master weight: `float()` and `detach()` share its memory.
        self.masters = [p.detach().float().requires_grad_() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=settings.lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self.schedule = make_schedule(self.optimizer, settings)

    def step(self, batches: list[np.ndarray]) -> Step:
        lr = self.schedule.get_last_lr()[0]
        losses = []
        for batch in batches:
            loss = self.model(*self.on_device(batch))
            loss.backward()
            losses.append(loss.detach())
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None
        if len(batches) > 1:
            for master in self.masters:
                master.grad.mul_(1 / len(batches))
        if self.ranks.world_size > 1:
            for master in self.masters:
                dist.all_reduce(master.grad)
                master.grad.div_(self.ranks.world_size)
        norm = None if self.clip is None else torch.nn.utils.clip_grad_norm_(self.masters, self.clip).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter.dtype != master.dtype:
                    parameter.copy_(master)
        return Step(torch.stack(losses).mean().item(), norm, lr)
