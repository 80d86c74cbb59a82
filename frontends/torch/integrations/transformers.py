"""Hugging Face's Trainer: checkpoints in shards, and memory and norms in its log."""

import json
import os
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from offload_core.config.options import is_set
from offload_core.errors import CheckpointError, ConfigError, ConfigWarning
from offload_core.step_log import StepLog

from ..optim.optimizer import OffloadedAdamW, OffloadedOptimizer
from ..ranks.device import told_by_allocator
from .accelerate import EngineOptimizer
from .shards import FOLDER, Shards


def offloaded_adamw(args: TrainingArguments, **overrides: Any) -> tuple[type[OffloadedAdamW], Mapping[str, Any]]:
    """``OffloadedAdamW`` with the values of the arguments: ``Trainer(optimizer_cls_and_kwargs=offloaded_adamw(args))``.

    These are ``learning_rate``, ``adam_beta1``, ``adam_beta2`` and ``adam_epsilon``, which Trainer passes on to its own
    optimizers only; it sets ``weight_decay`` itself. They are read when Trainer makes the optimizer, so that each trial
    of ``hyperparameter_search`` has its own. With several processes the states are partitioned over all.

    Args:
        args: the arguments that the Trainer has.
        overrides: further arguments of ``OffloadedAdamW``, or other values of these.
    """
    return OffloadedAdamW, _Settings(args, overrides)


class _Settings(MutableMapping[str, Any]):
    """Keyword arguments of an optimizer, with the values that the arguments have when they are read."""

    def __init__(self, args: TrainingArguments, overrides: Mapping[str, Any]) -> None:
        self._args = args
        self._overrides = dict(overrides)
        self._left_out: set[str] = set()

    def _now(self) -> dict[str, Any]:
        args = self._args
        settings = {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
            "process_group": dist.group.WORLD if args.world_size > 1 and not args.fsdp else None,
        }
        return {name: value for name, value in (settings | self._overrides).items() if name not in self._left_out}

    def __getitem__(self, name: str) -> Any:
        return self._now()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._overrides[name] = value
        self._left_out.discard(name)

    def __delitem__(self, name: str) -> None:
        del self._now()[name]  # raises if it is not there
        self._left_out.add(name)

    def __or__(self, other: Mapping[str, Any]) -> "_Settings":
        merged = _Settings(self._args, self._overrides)
        merged._left_out = self._left_out.difference(other)
        merged._overrides.update(other)
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


class OffloadCallback(TrainerCallback):
    """Saves and resumes an ``OffloadedAdamW`` with Trainer's checkpoints, in shards, and adds to Trainer's log.

    In each ``checkpoint-…`` folder that Trainer writes, ``offload/`` then holds a checkpoint of an engine: master
    weights, moments, buffers, the states of the scheduler and of a GradScaler, and random generators. Frozen parameters
    are not in it: Trainer's own file has them, unless it is that of a PEFT adapter, whose base is loaded from where it
    came from. Each rank writes its own part. ``trainer.train(resume_from_checkpoint=...)`` resumes from it bit for
    bit. Trainer's own ``optimizer.pt`` holds the states a second time; ``save_only_model=True`` leaves it out. With
    several ranks that is required, because Trainer would write the states of rank 0 only; and the optimizer is to have
    partitioned its states over all of them, as :func:`offloaded_adamw` asks. Where Trainer shards the model with FSDP2
    (``fsdp=True``), its own checkpoints hold the states of all ranks, and this callback only adds to the log.

    To each log of the training loss it adds ``offload_host_bytes`` (states and buffers) and ``offload_device_bytes``
    (parameters and buffers of the model, frozen ones too); on CUDA ``offload_peak_device_bytes`` (the most that torch
    had allocated); under a GradScaler ``loss_scale``; and ``offload_grad_norm``, after Trainer's clipping, where the
    optimizer computes it (``gradient_clipping``, ``skip_nonfinite``). Callbacks that come later in ``callbacks=`` see
    them, and ``trainer.state.log_history``.

    Args:
        resume_from: the checkpoint folder that Trainer resumes from; None: the one in ``args.resume_from_checkpoint``,
            or the folder of the same step in ``args.output_dir``.
        log: records everything that Trainer logs, with these additions.

    Raises:
        ConfigError: when training begins, with another optimizer or without a required setting.
        ConfigWarning: when training begins, if the optimizer was made with another learning rate than that of the
            arguments, and this seems not to be meant: it is the default, or the arguments' is not.
        CheckpointError: when training begins, if ``resume_from`` has no states or those of another step; when saving
            fails.
    """

    def __init__(self, resume_from: str | os.PathLike[str] | None = None, *, log: StepLog | None = None) -> None:
        self.resume_from = resume_from
        """As the argument; the Trainer of an engine sets it."""
        self._log = log
        self._shards = Shards()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.fsdp:
            _check_rate(args, _offloaded(kwargs))
            return
        world_size = _offloaded(kwargs).core.world_size
        if world_size != args.world_size and (args.save_strategy != "no" or state.global_step):
            raise ConfigError(
                f"checkpoints of {args.world_size} processes, and the optimizer's states are partitioned over "
                f"{world_size}; expected over all, so that each saves its own part: "
                "Trainer(optimizer_cls_and_kwargs=offloaded_adamw(args)), or OffloadedAdamW(..., "
                "process_group=torch.distributed.group.WORLD)"
            )
        whole = not isinstance(kwargs["optimizer"], EngineOptimizer)
        if whole:  # an engine's rate comes from the arguments
            _check_rate(args, _offloaded(kwargs))
        if whole and world_size > 1 and args.save_strategy != "no" and not args.save_only_model:
            raise ConfigError(
                f"save_only_model=False on {world_size} ranks: Trainer would write the states of rank 0 only; expected "
                "TrainingArguments(save_only_model=True): this callback saves and resumes all of them"
            )
        if state.is_hyper_param_search and args.save_strategy != "no":
            raise ConfigError(
                "checkpoints in a search of hyper-parameters, whose folders a callback cannot know; expected "
                'TrainingArguments(save_strategy="no")'
            )
        if state.global_step:
            self._resume(self._resumed_folder(args, state), state, kwargs)

    def _resumed_folder(self, args: TrainingArguments, state: TrainerState) -> Path:
        given = self.resume_from or args.resume_from_checkpoint
        if given is None or str(given).lower() in ("true", "false"):  # from the command line: the latest
            return _checkpoint_folder(args, state)
        return Path(given)

    def _resume(self, folder: Path, state: TrainerState, running: Mapping[str, Any]) -> None:
        step = state.global_step
        if not (folder / FOLDER).is_dir():
            if (folder / OPTIMIZER_NAME).is_file() and not _offloaded(running).awaited:
                return  # saved without this callback; Trainer has loaded it
            raise CheckpointError(
                f"{folder}: training resumes at step {step}, and neither {FOLDER}/ nor {OPTIMIZER_NAME} is there; "
                "expected the checkpoint that Trainer resumes from: name it with OffloadCallback(resume_from=...), or "
                "it was saved without the states"
            )
        history = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).log_history
        known = min(len(history), len(state.log_history))
        if json.dumps(history[:known]) != json.dumps(state.log_history[:known]):  # NaN is not equal to itself
            raise CheckpointError(
                f"{folder}: the checkpoint of another run than the one that Trainer resumes; expected the same: name "
                "it with OffloadCallback(resume_from=...)"
            )

        def accept(found: int) -> None:
            if found != step:
                raise CheckpointError(
                    f"{folder / FOLDER}: the states of step {found}, and Trainer resumes at step {step}; expected the "
                    "same checkpoint: name it with OffloadCallback(resume_from=...)"
                )

        model, optimizer = running["model"], _offloaded(running)
        self._shards.load(folder / FOLDER, model, optimizer, stateful=_stateful(running), accept=accept)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.epoch is not None and state.epoch == int(state.epoch):  # no batches to skip
            self._shards.resume_random()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._shards.resume_random()  # the loader has begun the epoch anew and skipped batches

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.fsdp or (args.save_only_model and isinstance(kwargs["optimizer"], EngineOptimizer)):
            return
        folder, step = _checkpoint_folder(args, state), state.global_step
        stateful = _stateful(kwargs)
        self._shards.save(
            folder, kwargs["model"], _offloaded(kwargs), step=step, stateful=stateful, keep=1, frozen=False
        )

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if "loss" in kwargs["logs"]:
            self._add(state, kwargs)
        if self._log is not None:
            self._log.write(state.global_step, kwargs["logs"])

    def _add(self, state: TrainerState, running: Mapping[str, Any]) -> None:
        """Add memory, norm and loss scale to a log of the training loss."""
        offloaded, scaler = _offloaded(running), _stateful(running).get("scaler")
        memory, report = offloaded.memory_report(running["model"]), offloaded.report
        added: dict[str, float] = {
            "offload_host_bytes": memory.host_bytes,
            "offload_device_bytes": memory.device_bytes,
        }
        device = offloaded.slots[0].param.device
        if device.type != "cpu":
            peak = told_by_allocator(torch.accelerator.max_memory_allocated, device)
            added |= {} if peak is None else {"offload_peak_device_bytes": peak}
        engines = isinstance(running["optimizer"], EngineOptimizer)  # its norm is Trainer's
        if report is not None and report.grad_norm is not None and not engines:
            added["offload_grad_norm"] = report.grad_norm
        if scaler is not None:
            added["loss_scale"] = scaler.get_scale()
        elif offloaded.core.scaler is not None:
            added["loss_scale"] = offloaded.core.loss_scale
        running["logs"].update(added)
        state.log_history[-1].update(added)  # it is a copy of logs


def _check_rate(args: TrainingArguments, optimizer: OffloadedOptimizer) -> None:
    """Warn if the learning rate is not that of the arguments, and one of them seems to have been forgotten.

    A group that has another rate than the optimizer was made with was given its own, or a schedule has set it.
    """
    made_with = float(optimizer.defaults["lr"])
    rates = {float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups}
    forgotten = not is_set(optimizer.config, "lr") or args.learning_rate != TrainingArguments.learning_rate
    if made_with in rates and args.learning_rate not in rates and forgotten:
        warnings.warn(
            f"the optimizer's learning rate is {', '.join(map(str, sorted(rates)))}, and "
            f"TrainingArguments(learning_rate={args.learning_rate}) has no effect: Trainer does not pass it on; "
            "expected Trainer(optimizer_cls_and_kwargs=offloaded_adamw(args)) of the Trainer's own args, or the same "
            "value in both",
            ConfigWarning,
            stacklevel=2,
        )


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    assert args.output_dir is not None
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _offloaded(running: Mapping[str, Any]) -> OffloadedOptimizer:
    optimizer = running["optimizer"]
    found = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
    if not isinstance(found, OffloadedOptimizer):
        raise ConfigError(
            f"OffloadCallback: the optimizer is {type(found).__name__}, expected OffloadedAdamW: "
            "Trainer(optimizer_cls_and_kwargs=offloaded_adamw(args))"
        )
    return found


def _stateful(running: Mapping[str, Any]) -> dict[str, Any]:
    """The objects with a state besides model and optimizer, by name."""
    parts = {"lr_scheduler": running["lr_scheduler"], "scaler": getattr(running["optimizer"], "scaler", None)}
    return {name: part for name, part in parts.items() if part is not None}
