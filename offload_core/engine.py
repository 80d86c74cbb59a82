"""The core as a front end sees it. A front end imports no module of ``checkpoint/``, ``plans/``, ``states/`` or
``step/``: this module exports all that a front end needs of these folders.

:class:`Engine` trains one process's parameters. Its attributes are ``gradients`` (since the last update),
``parameters`` (on the device), ``states`` (master weights and moments) and ``checkpoints``. The other names that this
module exports are the classes of these attributes and of the arguments and results of their methods, and functions that
read and write checkpoints.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .checkpoint.checkpoints import Checkpoints, Contents, Names, translation
from .checkpoint.export import MAX_SHARD_BYTES, Weight, export_weights
from .checkpoint.loading import Target, load_values
from .checkpoint.on_signal import SaveOnSignal
from .checkpoint.reader import Checkpoint, Loaded, Opened, Want
from .checkpoint.safetensors import FLOATING
from .checkpoint.saved_weights import SavedWeights
from .checkpoint.shard_writer import Source
from .checkpoint.stateful import DeferredLoad, RandomState, TrainingRun, run_deferred
from .checkpoint.values import ArrayType, encode
from .checkpoint.weight_files import WeightFiles
from .config.options import OffloadConfig
from .device.protocols import Device, GatheringDevice
from .device.trace import COMPUTE
from .layout.partition import ParamSpec
from .memory.host_memory import HostMemory, available_bytes
from .memory.plan import HOST, ArrayBytes, MemoryPlan, PlanRow
from .memory.report import MemoryReport
from .plans.at_once import rows_at_once
from .plans.planner import Planner, check_memory
from .rules import Rule
from .stage3.live_params import LiveParams
from .states.arrays import StateRun
from .step.decision import StepArguments, StepReport
from .step.gradient_access import GradientAccess
from .step.gradients import Gradients
from .step.health import Health, Use
from .step.loss_scale import LossScaler
from .step.parameters import Parameters
from .step.pipeline import OrderedCollectives, Pipeline
from .step.state_access import StateAccess
from .step.state_lock import StateLock, begins, changes, consistent
from .support import threads
from .support.launchers import local_processes
from .support.where import told

__all__ = [
    "FLOATING",
    "MAX_SHARD_BYTES",
    "ArrayType",
    "Checkpoint",
    "Contents",
    "DeferredLoad",
    "Engine",
    "GradientAccess",
    "Gradients",
    "Loaded",
    "LossScaler",
    "Names",
    "Opened",
    "Parameters",
    "RandomState",
    "SaveOnSignal",
    "SavedWeights",
    "Source",
    "StateAccess",
    "StateLock",
    "StateRun",
    "StepArguments",
    "StepReport",
    "Target",
    "TrainingRun",
    "Want",
    "Weight",
    "WeightFiles",
    "begins",
    "changes",
    "consistent",
    "encode",
    "export_weights",
    "load_values",
    "run_deferred",
    "translation",
]


class Engine:
    """Trains the parameters of one process.

    Parameters are numbered in the order in which they were added. Tensors are passed in and out in the device's form:
    one-dimensional and contiguous. If an update of the last step fails, the next method that waits for the updates
    raises the error. The caller holds ``state_lock`` for a change (:meth:`StateLock.change`) when it calls a method
    that changes anything.
    """

    gradients: Gradients
    """The gradients since the last update."""
    gradient_access: GradientAccess
    """Reads and writes the values of the gradients since the last update."""
    parameters: Parameters
    """The parameters on the device."""
    params: Sequence[ParamSpec]
    """The description of each parameter."""
    states: StateAccess
    """The optimizer states."""
    checkpoints: Checkpoints

    def __init__(
        self, config: OffloadConfig, device: Device, scaler: LossScaler | None, rule: Rule | None = None
    ) -> None:
        """
        Args:
            rule: the update rule of parameters whose ``ParamSpec.rule`` is None; None: the configuration's rule.
        """
        self._pipeline = pipeline = Pipeline(config, device, scaler, rule)
        self._process = os.getpid()
        self.device = device
        self.scaler = scaler
        self.state_lock = pipeline.state_lock
        """The lock that a thread holds while it changes or saves states or parameters."""
        self.changes = pipeline.changes
        """Records the last change of each parameter."""
        self.collectives = OrderedCollectives(pipeline)
        """The collectives for exchanges outside a step."""
        self.span: Callable[[str], AbstractContextManager[None]] = partial(device.trace.span, COMPUTE)
        """``span(what)`` returns a context. A trace records the context's body as code of the model or of the front
        end."""
        self._follow()

    def _follow(self) -> None:
        """Set this engine's attributes to the present attributes of the pipeline."""
        pipeline = self._pipeline
        self.gradients, self.parameters, self.params = pipeline.gradients, pipeline.parameters, pipeline.params
        self.gradient_access = GradientAccess(pipeline)
        self.states = StateAccess(pipeline)
        self.checkpoints = Checkpoints(pipeline, self.states)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._pipeline.__reduce_ex__(protocol)  # it says what to do instead

    # --- parameters are added --------------------------------------------------------------------------

    @property
    def _planner(self) -> Planner:
        return Planner(self._pipeline.buckets.terms, self._pipeline.buckets.allocated)

    def plan(
        self,
        specs: Sequence[ParamSpec],
        *,
        frozen: Sequence[ParamSpec] = (),
        besides: int = 0,
        gradients_stay: bool = False,
    ) -> MemoryPlan:
        """Plan the training of ``specs`` where gradients come one by one, as in torch.

        Args:
            frozen: parameters that are not trained.
            besides: the bytes of the model's buffers on the device.
            gradients_stay: True if all gradients stay on the device until the update.
        """
        return self._planner.plan(specs, frozen=frozen, besides=besides, gradients_stay=gradients_stay)

    def rows_at_once(self, specs: Sequence[ParamSpec], arrays: Sequence[ArrayBytes], *, on_host: bool) -> list[PlanRow]:
        """Return plan rows for a process's parameters and gradients where all gradients come at once, as in JAX. The
        rows are for the moment of an update at which parameters and gradients together take the most memory.

        Args:
            arrays: the trained arrays, in the order in which the update takes their gradients.
            on_host: True if the devices' memory is host memory.
        """
        return rows_at_once(self._pipeline.buckets.terms, specs, arrays, on_host=on_host)

    def plan_at_once(
        self, rows: Iterable[PlanRow], specs: Sequence[ParamSpec], *, devices: int, shared: bool
    ) -> MemoryPlan:
        """Plan the training of ``specs`` where all gradients come at once.

        Args:
            rows: the rows of :meth:`rows_at_once`, and rows for other memory of the front end.
            devices: the number of this process's devices.
            shared: True if the device's memory is host memory.
        """
        return self._planner.plan_with(rows, specs, devices=devices, shared=shared)

    def check_memory(self, plan: MemoryPlan, specs: Sequence[ParamSpec], again: Callable[[], MemoryPlan]) -> None:
        """Check, before parameters are added, that this machine has memory for all its processes, if each has a plan
        like this one. If the settings do not limit the states' host memory, states first get the free host memory.

        Args:
            plan: the plan of ``specs``.
            again: makes the plan of ``specs`` again, after states got the free host memory.

        Raises:
            HostMemoryError, DeviceMemoryError, DiskSpaceError: the plan does not fit.
        """
        device = self.device
        check_memory(
            self._planner,
            plan,
            again,
            specs,
            host=available_bytes(),
            device=device.free_bytes(),
            processes=min(local_processes(), device.collectives.world_size),
            lent=self._pipeline.buckets.lent_bytes(specs),
        )

    def add_parameters(
        self, specs: Sequence[ParamSpec], tensors: Sequence[Any], *, frozen: Sequence[ParamSpec] = ()
    ) -> None:
        """Add parameters: allocate their states, and copy ``tensors`` to the master weights.

        The element type of a tensor may differ from its spec's: the tensor may have the model's original type, and the
        spec the type to which the model is cast.

        Args:
            frozen: parameters that are not trained. The front end allocates their shards in ``memory``.
        """
        self._pipeline.add_parameters(specs, tensors, frozen=frozen)

    def start_over(self) -> None:
        """Remove all parameters, free their states, and replace ``gradients``, ``parameters`` and the like by new
        objects. Then other parameters may be added."""
        self._pipeline.start_over()
        self._follow()

    def live_params(self, device: GatheringDevice) -> LiveParams:
        """Return a new :class:`LiveParams`, which gathers and releases partitioned parameters of this engine (stage 3).
        It has no parameters yet."""
        return LiveParams(self.config, device, self.state_lock, self._pipeline.health)

    # --- a step ------------------------------------------------------------------------------------------

    def expect_step(
        self, arguments: StepArguments, before_send: Callable[[Collection[int]], None] = lambda params: None
    ) -> None:
        """Announce the :meth:`step` that ends this micro-step, before the micro-step's first gradient.

        With ``update_in_backward``, each bucket's parameters may then be written as soon as all gradients of the bucket
        have arrived. An error between this call and :meth:`step` is an error in mid-update, as :meth:`step` describes.

        Args:
            arguments: the arguments with which :meth:`step` will be called.
            before_send: called with the parameters of a bucket before the bucket is sent. Readers of these parameters
                must wait from then on. Each method that may launch a bucket may call ``before_send``, in its caller's
                thread.
        """
        self._pipeline.early.expect_step(arguments, before_send)

    def check_expected(self, arguments: StepArguments) -> None:
        """Raise :class:`StateError` if states were updated in backward with other arguments."""
        self._pipeline.early.check_expected(arguments)

    def step(self, arguments: StepArguments, *, gathered: int = 0) -> StepReport:
        """Update every parameter that has a gradient, or skip the step.

        With ``schedule="overlap"`` this returns while updates go on, and the next call that waits for the updates
        raises their error. After an error in mid-update (for example a device copy that fails), all states are still
        updated, the step counts, and the gradients are discarded. If this process has all ranks, the next step sends
        the parameters that were not written. Otherwise ``step/health.py`` lists the uses that are still allowed. After
        the loss of another rank in mid-update, every call raises :class:`StateError`.

        Args:
            gathered: in stage 3, a fingerprint of the gathers and their order (``LiveParams.release_all``).
        """
        return self._pipeline.step(arguments, gathered=gathered)

    def finish(self) -> None:  # waits
        """Wait for all of the last step's updates and parameters, and raise their error."""
        self._pipeline.last_step.finish()

    @property
    def is_running(self) -> bool:
        """True if an update of the last step may still run, or its parameters may still be in flight."""
        return self._pipeline.last_step.is_running

    def abandon(self) -> bool:
        """End an announced step that will not come. States that were updated for this step stay updated, and the step
        counts.

        Returns:
            False if no states may have been updated for an announced step. Nothing has changed then.
        """
        return self._pipeline.last_step.abandon()

    @property
    def has_begun(self) -> bool:
        """True once an update was made, or a bucket was sent early in backward."""
        return bool(self._pipeline.counts.updates or self._pipeline.early.has_begun)

    @property
    def update_count(self) -> int:
        """The number of updates so far. Loading a checkpoint sets it to the checkpoint's number."""
        return self._pipeline.counts.updates

    @update_count.setter
    def update_count(self, count: int) -> None:
        self._pipeline.counts.updates = count

    @property
    def skipped_count(self) -> int:
        """The number of updates that were skipped because a gradient had an inf or a NaN."""
        return self._pipeline.counts.skipped

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in the next backward."""
        return self._pipeline.loss_scale

    def accumulate_over(self, micro_steps: int, *, waiting: bool) -> None:
        """From now on, update once every ``micro_steps`` micro-steps.

        Args:
            waiting: True if the front end has gradients that wait for an update.

        Raises:
            StateError: gradients wait for an update, or no step may follow, or there is no memory for sums.
            CollectiveError: another rank was lost.
        """
        self._pipeline.accumulate_over(micro_steps, waiting=waiting)

    # --- allowed uses ------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """True if a step may follow."""
        return self._pipeline.health.usable

    @property
    def is_torn(self) -> bool:
        """True if a load or an update broke off and left states of different steps. Only a load may follow, because it
        replaces all states."""
        return self._pipeline.health.state is Health.TORN

    def check_readable(self) -> None:
        """Raise :class:`StateError` if states may not be read."""
        self._pipeline.health.check(Use.READ)

    def check_step(self) -> None:
        """Raise an error if no step may follow. The message says what broke off.

        Raises:
            CollectiveError: another rank was lost between two steps.
            StateError: a step or a load broke off, or parameters have no memory on the device.
        """
        self._pipeline.health.check(Use.STEP)

    def replacing_states(self, *, masters: bool = True) -> AbstractContextManager[None]:
        """Return a context whose body replaces all states. After an error in the body, every call raises until another
        load has replaced all states.

        Args:
            masters: False if the body does not replace master weights. They then follow their parameters, which may
                still get earlier values back (:meth:`StateAccess.adopt`).
        """
        return self._pipeline.replacing_states(masters=masters)

    # --- of the whole process ----------------------------------------------------------------------------

    @property
    def config(self) -> OffloadConfig:
        """The configuration, with the present ``gradient_accumulation_steps``."""
        return self._pipeline.config

    @property
    def memory(self) -> HostMemory:
        """Allocates host memory for states, gradients and staging. Front ends also allocate from it."""
        return self._pipeline.memory

    @property
    def rank(self) -> int:
        """This process's rank in its collectives."""
        return self.collectives.rank

    @property
    def world_size(self) -> int:
        """The number of ranks over which states are partitioned."""
        return self.device.world_size

    def save_on_signal(self, save: Callable[[Any], Path], signals: Iterable[int]) -> SaveOnSignal:
        """Note these signals from now on. If any rank had a signal, the next step tells all ranks, so that all ranks
        save after the same step.

        Args:
            save: ``save(extras)`` writes a checkpoint and returns its folder.

        Raises:
            StateError: this is not the main thread, which alone can receive signals.
        """
        return SaveOnSignal(self._pipeline, save, signals)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Return a context that records its body, and writes the recorded spans to the file ``path`` at the end, also
        after an error. Entering and leaving wait for the last update.

        With several processes each adds its rank to the file's name: ``step.rank0.json``.

        Raises:
            StateError: a trace is already being recorded.
            OSError: the file cannot be written.
        """
        self.state_lock.change("trace()", self.finish)
        with self.device.trace.to_file(path):
            yield
            self.state_lock.change("trace()", self.finish)

    def where(self, *own: Callable[[], str]) -> str:
        """Return lines that say what this process is doing, for a user who waits for a step. Takes no lock, and raises
        nothing.

        Args:
            own: functions that return the front end's lines.
        """
        pipeline, group, process = self._pipeline, self.device.collectives, os.getpid()
        forked = f", a fork of process {self._process}" * (process != self._process)
        title = f"offload-core: rank {group.rank} of {group.world_size}, process {process}{forked}"
        parts = (pipeline.health, pipeline.counts, pipeline.arrivals, pipeline.state_lock, group)
        return told(title, *(part.where for part in parts), *own, threads.where)

    def memory_report(self, planned: Iterable[PlanRow], held: Mapping[tuple[str, str], int]) -> MemoryReport:
        """Return the memory that is planned and the memory in use.

        Args:
            planned: the rows of the plan. Rows that :meth:`add_parameters` has planned are left out.
            held: the bytes in use that the front end counts, by ``(where, what)``.
        """
        buckets = self._pipeline.buckets
        numel = sum(spec.numel for spec in self.params)
        own = {(HOST, what): n_bytes for what, n_bytes in self.memory.report().items()}
        kept = buckets.held_elsewhere()
        mine = {(row.where, row.what) for row in buckets.planned}
        rows = [*buckets.planned, *(row for row in planned if (row.where, row.what) not in mine)]
        memory = {**own, **kept, **held}
        return MemoryReport.of(numel, rows, memory, shared=self.memory.shared_bytes, pinned=self.memory.pinned())

    # --- the end -----------------------------------------------------------------------------------------

    def conclude(self, flush: Callable[[], None]) -> None:
        """Before :meth:`close`, write the last step's values to all parameters. If states were updated in backward for
        a step that has not come, end this step, which counts.

        Args:
            flush: calls :meth:`Parameters.flush` with the present tensors.
        """
        if self.usable and self._pipeline.buckets.terms.updates_early:
            self.gradients.reduce_first()  # a rank that leaves out parameters has begun fewer exchanges
        self.state_lock.change("close()", self.abandon)
        if self.usable:
            self.state_lock.change("close()", flush)

    def close(self) -> None:
        """Free the states, and the resources of exchanges with other ranks."""
        self._pipeline.buckets.close()
        self.device.close()
