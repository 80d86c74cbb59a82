"""One simulated machine, on which the real pipeline trains.

Compute, and the rest of the kernels' time, is slept. The pipeline, its thread, the kernels and the copies' threads are
the real ones.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from offload_core.config.options import OffloadConfig
from offload_core.device.host_ranks import HostRanks
from offload_core.device.trace import COMPUTE
from offload_core.dtypes import BFLOAT16, ElementType
from offload_core.engine import Engine
from offload_core.layout.partition import ParamSpec
from offload_core.native import kernels
from offload_core.rules.adam import AdamHyper
from offload_core.step.decision import StepArguments
from offload_core.testing.fake_device import FakeDevice, FakeTensor

SCHEDULES: dict[str, dict[str, Any]] = {
    "overlap": {},
    "in backward": {"update_in_backward": True},
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 0},
    "serial": {"schedule": "serial"},
}
KERNELS = ("update", "sum_squares", "cast", "reduce")
GB = 1e9


class Case(NamedTuple):
    """The speed of a machine with a model: seconds a step, bytes a second."""

    forward: float
    backward: float
    link: float
    """Bytes a second of the link, each way."""
    host: float


class Times(NamedTuple):
    """Seconds of one bucket."""

    forward: float
    backward: float
    copy: float
    norm: float
    update: float
    advance: float
    """The update without writing the parameter."""
    round: float
    emit: float
    """Writing the parameter, with states that are only read."""

    @classmethod
    def of(cls, case: Case, params: int, buckets: int, clips: bool) -> "Times":
        wide = params / buckets / case.host
        copy = 2 * params / buckets / case.link
        norm = 2 * wide if clips else 0.0
        layer = case.forward / buckets, case.backward / buckets
        return cls(*layer, copy, norm, 28 * wide, 26 * wide, 6 * wide, 16 * wide)


class Sleeper:
    """Sleeps for the right time on average: after it has overslept it sleeps less."""

    def __init__(self) -> None:
        self._overslept = 0.0

    def sleep(self, seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(max(seconds - self._overslept, 0.0))
        self._overslept += time.perf_counter() - start - seconds


@contextmanager
def slow_kernels(bandwidth: float) -> Iterator[None]:
    """Have kernels take the time of the bytes that they read and write, at this bandwidth."""
    host = Sleeper()

    def lasting(kernel: Callable[..., None], bytes_of: Callable[..., int]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            kernel(*args, **kwargs)
            host.sleep(bytes_of(*args, **kwargs) / bandwidth - (time.perf_counter() - start))

        return run

    def of_update(
        segments: np.ndarray,
        scalars: Any,
        *,
        grad_dtype: ElementType,
        param_dtype: ElementType | None,
        keep_states: bool,
        **others: Any,
    ) -> int:
        states = 12 if keep_states else 24
        return numel(segments) * (states + grad_dtype.itemsize + (param_dtype.itemsize if param_dtype else 0))

    def of_reduce(src: np.ndarray, n_sources: int, src_type: Any, dst: np.ndarray, *, add: bool, **others: Any) -> int:
        return src.nbytes + (2 if add else 1) * dst.nbytes

    def numel(spans: np.ndarray) -> int:
        return int(spans["numel"].sum())

    before = {name: getattr(kernels, name) for name in KERNELS}
    kernels.update = lasting(kernels.update, of_update)
    kernels.sum_squares = lasting(
        kernels.sum_squares, lambda spans, dtype, bins, threads: numel(spans) * dtype.itemsize
    )
    kernels.cast = lasting(kernels.cast, lambda spans, src, dst, threads: numel(spans) * (src.itemsize + dst.itemsize))
    kernels.reduce = lasting(kernels.reduce, of_reduce)
    try:
        yield
    finally:
        for name, kernel in before.items():
            setattr(kernels, name, kernel)


class Run:
    """An engine on a simulated machine, one layer a bucket."""

    def __init__(self, case: Case, params: int, buckets: int, scale: int, clips: bool, schedule: str) -> None:
        numel = params // scale // buckets
        self.times = Times.of(case, params, buckets, clips)
        self.layers = range(buckets)
        self.fake = FakeDevice(bandwidth=case.link / scale)
        clip = 1e9 if clips else None  # nothing is
        options = SCHEDULES[schedule]
        config = OffloadConfig(reduce_bucket_size=numel, gradient_clipping=clip, num_threads=1, **options)
        ranks = HostRanks(self.fake, None)
        self.engine = engine = Engine(config, ranks, None)
        self.trace = ranks.trace
        self.gradients_on_host, self.parameters = engine.gradients, engine.parameters
        weights = np.ones(numel, BFLOAT16.numpy)
        self.tensors = [FakeTensor(weights) for _ in self.layers]
        self.gradients = [FakeTensor(weights) for _ in self.layers]
        specs = [ParamSpec(f"layer {i}", numel, BFLOAT16) for i in self.layers]
        self.change = partial(self.engine.state_lock.change, "a benchmark")
        self.change(self.engine.add_parameters, specs, self.tensors)
        self.device, self.hypers = Sleeper(), [AdamHyper(1e-3)]

    def compute(self, what: str, layer: int, seconds: float) -> None:
        with self.trace.span(COMPUTE, f"{what} of layer {layer}"):
            self.device.sleep(seconds)

    def step(self) -> None:
        for layer in self.layers:
            self.parameters.await_param(layer)
            with self.trace.span(COMPUTE, "the device waits"):  # as the caller computes in its place
                self.fake.compute(lambda: None).wait()
            self.compute("forward", layer, self.times.forward)
        self.change(self.engine.expect_step, StepArguments(self.hypers, self.tensors))
        for layer in reversed(self.layers):
            self.compute("backward", layer, self.times.backward)
            self.change(self.gradients_on_host.add, {layer: self.gradients[layer]})
        self.change(self.gradients_on_host.end_micro_step)
        assert self.change(self.engine.step, StepArguments(self.hypers, self.tensors)).updated

    def step_times(self, steps: int) -> list[float]:
        """Seconds of so many steps in a row, each from the boundary before to its own."""
        self.step()
        ends = [time.perf_counter()]
        for _ in range(steps):
            self.step()
            ends.append(time.perf_counter())
        self.change(self.engine.finish)
        return [after - before for before, after in pairwise(ends)]

    def close(self) -> None:
        self.change(self.engine.finish)
        self.fake.close()
