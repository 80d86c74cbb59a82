"""verl: an engine of ours behind verl's interface of training engines. The import of this module registers it."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import get_peft_model_state_dict
from torch import nn
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.utils.model import convert_weight_keys
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import EngineConfig, FSDPEngineConfig
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine.fsdp.utils import create_device_mesh, unfuse_moe_params

from offload_core.config.options import OffloadConfig
from offload_core.errors import ConfigError

from ..engine import Engine, wrap
from .placement import to_device
from .shards import FOLDER, Shards

STRATEGY = "offload"
"""The value of ``strategy`` in verl's configuration that asks for these engines."""
_DEVICES = ["cuda", "npu", "cpu"]
_OPTIMIZERS = {"AdamW": "adamw", "SGD": "sgd", "Adagrad": "adagrad"}
"""For each class of ``torch.optim`` that verl may name: the value of ``OffloadConfig.optimizer``."""
_IMPLEMENTATIONS = ("fused", "foreach")
"""Settings of torch's optimizers that choose how the same update is computed."""
_CONTENTS = {"model", "optimizer", "extra"}
"""The parts of a checkpoint, in verl's words, that ours always holds."""


@dataclass
class OffloadEngineConfig(FSDPEngineConfig):  # type: ignore[misc]
    """verl's configuration of an FSDP engine for an engine of ours: ``strategy: offload``.

    ``mixed_precision``, ``model_dtype``, ``param_offload`` and ``forward_only`` mean what they mean for FSDP.
    ``param_offload: true`` releases the engine between verl's phases. Settings of FSDP's own sharding (``wrap_policy``,
    ``reshard_after_forward``, ``forward_prefetch``, ``use_orig_params``) and ``optimizer_offload`` have no effect:
    states are always on the host.

    Raises:
        ConfigError: a setting that these engines cannot follow.
    """

    strategy: str = STRATEGY
    offload: dict[str, Any] = field(default_factory=dict)
    """Fields of ``OffloadConfig`` besides those that verl's configuration gives: ``{"stage": 3, ...}``."""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        if self.offload_policy:
            raise ConfigError(
                "offload_policy=true in verl's engine, which is FSDP2's; expected param_offload: true, or offload: "
                "{stage: 3, offload_param: cpu}"
            )
        if self.qat.enable:
            raise ConfigError("qat in verl's engine; expected none: strategy 'offload' trains plain weights")
        if self.offload.get("update_in_backward"):
            raise ConfigError(
                "offload.update_in_backward in verl's engine, and verl alone knows which micro-batch is the last; "
                "expected it left out"
            )


class OffloadEngine(FSDPEngine):  # type: ignore[misc]
    """An :class:`Engine` as verl's training workers call it.

    verl's FSDP engine builds the model, cuts batches into micro-batches and computes log-probabilities and losses; an
    engine of ours takes FSDP's place around the model. ``self.module`` is that engine. Gradients are summed over the
    micro-batches and averaged over all ranks, and clipped to ``optim.clip_grad`` in the update.
    """

    engine_config: OffloadEngineConfig
    module: Engine

    # --- building ------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Build the model and its engine, and the learning-rate schedule; release it as ``param_offload`` says."""
        self._build_model_optimizer()
        self.checkpoints = _VerlCheckpoints(self)
        self.to("cpu", model=self.is_param_offload_enabled, optimizer=False, grad=False)

    def _init_device_mesh(self) -> None:
        size, n_ranks = self.engine_config.fsdp_size, dist.get_world_size()
        if 1 < size < n_ranks:
            raise ConfigError(
                f"fsdp_size={size} on {n_ranks} ranks in verl's engine; expected -1: strategy 'offload' partitions "
                "over all ranks"
            )
        super()._init_device_mesh()
        self.device_mesh = create_device_mesh(n_ranks, 1)  # every rank reads the model's values

    def _build_fsdp_module(self, module: nn.Module) -> Engine:
        """Put an engine around the model, on the device."""
        if self.model_config.enable_activation_offload:
            raise ConfigError(
                "model.enable_activation_offload in verl, which looks for FSDP's modules; expected false: "
                "enable_gradient_checkpointing also saves memory"
            )
        if self.engine_config.forward_only:
            module.requires_grad_(False)
        config, device = self._configuration(), torch.device(get_device_id())
        self._autocast_dtype = self._precision("param_dtype", "bf16")
        elsewhere = any(param.device.type != device.type for param in module.parameters())
        to_device(module, device, config if elsewhere and config.takes_apart(dist.get_world_size()) else None)
        return wrap(module, config)

    def _build_optimizer(self, module: Engine) -> torch.optim.Optimizer:
        return module.optimizer

    def _configuration(self) -> OffloadConfig:
        """The engine's configuration: ``engine.offload``, and what the rest of verl's configuration says."""
        half, asked = self._precision("param_dtype", "bf16"), self.engine_config.mixed_precision or {}
        values: dict[str, Any] = {"param_dtype": None if half == torch.float32 else _name(half)}
        if "buffer_dtype" in asked:
            values["buffer_dtype"] = _name(self._precision("buffer_dtype", "fp32"))
        if self._precision("reduce_dtype", "fp32") != torch.float32:  # gradients are summed in fp32 in any case
            values["communication_dtype"] = _name(self._precision("reduce_dtype", "fp32"))
        if half == torch.float16:
            values |= {"loss_scale": "dynamic", "loss_scale_window": 400}  # as verl's own scaler
        if not self.engine_config.forward_only:
            values |= _settings_of(self.optimizer_config)
        offload = self.engine_config.offload
        for name in values.keys() & offload.keys():
            raise ConfigError(
                f"offload.{name}={offload[name]!r} in verl's engine, and verl's own configuration says "
                f"{values[name]!r}; expected it there alone (optim, or mixed_precision of the engine)"
            )
        return OffloadConfig.resolve(dict(offload), world_size=dist.get_world_size(), **values)

    def _precision(self, name: str, default: str) -> torch.dtype:
        found: torch.dtype = PrecisionType.to_dtype((self.engine_config.mixed_precision or {}).get(name, default))
        return found

    # --- training ------------------------------------------------------------------------------------

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> tuple[Any, dict[str, Any]]:
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        return (loss if forward_only else _Loss(self.module, loss)), output

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        """The context of a micro-batch's forward and backward; :meth:`optimizer_step` ends the last micro-step."""
        yield
        if not is_last_micro_batch:
            self.module.step(boundary=False)

    def optimizer_step(self) -> float:
        """Update, and return the norm of the gradients before clipping. No update follows one that is not finite."""
        norm = self.module.step(boundary=True).grad_norm
        assert norm is not None
        return norm

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Restore the engine to the device, or release it; nothing happens without ``model``.

        States and gradients are on the host at all times.
        """
        BaseEngine.to(self, device=device, model=model, optimizer=optimizer, grad=grad)
        if device not in (get_device_name(), "cpu"):
            raise ConfigError(f"to({device!r}); expected {get_device_name()!r} or 'cpu'")
        if model and device == get_device_name():
            self.module.restore()
        elif model:
            self.module.release()

    # --- weights for inference engines ---------------------------------------------------------------

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        """Return an iterator over whole weights on the device, and the adapter's configuration if they are its.

        Weights have the element type that the model runs with. With LoRA and ``model.lora.merge`` they are merged; else
        they are the adapter's (``base_sync_done``) or the base's. All ranks must exhaust the iterator. It works while
        the engine is released.
        """
        module = self.module.module
        adapter = getattr(module, "peft_config", {}).get("default")
        merge = bool(self.model_config.lora.get("merge", False))
        weights = self.module.named_weights(device=get_device_id(), merge_lora=adapter is not None and merge)
        if adapter is None or merge:
            return self._as_saved(weights), None
        if base_sync_done:
            return iter(get_peft_model_state_dict(module, self._adapter()).items()), adapter.to_dict()
        base = ((_base_name(name), weight) for name, weight in weights if not _of_adapter(name))
        named = ((replace_lora_wrapper(name, adapter), weight) for name, weight in self._as_saved(base))
        return named, adapter.to_dict()

    def _adapter(self) -> dict[str, torch.Tensor]:
        """The adapter's weights, from its master weights."""
        self.module.flush()
        optimizer, device, found = self.module.optimizer, get_device_id(), {}
        for name, param in self.module.module.named_parameters():
            if _of_adapter(name):
                found[name] = optimizer.whole_states(param, ["master"])["master"].to(device, param.dtype)
        return found

    def _as_saved(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Rename weights to those of the model's files, which inference engines read."""
        model = self.module.module
        renamed = (pair for name, weight in weights for pair in convert_weight_keys({name: weight}, model).items())
        return iter(unfuse_moe_params(renamed, self.model_config.hf_config.model_type))

    def get_per_tensor_param_shard(self, **kwargs: Any) -> Any:
        raise ConfigError(
            "verl's checkpoint engine asks for each rank's shards (delta_sharded), and those of strategy 'offload' are "
            "not cut along dimensions; expected another backend in rollout.checkpoint_engine"
        )

    def get_per_tensor_param_delta_shard(self, **kwargs: Any) -> Any:
        return self.get_per_tensor_param_shard(**kwargs)

    # --- checkpoints ---------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Save to a folder that all ranks share; see :class:`_VerlCheckpoints`. ``hdfs_path`` is the caller's."""
        self.checkpoints.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """Load what :meth:`save_checkpoint` saved, on any number of ranks and in any stage."""
        self.checkpoints.load_checkpoint(local_path, hdfs_path, del_local_after_load)


@EngineRegistry.register(model_type="language_model", backend=STRATEGY, device=_DEVICES)
class OffloadEngineWithLMHead(OffloadEngine, FSDPEngineWithLMHead):  # type: ignore[misc]
    """The engine of actors, of reference policies and of supervised fine-tuning."""


@EngineRegistry.register(model_type="value_model", backend=STRATEGY, device=_DEVICES)
class OffloadEngineWithValueHead(OffloadEngine, FSDPEngineWithValueHead):  # type: ignore[misc]
    """The engine of critics."""


class _Loss:
    """A loss whose ``backward()`` is its engine's. verl has divided it by the tokens of the whole batch."""

    def __init__(self, engine: Engine, loss: torch.Tensor) -> None:
        self._engine, self._loss = engine, loss

    def backward(self) -> None:
        self._engine.backward(self._loss, average=False)


class _VerlCheckpoints(BaseCheckpointManager):  # type: ignore[misc]
    """Checkpoints in verl's folders: ``offload/`` holds ours, ``huggingface/`` the configuration and the tokenizer.

    Ours has weights, states, the schedule and random generators. ``hf_model`` among verl's ``save_contents`` adds whole
    weights to ``huggingface/``.

    Raises:
        ConfigError: ``save_contents`` or ``load_contents`` ask for a part of what ours holds.
    """

    def __init__(self, engine: OffloadEngine) -> None:
        config, processing = engine.checkpoint_config, engine.model_config.get_processor()
        super().__init__(engine.module, engine.optimizer, engine.lr_scheduler, processing, config)
        self._shards = Shards()
        for name in ("save", "load"):
            contents = {*getattr(self, f"checkpoint_{name}_contents")}
            if contents & _CONTENTS and not contents >= _CONTENTS:
                raise ConfigError(
                    f"checkpoint.{name}_contents={sorted(contents)} in verl; expected model, optimizer and extra "
                    "together, which strategy 'offload' keeps in one checkpoint, or none of them"
                )

    def _stateful(self) -> Mapping[str, Any]:
        return {} if self.lr_scheduler is None else {"lr_scheduler": self.lr_scheduler}

    def save_checkpoint(
        self, local_path: Any, hdfs_path: Any = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        if local_path is None:
            return
        engine: Engine = self.model
        if self.rank == 0:
            self.ensure_checkpoint_capacity(max_ckpt_to_keep)
        folder = Path(local_path)
        if self.should_save_model:
            frozen = not self.should_save_lora_only
            self._shards.save(
                folder,
                engine.module,
                engine.optimizer,
                step=global_step,
                stateful=self._stateful(),
                keep=1,
                frozen=frozen,
            )
        saved = folder / "huggingface"
        if self.should_save_hf_model:
            engine.export_safetensors(saved)
        with engine.optimizer.checkpoints.together("save"):
            if self.rank == 0:
                saved.mkdir(parents=True, exist_ok=True)
                model: Any = engine.module
                model.config.save_pretrained(saved)
                self.processing_class.save_pretrained(saved)
                self.register_checkpoint(str(local_path), max_ckpt_to_keep)

    def load_checkpoint(self, local_path: Any, hdfs_path: Any = None, del_local_after_load: bool = False) -> None:
        if local_path is None or not self.should_load_model:
            return
        engine: Engine = self.model
        released = engine.is_released
        engine.restore()
        self._shards.load(Path(local_path) / FOLDER, engine.module, engine.optimizer, stateful=self._stateful())
        if released:
            engine.release()


def _settings_of(optim: Any) -> dict[str, Any]:
    """The fields of ``OffloadConfig`` that verl's configuration of the optimizer gives."""
    name, further = optim.get("optimizer", "AdamW"), dict(optim.get("override_optimizer_config") or {})
    if name not in _OPTIMIZERS or optim.get("optimizer_impl", "torch.optim") != "torch.optim":
        raise ConfigError(
            f"optim.optimizer={name!r} of {optim.get('optimizer_impl')!r} in verl; expected one of "
            f"{', '.join(_OPTIMIZERS)} of 'torch.optim', for strategy 'offload'"
        )
    values: dict[str, Any] = {"optimizer": _OPTIMIZERS[name], "lr": optim.lr, "weight_decay": optim.weight_decay}
    if name == "AdamW":
        values["betas"] = tuple(optim.betas)
    clip = optim.clip_grad
    values["gradient_clipping"] = math.inf if clip is None else float(clip)  # the norm is reported in any case
    values["skip_nonfinite"] = True
    return values | {key: value for key, value in further.items() if key not in _IMPLEMENTATIONS}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_adapter(name: str) -> bool:
    return "lora_" in name


def _base_name(name: str) -> str:
    """The base model's own name of a weight of a PEFT model."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")
