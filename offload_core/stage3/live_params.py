"""Gathers partitioned parameters before a module uses them, and releases them after the use. Some parameters are
prefetched before their use, and some stay whole until their next use.

One thread gathers shards, in the order of the calls and separately from other exchanges between ranks
(:class:`GatheringDevice`). Every decision depends only on the order of uses and on sizes, so that ranks that run the
same modules gather in the same order. If ranks gather in different orders, their ``digest`` differs.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..config.options import OffloadConfig
from ..device.events import AfterAll, Done, Event
from ..device.protocols import GatheringDevice
from ..device.trace import COMPUTE
from ..disk.shards import ShardSource
from ..errors import StateError
from ..layout.partition import Bucket, ParamSpec
from ..ranks.consistency import fingerprint
from ..step.health import PipelineHealth
from ..step.state_lock import StateLock, changes
from ..support.threads import Task
from ..support.worker import Background, Inline
from .use_order import UseOrder


class WholeMemory(Protocol):
    """Device memory for one whole parameter, allocated only while it is needed."""

    def allocate(self) -> Any:
        """Return a tensor for the parameter and its last bucket's padding."""
        ...

    def free(self) -> None: ...


@dataclass(eq=False)
class PartitionedParam:
    """A parameter of which each rank has a shard.

    The parameter is whole from its gathering to its release. ``holds`` counts the calls of :meth:`LiveParams.acquire`
    and :meth:`LiveParams.hold` that need it whole, and it is released only when ``holds`` is 0.
    """

    number: int
    spec: ParamSpec
    buckets: Sequence[Bucket]
    shards: ShardSource
    """This rank's shards."""
    memory: WholeMemory
    updated: Callable[[], Event] = Done
    """Returns the event at the end of the parameter's last update that was started."""
    holds: int = 0
    gathering: Task[Event] | None = field(default=None, repr=False)
    """The task that starts the gathering. Its result is the event at the end of the gathering. None: the parameter is
    not whole."""

    @property
    def numel(self) -> int:
        return self.spec.numel

    @property
    def n_bytes(self) -> int:
        """The bytes of the whole parameter, padding included."""
        return sum(bucket.padded_numel for bucket in self.buckets) * self.spec.dtype.itemsize


class LiveParams:
    """Gathers and releases the partitioned parameters of one process."""

    def __init__(
        self, config: OffloadConfig, device: GatheringDevice, state_lock: StateLock, health: PipelineHealth
    ) -> None:
        self._config = config
        self._health = health
        self.device = device
        at_once = config.schedule == "serial" or (device.addressable and device.world_size == 1)
        self._tasks = Inline() if at_once else Background()
        self._state_lock = state_lock
        """The lock of the pipeline that updates these parameters."""
        self._order = UseOrder()
        self._tracked: list[UseOrder] = []
        self._params: list[PartitionedParam] = []
        self._whole: dict[PartitionedParam, None] = {}
        self._ahead: dict[PartitionedParam, None] = {}
        """Prefetched parameters that have not been used yet."""
        self.numel = 0
        """The number of elements of all parameters that are whole now."""
        self.peak_numel = 0
        self.n_bytes = 0
        """The bytes of all parameters that are whole now, padding included."""
        self.digest = 0
        """A fingerprint of the gatherings since the last :meth:`release_all`. Ranks that gathered the same parameters
        in the same order have equal fingerprints."""

    def add(
        self, spec: ParamSpec, buckets: Sequence[Bucket], shards: ShardSource, memory: WholeMemory
    ) -> PartitionedParam:
        """Add a parameter, which is not whole yet.

        Args:
            buckets: the parameter's buckets.
            shards: reads this rank's shards of the parameter.
            memory: allocates device memory for the whole parameter.
        """
        param = PartitionedParam(len(self._params), spec, buckets, shards, memory)
        self._params.append(param)
        self._order.sizes.append(spec.numel)
        return param

    @changes("a gathering of parameters")
    def begin_round(self, kind: Hashable) -> None:
        """Release parameters whose ``holds`` is 0, and begin a round: a forward and the backward that follows. The uses
        of the last round of the same ``kind`` predict the uses of this round."""
        self.release_idle()
        self._order.begin(kind)

    @property
    def released(self) -> bool:
        """True if the parameters were released from the device: their shards may have no memory, and nothing can be
        gathered."""
        return bool(self._health.released)

    def check_present(self) -> None:
        """Raise :class:`StateError` if the parameters were released from the device, so that nothing can be
        gathered."""
        if self._health.released:
            raise StateError(self._health.released)

    @changes("a gathering of parameters")
    def acquire(self, params: Sequence[PartitionedParam]) -> None:
        """Make parameters whole, and keep them whole until :meth:`release`.

        If a gathering or an update has failed, raise its error. This call then keeps no parameter whole.

        Raises:
            StateError: the parameters were released from the device.
        """
        self.check_present()
        for param in params:
            param.holds += 1
            self._ahead.pop(param, None)
            self._order.use(param.number)
        try:
            for param in params:
                if param.gathering is None:
                    self._make_room(param.numel)
                    self._gather(param)
            self._prefetch()
            if any(param.shards.reads_ahead for param in params):
                self._read_ahead()
            for param in params:
                self._await(param)
        except BaseException:
            for param in params:
                param.holds -= 1
            self.release_idle()
            self._tasks.recover()
            raise

    @changes("a gathering of parameters")
    def hold(self, params: Sequence[PartitionedParam]) -> None:
        """Keep parameters whole from now on, or from their next :meth:`acquire` on, until :meth:`release`.

        Their gathering begins now if a thread gathers. Otherwise only the reads from disk begin.

        Raises:
            StateError: the parameters were released from the device.
        """
        self.check_present()
        held = 0
        try:
            for param in params:
                param.holds, held = param.holds + 1, held + 1
                self._ahead.pop(param, None)
                if param.gathering is None and self._tasks.is_asynchronous:
                    self._make_room(param.numel)
                    self._gather(param)
                elif param.gathering is None:
                    self._expect(param)
        except BaseException:
            for param in params[:held]:
                param.holds -= 1
            self.release_idle()
            self._tasks.recover()
            raise

    @changes("a gathering of parameters")
    def release(self, params: Sequence[PartitionedParam], *, may_stay: bool = True) -> None:
        """End the use of the parameters of one :meth:`acquire` or :meth:`hold`.

        Args:
            may_stay: True to keep parameters whole whose predicted next use comes soon.
        """
        for param in params:
            param.holds -= 1
            if not param.holds and param in self._whole and not (may_stay and self._stays(param)):
                self._release(param)

    @changes("a gathering of parameters")
    def release_idle(self) -> None:
        """Release all whole parameters whose ``holds`` is 0."""
        for param in [param for param in self._whole if not param.holds]:
            self._release(param)

    @changes("a gathering of parameters")
    def release_all(self) -> int:
        """Release all whole parameters before their values change, even if ``holds`` is not 0. Return the ``digest``,
        and reset it to 0."""
        for param in list(self._whole):
            param.holds = 0
        self.release_idle()
        digest, self.digest = self.digest, 0
        return digest

    @changes("a gathering of parameters")
    def in_order(self, task: Callable[[], None]) -> None:
        """Run a task after all gatherings that were submitted, in their thread, and wait for it. So all ranks do the
        task's exchange and the gatherings in the same order."""
        self._tasks.submit(task).result()

    @changes("a gathering of parameters")
    def forget_order(self) -> None:
        """Forget the uses of past rounds, so that nothing is predicted from them: this rank's past rounds may differ
        from other ranks' past rounds."""
        self._order.forget()

    @changes("a gathering of parameters")
    def begin_untracked(self) -> None:
        """From now on, do not record uses, until :meth:`end_untracked`. Ranks may differ in the number of these uses,
        and all ranks must predict the same order. The used parameters are already whole."""
        self._tracked.append(self._order)
        self._order = UseOrder(self._order.sizes)

    @changes("a gathering of parameters")
    def end_untracked(self) -> None:
        """Record uses again, as before the last :meth:`begin_untracked`."""
        self._order = self._tracked.pop()

    # --- decisions -----------------------------------------------------------------------------------

    def _stays(self, param: PartitionedParam) -> bool:
        distance = self._order.distance(param.number)
        within = distance is not None and distance <= self._config.max_reuse_distance
        return within and self.numel <= self._config.max_live_parameters

    def _make_room(self, numel: int, needed_in: float = -1) -> bool:
        """Release parameters whose ``holds`` is 0, the parameter with the farthest next use first, until ``numel`` more
        elements fit into ``max_live_parameters``.

        Args:
            needed_in: release only parameters whose next use is more than this number of elements away.

        Returns:
            True if ``numel`` more elements fit.
        """
        while self.numel + numel > self._config.max_live_parameters:
            idle = [(self._distance(param), param) for param in self._whole if not param.holds]
            distance, last = max(idle, key=lambda entry: entry[0], default=(-1, None))
            if last is None or distance <= needed_in:
                return False
            self._release(last)
        return True

    def _distance(self, param: PartitionedParam) -> float:
        distance = self._order.distance(param.number)
        return float("inf") if distance is None else distance

    def _prefetch(self) -> None:
        """Begin to gather the parameters that are predicted next, up to ``prefetch_bucket_size`` elements. Release
        prefetched parameters that are no longer predicted."""
        upcoming = [self._params[number] for number in self._order.upcoming(self._config.prefetch_bucket_size)]
        for param in [param for param in self._ahead if param not in upcoming and not self._stays(param)]:
            self._release(param)
        for param in upcoming:
            if param.gathering is None:
                if not self._make_room(param.numel, needed_in=self._distance(param)):
                    return
                self._gather(param)
                self._ahead[param] = None

    def _read_ahead(self) -> None:
        """Begin to read shards from disk to host memory for parameters that are predicted next and not gathered yet, up
        to twice ``prefetch_bucket_size`` elements ahead."""
        for number in self._order.upcoming(2 * self._config.prefetch_bucket_size):
            if self._params[number].gathering is None:
                self._expect(self._params[number])

    # --- actions -------------------------------------------------------------------------------------

    def _gather(self, param: PartitionedParam) -> None:
        self.digest = fingerprint(f"{self.digest} {param.number}")
        self._whole[param] = None
        self.numel += param.numel
        self.peak_numel = max(self.peak_numel, self.numel)
        self.n_bytes += param.n_bytes
        whole = param.memory.allocate()
        updated = param.updated()
        after = AfterAll([updated, self.device.mark()])
        what = f"parameter {param.spec.name!r}: gathering of its shards"
        self._expect(param)

        def gather(bucket: Bucket) -> Event:
            shard, event = param.shards.lend(bucket, updated), None
            try:
                event = self.device.gather(bucket, shard, whole, after, what)
            finally:
                param.shards.give_back(bucket, event)
            return event

        def start() -> Event:
            return AfterAll([gather(bucket) for bucket in param.buckets])

        param.gathering = self._tasks.submit(start)

    def _expect(self, param: PartitionedParam) -> None:
        for bucket in param.buckets:
            param.shards.expect(bucket)

    def _await(self, param: PartitionedParam) -> None:
        assert param.gathering is not None
        with nullcontext() if param.gathering.done() else self.device.trace.span(COMPUTE, "wait"):
            param.gathering.result().order()

    def _release(self, param: PartitionedParam) -> None:
        gathering, param.gathering = param.gathering, None
        if gathering is not None:
            with suppress(Exception):  # acquire() raises it if the parameter is needed
                gathering.result().order()  # the gathering must not write to freed memory
        param.memory.free()
        del self._whole[param]
        self._ahead.pop(param, None)
        self.numel -= param.numel
        self.n_bytes -= param.n_bytes
