"""``DeepSpeedEngine``: an :class:`Engine` with the names, arguments and return values of DeepSpeed's."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from offload_core.config.options import OffloadConfig
from offload_core.deepspeed.names import is_theirs, refuse
from offload_core.errors import ConfigError, GradientError, StateError
from offload_core.support import checks
from offload_core.support.checkpoint_folder import MANIFEST
from offload_core.support.threads import uninterrupted

from ..engine import Engine
from ..integrations.zero_files.loading import zero_checkpoint
from ..params.casting import frozen_for_now
from ..weights.export import write_with_torch
from . import comm
from .accelerator import rank_device
from .clients import Inner
from .getters import GETTERS
from .run_counts import RunCounts


class MisuseError(StateError, AssertionError):
    """A call at a moment at which it is not allowed, as a :class:`StateError`; DeepSpeed asserts there."""


class DeepSpeedEngine(Engine):
    """An :class:`Engine` under the names of DeepSpeed's. Methods that both have under one name are DeepSpeed's."""

    def __init__(self, model: nn.Module, resolved: OffloadConfig, given: Mapping[str, Any], params: Any) -> None:
        """
        Args:
            given: the configuration as the caller gave it.
            params: the parameters to train, or groups; None: those of the model; empty: none, for inference.
        """
        with frozen_for_now(model.parameters() if params == [] else ()):
            super().__init__(model, resolved, params=params or None, process_group=dist.group.WORLD)
        self.config = given
        self.micro_steps = 0
        """Calls of ``step()``."""
        self.lr_scheduler = self.training_dataloader = self.collate_fn = None  # type: Any
        self.device, self.local_rank = rank_device(), comm.get_local_rank()
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.dp_world_size = self.seq_dp_world_size = self.world_size
        self.mp_world_size, self.data_parallel_group = 1, dist.group.WORLD
        self.basic_optimizer, vars(self.optimizer)["optimizer"] = self.optimizer, Inner(self.optimizer)
        self._trains = params != []
        self._forced: bool | None = None
        """``set_gradient_accumulation_boundary``; None: the engine counts."""
        self._managed = given.get("managed_gradient_accumulation") is not False
        """False: each ``step()`` makes an update."""
        self._backwards = 0
        """Those since the last update."""
        self._in_no_sync = self._in_step = self._applied = False
        self._norm: float | None = None
        steps, ranks = resolved.gradient_accumulation_steps, self.world_size
        micro, train = given.get("train_micro_batch_size_per_gpu"), given.get("train_batch_size")
        self._micro_batch = micro if isinstance(micro, int) else max(1, (train or ranks * steps) // (ranks * steps))
        self._counts = RunCounts(self.optimizer, self.train_batch_size)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in GETTERS:
            return lambda: GETTERS[name](self)
        if is_theirs("engine", name):
            raise AttributeError(f"DeepSpeedEngine.{name}: {refuse('engine', name)}")
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = type(self.__dict__["_modules"].get("module")).__name__
            raise AttributeError(
                f"neither DeepSpeedEngine nor its module, a {module}, has an attribute {name!r}"
            ) from None

    def backward(  # type: ignore[override]
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Backpropagate the loss, by default divided by the accumulation steps, and return it."""
        self._begin("backward")
        if scale_wrt_gas and isinstance(loss, torch.Tensor):
            loss = loss / self.gradient_accumulation_steps()
        super().backward(loss, average=False, **({"retain_graph": True} if retain_graph else {}))
        self._backwards += 1
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:  # type: ignore[override]
        """Update at the accumulation boundary, and step the scheduler after an update that was not skipped."""
        self._begin("step")
        if self._in_no_sync:
            what = "It is illegal to call Engine.step() inside no_sync context manager"  # scripts look for these words
            raise MisuseError(f"{what} or coalesce_grad_reduction(); expected it after the block")
        self._in_step = True
        try:
            report = super().step(boundary=self._forced if self._managed else True)
        finally:
            self._in_step = False
        self.micro_steps += 1
        self._applied = report.updated
        if report.skipped == "accumulating":
            return
        if not self._managed:
            more = self._backwards - self.gradient_accumulation_steps()
            self._counts.add_samples(more * self._micro_batch * self.world_size)
        self._norm, self._backwards = report.grad_norm, 0
        self._follow_updates(**(lr_kwargs or {}))

    def _follow_updates(self, **kwargs: Any) -> None:
        """Step the scheduler for each update that it has not followed, also one whose ``step()`` was interrupted."""

        def follow() -> None:
            self._counts.followed += 1
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**kwargs)

        while self._counts.followed < self.optimizer.updates:
            uninterrupted(follow)

    @property
    def global_steps(self) -> int:
        """Updates so far, and those that were skipped."""
        return self._counts["global_steps"]

    @property
    def skipped_steps(self) -> int:
        """Updates that were skipped, because a gradient had an inf or a NaN."""
        return self._counts["skipped_steps"]

    @property
    def global_samples(self) -> int:
        """Samples so far, of all ranks."""
        return self._counts["global_samples"]

    def _begin(self, what: str) -> None:
        """Check that there is an optimizer, and follow an update whose ``step()`` was interrupted."""
        if not self._trains:
            remedy = "an `optimizer` section in the configuration, or initialize(optimizer=...)"
            raise MisuseError(f"{what}() of an engine without an optimizer; expected {remedy}")
        self._follow_updates()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for a ``backward()`` of its own, where there is no loss scaling."""
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
            raise MisuseError("scale() of what is no loss; expected a scalar tensor that requires a gradient")
        if self.optimizer.core.scaler is not None:
            raise GradientError("scale() under loss scaling; expected engine.backward(loss), which scales it itself")
        return loss

    @contextmanager
    def _without_step(self, what: str, inside: AbstractContextManager[Any]) -> Iterator[None]:
        if self._in_no_sync:
            why = "no_sync context manager reentry is unsupported, nested in coalesce_grad_reduction(), too"
            raise MisuseError(f"{what}(): {why}; expected one block")
        with inside:
            self._in_no_sync = True
            try:
                yield
            finally:
                self._in_no_sync = False

    def no_sync(self) -> AbstractContextManager[None]:
        """As :meth:`Engine.no_sync`; stages 0 and 1."""
        try:
            return self._without_step("no_sync", super().no_sync())
        except StateError as error:
            raise MisuseError(str(error)) from None

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Return a context for several backwards before one ``step()``. Each exchanges its gradients, in any case."""
        if not self._managed:
            raise MisuseError("coalesce_grad_reduction() where each step() updates; expected one of them")
        if GETTERS["zero_optimization_stage"](self) == 0:
            raise NotImplementedError("coalesce_grad_reduction() in stage 0; expected stage 1, 2 or 3")
        return self._without_step("coalesce_grad_reduction", nullcontext())

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the next ``step()`` makes an update. Without managed accumulation it is True inside it."""
        if not self._managed:
            return self._in_step
        gradients = self.optimizer.core.gradients
        return gradients.at_boundary if self._forced is None else self._forced

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide whether the next calls of ``step()`` make updates; None: the engine counts again."""
        if not self._managed:
            raise MisuseError("set_gradient_accumulation_boundary() where each step() updates; expected one of them")
        self._forced = is_boundary

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of an update, between two updates, by other accumulation steps."""
        checks.integer("train_batch_size", train_batch_size)
        steps, rest = divmod(train_batch_size, self._micro_batch * self.world_size)
        if rest or steps < 1:
            raise ConfigError(
                f"train_batch_size: got {train_batch_size}, expected a multiple of train_micro_batch_size_per_gpu "
                f"({self._micro_batch}) * ranks ({self.world_size})"
            )
        self.set_gradient_accumulation_steps(steps)

    def set_gradient_accumulation_steps(self, micro_steps: int) -> None:
        """As :meth:`Engine.set_gradient_accumulation_steps`; the samples so far stay counted."""
        with self._counts.kept():
            super().set_gradient_accumulation_steps(micro_steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Note other samples of a micro-step; the accumulation steps stay."""
        checks.integer("micro_batch_size", micro_batch_size)
        with self._counts.kept():
            self._micro_batch = micro_batch_size

    def save_checkpoint(  # type: ignore[override]
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save to ``save_dir/tag`` everything that training needs to resume, as :meth:`Engine.save_checkpoint`.

        Args:
            tag: None: ``global_step`` and the number.
            client_state: plain values, tensors and arrays, by name; nothing is pickled.
        """
        if not save_dir:
            raise ConfigError(f"save_dir: got {save_dir!r}, expected the name of a folder")
        self._follow_updates()
        super().save_checkpoint(
            save_dir,
            f"global_step{self.global_steps}" if tag is None else str(tag),
            stateful=self._stateful(scheduler=True),
            extras=dict(client_state or {}),
            frozen=not exclude_frozen_parameters,
            latest=save_latest,
        )
        return True

    def _stateful(self, *, scheduler: bool) -> dict[str, Any]:
        stateful = {"lr_scheduler": self.lr_scheduler} if scheduler and self.lr_scheduler is not None else {}
        return {"deepspeed": self._counts, **stateful}

    def load_checkpoint(  # type: ignore[override]
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load ``load_dir/tag``, a checkpoint of this engine's or of DeepSpeed's, and return its path and client state.

        Args:
            tag: None: the one that the file ``latest`` names; where there is no such file, ``(None, {})`` is returned.
            load_module_strict, load_optimizer_states: as ``strict`` and ``optimizer_states`` of
                :meth:`Engine.load_checkpoint`.
            load_module_only: True loads weights, buffers and the client state alone.
        """
        if custom_load_fn is not None:
            raise ConfigError(f"load_checkpoint(custom_load_fn=...): {refuse('load_checkpoint', 'custom_load_fn')}")
        path = self.optimizer.checkpoints.find_tag(load_dir, None if tag is None else str(tag))
        if path is None:
            return None, {}
        states = load_optimizer_states and not load_module_only
        scheduler = load_lr_scheduler_states and not load_module_only
        stateful = {"lr_scheduler": None} | ({} if load_module_only else self._stateful(scheduler=scheduler))
        what: Any = {"optimizer_states": states, "strict": load_module_strict}
        if os.path.exists(path / MANIFEST):
            client_state = super().load_checkpoint(path, stateful=stateful, random_state=False, **what)
        else:
            with self.optimizer.checkpoints.together("load"):
                checkpoint = zero_checkpoint(path.parent, path.name)
            checkpoint.load(self, stateful=stateful, **what)
            client_state = checkpoint.client_state
        return str(path), client_state or {}

    def save_16bit_model(
        self, save_dir: Any, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the module's whole ``state_dict``, as the model runs with it, to a file that ``torch.load`` reads."""
        values = self.whole_state_dict(frozen=not exclude_frozen_parameters)
        with self.optimizer.checkpoints.together("save"):
            if values is not None:
                write_with_torch(values, Path(save_dir) / save_filename)
        return True

    save_fp16_model = save_16bit_model

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Give the device back until :meth:`reload_states`, whatever ``include`` names: see :meth:`Engine.release`."""
        if str(getattr(device, "value", device)) != "cpu":
            raise ConfigError(f"offload_states(device={device!r}); expected 'cpu', where states are anyway")
        self.release()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Take the device again: see :meth:`Engine.restore`."""
        self.restore()

    def compile(self, backend: Any = None, compile_kwargs: Any = None, schedule: Any = None, **others: Any) -> None:
        """Compile the module with ``torch.compile``."""
        if schedule is not None:
            raise ConfigError(f"compile(schedule=...): {refuse('engine', 'register_compile_pass')}")
        super().compile(**({} if backend is None else {"backend": backend}), **dict(compile_kwargs or {}))

    destroy = Engine.close
    empty_partition_cache = Engine._recover

    def module_state_dict(self, *args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Return the module's ``state_dict``, of which the arguments are."""
        found = self.module.state_dict(*args, **kwargs)
        frozen = {f"{kwargs.get('prefix', '')}{n}" for n, p in self.module.named_parameters() if not p.requires_grad}
        return {n: t for n, t in found.items() if not (exclude_frozen_parameters and n in frozen)}

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, **others: Any) -> None:
        """Load ``checkpoint["module"]`` into the module."""
        self.module.load_state_dict(checkpoint["module"], strict=strict)
