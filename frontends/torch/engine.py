"""``wrap(model) -> Engine``: a module, its offloaded optimizer, accumulation and loss scaling."""

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from offload_core.checkpoint.checkpoints import Names
from offload_core.checkpoint.export import MAX_SHARD_BYTES
from offload_core.config.options import ConfigLike
from offload_core.device.trace import COMPUTE
from offload_core.errors import GradientError, ParameterError, StateError
from offload_core.memory.report import MemoryReport
from offload_core.step.pipeline import StepReport

from .files.checkpoint import ModelCheckpoints
from .files.export import export_safetensors
from .optimizer import OffloadedAdamW
from .ranks.collectives import default_group
from .tensors import TORCH_DTYPES, cast_param


def wrap(
    model: nn.Module,
    config: ConfigLike = None,
    *,
    params: Iterable[Any] | None = None,
    process_group: Any = None,
    **overrides: Any,
) -> "Engine":
    """Put a model's optimizer states in host memory.

    Args:
        model: any module; its trainable parameters keep their identity and become ``param_dtype``. Those that were
            built in shards, by ``init()``, are taken over as they are (``stage=3``).
        config: an ``OffloadConfig``, a dict of its fields, or a DeepSpeed configuration: a dict, or a file's path.
        params: what to train, as torch optimizers take it (tensors, named tensors or parameter groups);
            None trains every parameter that requires a gradient.
        process_group: the ranks over which states are partitioned and gradients averaged; None: all ranks where
            ``torch.distributed`` is initialised (``torchrun``), else this process alone. The model starts from rank
            0's values.
        overrides: fields of ``OffloadConfig``.

    Raises:
        ConfigError, ParameterError, StateError, HostMemoryError: before the model is changed.
    """
    return Engine(model, config, params=params, process_group=process_group, **overrides)


class Engine(nn.Module):
    """A module that trains with offloaded AdamW: ``loss = engine(batch); engine.backward(loss); engine.step()``.

    All ranks start from rank 0's parameters and buffers; buffers that a forward changes (BatchNorm's) are each rank's
    own afterwards.

    Gradients leave for the host during backward; ``p.grad`` is then a stand-in that raises when used. To look at a
    gradient, hang a hook on the parameter (``p.register_hook``). One backward at a time: torch (2.13) runs the hooks
    that take gradients outside its lock, so backwards of several threads at once could lose some.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ConfigLike = None,
        *,
        params: Iterable[Any] | None = None,
        process_group: Any = None,
        **overrides: Any,
    ) -> None:
        super().__init__()
        if isinstance(model, Engine):
            raise StateError("wrap() of an Engine; expected a plain module: this model is wrapped already")
        if not isinstance(model, nn.Module):
            raise ParameterError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
        if params is None:
            # frozen ones too: they get states when they are unfrozen
            params = [(name, p) for name, p in model.named_parameters() if p.is_floating_point() or p.requires_grad]
            if not any(p.requires_grad for _, p in params):
                raise ParameterError(
                    f"{type(model).__name__} has no parameter that requires a gradient; expected at least one: "
                    "unfreeze what is to be trained"
                )
        group = default_group(process_group)
        self.optimizer = OffloadedAdamW(
            params, config=config, early_copy=True, model=model, process_group=group, **overrides
        )
        """The model's, for learning-rate schedulers and the like."""
        self.config = self.optimizer.config
        parted = self.optimizer.partitioned
        self._start_alike(model)
        if self.config.target_dtype is not None:
            dtype = TORCH_DTYPES[self.config.target_dtype]
            for param in model.parameters():  # frozen ones and buffers take part in the same products
                if param.is_floating_point() and (parted is None or param not in parted):
                    cast_param(param, dtype)
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(dtype)
        self.module = model
        """The module that was wrapped."""
        self._traced = False

    def _start_alike(self, model: nn.Module) -> None:
        """Frozen parameters and buffers too start from rank 0's values."""
        if self.optimizer.pipeline.device.world_size == 1:
            return
        parted = self.optimizer.partitioned
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            if tensor not in self.optimizer.state and (parted is None or tensor not in parted):
                host = tensor.detach().cpu().contiguous()
                values = host.view(-1).view(torch.uint8).numpy() if host.numel() else host.numpy()
                self.optimizer.pipeline.device.collectives.broadcast(values, f"{name!r}: initial value")
                with torch.no_grad():
                    tensor.copy_(host)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; with ``param_dtype``, floating-point tensor arguments are cast to it.

        Each layer waits for the update of its own parameters only.
        """
        if torch.compiler.is_compiling():
            self._traced = True
        if self.config.target_dtype is not None:
            dtype = TORCH_DTYPES[self.config.target_dtype]
            args, kwargs = tree_map_only(
                torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs)
            )
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        """After an error no partitioned parameter stays whole."""
        if self.optimizer.partitioned is not None:
            self.optimizer.partitioned.recover()

    @torch._disable_dynamo
    def backward(self, loss: torch.Tensor, *, average: bool = True, **kwargs: Any) -> None:
        """Backpropagate; gradients are averaged over the accumulation steps, and scaled under loss scaling.

        Args:
            loss: a tensor of one element.
            average: False: they are summed, as by ``loss.backward()``, for a loss that has been divided already.
            kwargs: passed on to ``loss.backward`` (``retain_graph``, ``create_graph``, ``inputs``).

        Raises:
            GradientError: the loss is not a tensor of one element.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise GradientError(f"backward: the loss is {got}, expected a tensor of one element: take its mean or sum")
        if self.config.update_in_backward and self._reads_wait:
            self.optimizer.expect_step(average=average)
        parts = self.optimizer.parts
        span = parts.pipeline.device.trace.span(COMPUTE, "backward")
        try:
            with span, parts.intake.scaled_backward(average=average) as scale:
                (loss if scale is None else loss.float() * scale).backward(**kwargs)
        except BaseException:
            self._release()
            raise

    @torch._disable_dynamo
    def step(self, *, boundary: bool | None = None) -> StepReport:
        """Update at the accumulation boundary; before it, only count the micro-step.

        Args:
            boundary: whether it is one, for loops that count themselves (at the end of an epoch there may be fewer
                micro-steps), on all ranks alike; None: as ``gradient_accumulation_steps`` says.

        Raises:
            StateError: no gradient arrived since the last call.
            GradientError: averaged and summed gradients are mixed; nothing was updated.
        """
        pipeline = self.optimizer.pipeline
        with pipeline.device.trace.span(COMPUTE, "step"):
            updates = pipeline.at_boundary if boundary is None else boundary
            reads_wait = updates and self._reads_wait
            return self.optimizer.end_micro_step(boundary=updates, may_be_empty=bool(boundary), reads_wait=reads_wait)

    @property
    def _reads_wait(self) -> bool:
        """True if readers of a parameter can be made to wait; compiled code reads it in ways that nothing can catch."""
        if self._traced:
            return False
        dynamo = sys.modules.get("torch._dynamo.eval_frame")  # None until something is compiled; its import is slow
        compiled = () if dynamo is None else dynamo.OptimizedModule
        modules = self.module.modules()
        return not any(module._compiled_call_impl is not None or isinstance(module, compiled) for module in modules)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record the steps inside to a file for https://ui.perfetto.dev: ``with engine.trace("step.json"): ...``

        There are lanes for compute (forward, backward, step, and where they wait), copies to the host, reduction,
        update, gather and copies to the device. Both ends wait for the last update. Among several ranks each writes a
        file of its own, ``step.rank0.json`` and so on.

        Times are the host's: on CUDA forward and backward are in it while they are launched, and a copy until the
        thread that waits for it saw its end.

        Raises:
            StateError: a trace is being recorded already.
            OSError: the file cannot be written.
        """
        running, pipeline = ExitStack(), self.optimizer.pipeline

        @torch._disable_dynamo
        def begin(module: nn.Module, args: Any) -> None:
            running.enter_context(pipeline.device.trace.span(COMPUTE, "forward"))

        @torch._disable_dynamo
        def end(module: nn.Module, args: Any, output: Any) -> None:
            running.close()

        with ExitStack() as hooks, pipeline.trace(path), running:
            hooks.callback(self.register_forward_pre_hook(begin).remove)
            hooks.callback(self.register_forward_hook(end, always_call=True).remove)
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside leave their gradients in ``p.grad``, to be reduced with the next backward outside.

        As in ``DistributedDataParallel``: all ranks must do alike, gradients are summed in the parameters' own element
        type, and a whole gradient of the model is kept. On one rank there is nothing to defer.

        Raises:
            StateError: in stage 2, which keeps no whole gradients.
        """
        if self.config.stage != 1:
            raise StateError(
                f"no_sync() in stage {self.config.stage}, which keeps no whole gradients; expected stage=1, or no "
                "no_sync(): gradient_accumulation_steps then sums each rank's shard in fp32"
            )
        alone = self.optimizer.pipeline.device.world_size == 1
        with nullcontext() if alone else self.optimizer.intake.deferring():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients at an accumulation boundary; between micro-steps keep what has been accumulated.

        A loop that calls it before every backward therefore accumulates as configured.
        ``engine.optimizer.zero_grad()`` discards at any moment.
        """
        if self.optimizer.pipeline.micro_steps == 0:
            self.optimizer.zero_grad(set_to_none)

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients and parameters that this rank has sent to other ranks."""
        return self.optimizer.sent_bytes

    def flush(self) -> None:
        """Wait until parameters and states are those of the last step; see ``OffloadedAdamW.flush``."""
        self.optimizer.flush()

    # --- checkpoints ---------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        folder: str | os.PathLike[str],
        *,
        stateful: Mapping[str, Any] | None = None,
        extras: Any = None,
        keep: int | None = None,
        wait: bool = True,
    ) -> Path:
        """Save what training goes on from, and return the checkpoint's folder, ``folder/step-…``.

        All ranks call it; they must share the folder. It holds master weights, moments, frozen parameters and
        persistent buffers (rank 0's), what modules give as ``get_extra_state()`` (rank 0's; plain values), step counts,
        the loss scale, hyperparameters, the state of the random generators (Python's, NumPy's, torch's) of each rank,
        and what is given here. Any number of ranks, any stage and the JAX front end load it. It appears
        whole or not at all, and ``folder/latest`` names it then.

        Args:
            stateful: objects with ``state_dict()`` and ``load_state_dict()``, by name: LR schedulers, data loaders.
                Rank 0's states are saved.
            extras: plain values and arrays (no objects: nothing is pickled), given back by :meth:`load_checkpoint`.
            keep: delete all but so many of the checkpoints in the folder; None: keep all.
            wait: False: return while optimizer states are still being written, as they are now; training may go on. The
                next save, :meth:`wait_for_checkpoint` or :meth:`close` ends it.

        Raises:
            CheckpointError: on all ranks; earlier checkpoints are untouched.
            StateError: gradients wait for an update.
        """
        return self._checkpoints.save(folder, stateful=stateful, extras=extras, keep=keep, wait=wait)

    def wait_for_checkpoint(self) -> None:
        """Return when the last checkpoint is on the disk; raise what went wrong. All ranks call it."""
        self.optimizer.checkpoints.wait()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        stateful: Mapping[str, Any] | None = None,
        names: Names = None,
        random_state: bool = True,
    ) -> Any:
        """Load a checkpoint, or the latest of a folder, and return its extras. All ranks call it.

        A parameter that is frozen in this model gets its value and no states: unfreeze before what was unfrozen then.

        Args:
            stateful: objects that take up the states saved under these names.
            names: from this model's names to those in the checkpoint, a function or a mapping of those that differ.
            random_state: whether the random generators go on where they were. A rank that the saving run did not have
                keeps its own.

        Raises:
            CheckpointError: on all ranks. Nothing has changed, unless the message says that loading broke off.
        """
        return self._checkpoints.load(path, stateful=stateful, names=names, random_state=random_state)

    @property
    def _checkpoints(self) -> ModelCheckpoints:
        return ModelCheckpoints(self.module, self.optimizer)

    def export_safetensors(
        self,
        folder: str | os.PathLike[str],
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        """Write the model's weights as Hugging Face's libraries read them, in any stage; all ranks must call this.

        What ``state_dict()`` lists goes to ``model.safetensors``, or to ``model-00001-of-0000N.safetensors`` and so on
        with ``model.safetensors.index.json``; tied weights once, so that ``from_pretrained(folder)`` ties them again
        (``model.config.save_pretrained(folder)`` writes what it needs besides). Rank 0 writes, one parameter in memory
        at a time; files appear whole, in place of an earlier export's. It begins with :meth:`flush`.

        Args:
            max_shard_bytes: of the tensors in a file.
            dtype: None: the parameters as the model runs with them. ``"float32"``: master weights, exactly;
                ``"bfloat16"``, ``"float16"``: these rounded. What is not trained is cast; buffers that are no
                floating-point numbers stay as they are.

        Raises:
            ConfigError, ParameterError: an argument, or what the model has, cannot be written; nothing was.
            CheckpointError: on all ranks, where a file could not be written; nothing is left of it.
        """
        export_safetensors(self.module, self.optimizer, folder, max_shard_bytes=max_shard_bytes, dtype=dtype)

    # --- memory --------------------------------------------------------------------------------------

    def memory_report(self) -> MemoryReport:
        """Planned and measured bytes, on the device and on the host; print it, or have it drawn (``.plot(path)``).

        Of the module frozen parameters and buffers are counted, too.
        """
        return self.optimizer.memory_report(self.module)

    def close(self) -> None:
        """Let the model go: remove the hooks and free the host memory; the parameters keep their values."""
        self.optimizer.close()
