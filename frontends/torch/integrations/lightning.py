"""PyTorch Lightning: a strategy that uses an engine's optimizer, and saves checkpoints in shards."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Unpack

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden

from offload_core.config.options import ConfigLike, OffloadConfig
from offload_core.config.settings import OffloadSettings
from offload_core.errors import CheckpointError, ConfigError
from offload_core.support.checkpoint_folder import CHECKPOINT_NAME, rotate
from offload_core.support.checks import shown

from ..engine import Engine, wrap
from ..stage3.construction import init
from ..stage3.gathering import gathered_parameters
from ..weights.checkpoint import load_weights
from ..weights.export import whole_state_dict
from .placement import to_device
from .shards import FOLDER, Shards

TRAINER = "trainer.ckpt"
"""The file that Lightning itself saves, beside the shards in a checkpoint's folder."""
_READ_WEIGHTS = (BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging)
"""Callbacks of Lightning that look at parameters between steps."""


class OffloadStrategy(DDPStrategy):
    """ZeRO stages 1 to 3 with optimizer states in host memory: ``Trainer(strategy=OffloadStrategy(stage=3, ...))``.

    The module's ``configure_optimizers`` asks it for the optimizer, and may add schedulers to it::

        def configure_optimizers(self):
            return self.trainer.strategy.wrap(lr=3e-4, weight_decay=0.1).optimizer

    :meth:`wrap` returns an ``Engine`` around the module, which averages the ranks' gradients; there is no
    ``DistributedDataParallel``. The engine applies the Trainer's ``accumulate_grad_batches``, ``gradient_clip_val`` (by
    norm) and ``precision``; ``p.grad`` holds no readable gradient. In stage 3 ``configure_model`` builds in shards, as
    under ``init()``.

    A checkpoint is a folder: ``offload/`` holds the checkpoint of ``Engine.save_checkpoint``, from all ranks, and
    ``trainer.ckpt`` the rest. Any number of ranks resumes from it, at any stage, bit for bit. Checkpoints that
    Lightning wrote with another strategy can be read, too. ``save_weights_only=True`` writes one file, as usual.

    Args:
        config, overrides: as for ``wrap(model, config, **overrides)``: settings that do not depend on the module.
        process_group_backend, timeout, start_method: as for ``DDPStrategy``.
        frozen: as for ``Engine.save_checkpoint``: False leaves frozen parameters out of checkpoints.
    """

    strategy_name = "offload"

    def __init__(
        self,
        config: ConfigLike = None,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Any = "popen",
        frozen: bool = True,
        **overrides: Unpack[OffloadSettings],
    ) -> None:
        self.engine: Engine | None = None
        """The engine that :meth:`wrap` made last; it stays after ``fit``."""
        self._config, self._overrides = config, overrides
        self._frozen = frozen
        self._shards = Shards()
        self._from_shards = False
        self._weights: dict[str, Any] = {}
        """The last :meth:`lightning_module_state_dict`."""
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, start_method=start_method)

    def wrap(self, params: Iterable[Any] | None = None, **overrides: Unpack[OffloadSettings]) -> Engine:
        """Make the engine of the fitted module; its ``configure_optimizers`` calls this.

        Args:
            params, overrides: as for ``wrap(model, params=..., **overrides)``; they replace the strategy's own.

        Raises:
            ConfigError: settings contradict each other or the Trainer's; and the errors of ``wrap``.
        """
        module = self._module
        trainer = module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            raise ConfigError("OffloadStrategy.wrap() outside fit; expected one call, by configure_optimizers")
        if self.engine is not None:
            raise ConfigError(
                f"{type(module).__name__}: a second OffloadStrategy.wrap() in one fit, and the strategy has one "
                "optimizer; expected one call (params= takes groups), or for several optimizers (a GAN's) an "
                "OffloadedAdamW each, and Trainer(strategy='auto') or 'ddp'"
            )
        if is_overridden("backward", module):
            raise ConfigError(
                f"{type(module).__name__}.backward is overridden, and engine.backward() takes its place; expected it "
                "in training_step, or hooks on tensors"
            )
        config = self._resolved(**overrides)
        callbacks: list[Any] = getattr(trainer, "callbacks", []) if config.stage == 3 else []
        for callback in callbacks:
            if isinstance(callback, _READ_WEIGHTS):
                raise ConfigError(
                    f"{type(callback).__name__} in stage 3: it reads weights between steps, where none is whole; "
                    "expected OffloadStrategy(stage=2)"
                )
        automatic = module.automatic_optimization
        if config.layerwise and automatic:
            raise ConfigError(
                "layerwise=True in automatic optimization, where Lightning ends the training_step of one micro-batch "
                "before it begins the next one; expected self.automatic_optimization = False in the module, and "
                "self.trainer.strategy.engine.accumulate([...]) and self.optimizers().step() in training_step"
            )
        accumulate, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val
        if automatic and config.gradient_accumulation_steps not in (1, accumulate):
            raise ConfigError(
                f"gradient_accumulation_steps={config.gradient_accumulation_steps}, and the Trainer has "
                f"accumulate_grad_batches={accumulate}; expected it there alone"
            )
        if clip is not None and config.gradient_clipping is None:
            config = replace(config, gradient_clipping=float(clip) or None)
        _check_clipping(config, clip, trainer.gradient_clip_algorithm)
        if automatic:
            config = replace(config, gradient_accumulation_steps=accumulate)
        self.engine = wrap(module, config, params=params)
        return self.engine

    def _resolved(self, **overrides: Unpack[OffloadSettings]) -> OffloadConfig:
        fields = {**self.precision_plugin.fields, **self._overrides, **overrides}
        return OffloadConfig.resolve(self._config, world_size=self.world_size, **fields)

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # --- setting up ----------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> "OffloadPrecision":
        """The precision of ``Trainer(precision=...)``, without the part that the engine does."""
        if self._precision_plugin is None:
            self._precision_plugin = OffloadPrecision(Precision(), self)
        assert isinstance(self._precision_plugin, OffloadPrecision)
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, asked: Precision | None) -> None:
        if asked is not None and not isinstance(asked, OffloadPrecision):
            asked = OffloadPrecision(asked, self)
        self._precision_plugin = asked

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        config = self._resolved()
        with init(config=config, enabled=config.stage == 3 and self._module.trainer.state.fn == TrainerFn.FITTING):
            yield

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._close()
        elif self.engine is not None and self.engine.module is self.lightning_module:
            assert self.accelerator is not None
            self.accelerator.setup(trainer)
            self.model = self.engine
            return
        else:
            self.precision_plugin.asked.convert_module(self._module)
        super().setup(trainer)

    def _close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def model_to_device(self) -> None:
        to_device(self._module, self.root_device)

    def configure_ddp(self) -> None:
        """Do nothing: the engine averages gradients."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.engine is None or self.optimizers != [self.engine.optimizer]:
            got = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            raise ConfigError(
                f"configure_optimizers gave {got} under OffloadStrategy; expected the engine's: "
                "`return self.trainer.strategy.wrap(lr=...).optimizer`"
            )
        self.model = self.engine

    def teardown(self) -> None:
        """Leave parameters with the engine, which can save, export and evaluate after ``fit``."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.model = self.lightning_module
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # --- training ------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():  # not a forward of the engine: the step updates inside
            return self._module.training_step(*args, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx:  # resumed in mid-epoch, the loader has started again
            self._shards.resume_random()
        else:
            self._shards.forget_random()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        deferring: AbstractContextManager[None] = nullcontext()
        if self.engine is not None and self.engine.offload_config.stage == 1:
            deferring = self.engine.no_sync()
        with deferring:
            yield

    # --- checkpoints ---------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return not self._from_shards

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights for callbacks and ``on_save_checkpoint``; empty if parameters are partitioned.

        A checkpoint has the weights in its shards. Of this dict it holds only values that a callback replaced (by an
        average, for example).
        """
        gathers = self.engine is not None and self.engine.optimizer.sharding.gathers
        self._weights = {} if gathers else super().lightning_module_state_dict()
        return dict(self._weights)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's states; none if there is an engine, because they are in the shards."""
        return super().optimizer_state(optimizer) if self.engine is None else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        weights, self._weights = self._weights, {}
        if self.engine is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        optimizer, together = self.engine.optimizer, self.engine.optimizer.checkpoints.together
        if "optimizer_states" not in checkpoint:
            if optimizer.sharding.gathers:
                checkpoint["state_dict"] = (
                    whole_state_dict(self._module, wanted=self.is_global_zero) | checkpoint["state_dict"]
                )
            with together("save"):
                super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = self._local(filepath)
        with together("save"):
            if self.is_global_zero and path.is_file():
                path.unlink()  # an earlier file of save_weights_only=True
        shards = self._shards.save(
            path, self._module, optimizer, step=checkpoint["global_step"], keep=None, frozen=self._frozen
        )
        own = {name: value for name, value in checkpoint["state_dict"].items() if value is not weights.get(name)}
        kept = {key: value for key, value in checkpoint.items() if key != "optimizer_states"}
        with together("save"):
            super().save_checkpoint({**kept, "state_dict": own, FOLDER: shards.name}, path / TRAINER, storage_options)
            if self.is_global_zero:  # only now does the file name the new shards
                rotate(path / FOLDER, shards.name, 1)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = self._local(checkpoint_path)
        self._from_shards = (path / FOLDER).is_dir()
        if not self._from_shards:
            return super().load_checkpoint(checkpoint_path, weights_only)
        if not (path / TRAINER).is_file():
            raise CheckpointError(
                f"{path}: {TRAINER} is missing beside {FOLDER}/; expected a checkpoint that was saved whole"
            )
        checkpoint = super().load_checkpoint(path / TRAINER, weights_only)
        name = checkpoint.get(FOLDER)
        if not isinstance(name, str) or CHECKPOINT_NAME.fullmatch(name) is None:
            raise CheckpointError(
                f"{path / TRAINER}: its shards are {shown(name)}, expected the name of a folder in {FOLDER}/, such as "
                "step-00000010"
            )
        shards = path / FOLDER / name
        if self.engine is None:
            load_weights(self._module, shards)
        else:
            self._restore_groups(checkpoint)
            self._shards.load(shards, self._module, self.engine.optimizer)
        return checkpoint

    def _restore_groups(self, checkpoint: dict[str, Any]) -> None:
        """Give the optimizer the groups that finetuning callbacks had made, before their states are loaded.

        Lightning would do this later, for the strategy restores a checkpoint after it has set up the engine.
        """
        trainer, saved = self._module.trainer, checkpoint.get("callbacks", {})
        callbacks: list[Any] = getattr(trainer, "callbacks", [])
        for callback in callbacks:
            if isinstance(callback, BaseFinetuning) and callback.state_key in saved:
                callback.load_state_dict(saved.pop(callback.state_key))
                callback.on_fit_start(trainer, self._module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if checkpoint.get("state_dict") or not self._from_shards:
            with gathered_parameters(self._module.parameters(), modifier_rank=0):
                super().load_model_state_dict(checkpoint, strict and not self._from_shards)

    def _local(self, path: Any) -> Path:
        """Rank 0's path of a checkpoint."""
        path = str(self.broadcast(path))
        if "://" in path:
            raise CheckpointError(f"{path}: shards are written to a file system; expected a path of one")
        return Path(path)


class OffloadPrecision(Precision):
    """The Trainer's precision under :class:`OffloadStrategy`.

    Lightning's own contexts and input casts apply. The engine casts parameters, after it has copied their values to
    master weights, and scales losses, as ``fields`` say.

    Args:
        asked: Lightning's ``"32-true"``, ``"bf16-true"``, ``"16-true"``, ``"bf16-mixed"`` or ``"16-mixed"``.

    Raises:
        ConfigError: it is another precision.
    """

    def __init__(self, asked: Precision, strategy: OffloadStrategy) -> None:
        if type(asked) not in (Precision, HalfPrecision, MixedPrecision):
            raise ConfigError(
                f"OffloadStrategy: precision is {type(asked).__name__}, expected '32-true', 'bf16-true', '16-true', "
                "'bf16-mixed' or '16-mixed'"
            )
        self.precision = asked.precision
        self.asked = asked
        self.fields: dict[str, Any] = {}
        """Fields of ``OffloadConfig``."""
        self._strategy = strategy
        if isinstance(asked, HalfPrecision):
            self.fields["param_dtype"] = "bfloat16" if asked.precision == "bf16-true" else "float16"
        if isinstance(asked, MixedPrecision) and asked.scaler is not None and asked.scaler.is_enabled():
            window, scale = asked.scaler.get_growth_interval(), asked.scaler.get_scale()
            self.fields |= {"loss_scale": "dynamic", "loss_scale_window": window, "initial_loss_scale": scale}

    @property
    def _engine(self) -> Engine:
        assert self._strategy.engine is not None
        return self._strategy.engine

    def convert_input(self, data: Any) -> Any:
        return self.asked.convert_input(data)

    def forward_context(self) -> AbstractContextManager[Any]:
        return self.asked.forward_context()

    def backward(  # type: ignore[override]
        self, tensor: torch.Tensor, model: LightningModule, optimizer: Any, **kwargs: Any
    ) -> None:
        engine = self._engine
        if engine.optimizer.components.grad_hooks.fresh:  # of an earlier backward that no update followed
            engine.step(boundary=False)
        engine.backward(tensor, average=False, **kwargs)  # Lightning has divided the loss

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Any, **kwargs: Any
    ) -> Any:
        result = closure()
        self._after_closure(model, optimizer)
        skipped = model.automatic_optimization and result is None  # training_step gave no loss
        gradients = self._engine.optimizer.core.gradients
        if gradients.are_waiting or not skipped:
            self._engine.step(boundary=True)
        return result

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM
    ) -> None:
        """Do nothing: the engine clips when it updates.

        Raises:
            ConfigError: the bound is not the engine's.
        """
        _check_clipping(self._engine.offload_config, clip_val, gradient_clip_algorithm)


def _check_clipping(config: OffloadConfig, value: float | None, algorithm: Any) -> None:
    """Raise :class:`ConfigError` unless the engine clips to this bound."""
    if value and (algorithm == GradClipAlgorithmType.VALUE or value != config.gradient_clipping):
        by = "value" if algorithm == GradClipAlgorithmType.VALUE else "norm"
        raise ConfigError(
            f"clipping by {by} to {value}, and the engine, which alone sees gradients, clips to the norm of "
            f"{config.gradient_clipping}; expected Trainer(gradient_clip_val=...), or strategy.wrap("
            "gradient_clipping=...) in manual optimization, and nothing else"
        )
