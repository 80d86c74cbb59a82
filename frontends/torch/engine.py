"""``wrap(model) -> Engine``: a module, its offloaded optimizer, accumulation and loss scaling."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from offload_core.config.options import ConfigLike
from offload_core.config.settings import OffloadSettings
from offload_core.engine import MAX_SHARD_BYTES, Names, SaveOnSignal, StepReport
from offload_core.errors import GradientError, ParameterError, StateError
from offload_core.memory.report import DeviceUse, MemoryReport
from offload_core.ranks.consistency import together
from offload_core.support.checks import kind_of
from offload_core.support.hints import hinted, refuse
from offload_core.support.last_words import say_error_last
from offload_core.support.user_line import UserLine

from .internals.compiled import run_compiled_modules, untraced
from .internals.private import grad_mode_kept, no_read
from .optim.model_changes import ModelChanges, check_present
from .optim.optimizer import OffloadedOptimizer, class_for
from .params import pending
from .params.casting import cast_inputs, warn_if_slow
from .params.dtensor import is_dtensor
from .params.fsdp import fsdp_modules, gradients_stay, have_gathering_wait, kept_gradients
from .params.values import named_memory, packed_values
from .ranks.collectives import default_group
from .training.device_memory import ReleaseReport
from .training.groups import in_model
from .training.steps import Steps
from .weights.checkpoint import ModelCheckpoints
from .weights.export import export_safetensors
from .weights.named_weights import NamedWeights, WeightRequest


def wrap(
    model: nn.Module,
    config: ConfigLike = None,
    *,
    params: Iterable[Any] | None = None,
    process_group: Any = None,
    **overrides: Unpack[OffloadSettings],
) -> "Engine":
    """Put a model's optimizer states in host memory.

    Args:
        model: any module. Its parameters stay the same objects and are cast to ``param_dtype``, and its buffers to
            ``buffer_dtype``; parameters that ``init()`` built in shards are taken over as they are (``stage=3``).
        config: an ``OffloadConfig``, a dict of its fields, or a DeepSpeed configuration: a dict, or a file's path.
        params: the parameters to train, as torch optimizers take them (tensors, named tensors or parameter groups);
            None trains every parameter that requires a gradient. If none does (a reference or reward model), the
            engine has no states: it casts the model, and holds it in shards in stage 3. Its :meth:`Engine.backward` is
            an error until something is unfrozen.
        process_group: the ranks that partition the states and average the gradients. None: all ranks if
            ``torch.distributed`` is initialised (``torchrun``), else this process alone, which must be the only one of
            its launcher; ``"alone"``: this process alone. The model starts from rank 0's values.
        overrides: fields of ``OffloadConfig``.

    Raises:
        ConfigError, ParameterError, StateError, HostMemoryError: before the model is changed.
    """
    return Engine(model, config, params=params, process_group=process_group, **overrides)


class Engine(nn.Module):
    """A module that trains with offloaded AdamW: ``loss = engine(batch); engine.backward(loss); engine.step()``.

    All ranks start from rank 0's parameters and buffers. Afterwards each rank has its own values of the buffers that a
    forward changes (BatchNorm's).

    Gradients are copied to the host during backward; ``p.grad`` is then a stand-in that raises when used. To look at a
    gradient, call ``engine.optimizer.whole_gradient(p)`` before :meth:`step`, or register a hook on the parameter
    (``p.register_hook``). Run one backward at a time: torch (2.13) runs the
    hooks that take gradients outside its lock, so simultaneous backwards in several threads could lose some.

    Public attributes that an engine lacks are those of its module: ``engine.generate(...)``, ``engine.config``.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ConfigLike = None,
        *,
        params: Iterable[Any] | None = None,
        process_group: Any = None,
        **overrides: Unpack[OffloadSettings],
    ) -> None:
        say_error_last()
        super().__init__()
        if isinstance(model, Engine):
            raise StateError("wrap() of an Engine; expected a plain module: this model is wrapped already")
        if not isinstance(model, nn.Module):
            alone = isinstance(model, Iterable) and not isinstance(model, str | bytes | Mapping)
            instead = "; parameters without their model are for OffloadedAdamW(params, lr=...)" * alone
            raise ParameterError(f"model: got {kind_of(model)}, expected a torch.nn.Module{instead}")
        _check_averages_once(model)
        all_of_it, named = params is None, False
        if params is None:
            # Frozen ones are included: they get states when they are unfrozen.
            params = [(name, p) for name, p in model.named_parameters() if p.is_floating_point() or p.requires_grad]
            if not params:
                raise ParameterError(f"{type(model).__name__} has no floating-point parameter; expected at least one")
        elif not isinstance(params, torch.Tensor):
            params, named = in_model(model, params)
        placed = any(map(is_dtensor, [p for p in model.parameters() if p.requires_grad] or model.parameters()))
        group = process_group if placed else default_group(process_group)
        self.optimizer = class_for(config, overrides).of_engine(
            model, params, config, group, overrides, all_of_it=all_of_it, named=named
        )
        """The model's optimizer, for learning-rate schedulers and the like."""
        self.offload_config = self.optimizer.config
        """The configuration."""
        warn_if_slow(self.offload_config, model)
        _start_alike(model, self.optimizer)
        whole = [param for param in model.parameters() if param not in self.optimizer.sharding]
        self.optimizer.casts.cast(whole, model.buffers())
        self.module = model
        """The wrapped module."""
        self._changes = ModelChanges(model, self.optimizer)
        self._weights = NamedWeights(model, self.optimizer)
        self._gathering_waits = have_gathering_wait(model)
        """False if FSDP2 gathers parameters without a wait for their updates."""
        self._kept: list[tuple[int, int]] = []
        """The gradients that FSDP2 had kept at the last micro-step."""
        self._layerwise: Any = None
        """Runs micro-batches block by block (``LayerwiseRuns``); None: :meth:`accumulate` was not called yet."""
        self._traced = False
        """True if code was compiled that calls the engine."""
        self._compiled = self._have_compiled_modules_wait()
        """True if modules of the model are compiled; their backward may read a parameter at any time."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module" not in self._modules:
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward. With ``param_dtype``, floating-point tensors among the arguments, also those in
        lists, tuples and dicts, are cast to it first (``cast_inputs=False``: they are not).

        Each layer waits only for the update of its own parameters.
        """
        if torch.compiler.is_dynamo_compiling():
            self._traced = True
        elif self.is_released:
            parameters = self.optimizer.core.parameters
            parameters.check_present()
        elif self.optimizer.updates == 0:
            self.optimizer.follow_sizes()
        if not torch.compiler.is_dynamo_compiling():
            self.optimizer.sharding.before_forward(self.module)
        args, kwargs = self.cast(args, kwargs)
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            self._recover()
            if isinstance(error, Exception) and not self.is_released:
                self.optimizer.check_unchanged()  # a model that was cast or moved fails in the framework's words
                check_present(self.module, self.optimizer)
            raise

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module as ``torch.nn.Module.compile`` does; arguments are those of ``torch.compile``.

        The graph begins inside the engine: its parameters are waited for, and in stage 3 gathered, before it.
        """
        self.module.compile(*args, **kwargs)
        self._compiled = self._have_compiled_modules_wait()

    def _have_compiled_modules_wait(self) -> bool:
        return run_compiled_modules(self.module, self.optimizer.sharding.units)

    def cast(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a forward, with floating-point tensors in ``param_dtype``, as :meth:`forward` says."""
        return cast_inputs(self.offload_config, args, kwargs)

    def _recover(self) -> None:
        """Release all gathered parameters after an error."""
        self.optimizer.sharding.recover()

    @untraced
    def backward(self, loss: torch.Tensor, *, average: bool = True, **kwargs: Any) -> None:
        """Backpropagate; gradients are averaged over the accumulation steps, and scaled under loss scaling.

        Args:
            loss: a tensor of one element.
            average: False sums the gradients, as ``loss.backward()`` does: for a loss that is divided already.
            kwargs: passed on to ``loss.backward`` (``retain_graph``, ``create_graph``, ``inputs``).

        Raises:
            GradientError: the loss is not a tensor of one element.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else kind_of(loss)
            raise GradientError(f"backward: the loss is {got}, expected a tensor of one element: take its mean or sum")
        if kwargs:
            refuse("backward", kwargs, {"scale_wrt_gas": "average=..., False for a loss that is divided already"})
        steps = self._training_steps("backward()")
        if self.offload_config.update_in_backward and self._reads_wait and not self._compiled:
            steps.expect(self.optimizer.param_groups, average=average)
        components = steps.components
        span = components.core.span("backward")
        try:
            with span:
                components.device_memory.before_backward()
                run = partial(
                    components.grad_hooks.run_backward,
                    lambda scale: (loss if scale is None else loss.float() * scale).backward(**kwargs),
                    average=average,
                )
                steps.or_break_off(run)
        except BaseException:
            self._recover()
            raise

    @untraced
    def accumulate(
        self,
        batches: Sequence[Any],
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        *,
        blocks: str | Sequence[str] | Sequence[nn.Module] | None = None,
        average: bool = True,
    ) -> list[torch.Tensor]:
        """Run forward and backward of several micro-batches, block by block; :meth:`step` then updates as ever.

        It means ``for batch in batches: engine.backward(loss(engine(batch), batch))``, and counts as so many
        micro-steps. But all micro-batches pass one block of the model after the other, so that in stage 3 each block is
        gathered twice in all, and each gradient leaves the device once, as the sum over the micro-batches, in fp32.
        Each block runs again in backward, as a checkpointed one does. docs/layerwise.md says what models can run so,
        and which bits are those of the loop.

        Args:
            batches: what the engine is called with for each micro-batch: tensors, tuples of arguments, or dicts of
                keyword arguments. Or, for each micro-batch, a function without arguments that calls the engine and
                returns the loss. Functions run interleaved: each stops where a block begins, while the others go on to
                that block.
            loss: a function of the output and the micro-batch, which returns a tensor of one element; None: the output
                has it, as ``.loss``. None, too, if the micro-batches are functions.
            blocks: the name of an ``nn.ModuleList`` or ``nn.Sequential`` whose modules run one after the other, or
                modules or their names in their order; None: they are found.
            average: as in :meth:`backward`.

        Returns:
            The loss of each micro-batch, without a graph and without a loss scale.

        Raises:
            ParameterError, ConfigError, GradientError, StateError: before anything runs, or in the middle. Then no
                gradient of any micro-batch is kept.
        """
        from .layerwise.accumulate import LayerwiseRuns  # greenlet is of this method alone

        steps = self._training_steps("accumulate()")
        if self._layerwise is None or not self._layerwise.of(steps):
            self._layerwise = LayerwiseRuns(self.module, steps)
        runs: LayerwiseRuns = self._layerwise
        runs.begin(batches, blocks, average=average, with_loss=loss is not None)
        try:
            if self.offload_config.update_in_backward and self._reads_wait and not self._compiled:
                steps.expect(self.optimizer.param_groups, average=average)
            return runs.run(batches, loss, self, average=average)
        except BaseException:
            self._recover()
            steps.discard()
            raise

    @untraced
    def step(self, *, boundary: bool | None = None) -> StepReport:
        """Update at the accumulation boundary; before it, end the micro-step: its last gradients leave.

        Args:
            boundary: True or False for a loop that decides this itself (at the end of an epoch there may be fewer
                micro-steps), the same on all ranks; None: after every ``gradient_accumulation_steps`` micro-steps.

        Raises:
            StateError: no gradient arrived since the last call (if those that arrived were discarded since, by
                ``zero_grad()`` or ``p.grad = None``, the report says ``"no gradients"``, and nothing was updated); the
                model has got parameters since ``wrap`` that are to be trained and that the optimizer was not given.
            GradientError: averaged and summed gradients are mixed; nothing was updated.
            CollectiveError: an exchange with the other ranks failed, or they did not come.
        """
        optimizer, steps = self.optimizer, self._training_steps("step()")
        if boundary is None:
            self._warn_of_uncounted()
        self._changes.check(self.module, optimizer)
        core, grad_hooks = steps.components.core, steps.components.grad_hooks
        gradients = core.gradients
        if not grad_hooks.fresh:
            before, self._kept = self._kept, kept_gradients(self.module)
            grad_hooks.fresh = self._kept not in ([], before)
        with core.span("step"):
            try:
                if not (gradients.at_boundary if boundary is None else boundary):
                    return steps.accumulate(optimizer.param_groups, may_be_empty=bool(boundary))
                steps.end_micro_step(optimizer.step, may_be_empty=bool(boundary), reads_wait=self._reads_wait)
                assert optimizer.report is not None
                return optimizer.report
            except StateError:
                check_present(self.module, self.optimizer)
                raise

    def _training_steps(self, what: str) -> Steps:
        """The part of the optimizer that makes steps; :class:`StateError` if the engine has no states, and nothing in
        its model is to be trained."""
        steps = self.optimizer.steps
        if steps.components.registration.slots:
            return steps
        with no_read():
            if any(param.requires_grad for param in self.module.parameters()):
                return steps
        raise StateError(
            f"{what} of an engine that trains nothing: no parameter of {type(self.module).__name__} requires a "
            "gradient; expected requires_grad_(True) on what is to be trained, before the forward, or the backward() "
            "and step() of the engine that trains"
        )

    def _warn_of_uncounted(self) -> None:
        """Warn if several backwards are about to count as one micro-step, as in a loop that steps once an update."""
        n_steps, gradients = self.offload_config.gradient_accumulation_steps, self.optimizer.core.gradients
        if n_steps == 1 or gradients.counts_as > 1:
            return
        if (backwards := self.optimizer.components.grad_hooks.backwards) > 1:
            UserLine.now("torch").warn(
                UserWarning(
                    f"{backwards} backwards before one step(), which count as one of {n_steps} micro-steps "
                    f"(gradient_accumulation_steps={n_steps}): the update follows after {n_steps} calls of step(). "
                    "Expected a step() after each backward, or step(boundary=True) where your loop wants the update"
                )
            )

    @property
    def _reads_wait(self) -> bool:
        """True if readers of a parameter can be made to wait. Code that is compiled around the engine cannot: it reads
        parameters in ways that nothing can catch."""
        self._compiled = self._have_compiled_modules_wait()
        return not self._traced and self._gathering_waits and not pending.compiled_code_reads

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record the steps inside to a file for https://ui.perfetto.dev: ``with engine.trace("step.json"): ...``

        There are lanes for compute (forward, backward, step, and their waits), copies to the host, reduction,
        update, gather and copies to the device. Entering and leaving the context wait for the last update. Each of
        several ranks writes a file of its own, ``step.rank0.json`` and so on.

        Times are the host's. On an accelerator, forward and backward therefore last as long as the host takes to launch
        them, and a copy lasts until the thread that waits for it sees its end. A copy for which the device alone waits,
        as for parameters that are gathered in stage 3, is not in the file.

        Raises:
            StateError: another trace is being recorded.
            OSError: the file cannot be written.
        """
        running, core = ExitStack(), self.optimizer.core
        grad_hooks = self.optimizer.components.grad_hooks

        @untraced
        def begin(module: nn.Module, args: Any) -> None:
            if not grad_hooks.is_summing:  # accumulate() has spans of its own, for parts of several forwards
                running.enter_context(core.span("forward"))

        @untraced
        def end(module: nn.Module, args: Any, output: Any) -> None:
            running.close()

        with ExitStack() as hooks, core.trace(path), running:
            hooks.callback(self.register_forward_pre_hook(begin).remove)
            hooks.callback(self.register_forward_hook(end, always_call=True).remove)
            yield

    def generating(self) -> AbstractContextManager[None]:
        """Keep all parameters whole in stage 3, so that forwards inside gather none: ``with engine.generating(): ...``

        They are gathered once, whatever ``max_live_parameters`` says: leave room on the device for the model. All ranks
        enter and leave it together; inside, ranks may make forwards of unlike numbers, as generated texts of unlike
        lengths do, without ``synced_gpus``. Parameters may be read, and are changed as outside. In stages 1 and 2 it
        does nothing.

        Raises:
            StateError: an update inside; a parameter was changed without ``gathered_parameters``: the change is lost.
        """
        return self.optimizer.sharding.generating()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's ``generate`` returns, which runs in :meth:`generating`.

        Where the whole model does not fit on the device, call ``engine.module.generate``, on several ranks with
        ``synced_gpus=True``: it gathers each layer for each token.
        """
        module: Any = self.module
        with self.generating():
            return module.generate(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Keep the gradients of the backwards inside in ``p.grad``; the next backward outside reduces them.

        As in ``DistributedDataParallel``, all ranks must do the same, gradients are summed in the parameters' own
        element type, and each rank keeps a whole gradient of the model. On one rank this has no effect. Under FSDP2 it
        is ``model.set_requires_gradient_sync(False)``, which may be called in its place.

        Raises:
            StateError: in stages 2 and 3, which keep no whole gradients.
        """
        if sharded := fsdp_modules(self.module):
            return gradients_stay(sharded)
        if (stage := self.offload_config.stage) != 1:
            raise StateError(
                f"the no_sync context manager is incompatible with ZeRO stage {stage}, which keeps no whole "
                "gradients; expected stage=1, or no no_sync(): gradient_accumulation_steps then sums shards in fp32"
            )
        alone = self.optimizer.core.world_size == 1
        return nullcontext() if alone else self.optimizer.components.grad_hooks.deferring()

    def set_gradient_accumulation_steps(self, micro_steps: int) -> None:
        """Have an update follow so many micro-steps from now on, and average over as many. All ranks call this alike.

        Raises:
            StateError: gradients wait for an update; or ``update_in_backward`` has left no memory for sums.
        """
        self.optimizer.accumulate_over(micro_steps)
        self.offload_config = self.optimizer.config

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients at an accumulation boundary; between micro-steps, keep them.

        A loop that calls this before every backward therefore accumulates as configured.
        ``engine.optimizer.zero_grad()`` discards gradients at any time.
        """
        gradients = self.optimizer.core.gradients
        if gradients.micro_steps == 0:
            self.optimizer.zero_grad(set_to_none)

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients and parameters that this rank has sent to other ranks."""
        return self.optimizer.sent_bytes

    def flush(self) -> None:  # waits
        """Wait until parameters and states hold the result of the last step; see ``OffloadedAdamW.flush``."""
        self.optimizer.flush()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``torch.nn.Module.state_dict``; the parameters are all of one step.

        Raises:
            StateError: called in the middle of a step, by a signal handler.
        """
        return self.optimizer.state_lock.consistent("state_dict()", super().state_dict, *args, **kwargs)

    # --- checkpoints ---------------------------------------------------------------------------------

    @hinted(
        client_state="extras=..., plain values and arrays",
        save_latest="latest=...",
        exclude_frozen_parameters="frozen=False",
    )
    def save_checkpoint(
        self,
        folder: str | os.PathLike[str],
        tag: str | None = None,
        *,
        stateful: Mapping[str, Any] | None = None,
        extras: Any = None,
        keep: int | None = None,
        wait: bool = True,
        frozen: bool = True,
        latest: bool = True,
    ) -> Path:
        """Save everything that training needs to resume, and return the checkpoint's folder, ``folder/step-…``.

        All ranks call this, and must share the folder. The checkpoint holds master weights, moments, step counts, the
        loss scale, hyperparameters and the arguments; rank 0's frozen parameters, persistent buffers and the
        ``get_extra_state()`` of modules (plain values); and the state of each rank's random generators (Python's,
        NumPy's, torch's). Any number of ranks, any stage and the JAX front end can load it. It appears complete or not
        at all; then ``folder/latest`` names it.

        Args:
            tag: the checkpoint's name in the folder, in place of ``step-…``. One of that name is replaced.
            stateful: objects with ``state_dict()`` and ``load_state_dict()``, by name: LR schedulers, data loaders.
                Rank 0's states are saved.
            extras: plain values and arrays (no objects: nothing is pickled); :meth:`load_checkpoint` returns them.
            keep: the number of checkpoints to keep in the folder; older ones are deleted. None: keep all. Those with a
                tag are kept.
            wait: False returns while optimizer states are still being written. Training may go on: the checkpoint
                holds the states of the call. The next save, :meth:`wait_for_checkpoint` or :meth:`close` waits for it.
            frozen: False leaves out parameters that require no gradient and have no states (the base under LoRA). A
                model that loads the checkpoint keeps its own values of them: give it the same base first. Names and
                shapes are compared, values are not.
            latest: False: ``folder/latest`` stays as it is.

        Raises:
            CheckpointError: on all ranks; earlier checkpoints are untouched.
            StateError: gradients wait for an update; or a signal handler calls this in the middle of a step.
        """
        return self._checkpoints.save(
            folder,
            stateful=stateful,
            extras=extras,
            keep=keep,
            wait=wait,
            frozen=frozen,
            tag=tag,
            latest=latest,
        )

    def save_on_signal(
        self,
        folder: str | os.PathLike[str],
        signals: Iterable[int] = (signal.SIGTERM,),
        *,
        stateful: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> SaveOnSignal:
        """Note these signals from now on, and save between two steps: ``if saver.save(): break`` ends the loop's turn.

        The signal itself only leaves a note. The next :meth:`step` tells all ranks of it, and ``saver.save(extras)``
        then saves on all of them, and returns the checkpoint's folder; until then it returns None. Call it where the
        turn has ended, after the scheduler's step. It is enough if one rank gets the signal.

        ``with engine.save_on_signal(...) as saver:`` or ``saver.close()`` gives the signals back to what received them
        before.

        Args:
            folder, stateful, keep: as in :meth:`save_checkpoint`.

        Raises:
            StateError: not in the main thread.
        """

        def save(extras: Any) -> Path:
            return Engine.save_checkpoint(self, folder, stateful=stateful, extras=extras, keep=keep)

        return self.optimizer.core.save_on_signal(save, signals)

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is on the disk, and raise the error if saving failed. All ranks call it."""
        self.optimizer.checkpoints.wait()

    @hinted(
        tag="the checkpoint's own folder, load_checkpoint(folder / tag)",
        load_dir="the folder as the first argument",
        load_module_strict="strict=...",
        load_optimizer_states="optimizer_states=...",
        load_module_only="optimizer_states=False",
        load_lr_scheduler_states="stateful={'schedule': scheduler}, or without it",
    )
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        stateful: Mapping[str, Any] | None = None,
        names: Names = None,
        random_state: bool = True,
        missing_ok: bool = False,
        optimizer_states: bool = True,
        strict: bool = True,
    ) -> Any:
        """Load a checkpoint, or the latest of a folder, and return its extras. All ranks call it.

        A parameter that is frozen in this model gets its value but no states: first unfreeze those that were trained
        when the checkpoint was saved.

        Args:
            stateful: objects, by the names under which their states were saved. A warning names states for which there
                is none, unless it is given as None.
            names: from this model's names to those in the checkpoint: a function, or a mapping of those that differ.
            random_state: True restores the random generators. A rank that the saving run did not have keeps its own.
            missing_ok: True returns None if there is no checkpoint yet, for loops that resume if there is one.
            optimizer_states: False loads weights, buffers and states of modules, but no moments, step counts,
                hyperparameters and loss scale: these stay as they are. The checkpoint may be of another optimizer then.
            strict: False, as in torch's ``load_state_dict``: tensors that the checkpoint lacks stay as they are, and
                those that the model lacks are left out.

        Raises:
            CheckpointError: on all ranks. Nothing has changed, unless the message says that loading broke off.
        """
        checkpoints = self._checkpoints
        if missing_ok and checkpoints.has_none(path):
            return None
        return checkpoints.load(
            path,
            stateful=stateful,
            names=names,
            random_state=random_state,
            states=optimizer_states,
            strict=strict,
        )

    @property
    def _checkpoints(self) -> ModelCheckpoints:
        self.optimizer.follow_sizes()
        return ModelCheckpoints(self.module, self.optimizer)

    def export_safetensors(
        self,
        folder: str | os.PathLike[str],
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        """Write the model's weights as Hugging Face's libraries read them, in any stage; all ranks must call this.

        The tensors of ``state_dict()`` go to ``model.safetensors``, or to ``model-00001-of-0000N.safetensors`` and so
        on with ``model.safetensors.index.json``. Tied weights are written once, so that ``from_pretrained(folder)``
        ties them again; it also needs ``model.config.save_pretrained(folder)``. Rank 0 writes, and holds one parameter
        in memory at a time. Files appear complete and replace those of an earlier export. It begins with :meth:`flush`.

        Args:
            max_shard_bytes: the most bytes of tensors in one file.
            dtype: None writes the parameters that the model runs with, ``"float32"`` the exact master weights,
                ``"bfloat16"`` and ``"float16"`` the rounded master weights. Tensors that are not trained are cast;
                buffers that are not floating-point stay as they are.

        Raises:
            ConfigError, ParameterError: an argument is wrong, or a tensor cannot be written; nothing was written.
            CheckpointError: on all ranks, if a file cannot be written; no part of it is left.
        """
        export = partial(export_safetensors, max_shard_bytes=max_shard_bytes, dtype=dtype)
        lock = self.optimizer.state_lock
        lock.consistent("export_safetensors()", export, self.module, self.optimizer, folder)

    def named_weights(
        self,
        *,
        dtype: str | torch.dtype | None = None,
        layout: str = "contiguous",
        device: str | torch.device | None = None,
        into: Callable[[list[tuple[str, torch.Tensor]]], object] | Mapping[str, torch.Tensor] | None = None,
        since: StepReport | None = None,
        merge_lora: bool = False,
        rank0_only: bool = False,
    ) -> Any:
        """Return an iterator of ``(name, tensor)`` over the model's whole weights, in any stage, or hand them to a
        receiver: ``engine.named_weights(dtype="bfloat16", into=llm_model.load_weights)``. All ranks must call this.

        Weights have the names, the order and the bits that :meth:`export_safetensors` writes: those of
        ``state_dict()``, tied weights once. Each tensor is a copy. At most ``reduce_bucket_size`` elements are in
        memory at a time, or one weight that is larger. Ranks go from bucket to bucket together. A rank that fails or
        leaves the iterator early ends it on all ranks, which raise :class:`StateError`. Nothing is lost then, and the
        next call gives all weights. It begins with :meth:`flush`.

        Args:
            dtype: None gives the parameters that the model runs with, ``"float32"`` the exact master weights,
                ``"bfloat16"`` and ``"float16"`` the rounded master weights. Tensors that are not trained are cast;
                buffers that are not floating-point stay as they are.
            layout: ``"contiguous"`` tensors in C order, or ``"own"``, the parameter's order in memory (channels_last).
            device: of the tensors; None: host memory, or where ``into`` has all its tensors.
            into: a function that is called with a list of ``(name, tensor)`` for each bucket, or a mapping from all
                names to tensors of the weights' shapes, of any floating-point type and on any device, that are
                overwritten. The call then returns the number of weights that this rank has given. A mapping may also
                have the other names of tied weights.
            since: a report of this engine's :meth:`step`: give only what may have changed after it. These are the
                parameters that an update, a load or a write has changed since, and buffers. After a load, an earlier
                report gives all trained parameters. Writes to a frozen parameter's ``data`` are not seen.
            merge_lora: True merges the active adapters of PEFT into the base on the host, with the bits and names of
                ``merge_and_unload()`` of a copy on the CPU. With ``dtype`` it is merged in fp32 and rounded once. The
                model does not change. A layer and PEFT's copies of its weight are in memory at a time.
            rank0_only: True gives weights on rank 0 alone. The others call this, too: their iterator yields nothing and
                must be run to its end, and their ``into`` is not used.

        Raises:
            ConfigError, ParameterError: an argument is wrong, differs among ranks or does not fit the model, or a
                weight cannot be given (a quantised one); nothing was given.
            StateError: another rank has failed or left; or the model has had an update or a load before the iterator
                ended.
        """
        asked = WeightRequest(dtype, layout, device, into, since, merge_lora, rank0_only)
        return self._weights.give(self.module, self.optimizer, asked)

    def whole_state_dict(self, *, frozen: bool = True) -> dict[str, torch.Tensor] | None:
        """Return the module's ``state_dict`` with whole weights in host memory, in any stage; None but on rank 0.

        It holds the whole model. Tied weights have one tensor under each name. All ranks must call this.

        Args:
            frozen: False leaves out parameters that require no gradient.
        """
        tensors = self.module.state_dict(keep_vars=True)
        values = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items() if torch.is_tensor(t)}
        self.named_weights(into=values, rank0_only=True)
        left_out = {n for n, t in tensors.items() if isinstance(t, nn.Parameter) and not (frozen or t.requires_grad)}
        is_first = self.optimizer.core.rank == 0
        return {name: value for name, value in values.items() if name not in left_out} if is_first else None

    # --- memory --------------------------------------------------------------------------------------

    def release(self, *, keep: Iterable[str] = ()) -> ReleaseReport:
        """Give the device back, until :meth:`restore`: parameters and buffers have no memory there.

        Torch's allocator gives back what it kept, too.

        Master weights and states are on the host, and stay there. Frozen parameters and buffers are copied to pinned
        host memory, which stays for the next time. Afterwards every bit is as if nothing had happened, with one
        exception: it begins with :meth:`flush`, which ends the delay of ``schedule="delayed"``. All ranks call this.
        Until :meth:`restore`, forward, backward, ``step()``, loads and reads of parameters raise :class:`StateError`,
        on the CPU, too, where memory stays as it is. Saves, :meth:`export_safetensors` and reads of optimizer states
        work. A view of a parameter that you hold, and a graph, have no memory meanwhile: do not read them. After
        :meth:`restore`, :meth:`backward` waits for what the graph of an earlier forward reads. Before you read a view,
        or call ``loss.backward()`` yourself on such a graph, call :meth:`flush`.

        Scales and tables of quantised parameters stay if they are below 2 KiB. Does nothing if the engine is released
        already.

        Args:
            keep: names of parameters, buffers or modules that stay on the device.

        Raises:
            StateError: in the middle of a backward; gradients wait for an update; some ranks alone are released.
            CollectiveError: some ranks alone call it, and the others exchange something else. This ends the run.
            ParameterError: nothing has a name in ``keep``; the memory of a tensor cannot be given back.
            HostMemoryError: there is no room for the copies. Nothing was released.
        """
        return self.optimizer.release_tensors(self._named_memory(), [keep] if isinstance(keep, str) else [*keep])

    def _named_memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that hold the model's values, under all their names. They come back in this order, and those of
        buffers are waited for at once."""
        for module in fsdp_modules(self.module):
            module.reshard()
        yield from self.module.named_buffers(remove_duplicate=False)
        yield from named_memory(self.module)

    def restore(self) -> None:
        """Take the device again, and bring everything back, in the background: a layer waits for its own parameters.

        Where code that is compiled around the engine cannot be made to wait, this waits for everything. Does nothing if
        the engine is not released. All ranks call this.

        Raises:
            DeviceMemoryError: on all ranks, if one has no room. All is still released, and nothing is lost.
        """
        self.optimizer.restore()
        if not (self.is_released or self._reads_wait):
            self.flush()

    @property
    def is_released(self) -> bool:
        """True between :meth:`release` and :meth:`restore`."""
        return self.optimizer.is_released

    @contextmanager
    def released(self, *, keep: Iterable[str] = ()) -> Iterator[ReleaseReport]:
        """``with engine.released(): ...``: :meth:`release` before, :meth:`restore` after, also after an error.

        Inside another one it changes nothing.
        """
        was_released = self.is_released
        try:
            yield self.release(keep=keep)
        finally:
            if not was_released:
                self.restore()

    def where(self) -> str:
        """Return where this process is, as lines to print while a step does not return; see
        :meth:`OffloadedOptimizer.where`.

        ``OFFLOAD_CORE_WHERE=1`` in the environment has ``kill -USR1`` print it, from ``wrap`` on.
        """
        return self.optimizer.where()

    def memory_report(self) -> MemoryReport:
        """Planned and measured bytes, on the device and on the host; print it, or draw it (``.plot(path)``).

        The module's frozen parameters and buffers are included.
        """
        return self.optimizer.memory_report(self.module)

    def device_use(self) -> DeviceUse | None:
        """Return the memory in use on the device, now and at its peak, activations included.

        It is what torch's allocator counts. None: the parameters are in host memory, or the device's allocator keeps no
        statistics.
        """
        return self.optimizer.device_use()

    @contextmanager
    def closed_on_error(self, what: str) -> Iterator[None]:
        """A context for what belongs to making an engine. If it fails on one rank, it fails on all, and the engine is
        closed: another one can be made of the model. All ranks enter it.

        Raises:
            StateError: ``what`` failed on another rank.
        """

        def failed(others: str) -> StateError:
            return StateError(f"{what}() failed in process {others}, and so in all; it says there why")

        try:
            with together(self.optimizer.core.collectives, what, failed):
                yield
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Remove the hooks from the model and free the host memory; the parameters keep their values.

        If the engine is released and a rank was lost, device memory that was given back stays empty.
        Gradients that wait for an update are discarded. What ``update_in_backward`` has updated already stays updated.
        """
        self.optimizer.close()
        self._layerwise = None


_AVERAGERS = {"DistributedDataParallel", "FullyShardedDataParallel"}
"""Classes of torch, by name: their import takes long, and some builds of torch lack it."""


def _check_averages_once(model: nn.Module) -> None:
    """Raise :class:`ParameterError` if a part of the model that trains averages its gradients itself."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")} & _AVERAGERS
        if kinds and any(param.requires_grad for param in module.parameters()):
            raise ParameterError(
                f"{f'module {name!r}' if name else 'the model'} is of type {min(kinds)}, which averages gradients, as "
                "the engine does; expected wrap(model) of the module without it"
            )


def _start_alike(model: nn.Module, optimizer: OffloadedOptimizer) -> None:
    """Give frozen parameters and buffers rank 0's values, too. DTensors have those that their mesh says."""
    if optimizer.core.world_size == 1:
        return
    packed, collectives = packed_values(model), optimizer.core.collectives
    given = [*model.named_parameters(), *model.named_buffers()]
    others = [(n, t) for n, t in given if not is_dtensor(t)]
    rest = [(n, t) for n, t in others if t not in optimizer.state and t not in optimizer.sharding]
    for name, whole in rest:
        for tensor in packed[whole].tensors if whole in packed else [whole]:
            host = tensor.detach().cpu().contiguous()
            values = host.view(-1).view(torch.uint8).numpy() if host.numel() else host.numpy()
            collectives.broadcast(values, f"{name!r}: initial value")
            with grad_mode_kept(), torch.no_grad():
                tensor.copy_(host)
