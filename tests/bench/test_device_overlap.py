"""Through torch tensors, a step takes little more than what takes longest in it: compute, the update, or the link.

On the simulated device, in turn and with its clock: streams, the host and the host's kernels take time of their own, so
that a step's time is the same in every run, to the last digit.
"""

from unittest import mock

import pytest
import torch
from torch import nn

import offload_core.support.worker
from bench.parts import overlap_run
from bench.parts.overlap import CASES, model
from bench.parts.overlap_run import Times, slow_kernels
from frontends.torch import wrap
from tests.support import simulated
from tests.support.one_thread import Threads

pytestmark = pytest.mark.skipif((missing := simulated.why_not()) is not None, reason=missing or "")
D = simulated.NAME
LAYERS, WIDTH = 16, 32
PARAMS = 2**30
SCALE = PARAMS // (LAYERS * WIDTH * WIDTH)


class HostClock:
    """Stands in for the module ``time``, for the host's kernels."""

    perf_counter = staticmethod(simulated.now)

    @staticmethod
    def sleep(seconds):
        simulated.set_now(simulated.now() + seconds)


class ThreadsInTime(Threads):
    """Each with a time of its own: a task begins when it was asked for and its thread is free."""

    def __call__(self, name):
        return ThreadInTime(super().__call__(name))


class ThreadInTime:
    def __init__(self, thread):
        self._thread = thread
        self._now = 0.0

    def submit(self, task):
        asked = simulated.now()

        def run():
            caller = simulated.now()
            simulated.set_now(max(self._now, asked))
            try:
                return task()
            finally:
                self._now = ended.time = simulated.now()
                simulated.set_now(caller)

        ended = Ended(self._thread.submit(run))
        return ended


class Ended:
    """The end of a task; who waits for it has its time."""

    def __init__(self, future):
        self._future = future
        self.time = 0.0

    def result(self):
        try:
            return self._future.result()
        finally:
            simulated.set_now(max(simulated.now(), self.time))

    def exception(self):
        error = self._future.exception()
        simulated.set_now(max(simulated.now(), self.time))
        return error

    def done(self):
        self._future.exception()
        return self.time <= simulated.now()


class Busy(torch.autograd.Function):
    """The computing stream is busy for a layer's forward, and for its backward."""

    @staticmethod
    def forward(ctx, x, times):
        ctx.times = times
        simulated.keep_busy(torch.accelerator.current_stream(), times.forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        simulated.keep_busy(torch.accelerator.current_stream(), ctx.times.backward)
        return gradient, None


class Layer(nn.Linear):
    def __init__(self, times):
        super().__init__(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.times = times

    def forward(self, x):
        return Busy.apply(super().forward(x), self.times)


def step_time(case, **fields):
    """Seconds of a step among others like it."""
    times = Times.of(case, PARAMS, LAYERS, clips=False)
    with (
        mock.patch.object(overlap_run, "time", HostClock),
        mock.patch.object(offload_core.support.worker, "TaskThread", ThreadsInTime()),
        simulated.in_turn(link=case.link / SCALE),
        slow_kernels(case.host / SCALE),
    ):
        model = nn.Sequential(*(Layer(times) for _ in range(LAYERS))).to(D)
        engine = wrap(model, lr=1e-3, reduce_bucket_size=WIDTH * WIDTH, num_threads=1, **fields)
        x, ends = torch.ones(1, WIDTH, dtype=torch.bfloat16, device=D), []
        for _ in range(6):
            engine.backward(engine(x).float().sum())
            engine.step()
            ends.append(torch.accelerator.current_stream().record_event(torch.Event(D, enable_timing=True)))
        engine.close()
        torch.accelerator.synchronize()
        return ends[-2].elapsed_time(ends[-1]) / 1e3


STAGE_3 = {"stage": 3, "param_persistence_threshold": 0, "offload_param": "cpu"}
SCHEDULES = {
    "overlap": {},
    "in backward": {"update_in_backward": True},
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 0},
}
RUNS = [(schedule, stage) for schedule in SCHEDULES for stage in (2, 3) if (schedule, stage) != ("in backward", 3)]
HIDES_ALL = {("compute", "overlap"), ("compute", "in backward"), ("compute", "delayed")}
"""Cases, by what dominates and the schedule, that reach the limit. ``bench.parts.overlap`` says why others do not."""


@pytest.mark.draws(3)
@pytest.mark.parametrize(("schedule", "stage"), RUNS)
@pytest.mark.parametrize(
    "what", ["compute", *(pytest.param(name, marks=pytest.mark.slow) for name in ("link", "update"))]
)
def test_a_step_takes_what_its_schedule_cannot_hide(what, schedule, stage, accelerator):
    """In stage 3, where parameters are not sent in backward, they come from the host once a step."""
    times = Times.of(CASES[what], PARAMS, LAYERS, clips=False)
    took, expected = (
        step_time(CASES[what], **SCHEDULES[schedule], **(STAGE_3 if stage == 3 else {})),
        model(LAYERS, times),
    )
    ratio, limit = took / expected[schedule], took / expected["limit"]
    said = (
        f"{what} dominates, {schedule}, stage {stage}: {took:.4f} s, {limit:.3f} of the limit, {ratio:.3f} of the model"
    )
    print(said)
    assert took >= LAYERS * (times.forward + times.backward) * (1 - 1e-9), said
    assert ratio <= 1.08, said
    if (what, schedule) in HIDES_ALL:
        assert limit <= 1.08, said
