"""Hugging Face's Trainer on an engine: stages 1 to 3, with gradients that leave during backward."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import MISSING, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from safetensors import safe_open
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from offload_core.config.options import FIELDS, ConfigLike, OffloadConfig, is_set
from offload_core.deepspeed import translation
from offload_core.deepspeed.keys import AUTO
from offload_core.errors import CheckpointError, ConfigError

from ..engine import Engine, wrap
from ..internals.private import grad_mode_kept
from ..layerwise.find import find_blocks
from ..params.casting import cast_inputs
from ..stage3.construction import in_shards
from ..stage3.gathering import gathered_parameters
from ..training.shared_tensors import end_earlier, owners_of_shards
from ..weights.checkpoint import ModelCheckpoints
from ..weights.export import whole_state_dict
from ..weights.reading import named_tensors
from .accelerate import EngineOptimizer
from .generation import generate_whole
from .micro_batches import MicroBatches, check_layerwise, with_layerwise
from .placement import to_device
from .shards import FOLDER
from .transformers import OffloadCallback

_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), ("adamw", ("betas", "eps"))),
    "sgd": ("sgd", ()),
    "adagrad": ("adagrad", ()),
    "lion_32bit": ("lion", ("betas",)),
}
"""For each ``optim`` of TrainingArguments: the optimizer, and its settings that further arguments give."""
_BESIDE = {
    "lr": ("learning_rate", "optimizer.params.lr"),
    "betas": ("adam_beta1, adam_beta2", "optimizer.params.betas"),
    "eps": ("adam_epsilon", "optimizer.params.eps"),
    "weight_decay": ("weight_decay", "optimizer.params.weight_decay"),
    "gradient_clipping": ("max_grad_norm", "gradient_clipping"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "gradient_accumulation_steps"),
}
"""Fields that Trainer's arguments give: the names of these, and the key of a DeepSpeed configuration."""
_OF_SCHEDULE = {
    "warmup_max_lr": "learning_rate",
    "warmup_num_steps": "warmup_steps",
    "total_num_steps": "max_steps or num_train_epochs",
}
"""Arguments of DeepSpeed's schedules that Trainer's arguments give, and the names of these."""
_OF_CHECKPOINTS = ("on_train_begin", "on_save")
"""Events in which ``OffloadCallback`` loads or saves."""
_MANY_UPDATES = 2**31
"""The number of updates of a run whose length is not known."""


class OffloadTrainer(Trainer):
    """``transformers.Trainer`` on an :class:`Engine`: ``OffloadTrainer(model, args, ..., offload={"stage": 3})``.

    It takes the place of Trainer, or is put before a subclass of it::

        class OffloadSFTTrainer(OffloadTrainer, SFTTrainer):
            pass

    The engine partitions states (and gradients, and parameters), averages the ranks' gradients and clips; there is no
    ``DistributedDataParallel``. Optimizer (``optim``: ``"adamw_torch"``, ``"sgd"``, ``"adagrad"`` or ``"lion_32bit"``),
    learning rate, betas, eps, weight decay, ``max_grad_norm`` and ``gradient_accumulation_steps`` are those of the
    TrainingArguments, and schedules are Trainer's. With ``fp16`` the engine scales losses. ``max_grad_norm=0`` clips
    nothing; ``offload={"gradient_clipping": None}`` then saves the norm, too.

    Checkpoints hold the states in shards, from all ranks, in ``offload/`` (:class:`OffloadCallback`); any number of
    ranks and any stage resumes from them, bit for bit, and one rank from those of a plain Trainer with torch's AdamW.
    ``save_only_model=True`` leaves them out. ``save_model`` writes whole weights in every stage.
    ``load_best_model_at_end`` restores the engine's states, too.

    Args:
        offload: as ``config`` of ``wrap``: a dict of fields, an ``OffloadConfig``, or a DeepSpeed configuration, whose
            ``"auto"`` stands for what Trainer would tell DeepSpeed. A ``scheduler`` in it is that of the run.
        layerwise: True runs all micro-batches of an update block by block, with :meth:`Engine.accumulate`; losses and
            callbacks are those of Trainer's loop. None: as ``offload`` says, whose field it is.
        args, kwargs: Trainer's own.

    Raises:
        ConfigError: the arguments contradict ``offload``, or ask for what the engine does itself; with ``layerwise``
            the trainer or the arguments need one micro-batch after the other; and the errors of ``wrap``.
        ParameterError: with ``layerwise`` the model has no blocks that could be found.
    """

    def __init__(self, *args: Any, offload: ConfigLike = None, layerwise: bool | None = None, **kwargs: Any) -> None:
        self.engine: Engine | None = None
        """The engine around the model; made anew for each model of ``model_init``."""
        self.frozen_engines: list[Engine] = []
        """The engines around TRL's reference, reward and teacher models, which hold them in shards (stage 3)."""
        self._earlier: list[Any] = []
        """The optimizers of engines that hold the model in shards, and end when this trainer makes its engine."""
        self._micro_batches = MicroBatches()
        """Those of an update, with ``layerwise``."""
        self._offload, self._scheduler = _without_scheduler(offload)
        self._layerwise = layerwise
        super().__init__(*args, **kwargs)
        if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            raise _another_optimizer("an optimizer")
        found = [each for each in self.callback_handler.callbacks if isinstance(each, OffloadCallback)]
        self._callback = found[0] if found else OffloadCallback()
        if not found:
            self.add_callback(self._callback)
        vars(self.callback_handler).update(call_event=self._call_event)
        if self.model_init is None:
            self.create_optimizer()
        self._find_reads_of_trl()

    def _call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Call the callbacks. In stage 3 they may read weights: those that they read are gathered until they return.

        ``OffloadCallback`` loads and saves first, while nothing is gathered; the others see what was loaded.
        """
        handler = self.callback_handler
        call = type(handler).call_event
        if event in _OF_CHECKPOINTS:
            callbacks, handler = handler.callbacks, copy(handler)
            handler.callbacks = [each for each in callbacks if isinstance(each, OffloadCallback)]
            control = call(handler, event, args, state, control, **kwargs)
            handler.callbacks = [each for each in callbacks if not isinstance(each, OffloadCallback)]
        with _gathered_when_read([*self.frozen_engines, *([] if self.engine is None else [self.engine])]):
            return call(handler, event, args, state, control, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        others = {"DeepSpeed": self.is_deepspeed_enabled, "FSDP": self.is_fsdp_enabled or self.args.fsdp}
        _check_arguments(self.args, others)
        self._config = self._configured()
        if self._config.layerwise:
            check_layerwise(type(self), self.args)
            vars(self).update(training_step=self._layerwise_step)
        if self._scheduler is not None:
            _scheduled(self._scheduler, self.args)
        own = {"backward": self._backward, "clip_grad_norm_": self._norm, "prepare_model": self._prepare_model}
        vars(self.accelerator).update(own)

    def _configured(self) -> OffloadConfig:
        config = _configuration(self._offload, self.args, self.accelerator.scaler, self.model)
        return with_layerwise(config, self._offload, self._layerwise)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model; in stage 3 one that is elsewhere is cut on the way, for it may not fit."""
        if earlier := owners_of_shards(model):
            self._earlier += earlier  # they end when this trainer trains; the model is on the device
            return
        cuts = _is_elsewhere(model, device) and self._config.takes_apart(self.args.world_size)
        cuts = cuts and not getattr(self.args, "precompute_ref_log_probs", False)  # TRL runs it before it has an engine
        if cuts or any(map(in_shards, model.parameters())):
            to_device(model, device, self._config if cuts else None)
        else:
            super()._move_model_to_device(model, device)

    def _prepare_model(self, model: nn.Module, device_placement: bool | None = None, **kwargs: Any) -> nn.Module:
        """As ``Accelerator.prepare_model``; in stage 3 a model that TRL only evaluates is frozen, and cut."""
        accelerator = self.accelerator
        if kwargs.get("evaluation_mode") and self._cuts_frozen(model):
            config = replace(self._config, param_dtype=None, buffer_dtype=None)  # the type in which it was loaded
            model.requires_grad_(False)
            to_device(model, accelerator.device, config if _is_elsewhere(model, accelerator.device) else None)
            self.frozen_engines.append(engine := wrap(model, config))
            self._prepare(engine)
            return model
        return type(accelerator).prepare_model(accelerator, model, device_placement=device_placement, **kwargs)

    def _cuts_frozen(self, model: nn.Module) -> bool:
        """Return True if less of a model is on the device in shards, and no other engine has a part of it."""
        if not self._config.takes_apart(self.args.world_size) or self.accelerator.verify_device_map(model):
            return False
        if isinstance(model, Engine) or getattr(model, "_is_accelerate_prepared", False):
            return False
        trained = set(map(id, () if self.model is None else self.model.parameters()))
        return trained.isdisjoint(map(id, model.parameters()))

    def _find_reads_of_trl(self) -> None:
        """Have TRL gather what it reads, in the places where it asks for DeepSpeed's stage 3."""
        if (inference := getattr(self, "vllm_generation", None)) is not None:
            vars(inference._dist).update(gather_params=self._gathered)
        for callback in self.callback_handler.callbacks:
            if (follow := getattr(callback, "sync_target_model", None)) is not None:  # the reference follows the model
                vars(callback).update(sync_target_model=partial(_follow_by_weight, follow))

    def _gathered(self, params: Any) -> Any:
        """Make parameters whole for an inference engine, for which adapters are merged into them for a time."""
        return gathered_parameters(params, modifier_rank=0 if is_peft_model(self.model) else None)

    # --- training ------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's: the micro-batches of the next update, and the number of items in them."""
        batches, n_items = super().get_batch_samples(*args, **kwargs)
        if self._config.layerwise:
            if self._micro_batches.unfinished:
                self._engine.optimizer.zero_grad()
            self._micro_batches.begin(batches)
        return batches, n_items

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's. A loss may read a teacher's head outside its forward; it is kept until backward has ended."""
        if self._micro_batches.running:
            return super().training_step(*args, **kwargs)
        with self._heads_kept():
            return super().training_step(*args, **kwargs)

    def _layerwise_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """In place of :meth:`training_step`, and of what a subclass makes of it: run all micro-batches of an update if
        this is the first one, and return its own loss."""

        def step(batch: Any) -> torch.Tensor:
            loss: torch.Tensor = type(self).training_step(self, model, batch, num_items_in_batch)
            return loss

        def accumulate(losses: Sequence[Callable[[], torch.Tensor]]) -> None:
            self._end_micro_step()
            with self._heads_kept():
                self._engine.accumulate(losses, average=False)

        return self._micro_batches.loss_of(inputs, step, accumulate)

    @contextmanager
    def _heads_kept(self) -> Iterator[None]:
        """A context for a forward and its backward. Parameters of teachers that it reads stay whole inside."""
        with _gathered_when_read(self.frozen_engines):
            yield
        for engine in self.frozen_engines:
            engine.optimizer.sharding.recover()  # a graph may have saved the head

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's. A loss may read a teacher's head outside its forward."""
        with _gathered_when_read(self.frozen_engines):
            return super().prediction_step(*args, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The engine's optimizer; the engine is made if the model has none."""
        if self.optimizer is None:
            if self.engine is not None:  # of an earlier model of model_init
                self.engine.close()
            self.engine = self._wrapped(self._groups(model))
            self.optimizer = EngineOptimizer(self.engine)
        else:
            self._engine.optimizer.zero_grad()  # of a run that broke off
            self._micro_batches.begin(())
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule of the DeepSpeed configuration, if it has one; else Trainer's."""
        if self._scheduler is not None and self.lr_scheduler is None:
            config = _scheduled(self._scheduler, self.args, num_training_steps)
            optimizer = self.optimizer if optimizer is None else optimizer
            schedule: Any = _TrainerSchedule(optimizer, config)
            self.lr_scheduler = schedule
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def _groups(self, model: Any) -> list[dict[str, Any]]:
        """The parameter groups that Trainer makes, with names."""
        self.optimizer_cls_and_kwargs = (_Groups, {})
        made = super().create_optimizer(model)
        self.optimizer = self.optimizer_cls_and_kwargs = None
        if not isinstance(made, _Groups):
            raise _another_optimizer(type(made).__name__)
        names = {param: name for name, param in self._module.named_parameters()}
        for group in made.param_groups:  # an empty one, too, must have names if others have
            group["param_names"] = [names[param] for param in group["params"]]
        return made.param_groups

    def _wrapped(self, groups: list[dict[str, Any]]) -> Engine:
        config = self._config = self._configured()
        half = config.param_dtype == "float16" or any(p.dtype == torch.float16 for p in self._module.parameters())
        if config.loss_scale == 1 and (half or self.args.fp16):
            raise ConfigError(
                f"loss_scale={config.loss_scale!r} in offload= with {'float16 parameters' if half else 'fp16=True'}, "
                'whose gradients underflow; expected "dynamic", a larger number, or no loss_scale'
            )
        if config.layerwise:
            find_blocks(self._module, None)
        end_earlier(self._earlier)
        self._earlier.clear()
        engine = wrap(self._module, config, params=groups)
        if config.target_dtype is not None:  # what else a batch holds, as TRL's advantages, keeps its type
            engine.module.register_forward_pre_hook(partial(_cast, config), with_kwargs=True)
        if self.args.torch_compile:
            engine.compile(backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)
        self._prepare(engine)
        return engine

    def _prepare(self, engine: Engine) -> None:
        """Prepare an engine's model as ``Accelerator.prepare_model`` does, and its generation."""
        accelerator = self.accelerator
        type(accelerator).prepare_model(accelerator, engine.module, device_placement=False, evaluation_mode=True)
        if engine.optimizer.sharding.gathers:
            generate_whole(engine, gather=getattr(self.args, "ds3_gather_for_generation", True))  # TRL's
        vars(engine.module)["_is_accelerate_prepared"] = True  # Accelerate's own mark: no DistributedDataParallel

    @property
    def _engine(self) -> Engine:
        assert self.engine is not None
        return self.engine

    @property
    def _module(self) -> nn.Module:
        assert self.model is not None
        return self.model

    def _backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As ``Accelerator.backward``. While micro-batches run together, it only records the loss."""
        if self._micro_batches.running:
            self._micro_batches.differentiate(loss)
            return
        self._end_micro_step()
        self._engine.backward(loss, average=False, **kwargs)  # Trainer has divided the loss

    def _end_micro_step(self) -> None:
        """End the last micro-step, if no update followed it."""
        if self._engine.optimizer.components.grad_hooks.fresh:
            self._engine.step(boundary=False)

    def _norm(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        """As ``Accelerator.clip_grad_norm_``, but the step clips. The norm that is returned is NaN until then."""
        bound = self._engine.offload_config.gradient_clipping
        if norm_type != 2 or max_norm not in (bound, math.inf):
            raise ConfigError(
                f"clipping to a norm of order {norm_type} of at most {max_norm}, and the engine, which alone sees "
                f"gradients, clips to the L2 norm of {bound}; expected TrainingArguments(max_grad_norm=...), which "
                "stays as it is when the Trainer is made"
            )
        norm = None if bound is None else torch.tensor(math.nan, dtype=torch.float64)
        vars(self.optimizer)["norm"] = norm
        return norm

    # --- saving and loading --------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the weights; in stage 3 all ranks gather them, and rank 0 has them in host memory meanwhile."""
        trained: dict[str, nn.Parameter] = {}
        if self.engine is not None and state_dict is None:
            self.engine.flush()
            if self.engine.optimizer.sharding.gathers and is_peft_model(self.model):
                trained = {name: param for name, param in self._module.named_parameters() if param.requires_grad}
            elif self.engine.optimizer.sharding.gathers:
                state_dict = whole_state_dict(self._module, wanted=self.args.should_save)
        with gathered_parameters(trained.values()):  # PEFT reads them itself, too
            super()._save(output_dir, {name: param.detach() for name, param in trained.items()} or state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load weights that are not in the shards, which are loaded when training begins."""
        self._callback.resume_from = resume_from_checkpoint
        if not self._load_weights(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights, and its states if they were saved."""
        folder = Path(self.state.best_model_checkpoint or "")
        if not self._load_weights(folder):
            super()._load_best_model()
        if (folder / FOLDER).is_dir():
            checkpoints = ModelCheckpoints(self._module, self._engine.optimizer)
            checkpoints.load(folder / FOLDER, stateful=None, names=None, random_state=False, warns=False)

    def _load_weights(self, folder: Path) -> bool:
        """Load those weights of a checkpoint that its shards do not have, a tensor at a time.

        Return False if Trainer does it: the model has no engine, or was saved otherwise.
        """
        files, states = _files_of(folder), (folder / FOLDER).is_dir()
        if self.engine is None or self.engine.module is not self.model:
            return False
        if is_peft_model(self.model):  # the base comes from where it came from
            if self.engine.optimizer.sharding.gathers and not states:
                raise CheckpointError(
                    f"{folder}: an adapter without {FOLDER}/, and PEFT reads the whole model to load it, which in "
                    "stage 3 is in shards; expected save_only_model=False when it is saved, or stage=2"
                )
            return states
        if not files:
            return False
        in_shards = self.engine.optimizer.has_states if states else lambda tensor: False
        names: dict[torch.Tensor, list[str]] = {}
        found = named_tensors(self._module)
        for name, tensor in found.items():
            if not in_shards(tensor):
                names.setdefault(tensor, []).append(name)
        with ExitStack() as opened, grad_mode_kept(), torch.no_grad():
            readers = {file: opened.enter_context(safe_open(file, "pt")) for file in {*files.values()}}
            for tied in names.values():
                name = next((name for name in tied if name in files), tied[0])
                reader = readers.get(files.get(name, folder))
                shape = None if reader is None else tuple(reader.get_slice(name).get_shape())
                if reader is None or shape != tuple(found[name].shape):
                    raise CheckpointError(
                        f"{folder}: {name!r} is {'missing' if shape is None else f'of shape {shape}'}, expected shape "
                        f"{tuple(found[name].shape)}: is it the checkpoint of another model?"
                    )
                with gathered_parameters(found[name], modifier_rank=0):
                    found[name].copy_(reader.get_tensor(name))
        return True


def _gathered_when_read(engines: Sequence[Engine]) -> ExitStack:
    """A context in which weights that are read outside forward and backward are gathered, until it ends (stage 3)."""
    with ExitStack() as reads:
        for engine in engines:
            reads.enter_context(engine.optimizer.sharding.gathered_when_read())
        return reads.pop_all()


def _is_elsewhere(model: nn.Module, device: torch.device) -> bool:
    return any(param.device.type != device.type for param in model.parameters())


def _cast(config: OffloadConfig, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast the inputs of a forward, as the engine's own forward does."""
    return cast_inputs(config, args, kwargs)


class _OneWeight:
    """A model of one parameter."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = param

    def parameters(self) -> list[nn.Parameter]:
        return [self._param]


def _follow_by_weight(follow: Callable[..., None], model: nn.Module, target: nn.Module, alpha: float) -> None:
    """Mix a model's weights into those of its reference, with one weight of each whole at a time."""
    for param, mixed in zip(model.parameters(), target.parameters(), strict=True):
        with gathered_parameters(param), gathered_parameters(mixed, modifier_rank=0):
            follow(_OneWeight(param), _OneWeight(mixed), alpha)


class _Groups(torch.optim.Optimizer):
    """Takes the parameter groups that Trainer makes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


class _TrainerSchedule(torch.optim.lr_scheduler.LRScheduler):
    """A schedule of DeepSpeed's: learning rate and betas by the number of updates made so far."""

    def __init__(self, optimizer: Any, config: OffloadConfig) -> None:
        self._config = config
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        values = [self._config.hyperparameters(self.last_epoch, float(base)) for base in self.base_lrs]
        for group, (_, betas) in zip(self.optimizer.param_groups, values, strict=True):
            if "betas" in group:
                group["betas"] = betas
        return [lr for lr, _ in values]

    def state_dict(self) -> dict[str, Any]:
        """Return only the schedule's numbers: its functions come from the configuration."""
        return {name: value for name, value in super().state_dict().items() if name != "_config"}


def _files_of(folder: Path) -> dict[str, Path]:
    """The file of each tensor that ``save_pretrained`` wrote; empty if there is none of safetensors."""
    index, file = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if file.is_file():
        with safe_open(file, "pt") as reader:
            return dict.fromkeys(reader.keys(), file)
    if index.is_file():
        return {name: folder / part for name, part in json.loads(index.read_text())["weight_map"].items()}
    return {}


# --- settings -------------------------------------------------------------------------------------------


def _another_optimizer(got: str) -> ConfigError:
    return ConfigError(
        f"{got} besides the engine's optimizer; expected no optimizers=, optimizer_cls_and_kwargs= or other optim=: "
        f"OffloadTrainer makes the optimizer from the TrainingArguments, with optim= one of {', '.join(_OPTIMIZERS)} "
        "(offloaded_adamw(args) is for a plain Trainer)"
    )


def _check_arguments(args: TrainingArguments, others: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` if the arguments ask other code to do the engine's part, or ask for something that the
    engine cannot do."""
    for name, asked in others.items():
        if asked:
            raise ConfigError(
                f"{name} and offload= at the same time, which both partition the model and average gradients; expected "
                "one of them"
            )
    if args.optim not in _OPTIMIZERS:
        raise _another_optimizer(f"optim={_optim_of(args)!r}")
    if args.optim_args and _OPTIMIZERS[args.optim][0] != "adamw":  # Trainer's AdamW reads none
        raise ConfigError(f"optim_args={args.optim_args!r}; expected its settings in offload=")
    if args.n_gpu > 1:
        raise ConfigError(
            f"{args.n_gpu} GPUs in one process, which Trainer would copy the model to; expected a process for each: "
            "torchrun --nproc-per-node ..., or one GPU in CUDA_VISIBLE_DEVICES"
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise ConfigError(
                f'{name}=True would cast the parameters that the engine trains; expected offload={{"param_dtype": ...}}'
            )


def _without_scheduler(offload: ConfigLike) -> tuple[ConfigLike, Mapping[str, Any] | None]:
    """The configuration, a file's as a dict; and the ``scheduler`` of a DeepSpeed configuration, which is Trainer's."""
    if isinstance(offload, str | os.PathLike):
        offload = translation.load(offload)
    if isinstance(offload, Mapping) and translation.is_deepspeed(offload, FIELDS):
        scheduler = offload.get("scheduler")
        if isinstance(scheduler, Mapping) and scheduler.get("type"):
            return {name: value for name, value in offload.items() if name != "scheduler"}, scheduler
    return offload, None


def _scheduled(scheduler: Mapping[str, Any], args: TrainingArguments, updates: int | None = None) -> OffloadConfig:
    """A configuration with the learning rate, and perhaps betas, of a DeepSpeed configuration's ``scheduler``.

    Args:
        updates: the number of updates of the run; None: not known yet.
    """
    given = scheduler.get("params") or {}
    total = given.get("total_num_steps")
    known = updates or (int(total) if isinstance(total, int | float) and total >= 1 else _MANY_UPDATES)
    beside = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": args.learning_rate,
        "warmup_num_steps": args.get_warmup_steps(known),
        "total_num_steps": known,
    }
    filled = {name: beside.get(name, value) if value == AUTO else value for name, value in given.items()}
    for name, value in filled.items():
        if value == AUTO:
            raise ConfigError(
                f'scheduler.params.{name}="auto" in offload=, and TrainingArguments have no value for it; expected a '
                "number"
            )
    for name, field in _OF_SCHEDULE.items():
        if name in given and filled[name] != beside[name] and (updates or name == "warmup_max_lr"):
            raise ConfigError(
                f"scheduler.params.{name}={filled[name]!r} in offload=, and TrainingArguments have {field}, which "
                f'makes {beside[name]!r}; expected "auto" there, or the same'
            )
    if "warmup_num_steps" in filled:
        filled["warmup_num_steps"] = max(1, filled["warmup_num_steps"])
    rates = {"lr": args.learning_rate, "betas": [args.adam_beta1, args.adam_beta2]}
    section = {"type": scheduler["type"], "params": filled}
    return OffloadConfig.resolve({"optimizer": {"type": "AdamW", "params": rates}, "scheduler": section}, world_size=1)


def _configuration(offload: ConfigLike, args: TrainingArguments, scaler: Any, model: Any) -> OffloadConfig:
    """The engine's configuration: ``offload``, and what Trainer's arguments say.

    Args:
        scaler: Accelerate's GradScaler, which the engine replaces; None: there is none.
        model: its width gives the sizes that are ``"auto"``; None: it is not made yet.
    """
    name, own = _OPTIMIZERS[args.optim]
    of_adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    values: dict[str, Any] = {
        "lr": args.learning_rate,
        **{setting: of_adam[setting] for setting in own},
        "weight_decay": args.weight_decay,
        "optimizer": name,
        "gradient_clipping": args.max_grad_norm if args.max_grad_norm > 0 else math.inf,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
    }
    offload, given = _given(offload, args, model)
    if (asked := _optimizer_in(offload)) not in (MISSING, name):
        optims = [repr(optim) for optim, (rule, _) in _OPTIMIZERS.items() if rule == asked]
        if not optims:
            raise ConfigError(
                f"optimizer {asked!r} in offload=, which no optim= of TrainingArguments names; expected one of "
                f"{', '.join(_OPTIMIZERS)} there, or wrap(model, optimizer=...) without Trainer"
            )
        raise ConfigError(
            f"optimizer {asked!r} in offload=, and TrainingArguments have optim={_optim_of(args)!r}; expected optim="
            f"{' or '.join(optims)} there"
        )
    for name, value in given.items():
        if name == "gradient_clipping" and not value and values[name] == math.inf:
            values[name] = None  # nothing is clipped, and the norm not computed
        elif name in values and value != values[name]:
            raise ConfigError(
                f"{name}={value!r} in offload=, and TrainingArguments have {_BESIDE[name][0]}="
                f"{values[name] if values[name] != math.inf else args.max_grad_norm!r}; expected it there alone"
            )
    config = OffloadConfig.resolve(offload, world_size=args.world_size, **values)
    if callable(config.lr) or callable(config.betas):
        raise ConfigError(
            "a schedule in offload=, and Trainer has its own; expected TrainingArguments(lr_scheduler_type=..., "
            "warmup_steps=...) alone"
        )
    if scaler is not None and config.loss_scale is None:
        window, scale = scaler.get_growth_interval(), scaler.get_scale()
        config = replace(config, loss_scale="dynamic", loss_scale_window=window, initial_loss_scale=scale)
    return config


def _optim_of(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))


def _optimizer_in(offload: ConfigLike) -> Any:
    """The optimizer that a configuration asks for; ``MISSING``: it names none."""
    if isinstance(offload, OffloadConfig):
        return offload.optimizer if is_set(offload, "optimizer") else MISSING
    return translation.optimizer_in(offload)


def _given(offload: ConfigLike, args: TrainingArguments, model: Any) -> tuple[ConfigLike, dict[str, Any]]:
    """Return the configuration, and its own values of the fields that Trainer's arguments give, too."""
    if isinstance(offload, OffloadConfig):
        return offload, {name: getattr(offload, name) for name in _BESIDE if is_set(offload, name)}
    if not isinstance(offload, Mapping):
        return offload, {}
    if not translation.is_deepspeed(offload, FIELDS):
        return offload, {name: _plain(offload[name]) for name in _BESIDE if name in offload}
    _check_batch(offload, args)
    filled = dict(offload)
    for name, asked in (("fp16", args.fp16), ("bf16", args.bf16)):
        section = filled.get(name)
        if isinstance(section, Mapping) and section.get("enabled") == AUTO:
            filled[name] = {**section, "enabled": asked}
    section = filled.get("zero_optimization")
    if isinstance(section, Mapping):
        sizes = _sizes(getattr(model, "config", None), section.get("stage"))
        autos = [name for name in sizes if section.get(name) == AUTO]
        filled["zero_optimization"] = {**section, **{name: sizes[name] for name in autos}}
    given = {}
    for name, (_, path) in _BESIDE.items():
        value: Any = filled
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None and value != AUTO:
            given[name] = _plain(value)
    return filled, given


def _sizes(config: Any, stage: Any) -> dict[str, int]:
    """Return the sizes, in elements, that Trainer would give to DeepSpeed for the model's width; empty if the width is
    not known."""
    for each in (config, getattr(config, "text_config", None)):
        widths = getattr(each, "hidden_size", None), *(getattr(each, "hidden_sizes", None) or ())
        width = max((width for width in widths if isinstance(width, int)), default=0)
        if width:
            of_stage_3 = {
                "stage3_prefetch_bucket_size": int(0.9 * width * width),
                "stage3_param_persistence_threshold": 10 * width,
            }
            return {"reduce_bucket_size": width * width} | (of_stage_3 if stage == 3 else {})
    return {}


def _check_batch(offload: Mapping[str, Any], args: TrainingArguments) -> None:
    """Raise :class:`ConfigError` if the sizes of batches in a DeepSpeed configuration are not Trainer's."""
    micro, steps, ranks = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
    whole = f"per_device_train_batch_size={micro} * gradient_accumulation_steps={steps} on {ranks} ranks"
    beside = {
        "train_micro_batch_size_per_gpu": (micro, f"per_device_train_batch_size={micro}"),
        "train_batch_size": (micro * steps * ranks, f"{whole} = {micro * steps * ranks}"),
    }
    for key, (size, words) in beside.items():
        if offload.get(key, AUTO) not in (AUTO, size):
            raise ConfigError(
                f'{key}={offload[key]!r} in offload=, and TrainingArguments have {words}; expected "auto" there, or '
                "the same size"
            )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
