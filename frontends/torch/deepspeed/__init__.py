"""DeepSpeed 0.19.8's names over an :class:`Engine`: ``from frontends.torch import deepspeed``, and a script goes on.

A face: training is :class:`Engine`'s. docs/deepspeed.md lists every name: taken, different, or refused.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from offload_core.config.options import OffloadConfig
from offload_core.deepspeed import translation
from offload_core.deepspeed.names import VERSION, is_theirs, refuse
from offload_core.errors import ConfigError, ConfigWarning, ParameterError
from offload_core.support.checks import kind_of, shown
from offload_core.support.user_line import UserLine

from ..params.casting import round_to_types
from ..stage3.construction import in_shards, shards_of
from ..stage3.leaf_modules import leaf_modules, mark_leaf
from ..training.groups import all_or_given
from ..training.registration import check_is_free
from . import accelerator, comm, ops, runtime, utils, zero
from .accelerator import get_accelerator, rank_device
from .clients import Client, release_client
from .comm import init_distributed
from .engine import DeepSpeedEngine, MisuseError
from .run_counts import RunCounts
from .runtime.zero.partition_parameters import mark
from .schedulers import SCHEDULERS
from .utils import OnDevice, log_dist, logger

__version__ = VERSION
__all__ = ["DeepSpeedEngine", "OnDevice", "accelerator", "add_config_arguments", "comm", "get_accelerator",
           "init_distributed", "initialize", "log_dist", "logger", "ops", "runtime", "utils", "zero"]  # fmt: skip


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Return an engine, its optimizer, a data loader for ``training_data`` (or None) and the scheduler (or None).

    The model is moved to the rank's device. A client's optimizer, or a function that makes one of the parameters, hands
    its groups, hyperparameters and states over to the rule of that name; the engine steps the scheduler.

    Args:
        args: an object whose ``deepspeed_config`` may be the configuration.
        model_parameters: the parameters to train, or groups; None: all of the model.
        lr_scheduler: a scheduler of the client's optimizer, or a function that makes one of an optimizer.
        config: a DeepSpeed configuration, a dict or the path of a file; ``config_params`` is its old name.

    Raises:
        ConfigError, ParameterError, StateError: before the model is changed.
        HostMemoryError: the model may have been moved to the device.
    """
    for name, value in {"mpu": mpu, "mesh_param": mesh_param}.items():
        if value is not None:
            raise ConfigError(f"initialize({name}=...): {refuse('initialize', name)}")
    _check_model(model)
    assert model is not None
    of_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    given = translation.the_one_given(config if config is not None else config_params, of_args)
    check_is_free(model, but=optimizer)
    if lr_scheduler is not None and not (callable(lr_scheduler) or hasattr(lr_scheduler, "step")):
        raise ConfigError(f"lr_scheduler: got {shown(lr_scheduler)}, expected a scheduler or a function that makes one")
    if not (training_data is None or hasattr(training_data, "__getitem__") or hasattr(training_data, "__iter__")):
        raise ConfigError(f"training_data: got {shown(training_data)}, expected a torch Dataset")
    for section, name, own in ("optimizer", "optimizer", optimizer), ("scheduler", "lr_scheduler", lr_scheduler):
        if own is not None and given.get(section):
            UserLine.now().warn(ConfigWarning(f"config: initialize({name}=...) goes before its section {section!r}"))
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer([*(model.parameters() if model_parameters is None else model_parameters)])
    if isinstance(lr_scheduler, LRScheduler) and not isinstance(optimizer, torch.optim.Optimizer):
        raise MisuseError("lr_scheduler: its optimizer was not given; expected optimizer=..., or a function of one")
    client = None if optimizer is None else Client.of(optimizer)
    resolved = _resolved(given, client, model)
    has_optimizer = client is not None or given.get("optimizer") is not None
    params = all_or_given(model, client.groups if client else model_parameters) if has_optimizer else []
    if not any(map(in_shards, model.parameters())):
        model.to(rank_device())
        round_to_types(model, resolved)
    if why := translation.rounds_elsewhere(given, resolved.param_dtype, world_size=comm.get_world_size()):
        UserLine.now().warn(ConfigWarning(why))
    engine = DeepSpeedEngine(model, resolved, given, params)
    with engine.closed_on_error("initialize"):
        for param in model.parameters() if engine.zero_optimization_stage() == 3 else ():
            mark(param, param in engine.optimizer.sharding)
        for module in leaf_modules(model, resolved.leaf_modules):  # those that the configuration names stay so
            mark_leaf(module, True)
        if client is not None:
            client.load(engine.optimizer)
            engine._counts = RunCounts(engine.optimizer, engine.train_batch_size)  # its updates so far are not counted
        engine.lr_scheduler = _scheduler(lr_scheduler, given, engine) if has_optimizer else None
        engine.collate_fn = collate_fn
        if training_data is not None:
            engine.training_dataloader = _loader(
                engine, training_data, collate_fn, bool(given.get("dataloader_drop_last"))
            )
    if client is not None:
        release_client(optimizer, engine.optimizer)
    return engine, engine.optimizer if has_optimizer else None, engine.training_dataloader, engine.lr_scheduler


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise MisuseError(f"initialize: model is {kind_of(model)}; expected model=..., a torch.nn.Module")
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.partition(".")[0] == "deepspeed" and kind.__name__ in ("PipelineModule", "MoE"):
            why = refuse("deepspeed", kind.__name__)
            raise ParameterError(f"initialize: {name or 'the model'} is a deepspeed {kind.__name__}: {why}")


def _resolved(given: Mapping[str, Any], client: Client | None, model: nn.Module) -> OffloadConfig:
    """Return the settings that the configuration and the client's optimizer mean. The scheduler is apart."""
    rest = {name: value for name, value in given.items() if name not in ("scheduler", "managed_gradient_accumulation")}
    if client is not None:
        rest.pop("optimizer", None)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    resolved = OffloadConfig.resolve(rest, world_size=world_size, **(client.fields if client else {}))
    cut = next((shards.made_by.config for shards in map(shards_of, model.parameters()) if shards is not None), None)
    return resolved if cut is None else replace(resolved, reduce_bucket_size=cut.reduce_bucket_size)


def _scheduler(client: Any, given: Mapping[str, Any], engine: DeepSpeedEngine) -> Any:
    """Return the scheduler that the engine steps; None: there is none."""
    if client is not None:
        return client(engine.optimizer) if callable(client) else client
    section = given.get("scheduler") or {}
    make = SCHEDULERS.get(str(section.get("type")))
    return None if make is None else make(engine.optimizer, **(section.get("params") or {}))


def _loader(engine: DeepSpeedEngine, dataset: Any, collate_fn: Any, drop_last: bool) -> DataLoader[Any]:
    """Return a loader of this rank's part of a dataset."""
    split = not isinstance(dataset, IterableDataset)
    sampler: Any = DistributedSampler(dataset, engine.world_size, engine.global_rank) if split else None
    batch, pins = engine.train_micro_batch_size_per_gpu(), engine.device.type != "cpu"
    return DataLoader(dataset, batch, sampler=sampler, collate_fn=collate_fn, pin_memory=pins, drop_last=drop_last)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE``, and their old spellings, to a parser, and return it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for name in ("deepspeed", "deepscale"):
        group.add_argument(f"--{name}", default=False, action="store_true", help="a flag for the program's own use")
        group.add_argument(f"--{name}_config", default=None, type=str, help="the path of a DeepSpeed configuration")
    return parser


def __getattr__(name: str) -> Any:
    if name == "dist":
        return comm
    known = is_theirs("deepspeed", name)
    raise AttributeError(f"deepspeed.{name}: {refuse('deepspeed', name)}" if known else f"deepspeed has no {name!r}")
