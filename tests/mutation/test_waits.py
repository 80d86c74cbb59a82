"""Every wait of the core is needed: where any one of them is taken out, a scenario here fails.

All threads are played by one, and everything is done as late as can be (``one_thread.py``), so a missing wait shows in
every run: what it should have waited for has not even begun.
"""

import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from offload_core.config.options import OffloadConfig
from offload_core.device.events import Done, Waiting
from offload_core.device.protocols import Copy
from offload_core.device.trace import TO_DEVICE, TO_HOST, UPDATE
from offload_core.dtypes import BFLOAT16
from offload_core.errors import CollectiveError, ParameterError, StateError
from offload_core.layout.partition import ParamSpec
from offload_core.memory.working_memory import blocks_of
from offload_core.plans.terms import GRADIENT_SLOTS
from offload_core.rules.adam import AdamHyper
from offload_core.rules.muon import MuonHyper
from offload_core.states.slots import CONTENT
from offload_core.step.bucket_states import GRADIENT, OWNER, PUBLICATION, Gradient, Publication
from offload_core.step.decision import StepArguments
from offload_core.step.gradient_access import GradientAccess
from offload_core.step.health import HEALTH
from offload_core.step.local_bucket import BucketPublication
from offload_core.step.state_access import StateAccess
from offload_core.support.state_machine import StateMachine
from offload_core.testing.fake_device import FakeDevice, FakeTensor
from offload_core.testing.thread_ranks import run_ranks
from tests.support import late_stores, live_models, rings, shards_on_disk
from tests.support.one_thread import Threads
from tests.support.oracles import assert_same_bits
from tests.support.pipelines import STATES, Delayed, Naive, Subject, held_states
from tests.support.scripted_disk import scripted
from tests.support.wait_mutants import DROPPED, PACKAGES, Change, Search, by_name, modules_of, unmarked, waits_of

DELAYED = {"schedule": "delayed", "delay_warmup_steps": 1}

# --- scenarios -------------------------------------------------------------------------------------


class Twin:
    """A pipeline on a late device, and the naive loop, which are given the same."""

    def __init__(self, sizes=(40, 100), *, fail_at=(), rank=None, hyper=None, **fields):
        self.rng = np.random.default_rng(0)
        masters = [np.random.default_rng(n).standard_normal(n).astype(np.float32) for n in sizes]
        self.device = FakeDevice(fail_at=frozenset(fail_at))
        defaults = {"schedule": "overlap", "reduce_bucket_size": 32, "op_order": "torch", "num_threads": 1}
        config = OffloadConfig(**{**defaults, **fields})
        self.hypers = [hyper or AdamHyper(1e-2)]
        dtypes, groups = [BFLOAT16] * len(sizes), [0] * len(sizes)
        naive = Delayed if config.schedule == "delayed" else Naive
        self.naive = naive(masters, dtypes, groups, config, self.hypers)
        self.subject = Subject(self.device, masters, dtypes, groups, config, collectives=rank, hypers=self.hypers)
        self.pipeline = self.subject.pipeline
        self.most_buffers = 0
        """The most buckets that had memory for gradients at a time, in steps in backward."""

    @property
    def tensors(self):
        return self.subject.tensors

    def add(self, *params):
        """Gradients, which the device makes when it gets round to it."""
        for i in params:
            self.naive.add_gradient(i, self.give(i, self.draw(i)))

    def draw(self, i):
        return (self.rng.standard_normal(self.tensors[i].memory.size) * 0.1).astype(BFLOAT16.numpy)

    def give(self, i, values):
        gradient = FakeTensor(np.full_like(values, np.nan))
        self.device.compute(lambda: np.copyto(gradient.memory, values))
        self.pipeline.gradients.add({i: gradient})
        return values

    def expect_update(self):
        self.pipeline.early.expect_step(StepArguments(self.hypers, self.tensors))

    def update(self):
        self.pipeline.step(StepArguments(self.hypers, self.tensors))

    def step(self, *params):
        """An update by these gradients; the pipeline's may still be on its way."""
        self.expect_update()
        self.add(*params)
        with self.backward_reads(*range(len(self.tensors))):
            self.update()
        self.naive.step(1.0)

    def early_step(self, *params, host_is_late=False):
        """Likewise, where each bucket that is full may be emitted, and is where the host has the time."""
        self.read(*params)
        self.expect_update()
        for i in params:
            with self.backward_reads(i):
                self.add(i)
                buffers = sum(bucket.gradient.buffer is not None for bucket in self.pipeline.buckets.all)
                self.most_buffers = max(self.most_buffers, buffers)
                if not host_is_late:
                    self.go_on()
        self.update()
        self.naive.step(1.0)

    @contextmanager
    def backward_reads(self, *params):
        """Launch reads of these parameters, which may run late. Check that they see the values before the update."""
        before, seen = {i: self.tensors[i].memory.copy() for i in params}, {i: [] for i in params}
        for i in params:
            self.device.compute(lambda i=i: seen[i].append(self.tensors[i].memory.copy()))
        yield
        self.device.compute(lambda: None).wait()
        for i in params:
            assert_same_bits(f"parameter {i} before the update", seen[i][0], before[i])

    def go_on(self):
        """The host has done all that it was asked for."""
        self.pipeline.buckets.worker.submit(lambda: None).exception()

    def flush(self):
        self.pipeline.parameters.flush(self.tensors)
        self.naive.seen = [state[0].copy() for state in self.naive.states]

    def read(self, *params):
        """A layer reads its parameters as the last update leaves them."""
        for i in params:
            got = []
            self.pipeline.parameters.await_param(i)
            self.device.compute(lambda i=i, got=got: got.append(self.tensors[i].memory.copy())).wait()
            assert_same_bits(f"parameter {i}", got[0], self.naive.params()[i])

    def states_of_buckets(self):
        return {bucket.gradient.state for bucket in self.pipeline.buckets.all}

    def sends_early(self):
        return Publication.EARLY in {bucket.publication.state for bucket in self.pipeline.buckets.all}

    def check(self, *params):
        """The pipeline has finished what it was asked for, whether or not somebody waits."""
        for i in params or range(len(self.tensors)):
            assert_same_bits(f"parameter {i}", self.tensors[i].memory, self.naive.params()[i])
            self.check_states(i, held_states(self.pipeline, i))
            assert self.pipeline.counts.steps[i] == self.naive.steps[i]

    def check_states(self, i, states):
        for name, expected in zip(self.naive.rules[i].state_names, self.naive.states[i], strict=True):
            assert_same_bits(f"{name} of parameter {i}", states[name], expected)

    def end(self):
        """The pipeline finishes, and is then as it should be and at rest."""
        self.subject.engine.finish()
        self.check()
        self.check_at_rest()

    def end_flushed(self):
        self.flush()
        self.check()
        self.check_at_rest()

    def follow_states(self):
        """The naive loop goes on from the pipeline's states, without gradients."""
        found = [StateAccess(self.pipeline).states(i)[0][1] for i in (0, 1)]
        self.naive.states = [[states[name].copy() for name in STATES] for states in found]
        self.naive.steps = [int(n) for n in self.pipeline.counts.steps]
        self.naive.sums = [None, None]

    def update_by_what_was_added(self):
        self.update()
        self.naive.step(1.0)

    def check_at_rest(self):
        """No bucket is on its way, and all staging is back."""
        buckets = self.pipeline.buckets
        assert self.states_of_buckets() <= {Gradient.ABSENT}
        sent = [(bucket.publication.written, bucket.publication.arrived) for bucket in buckets.all]
        tasks = sent + [(bucket.task, bucket.updated, bucket.owed) for bucket in buckets.all]
        assert not any(task for each in tasks for task in each)
        if buckets.staging is not None:
            assert len(buckets.staging._free) == buckets.terms.staging_slots
        assert not buckets.in_staging


def steps_and_finish():
    twin = Twin()
    for params in ([1, 0], [0], [1], [0, 1]):
        twin.step(*params)
        twin.end()


def steps_without_a_pause():
    twin = Twin(gradient_clipping=0.5)
    for params in ([1, 0], [0, 1], [1], [0, 1]):
        twin.step(*params)
    twin.end()


def micro_steps():
    """More arrive than were announced, too, and parameters are missing here and there."""
    for announced in (1, 2):
        twin = Twin(gradient_accumulation_steps=announced, gradient_clipping=0.5)
        for first, second in (([1, 0], [0, 1]), ([1], [0]), ([0, 1], [0]), ([0], [1, 0])):
            twin.add(*first)
            twin.pipeline.gradients.end_micro_step()
            twin.step(*second)
        twin.end()


def serial():
    twin = Twin(schedule="serial")
    for _ in range(2):
        twin.step(1, 0)
        twin.check()
        assert twin.pipeline.updates.finished


def reads(read: Callable[[Twin], None]):
    def scenario():
        twin = Twin()
        twin.step(1, 0)
        twin.pipeline.last_step.finish()
        twin.step(0, 1)
        read(twin)

    scenario.__name__ = read.__name__
    return scenario


@reads
def a_layer_reads_its_parameters(twin):
    twin.read(0, 1)


@reads
def a_reader_on_any_stream_reads_its_parameters(twin):
    for i in (0, 1):
        twin.pipeline.parameters.await_param(i, on_host=True)
        assert_same_bits(f"parameter {i}", twin.tensors[i].memory, twin.naive.params()[i])


@reads
def all_parameters_are_read(twin):
    twin.pipeline.parameters.finish()
    for i in (0, 1):
        assert_same_bits(f"parameter {i}", twin.tensors[i].memory, twin.naive.params()[i])


@reads
def states_are_read(twin):
    [(start, states)] = StateAccess(twin.pipeline).states(1)
    assert start == 0
    twin.check_states(1, states)


@reads
def local_states_are_read(twin):
    twin.check_states(1, StateAccess(twin.pipeline).local_states(1))


@reads
def a_master_is_loaded(twin):
    StateAccess(twin.pipeline).reload_master(0, FakeTensor(np.full(40, 7, BFLOAT16.numpy)))
    twin.naive.states[0][0][:] = 7
    twin.pipeline.last_step.finish()
    twin.check_states(0, StateAccess(twin.pipeline).local_states(0))
    twin.check(1)


@reads
def a_change_is_adopted(twin):
    changed = FakeTensor(twin.naive.params()[0])
    changed.memory[5] = 7
    StateAccess(twin.pipeline).adopt(0, changed)
    twin.naive.states[0][0][5] = 7
    twin.pipeline.last_step.finish()
    twin.check_states(0, StateAccess(twin.pipeline).local_states(0))
    twin.check(1)


@reads
def states_are_replaced(twin):
    new = {name: np.full(40, 7, np.float32) for name in STATES}
    StateAccess(twin.pipeline).set_states(0, new)
    twin.naive.states[0] = [array.copy() for array in new.values()]
    twin.pipeline.last_step.finish()
    twin.check_states(0, StateAccess(twin.pipeline).local_states(0))
    twin.check(1)


@reads
def all_states_are_replaced(twin):
    with twin.pipeline.replacing_states():
        for param in range(2):
            for run in StateAccess(twin.pipeline)._runs(param, twin.tensors[param]):
                for array in run.arrays.values():
                    array.write(np.full(array.size, 7, np.float32))
            twin.naive.states[param] = [np.full_like(state, 7) for state in twin.naive.states[param]]
    StateAccess(twin.pipeline).publish_later([0, 1])
    twin.flush()
    for param in range(2):
        twin.check_states(param, StateAccess(twin.pipeline).local_states(param))
        twin.check(param)


@reads
def runs_are_read(twin):
    for run in StateAccess(twin.pipeline).runs(1, twin.tensors[1]):
        for name, state in zip(STATES, twin.naive.states[1], strict=True):
            assert_same_bits(name, run.arrays[name].values(), state[run.start : run.start + run.numel])


@reads
def parameters_are_added(twin):
    new = np.linspace(-1, 1, 300, dtype=np.float32)
    twin.tensors.append(FakeTensor(new.astype(BFLOAT16.numpy)))
    twin.pipeline.add_parameters([ParamSpec("new", 300, BFLOAT16)], [FakeTensor(new)])
    twin.naive.states.append([new.copy(), np.zeros_like(new), np.zeros_like(new)])
    twin.naive.dtypes, twin.naive.groups = [BFLOAT16] * 3, [0] * 3
    twin.naive.sums.append(None)
    twin.naive.steps.append(0)
    twin.check()
    twin.step(2, 1, 0)
    twin.end()


def gradients_are_dropped():
    for dropped in ([0], [1], None):
        twin = Twin()
        twin.add(1, 0)
        twin.pipeline.gradients.drop(dropped)
        for i in dropped or (0, 1):
            twin.naive.sums[i] = None
        twin.step(*(dropped or [0]))
        twin.end()


def an_end_that_writes_what_is_held_back():
    twin = Twin(schedule="delayed")
    for params in ([1, 0], [0, 1], [1]):
        twin.step(*params)
    twin.subject.engine.conclude(twin.flush)
    twin.check()
    twin.check_at_rest()


def delayed_updates():
    """The update has the whole next step to hide behind; parameters are a step late until they are flushed."""
    for options in ({}, {"gradient_clipping": 0.5}, {"gradient_accumulation_steps": 2}):
        twin = Twin(**DELAYED, **options)
        twin.step(1, 0)
        for params in ([0, 1], [1], [0], [1, 0]):
            if options == {"gradient_accumulation_steps": 2}:
                twin.add(*reversed(params))
                twin.pipeline.gradients.end_micro_step()
            twin.step(*params)
            assert twin.states_of_buckets() <= {Gradient.USED, Gradient.ABSENT}
            assert Gradient.USED in twin.states_of_buckets(), "the update does not wait for the next step"
        twin.read(0, 1)
        twin.end()
        twin.step(0, 1)
        twin.end_flushed()
        twin.step(1, 0)
        twin.end()


def delayed_states_are_read():
    for read in (
        lambda twin: StateAccess(twin.pipeline).states(1)[0][1],
        lambda twin: StateAccess(twin.pipeline).local_states(1),
    ):
        twin = Twin(**DELAYED)
        twin.step(1, 0)
        twin.step(0, 1)
        twin.check_states(1, read(twin))


def gradients_are_dropped_while_a_delayed_update_is_on_its_way():
    for dropped in ([0], [1], None):
        twin = Twin(**DELAYED)
        twin.step(1, 0)
        twin.step(0, 1)
        twin.pipeline.gradients.drop(dropped)  # those have been used
        twin.add(1, 0)
        twin.pipeline.gradients.drop(dropped)
        for i in dropped or (0, 1):
            twin.naive.sums[i] = None
        twin.step(*(dropped or [0]))
        twin.end_flushed()


def a_parameter_that_is_flushed_and_does_not_arrive():
    """Is an error of the flush; the next update brings it."""
    for number in (0, 1, 4):
        twin = Twin(**DELAYED)
        twin.step(1, 0)
        twin.step(0, 1)
        twin.device.fail_after(number)
        with pytest.raises(OSError, match="failed as asked"):
            twin.pipeline.parameters.flush(twin.tensors)
        twin.device.fail_after(None)
        twin.check_at_rest()
        twin.naive.seen = [state[0].copy() for state in twin.naive.states]
        for i in (0, 1):
            twin.check_states(i, StateAccess(twin.pipeline).local_states(i))
        for _ in range(2):
            twin.add(1, 0)
            twin.update_by_what_was_added()
        twin.end_flushed()


def updates_in_backward():
    """Parameters are sent as gradients arrive, and states updated; after clipping they are sent again."""
    for options in ({}, {"gradient_accumulation_steps": 2}, *TENTATIVE):
        for host_is_late in (False, True):
            twin = Twin(update_in_backward=True, **options)
            for params in ([1, 0], [0], [1], [0, 1]):
                if "gradient_accumulation_steps" in options:
                    twin.add(*reversed(params))
                    twin.pipeline.gradients.end_micro_step()
                twin.early_step(*params, host_is_late=host_is_late)
            twin.read(0, 1)
            twin.end()


def gradients_pass_through_few_slots():
    """A slot is another bucket's when the update has read it, and not before; none takes memory of its own."""
    for host_is_late in (False, True):
        twin = Twin((40, 100, 64, 50), update_in_backward=True)
        for params in ([3, 2, 1, 0], [0, 2], [1], [0, 1, 2, 3]):
            twin.early_step(*params, host_is_late=host_is_late)
            assert {bucket.gradient.private is None for bucket in twin.pipeline.buckets.all} == {True}
            assert twin.most_buffers <= GRADIENT_SLOTS
        twin.read(0, 1, 2, 3)
        twin.end()


def memory_that_is_given_back_while_copies_run():
    """The end of buckets waits for the device's copies, whatever became of the step that asked for them."""
    twin = Twin()
    host = np.ones(8, BFLOAT16.numpy)
    copied = twin.device.to_device(host, [Copy(twin.tensors[0], 0, 8, 0)], Done())
    twin.pipeline.buckets.close()
    assert copied.done()


TENTATIVE = ({"gradient_clipping": 1e3}, {"gradient_clipping": 0.9}, {"skip_nonfinite": True})  # 0.9: some steps


def emit_all(twin):
    twin.expect_update()
    for i in (1, 0):
        twin.add(i)
        twin.go_on()


def what_was_emitted_is_taken_back():
    """Whoever reads it before the step, or discards gradients, finds the parameters of the last."""

    def discard(twin):
        twin.pipeline.gradients.discard_all()

    def adopt(twin):
        changed = FakeTensor(twin.naive.params()[0])
        changed.memory[5] = twin.naive.states[0][0][5] = 7
        StateAccess(twin.pipeline).adopt(0, changed)

    def replace(twin):
        StateAccess(twin.pipeline).set_states(0, {"exp_avg": np.full(40, 7, np.float32)})
        twin.naive.states[0][1][:] = 7

    def reload(twin):
        StateAccess(twin.pipeline).reload_master(0, FakeTensor(np.full(40, 7, BFLOAT16.numpy)))
        twin.naive.states[0][0][:] = 7

    def other_learning_rate(twin):
        twin.hypers[0] = AdamHyper(5e-3)

    for act in (
        lambda twin: twin.read(1),
        lambda twin: twin.flush(),
        discard,
        adopt,
        replace,
        reload,
        other_learning_rate,
    ):
        for host_is_late in (False, True):
            twin = Twin(update_in_backward=True, gradient_clipping=1e3)
            twin.early_step(1, 0)
            if host_is_late:
                twin.expect_update()
                twin.add(1, 0)
            else:
                emit_all(twin)
                assert twin.sends_early()
            sums, twin.naive.sums = twin.naive.sums, [None, None]
            act(twin)
            twin.device.compute(lambda: None).wait()
            if act not in (adopt, replace, reload, other_learning_rate):
                twin.check()
            if act is discard:
                twin.early_step(0, 1)
            else:
                twin.naive.sums = sums
                twin.update_by_what_was_added()
            twin.end()


def a_step_that_is_announced_twice():
    """Counts as it was last."""
    twin = Twin(update_in_backward=True, gradient_clipping=1e3, gradient_accumulation_steps=2)
    twin.add(1, 0)
    twin.pipeline.gradients.end_micro_step()
    twin.expect_update()
    twin.add(1)
    twin.go_on()
    assert twin.sends_early()
    twin.hypers[0] = AdamHyper(5e-3)
    twin.expect_update()
    twin.add(0)
    twin.update_by_what_was_added()
    twin.end()


def what_was_emitted_is_joined():
    """By a second gradient; the first is sent no longer."""
    for host_is_late in (False, True):
        twin = Twin(update_in_backward=True, gradient_clipping=1e3)
        if host_is_late:
            twin.expect_update()
            twin.add(1, 0)
        else:
            emit_all(twin)
        twin.add(0, 1)
        twin.update_by_what_was_added()
        twin.end()


def gradients_are_read_and_written():
    """Before the step. Parameters that were emitted are recalled, and the update is by what was written."""
    for options in ({}, {"update_in_backward": True, "gradient_clipping": 1e3}):
        for host_is_late in (False, True):
            twin = Twin(**options)
            access = GradientAccess(twin.pipeline)
            for n in range(2):
                if host_is_late:
                    twin.expect_update()
                    twin.add(1, 0)
                else:
                    emit_all(twin)
                    assert twin.sends_early() == bool(options)
                if n:
                    for i in (0, 1):
                        assert_same_bits(f"gradient {i}", access.whole(i), twin.naive.sums[i])
                twin.naive.sums[0] = np.arange(40, dtype=np.float32)
                access.load(0, twin.naive.sums[0])
                twin.update_by_what_was_added()
                twin.end()


def a_parameter_that_is_emitted_and_does_not_arrive():
    """Is an error of the backward or of the step; nothing has changed."""
    loads, buckets = count_of_loads(), len(Twin().pipeline.buckets.all)
    for number in (0, 1, 2 * buckets - 1):
        twin = Twin(update_in_backward=True, gradient_clipping=1e3, fail_at=[loads + number])
        with pytest.raises(OSError, match="failed as asked"):
            emit_and_finish(twin)
        twin.pipeline.gradients.discard_all()
        twin.follow_states()
        twin.check()
        twin.check_at_rest()
        twin.early_step(1, 0)
        twin.end()


def emit_and_finish(twin):
    emit_all(twin)
    twin.update()
    twin.pipeline.last_step.finish()


def add_and_update(twin, meet):
    for i in (0, 1) if meet == "add" else (1, 0):  # a bucket is still filling when the first of 1's are launched
        twin.add(i)
        twin.go_on()
    if meet == "end":
        twin.pipeline.gradients.end_micro_step()
    twin.update()


def a_gradient_that_is_lost_while_others_update():
    """Is an error in mid-update, wherever it is met; the next update goes on from there."""
    loads = count_of_loads()
    buckets = len(Twin().pipeline.buckets.all)
    for number in (0, 1, buckets - 1):
        for meet, announced in (("step", 1), ("end", 1), ("add", 2)):
            fail_at = loads + number + (announced - 1) * buckets
            twin = Twin(update_in_backward=True, gradient_accumulation_steps=announced, fail_at=[fail_at])
            if announced == 2:
                twin.add(1, 0)
                twin.pipeline.gradients.end_micro_step()
            twin.expect_update()
            with pytest.raises(OSError, match="failed as asked"):
                add_and_update(twin, meet)
            twin.check_at_rest()
            twin.pipeline.gradients.drop()
            states = [StateAccess(twin.pipeline).local_states(i) for i in (0, 1)]
            for i in (0, 1):
                updated = any(states[i]["exp_avg"])
                assert twin.pipeline.counts.steps[i] == updated
            assert any(twin.pipeline.counts.steps) == bool(number)
            twin.naive.states = [[state[n].copy() for n in STATES] for state in states]
            twin.naive.steps = [int(n) for n in twin.pipeline.counts.steps]
            twin.naive.sums = [None, None]
            for _ in range(2):
                for _ in range(announced):
                    twin.expect_update()
                    twin.add(1, 0)
                    twin.pipeline.gradients.end_micro_step()
                twin.update_by_what_was_added()
            twin.end()


def an_error_that_is_there_before_anyone_looks():
    """Is an error all the same."""
    loads, buckets = count_of_loads(), len(Twin().pipeline.buckets.all)
    for number in (0, buckets + 1):
        twin = Twin(fail_at=[loads + number])
        twin.add(1, 0)
        if number >= buckets:
            twin.update()
        twin.pipeline.buckets.worker.submit(lambda: None).exception()  # all that was asked for has ended
        with pytest.raises(OSError, match="failed as asked"):
            twin.update()
        twin.pipeline.gradients.drop()
        twin.check_at_rest()


def steps_that_are_traced():
    """A copy that somebody watches is waited for likewise, and the file holds what was done inside and nothing else."""
    for options in ({}, DELAYED):
        twin = Twin(**options)
        n_buckets = len(twin.pipeline.buckets.all)
        twin.step(1, 0)
        twin.step(0, 1)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "step.json")
            with twin.subject.engine.trace(file):
                twin.step(1, 0)
                if options:
                    twin.pipeline.last_step.finish()
                twin.read(0, 1)
            lanes = Counter(event.get("cat") for event in json.loads(file.read_text())["traceEvents"])
        assert [lanes[lane] for lane in (TO_HOST, TO_DEVICE)] == [n_buckets] * 2
        assert lanes[UPDATE] == (n_buckets if not options else 2 * n_buckets)  # what was held back is rounded
        twin.check()
        twin.check_at_rest()


def a_gradient_that_is_lost():
    """Is an error before anything changes, on whatever way it is met."""
    loads = count_of_loads()
    last = len(Twin().pipeline.buckets.all) - 1
    for number in (0, 1, last):
        for meet, options in (
            ("step", {}),
            ("step", {"gradient_clipping": 0.5}),
            ("add", {}),
            ("add", {"schedule": "serial", "gradient_accumulation_steps": 2}),
            ("drop", {}),
        ):
            twin = Twin(fail_at=[loads + number], **options)
            failed = 0
            try:
                twin.add(1, 0)
                if meet == "add":
                    twin.add(0, 1)
                if meet != "drop":
                    twin.update()
            except OSError:
                failed = 1
            assert failed == (meet != "drop"), f"copy {number} failed and {meet} said nothing"
            twin.pipeline.gradients.drop()
            twin.check_at_rest()
            twin.naive.sums = [None, None]
            twin.check()
            twin.step(0, 1)
            twin.end()


def count_of_loads():
    return Twin().device._copies


def update_and_call(twin, call, last):
    twin.update()
    call(twin, last)


def a_parameter_that_does_not_arrive():
    """Is an error of the next call of any kind; all states are updated, and later updates go on from there."""
    calls = {
        "finish": lambda twin, last: twin.pipeline.last_step.finish(),
        "step": lambda twin, last: twin.update(),
        "add a gradient": lambda twin, last: twin.give(0, twin.draw(0)),
        "add a parameter": lambda twin, last: twin.pipeline.add_parameters(
            [ParamSpec("new", 3, BFLOAT16)], [FakeTensor(np.ones(3, BFLOAT16.numpy))]
        ),
        "start over": lambda twin, last: twin.pipeline.start_over(),
        "end a micro-step": lambda twin, last: twin.pipeline.gradients.end_micro_step(),
        "read states": lambda twin, last: StateAccess(twin.pipeline).states(0),
        "read a parameter": lambda twin, last: twin.pipeline.parameters.await_param(last),
        "drop": lambda twin, last: (twin.pipeline.gradients.drop(), twin.pipeline.last_step.finish()),
        "serial": None,
    }
    loads, buckets = count_of_loads(), len(Twin().pipeline.buckets.all)
    for name, call in calls.items():
        for number in (0, 1, buckets - 1) if name == "finish" else (1,):
            twin = Twin(fail_at=[loads + buckets + number], schedule="overlap" if call else "serial")
            twin.add(1, 0)
            order = list(reversed(twin.pipeline.arrivals.order_of_arrival()))
            before = [tensor.memory.copy() for tensor in twin.tensors]
            with pytest.raises(OSError, match="failed as asked"):
                update_and_call(twin, call, order[-1].layout.pieces[0].param)
            twin.check_at_rest()
            # What had left arrives, whatever is done with the staging that it went through.
            for free in [*blocks_of(None)._free.values()]:
                for block in [*free]:
                    block.memory[:] = 0xFF
            twin.device.synchronize()
            twin.pipeline.last_step.finish()  # it is said once
            twin.naive.step(1.0)
            for i in (0, 1):
                twin.check_states(i, held_states(twin.pipeline, i))
            begun = number + (call is not None)  # the next one was asked for before the failure was seen
            for place, bucket in enumerate(order):
                for piece in bucket.layout.pieces if place != number else ():
                    run = slice(piece.start, piece.start + piece.numel)
                    expected = (twin.naive.params() if place <= begun else before)[piece.param][run]
                    got = twin.tensors[piece.param].memory[run]
                    assert_same_bits(f"{name}: bucket {bucket.layout.index}", got, expected)
            for _ in range(2):
                twin.step(1, 0)
            twin.end()


def a_parameter_that_is_lost_and_has_no_gradient_next():
    """Is sent with the next step, whose gradient another parameter of its bucket has."""
    loads = Twin(reduce_bucket_size=1000).device._copies
    twin = Twin(reduce_bucket_size=1000, fail_at=[loads + 1])
    twin.step(1, 0)
    with pytest.raises(OSError, match="failed as asked"):
        twin.pipeline.last_step.finish()
    assert twin.pipeline.last_step.stale == {0, 1}
    twin.add(1)
    twin.update_by_what_was_added()
    twin.end()


def a_delayed_parameter_that_does_not_arrive():
    """Is sent again; the states of the step that it was lost in are updated, or as they were."""
    for number in (0, 1):
        twin = Twin(**DELAYED)
        twin.step(1, 0)
        twin.step(0, 1)
        twin.add(1, 0)
        twin.device.fail_after(number)
        with pytest.raises(OSError, match="failed as asked"):
            update_and_call(twin, lambda twin, _: twin.pipeline.last_step.finish(), None)
        twin.device.fail_after(None)
        twin.check_at_rest()
        twin.follow_states()
        twin.end_flushed()


def an_interrupt():
    """Between two buckets, in one, or when gradients are looked at: what was asked for ends first."""

    class Interrupt(BaseException):
        pass

    for owner, name in (("updates", "_await_arrival"), ("updates", "_run"), ("reduction", "add_squares")):
        twin = Twin(gradient_clipping=0.5)
        twin.add(1, 0)
        part = getattr(twin.pipeline, owner)

        def interrupt(*args, part=part, name=name, **kwargs):
            delattr(part, name)  # once
            raise Interrupt

        setattr(part, name, interrupt)
        with pytest.raises(Interrupt):
            update_and_call(twin, lambda twin, _: twin.pipeline.last_step.finish(), None)
        twin.pipeline.gradients.drop()
        twin.check_at_rest()
        twin.follow_states()
        twin.flush()  # sends the parameters that the update did not
        twin.check()
        for _ in range(2):
            twin.step(1, 0)
        twin.end()


def states_that_are_kept_elsewhere():
    """Each bucket is loaded as its last commit left it, in the order that was announced, and every update is committed;
    a load that was announced and left out is not used after a change."""
    for fields in ({}, {"schedule": "serial"}, DELAYED, {"update_in_backward": True}):
        with late_stores.late():
            twin = Twin(**fields)
        store, step = twin.pipeline.buckets.store, twin.early_step if "update_in_backward" in fields else twin.step
        for _ in range(3):
            step(1, 0)
        twin.pipeline.last_step.finish()
        if fields is DELAYED:
            twin.flush()
        twin.check()
        assert store.unforeseen == 0
        assert store.asked >= 6 * len(twin.pipeline.buckets.all)
        store.expect(bucket.layout.index for bucket in twin.pipeline.buckets.all)
        store.read(0)  # the thread has come so far
        StateAccess(twin.pipeline).set_states(1, {"exp_avg": np.full(100, 7, np.float32)})
        twin.naive.states[1][1][:] = 7
        step(1, 0)
        twin.pipeline.last_step.finish()
        if fields is DELAYED:
            twin.flush()
        twin.check()


def states_that_are_kept_on_disk():
    """Each bucket is loaded as its last commit left it, and every update is committed, whenever transfers end."""
    on_disk = {"offload_optimizer": "nvme", "nvme_path": tempfile.gettempdir(), "nvme_host_bytes": 0}
    for fields in ({}, {"schedule": "serial"}, DELAYED, {"update_in_backward": True}):
        for order in ("late", "at once"):
            with scripted(order) as script:
                twin = Twin(**fields, **on_disk)
                step = twin.early_step if "update_in_backward" in fields else twin.step
                for _ in range(3):
                    step(1, 0)
                twin.pipeline.last_step.finish()
                StateAccess(twin.pipeline).set_states(1, {"exp_avg": np.full(100, 7, np.float32)})
                twin.naive.states[1][1][:] = 7
                step(1, 0)
                twin.pipeline.last_step.finish()
                if fields is DELAYED:
                    twin.flush()
                twin.check()
                twin.pipeline.buckets.close()
                assert not script.pending


def matrices_that_the_device_computes_with():
    """One bucket's are computed with while another's are on their way, and all of their memory comes back."""

    def steps(rank=None, **fields):
        twin = Twin((40, 100, 36), rank=rank, hyper=MuonHyper(1e-2), **fields)
        for params in ([2, 1, 0], [0, 2], [2, 1, 0]):
            twin.step(*params)
        twin.flush()
        for i, expected in enumerate(twin.naive.params()):
            assert_same_bits(f"parameter {i}", twin.tensors[i].memory, expected)
        twin.check_at_rest()
        buckets = twin.pipeline.buckets
        if buckets.directions is not None:
            assert len(buckets.directions._free) == buckets.terms.direction_slots
        return twin

    for fields in ({}, {"schedule": "serial"}, DELAYED):
        steps(**fields).check()
    on_ranks(steps)


def an_interrupt_after_a_wait():
    """A parameter that has arrived is waited for again."""

    class Interrupt(BaseException):
        pass

    twin = Twin()
    twin.step(1, 0)
    publication = twin.pipeline.buckets.all[0].publication

    def interrupt():
        BucketPublication.arrive(publication)
        raise Interrupt

    publication.arrive = interrupt
    with pytest.raises(Interrupt):
        twin.pipeline.last_step.finish()
    del publication.arrive
    twin.pipeline.last_step.finish()
    twin.check()
    twin.check_at_rest()


def an_event_that_its_reader_brings_about():
    done = []
    Waiting(lambda: done.append(1)).order()
    Waiting(lambda: done.append(2)).wait()
    assert done == [1, 2]


def on_ranks(body, world_size=2):
    return run_ranks(world_size, body)


def ranks():
    """Several buckets on their way, each rank with gradients that others lack; no bucket waits for a finish."""

    def body(rank, options):
        twin = Twin(rank=rank, **options)
        n_ranks = rank.world_size
        for missing in ([()] * n_ranks, [(0,), ()], [(1,), (1,)], [(), (0, 1)], [()] * n_ranks):
            for _ in range(twin.pipeline.config.gradient_accumulation_steps):
                twin.expect_update()
                for i in (1, 0):
                    drawn = [twin.draw(i) for _ in range(n_ranks)]
                    drawn = [0 * d if i in absent else d for d, absent in zip(drawn, missing, strict=True)]
                    if i not in missing[rank.rank]:
                        twin.give(i, drawn[rank.rank])
                    if any(i not in absent for absent in missing):
                        total = drawn[0].astype(np.float32)
                        for d in drawn[1:]:
                            total = total + d.astype(np.float32)
                        twin.naive.add_gradient(i, total / np.float32(n_ranks))
                twin.pipeline.gradients.end_micro_step()
            twin.update_by_what_was_added()
        if options.get("schedule") == "delayed":
            twin.flush()
        twin.pipeline.last_step.finish()
        twin.check_at_rest()
        for i in (0, 1):
            assert_same_bits(f"parameter {i}", twin.tensors[i].memory, twin.naive.params()[i])
            for start, views in StateAccess(twin.pipeline).states(i):
                for name, view in views.items():
                    expected = twin.naive.states[i][STATES.index(name)][start : start + view.size]
                    assert_same_bits(f"{name} of parameter {i}", view, expected)

    accumulating = {"gradient_accumulation_steps": 2}
    early = {"update_in_backward": True}
    for options in (
        {},
        {"gradient_clipping": 0.5},
        accumulating,
        {**accumulating, "reduce_bucket_size": 1000},
        DELAYED,
        early,
        {**early, **accumulating},
    ):
        on_ranks(lambda rank, options=options: body(rank, options))


def what_ranks_emit():
    """Only where all of them would, and what one of them recalls all do."""

    def body(rank, late, act):
        twin = Twin(rank=rank, update_in_backward=True, gradient_clipping=1e3)
        both = rank.world_size
        for i in range(4):
            twin.expect_update()
            for param in (1, 0):
                drawn = [twin.draw(param) for _ in range(both)]
                if i == 1 and param == 0:  # its buckets are not full on rank 1
                    drawn[1] = 0 * drawn[1]
                twin.naive.add_gradient(param, (drawn[0].astype(np.float32) + drawn[1].astype(np.float32)) / 2)
                if drawn[rank.rank].any():
                    twin.give(param, drawn[rank.rank])
                if rank.rank not in late:
                    twin.go_on()
            if i == 2:
                act(twin, rank.rank)
            twin.update_by_what_was_added()
            twin.pipeline.last_step.finish()
            for param in (0, 1):
                assert_same_bits(f"parameter {param}", twin.tensors[param].memory, twin.naive.params()[param])
        twin.check_at_rest()

    def another_micro_step(twin, rank):
        twin.pipeline.gradients.end_micro_step()
        twin.pipeline.gradients.end_micro_step()

    def another_gradient(twin, rank):
        drawn = [twin.draw(0) for _ in range(2)]
        twin.naive.add_gradient(0, (drawn[0].astype(np.float32) + drawn[1].astype(np.float32)) / 2)
        twin.give(0, drawn[rank])

    def changed(twin, rank):
        if rank:
            StateAccess(twin.pipeline).adopt(1, FakeTensor(twin.naive.params()[1]))

    def read(twin, rank):
        with pytest.raises(StateError, match="is read between"):
            twin.pipeline.parameters.await_param(0)

    for late in ((), (0,)):
        for act in (lambda twin, rank: None, another_micro_step, another_gradient, changed, read):
            on_ranks(lambda rank, late=late, act=act: body(rank, late, act))


def another_micro_step_when_states_have_been_updated():
    """Is an error on every rank before they meet for it."""

    def body(rank):
        twin = Twin(rank=rank, update_in_backward=True)
        twin.expect_update()
        for i in (1, 0):
            twin.give(i, twin.draw(i))
            twin.go_on()
        twin.pipeline.gradients.end_micro_step()
        with pytest.raises(StateError, match="its gradient has been used"):
            twin.pipeline.gradients.end_micro_step()
        twin.update()
        twin.pipeline.last_step.finish()
        twin.check_at_rest()

    on_ranks(body)


def ranks_start_from_rank_0():
    def body(rank):
        twin = Twin(rank=rank)
        other = FakeTensor(np.full(40, rank.rank + 1, np.float32))
        tensor = FakeTensor(other.memory.astype(BFLOAT16.numpy))
        twin.pipeline.add_parameters([ParamSpec("new", 40, BFLOAT16)], [other])
        for _, views in StateAccess(twin.pipeline).states(2):
            assert_same_bits("master", views["master"], np.ones_like(views["master"]))
        assert (other.memory == 1).all(), tensor

    on_ranks(body)


def ranks_that_differ_and_then_agree():
    def body(rank):
        twin = Twin(rank=rank)
        tensors = [FakeTensor(np.ones(40, BFLOAT16.numpy))]
        with pytest.raises(ParameterError):
            twin.pipeline.add_parameters([ParamSpec(f"of rank {rank.rank}", 40, BFLOAT16)], tensors)
        twin.pipeline.add_parameters([ParamSpec("new", 40, BFLOAT16)], tensors)

    on_ranks(body)


def a_rank_whose_copy_fails():
    """Says so itself; the others hear that a rank was lost, and nobody hangs."""
    loads = on_ranks(lambda rank: Twin(rank=rank).device._copies)[1]
    for number in (0, 2, 6, 9):
        told = []

        def body(rank, told=told, number=number):
            twin = Twin(rank=rank, fail_at=[loads + number] if rank.rank else [])
            try:
                for i in (1, 0):
                    twin.give(i, twin.draw(i))
                twin.update()
                twin.pipeline.last_step.finish()
                rank.sum_integers(np.zeros(1, np.int64), "the end")
            except CollectiveError:
                twin.pipeline.gradients.drop()
                twin.check_at_rest()
                told.append(rank.rank)

        with pytest.raises(OSError, match="failed as asked"):
            on_ranks(body)
        assert told == [0]


def an_update_that_fails_on_the_device():
    """It is made again; what other buckets' updates have changed is changed once."""
    for fields in ({}, DELAYED):
        for failing in range(3):
            twin = Twin(**fields)
            twin.step(1, 0)
            twin.pipeline.last_step.finish()
            twin.device.queue().fail_after(failing)
            twin.step(1, 0)
            with suppress(OSError):
                twin.pipeline.last_step.finish()
            twin.flush()
            twin.check()


def a_copy_that_fails_beside_an_update_on_the_device():
    """The update on the device has been made, and is not made again."""
    for failing in range(3):
        twin = Twin(device_states_bytes=3 * 4096, reduce_bucket_size=48)
        twin.step(1, 0)
        twin.pipeline.last_step.finish()
        twin.expect_update()
        twin.add(1, 0)
        twin.pipeline.gradients.end_micro_step()
        twin.pipeline.gradients.collect()
        twin.device.fail_after(failing)
        twin.update()
        twin.naive.step(1.0)
        with suppress(OSError):
            twin.pipeline.last_step.finish()
        twin.device.fail_after(None)
        twin.flush()
        twin.check()


def a_release_of_states_on_the_device():
    twin = Twin()
    twin.step(1, 0)
    twin.flush()
    parameters, lock = twin.pipeline.parameters, twin.pipeline.state_lock
    before = [held_states(twin.pipeline, i) for i in range(2)]
    lock.change("release", lambda: parameters.release("released", parameters.copies_of_states()))
    for i, states in enumerate(before):
        for name, values in held_states(twin.pipeline, i).items():
            assert_same_bits(name, values, states[name])
    lock.change("restore", lambda: (parameters.restore_states(), parameters.restore(twin.tensors)))
    twin.flush()
    twin.step(1, 0)
    twin.flush()
    twin.check()


def on_the_device(scenario):
    """The scenario, with the states in the device's memory."""

    def played():
        with late_stores.late("device"):
            scenario()

    played.__name__ = f"{scenario.__name__}, on the device"
    return played


DEVICE_SCENARIOS = [
    on_the_device(scenario)
    for scenario in (
        *(steps_and_finish, micro_steps, states_are_read, all_states_are_replaced, gradients_are_read_and_written),
        *(all_parameters_are_read, updates_in_backward, delayed_updates, matrices_that_the_device_computes_with, ranks),
        *(an_update_that_fails_on_the_device, a_release_of_states_on_the_device),
    )
] + [a_copy_that_fails_beside_an_update_on_the_device]
SCENARIOS = [
    a_step_that_is_announced_twice,
    what_was_emitted_is_joined,
    an_error_that_is_there_before_anyone_looks,
    states_that_are_kept_elsewhere,
    steps_and_finish,
    steps_without_a_pause,
    micro_steps,
    serial,
    a_layer_reads_its_parameters,
    a_reader_on_any_stream_reads_its_parameters,
    all_parameters_are_read,
    states_are_read,
    local_states_are_read,
    a_master_is_loaded,
    a_change_is_adopted,
    states_are_replaced,
    all_states_are_replaced,
    runs_are_read,
    parameters_are_added,
    gradients_are_dropped,
    an_end_that_writes_what_is_held_back,
    delayed_updates,
    delayed_states_are_read,
    gradients_are_dropped_while_a_delayed_update_is_on_its_way,
    updates_in_backward,
    gradients_pass_through_few_slots,
    memory_that_is_given_back_while_copies_run,
    what_was_emitted_is_taken_back,
    gradients_are_read_and_written,
    a_parameter_that_is_emitted_and_does_not_arrive,
    steps_that_are_traced,
    a_gradient_that_is_lost,
    a_parameter_that_does_not_arrive,
    a_parameter_that_is_lost_and_has_no_gradient_next,
    a_delayed_parameter_that_does_not_arrive,
    an_interrupt,
    states_that_are_kept_on_disk,
    matrices_that_the_device_computes_with,
    an_interrupt_after_a_wait,
    an_event_that_its_reader_brings_about,
    ranks,
    another_micro_step_when_states_have_been_updated,
    ranks_start_from_rank_0,
    ranks_that_differ_and_then_agree,
    a_rank_whose_copy_fails,
    what_ranks_emit,
    a_gradient_that_is_lost_while_others_update,
    a_parameter_that_is_flushed_and_does_not_arrive,
    *live_models.SCENARIOS,
    *DEVICE_SCENARIOS,
]
ON_DISK = [*shards_on_disk.SCENARIOS, *rings.SCENARIOS]
"""Scenarios of the disk alone, which ``test_ring.py`` plays with the sound core.

A mutant is shown to these and then to ``SCENARIOS``, each list in its order: scenarios that notice much, or take little
time, come first.
"""


ELSEWHERE = {
    "__main__",
    "checkpoint.checkpoints",
    "checkpoint.loading",
    "support.checkpoint_folder",
    "checkpoint.reader",
    "checkpoint.shard_writer",
    "step_log.files",
    "step_log.trackers",
    "support.threads",
}
"""Tested by killed processes and full disks, and by writers that are stopped between any two blocks
(``test_checkpoint_async.py``, ``test_checkpoint_crashes.py``, ``test_step_log.py``), and by real signals
(``test_signals.py``)."""
CORE_WAITS = [
    wait
    for module in modules_of("offload_core")
    if module.removeprefix("offload_core.") not in ELSEWHERE
    for wait in waits_of(module)
    if wait.function != "uninterrupted"  # its waits are interrupted, in test_interrupts.py
]
_CHANGED = "self._versions[extent.bucket] += 1\n        self._begun.pop(extent.bucket, None)"
CORE_CHANGES = [
    Change(f"offload_core.{module}", function, old, new)
    for module, function, old, new in [
        ("step.pipeline", "Pipeline.step", "self.device.mark()", "self.reduction.last"),
        ("step.update", "Updates._await_arrival", "bucket.publication.arrived = ", ""),
        ("step.update", "Updates._await_arrival", "bucket.release()", "pass"),
        ("step.update", "Updates.start_ahead", "bucket.updated = task", "pass"),
        ("step.update", "Updates.start_ahead", "bucket.give(", "(lambda task: None)("),
        ("step.update", "Updates.finish_publications", "self.land()", "pass"),
        ("step.update", "Updates.finish_states", "bucket.take()", "pass"),
        ("step.update", "Updates._send", "if len(self._travelling) == self._buckets.worker.depth:", "if False:"),
        (
            "step.update",
            "Updates._send",
            "bucket.publication.written = self._buckets.worker.submit",
            "self._buckets.worker.submit",
        ),
        ("step.update", "Updates.start", "self._buckets.store.expect(", "iter("),
        ("step.update", "Updates.start_ahead", "self._buckets.store.expect(", "iter("),
        ("step.update", "Updates.send_early", "self._buckets.store.expect(", "iter("),
        ("step.update", "Updates._run", "store.commit(states)", "pass"),
        ("step.update", "Updates._run", "bucket.release_direction()", "pass"),
        ("testing.late_store", "LateStore._put", "np.copyto(to, source)", "pass"),
        ("testing.late_store", "LateStore.commit", "self._committed[block.bucket] = ", "_ = "),
        ("testing.late_store", "LateStore._fetch", "self._settle(bucket)", "pass"),
        ("testing.late_store", "LateStore.part", "self._settle(extent.bucket)", "pass"),
        ("testing.late_store", "LateStore.put", _CHANGED, "pass"),
        ("testing.late_store", "LateStore._begin", "tuple(self._expected), AHEAD", "sorted(self._expected), AHEAD"),
        ("step.buckets", "LocalBuckets.make_room", "if len(self.in_staging) == self.worker.depth:", "if 0:"),
        ("step.reduction", "Reduction._start", "self._buckets.in_staging.append((bucket, landed))", "pass"),
        ("step.reduction", "Reduction._start", "bucket.give(", "(lambda task: None)("),
        ("step.executor", "Staged.receive", "bucket.release()", "pass"),
        ("step.update", "Updates._await_arrival", "bucket.gradient.forget(GradientEvent.END)", "pass"),
        ("step.update", "Updates.start", "if bucket.changed is None:", "if True:"),
        ("step.local_bucket", "BucketPublication.arrive", "self.written = None", "pass"),
        ("step.gradient_memory", "_BufferSlot.held", "self.holder.gradient.buffer.owner is buffer", "False"),
        (
            "step.update",
            "Updates.send_early",
            "bucket.finish_update()\n                bucket.gradient.give_back()",
            "bucket.finish_update()",
        ),
        ("step.local_bucket", "BucketGradient.forget", "self.give_back()", "pass"),
        ("step.buckets", "LocalBuckets.claim", "bucket.take()", "pass"),
        ("step.buckets", "LocalBuckets.recover", "bucket.release()", "pass"),
        ("support.worker", "Background._run", "if self._failure is not None:", "if False:"),
        ("support.worker", "Background.recover", "self._failure = None", "pass"),
        ("stage3.live_params", "LiveParams._gather", "AfterAll([updated, ", "AfterAll(["),
        ("stage3.live_params", "LiveParams.acquire", "self.release_idle()", "pass"),
        ("states.on_disk", "StatesOnDisk.commit", "self._ring.give_back(block.bucket)", "pass"),
        ("states.ring", "Ring.give_back", "self._do(partial(self._slots.give_back, bucket))", "pass"),
        ("states.slots", "Slots._end", "self._begin_writing(block)", "pass"),
        ("states.slots", "Slots.lend", "self._raise_failed()", "pass"),
        ("states.slots", "Slots.lend", "self._drop_lent()", "pass"),
        ("states.slots", "Slots.lend", "self._begin_writing(block)", "pass"),
        ("states.slots", "Slots.lend", "block.on(CE.LEND)", "pass"),
        ("states.slots", "Slots.lend", "self._expected.popleft() != bucket", "False"),
        ("states.slots", "Slots.lend", "self._followers[self._last] = bucket", "pass"),
        ("states.slots", "Slots.lend", "self._last = bucket\n        self._read_ahead()", "self._last = bucket"),
        ("states.slots", "Slots.expect", "self._read_ahead()", "pass"),
        ("states.slots", "Slots.give_back", "block.on(CE.GIVE_BACK)", "pass"),
        ("states.slots", "Slots.give_back", "block.on_disk.version += 1", "pass"),
        ("states.slots", "Slots.give_back", "self._begin_writing(block)", "pass"),
        ("states.slots", "Slots._readable", "block.state is C.LENT or ", ""),
        ("states.slots", "Slots._in_slot", "block.arriving.error() is None", "True"),
        ("states.slots", "Slots.read", "if self.on_disk[bucket].saved:", "if False:"),
        ("states.slots", "Slots.copy", "if self.on_disk[bucket].saved:", "if False:"),
        ("states.slots", "Slots.write", "self._drop_lent()", "pass"),
        ("states.slots", "Slots.write", "with suppress(DiskError)", "with suppress()"),
        ("states.slots", "Slots.write", "block.on(CE.CHANGE)", "pass"),
        ("states.slots", "Slots.write", "block.failed = None", "pass"),
        ("states.slots", "Slots.write", "block.on_disk.version += 1", "pass"),
        ("states.slots", "Slots._fetch", "slot[: there.layout.n_bytes] = 0", "pass"),
        ("states.slots", "Slots._slot", "soon.get(block.bucket, 0), ", ""),
        ("states.slots", "Slots._slot", "self._begin_writing(block)", "pass"),
        ("states.slots", "Slots._drop_lent", "self.drop(block)", "pass"),
        ("states.slots", "Slots.drop", "self._free.append(block.slot)", "pass"),
        ("states.slots", "Slots._await_left", "raise error", "pass"),
        ("states.slots", "Slots._await_left", "block.on(CE.SAVE)", "pass"),
        ("states.slots", "Slots._await_left", "block.on_disk.saved = True", "pass"),
        ("states.slots", "Slots._begin_writing", " and block.leaving is None", ""),
        ("states.slots", "Slots._tell", "self._submit(", "repr("),
        ("states.slots", "Slots._after_write", "block.failed = error", "pass"),
        ("states.slots", "Slots._after_write", "self._read_ahead()", "pass"),
        ("states.slots", "Slots._raise_failed", "block.failed = None", "pass"),
        ("states.slots", "Slots._raise_failed", "self._begin_writing(block)", "pass"),
        ("states.slots", "Slots._raise_failed", "raise error", "pass"),
        ("states.slots", "Slots._spare", "is not C.CLEAN", "is C.NEWER"),
        ("states.slots", "Slots._spare", "is not C.CLEAN", "is C.LENT"),
        ("states.slots", "Slots._spare", " or block.bucket in upcoming", ""),
        ("states.slots", "Slots._spare", "block.arriving is None or block.arriving.done()", "True"),
        ("states.ring", "Ring.begin_parameter", "aligned(span.n_bytes)", "span.n_bytes"),
        ("states.ring", "Ring._bytes", "whole = around(span)", "whole = span"),
        ("states.block_layout", "BlockLayout._next", "aligned(n_bytes)", "n_bytes"),
        ("disk.shards", "ReadAhead._take", "entry.version != part.version", "False"),
        ("disk.shards", "ReadAhead._take", "entry.version is None or ", ""),
        ("disk.shards", "ReadAhead._take", " or entry.failed", ""),
        ("disk.shards", "ReadAhead._take", "entry.taken = True", "pass"),
        ("disk.shards", "ReadAhead._take", "self._expected.remove(part)", "pass"),
        ("disk.shards", "ReadAhead._read", "_Entry(slot, version, arriving)", "_Entry(slot, part.version, arriving)"),
        ("disk.shards", "ReadAhead._room", "if not entry.taken:", "if True:"),
        ("disk.shards", "ReadAhead._keep", " and slot.size == self._n_bytes", ""),
        ("disk.shards", "ReadAhead._keep", "self._free.append(slot)", "pass"),
        ("disk.shards", "ReadAhead._drop", "self._begin()", "pass"),
        ("disk.shards", "ReadAhead._expect", "self._begin()", "pass"),
        ("disk.shards", "ReadAhead.expect", "if part.version is not None:", "if True:"),
        ("disk.shards", "ReadAhead.take", "self.give_back(part)", "pass"),
        ("disk.shards", "ReadAhead.close", "self._do(self._await_all)", "pass"),
        ("disk.shards", "OnDisk.give_back", "self._ahead.give_back(self._parts[bucket.shard_start])", "pass"),
        ("disk.space", "DiskSpace.write", "self.version = (self.version or 0) + 1", "pass"),
        ("disk.scratch", "Transfer.error", "in self._tasks]", "in self._tasks[:1]]"),
        ("disk.scratch", "Transfer.done", "all(", "any("),
        ("disk.scratch", "_File.move", "rest[whole:], at + whole", "rest[whole:], at"),
        ("disk.scratch", "_File.move", "rest[whole:], at + whole", "rest[:0], at"),
        ("disk.scratch", "ScratchFiles._move", "unit // n * PIECE_BYTES + inside", "unit // n * PIECE_BYTES"),
        ("disk.scratch", "ScratchFiles._move", "PIECE_BYTES - inside", "PIECE_BYTES"),
        ("disk.scratch", "ScratchFiles._move", "next(ended) == last", "next(ended) == 1"),
        ("disk.scratch", "ScratchFiles._share", "-(-n_bytes // (PIECE_BYTES * n))", "(n_bytes // (PIECE_BYTES * n))"),
        ("disk.scratch", "ScratchFiles.close", "thread.close()", "pass"),
    ]
]


_STORE = "offload_core.states.on_device.StatesOnDevice"
_EXECUTOR = "offload_core.step.on_device.OnDevice"
_FAKE = "offload_core.testing.fake_device.FakeDevice"
UNNOTICED = {
    "offload_core.states.slots.Slots.await_all: transfer.error()": "the end of scratch files waits for the same",
    "offload_core.states.slots.Slots._end: self._await_arrived(block)": "nothing else gets slots that were outgrown",
    f"{_STORE}.restore: self._queue.to_device(block.memory, memory).wait()": "the queue's kernels come after it",
    f"{_EXECUTOR}._exchange: self._queue.mark().order()": "this device's memory is zero at once",
    f"{_EXECUTOR}.allocate_sums: self._queue.mark().wait()": "for the same reason",
    f"{_FAKE}.synchronize: self._lanes['updates'].submit(self._queue.forget_failure).result()": "calls come later",
}
"""Mutants that no scenario notices, and why."""
FOUND = by_name([*CORE_WAITS, *CORE_CHANGES])
SEARCH = Search(FOUND, {scenario.__name__: scenario for scenario in (*ON_DISK, *SCENARIOS)})


def test_no_mutant_was_dropped():
    """A wait that loses its mark would take its mutants along without a word."""
    assert len(FOUND) == 254, DROPPED
    assert UNNOTICED.keys() <= FOUND.keys()
    assert len(SCENARIOS) == 66
    assert len(ON_DISK) == 29
    assert {f"offload_core.{name}" for name in ELSEWHERE} <= {"offload_core.__main__", *modules_of("offload_core")}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_function_with_a_waits_name_says_that_it_waits(package):
    """So a mark that is lost shows, and a function that is renamed or moved takes its own along."""
    modules = [module for module in modules_of(package) if module.removeprefix("offload_core.") not in ELSEWHERE]
    assert [said for module in modules for said in unmarked(module)] == []


@pytest.mark.long("all scenarios together walk the whole table of transitions")
def test_the_sound_core_passes_and_the_scenarios_walk_the_whole_transition_table(monkeypatch):
    Threads().play(monkeypatch)
    walked, on = set(), StateMachine.on

    def recording(life, event):
        walked.add((life.state, event))
        on(life, event)

    monkeypatch.setattr(StateMachine, "on", recording)
    for scenario in SCENARIOS:
        scenario()
    away = Publication.RELEASED  # test_release.py walks there: front ends alone release
    published = {way for way, to in PUBLICATION.items() if away not in (way[0], to)}
    released = {*PUBLICATION} - published
    assert walked - {*HEALTH, *CONTENT} - released == {*GRADIENT, *published, *OWNER}


def test_a_mutant_is_shown_to_the_scenarios_that_reach_its_place_in_their_order():
    """Also to one that reaches it in a thread or a fork. Where none notices, there is none to name."""
    place = "offload_core.device.events.Waiting.wait: self._finish()"
    played = []

    def waits(notices):
        played.append("waits")
        done = []
        Waiting(lambda: done.append(True)).wait()
        if notices and not done:
            played.append("notices")
            raise AssertionError

    def in_a_thread():
        thread = threading.Thread(target=waits, args=(False,))
        thread.start()
        thread.join()

    def in_a_fork():
        played.append("forks")
        if (child := os.fork()) == 0:
            waits(False)
            os._exit(0)
        os.waitpid(child, 0)

    by = {
        "elsewhere": lambda: played.append("elsewhere"),
        "in a thread": in_a_thread,
        "in a fork": in_a_fork,
        "notices": lambda: waits(True),
        "later": lambda: played.append("later"),
    }
    assert Search({place: FOUND[place]}, by).who_notices(place) == "notices"
    assert played == ["elsewhere", "waits", "waits", "forks", "forks", "waits", "waits", "notices"]
    del by["notices"]
    assert Search({place: FOUND[place]}, by).who_notices(place) is None


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [name for name in FOUND if name not in UNNOTICED], ids=str)
def test_a_wait_of_the_core_that_is_taken_out_is_noticed(mutant, monkeypatch):
    Threads().play(monkeypatch)
    assert SEARCH.who_notices(mutant), "nothing notices it"


@pytest.mark.soak
@pytest.mark.parametrize("mutant", UNNOTICED, ids=str)
def test_what_nothing_notices_is_known(mutant, monkeypatch):
    Threads().play(monkeypatch)
    assert SEARCH.who_notices(mutant) is None
