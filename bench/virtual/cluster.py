"""Machines of GPUs on paper, on which the real pipeline trains in a :class:`Clock`'s time.

The order of all work is the pipeline's own: it runs, and so does its thread. Only durations are made up:
bytes over a bandwidth for copies, kernels and what ranks exchange, operations over a rate for forward and backward.
A GPU has a queue of its own work and two of copies, as in ``frontends/torch/ranks/device.py``; between GPUs an exchange
takes its place in the queue of the copy it belongs to, as in ``frontends/torch/ranks/device_ranks.py``. Tensors hold
1/scale of the elements, and bandwidths are divided likewise.

Ranks 0 and 1 run, each with a pipeline; the others are all as rank 1.

Not in it: what Python and launches of kernels take, copies that take from the bandwidth of the host's memory, exchanges
that slow down forward and backward, memory that is not enough, ranks that are slower than others.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.virtual.clock import Clock
from bench.virtual.machine import SCHEDULES, virtual
from offload_core.config.options import OffloadConfig
from offload_core.device.events import Event, traced
from offload_core.device.exchange_sizes import OnDevice
from offload_core.device.host_ranks import HostRanks
from offload_core.device.protocols import Copy, HostArray, HostArrays
from offload_core.device.trace import COMPUTE, TO_DEVICE, TO_HOST, Span
from offload_core.dtypes import BY_NUMPY, FLOAT16, ElementType
from offload_core.layout.partition import Bucket, ParamSpec
from offload_core.memory.host_memory import Lease
from offload_core.rules.adam import AdamHyper
from offload_core.step.decision import StepArguments
from offload_core.step.pipeline import Pipeline

TO_HOST_QUEUE, TO_DEVICE_QUEUE, NETWORK = "to host", "to device", "network"
WAITING = "waiting"
"""A schedule: ``overlap``, but a step ends when all parameters are on the device, as ZeRO-Offload's does."""
FIRST, COUNTED = 2, 2
"""Steps before those that count, until each is like the one before; and those."""
BLOCK = (3, 1, 4, 4)
"""A transformer block's matrices by their size: queries, keys and values; attention's output; the MLP's two."""
BUCKET_NUMEL = 2**14
"""Elements that tensors have left of a bucket, about."""


@dataclass(frozen=True)
class Machines:
    """Alike, and connected. Bytes and operations a second; seconds."""

    gpus: int
    """Of one machine."""
    machines: int
    flops: float
    """That a GPU reaches in forward and backward."""
    link: float
    """Of a GPU to the host, each way."""
    dram: float
    """Of a machine, as the update streams it; its GPUs' ranks share it."""
    peer: float
    """Out of a GPU to others of its machine."""
    network: float
    """Out of a machine to others."""
    links: float = float("inf")
    """Of all GPUs of a machine to the host together."""
    latency: float = 30e-6
    """Of one exchange."""

    @property
    def world_size(self) -> int:
        return self.gpus * self.machines

    @property
    def link_of_each(self) -> float:
        return min(self.link, self.links / self.gpus)

    def scaled(self, scale: float) -> "Machines":
        """With that many times less bandwidth."""
        bandwidths = {name: getattr(self, name) / scale for name in ("link", "dram", "peer", "network", "links")}
        return replace(self, **bandwidths)

    def all_to_all(self, n_bytes: float) -> float:
        """Seconds in which each rank sends each other one its part of so many bytes."""
        n, g = self.world_size, self.gpus
        return self.latency + max(n_bytes * (g - 1) / n / self.peer, g * n_bytes * (n - g) / n / self.network)

    def ring(self, n_bytes: float) -> float:
        """Seconds of an all-gather to, or a reduce-scatter of, so many bytes on each rank."""
        slowest = self.peer if self.machines == 1 else min(self.peer, self.network)
        return self.latency + n_bytes * (self.world_size - 1) / self.world_size / slowest


class Job(NamedTuple):
    """The work of a GPU in a step."""

    parameters: float
    layers: int
    tokens: int
    """Of a micro-batch."""
    micro_steps: int = 1
    checkpointing: bool = True
    """Activations are computed again in backward."""
    clips: bool = True
    reduction: str = "ordered"

    @property
    def operations(self) -> float:
        """As :func:`offload_core.commands.prediction.predict` counts them."""
        return (8 if self.checkpointing else 6) * self.parameters * self.tokens * self.micro_steps


class Result(NamedTuple):
    """Of one step, on rank 0."""

    seconds: float
    busy: Mapping[str, float]
    """Seconds in which each lane of the trace did something; a copy includes the exchange in its queue."""
    tflops: float
    """A GPU."""


class _At:
    """The moment when what a queue was given has been done."""

    def __init__(self, gpu: "Gpu", start: float, end: float) -> None:
        self._gpu = gpu
        self.start = start
        self.end = end
        self.ran = round(1e9 * start), round(1e9 * end)

    def wait(self) -> None:
        self._gpu.clock.sleep(self.end - self._gpu.clock.now)

    def order(self) -> None:
        self._gpu.hold(COMPUTE, self.end)

    def done(self) -> bool:
        return self.end <= self._gpu.clock.now


class Gpu:
    """Memory of which only the sizes matter: every value is zero."""

    addressable = False
    updates_in_place = False
    pinning = None

    def __init__(self, clock: Clock, link: float) -> None:
        self.clock = clock
        self._link = link
        self._free: defaultdict[str, float] = defaultdict(float)
        """When each queue is through with what it was given."""

    def hold(self, queue: str, until: float) -> None:
        self._free[queue] = max(self._free[queue], until)

    def queue(self, queue: str, seconds: float, *after: Event) -> _At:
        """Have a queue do something after all that it was given before, and after these."""
        start = max([self.clock.now, self._free[queue], *(event.end for event in after if isinstance(event, _At))])
        self._free[queue] = start + seconds
        return _At(self, start, start + seconds)

    def free_bytes(self) -> None:
        return None

    def dtype(self, tensor: np.ndarray) -> ElementType:
        return BY_NUMPY[tensor.dtype]

    def numel(self, tensor: np.ndarray) -> int:
        return tensor.size

    def host_array(self, tensor: np.ndarray) -> HostArray:
        raise TypeError("a GPU's tensor is not in host memory")

    def host_arrays(self, tensors: Sequence[Any]) -> HostArrays:
        return HostArrays.columns(map(self.host_array, tensors))

    def to_host(self, copies: Sequence[Copy], host: np.ndarray) -> Event:
        host.fill(0)
        return self.queue(TO_HOST_QUEUE, host.nbytes / self._link, self.mark())

    def to_device(self, host: np.ndarray, copies: Sequence[Copy], after: Event) -> _At:
        return self.queue(TO_DEVICE_QUEUE, host.nbytes / self._link, after)

    def mark(self) -> _At:
        return self.queue(COMPUTE, 0.0)

    def synchronize(self) -> None:
        self.clock.sleep(max(self._free.values()) - self.clock.now)


class SimulatedGroup:
    """Where ranks 0 and 1 meet; the others are as rank 1."""

    def __init__(
        self, clock: Clock, world_size: int, exchange: Callable[[int], float], gather: Callable[[int], float]
    ) -> None:
        self.clock = clock
        self.world_size = world_size
        self.exchange = exchange
        self.gather = gather
        self._came: tuple[np.ndarray, Future[list[np.ndarray]]] | None = None

    def meet(self, rank: int, mine: np.ndarray) -> list[np.ndarray]:
        """The contribution of each rank."""
        if self._came is None:
            self._came = mine.copy(), self.clock.future()
            return self._came[1].result()
        (theirs, future), self._came = self._came, None
        two = [mine.copy(), theirs] if rank == 0 else [theirs, mine.copy()]
        future.set_result([two[0]] + (self.world_size - 1) * [two[1]])
        return future.result()


class SimulatedRank:
    """Rank 0 or 1 as ``HostCollectives``: what is said is what real ranks would say."""

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self.rank = rank
        self.world_size = group.world_size
        self.sent_bytes = 0
        self._group = group

    def exchange(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        parts = [each.reshape(self.world_size, -1)[self.rank] for each in self._group.meet(self.rank, send)]
        received.reshape(self.world_size, -1)[:] = parts
        self._take(self._group.exchange(send.nbytes))

    def reduce_scatter(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        received[:] = sum(each.reshape(self.world_size, -1)[self.rank] for each in self._group.meet(self.rank, send))
        self._take(self._group.gather(send.nbytes))

    def gather(self, send: np.ndarray, received: np.ndarray, what: str) -> None:
        received.reshape(self.world_size, -1)[:] = self._group.meet(self.rank, send)
        self._take(self._group.gather(received.nbytes))

    def sum_integers(self, array: np.ndarray, what: str) -> None:
        each = self._group.meet(self.rank, array)
        if what == "layout":
            # Each rank fills a row of its own; the ranks that do not run fill theirs as rank 1 does.
            rows = array.reshape(self.world_size, -1)
            rows[0], rows[1:] = (part.reshape(rows.shape)[row] for row, part in enumerate(each[:2]))
        else:
            array[:] = np.sum(each, axis=0)
        self._take(self._group.gather(array.nbytes))

    def broadcast(self, array: np.ndarray, what: str, source: int = 0) -> None:
        array[:] = self._group.meet(self.rank, array)[source]
        self._take(self._group.gather(array.nbytes))

    def _take(self, seconds: float) -> None:
        self._group.clock.sleep(seconds)


class GpuRanks(HostRanks):
    """Ranks whose GPUs exchange buckets between them."""

    def __init__(self, gpu: Gpu, collectives: SimulatedRank, machines: Machines, *, native: bool) -> None:
        super().__init__(gpu, collectives, native=native, sizes=OnDevice(collectives.world_size, native))
        self._gpu = gpu
        self._machines = machines

    def reduce(
        self, bucket: Bucket, wire: ElementType, gradients: Mapping[int, Any], out: np.ndarray, staging: Lease
    ) -> Event:
        exchange = self._machines.ring if self.native else self._machines.all_to_all

        def start() -> Event:
            turn = self._gpu.queue(TO_HOST_QUEUE, 0.0, self._gpu.mark())
            exchanged = self._gpu.queue(NETWORK, exchange(bucket.padded_numel * wire.itemsize), turn)
            self._gpu.hold(TO_HOST_QUEUE, exchanged.end)
            return self._gpu.to_host([], out)

        return traced(self.trace, TO_HOST, bucket.index, out.nbytes, start)

    def publish(
        self,
        bucket: Bucket,
        shards: np.ndarray,
        tensors: Sequence[Any],
        present: set[int],
        staging: Lease,
        after: Event,
    ) -> Event:
        def start() -> Event:
            copied = self._gpu.to_device(shards, [], after)
            gathered = self._gpu.queue(
                NETWORK, self._machines.ring(bucket.padded_numel * bucket.dtype.itemsize), copied
            )
            self._gpu.hold(TO_DEVICE_QUEUE, gathered.end)
            return _At(self._gpu, copied.start, gathered.end)

        return traced(self.trace, TO_DEVICE, bucket.index, shards.nbytes, start)


class Training:
    """One rank's."""

    def __init__(self, gpu: Gpu, device: HostRanks, machines: Machines, job: Job, schedule: str, scale: float) -> None:
        self._gpu = gpu
        self._waits = schedule == WAITING
        config = OffloadConfig(
            reduce_bucket_size=round(OffloadConfig().reduce_bucket_size / scale),
            gradient_accumulation_steps=job.micro_steps,
            gradient_clipping=1.0 if job.clips else None,
            reduction=job.reduction,
            num_threads=1,
            **SCHEDULES.get(schedule, {}),
        )
        of_layer = job.parameters / job.layers / scale
        numels = [round(of_layer * share / sum(BLOCK)) for _ in range(job.layers) for share in BLOCK]
        self._micro_steps = job.micro_steps
        each = job.operations / job.micro_steps / machines.flops / sum(numels)
        forward = 2 / (8 if job.checkpointing else 6)
        self._forward = [forward * each * numel for numel in numels]
        self._backward = [(1 - forward) * each * numel for numel in numels]
        self.pipeline = Pipeline(config, device, None)
        zero = np.zeros((), FLOAT16.numpy)
        self._tensors = [np.broadcast_to(zero, numel) for numel in numels]
        self._hypers = [AdamHyper(1e-3)]
        specs = [ParamSpec(f"matrix {i}", numel, FLOAT16) for i, numel in enumerate(numels)]
        self.pipeline.add_parameters(specs, self._tensors)

    def step(self) -> None:
        for micro_step in range(self._micro_steps):
            for matrix, seconds in enumerate(self._forward):
                self.pipeline.await_param(matrix)
                self._compute("forward", matrix, seconds)
            if micro_step == self._micro_steps - 1:
                self.pipeline.early.expect_step(StepArguments(self._hypers, self._tensors))
            for matrix, seconds in reversed(list(enumerate(self._backward))):
                self._compute("backward", matrix, seconds)
                self.pipeline.add_gradients({matrix: self._tensors[matrix]})
            self.pipeline.end_micro_step()
        assert self.pipeline.step(StepArguments(self._hypers, self._tensors)).updated
        if self._waits:
            self.pipeline.last_step.finish()

    def _compute(self, what: str, matrix: int, seconds: float) -> None:
        ran = self._gpu.queue(COMPUTE, seconds).ran
        if self.pipeline.device.trace.on:
            self.pipeline.device.trace.note(Span(COMPUTE, f"{what} of matrix {matrix}", None, None, *ran))


def on_ranks(clock: Clock, world_size: int, body: Callable[[int], Any]) -> list[Any]:
    """The results of the body on each rank that runs."""
    ranks = range(min(world_size, 2))
    running = [clock.thread(f"rank {rank}").submit(partial(body, rank)) for rank in ranks]
    return [rank.result() for rank in running]


def simulate(machines: Machines, job: Job, schedule: str, trace: Path | None = None) -> Result:
    """A step among others like it.

    Args:
        schedule: one of ``SCHEDULES``, or ``WAITING``.
        trace: also write what rank 0 did in the steps that count, as ``Trace.to_file`` does.
    """
    numel = max(BUCKET_NUMEL, 16 * machines.world_size)
    scale = OffloadConfig().reduce_bucket_size / numel
    small = machines.scaled(scale)
    with virtual(small.dram / machines.gpus) as clock, tempfile.TemporaryDirectory() as folder:
        group = SimulatedGroup(clock, machines.world_size, small.all_to_all, lambda n_bytes: small.latency)

        def rank(number: int) -> tuple[float, list[dict[str, Any]]]:
            gpu = Gpu(clock, small.link_of_each)
            collectives = SimulatedRank(group, number)
            alone = HostRanks(gpu)
            native = job.reduction == "native"
            device = alone if machines.world_size == 1 else GpuRanks(gpu, collectives, small, native=native)
            training = Training(gpu, device, machines, job, schedule, scale)
            for _ in range(FIRST):
                training.step()
            path = (trace or Path(folder) / "trace.json") if number == 0 else Path(folder) / "others.json"
            begin = gpu.mark().end
            with training.pipeline.device.trace.to_file(path):
                for _ in range(COUNTED):
                    training.step()
                end = gpu.mark().end
            training.pipeline.last_step.finish()
            written = path if machines.world_size == 1 else path.with_name(f"{path.stem}.rank{number}{path.suffix}")
            return (end - begin) / COUNTED, json.loads(written.read_text())["traceEvents"]

        [(seconds, events), *_] = on_ranks(clock, machines.world_size, rank)
    busy: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X" and not event["name"].endswith("wait"):
            busy[event["cat"]] += event["dur"] / 1e6 / COUNTED
    return Result(seconds, busy, job.operations / seconds / 1e12)
